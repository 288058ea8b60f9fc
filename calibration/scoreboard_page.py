"""What does the scoreboard look like as a page one can send to somebody? (One HTML file that works offline.)

Predicted against measured with intervals, residuals by GPU and by software release, and every table. Everything is inside, plotly.js
included; a content security policy forbids the page any request, and all text of rows is escaped.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from html import escape
from pathlib import Path
from typing import Any, Callable, Iterable, Mapping, Sequence

from calibration.coverage_table import data as kernel_data
from calibration.folds import stack_release
from calibration.metrics import MIN_POINTS
from calibration.out_of_fold import LABELS
from calibration.scoreboard import percent
from calibration.scoreboard_figures import Judged
from calibration.write import write_text

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;max-width:78rem;padding:1rem;color:#1b1f24;background:#fff}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2.2rem}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.85rem}
th,td{padding:.15rem .6rem;text-align:right;border-bottom:1px solid #d8dee4}th:first-child,td:first-child,td.text{text-align:left}
.scroll{overflow-x:auto}.chart{height:34rem}p{max-width:60rem}.weak{color:#6e7781}"""
HEADS = ("", "n", "median", "mean", "p90", "bias", "inside 80%", "width", "interval score", "MFU x bubble, median")
KEYS = ("median", "mean", "p90", "bias", "coverage", "width", "score")


def write_page(path: Path, quick: Mapping[str, Any], judged: Mapping[str, Sequence[Judged]], full: Mapping[str, Any] | None) -> None:
    """Write the page whole or not at all."""
    write_text(path, render(quick, judged, full))


def render(quick: Mapping[str, Any], judged: Mapping[str, Sequence[Judged]], full: Mapping[str, Any] | None) -> str:
    """The page as text."""
    from plotly.offline import get_plotlyjs

    held = {label: members for label, members in judged.items() if label != "shipped" and members}
    first = held.get(LABELS[0]) or next(iter(held.values()), [])
    charts = {"by-label": _scatter(held), "by-source": _scatter(_grouped(first, lambda j: j.source)),
              "gpu": _residuals(first, lambda j: j.row["gpu_type"], "GPU"), "stack": _residuals(first, lambda j: stack_release(j.row), "software release")}
    titles = {"by-label": "Predicted against measured, by what was held out", "by-source": "The same by source", "gpu": "Residual by GPU", "stack": "Residual by software release"}
    figures = "".join(f"<h2>{titles[key]}</h2><div class='chart' id='{key}'></div>" for key in charts)
    script = f"<script>{get_plotlyjs()}</script><script>const C={_json(charts)};for(const k in C)Plotly.newPlot(k,C[k].data,C[k].layout,{{responsive:true,displaylogo:false}});</script>"
    return (f"<!doctype html><html lang='en'><head><meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
            f"<meta http-equiv='Content-Security-Policy' content=\"{POLICY}\"><title>Scoreboard</title><link rel='icon' href='data:,'><style>{STYLE}</style></head><body>"
            f"<h1>Predictions against published runs</h1><p>Held out: kernel factors fitted without the run's fold, GPU or software release. Click a name in a legend to hide it, "
            f"point at a mark for its run.</p>{_summary(quick)}{figures}{_details(quick)}{_full(full)}{_kernels()}{script}</body></html>\n")


# --- charts -----------------------------------------------------------------------------------------------------------------


def _grouped(judged: Iterable[Judged], key: Callable[[Judged], str]) -> dict[str, list[Judged]]:
    found = defaultdict(list)
    for j in judged:
        found[key(j)].append(j)
    return dict(sorted(found.items()))


def _scatter(groups: Mapping[str, Sequence[Judged]]) -> dict[str, Any]:
    """Log-log, intervals as bars, a line where prediction equals measurement."""
    traces = [{"type": "scatter", "mode": "markers", "name": escape(name), "x": [j.measured for j in members], "y": [j.predicted for j in members], "text": [_hover(j) for j in members],
               "hoverinfo": "text", "marker": {"size": 5, "opacity": 0.75},
               "error_y": {"type": "data", "symmetric": False, "array": [j.high - j.predicted for j in members], "arrayminus": [j.predicted - j.low for j in members], "thickness": 0.6, "width": 0}}
              for name, members in groups.items()]
    rates = [j.measured for members in groups.values() for j in members] or [1.0]
    ends = [min(rates), max(rates)]
    traces.append({"type": "scatter", "mode": "lines", "name": "equal", "x": ends, "y": ends, "line": {"color": "#6e7781", "width": 1}, "hoverinfo": "skip"})
    axis = lambda title: {"type": "log", "title": {"text": title}}  # noqa: E731
    return {"data": traces, "layout": {"xaxis": axis("measured tokens/s/GPU"), "yaxis": axis("predicted tokens/s/GPU, 80% interval"), "margin": {"t": 20}, "hovermode": "closest"}}


def _residuals(judged: Iterable[Judged], key: Callable[[Judged], str], title: str) -> dict[str, Any]:
    """Predicted over measured less one, a box a group with its runs beside it."""
    traces = [{"type": "box", "name": escape(f"{name} ({len(members)})"), "y": [j.predicted / j.measured - 1 for j in members], "text": [_hover(j) for j in members], "hoverinfo": "text",
               "boxpoints": "all", "jitter": 0.5, "pointpos": 0, "marker": {"size": 3}} for name, members in _grouped(judged, key).items()]
    return {"data": traces, "layout": {"showlegend": False, "yaxis": {"title": {"text": "predicted / measured - 1"}, "tickformat": "+.0%", "zeroline": True},
                                       "xaxis": {"title": {"text": title}, "automargin": True}, "margin": {"t": 20}}}


def _hover(j: Judged) -> str:
    """Text of one mark; plotly reads a little HTML, so names are escaped."""
    error = j.predicted / j.measured - 1
    return (f"{escape(j.id)}<br>{escape(j.row['model'])}, {escape(j.row['gpus'])} x {escape(j.row['gpu_type'])}<br>{escape(str(j.run.layout))}"
            f"<br>measured {j.measured:,.0f}, predicted {j.predicted:,.0f} ({error:+.1%}), {j.low:,.0f} to {j.high:,.0f}")


def _json(value: Any) -> str:
    """JSON that can't end the script element it stands in."""
    text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) and math.isfinite(value) else None if isinstance(value, float) else value


# --- tables -----------------------------------------------------------------------------------------------------------------


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[Any]], words: int = 1) -> str:
    """A table under a heading; the first ``words`` columns are text."""
    cell = lambda i, value: f"<td class='text'>{escape(str(value))}</td>" if i < words else f"<td>{escape(str(value))}</td>"  # noqa: E731
    body = "".join("<tr>" + "".join(cell(i, value) for i, value in enumerate(row)) + "</tr>" for row in rows)
    return f"<h2>{escape(title)}</h2><div class='scroll'><table><thead><tr>{''.join(f'<th>{escape(h)}</th>' for h in heads)}</tr></thead><tbody>{body}</tbody></table></div>"


def _row(name: str, b: Mapping[str, Any]) -> list[str]:
    mark = " *" if b["n"] < MIN_POINTS else ""
    return [name + mark, str(b["n"]), *(percent(b.get(k)) for k in KEYS), percent(b.get("baseline", {}).get("median"))]


def _summary(quick: Mapping[str, Any]) -> str:
    held = "held out, " if "fitted" in quick else ""
    rows = [_row(f"{held}{label}, {kind}", b) for label, found in quick["labels"].items() for kind, b in found.items() if b["n"]]
    rows += [_row(f"shipped factors, in sample, {kind}", b) for kind, b in quick.get("fitted", {}).items()]
    return _table("Accuracy", HEADS, rows) + f"<p class='weak'>* fewer than {MIN_POINTS} runs: indicative.</p>"


def _details(quick: Mapping[str, Any]) -> str:
    parts = [_table(f"By {name}", HEADS, [_row(value, b) for value, b in groups.items()]) for name, groups in quick["by"].items()]
    number = lambda value: "-" if value is None else f"{value:.2f}"  # noqa: E731
    series = quick["ranking"]["series"].items()
    parts.append(_table("Ranking inside each layout series", ("series", "n", "Kendall tau-b", "regret"), [(n, f["n"], number(f["tau"]), percent(f["regret"])) for n, f in series]))
    parts.append(_table("Share of speed kept along scaling series: predicted less measured", ("series", "steps", "largest", "errors"),
                        [(n, f["n"], f["max_gpus"], ", ".join(f"{100 * e:+.1f}" for e in f["errors"])) for n, f in quick["scaling"]["series"].items()]))
    parts.append(_table("One knob turned", ("pair", "knob", "measured", "predicted"), [(p["name"], p["knob"], number(p["measured"]), number(p["predicted"])) for p in quick.get("pairs", ())], 2))
    kept = quick.get("kept_share") or {"predicted": {}, "measured": {}}
    parts.append(_table("DeepSeek-V3 on GB200, share of the speed at 256 GPUs", ("GPUs", "measured", "predicted"), [(n, number(kept["measured"][n]), number(p)) for n, p in kept["predicted"].items()]))
    parts.append(_table("Intervals by where the seconds come from", ("", "n", "width", "inside 80%", "interval score"),
                        [(n, b["n"], percent(b["width"]), percent(b["coverage"]), percent(b["score"])) for n, b in quick["bands"].items()]))
    m = quick["memory"]
    parts.append(_table("Memory", ("n", "median", "mean", "p90", "bias", "more than 5% too low"), [(m["n"], *(percent(m.get(k)) for k in ("median", "mean", "p90", "bias")), m["under_by_5_percent"])], 0))
    s = quick["support"]
    rows = [(f"{kind} rows predicted", f"{s[kind]['predicted']} of {s[kind]['rows']}") for kind in ("moe", "dense")] + list(s["unsupported"].items())
    return "".join([*parts, _table("Support", ("", "rows"), rows)])


def _full(full: Mapping[str, Any] | None) -> str:
    if not full:
        return ""
    rows = [_row(f"{name}, {kind}", b) for name in ("zero-shot, rest of anchored sites", "anchored", "test fold") for kind, b in full[name].items() if b["n"]]
    each = [(name, s["anchored"]["n"], percent(s["zero-shot"].get("median")), percent(s["anchored"].get("median")), percent(s["anchored"].get("coverage")),
             ", ".join(f"{key} x{value:.2f}" for key, value in s["multipliers"].items())) for name, s in full["sites"].items()]
    return _table("Anchored sites and the test fold", HEADS, rows) + _table("Site by site", ("site", "n", "zero-shot", "anchored", "inside 80%", "constants"), each)


def _kernels() -> str:
    found = kernel_data()
    rows = [(k["stack"], k["releases"], k["feature"], " ".join(k["precisions"]), k["fused"], k["graphed"], k["provenance"], ("! " if k["differs"] else "") + k["priced"], k["source"]) for k in found["rows"]]
    heads = ("stack", "releases", "feature", "precision", "fused", "graph", "known", "in the planner (! = priced otherwise)", "source")
    factors = [(stack, generation, *(f"{kinds.get(kind, 1.0):.2f}" for kind in found["meaning"])) for stack, each in found["factors"]["stacks"].items() for generation, kinds in each.items()]
    return _table("Kernels that software fuses and captures", heads, rows, len(heads)) + _table("Factors on seconds fitted to published runs", ("stack", "generation", *found["meaning"]), factors, 2)
