"""Longest path: matrices against the plain walk, the plain walk against cases worked out by hand."""

import random
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
from random_programs import plain_program, random_body, random_program, seeds, with_bodies

from moesim.fuse import fuse
from moesim.maxplus import costs_of, reduce
from moesim.paths import step_draws, step_seconds
from moesim.play import play
from moesim.program import COMM, COMPUTE, DATA, CoRun, Program, Task, Transfer
from moesim.schedules import Action, Pair
from moesim.wiring import wire


def one_rank(*bodies, **fields):
    """Forward only, one microbatch a body."""
    order = tuple(Action(0, "F", m) for m in range(len(bodies)))
    return Program((order,), (0,), (tuple(range(len(bodies))),), bodies, **fields)


def both(program):
    """Seconds by matrices and by the plain walk, which agree."""
    seconds, walked = step_seconds([program])[0], play(program).makespan
    assert seconds == pytest.approx(walked, abs=1e-9)
    return walked


def test_matrices_equal_the_plain_walk_on_random_programs():
    for rng in seeds(150):
        both(random_program(rng))


def test_a_batch_equals_its_members_in_order():
    rng = random.Random(3)
    first = random_program(rng, "1f1b", size=(3, 6, 1))
    scaled = [replace(first, bodies=tuple(tuple(replace(t, seconds=t.seconds * f, lag_s=-1.0) for t in b) for b in first.bodies)) for f in (0.5, 1.5, 2.0)]
    batch = [first, random_program(rng, "zbv", size=(2, 5, 2)), *scaled]
    assert step_seconds(batch) == pytest.approx([step_seconds([p])[0] for p in batch], abs=1e-9)
    assert len(step_seconds([])) == 0


def test_host_bound_step_is_the_host_sum():
    body = tuple(Task(f"k{k}", "gemm", COMPUTE, 1e-6, 1e-3, input=0 if k == 0 else -1) for k in range(10))
    assert both(one_rank(body, body)) == pytest.approx(20 * 1e-3 + 1e-6)


def test_waiting_for_a_copy_to_the_host_makes_launch_and_kernel_serial():
    kernels = [Task(f"k{k}", "gemm", COMPUTE, 2.0, 1.0) for k in range(4)]
    assert both(one_rank(tuple(kernels))) == pytest.approx(1.0 + 4 * 2.0)
    assert both(one_rank(tuple(replace(k, blocks_host=True) for k in kernels))) == pytest.approx(4 * (1.0 + 2.0))


def test_run_ahead_holds_the_host():
    body = (Task("k", "gemm", COMPUTE, 2.0, 1.0), Task("c", "a2a", COMM, 3.0, 0.0, deps=(0,)))
    assert both(one_rank(body, body, body)) == pytest.approx(1.0 + 2.0 + 3 * 3.0)
    assert both(one_rank(body, body, body, run_ahead=2)) == pytest.approx(6.0 + 1.0 + 2.0 + 3.0)  # the third waits for the first's end
    assert both(one_rank(body, body, body, run_ahead=1)) == pytest.approx(3 * (1.0 + 2.0 + 3.0))


def test_a_gate_holds_the_first_action_of_its_chunk_only():
    compute = (Task("k", "gemm", COMPUTE, 1.0, input=0, output=0),)
    gather = (Task("g0", "gather", DATA, 2.0), Task("g1", "gather", DATA, 5.0))
    program = Program(((Action(0, "F", 0), Action(1, "F", 0)),), (0, 0), ((0, 0),), (compute,), prologue=(gather,), gates=((0, 1),))
    assert both(program) == pytest.approx(7.0 + 1.0)
    assert both(replace(program, gates=((0, -1),))) == pytest.approx(7.0)  # the gather itself ends last
    starts = [span.start for span in play(program).spans if span.stream == COMPUTE]
    assert starts == [2.0, 7.0]


def test_a_barrier_starts_every_rank_at_the_slowest():
    ends = (Task("norm", "norm", COMM, 0.5, after=0, barrier=0), Task("opt", "optimizer", COMPUTE, 1.0, deps=(0,)))
    program = plain_program("1f1b", 3, 4, epilogue=(ends,) * 3)
    pipeline = step_seconds([replace(program, epilogue=())])[0]
    assert both(program) == pytest.approx(pipeline + 1.5)
    assert {span.start for span in play(program).spans if span.name == "norm"} == {pipeline}


def test_transfers_queue_in_the_order_of_their_sender():
    stage = lambda *_: (Task("k", "gemm", COMPUTE, 1.0, input=0, output=0),)  # noqa: E731
    orders = (tuple(Action(0, "F", m) for m in range(3)), tuple(Action(1, "F", m) for m in range(3)))
    program = Program(orders, (0, 1), ((0,) * 3, (0,) * 3), (stage(),), transfer_forward=Transfer(5.0))
    assert both(program) == pytest.approx(1.0 + 3 * 5.0 + 1.0)


def test_lag_of_a_fused_run_is_its_slowest_kernel():
    kernels = tuple(Task(f"k{k}", "gemm", COMPUTE, s, h) for k, (s, h) in enumerate([(5.0, 1.0), (1.0, 1.0), (1.0, 9.0), (2.0, 0.5)]))
    (fused,) = fuse(kernels)
    assert fused.lag_s == pytest.approx(1 + 1 + 9 + 1 + 2)  # the third kernel is issued last of those that hold the run up
    assert both(one_rank((fused,))) == pytest.approx(both(one_rank(kernels)))


def test_fusing_keeps_the_end_of_every_run():
    for rng in seeds(60):
        program = random_program(rng, num_tasks=12)
        single = replace(program, bodies=tuple(random_body(rng, 12, 1 + any(t.input == 1 for t in b), single=rng.random() < 0.5) for b in program.bodies))
        fused = replace(single, bodies=tuple(map(fuse, single.bodies)))
        assert sum(map(len, fused.bodies)) < sum(map(len, single.bodies))
        ends = defaultdict(list)
        for span in play(single).spans:
            ends[span.rank, span.entry, span.stream].append(span.end)
        for span in play(fused).spans:
            assert min(abs(end - span.end) for end in ends[span.rank, span.entry, span.stream]) < 1e-9
        assert step_seconds([fused])[0] == pytest.approx(step_seconds([single])[0], abs=1e-9)


def test_fusing_keeps_what_contention_can_tell_apart():
    body = tuple(Task(f"k{k}", kind, COMPUTE, 1.0) for k, kind in enumerate(("gemm", "memory", "memory", "norm")))
    assert [t.kind for t in fuse(body)] == ["gemm"]
    assert [t.seconds for t in fuse(body, [CoRun("gemm", "a2a", 0.2)])] == [1.0, 3.0]
    assert len(fuse(tuple(replace(t, uses=(("hbm", 0.1 * k),)) for k, t in enumerate(body)))) == 4


def test_draws_of_one_are_nominal_and_a_common_factor_scales_the_step():
    for rng in seeds(10):
        program = replace(random_program(rng), prologue=(), gates=(), epilogue=())
        terms = {term for body in program.bodies for task in body for _, term, _ in task.terms}
        nominal = step_seconds([program])[0]
        factors = np.array([1.0, 2.0, 0.5])
        assert step_draws(program, dict.fromkeys((*terms, "host", "send"), factors)) == pytest.approx(nominal * factors)


def test_draws_equal_programs_rewritten_with_the_factors():
    rng = random.Random(11)
    program = random_program(rng, "interleaved_zb", size=(3, 6, 2))
    factors = {"term.gemm": np.array([1.3, 0.7, 1.0]), "host": np.array([1.0, 3.0, 0.1])}

    def rewrite(task, d):
        seconds = sum(share * (factors[term][d] if term in factors else 1.0) for _, term, share in task.terms) or task.seconds
        return replace(task, seconds=seconds, host_s=task.host_s * factors["host"][d], lag_s=-1.0)

    for d, seconds in enumerate(step_draws(program, factors)):
        bodies = {which: tuple(tuple(rewrite(t, d) for t in b) for b in getattr(program, which)) for which in ("bodies", "prologue", "epilogue")}
        assert seconds == pytest.approx(step_seconds([replace(program, **bodies)])[0])


def test_reduce_is_the_shortest_that_its_clocks_allow():
    body = (Task("a", "gemm", COMPUTE, 2.0, input=0), Task("b", "a2a", COMM, 3.0, deps=(0,), output=0), Task("c", "gemm", COMPUTE, 1.0))
    matrix = reduce(body, costs_of([body], None))[:, :, 0]
    compute, comm, arrival = 1, 2, 5
    assert matrix[compute, compute] == 3.0 and matrix[compute, arrival] == 3.0 and matrix[compute, comm] == -np.inf
    assert matrix[arrival, compute] == 5.0 and matrix[arrival, comm] == 3.0 and matrix[-1, compute] == 5.0  # row 5 is output 0, the last the end


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: replace(p, orders=(p.orders[0][::-1], *p.orders[1:])), "deadlock"),
        (lambda p: replace(p, placement=p.placement[::-1]), "lives on rank"),
        (lambda p: replace(p, orders=(p.orders[0][:-1] + p.orders[0][:1], *p.orders[1:])), "ordered twice"),
        (lambda p: replace(p, orders=(p.orders[0][1:], *p.orders[1:]), body_index=(p.body_index[0][1:], *p.body_index[1:])), "which no rank runs"),
        (lambda p: replace(p, bodies=tuple(tuple(replace(t, input=-1) for t in b) for b in p.bodies)), "no task with the input"),
        (lambda p: replace(p, epilogue=((Task("n", "norm", COMM, 1.0, barrier=0),), ())), "deadlock: ranks have different barriers"),
        (lambda p: replace(p, epilogue=((Task("n", "norm", COMM, 1.0, after=3),),) * 2), "chunk 3"),
    ],
)
def test_programs_that_cannot_run_say_so_in_one_line(change, message):
    program = change(plain_program("1f1b", 2, 3))
    for evaluate in (play, lambda p: step_seconds([p])):
        with pytest.raises(ValueError, match=message) as caught:
            evaluate(program)
        assert "\n" not in str(caught.value)


def test_a_pair_may_not_wait_for_itself():
    with pytest.raises(ValueError, match="other half of its own pair"):
        wire(((Pair(Action(0, "F", 0), Action(0, "B", 0)),),), (0,))


def test_levels_hold_one_entry_a_rank_and_only_earlier_needs():
    program = with_bodies("dualpipev", 4, 10, 2, lambda *_: ())
    wires = wire(program.orders, program.placement)
    level_of = {e: i for i, level in enumerate(wires.levels) for e in level}
    assert sorted(level_of) == list(range(wires.num_entries))
    for level in wires.levels:
        assert len({wires.rank[e] for e in level}) == len(level)
        assert all(level_of[slot >> 1] < level_of[e] for e in level for slot in wires.source[e] if slot >= 0)
