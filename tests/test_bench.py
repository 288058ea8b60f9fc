"""Does the bench time what the planner asks for, keep every repeat, and lose nothing when it is stopped?"""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch
import typer

from moesim.measurement import Measurement, from_record, op_fields, op_of, read_measurements, relative_error, to_record
from moesim.ops import Attention, Collective, Dispatch, Gemm, Group, GroupedGemm, MemoryBound
from moetrain.bench import Machine, Skip, Work, build, cli, exchange, memory_bound, products, requests, run, suite, timing, work
from moetrain.kernels import backend
from moetrain.kernels.flops import flop_counter
from moetrain.testing import run_ranks

CAUSAL, WINDOWED = 64 * 65 / 2, 16 * 17 / 2 + 48 * 16.0
PRODUCTS = [
    Gemm(48, 32, 64), Gemm(48, 32, 64, accumulate=True), GroupedGemm(4, 96.0, 32, 64, max_rows=40.0), GroupedGemm(4, 96.0, 32, 64, grad="input"),
    GroupedGemm(4, 96.0, 32, 64, grad="weight"),
]  # fmt: skip
ATTENTIONS = [Attention(2, 4, 2, 64, 64, 16, 16, pairs, backward) for pairs in (CAUSAL, WINDOWED) for backward in (False, True)]
KINDS = [MemoryBound(kind, 3e6) for kind in memory_bound.KINDS]
OPS = [*PRODUCTS, *ATTENTIONS, *KINDS]
QUICK = run.Options(cap_s=0.1, quiet_s=0.0)


def machine(dtype: str = "fp32", rank: int = 0, world: int = 1) -> Machine:
    return Machine(torch.device("cpu"), dtype, backend("auto", "cpu", work.TORCH[dtype]), rank, world)


def lines(path, ops, **more) -> None:
    path.write_text("".join(json.dumps({**op_fields(op), **more}) + "\n" for op in ops))


def asked(*ops):
    return [requests.Request(op, 1e-3, "extrapolated") for op in ops]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- what is timed is what was asked for ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", PRODUCTS, ids=requests.words)
def test_flops_and_bytes_of_a_product_are_the_ops_own(op):
    """In 16 bits, as the op counts; torch counts the same FLOPs of the very call that is timed."""
    made = build(op, machine("bf16"))
    with flop_counter(display=False) as counted:
        made.calls[0]()
    assert counted.get_total_flops() == made.flops == op.flops
    assert made.bytes == op.bytes and made.dtype == "bf16"


@pytest.mark.parametrize("op", ATTENTIONS, ids=lambda op: f"{op.pairs:.0f} {op.backward}")
def test_flops_of_attention_are_the_ops_own(op):
    """torch counts every (query, key) pair, the op those that a query sees."""
    made = build(replace(op, num_kv_heads=op.num_heads), machine("bf16"))
    with flop_counter(display=False) as counted:
        made.calls[0]()
    assert made.flops == op.flops
    assert build(op, machine("bf16")).bytes == op.bytes
    if not (op.backward and op.pairs == WINDOWED):  # a masked backward on a CPU takes a path that torch counts in parts
        assert counted.get_total_flops() * op.pairs / (op.q_len * op.kv_len) == pytest.approx(op.flops)


@pytest.mark.parametrize("kind", memory_bound.KINDS)
def test_a_memory_bound_kernel_moves_what_was_asked(kind):
    for moved in (3e6, 1.7e7):
        made = build(MemoryBound(kind, moved), machine())
        assert made.bytes == pytest.approx(moved, rel=0.01)
        assert made.flops == 0 and len(made.calls) > 1


@pytest.mark.parametrize(("kind", "inputs"), [("elementwise", 2), ("copy", 1), ("norm", 1), ("embedding", 1)])
def test_the_tensors_of_a_kernel_hold_the_bytes_it_counts(kind, inputs):
    """Result and operands, each read or written once: a dumb count of elements."""
    made = build(MemoryBound(kind, 2.4e6), machine())
    result = made.calls[0]()
    assert (inputs + 1) * result.numel() * result.element_size() == made.bytes


def test_windows_and_context_ranks_give_the_pairs_that_were_asked():
    """The mask that is timed holds as many pairs as the op says."""
    for op in (Attention(1, 2, 2, 64, 64, 8, 8, WINDOWED), Attention(1, 2, 2, 32, 64, 8, 8, CAUSAL / 2)):
        window, cp = products.window_of(op), op.kv_len // op.q_len
        mask = products.place(None, torch.arange(1), op.kv_len, cp, 0).mask(window)
        assert int(mask.sum()) == pytest.approx(op.pairs, abs=cp * cp)
    with pytest.raises(Skip, match="no causal band"):
        products.window_of(Attention(1, 2, 2, 64, 64, 8, 8, 64 * 64.0))


def test_rows_of_experts_add_up_and_hold_the_skew():
    op = GroupedGemm(4, 100.0, 8, 8, max_rows=40.0)
    assert products.rows_of(op) == [40, 20, 20, 20]
    assert products.rows_of(replace(op, max_rows=0.0)) == [25] * 4
    assert products.rows_of(GroupedGemm(1, 7.0, 8, 8)) == [7]
    assert products.rows_of(GroupedGemm(3, 2.0, 8, 8, max_rows=2.0)) == [2, 0, 0]
    assert sum(products.rows_of(GroupedGemm(7, 1000.4, 8, 8, max_rows=200.7))) == 1000


def test_operands_are_normal_and_sets_exceed_the_cache():
    here = machine()
    x = here.normal(1000, 1000)
    assert abs(float(x.mean())) < 0.01 and abs(float(x.std()) - 1) < 0.01
    assert not torch.equal(x, here.normal(1000, 1000))
    large = here.normal(work.POOL + 1000)
    assert torch.equal(large[work.POOL:], large[:1000]) and float((large == 0).float().mean()) < 1e-4
    drawn = []
    here.sets(1 << 22, lambda: drawn.append(1))
    assert len(drawn) * (1 << 22) >= min(2 * work.cache_bytes(here.device), work.MAX_SETS << 22)
    with pytest.raises(Skip, match="needs .* of memory"):
        here.sets(1e18, lambda: None)


def test_no_operand_of_a_product_is_zero():
    for op in PRODUCTS:
        results = [t for call in build(op, machine()).calls[:2] for t in [call()] if t is not None]
        assert all(float((t == 0).float().mean()) < 0.01 for t in results)


@pytest.mark.parametrize(("tokens", "k", "experts", "ranks", "load"), [(4096, 2, 8, 2, 1.4), (4096, 4, 64, 8, 3.0), (4096, 8, 16, 8, 1.0), (4096, 4, 8, 4, 1.5)])
def test_dispatch_reaches_the_load_that_was_asked(tokens, k, experts, ranks, load):
    op = Dispatch(tokens, 8, 2.0, k, experts, Group(ranks), "alltoall", 0, load=load)
    chosen = torch.cat([exchange.chosen_experts(tokens, op, rank * tokens) for rank in range(ranks)])
    assert all(len(set(row)) == k for row in chosen[:500].tolist())
    received = torch.bincount(chosen.flatten() // (experts // ranks), minlength=ranks)
    assert float(received.max() / received.float().mean()) == pytest.approx(load, rel=0.01)


# --- how it is timed ------------------------------------------------------------------------------------------------------------


def test_a_call_of_known_length_is_timed_as_such():
    """A sleep of 5 ms takes 5 ms and a little: two windows, at least 3 repeats each."""
    found = timing.sample(lambda: Work([lambda: time.sleep(0.005)], 0, 0, "fp32", {}), machine(), timing.Limits(2.0))
    assert 0.005 <= statistics.median(found.seconds) < 0.02
    assert len(found.windows) == 2 and min(found.windows) >= timing.LEAST and sum(found.windows) == len(found.seconds)


def test_short_calls_are_timed_several_at_once_and_long_ones_stop_at_the_cap():
    calls = []
    short = timing.sample(lambda: Work([lambda: calls.append(1)], 0, 0, "fp32", {}), machine(), timing.Limits(0.05))
    assert short.inner > 10 and statistics.median(short.seconds) < 1e-4
    begin = time.perf_counter()
    long = timing.sample(lambda: Work([lambda: time.sleep(0.1)], 0, 0, "fp32", {}), machine(), timing.Limits(0.25))
    assert 1 <= len(long.seconds) <= 2 and len(long.windows) == 1 and time.perf_counter() - begin < 2
    with pytest.raises(Skip, match="one call took 0.1.* s, above the cap of 0.05 s"):
        timing.sample(lambda: Work([lambda: time.sleep(0.1)], 0, 0, "fp32", {}), machine(), timing.Limits(0.05))


def test_operand_sets_take_turns_and_hooks_run_around_each_repeat():
    seen = []
    made = Work([lambda i=i: seen.append(i) for i in range(3)], 0, 0, "fp32", {}, before=lambda i: seen.append(f"b{i}"), after=lambda: seen.append("a"), single=True)
    timing.sample(lambda: made, machine(), timing.Limits(0.01, windows=1))
    assert seen[:6] == ["b0", 0, "a", "b1", 1, "a"]
    clock = timing._host_clock(machine())
    seen.clear()
    timing._repeat(made, 2, 4, clock, shared=False)
    assert seen == ["b2", 2, 0, 1, 2, "a"]


def test_the_relative_error_is_that_of_a_median():
    """Against the spread of medians of many samples."""
    generator = torch.Generator().manual_seed(0)
    samples = 1 + 0.1 * torch.randn(400, 50, generator=generator)
    predicted = statistics.mean(relative_error(row) for row in samples.tolist())
    assert predicted == pytest.approx(float(samples.median(-1).values.std()), rel=0.15)
    assert relative_error([1.0, 1.0]) == math.inf


def test_patience_halves_while_others_stay_busy(monkeypatch):
    waits, shares = [], iter([0.5, 0.5, 0.5, 0.01, 0.5])
    monkeypatch.setattr(run.machines, "wait_until_quiet", lambda s: waits.append(s) or next(shares))
    patience = run.Patience(8.0)
    for left in (100, 100, 100, 100, 3):
        patience.wait(left)
    assert waits == [8, 4, 2, 1, 3]
    run.Patience(0.0).wait(100)
    assert len(waits) == 5


def test_the_share_of_others_is_what_is_left_of_the_cores(monkeypatch):
    """4 core-seconds used in 2 s on 4 cores, 1 of them ours: 3/8."""
    monkeypatch.setattr(run.machines.host, "used_since", lambda before: (4.0, 1.0, 2.0))
    monkeypatch.setattr(run.machines.os, "cpu_count", lambda: 4)
    assert run.machines.foreign_share(None) == pytest.approx(3 / 8)


# --- the file -------------------------------------------------------------------------------------------------------------------


def test_every_kind_is_measured_and_comes_back_from_the_file(tmp_path):
    path = tmp_path / "m.jsonl"
    skipped = [Gemm(8, 8, 8, "fp8"), Gemm(10**6, 10**6, 10**5), MemoryBound("permute", 0.0), Collective("all_reduce", 8.0, Group(8)),
               MemoryBound("copy", 1e15), MemoryBound("nothing", 1e6)]
    here, options = machine(), replace(QUICK, with_suite=True)
    summary = run.run(asked(*OPS, *skipped), path, here, options)
    found = list(read_measurements(path))
    by_op = {m.op: m for m in found if m.op is not None}
    assert set(by_op) == {*OPS, *skipped} and summary.measured + sum(summary.skipped.values()) == len(found)
    for op in OPS:
        m = by_op[op]
        assert m.reason is None and m.median > 0 and len(m.seconds) == sum(m.windows) >= 2, m
        assert m.device["threads"] == 1 and m.software["torch"] == torch.__version__ and m.topology["world"] == 1 and m.date.endswith("+00:00")
        assert m.flops == op.flops
    assert by_op[PRODUCTS[2]].rows == (40, 19, 19, 18) and by_op[PRODUCTS[2]].skew == pytest.approx(40 * 4 / 96)
    reasons = [by_op[op].reason for op in skipped]
    for reason, word in zip(reasons, ("no fp8 kernel", "above the cap", "nothing to time", "needs 8 ranks", "above the cap", "no memory-bound kind")):
        assert word in reason
    named = {m.name for m in found if m.name}
    assert named == {entry.name for entry in suite.entries(here)}
    assert all(m.reason is None or "needs 2 ranks" in m.reason for m in found if m.name)
    assert [from_record(json.loads(json.dumps(to_record(m)))) for m in found] == found
    assert not any(path.parent.glob(".bench-*"))


def test_bf16_on_a_cpu_is_another_measurement(tmp_path):
    path = tmp_path / "m.jsonl"
    for dtype in ("fp32", "bf16"):
        assert run.run(asked(Gemm(32, 32, 32)), path, machine(dtype), QUICK).measured == 1
    assert [(m.dtype, m.bytes) for m in read_measurements(path)] == [("fp32", 4 * 3 * 32 * 32), ("bf16", 2 * 3 * 32 * 32)]


def test_what_is_there_is_not_measured_again_and_a_half_line_is_cut(tmp_path):
    path = tmp_path / "m.jsonl"
    ops = [Gemm(16, 16, 16), Gemm(16, 16, 32), Gemm(8, 8, 8, "fp8")]
    assert run.run(asked(*ops[:1], ops[2]), path, machine(), QUICK).measured == 1
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:70])
    summary = run.run(asked(*ops), path, machine(), QUICK)
    assert (summary.present, summary.measured) == (1, 1) and path.read_bytes().startswith(whole)
    assert sorted(str(m.op) for m in read_measurements(path)) == sorted(map(str, ops))  # the refusal isn't repeated either
    path.write_bytes(whole[:-1])  # a last line without its newline was not finished: it is measured again
    assert run.run(asked(*ops), path, machine(), QUICK).measured == 2 - (b"fp8" in whole.splitlines()[-1])


def test_a_failing_kernel_is_a_line_and_not_the_end(tmp_path, monkeypatch):
    def broken(op, here):
        raise ZeroDivisionError("no such tile")

    monkeypatch.setitem(sys.modules["moetrain.bench"].WORKS, Attention, broken)
    summary = run.run(asked(ATTENTIONS[0], Gemm(16, 16, 16)), tmp_path / "m.jsonl", machine(), QUICK)
    assert summary.measured == 1 and list(summary.skipped) == ["failed: ZeroDivisionError: no such tile"]


@pytest.mark.parametrize(("change", "message"), [
    ({"seconds": [-1.0], "windows": [1]}, "positive"), ({"windows": [1]}, "do not add up"), ({"second": [1.0]}, "did you mean seconds"),
    ({"seconds": "1"}, "list of float"), ({"schema": "x"}, "schema 'x'"), ({"name": "x"}, "exactly one subject"), ({"reason": "x"}, "seconds, or a reason"),
    ({"op": {"op": "Gem"}}, "did you mean Gemm"), ({"flops": True}, "wrong type"),
])  # fmt: skip
def test_a_bad_measurement_is_refused_by_line(tmp_path, change, message):
    good = to_record(Measurement(op=Gemm(1, 2, 3), seconds=(1.0, 2.0), windows=(1, 1)))
    path = tmp_path / "m.jsonl"
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | change) + "\n")
    with pytest.raises(ValueError, match=rf"m.jsonl:2: .*{message}"):
        list(read_measurements(path))


def test_a_step_of_a_layout_is_a_measurement_too():
    m = Measurement(layout="dp8 ep8", step=3, seconds=(0.5,), windows=(1,))
    assert from_record(to_record(m)) == m and m.aa is None and m.skew is None


def test_properties_are_those_of_the_repeats():
    m = Measurement(name="x", seconds=(1.0, 2.0, 3.0, 4.0, 4.0, 4.0), windows=(3, 3))
    assert m.median == 3.5 and m.aa == pytest.approx(2 / 3.5) and m.spread == pytest.approx((4 - 2.25) / 2 / 3.5)


# --- requests -------------------------------------------------------------------------------------------------------------------


def test_the_order_is_seconds_times_doubt():
    made = [requests.Request(Gemm(1, 1, i), s, p) for i, (s, p) in enumerate([(1, "measured"), (1, "interpolated"), (1, "extrapolated"), (1, "assumed"),
                                                                             (2, "extrapolated"), (9, "interpolated"), (None, None)])]
    assert [r.op.k for r in requests.ordered(made)] == [6, 3, 5, 4, 2, 1, 0]


def test_a_budget_takes_the_most_useful_ops_and_ends_in_time(tmp_path, monkeypatch):
    def sleeper(op, here):
        return Work([lambda: time.sleep(0.05)], op.flops, op.bytes, "fp32", {})

    monkeypatch.setitem(sys.modules["moetrain.bench"].WORKS, Gemm, sleeper)
    made = [requests.Request(Gemm(8, 8, 8 + i), 1e-3 * (i + 1), "extrapolated") for i in range(12)]
    begin = time.monotonic()
    summary = run.run(made, tmp_path / "m.jsonl", machine(), run.Options(budget_s=2.0, cap_s=0.6, quiet_s=0.0))
    assert time.monotonic() - begin < 4
    found = list(read_measurements(tmp_path / "m.jsonl"))
    measured = [m.op.k for m in found if m.reason is None]
    assert 0 < summary.measured < 12 and measured == sorted(measured, reverse=True) and measured[0] == 19
    assert len(found) == 12 and all("budget" in m.reason for m in found if m.reason)


def test_what_the_planner_writes_is_read(tmp_path):
    """Its lines say more than the op: class, price, provenance."""
    path = tmp_path / "ops.jsonl"
    path.write_text("\n".join(map(json.dumps, [
        {**op_fields(MemoryBound("norm", 100.0)), "class": "memory_bound", "term": "memory.norm", "predicted_s": 1e-5, "provenance": "datasheet"},
        {**op_fields(Collective("all_reduce", 8.0, Group(2, 4))), "class": "collective", "term": "all_reduce.nvlink"},
        {**op_fields(Gemm(1, 2, 3)), "class": "gemm"}, op_fields(Gemm(1, 2, 3)),
    ])))  # fmt: skip
    found = requests.read_requests(path)
    assert [r.op for r in found] == [MemoryBound("norm", 100.0), Collective("all_reduce", 8.0, Group(2, 4)), Gemm(1, 2, 3)]
    assert [r.op for r in requests.only(found, ["gemm"])] == [Gemm(1, 2, 3)]


def test_ops_of_a_shipped_scenario_are_read_whole():
    from moesim.load import load_scenario
    from moesim.search import list_ops

    written = [json.loads(json.dumps(line)) for line in list_ops(load_scenario("olmo_core3_new", ()), None)]
    read = [requests._request(line, "") for line in written]
    assert len({r.op for r in read}) == len(written) and {r.kind for r in read} == set(requests.KIND_NAMES.values())
    for line, request in zip(written, read):
        assert request.kind == line["class"] and requests.words(request.op)


@pytest.mark.parametrize(("line", "message"), [
    ("{", "not JSON"), ("[1]", "not a JSON object"), ('{"op": "Gem"}', "did you mean Gemm"), ('{"op": "Gemm", "m": 1, "n": 2}', "lacks 'k'"),
    ('{"op": "Gemm", "m": 1.5, "n": 2, "k": 3}', "whole number"), ('{"op": "Gemm", "m": -1, "n": 2, "k": 3}', "from 0 up"),
    ('{"op": "Gemm", "m": 1, "n": 2, "k": 3, "predicted_s": "1"}', "predicted_s"), ('{"op": "Gemm", "m": 1, "n": 2, "k": 3, "provenance": "guess"}', "provenance"),
    ('{"op": "Collective", "kind": "collective", "bytes": 1, "group": [2, 1]}', "legal are all_gather"), ('{"op": "Collective", "kind": "all_reduce", "bytes": 1, "group": 2}', "size, stride"),
    ('{"op": "Gemm", "m": 1, "n": 2, "k": NaN}', "from 0 up"), ('{"schema": "moesim.measurement/1"}', "a measurement, not an op"),
])  # fmt: skip
def test_a_bad_line_of_ops_is_named(tmp_path, line, message):
    path = tmp_path / "ops.jsonl"
    path.write_text(json.dumps(op_fields(Gemm(1, 2, 3))) + "\n" + line + "\n\n")
    with pytest.raises(ValueError, match=rf"ops.jsonl:2: .*{message}"):
        requests.read_requests(path)


def test_a_warm_up_is_the_same_kernel_on_little():
    for op in [*PRODUCTS, *KINDS]:
        little = requests.small(op)
        assert build(little, machine()).method["kernel"] == build(op, machine()).method["kernel"] and little.bytes < 2e5
    assert requests.small(ATTENTIONS[0]) is None


def test_every_op_survives_being_written():
    for op in [*OPS, Dispatch(4, 8, 2.0, 2, 4, Group(2), "dedup", 20, True, 4, 1.5, 0.9), Collective("send_recv", 3.0, Group(2, 8))]:
        assert op_of(json.loads(json.dumps(op_fields(op)))) == op


# --- several ranks ----------------------------------------------------------------------------------------------------------------

EXCHANGES = [Collective(kind, 4096.0, Group(2)) for kind in exchange.CALLS]
DISPATCHES = [Dispatch(64, 16, 2.0, 2, 8, Group(2), name, 0, combine, load=load) for name in ("alltoall", "sync_free") for combine in (False, True)
              for load in (1.0, 1.25)]


def _bench_on(rank, world, path):
    here = machine(rank=rank, world=world)
    ops = [*EXCHANGES, *DISPATCHES, Gemm(16, 16, 16), Collective("all_reduce", 64.0, Group(4)), Collective("all_reduce", 64.0, Group(2, 2)),
           Dispatch(64, 16, 2.0, 2, 8, Group(2), "dedup", 20), Dispatch(64, 16, 1.0, 2, 8, Group(2), "alltoall", 0)]
    summary = run.run(asked(*ops), path, here, replace(QUICK, cap_s=0.4, with_suite=True))
    return summary.measured, summary.skipped


def test_collectives_and_dispatch_between_two_ranks(tmp_path):
    path = tmp_path / "m.jsonl"
    (measured, skipped), follower = run_ranks(_bench_on, 2, path)
    found = list(read_measurements(path))
    by_op = {m.op: m for m in found if m.op is not None}
    assert follower == (0, {}) and measured == sum(m.reason is None for m in found)
    for op in EXCHANGES:
        assert by_op[op].bytes == op.bytes and by_op[op].median > 1e-6 and by_op[op].topology["world"] == 2
    for op in DISPATCHES:
        m = by_op[op]
        assert m.reason is None and len(m.rows) == 2 and sum(m.rows) == 2 * 64 * 2 and m.skew == pytest.approx(op.load, rel=0.05)
        assert m.bytes == 2 * op.bytes  # float32 rows on a CPU
    assert set(skipped) == {"needs 4 ranks, this run has 2", "needs 2 ranks, 2 apart, this run has 2", "the trainer sends rows of 2 or 4 bytes a value, not 1",
                            "layout dispatcher dedup needs the deep_ep package, which is not installed; use a2a or syncfree"}
    beside = {(m.parameters["compute"], m.parameters["communication"]) for m in found if m.name == "beside" and m.reason is None}
    assert beside == {("gemm", None), ("gemm", "all_reduce"), ("copy", None), ("copy", "all_reduce")}
    assert {m.name for m in found if m.name and m.name.startswith("checkpoint") and m.reason is None} == {"checkpoint_save", "checkpoint_load"}


def test_groups_are_those_of_the_layout():
    """Aligned blocks of size * stride ranks; what doesn't fill a group stays out."""
    assert work.members(Group(2, 1), 4) == [[0, 1], [2, 3]]
    assert work.members(Group(2, 2), 4) == [[0, 2], [1, 3]]
    assert work.members(Group(2, 2), 6) == [[0, 2], [1, 3]]
    assert work.members(Group(2, 2), 3) == [[0, 2]]
    assert work.members(Group(4, 1), 3) == []


# --- the command ------------------------------------------------------------------------------------------------------------------

PROGRAM = "import typer\nfrom moetrain.bench.cli import add_commands\napp = typer.Typer()\napp.callback()(lambda: None)\nadd_commands(app)\napp()"


def command(folder, *words):
    return subprocess.run([sys.executable, "-c", PROGRAM, "bench", *map(str, words)], capture_output=True, text=True, cwd=folder, timeout=120)


def test_the_command_writes_a_line_for_each_op_and_goes_on(tmp_path, monkeypatch, capsys):
    lines(tmp_path / "ops.jsonl", [Gemm(16, 16, 16), Gemm(8, 8, 8, "fp8")], predicted_s=1e-3, provenance="assumed")
    words = ("ops.jsonl", "-o", "m.jsonl", "--cap", "50ms", "--quiet-wait", "0s", "--budget", "5m")
    done = command(tmp_path, *words)
    assert done.returncode == 0 and "1 measured" in done.stdout and "skipped 1: the trainer has no fp8" in done.stdout, done
    assert len(done.stderr.splitlines()) == 2 and "GFLOP/s" in done.stderr
    code, said = called(tmp_path, *words, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0 and "1 there already" in said.out and said.err.count("\n") == 1
    assert len(list(read_measurements(tmp_path / "m.jsonl"))) == 2


def called(folder, *words, monkeypatch, capsys):
    app = typer.Typer()
    app.callback()(lambda: None)
    cli.add_commands(app)
    monkeypatch.chdir(folder)
    with pytest.raises(SystemExit) as end:
        app(["bench", *words])
    return end.value.code, capsys.readouterr()


@pytest.mark.parametrize(("words", "message"), [
    (("none.jsonl", "-o", "x.jsonl"), "none.jsonl: No such file"), (("ops.jsonl", "-o", "no/x.jsonl"), "there is no folder no"),
    (("ops.jsonl", "-o", "ops.jsonl"), "the list of ops itself"), (("ops.jsonl", "-o", "."), "is a folder"), (("-o", "x.jsonl"), "OPS is missing"),
    (("ops.jsonl", "-o", "x.jsonl", "--budget", "5q"), "--budget: unknown unit 'q'"), (("ops.jsonl", "-o", "x.jsonl", "--only", "gem"), "did you mean gemm"),
    (("ops.jsonl", "-o", "x.jsonl", "--dtype", "fp8"), "legal are auto, float32, bfloat16"), (("ops.jsonl", "-o", "bad.jsonl"), "bad.jsonl:1: not JSON"),
    (("ops.jsonl", "-o", "x.jsonl", "--cap", "-1s"), "must not be negative"), (("empty.jsonl", "-o", "x.jsonl"), "no ops in it"),
])  # fmt: skip
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, words, message):
    lines(tmp_path / "ops.jsonl", [Gemm(16, 16, 16)])
    (tmp_path / "bad.jsonl").write_text("{\n{}\n")
    (tmp_path / "empty.jsonl").write_text("\n")
    before = sorted(tmp_path.iterdir())
    code, said = called(tmp_path, *words, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2 and message in said.err and said.err.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == before and (tmp_path / "bad.jsonl").read_text() == "{\n{}\n"


def test_times_are_read_as_people_write_them():
    assert [cli.seconds_of("--budget", text) for text in ("5m", "5 min", "90s", "1.5h", "250 ms", "0s")] == [300, 300, 90, 5400, 0.25, 0]
