"""How many FLOP did a step do, how many of them count, and what share of the peak is that?

Model FLOP are the planner's own (`ModelSpec.flops_per_token`): 2 a multiply-add, 3 passes, every matrix a token passes through,
exactly the query-key pairs of a causal mask; no recompute, no padding. Beside them, never inside them:

* dropped: routed rows over capacity, which nobody computed. MFU leaves them out, as the planner does.
* recompute: forward work done a second time, by the layout's ``rc:`` roles.
* attention_recompute: the score products that a flash-attention backward pass does again (2.5 forward passes instead of 2).
* padding: rows of zeros that a grouped GEMM multiplied because tiles or buffers had room for them.

hardware = model - dropped + recompute + attention_recompute + padding: what the device executed, so far as this ledger sees.
Attention that a document mask skips is counted by convention; ``masked`` says how much of the model FLOP that is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from moesim import closed_form
from moesim.spec import ModelSpec
from moetrain.observe.peaks import Peaks
from moetrain.observe.words import UNKNOWN, percent


@dataclass(frozen=True)
class StepFlops:
    """FLOP of one step over all ranks; the file's docstring defines each term."""

    model: float
    dropped: float = 0.0
    recompute: float = 0.0
    attention_recompute: float = 0.0
    padding: float = 0.0
    masked: float = 0.0

    @property
    def counted(self) -> float:
        """What MFU counts: model FLOP less the rows that were dropped."""
        return self.model - self.dropped

    @property
    def hardware(self) -> float:
        """What the device executed."""
        return self.counted + self.recompute + self.attention_recompute + self.padding


@dataclass(frozen=True)
class Utilisation:
    """Shares of the peak, each with the name of its denominator; None where the denominator is unknown (``refusal`` says why)."""

    mfu: float | None
    denominator: str
    own_mfu: float | None
    own_denominator: str
    hfu: float | None
    refusal: str | None = None

    def __str__(self) -> str:
        if self.mfu is None:
            return f"MFU {UNKNOWN} peak"
        text = f"MFU {percent(self.mfu)} of {self.denominator}"
        own = self.own_denominator != self.denominator and self.own_mfu is not None
        return f"{text}, {percent(self.own_mfu)} of {self.own_denominator}" if own else text


def row_flops(spec: ModelSpec) -> float:
    """Training FLOP of one routed row in one MoE layer: three passes of one expert's matrices."""
    return 6.0 * closed_form.ffn_matrices(spec, spec.moe_intermediate_size)


def step_flops(spec: ModelSpec, *, tokens: int, seq_len: int, recompute: Iterable[str] = (), dropped_rows: float = 0.0,
               padded_rows: float = 0.0, attended_fraction: float = 1.0, flash: bool = True) -> StepFlops:
    """The ledger of one step.

    tokens: of the step, all ranks. dropped_rows, padded_rows: routed rows summed over layers and ranks. attended_fraction:
    query-key pairs that the document mask kept, over those of a plain causal mask. recompute: roles of the layout's ``rc:``.
    flash: the backward pass recomputes attention scores. ValueError if more rows are dropped than were routed.
    """
    by_role = spec.flops_by_role(seq_len)
    dropped, routed = row_flops(spec) * dropped_rows, by_role["routed_experts"] * tokens
    if dropped > routed * (1 + 1e-9):
        raise ValueError(f"ledger: {dropped_rows:g} dropped rows are more than {tokens} tokens routed ({routed / row_flops(spec):g})")
    return StepFlops(
        model=tokens * sum(by_role.values()),
        dropped=dropped,
        recompute=tokens * sum(recompute_flops(spec, seq_len, recompute).values()),
        attention_recompute=tokens * by_role["attention_core"] / 6 * flash,
        padding=row_flops(spec) * padded_rows,
        masked=tokens * by_role["attention_core"] * (1 - attended_fraction),
    )


def recompute_flops(spec: ModelSpec, seq_len: int, roles: Iterable[str]) -> dict[str, float]:
    """FLOP a token that each recomputed role adds: one forward pass of its matrix products. Roles of norms and activations cost
    none; "full" is every layer once more (the head is kept). Names as in `moesim.layout.RECOMPUTE_ROLES`."""
    forward = _forward_flops(spec, seq_len)
    if "full" in (wanted := set(roles)):
        return {"full": sum(forward.values())}
    return {role: forward.get(role, 0.0) for role in sorted(wanted)}


def _forward_flops(spec: ModelSpec, seq_len: int) -> dict[str, float]:
    """Forward FLOP a token of the layers, by recomputable role (and MLA's down-projection, which only "full" repeats); MTP modules apart."""
    by_role = spec.flops_by_role(seq_len)
    out = spec.num_heads * (spec.v_head_dim if spec.attention == "mla" else spec.head_dim) * spec.hidden_size
    up = _mla_up(spec)
    layers, down = 2.0 * spec.num_layers, closed_form.attention_matrices(spec) - out - up
    return {
        "mla_down" if spec.attention == "mla" else "qkv": layers * down, "mla_up": layers * up, "attn_out": layers * out,
        "core_attn": by_role["attention_core"] / 3, "router": by_role["router"] / 3, "shared": by_role["shared_experts"] / 3,
        "experts": by_role["routed_experts"] / 3, "mlp": by_role["dense_ffn"] / 3,
    }  # fmt: skip


def _mla_up(spec: ModelSpec) -> int:
    """Elements of the matrices that take latents up to heads; 0 without MLA."""
    if spec.attention != "mla":
        return 0
    query = (spec.q_lora_rank or spec.hidden_size) * spec.num_heads * spec.head_dim
    return query + spec.kv_lora_rank * spec.num_heads * (spec.qk_nope_head_dim + spec.v_head_dim)


def utilisation(flops: StepFlops, seconds: float, num_gpus: int, known: Peaks) -> Utilisation:
    """Shares of the peak over one step of so many seconds on so many GPUs."""
    if not seconds > 0 or num_gpus < 1:
        raise ValueError(f"utilisation: a step of {seconds} s on {num_gpus} GPUs")
    rate, hardware = flops.counted / seconds / num_gpus, flops.hardware / seconds / num_gpus
    bf16, own = known.bf16, known.own
    return Utilisation(
        mfu=rate / bf16.flops_per_s if bf16 else None, denominator=str(bf16) if bf16 else f"{UNKNOWN} peak",
        own_mfu=rate / own.flops_per_s if own else None, own_denominator=str(own) if own else f"{UNKNOWN} peak",
        hfu=hardware / bf16.flops_per_s if bf16 else None, refusal=known.refusal,
    )  # fmt: skip


def as_fields(flops: StepFlops) -> dict[str, Any]:
    """The ledger as a log line holds it."""
    return asdict(flops) | {"hardware": flops.hardware}
