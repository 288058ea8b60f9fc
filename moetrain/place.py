"""Where do this rank's tokens stand: position in the sequence, document, number in the whole batch - and what may each one see?

Under context parallelism a rank holds two chunks of every sequence, one from either end, so that causal work is even. Keys come
from every rank, in rank order; masks are built from positions and document numbers, so the order doesn't matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


def local_positions(seq_len: int, cp: int, rank: int) -> torch.Tensor:
    """Positions that context rank ``rank`` holds, [seq_len / cp]: chunks r and 2cp-1-r of 2cp."""
    if cp == 1:
        return torch.arange(seq_len)
    chunks = torch.arange(seq_len).chunk(2 * cp)
    return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]])


@dataclass
class Place:
    """What attention and routing need to know of one microbatch. Shapes: B sequences, Q = seq_len/cp local tokens, K = seq_len keys.

    positions [Q], key_positions [K]; documents [B, Q] and key_documents [B, K], or None where every row is one document; samples [B]
    numbers of the sequences in the run. ``plain`` says that a causal mask over equal queries and keys is all there is.
    """

    positions: torch.Tensor
    key_positions: torch.Tensor
    documents: torch.Tensor | None
    key_documents: torch.Tensor | None
    samples: torch.Tensor
    seq_len: int
    plain: bool
    _masks: dict[int | None, torch.Tensor | None] = field(default_factory=dict)
    _ropes: dict[tuple[int, float], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def mask(self, window: int | None) -> torch.Tensor | None:
        """True where a query may see a key, [B or 1, 1, Q, K]; None where plain causal attention says the same."""
        if window is not None and window >= self.seq_len:
            window = None
        if window not in self._masks:
            self._masks[window] = None if self.plain and window is None else self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> torch.Tensor:
        distance = self.positions[:, None] - self.key_positions[None, :]
        seen = distance >= 0
        if window is not None:
            seen &= distance < window
        if self.documents is None:
            return seen[None, None]
        return (seen & (self.documents[:, :, None] == self.key_documents[:, None, :]))[:, None]

    def token_ids(self, tp_rank: int, tp: int) -> torch.Tensor:
        """Number in the run of each token that this rank routes, [B * Q/tp]: sample * seq_len + position."""
        positions = self.positions.chunk(tp)[tp_rank]
        return (self.samples[:, None] * self.seq_len + positions).flatten()

    def rope(self, width: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin) of rotary embedding, each [Q, width], float32 (https://arxiv.org/abs/2104.09864)."""
        key = (width, theta)
        if key not in self._ropes:
            device = self.positions.device
            frequency = theta ** (-torch.arange(0, width, 2, device=device, dtype=torch.float64) / width)
            angle = self.positions.to(torch.float64)[:, None] * frequency
            angle = torch.cat([angle, angle], -1)
            self._ropes[key] = (angle.cos().float(), angle.sin().float())
        return self._ropes[key]


def place(documents: torch.Tensor | None, samples: torch.Tensor, seq_len: int, cp: int, rank: int) -> Place:
    """The place of a microbatch whose rows have ``documents`` [B, seq_len] (None: not masked)."""
    device = samples.device
    positions = local_positions(seq_len, cp, rank).to(device)
    keys = torch.cat([local_positions(seq_len, cp, r) for r in range(cp)]).to(device)
    cut = documents[:, positions] if documents is not None else None
    return Place(positions, keys, cut, documents[:, keys] if documents is not None else None, samples, seq_len,
                 plain=cp == 1 and documents is None)
