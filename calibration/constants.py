"""Which numbers come straight from a publication, without a fit? (each with its source and its spread)"""

from __future__ import annotations

AIC = "https://github.com/ai-dynamo/aiconfigurator/tree/095f58a51c/aic-core/src/aiconfigurator_core/systems/"
OLMO_REPORT = "https://github.com/allenai/OLMo-core"
NCCL_TUNING = "https://github.com/NVIDIA/nccl/blob/5067397c26/src/graph/tuning.cc"

LAUNCH = {
    "launch_s": {"x86": 1.13e-5, "grace": 1.13e-5},
    "sigma_log": 0.25,
    "sources": (
        "https://github.com/NVIDIA/dgxc-benchmarking/blob/841f5466cd/microbenchmarks/cpu_overhead/README.md",
        "https://susun-blog.com/blog/pegainfer-3-cuda-graph",
    ),
}
"""PyTorch small-kernel launch, 11.3-17.7 us on the hosts measured: the fastest host, because hosts that ship with Blackwell are newer;
the spread covers the rest. No public figure separates Grace from x86, so both have the same."""

COLLECTIVE_SMS = 16
"""NCCL kernels hold 8-32 SMs without registered buffers (https://arxiv.org/abs/2603.07685): the geometric mean."""

GAMMAS = (
    ("gemm", "collective", 0.25, 0.02, OLMO_REPORT),
    ("gemm", "dispatch", 0.25, 0.02, OLMO_REPORT),
    ("attention", "collective", 0.165, 0.05, OLMO_REPORT),
    ("attention", "dispatch", 0.165, 0.05, OLMO_REPORT),
)

EFFICIENCY_NOT_MEASURED = 0.66
