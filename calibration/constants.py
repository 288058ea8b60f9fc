"""Which numbers come straight from a publication, without a fit? (each with its source and its spread)"""

from __future__ import annotations

OLMO_REPORT = "https://allenai.org/papers/olmocore3"
DEEPEP_V2 = "https://github.com/deepseek-ai/DeepEP/blob/dd758caf45/README.md"
HYBRID_EP = "https://github.com/deepseek-ai/DeepEP/blob/hybrid-ep/docs/README_Hybrid-EP.md"
EP_ON_EFA = "https://github.com/awslabs/awsome-distributed-ai/blob/95b939cdc5/micro-benchmarks/expert-parallelism/ep-backend-comparison/RESULTS.md"
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
"""PyTorch small-kernel launch: 11.3-17.7 us on the hosts measured, 4-6 us for a bare driver launch. The fastest host measured, because
those that ship with Blackwell are newer; sigma covers the rest. No public figure separates Grace from x86, so both have the same."""

COLLECTIVE_SMS = 16
"""NCCL kernels hold 8-32 SMs without registered buffers (MEGATRON_MOE): the geometric mean."""

GAMMAS = (
    ("gemm", "collective", 0.235, 0.02, OLMO_REPORT),
    ("gemm", "dispatch", 0.235, 0.02, OLMO_REPORT),
    ("attention", "collective", 0.165, 0.05, OLMO_REPORT),
    ("attention", "dispatch", 0.165, 0.05, OLMO_REPORT),
)
"""GEMM +20% (two-batch overlap) to +27% (one-block dispatch beside a 4.65 ms GEMM): the middle of the range; attention +16.5%."""

DEDUP_SM_RATE, DEDUP_LINK = 1.46e11, 0.875
"""DeepEP V2 on SM100, 8 ranks: 643 GB/s with 24 SMs and 726 with 64 (DEEPEP_V2), solved for a rate an SM in series with a link:
1/643 - 1/726 = (1/24 - 1/64)/r gives r = 146 GB/s an SM and a link of 787 of 900 GB/s. HybridEP's 16 SMs then read 589 GB/s,
between its API (536) and kernel (735) figures (HYBRID_EP)."""

NIC_SHARE = {"ib": (0.91, DEEPEP_V2), "efa": (0.70, EP_ON_EFA)}
"""Share of NIC line rate a dispatcher's network leg reaches. InfiniBand: DeepEP V2 on 2 and 4 nodes, 45-46 remote of 50 GB/s. EFA:
DeepEP V1 on 4 and 8 B300 nodes, 64-74 remote of 100 GB/s."""

PUT_S = 1.67e-5
"""Small one-sided put through the GPU-initiated network path (GIN)."""
