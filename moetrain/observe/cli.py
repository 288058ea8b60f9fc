"""Which commands look at a run's history? (`moetrain manifest verify | show RUN`.)

Exit codes: 0 all as it was; 1 something was altered or is missing; 2 bad input, one line on stderr.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

ALTERED, BAD_INPUT = 1, 2
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.", show_default=False)]
QuickOption = Annotated[bool, typer.Option("--quick", help="Don't read data shards and checkpoint files; their lists are still checked.")]


def add_commands(app: typer.Typer) -> None:
    """Mount `manifest verify` and `manifest show` on the trainer's command line."""
    group = typer.Typer(name="manifest", no_args_is_help=True, help="The history of a run: what made it, and whether it was altered since.")
    group.command("verify")(verify_command)
    group.command("show")(show_command)
    app.add_typer(group)


def verify_command(run: RunArgument, quick: QuickOption = False) -> None:
    """Hash again all that the run's manifest names: configuration, log, data shards, checkpoints."""
    from moetrain.observe.verify import sound, verify
    from moetrain.observe.words import clean

    try:
        findings = verify(run, data=not quick, checkpoints=not quick)
    except ValueError as error:
        _fail(error)
    for finding in findings:
        typer.echo(clean(finding, 600))
    whole = sound(findings)
    typer.echo(f"{clean(run)}: " + ("as it was" if whole else "NOT as it was") + (" (shards and checkpoint files not read)" if quick else ""))
    raise typer.Exit(0 if whole else ALTERED)


def show_command(run: RunArgument) -> None:
    """Print the history: one line a record, after what the run was made of."""
    from moetrain.observe import manifest
    from moetrain.observe.words import clean

    try:
        records = manifest.read(run)
    except ValueError as error:
        _fail(error)
    for line in describe(records):
        typer.echo(clean(line, 600))


def _fail(error: Exception) -> None:
    from moetrain.observe.words import clean

    typer.echo(f"moetrain: {clean(error, 600)}", err=True)
    raise typer.Exit(BAD_INPUT) from None


def describe(records: list[dict]) -> list[str]:
    """Lines to print about a history."""
    from moetrain.observe import manifest

    code, data, env = (manifest.part(records, name) or {} for name in ("code", "data", "environment"))
    devices = env.get("devices") or []
    lines = [f"code {code.get('commit', code.get('version', 'UNKNOWN'))}{' (dirty)' if code.get('dirty') else ''}, sources {str(code.get('sources_sha256'))[:12]}",
             f"python {env.get('python')}, {env.get('platform')}, {env.get('cores')} cores {env.get('cpu')}, devices {', '.join(sorted(set(devices))) or 'none'}"]
    lines += [f"data {s['path']}: weight {s['weight']:g}, {s['tokens']} tokens, index {s['index_sha256'][:12]}" for s in data.get("sources", ())]
    return lines + [_line(record) for record in records]


def _line(record: dict) -> str:
    body = record["body"]
    words = {
        "start": lambda: f"layout {body.get('layout')}, {body.get('world')} ranks, config {str(body.get('config_sha256'))[:12]}",
        "restart": lambda: f"from step {body.get('from_step')}, layout {body.get('layout')}, {body.get('world')} ranks, config {str(body.get('config_sha256'))[:12]}",
        "checkpoint": lambda: f"step {body.get('step')} in {body.get('folder')}, {str(body.get('file'))} {str(body.get('file_sha256'))[:12]}",
        "removed": lambda: f"checkpoint of step {body.get('step')}",
        "result": lambda: f"step {body.get('step')}, " + ", ".join(f"{k} {v}" for k, v in (body.get("losses") or {}).items()),
    }  # fmt: skip
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(record["time"]))
    text = words.get(record["kind"], lambda: str(body.get("text", "")))()
    return f"{record['number']:4d}  {when}  {record['kind']:10}  {record['sha256'][:12]}  {text}"
