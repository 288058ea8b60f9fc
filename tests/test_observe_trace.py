"""Is what the trainer records a timeline that the simulator's own tools read?"""

import itertools
import json
import random
import time

import pytest
import torch

from moesim.timeline import STREAMS, Span, breakdown
from moetrain.observe.profiler import ProfileWindow
from moetrain.observe.trace import EXTRA, SpanRecorder, flatten, read_spans, write_chrome
from moetrain.testing import run_ranks


def record(folder, rank=0, steps=(1, 2, 3), window=(2, 3)):
    spans = SpanRecorder(folder, rank, *window)
    for step in steps:
        spans.begin_step(step)
        with spans.span("route layer 0", "router", "compute", "0F0", layer=0, rows=128):
            time.sleep(0.002)
        sent = spans.start("dispatch layer 0", "dispatch", "comm", "0F0", bytes=4096)
        time.sleep(0.003)
        spans.stop(sent)
        with spans.span("experts layer 0", "expert_up", entry="0F0", flops=1e9):
            time.sleep(0.002)
        spans.end_step()
    spans.close()
    return spans.path


def test_a_file_of_spans_is_a_timeline_of_the_simulator(tmp_path):
    steps = read_spans([record(tmp_path)])
    assert sorted(steps) == [2, 3]  # the window only
    timeline = steps[2].timeline
    assert [s.name for s in timeline.spans] == ["route layer 0", "dispatch layer 0", "experts layer 0"]
    assert all(isinstance(s, Span) and s.terms == ((s.kind, "measured", s.solo),) and s.entry == "0F0" for s in timeline.spans)
    assert [s.stream for s in timeline.spans] == [STREAMS.index(name) for name in ("compute", "comm", "compute")]
    parts = breakdown(timeline, 0)
    assert sum(parts.values()) == pytest.approx(timeline.makespan)
    assert parts["router"] >= 0.002 and parts["expert_up"] >= 0.002 and timeline.busy(0, 1) >= 0.003
    assert steps[2].extras[0] == {"layer": 0, "rows": 128} and steps[2].extras[1] == {"bytes": 4096}


def test_every_line_has_exactly_the_fields_of_a_span(tmp_path):
    lines = [json.loads(line) for line in record(tmp_path).read_text().splitlines()]
    for line in lines:
        if line["line"] == "span":
            assert set(line) == {*Span._fields, "line", "step", "extra"} and set(line["extra"]) <= set(EXTRA)
        else:
            assert set(line) == {"line", "schema", "rank", "step", "clock", "makespan"}


def test_the_chrome_trace_has_the_spans_in_microseconds(tmp_path):
    step = read_spans([record(tmp_path)])[3]
    write_chrome(step, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    found = [e for e in events if e["ph"] == "X"]
    assert len(found) == 3 and found[1]["args"]["bytes"] == 4096 and found[1]["dur"] >= 3000 and found[1]["tid"] == 1
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == set(STREAMS)


def _opened(stream, name, begin, end):
    class Opened:
        kind, entry, extra = name, "0F0", {}

    Opened.stream, Opened.name = stream, name
    return Opened, begin, end


def test_overlapping_spans_of_a_stream_are_cut_to_their_own_time():
    """An outer span keeps what its inner ones leave; the busy time of the stream is the union."""
    times = [_opened(0, "layer", 0.0, 10.0), _opened(0, "attention", 1.0, 4.0), _opened(0, "core", 2.0, 3.0), _opened(0, "moe", 5.0, 9.0)]
    cut = [(s.name, s.start, s.end, extra.get("part", 0)) for s, extra in flatten(0, times)]
    assert cut == [("layer", 0, 1, 0), ("attention", 1, 2, 0), ("core", 2, 3, 0), ("attention", 3, 4, 1), ("layer", 4, 5, 1), ("moe", 5, 9, 0), ("layer", 9, 10, 2)]
    lone = [_opened(1, "a", 0.0, 2.0), _opened(1, "b", 1.0, 3.0)]
    assert [(s.name, s.start, s.end) for s, _ in flatten(0, lone)] == [("a", 0, 1), ("b", 1, 3)]


def test_cutting_equals_asking_at_every_moment():
    """Random overlaps, against the dumb rule: whoever of the running spans began last owns the moment."""
    rng = random.Random(0)
    for _ in range(20):
        times = [_opened(0, str(i), a, a + rng.randint(1, 30)) for i, a in enumerate(rng.sample(range(100), 15))]
        cut = [(s.name, s.start, s.end) for s, _ in flatten(0, times)]
        assert all(a[2] <= b[1] for a, b in itertools.pairwise(cut))
        for moment in (t + 0.5 for t in range(131)):
            running = [(begin, o.name) for o, begin, end in times if begin <= moment < end]
            assert [name for name, begin, end in cut if begin <= moment < end] == ([max(running)[1]] if running else [])


def test_a_step_of_many_nested_spans_is_cut_quickly():
    times = [_opened(0, str(i), i, i + 2.5) for i in range(20_000)]
    begin = time.perf_counter()
    assert len(flatten(0, times)) == 20_000 and time.perf_counter() - begin < 5


def test_causes_are_what_ended_last():
    times = [_opened(0, "a", 0.0, 1.0), _opened(0, "b", 1.0, 2.0), _opened(1, "send", 2.0, 3.0), _opened(0, "c", 3.0, 4.0), _opened(0, "d", 5.0, 6.0)]
    assert [s.cause for s, _ in flatten(0, times)] == ["start", "compute", "compute", "comm", "host"]


def test_off_costs_next_to_nothing(tmp_path):
    """A span outside the window is one attribute test and a shared empty context: well under 2 us."""
    spans = SpanRecorder(tmp_path, 0, 10, 12)
    spans.begin_step(1)
    begin = time.perf_counter()
    for _ in range(20_000):
        with spans.span("x", "router"):
            pass
    assert (time.perf_counter() - begin) / 20_000 < 5e-6
    spans.end_step()
    assert not spans.path.exists() and spans.start("x", "router") is None
    spans.stop(None)


def test_on_a_gpu_events_are_read_after_the_step(tmp_path, monkeypatch):
    """The CUDA path with events that only keep a counter: nothing is read before end_step waits."""
    waited, now = [], [0.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at, now[0] = now[0], now[0] + 1.5

        def elapsed_time(self, other):
            assert waited
            return other.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(1))
    spans = SpanRecorder(tmp_path, 0, 1, 1, "cuda")
    spans.begin_step(1)
    with spans.span("a", "router"):
        pass
    spans.end_step()
    step = read_spans([spans.path])[1]
    assert [(s.start, s.end) for s in step.timeline.spans] == [pytest.approx((1.5e-3, 3e-3))] and step.timeline.makespan == pytest.approx(4.5e-3)


def test_bad_spans_and_files_are_refused(tmp_path):
    spans = SpanRecorder(tmp_path, 0, 1, 1)
    spans.begin_step(1)
    with pytest.raises(ValueError, match="no stream 'nccl'; legal are compute"):
        spans.span("x", "router", "nccl")
    with pytest.raises(ValueError, match="no extra field colour"):
        spans.span("x", "router", colour=1)
    with pytest.raises(ValueError, match="before the first"):
        SpanRecorder(tmp_path, 0, 2, 1)
    path = tmp_path / "bad.jsonl"
    path.write_text('{"line":"span","step":1}\n')
    with pytest.raises(ValueError, match=r"bad.jsonl:1: not a step or a span"):
        read_spans([path])


def _rank(rank, world, folder):
    return str(record(folder, rank))


def test_ranks_lie_side_by_side_by_their_clocks(tmp_path):
    paths = run_ranks(_rank, 2, str(tmp_path))
    step = read_spans(paths)[2]
    assert step.timeline.num_ranks == 2 and {s.rank for s in step.timeline.spans} == {0, 1}
    assert min(s.start for s in step.timeline.spans) >= 0
    assert step.timeline.makespan >= max(s.end for s in step.timeline.spans)


def test_profiled_steps_are_reported(tmp_path):
    window = ProfileWindow(tmp_path, 0, 2, 3)
    files = []
    for step in range(1, 6):
        window.begin_step(step)
        torch.mm(torch.ones(8, 8), torch.ones(8, 8))
        files.append(window.end_step(step))
    assert [window.profiled(step) for step in range(1, 6)] == [False, True, True, True, False]
    assert [f is not None for f in files] == [False, False, True, False, False]
    names = {e.get("name") for e in json.loads(files[2].read_text())["traceEvents"]}
    assert "aten::mm" in names
    assert not ProfileWindow(tmp_path, 0, 0, 0).profiled(1) and window.close() is None
