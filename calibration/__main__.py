"""How are profiles made and judged? (``python -m calibration``: files in, files out)"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Fit hardware profiles and judge them.")


@app.command()
def fit(
    files: Annotated[Optional[list[Path]], typer.Argument(metavar="[M.jsonl ...]", help="Measurements of one machine, as `moetrain bench` and `calibration ops` write them, or a folder of such files.", show_default=False)] = None,
    name: Annotated[Optional[str], typer.Option(help="Name of the profile that the files make.", show_default=False)] = None,
    parent: Annotated[Optional[str], typer.Option(help="Profile to start from: what is believed before the measurements, and stands for what they lack.", show_default="by the device's name")] = None,
    out: Annotated[Optional[Path], typer.Option(help="Folder of the profiles; the project's own by default.")] = None,
    plots: Annotated[Optional[Path], typer.Option(help="Folder for one HTML page of fit plots a profile.")] = None,
    gpu: Annotated[Optional[list[str]], typer.Option(help="Without files: only these GPUs.")] = None,
    json_file: Annotated[Optional[Path], typer.Option("--json", help="With files: write errors, pins and what was not used here.")] = None,
) -> None:
    """Turn measurements into hardware profiles, and print the errors, in sample and held out.

    With files, one profile of the machine that they were measured on:

      moesim ops SCENARIO -o ops.jsonl

      moetrain bench ops.jsonl -o m.jsonl --suite

      python -m calibration fit m.jsonl --name mine

      moesim plan SCENARIO --profile mine

    Each term starts from the parent's and moves as far as the measurements say; parameters on which they say nothing stay and are named.
    Files of several machines or software versions are refused. Without files, the shipped tables make the shipped profiles again.
    """
    from calibration import fit_command

    if files:
        fit_command.measured(files, name, parent, out, plots, json_file)
    elif name or parent or json_file:
        raise ValueError("--name, --parent and --json go with measurement files: python -m calibration fit M.jsonl --name NAME")
    else:
        fit_command.shipped(out, plots, gpu)


@app.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="A profile, by name or file.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    json_file: Annotated[Optional[Path], typer.Option("--json", help="Write every comparison and every op's ratio here.")] = None,
) -> None:
    """How far did B drift from A? Seconds of a fixed list of ops, term by term, against the errors that both profiles state."""
    from calibration.drift import as_data, drift, lines
    from calibration.write import write_text
    from moesim.profile import load_profile

    a, b = load_profile(first), load_profile(second)
    found = drift(a, b)
    for line in lines(a, b, found):
        print(line)
    if json_file:
        write_text(json_file, json.dumps({"first": a.name, "second": b.name, "terms": as_data(found)}, indent=1) + "\n")


@app.command()
def recover(
    kind: Annotated[Optional[list[str]], typer.Argument(metavar="[KIND ...]", help="Cost models, such as core_gemm; all by default.", show_default=False)] = None,
    draws: Annotated[int, typer.Option(min=1, max=100_000, help="Truths to draw and fit.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
) -> None:
    """Fit measurements made of known parameters: do the stated intervals hold the truth as often as they claim?"""
    from rich.progress import track

    from calibration.recovery import DESIGNS, line, recover as recovered

    for name in track(kind or list(DESIGNS), description="recovering", transient=True, disable=not sys.stderr.isatty()):
        print(line(recovered(name, draws, seed)), flush=True)


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


@app.command()
def scoreboard(
    rows: Annotated[Optional[Path], typer.Option(help="CSV in the columns of published_runs.csv; the shipped one by default.")] = None,
    json_file: Annotated[Optional[Path], typer.Option("--json", metavar="F", help="Write every figure here.")] = None,
    html: Annotated[Optional[Path], typer.Option(metavar="F", help="Write a self-contained page here: every run, residuals, tables.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare with calibration/scoreboard.json: exit code 1 and a line a figure that got worse.")] = False,
    update: Annotated[bool, typer.Option("--update", help="Write calibration/scoreboard.json, the README's table and the log. Needs --because.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Also the slow part: sites refitted to their own anchors, and the test fold. Resumes where it was stopped.")] = False,
    because: Annotated[Optional[str], typer.Option(metavar="TEXT", help="What changed and why; goes into measurements/residual_log.md.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0 = one a CPU.")] = 0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Predict every published run and score it: by label, source, GPU, model and release, beside constant MFU x bubble on the same rows.

    Accuracy is of runs held out (kernel factors fitted without their fold, GPU or release). Answers are kept, keyed by a hash of
    the code and data behind them: the first command after a change takes about two minutes on two cores, the next ones seconds.

    \b
    python -m calibration scoreboard                       every figure
    python -m calibration scoreboard --rows mine.csv       the same of runs of your own
    python -m calibration scoreboard --check               did a figure get worse? (what CI asks)
    python -m calibration scoreboard --update --because "attention of Hopper priced by head width"
    """
    from calibration import scoreboard_command

    raise typer.Exit(scoreboard_command.run(rows, json_file, html, check, update, full, because, workers, quiet))


Run = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run of the trainer whose spans were recorded (train.log.spans).")]
Name = Annotated[Optional[str], typer.Option("--scenario", help="What ran, where the folder has no manifest: a scenario's name or file.")]
Sets = Annotated[Optional[list[str]], typer.Option("--set", help="Change one value of --scenario, such as model.num_experts=16; may be repeated.")]
Text = Annotated[Optional[str], typer.Option("--layout", help="The layout that ran, where the folder doesn't say.")]


@app.command()
def ops(
    run: Run,
    output: Annotated[Path, typer.Option("-o", "--output", help="JSONL file of measurements to write.")],
    scenario: Name = None,
    sets: Sets = None,
    layout: Text = None,
    like: Annotated[Optional[Path], typer.Option(help="A file of measurements on the same machine, whose device and software the lines get.")] = None,
) -> None:
    """Measure ops inside real steps: each span of a recorded step against the ops of the plan that it stands for.

    An op that a span times alone is a line of its own; a span of several ops (both gradients of a product, say) is one line that lists them.
    Where a span belongs follows from its role, layer and phase, which are those of the plan's own nodes.
    """
    from calibration.in_step import write

    for line in write(run, output, scenario=scenario, sets=sets or (), layout=layout, like=like):
        print(line)


@app.command()
def compare(
    run: Run,
    profile: Annotated[Optional[str], typer.Option(help="Price with this profile (a name or file) in place of the scenario's.")] = None,
    html: Annotated[Optional[Path], typer.Option(help="Write one page with both timelines, every op and the residual by term.")] = None,
    json_file: Annotated[Optional[Path], typer.Option("--json", help="Write terms, ops and aligned work here.")] = None,
    scenario: Name = None,
    sets: Sets = None,
    layout: Text = None,
) -> None:
    """Predict the step that a run recorded, and say where prediction and measurement part.

    The run's own layout is played by the engine; both steps are cut up by the same rule, and the differences of all terms add up to the
    measured median step less the predicted one. Never refits.
    """
    from calibration import compare_page
    from calibration.compare_runs import compare as against
    from calibration.planned import Planned
    from calibration.run_folder import on_world, read_run
    from calibration.write import write_text
    from moesim.evaluate import Evaluator

    recorded = read_run(run, scenario, sets or (), layout)
    found = against(recorded, Planned(Evaluator(on_world(recorded.scenario, recorded.layout.world), profile), recorded.layout))
    for line in compare_page.lines(found):
        print(line)
    if html:
        write_text(html, compare_page.render(found))
    if json_file:
        write_text(json_file, json.dumps(compare_page.record(found), indent=1) + "\n")


@app.command()
def advise(
    scenario: Annotated[str, typer.Argument(help="A scenario's name or file.")],
    layout: Annotated[Optional[str], typer.Option(help="Only this layout's interval; by default the ranking of the leading ones.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Measurements to name.")] = 5,
    output: Annotated[Optional[Path], typer.Option("-o", "--output", help="Write them as JSONL, the input of the trainer's bench.")] = None,
    profile: Annotated[Optional[str], typer.Option(help="Price with this profile (a name or file) in place of the scenario's.")] = None,
) -> None:
    """Name the measurements that would make a plan surest: what `moesim advise` does, in the order measure, fit, advise, measure."""
    from calibration.write import write_text
    from moesim.load import load_scenario
    from moesim.search import what_to_measure

    found = what_to_measure(load_scenario(scenario), layout, lines=top, profile=profile)
    if found is None:
        raise ValueError(f"{scenario}: nothing fits, there is no winner to be surer of")
    print(found["text"])
    for line in found["measure"]:
        print(f"{line['gain']:10.3g} s  {line['words']}: {line['why']}")
    if output:
        write_text(output, "".join(json.dumps(line) + "\n" for line in found["measure"]))


@app.command()
def beyond() -> None:
    """Hold out the largest sizes of every table and print by how much an octave outside the measured range widens an error."""
    from calibration import beyond as held
    from calibration.build import bench

    made = bench()
    found = [*held.products(made), *held.curves(made)]
    for h in found:
        print(f"{h.kind:16} {h.octaves:.0f} octaves outside  n {h.num_rows:4d}  sigma {h.outside:.3f}  inside {h.inside:.3f}")
    for kind in (*(f"gemm.{dtype}" for dtype in held.DTYPES), "collectives"):
        rows = [h for h in found if h.kind == kind or (kind == "collectives" and not h.kind.startswith("gemm"))]
        print(f"{kind:16} {held.slope(rows):.3f} an octave")


@app.command("coverage-table")
def coverage_table(json_file: Annotated[Optional[Path], typer.Option("--json", metavar="F", help="Write the table here.")] = None) -> None:
    """Which kernels each software release fuses and captures, with sources, beside what the planner makes of them and the fitted factors."""
    from calibration import coverage_table
    from calibration.write import write_text

    if json_file:
        write_text(json_file, json.dumps(coverage_table.data(), indent=1) + "\n")
    for line in coverage_table.table():
        print(line)


@app.command()
def validate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Folders of runs, or files of measured steps (JSON, JSON lines, CSV).")],
    profile: Annotated[Optional[str], typer.Option(help="Price with this profile (a name or file) in place of the scenarios' own.")] = None,
    each: Annotated[bool, typer.Option("--each", help="One line a case, too.")] = False,
    json_file: Annotated[Optional[Path], typer.Option("--json", help="Write all figures and every case here.")] = None,
) -> None:
    """Predict every measured step, and print the errors of those that no fit has seen.

    A case is a scenario and a layout on so many ranks, with the median step of each launch; calibration/run_cases.py describes the files.
    Cases marked as anchors are judged apart. Never refits.
    """
    from rich.console import Console
    from rich.progress import track

    from calibration.run_cases import read_cases
    from calibration.validate_runs import judge, lines, report
    from calibration.write import write_text

    missing = [path for path in runs if not path.exists()]
    if missing:
        raise ValueError(f"{missing[0]}: no such file or folder")
    cases = read_cases(runs)
    console = Console(stderr=True)
    found = report(*judge(track(cases, "predicting", console=console, disable=not console.is_terminal), profile))
    for line in lines(found, each):
        print(line)
    if json_file:
        write_text(json_file, json.dumps(found, indent=1) + "\n")


@app.command()
def trace(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Chrome trace, plain or gzip: PyTorch's profiler, or what moesim and moetrain write.")],
    communication: Annotated[Optional[str], typer.Option(help="Regular expression for names of kernels that communicate, in place of the known ones.")] = None,
    most: Annotated[int, typer.Option(min=1, help="Events to read at most.")] = 50_000_000,
    json_file: Annotated[Optional[Path], typer.Option("--json", help="Write the figures here.")] = None,
) -> None:
    """Measure a trace: how busy each device and stream is, how long nothing runs, and which share of communication is hidden under compute.

    The file is read event by event, so its size doesn't matter.
    """
    from dataclasses import asdict

    from calibration.chrome_trace import lines, read_trace
    from calibration.write import write_text

    found = read_trace(file, communication, most)
    for line in lines(found):
        print(line)
    if json_file:
        devices = [asdict(d) | {"hidden_share": d.hidden_share} for d in found.devices]
        write_text(json_file, json.dumps({"devices": devices, "events": found.events, "used": found.used, "cut": found.cut}, indent=1) + "\n")


def main() -> None:
    """Run the command line; a bad input is one line on stderr and exit code 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
