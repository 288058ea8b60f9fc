"""Which numbers come straight from a publication, without a fit? (each with its source and its spread)"""

from __future__ import annotations

OLMO_REPORT = "https://allenai.org/papers/olmocore3"
GIN = "https://arxiv.org/abs/2511.15076"
MEGATRON_MOE = "https://arxiv.org/abs/2603.07685"

HOST = {
    "launch_s": {"x86": 1.13e-5, "grace": 1.13e-5},
    "sigma_log": 0.25,
    "sources": (
        "https://github.com/NVIDIA/dgxc-benchmarking/blob/841f5466cd/microbenchmarks/cpu_overhead/README.md",
        "https://susun-blog.com/blog/pegainfer-3-cuda-graph",
    ),
}
"""PyTorch time to issue one tiny GEMM: 11.3-17.7 us over eight sizes of one published run, whose host isn't named; 4-6 us for a bare
driver launch. The lowest of the eight, because launch time doesn't depend on size and the least disturbed run shows it; sigma covers
the others. No public figure separates Grace from x86, so both have the same."""

COLLECTIVE_SMS = 16
"""NCCL kernels hold 8-32 SMs without registered buffers (MEGATRON_MOE): the geometric mean."""

GAMMAS = (
    ("gemm", "collective", 0.235, 0.02, OLMO_REPORT),
    ("gemm", "dispatch", 0.235, 0.02, OLMO_REPORT),
    ("attention", "collective", 0.165, 0.05, OLMO_REPORT),
    ("attention", "dispatch", 0.165, 0.05, OLMO_REPORT),
    ("dispatch", "gemm", 0.99, 0.2, OLMO_REPORT),
    ("dispatch", "attention", 0.99, 0.2, OLMO_REPORT),
    ("collective", "gemm", 0.99, 0.4, OLMO_REPORT),
    ("collective", "attention", 0.99, 0.4, OLMO_REPORT),
)
"""GEMM +20% (two-batch overlap) to +27% (one-block dispatch beside a 4.65 ms GEMM): the middle of the range; attention +16.5%.
The other way round the same two-batch overlap nearly doubled the time of expert-parallel communication (+99%). Nobody published
that figure for NCCL's gathers and reductions: they take the dispatcher's, with twice its error."""

PUT_S = 1.67e-5
"""Small one-sided put through the GPU-initiated network path (GIN)."""

HYBRID_EP = "https://github.com/deepseek-ai/DeepEP/blob/hybrid-ep/docs/README_Hybrid-EP.md"
DISPATCH_CALL_S = 5e-5
"""What one call of a device-side dispatcher takes beside its kernel and a copy of the rows received: HybridEP's API less its kernel alone on
GB200 (16 SMs, bf16, 4,096 tokens of 7,168) leaves 45 to 80 us once the rows received are read and written at 5.8 TB/s; the sweeps of
DeepEP V1 in collectives.csv fit 42 to 60 us."""
