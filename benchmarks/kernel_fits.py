"""How well do the cost models predict kernels they never saw? (every split, every GPU pooled, beside the target)

Run: python benchmarks/kernel_fits.py
"""

from __future__ import annotations

from calibration.build import bench
from calibration.held_out import pooled

TARGETS = {"gemm.bf16": ("median", 0.06), "gemm.fp8": ("median", 0.12), "gemm.fp8_block": ("median", 0.12), "gemm.nvfp4": ("median", 0.14),
           "fused_ffn": ("median", 0.10), "NCCL curves": ("mean", 0.06)}


def main() -> None:
    for name, error in pooled(bench()):
        figure, target = TARGETS.get(name, ("median", None))
        bound = target is not None and error.split != "unseen GPU"
        verdict = f"target {figure} {target:.0%}: {'met' if getattr(error, figure) <= target else 'MISSED'}" if bound else "indicative"
        print(f"{name:30} {error.split:11} n {error.num_rows:5d}  median {error.median:6.1%}  mean {error.mean:6.1%}  p90 {error.p90:6.1%}  bias {error.bias:+6.1%}  {verdict}")


if __name__ == "__main__":
    main()
