"""Engine: equal to the longest path where nothing contends; fluid sharing, SMs, co-runs and rendezvous against closed forms."""

import random
from dataclasses import replace

import numpy as np
import pytest
from random_programs import contended, epilogue, plain_program, random_program, seeds

from moesim.bounds import step_bound
from moesim.engine import run
from moesim.paths import step_draws, step_seconds
from moesim.play import play
from moesim.program import COMM, COMPUTE, DATA, REDUCE, CoRun, Program, Task, Transfer
from moesim.rank import Rank
from moesim.schedules import Action
from moesim.sharing import Load, max_min, rates

NIC = (("nic", 1.0),)
LANES = (COMPUTE, COMM, DATA, REDUCE)


def one_rank(*bodies, **fields):
    order = tuple(Action(0, "F", m) for m in range(len(bodies)))
    return Program((order,), (0,), (tuple(range(len(bodies))),), bodies, **fields)


def ends(program):
    return {span.name: span.end for span in run(program).spans}


def same_spans(one, other):
    key = lambda span: (span.rank, span.stream, span.entry, span.name)  # noqa: E731
    for a, b in zip(sorted(one.spans, key=key), sorted(other.spans, key=key), strict=True):
        assert key(a) == key(b)
        assert (a.start, a.end) == pytest.approx((b.start, b.end), abs=1e-9)


def test_equals_the_longest_path_span_by_span_without_contention():
    for rng in seeds(80):
        program = random_program(rng)
        same_spans(run(program), play(program))


def test_equals_the_longest_path_with_private_resources():
    """Resources that only one lane of a rank uses never contend, whatever their names are on other ranks."""
    for rng in seeds(20):
        program = random_program(rng)
        private = lambda body: tuple(replace(t, uses=((f"lane{t.stream}", 1.0),)) for t in body)  # noqa: E731
        same_spans(run(replace(program, bodies=tuple(map(private, program.bodies)))), play(program))


def test_both_take_the_same_jitter():
    for rng in seeds(20):
        program = random_program(rng)
        jitter = [[rng.uniform(0.5, 2.0) for _ in order] for order in program.orders]
        assert run(program, jitter=jitter).makespan == pytest.approx(play(program, jitter=jitter).makespan, abs=1e-9)
        assert run(program, jitter=[[1.0] * len(order) for order in program.orders]).makespan == pytest.approx(play(program).makespan, abs=1e-9)


def test_leaving_spans_out_changes_no_time():
    for rng in seeds(10):
        program = random_program(rng, contention=True)
        bare = run(program, spans=False)
        assert bare.makespan == run(program).makespan and not bare.spans


def serial_body(scale=1.0):
    names = (("norm", COMPUTE, 0.2), ("dispatch", COMM, 0.7), ("expert", COMPUTE, 1.1), ("combine", COMM, 0.6), ("add", COMPUTE, 0.1))
    body = [Task(n, n, s, t * scale, 0.01, deps=(k - 1,) if k else (), uses=NIC if s == COMM else ()) for k, (n, s, t) in enumerate(names)]
    return (replace(body[0], input=0), *body[1:-1], replace(body[-1], output=0))


@pytest.mark.parametrize("host_s", [0.01, 0.9])
@pytest.mark.parametrize("run_ahead", [1, 10**9])
def test_chains_played_as_one_event_change_nothing(monkeypatch, host_s, run_ahead):
    rng = random.Random(1)
    body = tuple(replace(t, host_s=host_s, lag_s=-1.0) for t in serial_body())
    program = replace(plain_program("1f1b", 3, 8, transfer=0.9), bodies=(body, serial_body(2.1)) * 3, run_ahead=run_ahead, epilogue=(epilogue(rng, 1),) * 3)
    program = replace(program, transfer_forward=Transfer(0.9, NIC), transfer_backward=Transfer(0.9, NIC), gammas=(CoRun("norm", "send", 0.5),))
    at_once, calls = run(program), []
    monkeypatch.setattr(Rank, "_finish_chain", lambda *_: calls.append(1))
    monkeypatch.setattr(Rank, "_is_quiet", lambda *_: False)
    same_spans(at_once, run(program))
    assert at_once.makespan > play(program).makespan + 0.1 and not calls


def test_flows_share_a_link_as_processor_sharing_says():
    """n flows that start together on one link: the i-th shortest ends at sum over j <= i of (s_j - s_{j-1}) (n - j + 1)."""
    sizes = [1.0, 2.5, 3.0, 7.0]
    body = tuple(Task(f"f{i}", "flow", lane, s, uses=NIC) for i, (lane, s) in enumerate(zip(LANES, sizes)))
    expected = np.cumsum(np.diff([0.0, *sizes]) * np.arange(len(sizes), 0, -1))
    assert [ends(one_rank(body))[f"f{i}"] for i in range(4)] == pytest.approx(expected)


def test_a_late_flow_slows_the_first_from_then_on():
    body = (Task("wait", "gemm", COMPUTE, 2.0), Task("long", "flow", COMM, 6.0, uses=NIC), Task("late", "flow", DATA, 3.0, deps=(0,), uses=NIC))
    assert ends(one_rank(body)) == pytest.approx({"wait": 2.0, "late": 2.0 + 2 * 3.0, "long": 9.0})


def processor_sharing(arrivals, sizes, num_lanes):
    """Reference: one link shared equally by the head of each lane that has one. Ends by flow."""
    left, ends, time = list(sizes), {}, 0.0
    while len(ends) < len(sizes):
        heads = [next((i for i in range(lane, len(sizes), num_lanes) if i not in ends), None) for lane in range(num_lanes)]
        active = [i for i in heads if i is not None and arrivals[i] <= time + 1e-12]
        coming = [arrivals[i] for i in heads if i is not None and arrivals[i] > time + 1e-12]
        step = min([left[i] * len(active) for i in active] + [t - time for t in coming])
        for i in active:
            left[i] -= step / len(active)
            if left[i] < 1e-9:
                ends[i] = time + step
        time += step
    return ends


def test_random_arrivals_share_a_link_as_the_reference_does():
    for rng in seeds(20):
        gaps, sizes = [rng.expovariate(1.0) for _ in range(60)], [rng.expovariate(1.2) for _ in range(60)]
        tasks = []
        for i, (gap, size) in enumerate(zip(gaps, sizes)):
            tasks += [Task(f"gap{i}", "idle", COMPUTE, gap), Task(f"flow{i}", "flow", LANES[1 + i % 3], size, deps=(2 * i,), uses=NIC)]
        found = ends(one_rank(tuple(tasks)))
        for i, end in processor_sharing(np.cumsum(gaps), sizes, 3).items():
            assert found[f"flow{i}"] == pytest.approx(end, abs=1e-6)


def test_max_min_gives_equal_parts_and_never_more_than_asked():
    assert max_min([1.0, 1.0], [NIC, NIC]) == [0.5, 0.5]
    assert max_min([1.0, 1.0], [NIC, (("nic", 0.3),)]) == pytest.approx([0.7, 1.0])  # the small flow keeps its rate
    assert max_min([1.0] * 3, [(("a", 1.0),), (("a", 0.5), ("b", 0.9)), (("b", 0.9),)]) == pytest.approx([1 - 0.25 / 0.9, 0.5 / 0.9, 0.5 / 0.9])
    assert max_min([0.2, 1.0], [NIC, NIC]) == pytest.approx([0.2, 0.8])


def test_max_min_is_feasible_and_leaves_nobody_a_free_rise():
    for rng in seeds(200):
        names = "abc"
        uses = [tuple((n, rng.uniform(0.1, 1.0)) for n in rng.sample(names, rng.randint(1, 3))) for _ in range(rng.randint(1, 6))]
        ceilings = [rng.uniform(0.2, 1.0) for _ in uses]
        found = max_min(ceilings, uses)
        load = {n: sum(rate * dict(use).get(n, 0.0) for rate, use in zip(found, uses)) for n in names}
        assert all(value <= 1.0 + 1e-9 for value in load.values()) and all(0.0 < r <= c + 1e-12 for r, c in zip(found, ceilings))
        slowed = [i for i in range(len(uses)) if found[i] < ceilings[i] - 1e-9]
        assert all(any(load[n] > 1.0 - 1e-9 for n, _ in uses[i]) for i in slowed)


def test_a_kernel_waits_for_free_sms_and_compute_keeps_what_is_left():
    body = (Task("a", "a2a", COMM, 2.0, sms=60), Task("b", "reduce", REDUCE, 3.0, sms=60), Task("c", "gather", DATA, 1.0, sms=40), Task("k", "gemm", COMPUTE, 6.0))
    found = ends(one_rank(body, num_sms=132))
    assert found["a"] == pytest.approx(2.0) and found["c"] == pytest.approx(1.0)
    assert found["b"] == pytest.approx(1.0 + 3.0)  # 32 SMs were free until c ended
    done = (1.0 * (132 - 100) + 1.0 * (132 - 120) + 2.0 * (132 - 60)) / 132
    assert found["k"] == pytest.approx(4.0 + 6.0 - done)
    assert ends(one_rank(body))["k"] == pytest.approx(6.0)  # num_sms = 0: not counted


def test_compute_that_finds_no_sm_stands_still():
    body = (Task("a", "a2a", COMM, 2.0, sms=132), Task("k", "gemm", COMPUTE, 1.0))
    assert ends(one_rank(body, num_sms=132)) == pytest.approx({"a": 2.0, "k": 3.0})


def test_gamma_slows_a_kind_while_the_other_runs():
    body = (Task("k", "gemm", COMPUTE, 10.0), Task("a", "a2a", COMM, 2.0), Task("r", "reduce", REDUCE, 4.0))
    found = ends(one_rank(body, gammas=(CoRun("gemm", "a2a", 0.25), CoRun("gemm", "reduce", 1.0), CoRun("a2a", "gemm", 0.5))))
    assert found["a"] == pytest.approx(3.0)  # slowed throughout
    assert found["k"] == pytest.approx(4.0 + 10.0 - 4.0 / 2.0)  # the larger of 0.25 and 1.0, not their sum
    assert rates([Load("gemm"), Load("a2a", stream=COMM)], {}, 0) == (1.0, 1.0)


def test_a_send_slows_the_collective_beside_it():
    stage = (Task("k", "gemm", COMPUTE, 1.0, input=0, output=0), Task("a", "a2a", COMM, 4.0, deps=(0,), uses=NIC))
    program = Program(((Action(0, "F", 0),), (Action(1, "F", 0),)), (0, 1), ((0,), (0,)), (stage,), transfer_forward=Transfer(1.0, NIC))
    found = {(s.rank, s.name): s.end for s in run(program).spans}
    assert found[0, "send 0F0"] == pytest.approx(3.0) and found[0, "a"] == pytest.approx(6.0) and found[1, "a"] == pytest.approx(8.0)


def test_ties_are_resolved_by_time_rank_stream_and_issue_order():
    tasks = tuple(Task(f"{lane}{k}", "x", lane, 1.0, sms=132) for k in range(2) for lane in (DATA, COMM))
    spans = run(one_rank(tasks, num_sms=132)).spans
    assert [(span.name, span.start) for span in spans] == [("10", 0.0), ("11", 1.0), ("20", 2.0), ("21", 3.0)]


def full_mode(rng, peers=4, num_microbatches=4, slow=1.0):
    """Every rank of 2 stages x peers; each body meets its stage's group in one collective; peer 1 of stage 0 is `slow`."""
    plain = plain_program("1f1b", 2, num_microbatches)
    orders = tuple(plain.orders[r] for r in (0, 1) for _ in range(peers))
    bodies, index = [], []
    for r in range(2 * peers):
        factor = slow if r == 1 else rng.uniform(0.9, 1.1)
        row = {}
        for letter, seconds in (("F", 1.0), ("B", 2.0)):
            row[letter] = len(bodies)
            bodies.append((
                Task("k", "gemm", COMPUTE, seconds * factor, 0.01, input=0),
                Task("a2a", "a2a", COMM, 0.5 * factor, 0.01, deps=(0,), group=r // peers, uses=NIC),
                Task("e", "gemm", COMPUTE, seconds, 0.01, deps=(1,), output=0),
            ))
        index.append(tuple(row[a.letter] for a in orders[r]))
    return Program(orders, (0, peers), tuple(index), tuple(bodies), Transfer(0.2), Transfer(0.2), peers=peers, epilogue=(epilogue(rng, 1),) * (2 * peers))


def test_every_rank_played_equals_the_longest_path_without_contention():
    for rng in seeds(10):
        program = full_mode(rng, slow=rng.uniform(0.5, 3.0))
        same_spans(run(program), play(program))


def test_every_rank_played_keeps_bound_path_engine_in_order():
    for rng in seeds(25):
        program = contended(rng, full_mode(rng, peers=rng.choice((1, 2, 4)), slow=rng.uniform(0.5, 3.0)))
        bound, path, simulated = step_bound(program), play(program).makespan, run(program, spans=False).makespan
        assert bound <= path + 1e-9 and path <= simulated + 1e-9
        assert step_seconds([program])[0] == pytest.approx(path)


def test_draws_of_a_program_whose_ranks_meet_are_refused():
    with pytest.raises(ValueError, match="representative ranks"):
        step_draws(full_mode(random.Random(1)), {"host": np.ones(2)})


def test_a_group_starts_and_ends_together_at_its_slowest_member():
    program = full_mode(random.Random(2), slow=3.0)
    for timeline in (run(program), play(program)):
        meetings = {}
        for span in timeline.spans:
            if span.name == "a2a":
                meetings.setdefault((span.rank // 4, span.entry), set()).add((round(span.start, 9), round(span.end, 9)))
        assert len(meetings) == 2 * 8 and all(len(times) == 1 for times in meetings.values())
        assert timeline.makespan > 4 * 3.0 * 3.0  # the slow peer's own work alone


def test_contention_at_one_member_slows_the_whole_group():
    flow = Task("own", "flow", DATA, 1.0, uses=NIC)
    meet = Task("a2a", "a2a", COMM, 2.0, group=0, uses=NIC)
    order = (Action(0, "F", 0),)
    program = Program((order, order), (0,), ((0,), (1,)), ((flow, meet), (meet,)), peers=2)
    assert {(s.rank, s.name): s.end for s in run(program).spans} == pytest.approx({(0, "own"): 2.0, (0, "a2a"): 3.0, (1, "a2a"): 3.0})


def test_deadlocks_end_in_one_clear_line():
    ring = (Task("a", "x", COMM, 1.0, group=0), Task("b", "x", DATA, 1.0, group=1, deps=(0,)))
    other = (Task("b", "x", DATA, 1.0, group=1), Task("a", "x", COMM, 1.0, group=0, deps=(0,)))
    order = (Action(0, "F", 0),)
    program = Program((order, order), (0,), ((0,), (1,)), (ring, other), peers=2)
    for evaluate in (run, play):
        with pytest.raises(ValueError, match="^deadlock: .*rank 0") as caught:
            evaluate(program)
        assert "\n" not in str(caught.value)
    backwards = plain_program("1f1b", 2, 3)
    with pytest.raises(ValueError, match="^deadlock"):
        run(replace(backwards, orders=(backwards.orders[0][::-1], backwards.orders[1])))


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (one_rank((Task("k", "gemm", COMM, 1.0, sms=200),), num_sms=132), "wants 200 SMs of a GPU that has 132"),
        (one_rank((Task("k", "gemm", COMM, 1.0, uses=(("nic", 1.2),)),)), "at most all of a resource"),
        (one_rank((Task("k", "gemm", COMM, 1.0),), gammas=(CoRun("gemm", "a2a", -0.1),)), "at least 0"),
    ],
)
def test_impossible_loads_are_refused(program, message):
    with pytest.raises(ValueError, match=message):
        run(program)


def test_plays_are_repeatable():
    program = contended(random.Random(5), random_program(random.Random(5), "dualpipev", size=(3, 8, 2)))
    assert run(program).spans == run(program).spans


def test_what_a_nic_carries_alone_is_not_slowed_by_compute():
    """Gamma slows what SMs copy: all of a transfer over NVLink, nothing of one over a NIC, and of a dispatch over 8 nodes (EP 64 on
    H800: legs of 1.3 and 2.2 ms) the NVLink leg, as https://github.com/deepseek-ai/profile-data shows."""
    from moesim.sharing import Load, rates

    gammas = {("dispatch", "gemm"): 0.99}
    beside = Load("gemm")
    inside, far, both = (rates([Load("dispatch", uses, stream=1), beside], gammas, 0)[0] for uses in (
        (("nvlink", 0.8),), (("nic", 0.9),), (("nvlink", 0.5), ("nic", 0.85))))
    assert inside == pytest.approx(1 / 1.99) and far == 1.0
    assert 1.25 < 1 / both < 1.5
