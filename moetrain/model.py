"""What is the model, and what does one pipeline stage of it hold? (Embedding, layers, norm and head from a ModelSpec.)

A Stage is any run of layers with or without the two ends; the whole model is the stage that has everything. Parameters keep their
logical names, so a stage holds a subset of the whole model's names and nothing else changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from moesim.spec import ModelSpec
from moetrain import attention
from moetrain.layers import Embedding, GatedMLP, Linear, RMSNorm, gathered, local, out_std, scattered
from moetrain.loss import chunked_cross_entropy
from moetrain.mesh import Mesh
from moetrain.moe import MoE, MoEOptions
from moetrain.place import Place
from moetrain.recompute import Recompute
from moetrain.seams import residual, seam
from moetrain.statistics import RoutingStatistics


@dataclass(frozen=True)
class ModelOptions:
    """Numbers of the model that cost nothing and so are not part of a ModelSpec, and how its loss is computed."""

    rope_theta: float = 500_000.0
    norm_eps: float = 1e-6
    init_std: float = 0.02
    embed_scale: float = 1.0
    head_z_loss: float = 0.0
    loss_chunk: int = 4096
    tokens_per_step: int = 1


class Layer(nn.Module):
    """Attention, then a dense FFN or experts; norms before each branch ("pre") or after it ("post"). FSDP2 wraps each."""

    def __init__(self, spec: ModelSpec, index: int, kind: str, mesh: Mesh, options: ModelOptions, moe: MoEOptions, recompute: Recompute,
                 statistics: RoutingStatistics):
        super().__init__()
        d, eps, stds = spec.hidden_size, options.norm_eps, (options.init_std, out_std(options.init_std, spec.num_layers))
        self.post, self.tp, self.rc, self.index = spec.norm_placement == "post", mesh["tp"], recompute, index
        self.norm1, self.norm2 = RMSNorm(d, eps=eps), RMSNorm(d, eps=eps)
        self.norm_branch = RMSNorm(d, eps=eps) if spec.moe_branch_norm and kind == "moe" else None
        self.attention = attention.build(spec, mesh, index, options.rope_theta, stds, eps, recompute)
        self.mlp = GatedMLP(d, spec.intermediate_size, "mlp", *stds, recompute) if kind == "dense" else None
        self.moe = MoE(spec, index, mesh, moe, stds, recompute, statistics) if kind == "moe" else None

    def forward(self, x: torch.Tensor, where: Place) -> torch.Tensor:
        """[B, S/(cp*tp), d] -> the same."""
        return self.rc.layer(self._forward, x, where)

    def _forward(self, x: torch.Tensor, where: Place) -> torch.Tensor:
        log, i = self.rc.log, self.index
        if self.post:
            x = residual(log, i, x, lambda x: self.norm1(self.attention(x, where)))
            return residual(log, i, x, lambda x: self._ffn(x, where))
        x = residual(log, i, x, lambda x: self.attention(self.rc("norm", self.norm1, x), where))
        return residual(log, i, x, lambda x: self._ffn(self.rc("norm", self.norm2, x), where))

    def _ffn(self, x: torch.Tensor, where: Place) -> torch.Tensor:
        """The second branch, its norm behind it where norms stand behind branches."""
        after = self.norm2 if self.post else (lambda y: y)
        if self.mlp is not None:
            return after(self._dense(x))
        routed, shared = self.moe(x, where)
        if self.norm_branch is not None:
            return self.norm2(routed) + (self.norm_branch(shared) if shared is not None else 0)
        return after(routed if shared is None else seam(self.rc.log, "residual", torch.add, routed, shared))

    def _dense(self, x: torch.Tensor) -> torch.Tensor:
        full = gathered(x, self.tp, "tp_gather_mlp_up", self.rc)
        return scattered(self.rc("mlp", self.mlp, full), self.tp, "tp_scatter_mlp_down")


class EmbeddingBlock(nn.Module):
    """Token lookup and the norm after it, if there is one. FSDP2 wraps it."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, options: ModelOptions, recompute: Recompute):
        super().__init__()
        self.tp, self.rc = mesh["tp"], recompute
        self.embed = Embedding(spec.vocab_size, spec.hidden_size, options.init_std, options.embed_scale)
        self.norm = RMSNorm(spec.hidden_size, eps=options.norm_eps) if spec.embedding_norm else None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[B, S/cp] ids -> [B, S/(cp*tp), d]."""
        x = self.embed(tokens, self.tp)
        return x if self.norm is None else self.rc("norm", self.norm, x, module=self)


class Head(nn.Module):
    """Final norm, vocabulary projection and loss. FSDP2 wraps it. A tied head reads the embedding's weight."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, options: ModelOptions):
        super().__init__()
        self.tp, self.options = mesh["tp"], options
        self.norm = RMSNorm(spec.hidden_size, eps=options.norm_eps)
        self.out = Linear(spec.hidden_size, spec.vocab_size, "head", "column", std=options.init_std)

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        """[B, S/(cp*tp), d] -> [cross entropy, z-loss] of the microbatch over the tokens of the step, or, without labels, logits
        [B, S/cp, V/tp]."""
        h = gathered(self.norm(x), self.tp, "tp_gather_head")
        weight = local(self.out.weight)
        if labels is None:
            return h @ weight.t()
        o = self.options
        return chunked_cross_entropy(h.flatten(0, 1), weight, labels.flatten(), 1.0 / o.tokens_per_step, o.head_z_loss, o.loss_chunk, self.tp)


NAMES = {"embedding.embed.": "embed.", "embedding.norm.": "embed_norm.", "head.norm.": "final_norm.", "head.out.": "head."}


class Stage(nn.Module):
    """Layers first..last of the model, the embedding if it is the first stage, the head if it is the last."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, options: ModelOptions, moe: MoEOptions, recompute: Recompute,
                 statistics: RoutingStatistics, layers: range | None = None, ends: tuple[bool, bool] = (True, True)):
        super().__init__()
        layers = range(spec.num_layers) if layers is None else layers
        kinds = spec.layer_kinds()
        self.spec, self.rc = spec, recompute
        self.is_first, self.is_last = ends
        self.embedding = EmbeddingBlock(spec, mesh, options, recompute) if self.is_first else None
        self.layers = nn.ModuleDict({str(i): Layer(spec, i, kinds[i], mesh, options, moe, recompute, statistics) for i in layers})
        self.head = Head(spec, mesh, options) if self.is_last else None
        self.tie()

    def tie(self) -> None:
        """One weight for embedding and head, where the model wants that and this stage has both."""
        if self.spec.tie_embeddings and self.embedding is not None and self.head is not None:
            self.head.out.weight = self.embedding.embed.weight

    def forward(self, x: torch.Tensor, where: Place, labels: torch.Tensor | None = None) -> torch.Tensor:
        """Ids [B, S/cp] (first stage) or hidden [B, S/(cp*tp), d] -> hidden, or what Head gives."""
        with self.rc.watch():
            if self.embedding is not None:
                x = self.embedding(x)
            for layer in self.layers.values():
                x = layer(x, where)
            return x if self.head is None else self.head(x, labels)

    def logical_name(self, name: str) -> str:
        """The name that a parameter or buffer has in the whole model; a tied head's is the embedding's."""
        if self.spec.tie_embeddings and name == "head.out.weight":
            return "embed.weight"
        inside = next((n for n in NAMES if name.startswith(n)), "")
        return NAMES[inside] + name[len(inside):] if inside else name
