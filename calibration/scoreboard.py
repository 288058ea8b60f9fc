"""How far are predictions from what was published, and did that get worse? (`python -m calibration scoreboard`)

``look`` predicts every row and returns every figure; ``table`` prints them; ``worse`` compares them with the committed ones in
calibration/scoreboard.json by the tolerances below; ``update`` writes that file, the README's table and a line of the log, which
every look at residuals owes.
"""

from __future__ import annotations

import json
import subprocess
from datetime import date
from pathlib import Path
from typing import Any, Iterator, Mapping

from calibration.folds import MEASUREMENTS
from calibration.metrics import MIN_POINTS
from calibration.scoreboard_figures import SHIPPED, Judged, figures
from calibration.scoreboard_pairs import changed_rows
from calibration.scoreboard_rows import Progress, answers, inputs_hash, predictions
from calibration.write import write_text
from moesim.predict import read_rows
from moesim.runs import Run, parse_runs

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = Path(__file__).resolve().parent / "scoreboard.json"
LOG = MEASUREMENTS / "residual_log.md"

LOWER, HIGHER, NEAR_ZERO, COVERED = "lower", "higher", "near zero", "covered"
RULES = {"median": LOWER, "mean": LOWER, "p90": LOWER, "score": LOWER, "mean_regret": LOWER, "max_regret": LOWER, "mean_abs": LOWER, "max_abs": LOWER,
         "under_by_5_percent": LOWER, "bias": NEAR_ZERO, "off": NEAR_ZERO, "mean_tau": HIGHER, "predicted": HIGHER, "n": HIGHER, "coverage": COVERED}
"""Name of a figure -> what better means. Widths have no rule of their own: the interval score weighs them against coverage."""
ABSOLUTE, RELATIVE = 0.003, 0.03
"""A figure is worse when it moved the wrong way by more than 0.3 points plus 3% of what it was. Predictions are deterministic: this
leaves room for other libraries' rounding and for nothing else."""
BAND = 0.8  # what coverage is held against: less is worse, more is judged by the score


def look(rows_file: Path | None = None, *, workers: int = 0, progress: Progress | None = None, folder: Path | None = None
         ) -> tuple[dict[str, Any], dict[str, list[Judged]]]:
    """(figures of the quick part, judged rows by label) of a file of rows, the shipped one by default."""
    path = rows_file or SHIPPED
    rows, known = read_rows(path), path.resolve() == SHIPPED.resolve()
    by_id = {row["id"]: row for row in rows}
    if len(by_id) < len(rows):
        raise ValueError(f"{path}: id {next(r['id'] for r in rows if sum(o['id'] == r['id'] for o in rows) > 1)!r} appears twice")
    parsed = parse_runs([*rows, *(changed_rows(by_id) if known else ())])
    runs = {run.id: run for run in parsed if isinstance(run, Run)}
    found = answers(runs.values(), workers=workers, progress=progress, folder=folder)
    return figures(rows, runs, found, predictions(rows, found), known)


def stamp() -> dict[str, str]:
    """Where and when figures come from: date, commit (with "+" where files differ from it), hash of what predictions are made of."""
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()  # noqa: E731
    commit, dirty = git("rev-parse", "--short", "HEAD"), git("status", "--porcelain", "--untracked-files=no", "moesim", "scenarios")
    return {"date": date.today().isoformat(), "commit": (commit or "unknown") + ("+" if dirty else ""), "inputs": inputs_hash()}


def committed() -> dict[str, Any]:
    """The committed figures. ValueError (one line) where the file isn't what ``update`` writes."""
    try:
        data = json.loads(COMMITTED.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{COMMITTED.name}: not there; `scoreboard --update --because ...` writes it") from None
    except ValueError:
        raise ValueError(f"{COMMITTED.name}: not JSON; `scoreboard --update --because ...` writes it anew") from None
    if not isinstance(data, dict) or "quick" not in data:
        raise ValueError(f"{COMMITTED.name}: no \"quick\" figures; `scoreboard --update --because ...` writes them")
    return data


def committed_if_any() -> dict[str, Any]:
    """The same, {} where there are none: an update writes damaged ones anew."""
    try:
        return committed()
    except ValueError:
        return {}


# --- did it get worse? ------------------------------------------------------------------------------------------------------


def leaves(figures: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float]]:
    """(path, number) of every figure that a rule is about; those of fewer than MIN_POINTS runs carry no bar and are left out."""
    if isinstance(figures, Mapping):
        if figures.get("n", MIN_POINTS) < MIN_POINTS:
            return
        for key, value in figures.items():
            if key != "baseline":  # the other model's errors
                yield from leaves(value, (*path, key))
    elif isinstance(figures, (int, float)) and not isinstance(figures, bool) and path[-1] in RULES:
        yield path, float(figures)


def checked(figures: Mapping[str, Any]) -> dict[str, float]:
    """Dotted name -> value of what a check compares: the figures of ``leaves``, and how far each pair is off, in ln."""
    whole = {key: value for key, value in figures.items() if key not in ("pairs", "kept_share")}
    found = {" > ".join(path): value for path, value in leaves(whole) if "series" not in path}
    for pair in figures.get("pairs", ()):
        if pair["predicted"]:
            found[f"pair > {pair['name']} > off"] = round(pair["predicted"] / pair["measured"] - 1.0, 4)
    kept = figures.get("kept_share") or {"predicted": {}, "measured": {}}
    return found | {f"kept share > {size} GPUs > off": round(share - kept["measured"][size], 4) for size, share in kept["predicted"].items()}


def loss(name: str, was: float, now: float) -> float:
    """How much worse ``now`` is, in the figure's own unit; negative where it is better."""
    rule = RULES[name.rsplit(" > ", 1)[-1]]
    if rule == COVERED:
        return min(was, BAND) - min(now, BAND)
    return {LOWER: now - was, HIGHER: was - now, NEAR_ZERO: abs(now) - abs(was)}[rule]


def moved(was: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(lines of figures that got worse beyond the tolerance, lines of those that got better by as much)."""
    before, after, worse, better = checked(was), checked(now), [], []
    for name, old in before.items():
        if name not in after:
            worse.append(f"{name}: was {old:g}, is no more")
            continue
        change = loss(name, old, after[name])
        if abs(change) > ABSOLUTE + RELATIVE * abs(old):
            (worse if change > 0 else better).append(f"{name}: was {old:g}, is {after[name]:g}")
    return worse, better


# --- on record --------------------------------------------------------------------------------------------------------------


def update(because: str, quick: Mapping[str, Any] | None = None, full: Mapping[str, Any] | None = None) -> list[str]:
    """Write the committed figures, the README's table and a line of the log; returns what got worse and better, one line a figure."""
    if not because.strip():
        raise ValueError("--because says what was changed and why, for the log: it must not be empty")
    old = committed_if_any()
    new = dict(old)
    for part, found in (("quick", quick), ("full", full)):
        if found is not None:
            new[part] = {"stamp": stamp(), **found}
    lines = [f"{word}: {line}" for part in ("quick", "full") if part in old for word, lines in zip(("worse", "better"), moved(old[part], new[part])) for line in lines]
    write_text(COMMITTED, json.dumps(new, indent=1, sort_keys=False) + "\n")
    log(because, seen(new["quick"]) + (held_back(full) if full else ""))
    return lines


def seen(quick: Mapping[str, Any]) -> str:
    """One line on the figures, for the log."""
    cells = [f"{label} {percent(found['all']['median'])} (n {found['all']['n']})" for label, found in quick["labels"].items() if found["all"]["n"]]
    return f"held out, median error: {', '.join(cells)}"


def held_back(full: Mapping[str, Any]) -> str:
    """What a log entry says where the test fold was scored, too."""
    b = full["test fold"]["all"]
    return f"; fold 4 scored: {percent(b['median'])} (n {b['n']})"


def log(because: str, what: str) -> None:
    """Append one entry to the table of looks: what was seen, and why."""
    plain = lambda text: " ".join(text.split()).replace("|", "/")  # noqa: E731
    text = LOG.read_text(encoding="utf-8").rstrip("\n")
    folds = "folds 0-4" if "fold 4" in what else "folds 0-3"
    write_text(LOG, f"{text}\n| {date.today().isoformat()} | {folds}, scoreboard | {plain(what)} | {plain(because)} |\n")


# --- as text ----------------------------------------------------------------------------------------------------------------

HEADS = ("n", "median", "mean", "p90", "bias", "inside", "width", "score", "baseline")


def table(data: Mapping[str, Any]) -> list[str]:
    """The figures as lines."""
    lines = [head()]
    held = "held out, " if "fitted" in data else ""  # other files are judged by the shipped factors
    for label, found in data["labels"].items():
        lines += [line(f"{held}{label}, {kind}", b) for kind, b in found.items() if b["n"]]
    for name, b in data.get("fitted", {}).items():
        lines += [line(f"shipped factors (in sample), {name}", b)]
    for name, groups in data["by"].items():
        lines += ["", f"by {name}", *(line(f"  {value}", b) for value, b in groups.items())]
    return [*lines, "", *_shapes(data), *_support(data["support"]),
            f"* = fewer than {MIN_POINTS} rows, indicative; baseline = median error of constant MFU x bubble on the same rows"]


def head() -> str:
    """Names of the columns of ``line``."""
    return f"{'':52s}" + "".join(f"{name:>9s}" for name in HEADS)


def line(name: str, b: Mapping[str, Any]) -> str:
    """One block of figures as a line."""
    cells = [b.get(k) for k in ("median", "mean", "p90", "bias", "coverage", "width", "score")] + [b.get("baseline", {}).get("median")]
    return f"{name[:52]:52s}{b['n']:9d}" + "".join(f"{percent(c):>9s}" for c in cells) + (" *" if b["n"] < MIN_POINTS else "")


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def _shapes(data: Mapping[str, Any]) -> list[str]:
    r, s, m = data["ranking"], data["scaling"], data["memory"]
    lines = [f"ranking   {r['n']} layout series, mean tau-b {'-' if r['mean_tau'] is None else format(r['mean_tau'], '.2f')}, regret mean {percent(r['mean_regret'])}, worst {percent(r['max_regret'])}",
             f"scaling   {s['n']} steps of kept share, mean |error| {percent(s['mean_abs'])}, worst {percent(s['max_abs'])}",
             f"memory    {m['n']} rows, median {percent(m.get('median'))}, mean {percent(m.get('mean'))}, more than 5% too low: {m['under_by_5_percent']}"]
    lines += [f"bands     {name}: n {b['n']}, median width {percent(b['width'])}, inside {percent(b['coverage'])}" for name, b in data["bands"].items()]
    for pair in data.get("pairs", ()):
        lines.append(f"pair      {pair['name']}: x{pair['measured']:.2f} measured, " + (f"x{pair['predicted']:.2f} predicted" if pair["predicted"] else "not predicted"))
    if kept := data.get("kept_share"):
        lines.append("kept      DeepSeek-V3 on GB200, of 256 GPUs: " + ", ".join(f"{n}: {kept['measured'][n]:.2f} measured, {p:.2f} predicted" for n, p in kept["predicted"].items()))
    return lines


def _support(found: Mapping[str, Any]) -> list[str]:
    rows = [f"support   {kind}: {found[kind]['predicted']} of {found[kind]['rows']} rows predicted" for kind in ("moe", "dense")]
    return [*rows, *(f"          {count:4d} x {reason}" for reason, count in found["unsupported"].items())]


def report(stamped: Mapping[str, Any]) -> str:
    """One line of where committed figures come from."""
    s = stamped["stamp"]
    return f"from commit {s['commit']}, {s['date']}, inputs {s['inputs']}"
