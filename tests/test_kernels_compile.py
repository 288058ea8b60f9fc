"""Does every kernel compile for sm_90, sm_100 and sm_103, on the tensor cores, without spills, within shared memory?"""

from __future__ import annotations

import json

import pytest

triton = pytest.importorskip("triton")

from moetrain.kernels import compile as table  # noqa: E402
from moetrain.kernels import grouped_gemm, permute, rms_norm, runtime, scaled_gemm, swiglu, topk  # noqa: E402

pytestmark = pytest.mark.skipif(runtime.INTERPRET, reason="interpreted kernels don't compile")
SLICE = [(case, target) for case in table.cases() for target in case.targets]
EVERY = [(case, target) for case in table.cases(every=True) for target in case.targets]


def name_of(parameters) -> str:
    return "-".join(str(p.name) if isinstance(p, table.Case) else f"sm_{p}" for p in parameters)


@pytest.mark.parametrize("case, target", SLICE, ids=map(name_of, SLICE))
def test_one_config_of_each_kernel(case, target):
    assert not table.compile_case(case, target).problems


@pytest.mark.full
@pytest.mark.parametrize("case, target", EVERY)
def test_every_config_of_each_kernel(case, target):
    assert not table.compile_case(case, target).problems


def test_every_kernel_is_in_the_table():
    """A kernel is a jitted function called NAME_kernel; helpers inlined into it are not."""
    modules = (grouped_gemm, permute, rms_norm, scaled_gemm, swiglu, topk)
    kernels = {name for module in modules for name, value in vars(module).items() if name.endswith("_kernel") and hasattr(value, "arg_names")}
    assert kernels == {case.kernel.__name__ for case, _ in SLICE}
    tuned = [config for configs in (*grouped_gemm.CONFIGS.values(), *scaled_gemm.CONFIGS.values()) for config in configs]
    assert set(map(str, tuned)) <= {str(case.config) for case, _ in EVERY}


def spilling() -> table.Case:
    """256 x 256 sums for 4 warps: 512 registers a thread."""
    case = next(case for case in table.cases() if case.name == "rows bulk")
    large = triton.Config(dict(BLOCK_M=256, BLOCK_N=256, BLOCK_K=64, GROUP_M=8, PER_SM=1), num_warps=4, num_stages=4)
    return table.Case("too large", case.kernel, case.types, case.constants, large, product=True, targets=(90,))


def test_what_is_wrong_is_said_and_the_exit_status_tells(monkeypatch, tmp_path, capsys):
    good = next(case for case in table.cases() if case.name == "permute")
    missing = table.Case("no product here", good.kernel, good.types, good.constants, good.config, product=True, targets=(100,))
    cases = [good, missing, spilling()]
    monkeypatch.setattr(table, "cases", lambda every: iter(cases))
    path = tmp_path / "table.json"
    assert table.main(["--json", str(path)]) == 1
    rows = json.loads(path.read_text())["kernels"]
    assert [row["problems"] for row in rows[:4]] == [[], [], [], ["no tcgen05.mma"]]
    assert [problem.split()[0] for problem in rows[4]["problems"]] == ["stack", "shared"]
    assert "5 compiled, 2 with problems" in capsys.readouterr().out
    monkeypatch.setattr(table, "cases", lambda every: iter([good]))
    assert table.main([]) == 0
