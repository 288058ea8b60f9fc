"""How does a profile become a file? (YAML with stable order and rounded numbers, written atomically)"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from moesim.profile import HardwareProfile

DIGITS = 6


def write_text(path: Path, text: str) -> None:
    """Replace the file in one step, so that a reader sees the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def profile_yaml(profile: HardwareProfile) -> str:
    """YAML text; the same profile gives the same bytes."""
    import yaml

    head = f"# Written by `python -m calibration fit` from calibration/measurements; edit those, not this file.\n"
    body = yaml.safe_dump(_rounded(profile.model_dump(mode="json", exclude_defaults=True)), sort_keys=False, width=160, default_flow_style=None)
    return head + body


def _rounded(value):
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
