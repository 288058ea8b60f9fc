"""Which commands does a person type to train? (train | data | bench | checkpoints | export | manifest: inputs and outputs only.)

Exit codes: 0 done; 1 failed on the way, or the last checkpoint could not be written; 2 bad input, one line on stderr and nothing written;
70 a rank hung and was ended; 130/143 interrupted, state saved (those of a rank: torchrun, and so --nproc, turns any but 0 into 1).
Every option of a run stands in its scenario's `train:` block, none in the environment.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Annotated, Any, NoReturn, Optional

import typer

BAD_INPUT = 2

app = typer.Typer(
    name="moetrain",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="""Train a mixture-of-experts model: the scenario and layout that moesim plans with, on the GPUs (or cores) that are here.

Start here, on any machine:

  A small corpus of real text, from files that every Python has:
    moetrain data corpus data/quickstart

  Five minutes of training on one process, then the same on two:
    moetrain train quickstart
    moetrain train quickstart --nproc 2 --layout "dp2 ep2 zero1 mb4" --set train.log.folder=runs/two

  What was trained, and is the record whole?
    moetrain manifest show runs/quickstart
    moetrain manifest verify runs/quickstart

A run resumes by itself from the newest good checkpoint in its folder, on any layout and number of ranks.""",
)


def main() -> None:
    """Entry point of the console script."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    _mount()
    app()


def _mount() -> None:
    """Sub-commands of other files; each needs no torch to print its help."""
    try:
        from moetrain.bench.cli import add_commands as add_bench
        from moetrain.data.cli import data
        from moetrain.observe.cli import add_commands as add_manifest
    except ModuleNotFoundError as error:
        fail(f"{error.name} is not installed; the trainer needs `pip install 'moesim[train]'`")
    app.add_typer(data, name="data")
    add_manifest(app)
    add_bench(app)


def guarded(command: Callable[..., int | None]) -> Callable[..., None]:
    """What a person did wrong becomes one line and exit code 2; a fault of ours keeps its traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            code = command(*args, **kwargs)
        except OSError as error:
            fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
        except ValueError as error:
            fail(str(error))
        raise typer.Exit(code or 0)

    return run


def fail(message: str) -> NoReturn:
    """One line on stderr (of several ranks, from the first only), exit code 2."""
    rank, world = (os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if rank == "0" or world == "1" or not rank.isdecimal():
        line = " ".join("".join(c if c.isprintable() else " " for c in message).split())
        typer.echo(f"moetrain: {line}", err=True)
    raise typer.Exit(BAD_INPUT) from None


Config = Annotated[str, typer.Argument(metavar="CONFIG", help="Scenario YAML, or the name of a shipped one.", show_default=False)]
Sets = Annotated[Optional[list[str]], typer.Option("--set", metavar="KEY=VALUE", help="Change one value, such as train.steps=20; may be repeated.", show_default=False)]
LayoutText = Annotated[Optional[str], typer.Option("--layout", metavar="LAYOUT", help="Layout text; dp is what is left of the ranks where it is not named.",
                                                   show_default="the scenario's")]


@app.command("train")
@guarded
def train_command(
    config: Config,
    layout: LayoutText = None,
    sets: Sets = None,
    nproc: Annotated[Optional[int], typer.Option("--nproc", min=1, metavar="N", help="Start N processes here through torchrun.", show_default=False)] = None,
    max_restarts: Annotated[int, typer.Option("--max-restarts", min=0, help="With --nproc: restarts after a process dies.")] = 3,
    init_from: Annotated[Optional[str], typer.Option("--init-from", metavar="DIR", help="Start from Hugging Face weights.", show_default=False)] = None,
) -> int:
    """Train CONFIG on this machine, or as one rank of a torchrun job.

    Examples:

      moetrain train quickstart --set train.steps=20
      torchrun --nproc-per-node 8 -m moetrain train olmo_core3_new --set model.num_experts=8
    """
    from moesim.load import load_scenario

    scenario = load_scenario(config, sets or ())
    if nproc is not None:
        from moetrain.prepare import check

        check(scenario, layout, nproc, init_from)  # what can't run is said once, before N processes start
        return _launch(nproc, max_restarts)
    from moetrain import distributed
    from moetrain.session import run_training

    seat = distributed.take_seat(scenario.train.device)
    try:
        return run_training(scenario, layout, seat, init_from)
    finally:
        distributed.leave()


def _launch(nproc: int, max_restarts: int) -> int:
    """This command again under torchrun. Never returns when it can start."""
    arguments, words = [], iter(sys.argv[1:])
    for word in words:
        if word in ("--nproc", "--max-restarts"):
            next(words, None)
        elif not word.startswith(("--nproc=", "--max-restarts=")):
            arguments.append(word)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", f"--max-restarts={max_restarts}",
               "-m", "moetrain", *arguments]
    # Without it restarted gloo ranks meet the addresses of the dead ones in the agent's store.
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    sys.stdout.flush()
    os.execvpe(command[0], command, environment)


@app.command("dryrun")
@guarded
def dryrun_command(
    config: Config,
    layout: LayoutText = None,
    sets: Sets = None,
    rank: Annotated[int, typer.Option("--rank", min=0, help="Rank whose holdings are listed.")] = 0,
    memory: Annotated[bool, typer.Option("--memory", help="Also follow a step on fake tensors: peak bytes by category, beside the planner's.")] = False,
    kernels: Annotated[str, typer.Option("--kernels", help="With --memory: whose saved tensors are counted, gpu | cpu.")] = "gpu",
    json_file: Annotated[Optional[str], typer.Option("--json", metavar="FILE", help="With --memory: both sides as JSON.", show_default=False)] = None,
) -> int:
    """What a rank of any world would hold and send, without memory or peers; and that every layer and expert is held exactly once.

    Examples:

      moetrain dryrun olmo_core3_new --layout "pp2 dp256 ep8 zero1 mb2" --rank 511
      moetrain dryrun olmo_core3_new --layout "dp64 ep8 zero1 mb1" --rank 63 --memory
    """
    from moesim.load import load_scenario
    from moetrain.dryrun import dryrun, layout_to_run

    scenario = load_scenario(config, sets or ())
    typer.echo(dryrun(scenario, layout, rank))
    if memory:
        import json
        from pathlib import Path

        from moesim.files import write_atomically
        from moetrain.peak import compared, table

        found = compared(scenario, layout_to_run(scenario, layout), rank, kernels)
        typer.echo(table(found))
        if json_file:
            write_atomically(Path(json_file), json.dumps(found, indent=1) + "\n")
    elif json_file:
        raise ValueError("--json goes with --memory")
    return 0


@app.command("checkpoints")
@guarded
def checkpoints_command(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A folder of checkpoints, or one of them.", show_default=False)],
    verify: Annotated[bool, typer.Option("--verify", help="Hash every file again.")] = False,
) -> int:
    """List checkpoints: step, size, layout, whether each is whole. Exit code 1 where --verify finds one that isn't."""
    from moetrain.checkpoint import describe

    lines = describe(folder, verify)
    typer.echo(lines)
    return 1 if verify and "  unusable: " in lines else 0


@app.command("export")
@guarded
def export_command(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint, or a folder of them (the newest whole one).", show_default=False)],
    form: Annotated[str, typer.Option("--form", help="qwen3_moe, mixtral, olmoe, olmo3moe, ... ; a wrong one lists them.", show_default=False)],
    output: Annotated[str, typer.Option("-o", "--output", metavar="DIR", help="Folder to make.", show_default=False)],
    dtype: Annotated[str, typer.Option("--dtype", help="float32 | bfloat16 | float16.")] = "bfloat16",
    tokenizer: Annotated[Optional[str], typer.Option("--tokenizer", metavar="PATH", help="tokenizer.json, or a folder of such files, to copy.", show_default=False)] = None,
) -> int:
    """Write a checkpoint as a Hugging Face model (safetensors), read back and compared before it is published.

    Example:

      moetrain export runs/olmo/checkpoints --form olmo3moe -o exported
    """
    from moetrain.convert import export_checkpoint

    typer.echo(export_checkpoint(checkpoint, form, output, dtype, tokenizer))
    return 0


@app.command("import")
@guarded
def import_command(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="A Hugging Face model folder with safetensors.", show_default=False)],
    output: Annotated[Optional[str], typer.Option("-o", "--output", metavar="YAML", help="Model preset to write.", show_default=False)] = None,
) -> int:
    """Check a Hugging Face model and write its spec; train from it with `moetrain train ... --init-from DIR`."""
    from moetrain.export.cli import import_model

    typer.echo(import_model(folder, output))
    return 0
