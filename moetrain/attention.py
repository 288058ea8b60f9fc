"""How does a token read the tokens before it? (Grouped-query and latent attention; windows, sinks, documents; tensor and context
parallel.)

Heads are cut over tp; keys and values of all context ranks are gathered, which works for any mask (their gradients are
reduce-scattered). The core goes through torch's scaled_dot_product_attention: flash where the device has it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from moesim.spec import ModelSpec
from moetrain.collectives import all_gather
from moetrain.layers import Linear, RMSNorm, gathered, local, scattered
from moetrain.mesh import Mesh
from moetrain.params import Init, Traits, declare
from moetrain.place import Place
from moetrain.recompute import Recompute
from moetrain.seams import begin, seam


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [B, S, heads, width], halves rotated against each other."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[:, None, : a.shape[-1]], sin[:, None, : a.shape[-1]]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor | None) -> torch.Tensor:
    """softmax(q k^T / sqrt(width)) v, causal where ``mask`` is None. q [B, Q, h, w], k and v [B, K, kv, w] -> [B, Q, h, w_v].

    ``sinks`` [h]: one more logit a head that takes probability and gives nothing (gpt-oss).
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    if sinks is not None:
        return _with_sinks(q, k, v, mask, sinks)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return out.transpose(1, 2)


def _with_sinks(q, k, v, mask, sinks):
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if mask is None:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    scores = scores.masked_fill(~mask, float("-inf")).float()
    sink = sinks.float().view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
    return (torch.cat([scores, sink], -1).softmax(-1)[..., :-1].to(v.dtype) @ v).transpose(1, 2)


class Attention(nn.Module):
    """What both forms share: the core over gathered keys, and the output projection."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, window: int | None, theta: float, stds: tuple[float, float], recompute: Recompute, v_dim: int):
        super().__init__()
        self.mesh, self.window, self.theta, self.rc = mesh, window, theta, recompute
        self.heads, self.v_dim = spec.num_heads // mesh["tp"].size, v_dim
        self.out = Linear(spec.num_heads * v_dim, spec.hidden_size, "attn_out", "row", spec.out_bias and mesh["tp"].size == 1, std=stds[1])
        self.sinks = None
        if spec.attention_sinks:
            declare(self, "sinks", (spec.num_heads,), Traits("core_attn", Init("zeros"), 0))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, where: Place) -> torch.Tensor:
        """Local queries over the whole sequence's keys, then the output projection: [B, Q, heads, w] -> [B, Q/tp, d]."""
        cp = self.mesh["cp"]
        if cp.size > 1:
            width = k.shape[-1]
            kv = all_gather(torch.cat([k, v], -1), 1, cp, "cp_gather")
            k, v = kv[..., :width], kv[..., width:]
        sinks = None if self.sinks is None else local(self.sinks)
        mask = where.mask(self.window)
        mixed = self.rc("core_attn", lambda q, k, v: seam(self.rc.log, "core_attn", core, q, k, v, mask, sinks), q, k, v)
        out = self.rc("attn_out", self.out, mixed.flatten(2))
        return scattered(out, self.mesh["tp"], "tp_scatter_attn_out")


class GroupedQueryAttention(Attention):
    """Heads in groups that share a key and a value (https://arxiv.org/abs/2305.13245). Rows of ``qkv``, for each key-value head:
    its query heads, its key, its value, so that a cut between groups is a cut of rows."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, window: int | None, theta: float, stds: tuple[float, float], eps: float, recompute: Recompute):
        super().__init__(spec, mesh, window, theta, stds, recompute, spec.head_dim)
        self.groups, self.width = spec.num_kv_heads // mesh["tp"].size, spec.head_dim
        self.qkv = Linear(spec.hidden_size, (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim, "qkv", "column", spec.qkv_bias, std=stds[0])
        self.full_norm = spec.qk_norm == "full"
        self.q_norm = self.k_norm = None
        if spec.qk_norm != "none":
            q, k = (spec.num_heads, spec.num_kv_heads) if self.full_norm else (1, 1)
            self.q_norm, self.k_norm = RMSNorm(q * spec.head_dim, "qk_norm", eps), RMSNorm(k * spec.head_dim, "qk_norm", eps)

    def forward(self, x: torch.Tensor, where: Place) -> torch.Tensor:
        """[B, Q/tp, d] -> [B, Q/tp, d]."""
        cos, sin = where.rope(self.width, self.theta)
        q, k, v = self.rc("qkv", lambda x: self._heads(x, cos, sin), gathered(x, self.mesh["tp"], "tp_gather_qkv", self.rc))
        return self.attend(q, k, v, where)

    def _heads(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of [B, Q, d]: [B, Q, heads, width], normalised where the model has that, and turned."""
        packed = self.qkv(x).unflatten(-1, (self.groups, -1, self.width))
        begin(self.rc.log, "rope")
        q, k, v = packed[..., :-2, :], packed[..., -2, :], packed[..., -1, :]
        if self.q_norm is not None:
            q, k = self._normed(self.q_norm, q), self._normed(self.k_norm, k)
        if self.q_norm is None or self.full_norm:
            # Nothing else of `packed` is read again: a view would keep all of it.
            v = v.contiguous()
        return *seam(self.rc.log, "rope", lambda: (rotate(q.flatten(2, 3), cos, sin), rotate(k, cos, sin))), v

    def _normed(self, norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
        return norm(x.flatten(2)).view(x.shape) if self.full_norm else norm(x)


class LatentAttention(Attention):
    """Keys and values rebuilt from a small latent; a part of each key is rotary and shared by all heads (MLA,
    https://arxiv.org/abs/2405.04434)."""

    def __init__(self, spec: ModelSpec, mesh: Mesh, window: int | None, theta: float, stds: tuple[float, float], eps: float, recompute: Recompute):
        super().__init__(spec, mesh, window, theta, stds, recompute, spec.v_head_dim)
        self.nope, self.rope = spec.qk_nope_head_dim, spec.qk_rope_head_dim
        self.q_rank, self.kv_rank = spec.q_lora_rank or 0, spec.kv_lora_rank
        d, heads = spec.hidden_size, spec.num_heads
        self.down = Linear(d, self.q_rank + self.kv_rank + self.rope, "mla_down", None, spec.qkv_bias, std=stds[0])
        self.q_latent_norm = RMSNorm(self.q_rank, "qk_norm", eps) if self.q_rank else None
        self.kv_latent_norm = RMSNorm(self.kv_rank, "qk_norm", eps)
        self.up_q = Linear(self.q_rank or d, heads * (self.nope + self.rope), "mla_up", "column", std=stds[0])
        self.up_kv = Linear(self.kv_rank, heads * (self.nope + self.v_dim), "mla_up", "column", std=stds[0])

    def forward(self, x: torch.Tensor, where: Place) -> torch.Tensor:
        """[B, Q/tp, d] -> [B, Q/tp, d]. The latents are small: each tp rank makes those of its tokens, then they are gathered."""
        latents = self.rc("qkv", self._latents, self.down(x), x)
        latents = gathered(latents, self.mesh["tp"], "tp_gather_mla_up", self.rc)
        cos, sin = where.rope(self.rope, self.theta)
        q, k, v = self.rc("mla_up", lambda x: self._heads(x, cos, sin), latents)
        return self.attend(q, k, v, where)

    def _latents(self, down: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """What queries, keys and values are made of: normalised latents (queries without one: ``x``) and the rotary part of keys."""
        q_latent, kv_latent, k_rope = down.split((self.q_rank, self.kv_rank, self.rope), -1)
        q_source = self.q_latent_norm(q_latent) if self.q_rank else x
        return torch.cat([q_source, self.kv_latent_norm(kv_latent), k_rope], -1)

    def _heads(self, latents: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values of all tokens' latents [B, Q, queries' width + kv rank + rope]: [B, Q, heads, width]."""
        q_source, kv_latent, k_rope = latents.split((latents.shape[-1] - self.kv_rank - self.rope, self.kv_rank, self.rope), -1)
        q = self.up_q(q_source).unflatten(-1, (self.heads, -1))
        kv = self.up_kv(kv_latent).unflatten(-1, (self.heads, -1))
        return seam(self.rc.log, "rope", self._turned, q, kv, k_rope, cos, sin)

    def _turned(self, q: torch.Tensor, kv: torch.Tensor, k_rope: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q = torch.cat([q[..., :self.nope], rotate(q[..., self.nope:], cos, sin)], -1)
        shared = rotate(k_rope[:, :, None], cos, sin).expand(-1, -1, self.heads, -1)
        # A view of values would keep the keys' part as well.
        return q, torch.cat([kv[..., :self.nope], shared], -1), kv[..., self.nope:].contiguous()


def build(spec: ModelSpec, mesh: Mesh, layer: int, theta: float, stds: tuple[float, float], eps: float, recompute: Recompute) -> Attention:
    """The attention of one layer."""
    kind = LatentAttention if spec.attention == "mla" else GroupedQueryAttention
    return kind(spec, mesh, spec.window(layer), theta, stds, eps, recompute)
