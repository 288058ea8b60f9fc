"""How far are the profiles' prices from the rows of a measurement file? (one price a row, never a refit)"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Sequence

import numpy as np

from calibration import compute, network
from calibration.build import datasheet
from calibration.clean import Dropped, Row, clean, read_csv
from calibration.models import measured, predict
from calibration.terms import SCALED_SIGMA, scaled
from calibration.validate import errors
from moesim.costs import collectives, dispatch
from moesim.pricing import dispatch_parameters
from moesim.profile import HardwareProfile, Term, load_profile

NEAREST = {"h20": "h100", "a100_pcie": "a100"}
"""GPUs without a profile whose nearest measured relative is known; others are not priced."""


@dataclass(frozen=True)
class Priced:
    """A row with its price; ``provenance``: interpolated, or extrapolated where the row lies outside what was measured on its GPU."""

    row: Row
    seconds: float
    provenance: str


@lru_cache(maxsize=None)
def profile_of(gpu: str) -> HardwareProfile:
    """The GPU's profile, else its nearest relative's, every scaling parameter carried by datasheet ratios. ValueError without either."""
    if gpu not in NEAREST:
        return load_profile(gpu)
    base, sheets = load_profile(NEAREST[gpu]), datasheet()
    terms = tuple(_carried(term, sheets[NEAREST[gpu]], sheets[gpu]) for term in base.terms)
    slower = sheets[NEAREST[gpu]]["nvlink"] / sheets[gpu]["nvlink"]
    curves = tuple(network.carried(c, slower, c.software, NEAREST[gpu]) for c in base.curves)
    own = {"num_sms": int(sheets[gpu]["num_sms"]), "nvlink_bytes_per_s": sheets[gpu]["nvlink"]}
    return base.model_copy(update={"name": gpu, "parent": base.name, "terms": terms, "curves": curves, **own})


def _carried(term: Term, base: dict, sheet: dict) -> Term:
    if term.kind not in ("gemm", "grouped_gemm", "fused_ffn", "attention", "dispatch"):
        return term
    dtype = next((part for part in term.name.split(".") if part in ("fp8", "fp8_block", "mxfp8")), "bf16")
    parameters = scaled(term.parameters, term.kind, base, sheet, dtype)
    return term.model_copy(update={"parameters": parameters, "provenance": "extrapolated", "sigma_log": float(np.hypot(term.sigma_log, SCALED_SIGMA))})


def judge(path: Path) -> tuple[list[Priced], list[Dropped]]:
    """Prices of every row that can be read and priced, and the others with their reasons, in line order."""
    rows, dropped = clean(*read_csv(path))
    priced = []
    for row in rows:
        try:
            priced.append(price(row))
        except ValueError as error:
            dropped.append(Dropped(row.line, str(error)))
    return priced, sorted(dropped, key=lambda d: d.line)


def price(row: Row) -> Priced:
    """Price one row with the profile its hardware names. ValueError with the reason where that can't be done."""
    profile = profile_of(row.gpu)
    seconds, inside = _PRICE[row.kind](profile, row)
    known = inside and row.gpu not in NEAREST and profile.parent is None
    return Priced(row, float(seconds), "interpolated" if known else "extrapolated")


def _inside(term: Term, shape: dict) -> bool:
    return term.provenance == "measured" and all(low <= shape[axis] <= high for axis, (low, high) in term.valid.items() if axis in shape)


def _gemm(profile, row):
    kernel = row.kernel.removesuffix(" table maximum")
    name = f"gemm_kernel.{row.dtype}.{kernel}"
    if name not in profile.term_index:
        name = f"gemm.{row.dtype}"
    term = profile.term(name)
    params = term.parameters if term.label == kernel or kernel in compute.KERNELS.get(row.dtype, ()) else kernel_only(term.parameters, profile)
    return predict(params, profile.num_sms, [row])[0], _inside(term, row.shape)


def kernel_only(parameters: dict[str, float], profile: HardwareProfile) -> dict[str, float]:
    """Parameters of the multiply alone: other harnesses time no activation quantisation and launch the kernel in a loop, so that its
    fixed latency is that of any dense kernel; their grouped kernels are one launch."""
    alone = profile.multiply_alone(parameters)
    return {**alone, "group_s": 0.0, "grouped_fixed_s": alone["fixed_s"]} if "group_s" in parameters else alone


def _gemm_in_training(profile, row):
    name = f"gemm.wgrad.{row.dtype}" if row.shape["accumulate"] else f"gemm.{row.dtype}"
    return predict(profile.parameters(name), profile.num_sms, [row])[0], _inside(profile.term(name), row.shape)


def _grouped(profile, row):
    name = f"grouped_gemm.wgrad.{row.dtype}" if row.shape["weight_grad"] else f"grouped_gemm.{row.dtype}"
    in_step = row.kernel == "training step"
    params = profile.parameters(name, in_training=in_step)
    shape = {**row.shape, "rows_per_group": row.shape["m"]}
    return predict(params if in_step else kernel_only(params, profile), profile.num_sms, [row])[0], _inside(profile.term(name), shape)


def _fused(profile, row):
    """The same kernel on this GPU; else another kernel of this dtype here; else the kernel on a relative, scaled."""
    exact = f"fused_ffn.{row.dtype}.{row.kernel}"
    if exact in profile.term_index:
        term = profile.term(exact)
        return predict(term.parameters, profile.num_sms, [row])[0], _inside(term, row.shape)
    same = [t for t in profile.terms if t.name.startswith(f"fused_ffn.{row.dtype}.")]
    if same:
        return np.exp(np.mean([np.log(predict(t.parameters, profile.num_sms, [row])[0]) for t in same])), False
    for other in ("b300", "b200", "h100"):
        for term in load_profile(other).terms:
            if term.name == exact or term.name.startswith(f"fused_ffn.{row.dtype}."):
                params = scaled(term.parameters, "fused_ffn", datasheet()[other], datasheet()[row.gpu], row.dtype)
                return predict(params, profile.num_sms, [row])[0], False
    raise ValueError(f"no fused FFN kernel in {row.dtype} was ever measured on {row.gpu} or a relative")


def _collective(profile, row):
    if row.shape["gpus"] < 2:
        raise ValueError("a group of one GPU moves nothing")
    releases = sorted({c.software for c in profile.curves}, reverse=True)
    release = row.kernel if row.kernel in releases else profile.nccl
    table = network.tables(profile.curves, release)
    if row.dtype not in table:
        table = network.tables(profile.curves, profile.nccl)
    where = network.reach([row], profile.nvlink_bytes_per_s, lambda r: network.NICS.get(r.gpu, 5e10))
    params = profile.parameters("network." + network.transport(row))
    seconds = collectives.seconds(params, table, row.dtype, np.array([row.shape["bytes"]]), where)[0][0]
    shape = {"bytes": row.shape["bytes"], "members": row.shape["gpus"]}
    return seconds, network.single_domain(row) and _inside(profile.term(f"{row.dtype}.nvlink"), shape)


def _dispatch(profile, row):
    kind = "dedup_v1" if row.kernel == "DeepEP V1" else "dedup"
    where = network.reach([row], profile.nvlink_bytes_per_s)
    params = dispatch_parameters(profile, kind, network.transport(row))
    seconds = dispatch.seconds(params, network.routes([row], where), where)[0][0]
    return seconds, network.single_domain(row) and _inside(profile.term(f"dispatch.{kind}"), {"members": row.shape["gpus"]})


_PRICE = {
    "gemm": _gemm,
    "gemm.in_training": _gemm_in_training,
    "grouped_gemm": _grouped,
    "fused_ffn": _fused,
    "collective": _collective,
    "dispatch": _dispatch,
}


def kind_label(row: Row) -> str:
    """Kind of a row as reports group it: cost model and dtype, or collective and whether it leaves the domain."""
    if row.kind == "collective":
        return f"{row.dtype}.{'nvlink' if network.single_domain(row) else 'nic'}"
    if row.kind == "dispatch":
        return f"{row.dtype}.{row.kernel.replace(' ', '_')}.{'nvlink' if network.single_domain(row) else 'nic'}"
    return f"{row.kind}.{row.dtype}"


def summary(priced: Sequence[Priced]) -> list[dict]:
    """Errors by hardware and kind, then by kind over all hardware, then over everything."""
    groups: dict[tuple[str, str], list[Priced]] = defaultdict(list)
    for item in priced:
        for hardware, kind in ((item.row.gpu, kind_label(item.row)), ("all", kind_label(item.row)), ("all", "all")):
            groups[hardware, kind].append(item)
    return [_group(hardware, kind, items) for (hardware, kind), items in sorted(groups.items(), key=lambda g: (g[0][0] == "all", g[0][1] == "all", g[0]))]


def _group(hardware: str, kind: str, items: Sequence[Priced]) -> dict:
    found = errors(np.array([i.seconds for i in items]), measured([i.row for i in items]), "given")
    return {
        "hardware": hardware, "kind": kind, "n": found.num_rows, "median_abs_error": found.median, "mean": found.mean, "p90": found.p90,
        "bias": found.bias, "interpolated": sum(i.provenance == "interpolated" for i in items), "indicative": found.num_rows < 10,
    }
