"""What does ``python -m calibration fit`` do? (Shipped tables to the shipped GPUs' profiles; or measurement files to one machine's.)"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Sequence

from calibration.write import profile_yaml, write_text
from moesim.profile import PROFILES


def shipped(out: Path | None, plots: Path | None, gpus: Sequence[str] | None) -> None:
    """Profiles of the GPUs in calibration/measurements, and the data-sheet one of a CPU; prints errors in sample and held out."""
    from calibration import cpu
    from calibration.assemble import profile
    from calibration.build import GPUS, bench
    from calibration.held_out import pooled

    unknown = sorted(set(gpus or ()) - {*GPUS, cpu.NAME})
    if unknown:
        raise ValueError(f"no measurements of GPU {unknown[0]!r}: known are {', '.join(GPUS)}")
    if gpus is None or cpu.NAME in gpus:
        write_text((out or PROFILES) / f"{cpu.NAME}.yaml", profile_yaml(cpu.profile(), cpu.HEAD))
    chosen = [g for g in gpus or GPUS if g in GPUS]
    if not chosen:
        return
    made = bench()
    for name in chosen:
        found = profile(made, name)
        write_text((out or PROFILES) / f"{name}.yaml", profile_yaml(found))
        if plots:
            from calibration.plots import write_plots

            write_plots(made, name, plots)
        for term in found.terms:
            for error in term.fits:
                print(error_line(f"{name} {term.name}", error.split, error))
    for name, error in pooled(made):
        print(error_line(f"all {name}", error.split, error))


def error_line(name: str, split: str, error) -> str:
    return f"{name:52} {split:10} n {error.num_rows:5d}  median {error.median:6.1%}  mean {error.mean:6.1%}  p90 {error.p90:6.1%}  bias {error.bias:+6.1%}"


def measured(files: Sequence[Path], name: str | None, parent: str | None, out: Path | None, plots: Path | None, json_file: Path | None) -> None:
    """The profile ``name`` from measurement files; prints each term's errors, pins and what was not used."""
    from calibration import cpu
    from calibration.build import GPUS
    from calibration.measured import make, report, sentences

    if not name or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,60}", name):
        raise ValueError(f"--name {name!r}: a profile made of measurements needs a name of letters, digits, '_', '-' and '.'")
    if name in (*GPUS, cpu.NAME):
        raise ValueError(f"--name {name}: that is a shipped profile, which `fit` without files makes; take another name")
    given, files = files, [path for file in files for path in (sorted(file.glob("*.jsonl")) if file.is_dir() else [file])]
    if not files:
        raise ValueError(f"{given[0]}: no *.jsonl in this folder; `moetrain bench OPS -o M.jsonl` writes them")
    made = make(files, name, parent)
    path = (out or PROFILES) / f"{name}.yaml"
    head = f"Written by `python -m calibration fit` from {', '.join(Path(f).name for f in files)} (parent {made.profile.parent}); measure again, don't edit."
    write_text(path, profile_yaml(made.profile, head))
    if plots:
        from calibration.plots import write_measured

        write_measured(made, plots)
    for line in sentences(made):
        print(line)
    print(f"wrote {path}: moesim plan SCENARIO --profile {name if out is None else path}")
    if json_file:
        write_text(json_file, json.dumps(report(made) | {"path": str(path)}, indent=1) + "\n")
