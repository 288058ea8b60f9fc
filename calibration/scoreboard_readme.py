"""What does the README say of accuracy? (The committed figures as two Markdown tables, between two markers.)"""

from __future__ import annotations

from typing import Any, Mapping

from calibration.metrics import MIN_POINTS
from calibration.scoreboard import ROOT, percent
from calibration.write import write_text

README = ROOT / "README.md"
BEGIN = "<!-- scoreboard:begin (written by `python -m calibration scoreboard --update`) -->"
END = "<!-- scoreboard:end -->"
HEADS = ("published runs", "n", "median", "mean", "p90", "bias", "inside 80%", "width", "MFU x bubble: median")


def section(data: Mapping[str, Any]) -> str:
    """The text between the markers."""
    quick, full = data["quick"], data.get("full")
    rows = [(f"held out, {label}, {kind}", b) for label, found in quick["labels"].items() for kind, b in found.items() if kind != "all"]
    lines = [_table(HEADS, [_cells(name, b) for name, b in rows]), _shapes(quick)]
    if full:
        rows = [("sites of eight runs or more, zero-shot", full["zero-shot, rest of anchored sites"]["all"]),
                ("the same runs, anchored: three others of their site are known", full["anchored"]["all"]),
                *((f"the fold held back, {kind}", full["test fold"][kind]) for kind in ("moe", "dense"))]
        lines.append(_table(HEADS, [_cells(name, b) for name, b in rows]))
    stamps = " and ".join(dict.fromkeys(f"`{part['stamp']['commit']}` ({part['stamp']['date']})" for part in (quick, full) if part))
    lines.append(f"Figures of commit {stamps}; `*` marks fewer than {MIN_POINTS} runs, indicative. Errors are of\n"
                 "tokens/s/GPU; width is that of the 80% interval over the measured value; the anchored baseline has its MFU from the same three runs.")
    return "\n\n".join(lines)


def _table(heads, rows) -> str:
    row = lambda cells: "| " + " | ".join(cells) + " |"  # noqa: E731
    return "\n".join([row(heads), "|" + "---|" * len(heads), *map(row, rows)])


def _cells(name: str, b: Mapping[str, Any]) -> list[str]:
    mark = " *" if b["n"] < MIN_POINTS else ""
    return [name + mark, str(b["n"]), *(percent(b.get(k)) for k in ("median", "mean", "p90", "bias", "coverage", "width")), percent(b["baseline"].get("median"))]


def _shapes(quick: Mapping[str, Any]) -> str:
    r, s, m, kinds = quick["ranking"], quick["scaling"], quick["memory"], quick["support"]
    pairs = ";\n".join(f"{p['name']} x{p['measured']:.2f} measured, " + (f"x{p['predicted']:.2f} predicted" if p["predicted"] else "not predicted") for p in quick["pairs"])
    kept = quick["kept_share"]
    largest = max(kept["predicted"], key=int)
    return (f"Support: {kinds['moe']['predicted']} of {kinds['moe']['rows']} MoE and {kinds['dense']['predicted']} of {kinds['dense']['rows']} dense runs can be expressed.\n"
            f"Ranking of {r['n']} layout series: mean tau-b {r['mean_tau']:.2f}, mean regret {percent(r['mean_regret'])}.\n"
            f"Share of speed kept along {s['n']} steps of scaling series: {percent(s['mean_abs'])} off on average.\n"
            f"Memory (n {m['n']}): median {percent(m['median'])}.\n"
            f"One knob turned: {pairs}.\nDeepSeek-V3 from 256 to {int(largest):,} GB200 keeps {kept['measured'][largest]:.2f} measured, {kept['predicted'][largest]:.2f} predicted.")


def replaced(text: str, data: Mapping[str, Any]) -> str:
    """The README with its section written anew. ValueError where the markers aren't there once each."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"README.md: needs the line {BEGIN!r} and {END!r} once each")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{section(data)}\n{END}{rest.split(END, 1)[1]}"


def write(data: Mapping[str, Any]) -> None:
    """Rewrite the README's section in place."""
    write_text(README, replaced(README.read_text(encoding="utf-8"), data))
