"""Does the reader of traces find what is in them: busy, hidden and idle time, stream by stream, exactly?"""

from __future__ import annotations

import gzip
import json
import random
import time
from dataclasses import asdict

import pytest
from recorded_runs import plan_of
from typer.testing import CliRunner

from calibration.__main__ import app
from calibration.chrome_trace import _teller, read_trace
from moesim import engine
from moesim.program import COMM, COMPUTE
from moesim.timeline import chrome_trace
from moetrain.observe.trace import SpanRecorder, read_spans, write_chrome

NCCL = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def kernel(name, ts, dur, stream=7, device=0, cat="kernel"):
    return {"ph": "X", "cat": cat, "name": name, "pid": device, "tid": stream, "ts": ts, "dur": dur, "args": {"device": device, "stream": stream, "grid": [1, 2, 3]}}


def write(path, events):
    path.write_text(json.dumps({"schemaVersion": 1, "deviceProperties": [{"id": 0}], "traceEvents": events, "traceName": "t"}))
    return path


def test_known_by_construction(tmp_path):
    """compute 0-100 and 150-200, communication 50-170: 70 of 120 hidden, nothing runs in 200-210, a copy at 210-220."""
    events = [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": -500, "dur": 5000, "args": {}}, {"ph": "i", "name": "x", "ts": 3},
              kernel("gemm", 0, 100), kernel("gemm", 150, 50), kernel(NCCL, 50, 120, stream=20), kernel("Memcpy DtoH (Device -> Pinned)", 210, 10, cat="gpu_memcpy")]
    found = read_trace(write(tmp_path / "t.json", events))
    (device,) = found.devices
    assert (found.events, found.used, found.cut) == (6, 4, False)
    us = {name: round(getattr(device, name) * 1e6, 6) for name in ("makespan", "compute", "communication", "copy", "hidden", "idle")}
    assert us == {"makespan": 220, "compute": 150, "communication": 120, "copy": 10, "hidden": 70, "idle": 10}
    assert device.hidden_share == pytest.approx(70 / 120)
    assert [(s.stream, s.kernels) for s in device.streams] == [("stream 7", 3), ("stream 20", 1)]


def by_the_microsecond(events):
    """The same figures of one device, a microsecond at a time."""
    sets = {"compute": set(), "communication": set()}
    for e in events:
        sets["communication" if "nccl" in e["name"] else "compute"] |= set(range(e["ts"], e["ts"] + e["dur"]))
    every = sets["compute"] | sets["communication"]
    end = max(e["ts"] + e["dur"] for e in events)
    return {"makespan": end - min(e["ts"] for e in events), **{k: len(v) for k, v in sets.items()}, "hidden": len(sets["compute"] & sets["communication"]),
            "idle": end - min(e["ts"] for e in events) - len(every)}


@pytest.mark.parametrize("seed", range(20))
def test_as_a_count_of_microseconds(tmp_path, seed):
    rng = random.Random(seed)
    devices = rng.randint(1, 3)
    events = [kernel(rng.choice(("gemm", NCCL)), rng.randrange(2000), rng.randrange(60), rng.randrange(4), rng.randrange(devices)) for _ in range(rng.randint(5, 120))]
    found = read_trace(write(tmp_path / "t.json", events))
    for device in found.devices:
        mine = [e for e in events if f"device {e['args']['device']}" == device.device]
        assert {name: round(getattr(device, name) * 1e6, 6) for name in by_the_microsecond(mine)} == by_the_microsecond(mine)
        assert device.makespan == pytest.approx(device.compute + device.communication - device.hidden + device.idle)
    assert sum(s.kernels for d in found.devices for s in d.streams) == len(events)


def test_names_of_kernels_that_communicate():
    tell = _teller(None)
    yes = (NCCL, "ncclDevKernel_SendRecv", "ncclKernel_AllReduce_RING_LL_Sum_float", "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*)",
           "void deep_ep::internode::combine<8>", "deep_ep::internode::notify_dispatch", "nvshmemi_transfer", "void cross_device_reduce_1stage<__nv_bfloat16>",
           "deep_ep::internode_ll::combine<true>", "dispatch_kernel", "all_to_all_v")
    no = ("sm90_xmma_gemm_bf16bf16", "void flash_fwd_splitkv_combine_kernel", "void at::native::reduce_kernel<512>", "fp8_gemm_kernel", "void at::native::elementwise_kernel",
          "recombined", "flash_attn_bwd", "splitKreduce_kernel", "layer_norm")
    assert all(map(tell, yes)), [name for name in yes if not tell(name)]
    assert not any(map(tell, no)), [name for name in no if tell(name)]


def test_no_digit_is_lost_on_a_clock_since_1970(tmp_path):
    path = tmp_path / "t.json"
    path.write_text('{"traceEvents": [%s]}' % ",".join(
        '{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1740000000000%03d.%03d, "dur": 0.125, "args": {"device": 0, "stream": 7}}' % (i, i) for i in range(10)))
    (device,) = read_trace(path).devices
    assert round(device.compute * 1e9) == 1250 and round(device.makespan * 1e9) == 9009 + 125


@pytest.mark.parametrize("layout, world", [("mb4 zero0", 1), ("dp2 ep2 mb2", 2), ("dp2 mb4 zero3 ov:fsdp1", 2), ("pp2 mb2", 2)])
def test_the_simulators_own_traces(tmp_path, layout, world):
    planned = plan_of(layout, world)
    timeline = engine.run(planned.evaluator.program(planned.layout))
    path = tmp_path / "t.json"
    path.write_text(json.dumps(chrome_trace(timeline)))
    found = read_trace(path)
    assert [d.device for d in found.devices] == [f"rank {r}" for r in range(timeline.num_ranks)]
    for rank, device in enumerate(found.devices):
        assert device.compute == pytest.approx(timeline.busy(rank, COMPUTE), abs=1e-6)
        assert next((s.busy["communication"] for s in device.streams if s.stream == "comm"), 0.0) == pytest.approx(timeline.busy(rank, COMM), abs=1e-6)


def test_the_trainers_own_traces(tmp_path):
    spans = SpanRecorder(tmp_path, 0, 1, 1)
    spans.begin_step(1)
    with spans.span("qkv forward layer 0", "qkv", layer=0):
        time.sleep(0.003)
    sent = spans.start("dispatch", "dispatch", "comm", bytes=8)
    time.sleep(0.002)
    spans.stop(sent)
    spans.end_step()
    spans.close()
    step = read_spans([spans.path])[1]
    write_chrome(step, tmp_path / "t.json")
    (device,) = read_trace(tmp_path / "t.json").devices
    assert device.compute == pytest.approx(step.timeline.busy(0), abs=1e-6) and device.communication >= 0.002 and device.hidden == 0


def test_zipped_listed_and_large(tmp_path):
    """The forms of a file say the same; two hundred thousand events take seconds, whatever stands between them."""
    events = [kernel(("gemm", NCCL)[i % 2], 3 * i, 2, stream=i % 2) for i in range(200)]
    plain = read_trace(write(tmp_path / "a.json", events))
    with gzip.open(tmp_path / "b.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file, indent=2)
    (tmp_path / "c.json").write_text(json.dumps(events))
    (tmp_path / "d.json").write_text(json.dumps(events)[:-1])  # a list may lack its end
    for other in ("b.json.gz", "c.json", "d.json"):
        assert read_trace(tmp_path / other).devices == plain.devices
    one = json.dumps(kernel("gemm", 0, 1) | {"args": {"device": 0, "stream": 7, "stack": "x" * 3_000_000}})
    (tmp_path / "long.json").write_text('{"traceEvents": [' + one + ", " + one + "]}")
    assert read_trace(tmp_path / "long.json").used == 2  # events longer than what is read at a time
    many = ",".join(json.dumps(kernel("gemm", i, 1)) for i in range(200_000))
    (tmp_path / "large.json").write_text('{"other": [1, 2], "traceEvents": [' + many + "]}")
    begin = time.process_time()
    assert read_trace(tmp_path / "large.json").used == 200_000 and time.process_time() - begin < 20
    assert read_trace(tmp_path / "large.json", most=1000).cut


@pytest.mark.parametrize("text, what", [
    ("", "neither a list of events nor an object"),
    ("hello", "neither a list of events nor an object"),
    ('{"a": 1}', "no list of traceEvents"),
    ('{"traceEvents": []}', "no kernel of a device"),
    ('{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "dur": 2}', "cut short after 1 events"),
    ('{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "dur": 2}, {"ph": ', "broken behind event 1"),
    ('{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": "soon", "dur": 2}]}', "'soon' is no time in microseconds"),
    ('{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "dur": -2}]}', "lasts -2 microseconds"),
    ('{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": NaN, "dur": 2}]}', "is no time in microseconds"),
])
def test_bad_files_are_one_line(tmp_path, text, what):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(ValueError) as refused:
        read_trace(path)
    assert what in str(refused.value) and str(path) in str(refused.value) and "\n" not in str(refused.value)
    zipped = tmp_path / "t.json.gz"
    zipped.write_bytes(gzip.compress(b"[" + b"1," * 9999)[:-9])
    with pytest.raises(ValueError):
        read_trace(zipped)


def test_the_command(tmp_path):
    path = write(tmp_path / "t.json", [kernel("gemm", 0, 100), kernel("my_exchange", 50, 100, stream=20)])
    shown = CliRunner().invoke(app, ["trace", str(path), "--communication", "exchange", "--json", str(tmp_path / "u.json")])
    assert shown.exit_code == 0 and "50.0% of it hidden" in shown.output
    written = json.loads((tmp_path / "u.json").read_text())
    assert written["devices"][0]["hidden_share"] == 0.5 and set(asdict(read_trace(path).devices[0])) <= set(written["devices"][0])
