"""What does a comparison of a real step with its prediction look like? (Text for a terminal, JSON, and one HTML file that works offline.)

The page holds both timelines, rank by rank, the predicted above the measured one; predicted against measured seconds of every op, with the
intervals of the prices; the ratio of both by the size of the op; and the terms of the residual. Everything is inside the file, a content
security policy forbids it any request, and text from files is escaped on its way into HTML, JSON and plotly's labels.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from calibration.compare_runs import Bar, Comparison, OpError, Term
from moesim import charts
from moesim.page import POLICY, STYLE
from moesim.report import clean

MOST_BARS = 6000
"""Drawn bars of both timelines; beyond it neighbours are joined."""
CHARTS = {
    "timeline": ("Both steps", "A lane for each stream of each rank: predicted, and one recorded step. Drag to zoom, double-click to come back."),
    "terms": ("Where the residual comes from", "Measured less predicted seconds of a step; the bars add up to the residual."),
    "agreement": ("Predicted against measured ops", "One point an op; bars are 80% intervals of its price. On the line both agree."),
    "sizes": ("Error by size", "Measured over predicted, by what the op computes, or moves where it computes nothing."),
}


def lines(found: Comparison) -> list[str]:
    """The comparison as text: the step, then a line a term."""
    low, high = found.interval
    out = [f"{found.name}  {found.layout}",
           f"step      predicted {_ms(found.predicted_s)} (80%: {_ms(low)} to {_ms(high)}), measured {_ms(found.measured_s)} (median of {found.num_steps}): "
           f"{found.predicted_s / found.measured_s - 1:+.1%}",
           f"residual  {_ms(found.residual, '+')}, by term:", "",
           f"{'term':34} {'predicted':>12} {'measured':>12} {'error':>12} {'of residual':>11}  {'80% interval':>25}  priced from"]
    for term in found.terms:
        out.append(f"{clean(term.name):34} {_ms(term.predicted):>12} {_ms(term.measured):>12} {_ms(term.error, '+'):>12} {_share(term, found):>11}  "
                   f"{_interval(term):>25}  {term.provenance or '-'}")
    out.append(f"{'sum':34} {_ms(sum(t.predicted for t in found.terms)):>12} {_ms(sum(t.measured for t in found.terms)):>12} "
               f"{_ms(sum(t.error for t in found.terms), '+'):>12}")
    return out


def record(found: Comparison) -> dict[str, Any]:
    """The comparison as JSON: seconds everywhere; timelines left out."""
    terms = [asdict(t) | {"error": t.error, "interval": list(t.interval)} for t in found.terms]
    return {"scenario": found.name, "layout": found.layout, "predicted_s": found.predicted_s, "interval_s": list(found.interval), "measured_s": found.measured_s,
            "num_steps": found.num_steps, "residual_s": found.residual, "terms": terms, "ops": [asdict(o) for o in found.ops], "aligned": [asdict(a) for a in found.aligned]}


def _ms(seconds: float, sign: str = "") -> str:
    return f"{seconds * 1e3:{sign}.2f} ms"


def _share(term: Term, found: Comparison) -> str:
    return f"{term.error / found.residual:+.0%}" if found.residual else "-"


def _interval(term: Term) -> str:
    low, high = term.interval
    return f"{_ms(low)} to {_ms(high)}" if term.predicted and term.sigma else "-"


# --- the page -----------------------------------------------------------------------------------------------------------------


def render(found: Comparison) -> str:
    """The whole page as text."""
    from plotly.offline import get_plotlyjs

    figures = {"timeline": timeline(found), "terms": terms(found), "agreement": agreement(found.ops), "sizes": sizes(found.ops)}
    title = _text(f"{found.name}: {found.layout}")
    boxes = "".join(f'<figure id="box-{key}"><figcaption><h2>{title}</h2><p>{caption}</p></figcaption><div id="{key}" class="chart"></div></figure>'
                    for key, (title, caption) in CHARTS.items())
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<main>
<header><p class="kicker">predicted and measured step</p><h1>{title}</h1></header>
{_headline(found)}
{_table("Terms of the residual", TERM_HEADS, (_term_cells(t, found) for t in found.terms))}
<div class="charts">{boxes}</div>
{_table("Ops", OP_HEADS, map(_op_cells, found.ops))}
</main>
<script>{get_plotlyjs()}</script>
<script>const FIGURES = {_json(figures)};
{SCRIPT}</script>
</body>
</html>
"""


def _text(value: Any) -> str:
    return escape(clean(value))


def _json(value: Any) -> str:
    """JSON that can't end the script element it stands in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _headline(found: Comparison) -> str:
    low, high = found.interval
    cards = (("predicted", _ms(found.predicted_s), f"80%: {_ms(low)} to {_ms(high)}"), ("measured", _ms(found.measured_s), f"median of {found.num_steps} steps"),
             ("residual", _ms(found.residual, "+"), f"prediction {found.predicted_s / found.measured_s - 1:+.1%}"))
    return f'<section class="headline"><dl>{"".join(f"<div><dt>{_text(a)}</dt><dd>{_text(b)}</dd><small>{_text(c)}</small></div>" for a, b, c in cards)}</dl></section>'


TERM_HEADS = ("term", "predicted", "measured", "error", "of residual", "80% interval", "priced from")
OP_HEADS = ("op", "kind", "times", "predicted", "measured", "error", "80% interval", "priced from")


def _term_cells(term: Term, found: Comparison) -> Sequence[str]:
    return (term.name, _ms(term.predicted), _ms(term.measured), _ms(term.error, "+"), _share(term, found), _interval(term), term.provenance or "-")


def _op_cells(op: OpError) -> Sequence[str]:
    return (op.name, op.kind, str(op.count), _ms(op.predicted), _ms(op.measured), f"{op.predicted / op.measured - 1:+.0%}", f"{_ms(op.low)} to {_ms(op.high)}",
            op.provenance or "-")


def _table(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    body = "\n".join("<tr>" + "".join(f"<td>{_text(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    head = "".join(f'<th scope="col">{_text(h)}</th>' for h in heads)
    return f'<section><h2>{_text(title)}</h2><div class="wide"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div></section>'


# --- figures, as plain dicts ----------------------------------------------------------------------------------------------------


def timeline(found: Comparison) -> charts.Figure:
    """Both steps on one axis, a lane for each stream of each rank; a predicted rank stands above the ranks of its stage."""
    spans = [_span(bar, which) for which, bars in found.bars.items() for bar in bars if bar.end > bar.start]
    drawn, _ = charts.coalesce(spans, MOST_BARS)
    figure = charts.timeline(drawn)
    marks = [{"type": "line", "xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1, "line": {"dash": "dot", "width": 1, "color": colour}}
             for x, colour in ((found.predicted_s, "#4c78a8"), (found.measured_s, "#e45756"))]
    return {**figure, "layout": figure["layout"] | {"shapes": marks}}


def _span(bar: Bar, which: str) -> dict[str, Any]:
    where = f" layer {bar.layer}" if bar.layer >= 0 else ""
    role = "+".join(bar.roles)
    return {"rank": f"{bar.rank} {which[:4]}", "stream": bar.stream, "name": f"{which} {role} {bar.phase}{where} in {bar.entry or 'the step'}", "kind": role,
            "start": bar.start, "end": bar.end}


def terms(found: Comparison) -> charts.Figure:
    """A bar a term of the residual, the largest above."""
    rows = [t for t in found.terms if t.error]
    return {"data": [{"type": "bar", "orientation": "h", "y": [_text(t.name) for t in rows], "x": [t.error for t in rows], "name": "error",
                      "marker": {"color": ["#e45756" if t.error > 0 else "#4c78a8" for t in rows]}, "hovertemplate": "%{y}: %{x:.4f} s<extra></extra>"}],
            "layout": {"xaxis": {"title": {"text": "measured less predicted, s"}}, "yaxis": {"autorange": "reversed", "type": "category"},
                       "height": 190 + 22 * len(rows), "showlegend": False}}


def agreement(ops: Sequence[OpError]) -> charts.Figure:
    """Predicted against measured seconds, a colour a kind, with the line where both are equal."""
    found = [_points(kind, [o for o in ops if o.kind == kind], lambda o: o.measured, lambda o: o.predicted, "%{text}<br>measured %{x:.3~s}s, predicted %{y:.3~s}s")
             for kind in dict.fromkeys(o.kind for o in ops)]
    for trace, kind in zip(found, dict.fromkeys(o.kind for o in ops)):
        chosen = [o for o in ops if o.kind == kind]
        trace["error_y"] = {"type": "data", "symmetric": False, "array": [o.high - o.predicted for o in chosen], "arrayminus": [o.predicted - o.low for o in chosen],
                            "thickness": 1, "width": 3}
    if ops:
        ends = [min(min(o.measured, o.predicted) for o in ops), max(max(o.measured, o.predicted) for o in ops)]
        found.append({"type": "scatter", "mode": "lines", "name": "equal", "x": ends, "y": ends, "line": {"dash": "dash", "width": 1, "color": "#79706e"}, "hoverinfo": "skip"})
    return {"data": found, "layout": {"xaxis": _log("measured seconds"), "yaxis": _log("predicted seconds")}}


def sizes(ops: Sequence[OpError]) -> charts.Figure:
    """Measured over predicted by FLOP, or by bytes where there are none."""
    found = [_points(kind, [o for o in ops if o.kind == kind], lambda o: o.flops or o.bytes, lambda o: o.measured / o.predicted, "%{text}<br>%{x:.3~s}, ratio %{y:.2f}")
             for kind in dict.fromkeys(o.kind for o in ops)]
    return {"data": found, "layout": {"xaxis": _log("FLOP, or bytes of ops without"), "yaxis": _log("measured / predicted")}}


def _points(kind: str, ops: Sequence[OpError], x, y, hover: str) -> charts.Figure:
    return {"type": "scatter", "mode": "markers", "name": _text(kind), "x": [x(o) for o in ops], "y": [y(o) for o in ops], "text": [_text(o.name) for o in ops],
            "hovertemplate": hover + "<extra>%{fullData.name}</extra>"}


def _log(title: str) -> charts.Figure:
    return {"type": "log", "title": {"text": title}}


SCRIPT = """
const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function styled({data, layout}) {
  const axis = a => ({automargin: true, gridcolor: colour("--line"), zerolinecolor: colour("--line"), ...a});
  return {autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {color: colour("--ink"), family: "system-ui, sans-serif", size: 12}, margin: {l: 40, r: 14, t: 30, b: 40},
    legend: {orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0}, hovermode: "closest",
    ...layout, height: layout.height ?? 420, xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis)};
}
function draw() {
  for (const [id, figure] of Object.entries(FIGURES))
    Plotly.react(id, figure.data, styled(figure), {responsive: true, displaylogo: false});
}
draw();
dark.addEventListener("change", draw);
document.documentElement.dataset.ready = "yes";
"""
