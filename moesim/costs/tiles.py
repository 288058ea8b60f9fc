"""How long does a tensor-core kernel keep the SMs busy? (Output tiles dealt to SMs in waves, each tile a k-loop with a ramp.)

The tile shapes are those of CUTLASS and cuBLAS on Hopper and Blackwell (https://github.com/NVIDIA/cutlass/blob/main/media/docs/cpp/efficient_gemm.md):
a library picks the fastest shape and, when tiles are too few to fill the GPU, splits the k loop. Here the pick is a minimum,
so time is monotone in every size.
"""

from __future__ import annotations

import numpy as np

TILE_SHAPES = ((256, 256), (256, 128), (128, 256), (128, 128), (128, 64), (64, 128))
SPLITS = (1, 2, 4, 8)


def tile_seconds(params, num_sms, m, n, k, width, groups=1.0):
    """Seconds of ``groups`` products [m, k] @ [k, n] at burst clocks, without memory limits.

    params: rate (FLOP/s of the whole GPU in full tiles), ramp_k (k-elements of prologue and epilogue a tile), small_tile
    (relative cost a halving of the tile area), quantisation (0: partial waves cost their share, 1: a full wave),
    sm_bandwidth (bytes/s one SM can load: what limits a few SMs that stream a long k alone), split_s (seconds a doubling of the
    k split adds). width: bytes an operand element. Arrays broadcast; returns seconds. Positive and monotone in m, n, k, groups.
    """
    per_sm = params["rate"] / num_sms
    best = None
    for tm, tn in TILE_SHAPES:
        inefficiency = (1.0 + params["small_tile"]) ** np.log2(256 * 256 / (tm * tn))
        multiply = 2.0 * tm * tn * inefficiency / per_sm
        load = (np.minimum(tm, m) + np.minimum(tn, n)) * width / params["sm_bandwidth"]
        step = (multiply**4 + load**4) ** 0.25
        tiles = groups * np.ceil(m / tm) * np.ceil(n / tn)
        for split in SPLITS:
            full = tiles * split / num_sms
            waves = np.maximum(1.0, full) * (1 - params["quantisation"]) + np.ceil(full) * params["quantisation"]
            seconds = waves * step * (k / split + params["ramp_k"]) + params["split_s"] * np.log2(split)
            best = seconds if best is None else np.minimum(best, seconds)
    return best


def droop(seconds, params):
    """Seconds after the clock has dropped under sustained power: long kernels slow by up to 1 + droop.

    Burst tables of Blackwell GPUs fall by 15-20% once a kernel runs for about a millisecond
    (https://github.com/ai-dynamo/aiconfigurator/tree/095f58a51c/aic-core/src/aiconfigurator_core/systems). Monotone.
    """
    late = seconds**2 / (seconds**2 + params["droop_s"] ** 2)
    return seconds * (1.0 + params["droop"] * late)
