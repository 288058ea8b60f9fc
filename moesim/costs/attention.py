"""How long does one flash-attention kernel take? (a rate that grows with the keys a query sees, and fills the SMs by heads)"""

from __future__ import annotations

import numpy as np

from moesim.costs.base import Parameter

PARAMETERS = (
    Parameter("rate", "FLOP/s", 1e13, 5e15, 1.4e15, "flops"),
    Parameter("half_keys", "keys", 1.0, 5000.0, 800.0),
    Parameter("backward", "1", 0.3, 1.2, 0.83),
    Parameter("narrow_head", "1", 0.3, 1.0, 0.7),
    Parameter("latent", "1", 0.5, 1.1, 0.96),
    Parameter("bandwidth", "bytes/s", 5e11, 2e13, 5e12, "hbm"),
    Parameter("fixed_s", "s", 1e-6, 1e-4, 5e-6),
)

Q_TILE = 128.0
"""Query rows of one thread block in FlashAttention 2-4 (https://arxiv.org/abs/2407.08608)."""


def seconds(params, num_sms, batch, heads, q_len, pairs, qk_dim, v_dim, moved, backward):
    """Seconds of softmax(QK^T)V forward, or of its backward with scores recomputed; arrays broadcast.

    pairs: attended (query, key) pairs of one head of one sequence; 2*pairs/q_len is the length a causal kernel would have.
    narrow_head: rate of 64-wide heads over 128-wide; latent: of 192/128 (latent attention) over 128/128; backward: rate of the
    backward over the forward. moved: bytes. Positive and monotone in batch, heads, pairs and widths at fixed q_len.
    """
    forward = 2.0 * batch * heads * pairs * (qk_dim + v_dim)
    span = 2.0 * pairs / q_len
    narrow = params["narrow_head"] + (1 - params["narrow_head"]) * np.clip((qk_dim + v_dim - 128.0) / 128.0, 0.0, 1.0)
    wide = np.where(qk_dim > v_dim, params["latent"], 1.0)
    fill = np.minimum(1.0, batch * heads * np.ceil(q_len / Q_TILE) / num_sms)
    rate = params["rate"] * span / (span + params["half_keys"]) * narrow * wide * fill
    work = np.where(backward, 2.5 * forward / params["backward"], forward)
    return params["fixed_s"] + ((work / rate) ** 3 + (moved / params["bandwidth"]) ** 3) ** (1 / 3)
