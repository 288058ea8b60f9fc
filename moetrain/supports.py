"""Can this trainer run that layout of that model? (None, or the reason in one line that says what to change.)

What moesim can plan and this trainer does not run is named here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moesim.layout import Layout
from moesim.spec import ModelSpec, Scenario

Refusals = Iterator[str]


def supports(layout: Layout, model: ModelSpec) -> str | None:
    """Why ``layout`` can't be trained with ``model``, or None. Legality of the layout itself is moesim's `illegal`."""
    return next((reason for check in CHECKS for reason in check(layout, model)), None)


def check(scenario: Scenario, layout: Layout) -> None:
    """ValueError with the first reason of `supports`."""
    reason = supports(layout, scenario.model)
    if reason:
        raise ValueError(f"layout '{layout}' of {scenario.model.name}: {reason}")


def _model(layout: Layout, m: ModelSpec) -> Refusals:
    if m.num_mtp_layers:
        yield "multi-token-prediction layers are not trained; set model.num_mtp_layers=0"
    if m.norm_bias:
        yield "norms with a bias (LayerNorm) are not built; this trainer has RMSNorm"
    if m.num_position_embeddings:
        yield "learned positions are not built; this trainer has rotary ones"
    if not m.gated_mlp:
        yield "FFNs of two matrices are not built; this trainer has SwiGLU"
    if m.moe_branch_norm and m.norm_placement == "pre":
        yield "a norm for each branch of a MoE layer (moe_branch_norm) is built behind the branches only; set model.norm_placement=post"
    if m.mlp_bias:
        yield "biases of dense FFNs are not built"


def _rotary(layout: Layout, m: ModelSpec) -> Refusals:
    name = "qk_rope_head_dim" if m.attention == "mla" else "head_dim"
    if getattr(m, name) % 2:
        yield f"rotary embedding turns pairs of values: model.{name} {getattr(m, name)} must be even"


def _tensor(layout: Layout, m: ModelSpec) -> Refusals:
    if layout.tp == 1:
        return
    kv = m.num_kv_heads if m.attention == "gqa" else m.num_heads
    if kv % layout.tp:
        yield f"tp{layout.tp} does not divide {kv} key-value heads, which are not copied; use a tp that does"
    if m.qk_norm == "full":
        yield "a norm over all heads (qk_norm full) does not run with tp above 1"
    if m.out_bias:
        yield "an attention output bias does not run with tp above 1"
    if m.vocab_size % layout.tp:
        yield f"tp{layout.tp} does not divide the vocabulary of {m.vocab_size}"


def _experts(layout: Layout, m: ModelSpec) -> Refusals:
    if layout.etp > 1:
        yield "experts are not cut over etp; spread them with ep"
    if layout.overlaps("ep"):
        yield "ov:ep (one microbatch's dispatch under another's compute) does not run; train.moe.chunks=2 overlaps inside a layer"
    sizes = {"hidden size": m.hidden_size, "expert width": m.moe_intermediate_size}
    if m.num_experts and layout.zero and layout.edp > 1 and all(size % layout.edp for size in sizes.values()):
        yield f"neither {' nor '.join(f'{k} {v}' for k, v in sizes.items())} divides over {layout.edp} replicas of the experts; raise ep"


def _pipeline(layout: Layout, m: ModelSpec) -> Refusals:
    if layout.pp == 1 and layout.vpp > 1:
        yield "several chunks a rank need pp above 1"
    if layout.pp > 1 and (layout.zero == 2 or (layout.zero == 3 and layout.reshard)):
        yield f"zero{layout.zero} reduces gradients in every microbatch, which pipelines here do once a step; use zero1 or zero3 noreshard"


def _precision(layout: Layout, m: ModelSpec) -> Refusals:
    if layout.precision != "bf16":
        yield f"{layout.precision} training is not connected (kernels exist for expert products only); use bf16"
    if layout.optimizer == "fp8":
        yield "fp8 moments are not kept; use opt:bf16"
    if layout.graphs != "none":
        yield "steps are not captured as CUDA graphs; leave out graph:"


CHECKS: tuple[Callable[[Layout, ModelSpec], Refusals], ...] = (_model, _rotary, _tensor, _experts, _pipeline, _precision)
