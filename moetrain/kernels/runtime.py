"""Where and with which tile sizes does a kernel run? (interpreter or GPU, tuned or fixed, with the bulk copy engine or without)

With TRITON_INTERPRET=1, set before the first import, kernels run on the CPU, one program after another: for tests. The interpreter multiplies
bfloat16 and fp8 tiles wrongly (it reads their bits as integers), so kernels take UPCAST and widen the tiles first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
import triton
from torch import Tensor

INTERPRET: bool = bool(triton.knobs.runtime.interpret)
INTERPRETED_PROGRAMS = 3
"""Programs of a persistent grid when interpreting: enough that each takes several tiles."""
ALIGNMENT_BYTES = 16


def tuned(kernel, configs: Sequence[triton.Config], key: Sequence[str]):
    """``kernel`` behind triton's autotuner; the interpreter has no device to time on, so it gets the first config alone."""
    return triton.autotune(configs=list(configs[:1] if INTERPRET else configs), key=list(key))(kernel)


def launch(kernel, autotuned, default: triton.Config, grid: Callable, *args, config: triton.Config | None = None) -> None:
    """Run with ``config``, else tuned; in torch's deterministic mode with ``default``, since a timing must not choose the order of a sum."""
    if config is None and not (INTERPRET or torch.are_deterministic_algorithms_enabled()):
        autotuned[grid](*args)
        return
    chosen = config or default
    kernel[lambda meta: grid({**chosen.kwargs, **meta})](*args, **chosen.all_kwargs())


def on_device(name: str, x: Tensor) -> Tensor:
    """x, contiguous. ValueError in one line where no kernel can run."""
    if not (x.is_cuda or INTERPRET):
        raise ValueError(f"{name}: the triton backend needs a CUDA tensor, this one is on {x.device}; legal there are grouped_mm and reference")
    return x.contiguous()


@cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of ``device``."""
    return INTERPRETED_PROGRAMS if INTERPRET else torch.cuda.get_device_properties(device).multi_processor_count


@cache
def capability(device: torch.device) -> int:
    """Compute capability of ``device`` as 90, 100, ...; 0 for a CPU."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def bulk_copies(*tensors: Tensor) -> bool:
    """Whether the bulk tensor copy engine takes these: sm_90 or later, last dim dense, every other stride whole 16 bytes."""
    return capability(tensors[0].device) >= 90 and all(map(_describable, tensors))


def _describable(x: Tensor) -> bool:
    whole = all(stride * x.element_size() % ALIGNMENT_BYTES == 0 for stride in x.stride()[:-1])
    return whole and x.stride(-1) == 1 and x.data_ptr() % ALIGNMENT_BYTES == 0 and x.numel() > 0


def provide_scratch() -> None:
    """Memory for tensor descriptors built inside a kernel. Per thread, and the backward has its own: call before each launch."""
    triton.set_allocator(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device="cpu" if INTERPRET else "cuda"))


def precision() -> str:
    """How float32 tiles are multiplied: as torch's own products are, exactly unless TF32 is allowed."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def bucket(rows: int, num_experts: int) -> int:
    """The power of two at or above the mean rows an expert, at least 16: what tiles are tuned by, so that a step's row count never retunes."""
    return max(16, triton.next_power_of_2(triton.cdiv(max(rows, 1), num_experts)))
