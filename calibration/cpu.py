"""What would a CPU core cost that nobody has measured? (Data-sheet arithmetic, labelled so, to be replaced by ``fit m.jsonl``.)

The figures are those of scenarios/gpus/cpu.yaml, one core of an EPYC 7763: 64 cores of 2.45 GHz that each retire two 256-bit fused
multiply-adds a cycle, eight DDR4-3200 channels. Everything else is assumed, and every sigma is wide: a plan made from these prices
ranks layouts of one machine, it does not say how long a step takes.
"""

from __future__ import annotations

from typing import Iterator

from calibration.constants import HOST
from moesim.costs import COSTS, collectives, memory_bound
from moesim.load import load_gpu
from moesim.profile import HardwareProfile, Host, MeasuredCurve, Sustained, Term

NAME, GPU = "cpu_gloo", "cpu"
HEAD = "Written by `python -m calibration fit` from calibration/cpu.py: data-sheet arithmetic, to be replaced by measurements (`fit m.jsonl`)."
SHEET = "https://www.amd.com/en/products/processors/server/epyc/7003-series/amd-epyc-7763.html"
GLOO = "https://github.com/pytorch/gloo/blob/main/docs/algorithms.md"
CLOCK_HZ, FLOP_A_CYCLE = 2.45e9, 32.0
"""Base clock (SHEET); two 256-bit FMA pipes, 8 FP32 lanes, 2 FLOP each (AMD publication 56665, the optimization guide of that core)."""
CHANNELS = 8
"""One core is taken to keep one of the socket's memory channels busy (assumed)."""
EFFICIENCY = 0.7
"""Share of the FMA peak that a large FP32 product reaches (assumed); bf16 without an instruction of its own is no faster (assumed)."""
CALL_S, GROUP_S = 1e-5, 5e-6
"""Dispatch of one op by an eager framework (the published host figure in constants.py, rounded); half of it for a group's slices (assumed)."""
HOP_S, COPIES = 1e-4, 4.0
"""One message over a loopback socket wakes two processes (assumed); its bytes are read and written twice on the way (assumed)."""
SIGMA, FAR_SIGMA = 0.7, 1.0
MEMBERS = (2, 4, 8)
SIZES = tuple(4.0**i for i in range(5, 15))
STEPS = {
    "all_gather": lambda w: (w - 1, (w - 1) / w), "reduce_scatter": lambda w: (2 * (w - 1), 2 * (w - 1) / w),
    "all_reduce": lambda w: (2 * (w - 1), 2 * (w - 1) / w), "all_to_all": lambda w: (1, (w - 1) / w), "send_recv": lambda w: (1, 1.0),
}
"""(messages in a row, share of the buffer that one rank sends) of gloo's rings (GLOO); its reduce-scatter is an all-reduce."""


def parameters() -> dict[str, dict[str, float]]:
    """Kind of term -> its assumed parameters."""
    rate = CLOCK_HZ * FLOP_A_CYCLE * EFFICIENCY
    bandwidth = load_gpu(GPU).hbm_bytes_per_s / CHANNELS
    start = {kind: {p.name: p.start for p in COSTS[kind].PARAMETERS} for kind in COSTS if kind.startswith("core_")}
    return {
        "core_gemm": start["core_gemm"] | {"rate": rate, "fixed_s": CALL_S},
        "core_grouped_gemm": start["core_grouped_gemm"] | {"rate": rate, "fixed_s": CALL_S, "group_s": GROUP_S},
        "core_attention": start["core_attention"] | {"rate": rate, "fixed_s": 3 * CALL_S, "score_s": 10.0 / CLOCK_HZ, "query_s": 100.0 / CLOCK_HZ},
        "core_memory": start["core_memory"] | {"bandwidth": bandwidth / 2, "fixed_s": CALL_S},
    }


def curves() -> tuple[MeasuredCurve, ...]:
    """Assumed seconds of every collective: messages in a row, then bytes over what a core can copy."""
    rate = load_gpu(GPU).hbm_bytes_per_s / CHANNELS / COPIES
    found = []
    for kind in collectives.KINDS:
        for members in MEMBERS if kind != "send_recv" else (2,):
            hops, share = STEPS[kind](members)
            found.append(MeasuredCurve(kind=kind, members=members, software="gloo", bytes=SIZES, seconds=tuple(hops * HOP_S + share * b / rate for b in SIZES)))
    return tuple(found)


def terms() -> Iterator[Term]:
    """One term for every op a CPU can run; nothing leaves the machine at a known price."""
    known = parameters()
    names = [(f"{kind}.{form}{dtype}", f"core_{kind}") for kind in ("gemm", "grouped_gemm") for form in ("", "wgrad.") for dtype in ("bf16", "fp32")]
    names += [(f"attention.{way}", "core_attention") for way in ("forward", "backward")]
    names += [(f"memory.{kind}", "core_memory") for kind in memory_bound.KINDS]
    note = "data-sheet arithmetic, never measured"
    for name, kind in names:
        yield Term(name=name, kind=kind, parameters=known[kind], provenance="assumed", sigma_log=SIGMA, shared={"core": 0.3}, sources=(SHEET,), note=note)
    for kind in collectives.KINDS:
        for leg in ("nvlink", "nic"):
            yield Term(name=f"{kind}.{leg}", kind="collectives", provenance="assumed", sigma_log=FAR_SIGMA, shared={"gloo": 0.3}, sources=(GLOO,), note=note)
    yield Term(name="network.ib", kind="collectives", parameters={p.name: p.start for p in collectives.PARAMETERS}, provenance="assumed", sigma_log=FAR_SIGMA, sources=(GLOO,), note=note)
    yield from dispatch_terms(note)


def dispatch_terms(note: str) -> Iterator[Term]:
    """The trainer's other dispatchers run over gloo's all-to-all: their bytes at what a core can copy, a message each."""
    share = 1.0 / CHANNELS / COPIES
    common = {"dispatch_sm_rate": 1e12, "combine_sm_rate": 1e12, "link_efficiency": share, "relay": 1.0, "copy_bytes": 1.0, "fixed_s": HOP_S}
    for name in ("sync_free", "dedup", "dedup_v1"):
        yield Term(name=f"dispatch.{name}", kind="dispatch", parameters=common, provenance="assumed", sigma_log=FAR_SIGMA, shared={"gloo": 0.3}, sources=(GLOO,), note=note)
    late = {"nic_efficiency": 0.5, "network_s": HOP_S}
    yield Term(name="dispatch.nic.ib", kind="dispatch", parameters=late, provenance="assumed", sigma_log=FAR_SIGMA, sources=(GLOO,), note=note)


def profile() -> HardwareProfile:
    """The profile of a CPU rank that nobody measured. Deterministic."""
    gpu = load_gpu(GPU)
    level = Sustained(factor=1.0, sigma_log=0.3, provenance="assumed", evidence={}, sources=(SHEET,))
    return HardwareProfile(
        name=NAME, gpu="CPU core", num_sms=0, peak_flops={}, hbm_bytes_per_s=gpu.hbm_bytes_per_s, nvlink_bytes_per_s=gpu.hbm_bytes_per_s, collective_sms=0,
        datasheet_sources=(SHEET,), terms=tuple(terms()), nccl="gloo", curves=curves(),
        sustained_rule="Assumed 1: no op of a step has been timed on this machine.", sustained={name: level for name in ("bf16", "fp32", "attention")},
        host=Host(launch_s={name: 0.0 for name in HOST["launch_s"]}, sigma_log=0.0, sources=("the thread that issues an op computes it",)), gammas=(),
    )
