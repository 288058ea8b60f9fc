"""What do attention and memory-bound kernels cost on each GPU? (the two small published tables)"""

from __future__ import annotations

import csv
from functools import lru_cache

import numpy as np

from calibration.clean import MEASUREMENTS
from calibration.fit import fit
from moesim.costs import attention, memory_bound

ATTENTION_LENDER = {"gb200": "b200", "h800": "h100", "a100": "h100"}
BATCH = 8.0
"""Sequences at a table's "best batch": enough to fill every SM."""
IN_TRAINING = {
    "elementwise": "elementwise", "norm": "elementwise", "permute": "permute", "quantise": "quantise", "loss": "loss",
    "optimizer": "elementwise", "embedding": "elementwise", "copy": "copy",
}
"""Which measured class stands for each kind: norms, optimizer steps and embeddings stream like elementwise kernels."""
COPY_LENDER = {"b300": "gb200", "b200": "gb200", "gb300": "gb200", "h800": "h100"}


@lru_cache(maxsize=None)
def table(name: str) -> tuple[dict, ...]:
    with open(MEASUREMENTS / f"{name}.csv", newline="") as file:
        return tuple(csv.DictReader(file))


def attention_rows(gpu: str, direction: str) -> list[dict]:
    return [r for r in table("attention") if r["gpu"] == gpu and r["direction"] == direction]


def predict_attention(params, num_sms, rows) -> np.ndarray:
    """TFLOP/s the model gives for rows of attention.csv (causal)."""
    def col(name):
        return np.array([float(r[name]) for r in rows])
    batch = np.array([float(r["batch"] or BATCH) for r in rows])
    s, heads, kv, qk, v = (col(n) for n in ("seq_len", "num_heads", "num_kv_heads", "qk_dim", "v_dim"))
    pairs = s * (s + 1) / 2
    moved = 2 * batch * s * (heads + kv) * (qk + v)
    backward = np.array([r["direction"] == "backward" for r in rows])
    flops = np.where(backward, 2.5, 1.0) * 2 * batch * heads * pairs * (qk + v)
    return flops / attention.seconds(params, num_sms, batch, heads, s, pairs, qk, v, moved * np.where(backward, 2, 1), backward) / 1e12


def fit_attention(rows, sheet):
    """Forward rate and the length at which half of it is reached."""
    rate = np.array([float(r["tflops"]) for r in rows])
    free = ("rate", "half_keys")
    fixed = {p.name: p.start for p in attention.PARAMETERS if p.name not in free}
    fixed["bandwidth"] = 0.73 * sheet["hbm"]
    return fit(lambda p: 1 / predict_attention(p, int(sheet["num_sms"]), rows), 1 / rate, attention.PARAMETERS, fixed, {"rate": 1.2 * rate.max() * 1e12})


def latent_and_backward() -> tuple[float, float]:
    """Rate of latent attention over plain at the same length, and of backward over forward, from the one public trace that has both
    (H800, so against the H100 table)."""
    forward, backward = (float(attention_rows("h800", d)[0]["tflops"]) for d in ("forward", "backward"))
    plain = [float(r["tflops"]) for r in attention_rows("h100", "forward") if r["seq_len"] == "4096" and r["num_heads"] == "64"]
    return forward / plain[0], backward / forward


def in_step_share(gpu: str, params_of, sheets) -> tuple[float, float, str]:
    """(in-training over burst rate, sigma, provenance): forward and backward together inside published steps; a GPU without such a
    row takes the geometric mean of those that have one."""
    shares = {}
    for other in ("h200", "b200"):
        row = attention_rows(other, "in_step")[0]
        params, num_sms = params_of(other), int(sheets[other]["num_sms"])
        forward, backward = (float(predict_attention(params, num_sms, [{**row, "direction": d}])[0]) for d in ("forward", "backward"))
        shares[other] = float(row["tflops"]) / (3.5 / (1 / forward + 2.5 / backward))
    mean = float(np.exp(np.mean(np.log(list(shares.values())))))
    spread = float(np.std(np.log(list(shares.values())), ddof=1))
    own = gpu in shares
    return (shares[gpu] if own else mean), float(np.hypot(spread, 0.05)), "measured" if own else "extrapolated"


def copy_share(gpu: str, sheets) -> float:
    """Share of the HBM peak a device-local copy reaches: geometric mean of this GPU's sources, or of its lender's."""
    owner = COPY_LENDER.get(gpu, gpu)
    rates = [float(r["bytes_per_s"]) / sheets[owner]["hbm"] for r in table("memory") if r["gpu"] == owner and r["kind"] == "copy"]
    return float(np.exp(np.mean(np.log(rates))))


def memory_parameters(gpu: str, sheets) -> dict[str, float]:
    """Shares of the HBM peak: the in-training classes of B200, scaled by how well this GPU copies against a Blackwell GPU."""
    own, base = copy_share(gpu, sheets), copy_share("gb200", sheets)
    classes = {r["kind"]: float(r["bytes_per_s"]) / sheets["b200"]["hbm"] for r in table("memory") if r["gpu"] == "b200"}
    shares = {kind: (own if name == "copy" else min(0.95, classes[name] * own / base)) for kind, name in IN_TRAINING.items()}
    fixed = next(float(r["fixed_s"]) for r in table("memory") if r["kind"] == "any")
    assert set(shares) == set(memory_bound.KINDS)
    return {**shares, "peak": sheets[gpu]["hbm"], "fixed_s": fixed}
