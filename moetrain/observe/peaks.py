"""By what peak may a measured rate be divided? (Device name -> GPU preset -> dense peak by precision, with its source; or a refusal.)

The table is exact: a device whose name is not in it gets no MFU, never that of a similar device. Names are what
`torch.cuda.get_device_name()` and `nvidia-smi` report; figures come from the planner's GPU presets (scenarios/gpus), so both
halves divide by the same number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from moesim.load import load_gpu
from moetrain.observe.words import clean

PRESET_OF_DEVICE = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H800": "h800",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA B300 SXM6 AC": "b300",
    "NVIDIA GB200": "gb200",
    "NVIDIA GB300": "gb300",
}
"""H100 PCIe, H100 NVL, H200 NVL, A100 PCIe and GH200 are other parts with other peaks or power limits: no preset, no MFU."""

PEAK_OF_PRECISION = {"bf16": "bf16", "fp8": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}
"""A layout's precision -> the peak that its fastest matrix products could reach."""


class UnknownPeak(ValueError):
    """No denominator for this device and precision; the message says why, in one line."""


@dataclass(frozen=True)
class Peak:
    """Dense FLOP/s of one device at one precision, and where the figure is from."""

    device: str
    preset: str
    precision: str
    flops_per_s: float
    source: str

    def __str__(self) -> str:
        return f"{self.flops_per_s / 1e12:g} TFLOP/s dense {self.precision} ({self.preset})"


@dataclass(frozen=True)
class Peaks:
    """Denominators of a run: BF16, in which all MFU is published, and the run's own precision. None, with the reason in
    ``refusal``, where one is unknown."""

    bf16: Peak | None
    own: Peak | None
    refusal: str | None = None


def peak(device: str, precision: str) -> Peak:
    """The dense peak of a device by its exact name. Raises UnknownPeak."""
    preset = PRESET_OF_DEVICE.get(device)
    if preset is None:
        raise UnknownPeak(f"device {clean(device, 80)!r} is not in the peak table ({', '.join(PRESET_OF_DEVICE)}): no MFU")
    column = PEAK_OF_PRECISION.get(precision)
    if column is None:
        raise UnknownPeak(f"precision {clean(precision, 40)!r} has no tensor-core peak in the presets ({', '.join(PEAK_OF_PRECISION)}): no MFU in it")
    gpu = _gpu(preset)
    if column not in gpu.peak_flops:
        raise UnknownPeak(f"preset {preset} states no {column} peak: no MFU in {precision}")
    return Peak(device, preset, column, gpu.peak_flops[column], gpu.sources.get("peak_flops", "no source stated"))


@lru_cache(maxsize=None)
def _gpu(preset: str):
    return load_gpu(preset)


def peaks(devices: str | Sequence[str], precision: str) -> Peaks:
    """Denominators of a run on these devices, all of one name: a mixed run is refused too. ``precision``: bf16, fp8, mxfp8 or
    nvfp4 as in a layout; anything else (fp32) leaves the run's own denominator unknown."""
    names = sorted({devices} if isinstance(devices, str) else set(devices))
    if len(names) != 1:
        return Peaks(None, None, f"{len(names)} kinds of device in one run ({', '.join(clean(n, 60) for n in names)}): no MFU")
    found: list[Peak | None] = []
    refusals: list[str] = []
    for wanted in ("bf16", precision):
        try:
            found.append(peak(names[0], wanted))
        except UnknownPeak as error:
            found.append(None)
            refusals.append(str(error))
    return Peaks(found[0], found[1], refusals[0] if refusals else None)
