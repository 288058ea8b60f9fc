"""Ranks that share the cores and memory of a node: closed forms, conservation of work, a brute-force fluid play, order of evaluators."""

from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from random_programs import plain_program, random_program, seeds

from moesim.bounds import step_bound
from moesim.engine import run
from moesim.node import busy_seconds
from moesim.paths import step_draws, step_seconds
from moesim.play import play
from moesim.program import COMM, COMPUTE, DATA, REDUCE, Program, Seat, Task, Transfer
from moesim.schedules import Action
from moesim.timeline import breakdown
from moesim.wiring import check

CORE = (("cores", 1.0),)
ONE = (Action(0, "F", 0),)


def compute(seconds, name="k", **fields):
    return Task(name, "gemm", COMPUTE, seconds, uses=CORE, **fields)


def side_by_side(*bodies, cores=1.0, seats=(), **fields):
    """Ranks that each play one body, tied by nothing but the node."""
    shared = {"cores": cores, **fields.pop("shared", {})}
    ranks = range(len(bodies))
    return Program((ONE,) * len(bodies), (0,), tuple((r,) for r in ranks), bodies, peers=len(bodies), shared=shared, seats=seats, **fields)


def using_cores(program, cores, **fields):
    """The same program, its compute tasks on one core each."""
    put = lambda body: tuple(replace(t, uses=CORE if t.stream == COMPUTE else ()) for t in body)  # noqa: E731
    ends = {which: tuple(map(put, getattr(program, which))) for which in ("bodies", "prologue", "epilogue")}
    return replace(program, **ends, shared={"cores": float(cores)}, **fields)


# --- closed forms -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "cores", "times"), [(1, 1, 1), (2, 1, 2), (4, 2, 2), (4, 4, 1), (3, 2, 1.5), (2, 4, 1)])
def test_identical_ranks_share_the_cores_in_equal_parts(ranks, cores, times):
    body = (compute(2.0), compute(3.0))
    played = side_by_side(*[body] * ranks, cores=float(cores))
    one = replace(side_by_side(body, cores=float(cores)), seats=(Seat(0, ranks),))
    for program in (played, one):
        assert run(program).makespan == pytest.approx(5.0 * times, rel=1e-12)
        assert step_seconds([program])[0] == pytest.approx(5.0 * times, rel=1e-12)  # the path knows what the node has to do


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zbv", "interleaved", "dualpipev"])
def test_on_one_core_a_pipeline_takes_the_sum_of_all_its_work(name):
    chunks = {"1f1b": 1, "gpipe": 1}.get(name, 2)
    program = using_cores(plain_program(name, 2, 4, chunks), 1)
    work = sum(task.seconds for row in program.body_index for k in row for task in program.bodies[k])
    timeline = run(program)
    assert timeline.makespan == pytest.approx(work, rel=1e-12)
    assert play(program).makespan < 0.8 * work
    assert step_bound(program) == pytest.approx(work, rel=1e-12)


def test_a_bubble_gives_its_core_away():
    """Two stages of two ranks on two cores: while stage 1 waits for the first microbatch, both cores are stage 0's; then four compute."""
    pipeline = using_cores(plain_program("gpipe", 2, 1), 2, seats=(Seat(0, 2), Seat(0, 2)))
    assert run(pipeline).makespan == pytest.approx(play(pipeline).makespan, rel=1e-12)  # never two stages at once
    longer = using_cores(plain_program("gpipe", 2, 2), 2, seats=(Seat(0, 2), Seat(0, 2)))
    # F0 alone (1 s), F1 beside it (1 s each at half speed: 2 s), the other F of stage 1 (1 s); backward the same of twice the length.
    assert run(longer).makespan == pytest.approx(4.0 + 8.0, rel=1e-12)
    assert play(longer).makespan == pytest.approx(9.0)


def test_waiting_takes_nothing():
    """A rank that waits for a transfer, and the transfer of zero cost to cores, leave the other its core."""
    stage = (compute(1.0, input=0, output=0),)
    chain = Program(((Action(0, "F", 0),), (Action(1, "F", 0),)), (0, 1), ((0,), (0,)), (stage,), transfer_forward=Transfer(5.0), shared={"cores": 1.0})
    assert run(chain).makespan == pytest.approx(7.0)


def test_a_collective_beside_compute():
    """Two ranks on two cores: a reduction of half a core each under compute of one core each wants three cores of two. Processor
    sharing: compute gets 3/4 ... until the reduction, which wants no more than it has, ends."""
    body = (compute(4.0), Task("r", "collective", REDUCE, 1.0, uses=(("cores", 0.5),)))
    spans = {s.name: s.end for s in run(side_by_side(body, body, cores=2.0)).spans}
    # Equal cores for each thread: 1/2 each for all four, which is all the reduction wants.
    assert spans == pytest.approx({"r": 1.0, "k": 1.0 + 3.5})
    alone = {s.name: s.end for s in run(side_by_side(body[1:], body[1:], cores=2.0)).spans}
    assert alone == pytest.approx({"r": 1.0})


def test_four_ranks_in_a_collective_go_at_the_speed_it_was_measured_at():
    """All members run at once in a benchmark: 4 ranks on 2 cores take half a core each, and lose nothing."""
    meet = Task("a", "collective", COMM, 3.0, uses=(("cores", 0.5),), group=0)
    program = side_by_side(*[(compute(1.0), replace(meet, deps=(0,)))] * 4, cores=2.0)
    assert run(program).makespan == pytest.approx(2.0 + 3.0)


def test_a_group_goes_at_its_slowest_member_on_the_node():
    meet = Task("a", "collective", COMM, 2.0, uses=(("cores", 0.5),), group=0)
    busy = (compute(10.0), meet)
    program = side_by_side(busy, (meet,), cores=1.0)
    spans = {(s.rank, s.name): s.end for s in run(program).spans}
    # Three threads want one core: a third each, so the collective runs at 2/3 of its speed.
    assert spans == pytest.approx({(0, "a"): 3.0, (1, "a"): 3.0, (0, "k"): 3.0 + 9.0})


def test_a_transfer_takes_both_ends():
    """One core a rank, each to itself: a send of one core at either end halves the compute beside it at the receiver, too."""
    late = (compute(4.0, input=0, output=0),)
    first, second = Action(0, "F", 0), Action(0, "F", 1)
    order = ((first, second), (Action(1, "F", 0), Action(1, "F", 1)))
    program = Program(order, (0, 1), ((0, 0), (0, 0)), (late,), transfer_forward=Transfer(1.0, CORE), shared={"cores": 2.0}, seats=(Seat(pins=(1, 0)), Seat(pins=(0, 1))))
    spans = {(s.rank, s.name, s.entry): s.end for s in run(program).spans}
    assert spans[0, "send 0F0", "0F0"] == pytest.approx(6.0)  # beside 0F1, from 4 on, at half speed
    assert spans[0, "k", "0F1"] == pytest.approx(9.0)
    assert spans[1, "k", "1F0"] == pytest.approx(11.0)  # 6..9 alone, 9..11 beside the second send, the last second alone
    assert busy_seconds(program, check(program))[0] == pytest.approx(10.0)


def test_pinned_ranks_share_their_own_core_only():
    """Three ranks on two cores: pinned in turn, two of them share one and take twice as long; free, all take 3/2."""
    body = (compute(2.0),)
    seats = (Seat(pins=(1, 0)), Seat(pins=(0, 1)), Seat(pins=(1, 0)))
    assert {(s.rank, s.end) for s in run(side_by_side(body, body, body, cores=2.0, seats=seats)).spans} == {(0, 4.0), (1, 2.0), (2, 4.0)}
    together = replace(side_by_side(body, cores=2.0), seats=(Seat(0, 3, (2, 1)),))
    assert run(together).makespan == pytest.approx(4.0)  # one rank that stands for three goes at the pace of the slowest


def test_memory_is_shared_in_proportion_to_what_is_drawn():
    draw = lambda share: (Task("k", "norm", COMPUTE, 1.0, uses=(("cores", 1.0), ("memory", share))),)  # noqa: E731
    assert run(side_by_side(*[draw(0.4)] * 2, cores=4.0, shared={"memory": 1.0})).makespan == pytest.approx(1.0)
    assert run(side_by_side(*[draw(0.4)] * 4, cores=4.0, shared={"memory": 1.0})).makespan == pytest.approx(1.6)


def test_ranks_of_other_nodes_are_left_alone():
    body = (compute(2.0),)
    program = side_by_side(body, body, body, seats=(Seat(0), Seat(0), Seat(1)))
    assert sorted((s.rank, s.end) for s in run(program).spans) == [(0, 4.0), (1, 4.0), (2, 2.0)]


def test_time_lost_to_sharing_is_contention():
    timeline = run(side_by_side(*[(compute(2.0), compute(1.0))] * 3, cores=1.0))
    assert breakdown(timeline, 1) == pytest.approx({"gemm": 3.0, "contention": 6.0})


def test_more_than_a_node_has_is_refused():
    with pytest.raises(ValueError, match="at most all of a resource"):
        run(side_by_side((Task("k", "gemm", COMPUTE, 1.0, uses=(("cores", 3.0),)),), cores=2.0))


# --- what a played rank stands for --------------------------------------------------------------------------------------------


def shared_program(rng, name=None, cores=None, size=None, peers=(1, 2, 3)):
    """A random program whose tasks use cores and memory of one node or two."""
    program = random_program(rng, name, size=size)
    used = {COMPUTE: lambda: (("cores", 1.0), ("memory", rng.choice((0.0, 0.2, 0.7)))), COMM: lambda: (("cores", 0.5),), REDUCE: lambda: (("cores", 0.25), ("memory", 0.3))}
    put = lambda body: tuple(replace(t, uses=used.get(t.stream, tuple)()) for t in body)  # noqa: E731
    ends = {which: tuple(map(put, getattr(program, which))) for which in ("bodies", "prologue", "epilogue")}
    cores = cores or rng.choice((1.0, 2.0, 4.0))
    seats = tuple(Seat(rng.randint(0, 1), rng.choice(peers)) for _ in range(program.num_ranks))
    send = (("cores", 0.5),)
    return replace(program, **ends, shared={"cores": cores, "memory": 1.0}, seats=seats, transfer_forward=replace(program.transfer_forward, uses=send),
                   transfer_backward=replace(program.transfer_backward, uses=send))


def test_one_rank_for_its_peers_equals_every_rank_played():
    """Identical ranks are as fast together as one that stands for all of them."""
    slower = 0
    for rng in seeds(25):
        peers = rng.choice((2, 3))
        one = shared_program(rng, rng.choice(("1f1b", "gpipe", "interleaved")), rng.choice((1.0, 2.0)))
        one = replace(one, seats=(Seat(0, peers),) * one.num_ranks)
        every = lambda rows: tuple(row for row in rows for _ in range(peers))  # noqa: E731
        full = replace(one, orders=every(one.orders), placement=tuple(r * peers for r in one.placement), body_index=every(one.body_index), prologue=every(one.prologue),
                       gates=every(one.gates), epilogue=every(one.epilogue), seats=(), peers=peers)
        assert run(one).makespan == pytest.approx(run(full).makespan, rel=1e-9)
        assert busy_seconds(one, check(one)) == pytest.approx(busy_seconds(full, check(full)), rel=1e-9)
        slower += run(one).makespan > play(one).makespan * 1.01
    assert slower > 10


# --- against a dumb fluid play ------------------------------------------------------------------------------------------------


def level_rates(wants, capacity):
    """Fair rates by bisection: all rise to one level of their own largest share; who touches a full resource stays there."""
    rate, held = [0.0] * len(wants), {i for i, (take, top, _) in enumerate(wants) if top <= 0}
    for i in held:
        rate[i] = 1.0
    while len(held) < len(wants):
        at = lambda level: [rate[i] if i in held else min(1.0, level / wants[i][1]) for i in range(len(wants))]  # noqa: E731
        load = lambda rates: {n: sum(r * dict(take).get(n, 0.0) for r, (take, _, _) in zip(rates, wants)) for n in capacity}  # noqa: E731
        fits = lambda level: all(load(at(level))[n] <= capacity[n] * (1 + 1e-11) for n in capacity)  # noqa: E731
        low, high = 0.0, max(top for _, top, _ in wants)
        if fits(high):
            return at(high)
        for _ in range(80):
            middle = (low + high) / 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        rates, loads = at(low), load(at(low))
        full = {n for n in capacity if loads[n] >= capacity[n] * (1 - 1e-9)}
        for i in range(len(wants)):
            if i not in held and (rates[i] >= 1.0 or any(n in full and u > 0 for n, u in wants[i][0])):
                held.add(i)
                rate[i] = rates[i]
    return rate


def fluid(bodies, capacity, counts):
    """End of every task of every rank by moving the clock from event to event. Tasks of a stream in order, deps by number."""
    left = {(r, k): t.seconds for r, body in enumerate(bodies) for k, t in enumerate(body)}
    ends, time = {}, 0.0
    while left:
        running = []
        for r, body in enumerate(bodies):
            for lane in (COMPUTE, COMM, DATA, REDUCE):
                head = next((k for k, t in enumerate(body) if t.stream == lane and (r, k) in left), None)
                if head is not None and all((r, d) in ends for d in body[head].deps):
                    running.append((r, head))
        wants = []
        for r, k in running:
            uses = bodies[r][k].uses
            wants.append((tuple((n, counts[r] * u) for n, u in uses), max((u / capacity[n] for n, u in uses), default=0.0), counts[r]))
        rates = level_rates(wants, capacity)
        step = min(left[task] / rate for task, rate in zip(running, rates))
        time += step
        for task, rate in zip(running, rates):
            left[task] -= step * rate
            if left[task] < 1e-9:
                del left[task]
                ends[task] = time
    return ends


def test_random_programs_run_as_the_fluid_play_says():
    for rng in seeds(40):
        capacity = {"cores": rng.choice((1.0, 2.0, 3.0)), "memory": 1.0}
        counts = [rng.choice((1, 1, 2)) for _ in range(rng.randint(2, 4))]
        bodies = []
        for _ in counts:
            tasks = []
            for k in range(rng.randint(3, 7)):
                uses = (("cores", rng.choice((0.25, 0.5, 1.0))), ("memory", rng.choice((0.1, 0.3, 0.6)))) if rng.random() < 0.8 else ()
                tasks.append(Task(f"t{k}", "x", rng.choice((COMPUTE, COMPUTE, COMM, DATA)), rng.uniform(0.5, 2.0), uses=uses, deps=tuple(rng.sample(range(k), min(k, rng.randint(0, 2))))))
            bodies.append(tuple(tasks))
        program = side_by_side(*bodies, cores=capacity["cores"], shared={"memory": 1.0}, seats=tuple(Seat(0, n) for n in counts))
        found = {(s.rank, int(s.name[1:])): s.end for s in run(program).spans}
        expected = fluid(bodies, capacity, counts)
        assert found.keys() == expected.keys()
        for task, end in expected.items():
            assert found[task] == pytest.approx(end, rel=1e-6), (task, counts)


# --- the three evaluators -----------------------------------------------------------------------------------------------------


def test_bound_path_engine_in_this_order():
    slowed = 0
    for rng in seeds(150):
        program = shared_program(rng)
        bound, path, simulated = step_bound(program), step_seconds([program])[0], run(program, spans=False).makespan
        assert bound <= path * (1 + 1e-9) and path <= simulated * (1 + 1e-9)
        assert path >= play(program).makespan * (1 - 1e-12)
        slowed += simulated > play(program).makespan * 1.01
    assert slowed > 60


def test_enough_cores_change_nothing():
    for rng in seeds(25):
        program = shared_program(rng, cores=1000.0, peers=(1,))
        quiet = replace(program, **{which: tuple(tuple(replace(t, uses=t.uses[:1]) for t in body) for body in getattr(program, which)) for which in ("bodies", "prologue", "epilogue")})
        plain = replace(quiet, shared={}, seats=(), **{which: tuple(tuple(replace(t, uses=()) for t in body) for body in getattr(quiet, which)) for which in ("bodies", "prologue", "epilogue")},
                        transfer_forward=replace(quiet.transfer_forward, uses=()), transfer_backward=replace(quiet.transfer_backward, uses=()))
        assert run(quiet).spans == run(plain).spans  # to the last bit: no rank is held back
        tight = replace(quiet, shared={"cores": 12.0 * program.num_ranks, "memory": 1.0})
        assert run(tight).makespan == pytest.approx(play(tight).makespan, abs=1e-9)


def test_just_enough_cores_give_the_path():
    """Coupled ranks (more threads than cores could run) that never compete end as on the longest path."""
    for rng in seeds(10):
        base = plain_program("1f1b", 4, 6, transfer=rng.uniform(0, 1))
        program = using_cores(base, 4)
        program = replace(program, transfer_forward=replace(base.transfer_forward, uses=(("cores", 1e-9),)), transfer_backward=replace(base.transfer_backward, uses=(("cores", 1e-9),)))
        assert run(program).makespan == pytest.approx(play(program).makespan, rel=1e-7)


def test_work_is_conserved():
    """No second of a node holds more core-seconds than it has cores, and while all of a node's cores are wanted none stands idle."""
    for rng in seeds(40):
        program = shared_program(rng)
        assert run(program, spans=False).makespan >= busy_seconds(program, check(program))[0] * (1 - 1e-9)


def test_draws_move_the_work_of_the_node():
    for rng in seeds(10):
        program = shared_program(rng, cores=1.0)
        terms = {term for body in program.bodies for task in body for _, term, _ in task.terms}
        factors = {term: np.array([1.0, 2.0, 0.5]) for term in terms}
        nominal, double, half = step_draws(program, factors)
        assert nominal == pytest.approx(step_seconds([program])[0], rel=1e-12)
        assert half < nominal < double


def test_plays_are_repeatable_and_spans_cost_nothing():
    for rng in seeds(5):
        program = shared_program(rng)
        assert run(program).spans == run(program).spans
        assert run(program, spans=False).makespan == run(program).makespan


def test_a_busy_node_takes_turns_fairly():
    """Equal ranks end together, whatever their number."""
    program = side_by_side(*[(compute(1.0), compute(2.0))] * 5, cores=2.0)
    ends = defaultdict(set)
    for span in run(program).spans:
        ends[span.name].add(round(span.end, 9))
    assert ends["k"] == {2.5, 7.5}
