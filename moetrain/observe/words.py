"""How are numbers, and names that other people wrote, put into one printable line?

Names come from files, device drivers and error messages: they are shown as text, never as markup or escape codes.
"""

from __future__ import annotations

from typing import Any

UNKNOWN = "UNKNOWN"
GIB = 2**30


def clean(value: Any, limit: int = 300) -> str:
    """One printable line of at most ``limit`` characters: control characters (escape codes, newlines) become spaces."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def compact(value: float | None) -> str:
    """Three digits and a letter: 49.1K, 1.23M, 15.6T; None is UNKNOWN."""
    if value is None:
        return UNKNOWN
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= scale * 0.9995:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"


def percent(share: float | None, digits: int = 1) -> str:
    """A share of one as per cent; None is UNKNOWN."""
    return UNKNOWN if share is None else f"{100 * share:.{digits}f}%"


def size(num_bytes: float | None) -> str:
    """Bytes in the largest binary unit that leaves at least 1: 77.9 GiB, 412 MiB; None is UNKNOWN."""
    if num_bytes is None:
        return UNKNOWN
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.3g} {unit}" if abs(num_bytes) < 999.5 * scale else f"{num_bytes / scale:.0f} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float | None) -> str:
    """Seconds in a unit that reads: 320 us, 12.3 ms, 1.25 s, 2 h 05 min; None is UNKNOWN."""
    if seconds is None:
        return UNKNOWN
    if abs(seconds) < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if abs(seconds) < 1:
        return f"{seconds * 1e3:.3g} ms"
    if abs(seconds) < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"
