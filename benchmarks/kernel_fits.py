"""How well do the cost models predict kernels they never saw? (every split, every GPU pooled, beside the target)

Run: python benchmarks/kernel_fits.py
"""

from __future__ import annotations

from calibration.__main__ import pooled
from calibration.build import bench

TARGETS = {"gemm.bf16": ("median", 0.06), "gemm.fp8": ("median", 0.12), "gemm.fp8_block": ("median", 0.12), "gemm.nvfp4": ("median", 0.14),
           "fused_ffn": ("median", 0.10), "NCCL curves": ("mean", 0.06)}


def main() -> None:
    for split, name, error in pooled(bench()):
        figure, target = TARGETS[name]
        value = getattr(error, figure)
        verdict = "indicative" if split == "unseen GPU" else "met" if value <= target else "MISSED"
        print(f"{name:16} {split:11} n {error.num_rows:5d}  median {error.median:6.1%}  mean {error.mean:6.1%}  p90 {error.p90:6.1%}  "
              f"bias {error.bias:+6.1%}  target {figure} {target:.0%}: {verdict}")


if __name__ == "__main__":
    main()
