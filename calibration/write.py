"""How does a profile become a file? (YAML with stable order and rounded numbers, written atomically)"""

from __future__ import annotations

from pathlib import Path

from moesim.files import write_atomically
from moesim.profile import HardwareProfile

DIGITS = 6


def write_text(path: Path, text: str) -> None:
    """Replace the file in one step, its folder made where missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, text)


HEAD = "Written by `python -m calibration fit` from calibration/measurements; edit those, not this file."


def profile_yaml(profile: HardwareProfile, head: str = HEAD) -> str:
    """YAML text under a comment; the same profile gives the same bytes."""
    import yaml

    head = f"# {head}\n"
    body = yaml.safe_dump(_rounded(profile.model_dump(mode="json", exclude_defaults=True)), sort_keys=False, width=160, default_flow_style=None)
    return head + body


def table_yaml(head: str, data: dict) -> str:
    """YAML text of plain data under a comment."""
    import yaml

    return f"# {head}\n" + yaml.safe_dump(_rounded(data), sort_keys=False, width=160, default_flow_style=None)


def _rounded(value):
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value
