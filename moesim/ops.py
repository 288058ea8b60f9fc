"""What work does one kernel or one collective do? (FLOP, bytes, adjoint: no seconds here.)

Every op is a frozen value: it can be hashed, memoised, listed by ``moesim ops``, timed by the trainer and priced by a
``HardwareProfile``. Sizes are those of ONE rank. Bytes are SI bytes, FLOP counts a multiply-add as two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Union

BYTES_PER_ELEMENT = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""Storage of one element, block scales included: MXFP8 has one 8-bit scale for 32 elements (OCP MX specification 1.0,
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf), NVFP4 one 8-bit scale for 16
(https://developer.nvidia.com/blog/introducing-nvfp4-for-efficient-and-accurate-low-precision-inference/)."""


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate: ``size`` ranks, ``stride`` apart in the global rank order (aligned, as Megatron places them)."""

    size: int
    stride: int = 1

    def members_within(self, span: int) -> int:
        """How many members of the group share one tier instance that connects ``span`` consecutive ranks, for the worst placed
        group: 16 consecutive ranks on instances of 72 leave ranks 64-79 split 8 and 8, and 64 leave a rank with 7 others."""
        extent = self.size * self.stride
        straddles = span % extent and extent % span
        fits = max(1, min(self.size, (gcd(span, extent) if straddles else span) // self.stride))
        return next(count for count in range(fits, 0, -1) if self.size % count == 0)

    def instances(self, span: int) -> int:
        """Over how many tier instances of ``span`` ranks does the group reach?"""
        return -(-self.size // self.members_within(span))


@dataclass(frozen=True, slots=True)
class Gemm:
    """C[m, n] = A[m, k] @ B[k, n]; ``accumulate`` adds into an FP32 C (the weight-gradient form)."""

    m: int
    n: int
    k: int
    dtype: str = "bf16"
    accumulate: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k

    @property
    def bytes(self) -> float:
        width = BYTES_PER_ELEMENT[self.dtype]
        out = 8.0 if self.accumulate else 2.0
        return width * (self.m * self.k + self.k * self.n) + out * self.m * self.n

    def adjoint(self) -> tuple[tuple["Op", ...], tuple["Op", ...]]:
        """(input-gradient ops, weight-gradient ops): dA = dC @ B^T and dB = A^T @ dC."""
        dgrad = replace(self, n=self.k, k=self.n)
        wgrad = Gemm(m=self.k, n=self.n, k=self.m, dtype=self.dtype, accumulate=True)
        return (dgrad,), (wgrad,)


@dataclass(frozen=True, slots=True)
class GroupedGemm:
    """``groups`` products of [rows_g, k] @ [k, n], sum of rows_g = ``rows``.

    ``rows`` is the busiest rank's total over its local experts, ``max_rows`` its busiest expert's share; ``grad`` is
    "none" (forward), "input" or "weight" (then each group yields an [n, k] FP32 accumulated gradient).
    """

    groups: int
    rows: float
    n: int
    k: int
    dtype: str = "bf16"
    grad: str = "none"
    max_rows: float = 0.0

    @property
    def flops(self) -> float:
        return 2.0 * self.rows * self.n * self.k

    @property
    def bytes(self) -> float:
        width = BYTES_PER_ELEMENT[self.dtype]
        weights = self.groups * self.n * self.k
        if self.grad == "weight":
            return width * self.rows * (self.n + self.k) + 8.0 * weights
        return width * (self.rows * self.k + weights) + 2.0 * self.rows * self.n

    def adjoint(self) -> tuple[tuple["Op", ...], tuple["Op", ...]]:
        dgrad = replace(self, n=self.k, k=self.n, grad="input")
        return (dgrad,), (replace(self, grad="weight"),)


@dataclass(frozen=True, slots=True)
class Attention:
    """Softmax(QK^T)V without materialising the scores. ``pairs`` = attended (query, key) pairs of one head of one sequence
    on this rank: S(S+1)/2 when causal, S*S when not, the band when windowed; divided by the context-parallel degree."""

    batch: int
    num_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    qk_dim: int
    v_dim: int
    pairs: float
    backward: bool = False

    @property
    def flops(self) -> float:
        """Two products forward, five backward (recomputed scores included), as flash attention does them."""
        forward = 2.0 * self.batch * self.num_heads * self.pairs * (self.qk_dim + self.v_dim)
        return 2.5 * forward if self.backward else forward

    @property
    def bytes(self) -> float:
        q_out = self.batch * self.q_len * self.num_heads * (self.qk_dim + self.v_dim)
        kv = self.batch * self.kv_len * self.num_kv_heads * (self.qk_dim + self.v_dim)
        return 2.0 * (q_out + kv) * (2.0 if self.backward else 1.0)

    def adjoint(self) -> tuple[tuple["Op", ...], tuple["Op", ...]]:
        return (replace(self, backward=True),), ()


@dataclass(frozen=True, slots=True)
class MemoryBound:
    """A kernel limited by HBM: ``moved`` bytes read plus written. ``kind`` names its efficiency class: elementwise | norm |
    permute | quantise | loss | optimizer | embedding | copy. ``backward_ratio`` scales the traffic of its adjoint."""

    kind: str
    moved: float
    backward_ratio: float = 1.5

    flops = 0.0

    @property
    def bytes(self) -> float:
        return self.moved

    def adjoint(self) -> tuple[tuple["Op", ...], tuple["Op", ...]]:
        if self.backward_ratio == 0:
            return (), ()
        return (replace(self, moved=self.moved * self.backward_ratio),), ()


COLLECTIVE_ADJOINT = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "send_recv": "send_recv",
}


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of ``kind`` over ``group``. ``bytes`` follows the size column of nccl-tests: the full (gathered) buffer
    for all-gather and reduce-scatter, the buffer for all-reduce, the whole send buffer of a rank for all-to-all, the
    message for send_recv."""

    kind: str
    bytes: float
    group: Group

    flops = 0.0

    def adjoint(self) -> tuple[tuple["Op", ...], tuple["Op", ...]]:
        return (replace(self, kind=COLLECTIVE_ADJOINT[self.kind]),), ()


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Expert-parallel dispatch (or combine) of one microbatch: each of ``tokens`` local tokens goes to ``top_k`` of
    ``num_experts`` experts spread over ``group``.

    ``dispatcher``: "alltoall" (k copies through NCCL, host-side splits), "sync_free" (k copies, device-side offsets, one-sided
    puts), "dedup" (one copy per reached node, fan-out inside, on ``sms`` SMs). ``node_limit`` = most nodes a token may reach
    (None = no limit). ``load`` = received rows of the busiest rank over the mean; ``kept`` = routes kept after capacity.
    """

    tokens: int
    hidden: int
    bytes_per_element: float
    top_k: int
    num_experts: int
    group: Group
    dispatcher: str
    sms: int
    combine: bool = False
    node_limit: int | None = None
    load: float = 1.0
    kept: float = 1.0

    flops = 0.0

    @property
    def bytes(self) -> float:
        """Bytes one rank sends when every route is a copy: the ceiling T*k*h*b that no dispatcher may exceed."""
        return self.tokens * self.top_k * self.hidden * self.bytes_per_element * self.kept

    def adjoint(self) -> tuple[tuple["Op", ...], tuple["Op", ...]]:
        """A combine of gradients is a dispatch in reverse and the other way round; gradients travel in bf16."""
        return (replace(self, combine=not self.combine, bytes_per_element=2.0),), ()


Op = Union[Gemm, GroupedGemm, Attention, MemoryBound, Collective, Dispatch]
OP_KINDS = {cls.__name__: cls for cls in (Gemm, GroupedGemm, Attention, MemoryBound, Collective, Dispatch)}
