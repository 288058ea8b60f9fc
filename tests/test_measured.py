"""Do measurements of a machine move a profile as far as they say, and no further? (Synthetic lines of a known truth, through files.)"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from calibration.drift import drift
from calibration.lines import read
from calibration.measured import make, sentences
from calibration.write import profile_yaml
from moesim.load import load_cluster
from moesim.measurement import Measurement, to_record
from moesim.ops import Attention, Collective, Gemm, Group, GroupedGemm, MemoryBound
from moesim.pricing import PROVENANCE, kernel, term_name
from moesim.profile import load_profile, paced

CPU = {"name": "Test CPU", "kind": "cpu", "cores": 4, "threads": 1}
GPU = {"name": "NVIDIA H200", "kind": "cuda", "num_sms": 132}
SOFTWARE = {"torch": "2.13.0", "compute": "bf16", "code": "a1"}
GEMMS = [Gemm(m, n, k) for m in (32, 128, 512, 2048) for n, k in ((256, 256), (512, 256), (256, 1024), (2048, 128))]
NORMS = [MemoryBound("norm", 2.0**p) for p in range(14, 26)]


def line(seconds, rng=None, noise=0.01, repeats=8, **fields) -> Measurement:
    """A measurement whose repeats lie about ``seconds``."""
    spread = np.exp(noise * (rng or np.random.default_rng(0)).standard_normal(repeats))
    return Measurement(**{"seconds": tuple((seconds * spread).tolist()), "windows": (repeats // 2, repeats - repeats // 2), "device": CPU, "software": SOFTWARE,
                          "topology": {"world": 1, "nodes": 1, "transport": "gloo"}, "date": "2026-01-01T00:00:00+00:00"} | fields)


def truth(profile, name, slower=1.0, **changes):
    """A term of ``profile`` so much slower, some parameters changed."""
    term = profile.term(name)
    return {**paced(term, 1.0 / slower), **changes}


def lines_of(profile, ops, parameters, seed=0, **fields):
    """One line an op, of a kernel that has these parameters."""
    rng = np.random.default_rng(seed)
    seconds = kernel(profile.term(term_name(ops[0])).kind, profile.num_sms, ops)(parameters)
    return [line(s, rng, op=op, **({"bytes": op.moved} if isinstance(op, MemoryBound) else {}), **fields) for op, s in zip(ops, seconds)]


def write(path, *groups):
    path.write_text("".join(json.dumps(to_record(m)) + "\n" for group in groups for m in group))
    return path


@pytest.fixture(scope="module")
def cpu():
    return load_profile("cpu_gloo")


def alone(profile, ops):
    return kernel(profile.term(term_name(ops[0])).kind, profile.num_sms, ops)(profile.parameters(term_name(ops[0]), in_training=False))


def test_a_cpu_that_nobody_knew_is_priced_as_it_was_measured(tmp_path, cpu):
    known = {"gemm.bf16": truth(cpu, "gemm.bf16", 0.3, ramp_rows=15.0), "memory.norm": truth(cpu, "memory.norm", 2.0)}
    made = make([write(tmp_path / "m.jsonl", lines_of(cpu, GEMMS, known["gemm.bf16"]), lines_of(cpu, NORMS, known["memory.norm"]))], "mine")
    unseen = {"gemm.bf16": [Gemm(256, 512, 512), Gemm(1024, 1024, 256)], "memory.norm": [MemoryBound("norm", 3e5)]}
    for name, ops in unseen.items():
        right = kernel(cpu.term(name).kind, 0, ops)(known[name])
        assert alone(made.profile, ops) == pytest.approx(right, rel=0.04), name
        term = made.profile.term(name)
        assert term.provenance == "measured" and term.sigma_log < 0.05 and {f.split for f in term.fits} > {"in sample"}
        assert term.covariance and all(s > 0 for s in term.stderr.values())
    again = tmp_path / "mine.yaml"
    again.write_text(profile_yaml(made.profile))
    assert load_profile(again).stamp.num_lines == len(GEMMS) + len(NORMS)
    sibling = made.profile.term("gemm.fp32")  # a guess that moves with what was measured
    assert sibling.provenance == "extrapolated" and sibling.parameters["rate"] > 2 * cpu.term("gemm.fp32").parameters["rate"]


def test_few_measurements_move_a_gpu_and_leave_what_they_do_not_touch(tmp_path):
    parent = load_profile("h200")
    ops = [Gemm(m, 4096, 4096) for m in (512, 1024, 2048, 4096, 8192, 16384)]
    slower = lines_of(parent, ops, truth(parent, "gemm.bf16", 1.25), device=GPU)
    made = make([write(tmp_path / "m.jsonl", slower, lines_of(parent, NORMS, truth(parent, "memory.norm", 1.1), device=GPU))], "site")
    assert made.profile.parent == "h200"
    unseen = [Gemm(3072, 8192, 4096)]
    assert alone(made.profile, unseen) == pytest.approx(1.25 * alone(parent, unseen), rel=0.05)
    for name in ("gemm.fp8", "attention.forward", "all_gather.nvlink"):
        before, after = parent.term(name), made.profile.term(name)
        assert after.parameters == before.parameters and after.provenance == "extrapolated" and after.sigma_log > before.sigma_log
    assert made.profile.sustained == parent.sustained and made.profile.curves == parent.curves
    grouped = [GroupedGemm(8, 16384.0, 4096, 4096)]
    assert alone(made.profile, grouped) == pytest.approx(alone(parent, grouped))  # not measured: the parent's, dense kernel and all


def test_a_grouped_product_of_a_gpu_is_made_of_its_measured_dense_one(tmp_path):
    parent = load_profile("h200")
    dense = truth(parent, "gemm.bf16", 1.2)
    ops = [GroupedGemm(g, float(r), n, 4096) for g in (4, 16) for r in (8192, 65536) for n in (2048, 8192)]
    grouped = {**parent.term("grouped_gemm.bf16").parameters, **dense, "efficiency": 0.7}
    made = make([write(tmp_path / "m.jsonl", lines_of(parent, [Gemm(m, n, 4096) for m in (512, 4096, 16384) for n in (2048, 8192)], dense, device=GPU),
                       lines_of(parent, ops, grouped, device=GPU))], "site")
    assert made.profile.term("grouped_gemm.bf16").parameters["efficiency"] == pytest.approx(0.7, rel=0.06)


def test_what_one_size_can_not_tell_stays_as_believed_and_is_named(tmp_path, cpu):
    ops = [Gemm(512, 256, 256)] * 3
    made = make([write(tmp_path / "m.jsonl", lines_of(cpu, ops, truth(cpu, "gemm.bf16", 0.5)))], "mine")
    term = made.profile.term("gemm.bf16")
    assert "pinned to what was believed" in term.note and "m 512, n 256, k 256" in term.note
    assert any("pinned" in s for s in sentences(made))
    for name in made.fitted["gemm.bf16"].posterior.pinned:
        assert term.parameters[name] == pytest.approx(cpu.term("gemm.bf16").parameters[name]) and term.stderr[name] > term.parameters[name]
    assert alone(made.profile, ops[:1]) == pytest.approx(kernel("core_gemm", 0, ops[:1])(truth(cpu, "gemm.bf16", 0.5)), rel=0.1)
    far = Gemm(512, 4096, 8)
    assert made.profile.price([far], load_cluster("cpu_gloo")).provenance[0] == PROVENANCE.index("extrapolated")


def test_noisy_lines_are_kept_counted_and_weighed_less(tmp_path, cpu):
    right = lines_of(cpu, GEMMS, cpu.term("gemm.bf16").parameters)
    wrong = [replace(m, seconds=tuple(1.6 * s for s in m.seconds), noisy=("others used 30% of the cores",)) for m in lines_of(cpu, GEMMS[::2], cpu.term("gemm.bf16").parameters, seed=1)]
    made = make([write(tmp_path / "m.jsonl", right, wrong)], "mine")
    assert f"{len(wrong)} of {len(right) + len(wrong)} lines noisy" in made.profile.term("gemm.bf16").note and made.profile.stamp.num_noisy == len(wrong)
    assert alone(made.profile, [Gemm(512, 512, 512)]) == pytest.approx(alone(cpu, [Gemm(512, 512, 512)]), rel=0.08)


@pytest.mark.parametrize("what,change", [("device", {"device": CPU | {"name": "Other CPU"}}), ("software", {"software": SOFTWARE | {"torch": "2.12.0"}})])
def test_two_machines_or_softwares_are_not_mixed(tmp_path, cpu, what, change):
    first = lines_of(cpu, GEMMS[:4], cpu.term("gemm.bf16").parameters)
    with pytest.raises(ValueError, match=f"two {what}s") as caught:
        read([write(tmp_path / "m.jsonl", first, [replace(first[0], **change)])])
    old, new = ("Test CPU", "Other CPU") if what == "device" else ("2.13.0", "2.12.0")
    assert old in str(caught.value) and new in str(caught.value) and "\n" not in str(caught.value)


def test_changed_sources_of_the_trainer_are_said(tmp_path, cpu):
    first = lines_of(cpu, GEMMS, cpu.term("gemm.bf16").parameters)
    made = make([write(tmp_path / "m.jsonl", first, [replace(m, software=SOFTWARE | {"code": "b2"}) for m in first[:2]])], "mine")
    assert any("a1, b2" in w for w in made.warnings) and made.profile.stamp.software["code"] == "a1 b2"


def test_a_gpu_does_not_come_from_a_cpu(tmp_path, cpu):
    path = write(tmp_path / "m.jsonl", lines_of(cpu, GEMMS[:4], cpu.term("gemm.bf16").parameters))
    with pytest.raises(ValueError, match="Test CPU.*h200"):
        make([path], "mine", "h200")
    path = write(tmp_path / "n.jsonl", lines_of(cpu, GEMMS[:4], cpu.term("gemm.bf16").parameters, device={"name": "Some Chip", "kind": "cuda"}))
    with pytest.raises(ValueError, match="Some Chip.*--parent"):
        make([path], "mine")


# --- inside steps -------------------------------------------------------------------------------------------------------------

STEP = {"where": "step", "timer": "span", "calls": 1}


def test_a_step_that_runs_slower_than_its_kernels_alone_is_priced_so(tmp_path, cpu):
    """Products take 1.3 times as long in a step, norms twice; one span holds a product and a norm."""
    gemm, norm = cpu.term("gemm.bf16").parameters, cpu.term("memory.norm").parameters
    solo = [*lines_of(cpu, GEMMS, gemm), *lines_of(cpu, NORMS, norm)]
    product, stream = GEMMS[5], NORMS[-1]
    a, b = alone(cpu, [product])[0], alone(cpu, [stream])[0]
    steps = [line(1.3 * a, op=product, method=STEP), line(2.0 * b, op=stream, method=STEP)]
    fields = [{"op": "Gemm", "m": product.m, "n": product.n, "k": product.k, "count": 2}, {"op": "MemoryBound", "kind": "norm", "moved": stream.moved, "backward_ratio": 1.5, "count": 1}]
    steps.append(line(2.6 * a + 2.0 * b, name="span", parameters={"roles": ["qkv", "norm"], "ops": fields}, method=STEP))
    profile = make([write(tmp_path / "m.jsonl", solo, steps)], "mine").profile
    assert profile.sustained["gemm.bf16"].factor == pytest.approx(1 / 1.3, rel=0.03)
    assert profile.sustained["memory.norm"].factor == pytest.approx(1 / 2, rel=0.03)
    assert profile.sustained["gemm.bf16"].provenance == "measured" and profile.sustained["gemm.bf16"].evidence["spans"] == 2
    cluster = load_cluster("cpu_gloo")
    inside, outside = (profile.price([product, stream], cluster, in_training=flag).seconds for flag in (True, False))
    assert inside / outside == pytest.approx([1.3, 2.0], rel=0.03)
    assert profile.sustained["fp32"].factor == 1.0 and profile.sustained["fp32"].provenance == "assumed" and profile.sustained["fp32"].sigma_log > 0


def test_without_steps_the_factor_is_one_with_a_sigma(tmp_path, cpu):
    profile = make([write(tmp_path / "m.jsonl", lines_of(cpu, GEMMS, cpu.term("gemm.bf16").parameters))], "mine").profile
    assert profile.sustained["bf16"].factor == 1.0 and profile.sustained["bf16"].sigma_log == pytest.approx(0.1)


def test_a_span_of_other_work_is_left_out(tmp_path, cpu):
    """A thousandth of what its op takes alone: a label on the wrong span."""
    a = alone(cpu, GEMMS[5:6])[0]
    steps = [line(1.3 * a, op=GEMMS[5], method=STEP), line(a / 1000, op=GEMMS[5], method=STEP)]
    profile = make([write(tmp_path / "m.jsonl", lines_of(cpu, GEMMS, cpu.term("gemm.bf16").parameters), steps)], "mine").profile
    assert profile.sustained["gemm.bf16"].factor == pytest.approx(1 / 1.3, rel=0.03)


# --- collectives --------------------------------------------------------------------------------------------------------------

SIZES = (1024, 65536, 2**20, 2**22, 2**24)


def rings(kind, members, world=None, scale=1.0, sizes=SIZES):
    """A latency, a rate, and half the rate beyond one MiB."""
    where = {"world": world or members, "nodes": 1, "transport": "gloo"}
    return [line(scale * (3e-4 + b / 3e9 + max(0, b - 2**20) / 3e9), op=Collective(kind, float(b), Group(members)), topology=where) for b in sizes]


def test_measured_curves_keep_their_knee_and_other_members_are_extrapolated(tmp_path):
    made = make([write(tmp_path / "m.jsonl", rings("all_reduce", 2), rings("send_recv", 2, scale=0.5), rings("all_reduce", 2, world=4, scale=9.0))], "mine")
    cluster, profile = load_cluster("cpu_gloo", ["gpus_per_node=8"]), made.profile
    ops = [Collective("all_reduce", float(b), Group(2)) for b in (2**19, 2**23)]
    expected = [3e-4 + 2**19 / 3e9, 3e-4 + 2**23 / 3e9 + (2**23 - 2**20) / 3e9]
    assert profile.price(ops, cluster).seconds == pytest.approx(expected, rel=0.05)
    assert profile.price([Collective("send_recv", 2.0**22, Group(2))], cluster).seconds[0] == pytest.approx(0.5 * (3e-4 + 2**22 / 3e9 + 3 * 2**20 / 3e9), rel=0.05)
    codes = [PROVENANCE[c] for c in profile.price([*ops, Collective("all_reduce", 2.0**20, Group(4))], cluster).provenance]
    assert codes == ["interpolated", "interpolated", "extrapolated"]
    assert any("several groups at once" in reason for reason in made.lines.unused)


def test_a_curve_of_small_sizes_goes_on_as_its_sibling(tmp_path):
    made = make([write(tmp_path / "m.jsonl", rings("all_reduce", 2), rings("all_reduce", 4, scale=3.0, sizes=SIZES[:2]))], "mine")
    curve = made.profile.curve_tables["all_reduce"][4]
    assert curve.bytes[-1] == pytest.approx(2**24)
    rise, of_two = curve.seconds[-1] - curve.seconds[1], made.profile.curve_tables["all_reduce"][2]
    assert rise == pytest.approx((of_two.seconds[-1] - of_two.seconds[1]) * 1.5, rel=0.02)  # a rank sends 2 x 3/4 of the bytes, not 2 x 1/2
    assert "beyond as over 2" in made.profile.term("all_reduce.nvlink").note


# --- the suite ----------------------------------------------------------------------------------------------------------------


def test_the_suite_has_a_home_in_the_profile(tmp_path, cpu):
    side, copy = Gemm(384, 384, 384), MemoryBound("copy", 2.0**24)
    named = [
        line(4 * alone(cpu, [side])[0], name="beside", parameters={"compute": "gemm", "communication": None, "ranks": 2}, flops=side.flops),
        line(5 * alone(cpu, [side])[0], name="beside", parameters={"compute": "gemm", "communication": "all_reduce", "ranks": 2}, flops=side.flops),
        line(0.5, name="checkpoint_save", parameters={"bytes": 10**9, "ranks": 2}, bytes=1e9),
        line(0.02, name="gradient_add", parameters={"elements": 4}, bytes=40.0),
    ]
    solo = [*lines_of(cpu, [*GEMMS, side], cpu.term("gemm.bf16").parameters), *lines_of(cpu, [replace(copy, moved=2.0**p) for p in range(16, 26)], cpu.term("memory.copy").parameters)]
    profile = make([write(tmp_path / "m.jsonl", solo, named)], "mine").profile
    by = {(b.running, b.beside): b for b in profile.beside}
    assert by["gemm", ""].ratio == pytest.approx(4.0, rel=0.05) and by["gemm", "all_reduce"].ratio == pytest.approx(1.25, rel=0.05)
    assert [(g.running, g.beside) for g in profile.gammas] == [("gemm", "collective")] and profile.gammas[0].gamma == pytest.approx(0.25, abs=0.05)
    assert profile.storage[0].bytes_per_s == pytest.approx(2e9, rel=0.02) and profile.host.launch_s["x86"] == 0.0


def test_the_launch_cost_of_a_gpu_host_is_measured(tmp_path):
    parent = load_profile("h200")
    named = [line(s, name="launch", parameters={"op": op}, device=GPU) for op, s in (("add", 4e-6), ("mm", 6e-6), ("linear_step", 3e-5))]
    profile = make([write(tmp_path / "m.jsonl", lines_of(parent, NORMS, truth(parent, "memory.norm"), device=GPU), named)], "site").profile
    assert profile.host.launch_s["x86"] == pytest.approx(4e-6, rel=0.02)


# --- drift --------------------------------------------------------------------------------------------------------------------


def test_a_profile_has_not_drifted_from_itself():
    for name in ("cpu_gloo", "h200"):
        found = drift(load_profile(name), load_profile(name))
        assert len(found) > 15 and all(d.ratio == pytest.approx(1.0) and not d.is_far for d in found)


def test_a_slower_term_is_marked_and_no_other(tmp_path, cpu):
    make_one = lambda slower: make([write(tmp_path / f"{slower}.jsonl", lines_of(cpu, GEMMS, truth(cpu, "gemm.bf16", slower)), lines_of(cpu, NORMS, cpu.term("memory.norm").parameters))], "x").profile  # noqa: E731
    found = {d.term: d for d in drift(make_one(1.0), make_one(1.3)) if d.what == "alone"}
    assert found["gemm.bf16"].is_far and found["gemm.bf16"].ratio == pytest.approx(1.3, rel=0.06)
    assert not found["memory.norm"].is_far and found["memory.norm"].ratio == pytest.approx(1.0, abs=0.03)
    with pytest.raises(ValueError, match="one is of a CPU"):
        drift(cpu, load_profile("h200"))


# --- the command line ---------------------------------------------------------------------------------------------------------


def run(*args):
    return subprocess.run([sys.executable, "-m", "calibration", *map(str, args)], capture_output=True, text=True)


def test_the_command_writes_a_profile_that_plans(tmp_path, cpu):
    path = write(tmp_path / "m.jsonl", lines_of(cpu, GEMMS, truth(cpu, "gemm.bf16", 0.5)))
    done = run("fit", path, "--name", "mine", "--out", tmp_path, "--json", tmp_path / "fit.json", "--plots", tmp_path / "plots")
    assert done.returncode == 0 and "gemm.bf16" in done.stdout and "not measured" in done.stdout
    assert json.loads((tmp_path / "fit.json").read_text())["terms"][0]["errors"]["families"]["lines"] == len(GEMMS)
    assert "gemm.bf16" in (tmp_path / "plots" / "mine.html").read_text()
    profile = load_profile(tmp_path / "mine.yaml")
    assert profile.stamp.files.keys() == {"m.jsonl"} and profile.stamp.device["name"] == "Test CPU"
    changed = run("diff", "cpu_gloo", tmp_path / "mine.yaml", "--json", tmp_path / "diff.json")
    assert changed.returncode == 0 and json.loads((tmp_path / "diff.json").read_text())["terms"]


@pytest.mark.parametrize("args,said", [((), "needs a name"), (("--name", "../x"), "needs a name"), (("--name", "h100"), "shipped profile")])
def test_a_bad_name_is_one_line_and_nothing_is_written(tmp_path, cpu, args, said):
    path = write(tmp_path / "m.jsonl", lines_of(cpu, GEMMS[:4], cpu.term("gemm.bf16").parameters))
    done = run("fit", path, *args, "--out", tmp_path / "out")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and said in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "{}\n", "no json\n", '{"schema":"moesim.measurement/1","op":{"op":"Gemm","m":1,"n":1,"k":1},"reason":"too long"}\n'])
def test_a_file_without_measurements_is_one_line(tmp_path, text):
    (tmp_path / "m.jsonl").write_text(text)
    done = run("fit", tmp_path / "m.jsonl", "--name", "mine", "--out", tmp_path / "out")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and not (tmp_path / "out").exists()


def test_attention_is_fitted_forward_and_backward(tmp_path, cpu):
    ops = [Attention(b, h, h, s, s, d, d, s * (s + 1) / 2) for b in (1, 4) for h in (2, 8) for s in (128, 512) for d in (32, 64)]
    back = [replace(op, backward=True) for op in ops]
    made = make([write(tmp_path / "m.jsonl", lines_of(cpu, ops, truth(cpu, "attention.forward", 0.7)), lines_of(cpu, back, truth(cpu, "attention.backward", 1.4)))], "mine")
    for chosen, slower in ((ops, 0.7), (back, 1.4)):
        assert alone(made.profile, chosen) == pytest.approx(slower * alone(cpu, chosen), rel=0.05)
