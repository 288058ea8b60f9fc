"""How are profiles made and judged? (``python -m calibration fit`` and ``validate-kernels``: files in, files out)"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Fit hardware profiles and judge them.")


@app.command()
def fit(
    out: Annotated[Optional[Path], typer.Option(help="Folder of the profiles; the project's own by default.")] = None,
    plots: Annotated[Optional[Path], typer.Option(help="Folder for one HTML page of fit plots a GPU.")] = None,
    gpu: Annotated[Optional[list[str]], typer.Option(help="Only these GPUs.")] = None,
) -> None:
    """Turn calibration/measurements into one YAML profile a GPU, and print the errors, in sample and held out."""
    from calibration.assemble import profile
    from calibration.build import GPUS, bench
    from calibration.held_out import pooled
    from calibration.write import profile_yaml, write_text
    from moesim.profile import PROFILES

    unknown = sorted(set(gpu or ()) - set(GPUS))
    if unknown:
        raise ValueError(f"no measurements of GPU {unknown[0]!r}: known are {', '.join(GPUS)}")
    made = bench()
    for name in gpu or GPUS:
        found = profile(made, name)
        write_text((out or PROFILES) / f"{name}.yaml", profile_yaml(found))
        if plots:
            from calibration.plots import write_plots

            write_plots(made, name, plots)
        for term in found.terms:
            for error in term.fits:
                print(_line(f"{name} {term.name}", error.split, error))
    for name, error in pooled(made):
        print(_line(f"all {name}", error.split, error))


def _line(name: str, split: str, error) -> str:
    return f"{name:52} {split:10} n {error.num_rows:5d}  median {error.median:6.1%}  mean {error.mean:6.1%}  p90 {error.p90:6.1%}  bias {error.bias:+6.1%}"


@app.command("validate-kernels")
def validate_kernels(
    file: Annotated[Path, typer.Argument(help="CSV in the columns of gemm.csv or collectives.csv.")],
    json_file: Annotated[Optional[Path], typer.Option("--json", help="Write the figures and every row's price here.")] = None,
) -> None:
    """Price each row of FILE with the profile its hardware names and print the errors by hardware and kind. Never refits."""
    from calibration.judge import judge, summary
    from calibration.write import write_text

    priced, dropped = judge(file)
    groups = summary(priced)
    for g in groups:
        mark = " indicative" if g["indicative"] else ""
        print(f"{g['hardware']:10} {g['kind']:36} n {g['n']:5d}  median_abs_error {g['median_abs_error']:6.1%}  mean {g['mean']:6.1%}  "
              f"p90 {g['p90']:6.1%}  bias {g['bias']:+6.1%}  interpolated {g['interpolated']}{mark}")
    print(f"{len(priced)} rows priced, {len(dropped)} not understood")
    reasons: dict[str, list[int]] = {}
    for row in dropped:
        reasons.setdefault(row.reason, []).append(row.line)
    for reason, lines in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"  {len(lines):5d} x {reason} (first at line {lines[0]})")
    if json_file:
        rows = [{"line": p.row.line, "hardware": p.row.gpu, "seconds": p.seconds, "measured_s": p.row.seconds, "provenance": p.provenance} for p in priced]
        whole = groups[-1] if groups else {"n": 0, "median_abs_error": None}
        report = {"median_abs_error": whole["median_abs_error"], "n": whole["n"], "groups": groups, "rows": rows, "not_understood": [vars(d) for d in dropped]}
        write_text(json_file, json.dumps(report, indent=1) + "\n")


@app.command()
def memory(
    file: Annotated[Optional[Path], typer.Argument(help="CSV in the columns of published_runs.csv; the shipped one by default.")] = None,
    each: Annotated[bool, typer.Option("--each", help="One line a run, too.")] = False,
) -> None:
    """Compare predicted memory with every published run that prints one and can be expressed, by source. Never fits."""
    from calibration.folds import MEASUREMENTS
    from calibration.memory_check import check, table
    from moesim.predict import read_rows

    checked = check(read_rows(file or MEASUREMENTS / "published_runs.csv"))
    for c in checked if each else ():
        print(f"{c.id:56} {c.figure:10} measured {c.measured / 1e9:6.1f} GB  predicted {c.predicted / 1e9:6.1f} GB  {c.error:+6.1%}")
    for line in table(checked):
        print(line)


def main() -> None:
    """Run the command line; a bad input is one line on stderr and exit code 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
