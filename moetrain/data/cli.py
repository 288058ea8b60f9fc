"""Which commands make and check training data? (moetrain data build | corpus | verify | info)

Exit codes: 0 done; 2 bad input, one line on stderr; 130 interrupted. Nothing heavy is imported until a command runs.
"""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

if TYPE_CHECKING:
    from moetrain.data.build import Progress

BAD_INPUT, INTERRUPTED = 2, 130

data = typer.Typer(
    name="data",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Make and check training data: folders of tokenised shards.

  A small real corpus from the files of this Python, offline, in seconds:
    moetrain data corpus tiny

  Your own text, with a tokenizer trained on it:
    moetrain data build mydata "texts/**/*.jsonl" --train-tokenizer 32000

  What is in it, and is it whole?
    moetrain data info mydata
    moetrain data verify mydata

A run then names mydata/train as a source and mydata/validation as its validation path.""",
)


def add_commands(app: typer.Typer) -> None:
    """Put `data` and its commands under a command line."""
    app.add_typer(data)


def _guarded(command: Callable[..., None]) -> Callable[..., None]:
    """What a person did wrong becomes one line and an exit code; a fault of ours keeps its traceback."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except ValueError as error:
            _end(" ".join(str(error).split()), BAD_INPUT)
        except BrokenPipeError:
            # The reader went away (`... | head`); what Python flushes at exit must find no closed pipe.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except OSError as error:
            _end(f"{error.filename}: {error.strerror}" if error.filename else str(error), BAD_INPUT)
        except KeyboardInterrupt:
            _end("stopped; a build goes on after its last whole shard when the command is given again", INTERRUPTED)

    return run


def _end(message: str, code: int) -> None:
    print(f"moetrain: {message}", file=sys.stderr)
    raise typer.Exit(code)


@contextmanager
def _bar() -> Iterator[Progress]:
    """A progress bar on a terminal's stderr; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    named, noted = TextColumn("{task.description:<15}"), TextColumn("{task.fields[note]}")
    columns = (named, BarColumn(), TaskProgressColumn(), noted, TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: float, total: float, note: str) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total, note=note)
            bar.update(tasks[stage], completed=done, total=total, note=note)

        yield show


def _command() -> str:
    return shlex.join(["moetrain", *sys.argv[1:]])


OUT = Annotated[Path, typer.Argument(help="The folder to make. It appears only when everything in it is whole.", show_default=False)]
OVERWRITE = Annotated[bool, typer.Option("--overwrite", help="Replace a folder that is there already, once the new one is whole.")]
VALIDATION = Annotated[float, typer.Option(help="Share of the documents that become validation, chosen by a hash of their text.")]
INPUTS_HELP = "Files, folders or quoted globs: .txt, .md, .jsonl (all three also .gz), .parquet."
INPUTS = Annotated[list[str], typer.Argument(help=INPUTS_HELP, show_default=False)]
TOKENIZER = Annotated[Optional[Path], typer.Option(help="A tokenizer.json, or a folder that holds one.", show_default=False)]
EOS = Annotated[Optional[str], typer.Option(help="Its end-of-text token, if that has no usual name.", show_default=False)]
TRAIN_HELP = "Train a byte-level BPE of this many ids on the training documents."
TRAIN = Annotated[Optional[int], typer.Option(help=TRAIN_HELP, show_default=False)]
FOLDER = Annotated[Path, typer.Argument(help="A built folder, or one of its train and validation folders.", show_default=False)]


@data.command()
@_guarded
def build(
    out: OUT,
    inputs: INPUTS,
    tokenizer: TOKENIZER = None,
    train_tokenizer: TRAIN = None,
    eos: EOS = None,
    field: Annotated[str, typer.Option(help="The JSONL field or Parquet column that holds the text.")] = "text",
    text_unit: Annotated[str, typer.Option(help="What one document of a text file is: the whole file, or a line.")] = "file",
    validation: VALIDATION = 0.01,
    shard_tokens: Annotated[int, typer.Option(help="A shard is closed at the first document's end past this many tokens.")] = 100_000_000,
    workers: Annotated[int, typer.Option(help="Threads that tokenise. The result doesn't depend on it.")] = 1,
    overwrite: OVERWRITE = False,
    restart: Annotated[bool, typer.Option("--restart", help="Drop what a stopped build left, instead of going on with it.")] = False,
) -> None:
    """Tokenise text, JSONL or Parquet into OUT/train and OUT/validation. A stopped build goes on when the command is given again."""
    from moetrain.data.build import BuildOptions, build
    from moetrain.data.inputs import TEXT_UNITS, Format
    from moetrain.data.tokenizer import load_tokenizer

    if (tokenizer is None) == (train_tokenizer is None):
        raise ValueError("give either --tokenizer PATH or --train-tokenizer SIZE")
    if text_unit not in TEXT_UNITS:
        raise ValueError(f"--text-unit is {text_unit!r}; legal: {', '.join(TEXT_UNITS)}")
    made = load_tokenizer(tokenizer, eos) if tokenizer else train_tokenizer
    options = BuildOptions(out, made, shard_tokens, validation, workers, overwrite, restart, _command())
    with _bar() as progress:
        report = build(inputs, Format(field, text_unit), options, progress)
    _say(out, report)


@data.command()
@_guarded
def corpus(
    out: OUT,
    size: Annotated[float, typer.Option(help="Million bytes of text to take, if this Python's files hold as much.")] = 6.0,
    vocab: Annotated[int, typer.Option(help="Ids of the byte-level BPE that is trained on it.")] = 4096,
    validation: VALIDATION = 0.05,
    overwrite: OVERWRITE = False,
) -> None:
    """A small real corpus from files every Python has: documentation, licences, docstrings, source. Offline, in seconds."""
    from moetrain.data.corpus import corpus

    with _bar() as progress:
        report = corpus(out, size, vocab, validation, overwrite, _command(), progress)
    _say(out, report)


@data.command()
@_guarded
def verify(folder: FOLDER) -> None:
    """Read everything again: hashes, sizes, every id and document start. Ends with 2 at the first fault."""
    from moetrain.data.shards import verify

    for path in _sets(folder):
        shards = verify(path)
        print(f"{path}: whole: {shards.num_tokens:,} tokens, {shards.num_documents:,} documents, {len(shards.index.shards)} shards")


@data.command()
@_guarded
def info(
    folder: FOLDER,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    document: Annotated[Optional[int], typer.Option(help="Show the text of the document of this number, too.", show_default=False)] = None,
) -> None:
    """What a folder holds and where it came from, without reading the tokens."""
    from moetrain.data.shards import ShardSet
    from moetrain.data.statistics import STATISTICS, read_statistics

    sets = {str(path): ShardSet(path) for path in _sets(folder)}
    about = {name: shards.index.model_dump() | {"digest": shards.digest} for name, shards in sets.items()}
    if as_json:
        print(json.dumps(about, indent=1))
        return
    for name, shards in sets.items():
        _describe(name, shards)
        if document is not None:
            print(_text_of(shards, document))
    if (folder / STATISTICS).exists():
        _say(folder, read_statistics(folder))


def _sets(folder: Path) -> list[Path]:
    """The folders of shards in a folder: itself, or its train and validation."""
    from moetrain.data.shards import INDEX

    inner = [folder / split for split in ("train", "validation") if (folder / split / INDEX).exists()]
    return [folder] if (folder / INDEX).exists() or not inner else inner


def _describe(name: str, shards: Any) -> None:
    index = shards.index
    print(f"{name}: {index.tokens:,} tokens, {index.documents:,} documents, {len(index.shards)} shards of {index.dtype}")
    print(f"  vocabulary {index.vocab_size:,}, end of text {index.eos_id}, tokenizer {(index.tokenizer_sha256 or 'unknown')[:12]}")
    print(f"  {len(index.sources)} sources, {sum(s.bytes for s in index.sources):,} bytes; digest {shards.digest[:12]}")
    if index.command:
        print(f"  made by: {index.command}")


def _text_of(shards: Any, number: int) -> str:
    from moetrain.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(shards.folder.parent)
    if tokenizer.sha256 != shards.index.tokenizer_sha256:
        raise ValueError(f"{shards.folder.parent}: its tokenizer.json isn't the one the shards were made with")
    return tokenizer.decode(shards.document(number))


def _say(out: Path, report: dict[str, Any]) -> None:
    for split in ("train", "validation"):
        if split in report:
            row = report[split]
            size = f"; {row['bytes_per_token']:.2f} bytes a token" if "bytes_per_token" in row else ""
            print(f"{out / split}: {row['tokens']:,} tokens in {row['documents']:,} documents{size}")
    if "validation" not in report:
        return
    bar = report["validation"]["unigram_nats"]
    print(f"word counts alone predict the validation at {bar:.3f} nats a token (uniform: {report['uniform_nats']:.3f}): the loss to beat")
