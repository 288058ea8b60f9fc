"""Which published runs are held out together? (`python -m calibration.folds` writes folds.csv; a test keeps it equal to the rule.)

The key of a group is model x GPU family x configuration: every release and repeat of one configuration falls into one fold. It is
made of the cells that define the work and the degrees; policies that releases of one configuration switch (recompute, dispatcher,
overlap, graphs) and cells that pages of one configuration leave blank (vpp, mbs) are left out, so that twins can't be parted.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Iterator, Mapping, Sequence

from calibration.write import write_text
from moesim.run_fields import release_of, stack_of

NUM_FOLDS = 5
KEY_COLUMNS = ("model", "gpu_type", "gpus", "seq", "gbs", "precision", "tp", "pp", "cp", "ep")
MEASUREMENTS = Path(__file__).parent / "measurements"
COLUMNS = ("id", "group", "fold")


def group_key(row: Mapping[str, str]) -> str:
    """Key of a row's group, blanks as "?"."""
    return " | ".join(re.sub(r"\s+", " ", row.get(column, "").strip()).lower() or "?" for column in KEY_COLUMNS)


def group_hash(row: Mapping[str, str]) -> str:
    return hashlib.sha256(group_key(row).encode()).hexdigest()[:12]


def fold_of(row: Mapping[str, str]) -> int:
    """Fold of a row, 0 to NUM_FOLDS - 1, drawn from its key by SHA-256."""
    return int(group_hash(row), 16) % NUM_FOLDS


def format_folds(rows: Iterable[Mapping[str, str]]) -> str:
    """folds.csv of these rows."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow((row["id"], group_hash(row), fold_of(row)))
    return out.getvalue()


def read_folds() -> dict[str, int]:
    """id -> committed fold."""
    with (MEASUREMENTS / "folds.csv").open(encoding="utf-8") as file:
        return {row["id"]: int(row["fold"]) for row in csv.DictReader(file)}


def read_excluded() -> dict[str, str]:
    """id -> why the row is predicted but not scored."""
    with (MEASUREMENTS / "excluded.csv").open(encoding="utf-8") as file:
        return {row["id"]: row["reason"] for row in csv.DictReader(file)}


@dataclass(frozen=True)
class Split:
    """Rows used by a fit and rows held out; `label` is what the held rows are to that fit."""

    name: str
    label: str
    fit: tuple[str, ...]
    held: tuple[str, ...]


def stack_release(row: Mapping[str, str]) -> str:
    """Framework and release: what "the same stack" means."""
    return f"{stack_of(row)} {release_of(row)}"


def label_of(row: Mapping[str, str], fit: Sequence[Mapping[str, str]]) -> str:
    """What a held row is to a fit: "unseen stack" before "unseen GPU" before "unseen layout"."""
    return label_from(row, {stack_release(other) for other in fit}, {other["gpu_type"] for other in fit})


def label_from(row: Mapping[str, str], stacks: set[str], gpus: set[str]) -> str:
    """label_of with the fit given as the stacks and the GPU types in it."""
    if stack_release(row) not in stacks:
        return "unseen stack"
    return "unseen layout" if row["gpu_type"] in gpus else "unseen GPU"


def splits(rows: Sequence[Mapping[str, str]]) -> Iterator[Split]:
    """The three ways of holding out: whole groups by fold, whole GPU types, whole stack releases. Rows of a split that are not of
    its label (a fold that holds all of a small stack, say) come as a split of their own label."""
    committed, stack_of_row = read_folds(), {row["id"]: stack_release(row) for row in rows}
    for fold in range(NUM_FOLDS):
        yield from _split(f"fold {fold}", rows, stack_of_row, lambda row: committed[row["id"]] == fold)
    for gpu in sorted({row["gpu_type"] for row in rows}):
        yield from _split(f"GPU {gpu}", rows, stack_of_row, lambda row: row["gpu_type"] == gpu)
    for stack in sorted(set(stack_of_row.values())):
        yield from _split(f"stack {stack}", rows, stack_of_row, lambda row: stack_of_row[row["id"]] == stack)


def _split(name: str, rows: Sequence[Mapping[str, str]], stack_of_row: Mapping[str, str], is_held) -> Iterator[Split]:
    fit = [row for row in rows if not is_held(row)]
    ids = tuple(row["id"] for row in fit)
    stacks, gpus = {stack_of_row[i] for i in ids}, {row["gpu_type"] for row in fit}
    by_label: dict[str, list[str]] = {}
    for row in rows:
        if is_held(row):
            by_label.setdefault(label_from(row, stacks, gpus), []).append(row["id"])
    for label, held in sorted(by_label.items()):
        yield Split(name, label, ids, tuple(held))


def main() -> None:
    with (MEASUREMENTS / "published_runs.csv").open(encoding="utf-8") as file:
        text = format_folds(csv.DictReader(file))
    write_text(MEASUREMENTS / "folds.csv", text)
    print(f"wrote {MEASUREMENTS.name}/folds.csv: {text.count(chr(10)) - 1} rows in {NUM_FOLDS} folds")


if __name__ == "__main__":
    main()
