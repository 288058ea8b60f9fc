"""Which commands does a person type? (plan | simulate | advise | ops | predict | schema | validate: inputs and outputs only.)

Exit codes: 0 done; 2 bad input, one line on stderr and no output file; 3 nothing fits (the table of reasons is still printed);
130 interrupted. Nothing heavy is imported until a command runs, so that --help answers at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from moesim import __version__
from moesim.terminal import INTERRUPTED, NOTHING_FITS, STDOUT, check_outputs, console, guarded, progress_bars, write_json, write_lines, wrote

if TYPE_CHECKING:
    from moesim.plan import Candidate, Plan
    from moesim.spec import Scenario

app = typer.Typer(
    name="moesim",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="""Plan the training of a mixture-of-experts model: from a scenario file to ranked, explained layouts. No GPU needed.

Start here:

  Ranked layouts of a shipped scenario, then the same with one thing changed:
    moesim plan olmo_core3_new
    moesim plan olmo_core3_new --set model.num_experts=8

  The whole report as one page:
    moesim plan my.yaml --html plan.html

  One layout in full:
    moesim simulate my.yaml --layout "dp8 ep8 zero1 mb1 1f1b"

  Check a file you wrote:
    moesim validate my.yaml

A scenario is a YAML file (or the name of a shipped one) that names a model, a cluster and a workload.""",
)


def main() -> None:
    """Entry point of the console script."""
    # A name that the terminal's encoding lacks must not end a run.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


# ---- shared parts of the commands ---------------------------------------------------------------------------------------

def _option(*flags: str, help: str, metavar: str | None = None, default: bool | str = False) -> Any:
    """An option; ``default`` is what help shows in place of a value of None."""
    return typer.Option(*flags, metavar=metavar, help=help, show_default=default)


ScenarioArgument = Annotated[str, typer.Argument(metavar="SCENARIO", help="Scenario YAML, or the name of a shipped one.", show_default=False)]
SetOption = Annotated[Optional[list[str]], _option("--set", metavar="KEY=VALUE", help="Change one value; may be repeated.")]
ProfileOption = Annotated[Optional[str], _option("--profile", metavar="P", help="Hardware profile: name or YAML file.", default="the GPU's own")]
AnchorsOption = Annotated[Optional[Path], _option("--anchors", metavar="FILE", help="CSV of runs at your site; refits its few constants.")]
JsonOption = Annotated[Optional[str], _option("--json", metavar="F", help="Write the result as JSON ('-': to stdout).")]
LayoutOption = Annotated[Optional[str], _option("--layout", metavar="LAYOUT", help='Such as "dp8 ep8 zero1 mb1 1f1b".', default="the scenario's own")]
QuietOption = Annotated[bool, _option("--quiet", "-q", help="No progress bar.")]


def _load(path: str, sets: list[str] | None) -> Scenario:
    from moesim.load import load_scenario

    return load_scenario(path, tuple(sets or ()))


# ---- commands -----------------------------------------------------------------------------------------------------------


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moesim {__version__}")
        raise typer.Exit()


VersionOption = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")]


@app.callback()
def _root(version: VersionOption = False) -> None:
    pass


@app.command()
@guarded
def plan(
    scenario: ScenarioArgument,
    sets: SetOption = None,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, max=1000, help="Layouts to show.")] = 10,
    json_file: JsonOption = None,
    html: Annotated[Optional[Path], _option("--html", metavar="F", help="Write the report as one offline HTML file.")] = None,
    profile: ProfileOption = None,
    anchors: AnchorsOption = None,
    pin: Annotated[Optional[str], _option("--pin", metavar="LAYOUT", help="Rank this layout of yours in the table too.")] = None,
    measured: Annotated[Optional[float], _option("--measured", metavar="TOK_S", help="Tokens/s a GPU you measured: in the band? If not, why?")] = None,
    launch: Annotated[Optional[Path], _option("--launch", metavar="DIR", help="Write a torchrun script and the winner's config.")] = None,
    quiet: QuietOption = False,
) -> None:
    """Rank the layouts of a scenario: throughput, memory, days and dollars, what limits each, what was ruled out and why.

    Examples:

      moesim plan olmo_core3_new
      moesim plan deepseek_v3_512_nodes --top 20 --html plan.html --json plan.json
      moesim plan my.yaml --set cluster.num_nodes=64 --set workload.seq_len=8192
      moesim plan my.yaml --pin "pp4 dp16 ep8 zero1 mb1 1f1b" --measured 41000
      moesim plan my.yaml --launch runs/first

    Exit codes: 0 done, 2 bad input, 3 nothing fits, 130 interrupted.
    """
    from moesim import launch as launching
    from moesim import search

    check_outputs(json_file, html)
    if launch is not None:
        launching.check_directory(launch)
    if measured is not None and not 0.001 <= measured <= 1e9:
        raise ValueError(f"--measured {measured:g}: tokens/s a GPU must be a number from 0.001 to 1e9")
    spec = _load(scenario, sets)
    with progress_bars(quiet) as progress:
        found = search.plan(spec, top=top, profile=profile, anchors=anchors, pin=pin, measured=measured, progress=progress)
    _show_plan(found, json_file, html)
    winner = next((c for c in found.candidates if c.fits), None)
    if winner is None:
        raise typer.Exit(NOTHING_FITS)
    if launch is not None:
        wrote(*launching.write_launch(launch, spec, winner))


def _show_plan(found: Plan, json_file: str | None, html: Path | None) -> None:
    from moesim import page, report

    if json_file is not None:
        write_json(json_file, found.to_dict())
    if html is not None:
        page.write_html(found, html)
    report.print_plan(found, console(err=json_file == STDOUT))
    wrote(json_file, html)


@app.command()
@guarded
def simulate(
    scenario: ScenarioArgument,
    layout: LayoutOption = None,
    sets: SetOption = None,
    json_file: JsonOption = None,
    trace: Annotated[Optional[Path], _option("--trace", metavar="F", help="Write the step's timeline for Perfetto.")] = None,
    profile: ProfileOption = None,
    anchors: AnchorsOption = None,
    against: Annotated[Optional[str], _option("--against", metavar="SCENARIO", help="Explain the difference to this scenario's own layout, term by term.")] = None,
    full: Annotated[bool, _option("--full", help="Also play every rank (64 at most), each layer's routing drawn anew.")] = False,
    measured: Annotated[Optional[str], _option("--measured", metavar="TOK_S,TOK_S", help="With --against: measured tokens/s a GPU of both.")] = None,
) -> None:
    """Play one layout in full: where the seconds of a step and the bytes of the heaviest stage go. Exit 3 if it does not fit.

    Examples:

      moesim simulate olmo_core3_old
      moesim simulate my.yaml --layout "pp4 dp16 ep8 zero1 mb1 1f1b" --trace step.json
      moesim simulate olmo_core3_old --against olmo_core3_new --measured 19400,52000
      moesim simulate olmo_core3_new --full --set "workload.routing={kind: zipf, zipf_s: 1.0}"
    """
    from moesim import search

    check_outputs(json_file, trace)
    spec = _load(scenario, sets)
    if layout is None and spec.layout is None:
        raise ValueError(f'{scenario}: has no layout of its own; give one, such as --layout "dp8 ep8 zero1 mb1 1f1b"')
    if against is not None:
        if trace is not None or full:
            raise ValueError(f"{'--full' if full else '--trace'} belongs to one layout; --against compares two")
        return _simulate_against(spec, _load(against, sets), layout, profile, anchors, measured, json_file)
    if measured is not None:
        raise ValueError("--measured belongs to --against here; plan --measured compares one speed with its prediction")
    candidate, timeline = search.simulate(spec, layout, profile=profile, anchors=anchors, want_timeline=trace is not None)
    every = search.play_every_rank(spec, layout, profile=profile, anchors=anchors) if full else None
    if json_file is not None:
        ranks = {} if every is None else {"every_rank": {"step_s": every[0], "peak_bytes": every[1].tolist()}}
        write_json(json_file, _candidate_dict(spec, candidate) | ranks)
    if trace is not None:
        from moesim.timeline import chrome_trace

        write_json(trace, chrome_trace(timeline), indent=None)
    from moesim import report

    terminal = console(err=json_file == STDOUT)
    report.print_candidate(candidate, terminal)
    if every is not None:
        report.print_every_rank(candidate, *every, terminal)
    wrote(json_file, trace)
    if not candidate.fits:
        raise typer.Exit(NOTHING_FITS)


def _simulate_against(spec: Scenario, other: Scenario, layout, profile, anchors, measured: str | None, json_file: str | None) -> None:
    from dataclasses import asdict

    from moesim import report, search

    both = None if measured is None else _two_rates(measured)
    found = search.explain_gap(spec, other, layout, profile=profile, anchors=anchors, measured=both)
    if json_file is not None:
        write_json(json_file, {**asdict(found), "predicted_gap_s": found.predicted_gap_s, "unexplained_s": found.unexplained_s})
    report.print_comparison(found, console(err=json_file == STDOUT))
    wrote(json_file)


def _two_rates(text: str) -> tuple[float, float]:
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--measured {text!r}: give two numbers, such as 19400,52000") from None
    if not all(0.001 <= v <= 1e9 for v in (first, second)):
        raise ValueError(f"--measured {text!r}: both must be tokens/s a GPU from 0.001 to 1e9")
    return first, second


def _candidate_dict(spec: Scenario, candidate: Candidate) -> dict[str, Any]:
    from dataclasses import asdict

    from moesim.plan import SCHEMA_VERSION

    return {"schema_version": SCHEMA_VERSION, "scenario": {"name": spec.name, "hash": spec.hash}, **asdict(candidate)}


@app.command()
@guarded
def ops(
    scenario: ScenarioArgument,
    output: Annotated[Optional[Path], _option("-o", "--output", metavar="F", help="JSONL file to write.", default="stdout")] = None,
    layout: Annotated[Optional[str], _option("--layout", metavar="LAYOUT", help="Only the ops of this layout.", default="the promising ones")] = None,
    sets: SetOption = None,
    profile: ProfileOption = None,
) -> None:
    """List the ops whose times the plan depends on, one JSON object a line: what the trainer's bench should measure.

    Example:

      moesim ops olmo_core3_new -o ops.jsonl
    """
    from moesim import search

    check_outputs(output)
    write_lines(output, search.list_ops(_load(scenario, sets), layout, profile=profile))


@app.command()
@guarded
def advise(
    scenario: ScenarioArgument,
    layout: Annotated[Optional[str], _option("--layout", metavar="LAYOUT", help="Only this layout's interval.", default="rank the leading ones")] = None,
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, max=100, help="Measurements to name.")] = 5,
    output: Annotated[Optional[Path], _option("-o", "--output", metavar="F", help="Write them as JSONL for the trainer's bench.")] = None,
    sets: SetOption = None,
    json_file: JsonOption = None,
    profile: ProfileOption = None,
    anchors: AnchorsOption = None,
    quiet: QuietOption = False,
) -> None:
    """Name the measurements that would most change the ranking, or narrow the winner's interval; and what an anchor run would do instead.

    Each is chosen in view of those before it, so a term is not asked about twice. Exit 3 if nothing fits.

    Examples:

      moesim advise olmo_core3_new
      moesim advise my.yaml --layout "dp8 ep8 zero1 mb1 1f1b" --top 3 -o ops.jsonl
    """
    from moesim import report, search

    check_outputs(output, json_file)
    if output is not None and str(output) == json_file == STDOUT:
        raise ValueError("-o and --json can't both write to stdout")
    with progress_bars(quiet) as progress:
        found = search.what_to_measure(_load(scenario, sets), layout, lines=top, profile=profile, anchors=anchors, progress=progress)
    if found is None:
        typer.echo("moesim: nothing fits: there is no winner to be surer of", err=True)
        raise typer.Exit(NOTHING_FITS)
    if json_file is not None:
        write_json(json_file, found)
    report.print_advice(found, console(err=STDOUT in (json_file, str(output))))
    if output is not None:
        write_lines(output, found["measure"])
    wrote(json_file)


@app.command()
@guarded
def predict(
    runs: Annotated[Path, typer.Argument(metavar="RUNS.csv", help="Runs, in the columns of published_runs.csv.", show_default=False)],
    output: Annotated[Optional[Path], _option("-o", "--output", metavar="F", help="CSV file to write.", default="stdout")] = None,
    anchors: AnchorsOption = None,
    quiet: QuietOption = False,
) -> None:
    """Predict throughput and memory of a list of runs, one line each; a run that can't be expressed says why.

    Examples:

      moesim predict calibration/measurements/published_runs.csv -o predicted.csv
      moesim predict mine.csv -o predicted.csv --anchors three_of_mine.csv
    """
    from moesim import predict as predicting
    from moesim import search

    check_outputs(output)
    rows = predicting.read_rows(runs)
    simulate_run = search.run_simulator(anchors=anchors)
    with progress_bars(quiet) as progress:
        found = list(predicting.predict(rows, simulate_run, workers=os.cpu_count() or 1, progress=progress))
    if output is None or str(output) == STDOUT:
        sys.stdout.write(predicting.format_csv(found))
    else:
        predicting.write_predictions(output, found)
        wrote(output)
    num_ok = sum(row["status"] == "ok" for row in found)
    typer.echo(f"predicted {num_ok} of {len(found)} runs, {len(found) - num_ok} unsupported", err=True)


@app.command()
@guarded
def schema() -> None:
    """Print the JSON schema of a scenario, for editors that complete and check YAML.

    Example:

      moesim schema > scenario.schema.json
    """
    from moesim.schema import json_schema

    write_json(STDOUT, json_schema(), indent=2)


@app.command()
@guarded
def validate(scenario: ScenarioArgument, sets: SetOption = None) -> None:
    """Check a scenario without planning it: exit 0 and a summary, or exit 2 and one line that says what is wrong and where.

    Example:

      moesim validate my.yaml --set cluster.num_nodes=64
    """
    from moesim.report import clean, compact

    spec = _load(scenario, sets)
    from moesim.stack import load_stack

    _check_layouts(spec, scenario)
    load_stack(spec.stack)
    if spec.profile is not None:
        from moesim.profile import load_profile

        load_profile(spec.profile)
    typer.echo(f"ok: {clean(spec.name)} ({spec.hash}): {clean(spec.model.name)}, {compact(spec.model.num_params)} parameters, "
               f"on {spec.cluster.num_gpus:,} x {clean(spec.cluster.gpu.name)}")


def _check_layouts(spec: Scenario, path: str) -> None:
    """The texts of a scenario that loading leaves to the layout grammar: its own layout and the axis values of its search."""
    from moesim.layout import Layout, illegal, parse_layout
    from moesim.space import axis_values

    axis_values(spec.search, Layout())
    if spec.layout is not None:
        reason = illegal(parse_layout(spec.layout), spec.model, spec.workload, spec.cluster.num_gpus)
        if reason:
            raise ValueError(f"{path}: layout {spec.layout!r} can't run: {reason}")
