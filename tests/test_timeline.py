"""Timeline: where the seconds of a step go, on cases worked out by hand, and that nothing is lost on random ones."""

import json
from dataclasses import replace

import pytest
from random_programs import plain_program, random_program, seeds

from moesim.engine import run
from moesim.play import play
from moesim.program import COMM, COMPUTE, DATA, REDUCE, STREAMS, CoRun, Program, Task, Transfer
from moesim.schedules import Action
from moesim.timeline import Span, Timeline, breakdown, chrome_trace


def one_rank(*bodies, **fields):
    order = tuple(Action(0, "F", m) for m in range(len(bodies)))
    return Program((order,), (0,), (tuple(range(len(bodies))),), bodies, **fields)


def task(role, stream, seconds, **fields):
    return Task(role, role, stream, seconds, terms=((role, f"term.{role}", seconds),), **fields)


def test_parts_sum_to_the_makespan_whatever_happens():
    for rng in seeds(60):
        program = random_program(rng, contention=True)
        for timeline in (play(program), run(program)):
            for rank in range(program.num_ranks):
                parts = breakdown(timeline, rank)
                assert sum(parts.values()) == pytest.approx(timeline.makespan, rel=1e-12)
                assert all(seconds > 0 for seconds in parts.values())


def test_serial_communication_is_exposed_under_its_role():
    body = (task("attention", COMPUTE, 2.0), task("dispatch", COMM, 1.0, deps=(0,)), task("expert", COMPUTE, 3.0, deps=(1,)), task("combine", COMM, 0.5, deps=(2,)))
    timeline = play(one_rank(body))
    assert breakdown(timeline, 0) == pytest.approx({"attention": 2.0, "expert": 3.0, "exposed dispatch": 1.0, "exposed combine": 0.5})
    assert timeline.busy(0) == 5.0 and timeline.busy(0, COMM) == 1.5


def test_hidden_communication_costs_nothing():
    body = (task("dispatch", COMM, 1.0), task("expert", COMPUTE, 3.0), task("reduce", REDUCE, 2.5))
    timeline = play(one_rank(body))
    assert breakdown(timeline, 0) == pytest.approx({"expert": 3.0})


def test_terms_share_a_fused_run():
    fused = Task("run", "gemm", COMPUTE, 4.0, terms=(("qkv", "a", 3.0), ("norm", "b", 1.0)))
    assert breakdown(play(one_rank((fused,))), 0) == pytest.approx({"qkv": 3.0, "norm": 1.0})


def test_waiting_for_the_host_is_host_even_before_a_collective():
    body = (task("k", COMPUTE, 1.0, host_s=2.0), task("a2a", COMM, 1.0, host_s=3.0, deps=(0,)), task("e", COMPUTE, 1.0, deps=(1,)))
    # issued at 2, 5 and 5: kernel 2..3, a2a 5..6, kernel 6..7
    assert breakdown(play(one_rank(body)), 0) == pytest.approx({"k": 1.0, "e": 1.0, "host": 2.0 + 2.0, "exposed a2a": 1.0})


def test_waiting_for_another_stage_is_bubble_and_its_transfer_exposed():
    program = plain_program("1f1b", 2, 1, transfer=0.25)
    # rank 0: F 0..1, B 4.5..6.5; rank 1: F 1.25..2.25, B 2.25..4.25
    assert breakdown(play(program), 0) == pytest.approx({"F": 1.0, "B": 2.0, "exposed send": 0.25, "bubble": 3.25})
    assert breakdown(play(program), 1) == pytest.approx({"F": 1.0, "B": 2.0, "exposed send": 0.25, "bubble": 1.0 + 2.25})
    assert play(program).bubble(1) == pytest.approx(3.25)


def test_a_reduction_under_a_bubble_does_not_hide_it():
    program = plain_program("1f1b", 2, 1)
    bodies = tuple((*body, task("reduce", REDUCE, 2.0, deps=(0,))) if body[0].kind == "F" else body for body in program.bodies)
    assert breakdown(play(replace(program, bodies=bodies)), 0)["bubble"] == pytest.approx(3.0)


def test_contention_is_its_own_part():
    body = (task("gemm", COMPUTE, 4.0), task("a2a", COMM, 2.0))
    parts = breakdown(run(one_rank(body, gammas=(CoRun("gemm", "a2a", 0.25),))), 0)
    assert parts == pytest.approx({"gemm": 4.0, "contention": 2.0 - 2.0 / 1.25})


def test_end_of_step_reads_by_role_and_a_barrier_is_bubble():
    ends = lambda extra: (task("reduce", REDUCE, 1.0 + extra, after=0), task("norm", COMM, 0.5, deps=(0,), barrier=0), task("optimizer", COMPUTE, 2.0, deps=(1,)))  # noqa: E731
    program = plain_program("1f1b", 2, 1, epilogue=(ends(0.0), ends(0.0)))
    # rank 1: its B ends at 4, reduce 4..5, then it waits for rank 0 (B ends at 6, reduce 6..7)
    expected = {"F": 1.0, "B": 2.0, "end of step reduce": 1.0, "end of step norm": 0.5, "end of step optimizer": 2.0}
    assert breakdown(play(program), 0) == pytest.approx(expected | {"bubble": 3.0})
    assert breakdown(play(program), 1) == pytest.approx(expected | {"bubble": 1.0 + 2.0})


def test_a_parameter_gather_that_holds_the_first_action_is_exposed():
    compute = (task("k", COMPUTE, 1.0, input=0),)
    program = one_rank(compute, prologue=((task("gather", DATA, 2.0),),), gates=((0,),))
    for evaluate in (play, run):
        assert breakdown(evaluate(program), 0) == pytest.approx({"k": 1.0, "exposed gather": 2.0})


def test_causes_are_told():
    program = plain_program("1f1b", 2, 2, transfer=0.5)
    for evaluate in (play, run):
        causes = {(s.rank, s.entry): s.cause for s in evaluate(program).spans if s.stream == COMPUTE}
        assert causes[0, "0F0"] == "start" and causes[1, "1F0"] == "input" and causes[1, "1B0"] == "compute" and causes[0, "0B0"] == "input"


def test_spans_are_ordered_and_made_once():
    timeline = run(plain_program("interleaved", 2, 4, 2))
    assert timeline.spans is timeline.spans
    assert list(timeline.spans) == sorted(timeline.spans, key=lambda s: (s.start, s.rank, s.stream))
    assert timeline.makespan == max(span.end for span in timeline.spans)


def test_trace_is_what_perfetto_reads():
    program = plain_program("1f1b", 2, 2, transfer=0.5, epilogue=((task("norm", COMM, 1.0, barrier=0),),) * 2)
    trace = json.loads(json.dumps(chrome_trace(run(program))))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names == {(r, s): name for r in (0, 1) for s, name in enumerate(STREAMS)}
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(spans) == 2 * 4 + 4 + 2 and {"name", "cat", "ts", "dur", "pid", "tid"} <= set(spans[0])
    first = next(e for e in spans if e["pid"] == 1 and e["tid"] == COMPUTE)
    assert (first["ts"], first["dur"]) == pytest.approx((1.5e6, 1e6))
    assert {e["tid"] for e in spans if e["name"].startswith("send")} == {STREAMS.index("send_next"), STREAMS.index("send_prev")}


def test_an_empty_timeline_is_all_bubble():
    assert breakdown(Timeline(2.0, 1), 0) == {"bubble": 2.0}
    lone = Timeline(3.0, 1, lambda rank=None: [Span(0, COMPUTE, "k", "gemm", 1.0, 2.0, "0F0", cause="host")])
    assert breakdown(lone, 0) == {"gemm": 1.0, "host": 1.0, "bubble": 1.0}


def test_transfers_have_spans_on_the_senders_stream():
    timeline = play(replace(plain_program("1f1b", 2, 1), transfer_forward=Transfer(0.5)))
    assert [(s.rank, s.name, s.start, s.end) for s in timeline.spans if s.kind == "send"] == [(0, "send 0F0", 1.0, 1.5), (1, "send 1B0", 4.5, 4.5)]
