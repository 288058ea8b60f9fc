"""How do the measurements become one profile a GPU? (assemble the terms; the GPU's own rows first, else the parent's, scaled)"""

from __future__ import annotations

import csv
from functools import lru_cache

from calibration import compute, constants, network
from calibration.clean import MEASUREMENTS, clean, read_csv
from moesim.profile import HardwareProfile

PARENTS = {"b300": None, "b200": None, "gb200": None, "gb300": None, "h100": None, "h200": "h100", "h800": "h100", "a100": None}


@lru_cache(maxsize=1)
def datasheet() -> dict[str, dict]:
    """GPU -> num_sms, peaks (FLOP/s), hbm and nvlink (bytes/s), source."""
    with open(MEASUREMENTS / "datasheet.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    numbers = ("num_sms", "bf16", "fp8", "fp4", "hbm", "nvlink")
    return {row["gpu"]: {"source": row["source"], **{n: float(row[n]) for n in numbers if row[n]}} for row in rows}


@lru_cache(maxsize=1)
def measurements():
    """Every usable shipped row."""
    rows = []
    for table in ("gemm", "collectives"):
        rows += clean(*read_csv(MEASUREMENTS / f"{table}.csv"))[0]
    return tuple(rows)


def profile(gpu: str) -> HardwareProfile:
    """The profile of one GPU from all shipped rows. Deterministic."""
    sheet, rows = datasheet()[gpu], measurements()
    curves = network.curves(gpu, rows)
    sustained_rule, sustained = compute.sustained(gpu)
    return HardwareProfile(
        name=gpu,
        gpu=gpu.upper(),
        parent=PARENTS[gpu],
        num_sms=int(sheet["num_sms"]),
        peak_flops={p: sheet[p] for p in ("bf16", "fp8", "fp4") if p in sheet},
        hbm_bytes_per_s=sheet["hbm"],
        nvlink_bytes_per_s=sheet["nvlink"],
        collective_sms=constants.COLLECTIVE_SMS,
        datasheet_sources=tuple(part.strip() for part in sheet["source"].split(" ; ")),
        terms=tuple(compute.terms(gpu, rows, sheet)) + tuple(network.terms(gpu, rows, sheet)),
        curves=curves,
        sustained_rule=sustained_rule,
        sustained=sustained,
        host=constants.LAUNCH,
        gammas=tuple(dict(zip(("running", "beside", "gamma", "stderr", "source"), row)) for row in constants.GAMMAS),
    )
