"""What does a plan look like as a page one can send to somebody? (One HTML file that works offline.)

Everything is inside: data, style, script and plotly.js itself, the bulk of the file's 5 MB. A content security policy forbids
the page any request. Text from files is escaped on its way into HTML, into JSON inside the script, and into plotly labels.
"""

from __future__ import annotations

import json
import os
from html import escape
from typing import Any, Iterable

from moesim import charts, report
from moesim.files import write_atomically
from moesim.plan import Candidate, Plan

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
CHARTS = {
    "scatter": ("Throughput against memory", "Bars are 80% intervals. Dashed: where HBM ends, and where the memory rule draws its limit."),
    "timeline": ("Timeline of the winner", "One step, a lane for each stream of each stage. Drag to zoom, double-click to come back."),
    "breakdown": ("Where the step goes", "The critical rank. Segments add up to the step."),
    "memory": ("Where the memory goes", "The heaviest stage. Segments add up to its peak."),
    "provenance": ("What the seconds are priced from", "Measured on this GPU, read between or beyond measurements, from a datasheet, or assumed."),
}


def write_html(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write ``plan`` as one self-contained HTML file at ``path``, whole or not at all. Raises OSError where it can't."""
    write_atomically(path, render(plan))


def render(plan: Plan) -> str:
    """The whole page as text."""
    from plotly.offline import get_plotlyjs

    figures = charts.figures(plan)
    name = _text(plan.scenario.get("name", ""))
    script = f"<script>{get_plotlyjs()}</script>\n<script>const FIGURES = {_json(figures)};\n{SCRIPT}</script>" if figures else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>moesim plan: {name}</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<main>
<header><p class="kicker">moesim plan</p><h1>{name}</h1></header>
{_headline(plan)}
{_warnings(plan.warnings)}
{_facts("How this was found", report.header_rows(plan)[1:])}
{_facts("Measured against predicted", report.measured_rows(plan))}
{_facts("What to measure next", report.advice_rows(plan.advice) if plan.advice else ())}
{_ranking(plan)}
{_terms(plan)}
<div class="charts">{"".join(_chart(key) for key in CHARTS if key in figures)}</div>
{_rejections(plan)}
</main>
{script}
</body>
</html>
"""


def _text(value: Any) -> str:
    return escape(report.clean(value))


def _json(value: Any) -> str:
    """JSON that can't end the script element it stands in."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _headline(plan: Plan) -> str:
    best = next((c for c in plan.candidates if c.fits), None)
    if best is None:
        return '<section class="headline"><p class="layout bad">No layout of this search fits.</p></section>'
    figures = (
        ("tokens/s a GPU", f"{best.tokens_per_s_per_gpu:,.0f}", f"80%: {best.low:,.0f} to {best.high:,.0f}"),
        ("MFU", report.percent(best.mfu), best.mfu_denominator),
        ("step", f"{report.seconds(best.step_s)} s", f"limited by {best.limited_by}"),
        ("memory", f"{report.gib(best.peak_bytes)} GiB", f"{_hbm_share(plan, best)} on stage {best.heaviest_stage}"),
        ("days", report.days(best.days), f"for {report.compact(plan.cost.tokens)} tokens"),
        ("cost", report.usd(best.usd), plan.cost.note),
    )
    cards = "".join(f"<div><dt>{_text(a)}</dt><dd>{_text(b)}</dd><small>{_text(c)}</small></div>" for a, b, c in figures)
    tied = sum(c.tied and c is not best for c in plan.candidates)
    also = f" <small>and {tied} more within its interval: the model can't tell them apart</small>" if tied else ""
    return f'<section class="headline"><p class="layout"><code>{_text(best.layout)}</code>{also}</p><dl>{cards}</dl></section>'


def _hbm_share(plan: Plan, c: Candidate) -> str:
    hbm = plan.scenario.get("hbm_bytes")
    return f"{report.percent(c.peak_bytes / hbm, 0)} of HBM" if hbm else ""


def _warnings(warnings: Iterable[str]) -> str:
    items = "".join(f"<li>{_text(w)}</li>" for w in warnings)
    return f'<ul class="warnings">{items}</ul>' if items else ""


def _facts(title: str, rows: Iterable[tuple[str, str]]) -> str:
    items = "".join(f"<dt>{_text(label)}</dt><dd>{_text(text)}</dd>" for label, text in rows)
    return f'<details class="facts" open><summary>{title}</summary><dl>{items}</dl></details>' if items else ""


def _chart(key: str) -> str:
    title, caption = CHARTS[key]
    return f'<figure id="box-{key}"><figcaption><h2>{title}</h2><p>{caption}</p></figcaption><div id="{key}" class="chart"></div></figure>'


# ---- ranked table -------------------------------------------------------------------------------------------------------

# header, numeric column?
COLUMNS = (("#", True), ("layout", False), ("tokens/s a GPU", True), ("80% interval", True), ("skewed", True), ("MFU", True), ("step, s", True),
           ("memory, GiB", True), ("days", True), ("cost", True), ("limited by", False), ("priced from", True))


def _ranking(plan: Plan) -> str:
    if not plan.candidates:
        return ""
    heads = "".join(f'<th scope="col"{" class=num" if numeric else ""}><button type="button">{head}</button></th>' for head, numeric in COLUMNS)
    rows = "\n".join(_row(plan, rank, c) for rank, c in enumerate(plan.candidates, 1))
    return f"""<section><h2>Ranked layouts</h2>
<p class="tools"><input id="filter" type="search" placeholder="filter: ep8 zero1" aria-label="filter rows by words"> <span id="shown"></span></p>
<div class="wide"><table id="ranked"><thead><tr>{heads}</tr></thead>
<tbody>
{rows}
</tbody></table></div>
<p class="note">MFU against {_text(report.denominators(plan))}. Skewed: the same layout when routing is {_text(plan.scenario.get("skew", "UNKNOWN"))}.</p></section>"""


def _row(plan: Plan, rank: int, c: Candidate) -> str:
    badges = "".join(f'<span class="badge {word.split()[-1]}">{word}</span>' for word in report.marks(c))
    notes = "".join(f"<small>{_text(n)}</small>" for n in c.notes)
    cells = (
        (rank, str(rank)),
        (c.layout, f"<code>{_text(c.layout)}</code>{badges}{notes}"),
        (c.tokens_per_s_per_gpu, f"{c.tokens_per_s_per_gpu:,.0f}"),
        (c.low, f"{report.compact(c.low)} to {report.compact(c.high)}"),
        (c.skewed.tokens_per_s_per_gpu if c.skewed else -1, _skewed(c)),
        (-1 if c.mfu is None else c.mfu, report.percent(c.mfu)),
        (c.step_s, report.seconds(c.step_s)),
        (c.peak_bytes, f"{report.gib(c.peak_bytes)}<small>{_text(_hbm_share(plan, c))}</small>"),
        (c.days if c.days is not None else -1, report.days(c.days)),
        (c.usd if c.usd is not None else -1, report.usd(c.usd)),
        (c.limited_by, _text(c.limited_by)),
        (c.provenance.get("measured", 0.0), _shares(c)),
    )
    kind = " class=unfit" if not c.fits else ""
    tds = "".join(f'<td data-v="{_text(value)}"{" class=num" if numeric else ""}>{html}</td>'
                  for (value, html), (_, numeric) in zip(cells, COLUMNS))
    return f"<tr{kind}>{tds}</tr>"


def _skewed(c: Candidate) -> str:
    if c.skewed is None:
        return "-"
    change = c.skewed.tokens_per_s_per_gpu / c.tokens_per_s_per_gpu - 1
    parts = [f"{100 * change:+.1f}%"]
    if c.skewed.drop_fraction:
        parts.append(f"drops {report.percent(c.skewed.drop_fraction)}")
    if not c.skewed.fits:
        parts.append("does not fit")
    return f"{c.skewed.tokens_per_s_per_gpu:,.0f}{''.join(f'<small>{part}</small>' for part in parts)}"


def _shares(c: Candidate) -> str:
    """A small stacked bar; its words are in the title and for screen readers."""
    words = _text(report.share_text(c.provenance))
    bars = "".join(f'<i style="width:{100 * c.provenance[name]:.1f}%;background:{colour}"></i>'
                   for name, colour in charts.PROVENANCE_COLOURS.items() if c.provenance.get(name))
    return f'<span class="shares" role="img" title="{words}" aria-label="{words}">{bars}</span>'


def _terms(plan: Plan) -> str:
    """The winner's step part by part, each with what it is priced from."""
    best = next((c for c in plan.candidates if c.fits and c.sources), None)
    if best is None:
        return ""
    rows = "\n".join(
        f'<tr><td>{_text(name)}</td><td class="num">{1e3 * value:,.2f}</td><td class="num">{report.percent(value / best.step_s)}</td>'
        f"<td>{_text(report.share_text(best.sources.get(name, {})))}</td></tr>"
        for name, value in sorted(best.breakdown.items(), key=lambda item: -item[1])
    )
    return f"""<details class="facts"><summary>The winner's step, part by part</summary>
<div class="wide"><table id="terms"><thead><tr><th>part</th><th class="num">ms</th><th class="num">share</th><th>priced from</th></tr></thead>
<tbody>
{rows}
</tbody></table></div></details>"""


def _rejections(plan: Plan) -> str:
    if not plan.rejections:
        return ""
    rows = "\n".join(
        f'<tr><td>{_text(r.family)}<small><code>{_text(r.example)}</code></small></td><td class="num">{r.count:,}</td>'
        f"<td>{_text(r.reason)}</td><td>{_text(r.flip) or '-'}</td></tr>"
        for r in plan.rejections
    )
    return f"""<section><h2>Why not</h2>
<div class="wide"><table id="rejections"><thead><tr><th>family, for example</th><th class="num">layouts</th><th>what binds</th><th>what would flip it</th></tr></thead>
<tbody>
{rows}
</tbody></table></div></section>"""


STYLE = """
:root { color-scheme: light dark; --bg: #fbfbfa; --card: #fff; --ink: #1d2125; --soft: #5f6872; --line: #e2e4e7; --accent: #2f5d8a; --bad: #b3362b; --good: #22704a; --warn: #8a5a00; }
@media (prefers-color-scheme: dark) { :root { --bg: #14171a; --card: #1c2024; --ink: #e6e8ea; --soft: #9aa3ac; --line: #31373d; --accent: #8ab8e6; --bad: #f08a7e; --good: #79c9a0; --warn: #e3b15c; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1360px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 26px; margin: 0 0 14px; overflow-wrap: anywhere; } h2 { font-size: 17px; margin: 0; }
.kicker { margin: 0; color: var(--soft); font-size: 13px; letter-spacing: .04em; }
section, figure, .facts, .warnings { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; margin: 0 0 16px; min-width: 0; }
code { font: 13px/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; overflow-wrap: anywhere; }
small { display: block; color: var(--soft); font-size: 12px; font-weight: normal; }
.layout { margin: 0 0 10px; } .layout code { font-size: 17px; font-weight: 600; color: var(--accent); } .bad { color: var(--bad); font-weight: 600; }
.headline dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 0; }
.headline dt { color: var(--soft); font-size: 13px; } .headline dd { margin: 0; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }
.warnings { list-style: none; color: var(--warn); } .warnings li::before { content: "warning: "; font-weight: 600; }
.facts summary { font-size: 17px; font-weight: 600; cursor: pointer; }
.facts dl { display: grid; grid-template-columns: max-content 1fr; gap: 3px 16px; margin: 10px 0 0; } .facts dt { color: var(--soft); } .facts dd { margin: 0; overflow-wrap: anywhere; min-width: 0; }
.tools { display: flex; gap: 10px; align-items: center; margin: 10px 0; color: var(--soft); font-size: 13px; }
input { font: inherit; color: inherit; background: var(--bg); border: 1px solid var(--line); border-radius: 6px; padding: 6px 10px; width: min(280px, 100%); }
.wide { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: 14px; }
th, td { text-align: left; padding: 7px 10px; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; font-size: 13px; white-space: nowrap; } th button { all: unset; cursor: pointer; } th button:focus-visible, input:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
th[aria-sort=ascending] button::after { content: " \\2191"; } th[aria-sort=descending] button::after { content: " \\2193"; }
.num { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; } #ranked td:nth-child(2) { min-width: 230px; } .unfit { color: var(--soft); }
.badge { display: inline-block; font-size: 11px; border: 1px solid currentColor; border-radius: 9px; padding: 0 7px; margin: 0 0 0 6px; white-space: nowrap; } .tied { color: var(--warn); } .pinned { color: var(--accent); } .fit { color: var(--bad); }
.shares { display: inline-flex; width: 84px; height: 10px; border-radius: 3px; overflow: hidden; vertical-align: middle; } .shares i { display: block; height: 100%; }
.note { color: var(--soft); font-size: 13px; margin: 8px 0 0; }
.charts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 16px; margin-bottom: 16px; } .charts figure { margin: 0; } #box-timeline { grid-column: 1 / -1; grid-row: 1; }
figcaption p { color: var(--soft); font-size: 13px; margin: 2px 0 6px; } .chart { min-height: 300px; }
#rejections td { min-width: 120px; }
@media (max-width: 900px) { .charts { grid-template-columns: minmax(0, 1fr); } }
@media (max-width: 520px) { main { padding: 12px 8px 32px; } section, figure, .facts, .warnings { padding: 12px 10px; } .facts dl { grid-template-columns: 1fr; gap: 0; } .facts dd { margin-bottom: 6px; } .headline dl { grid-template-columns: 1fr 1fr; } }
"""

SCRIPT = """
const dark = matchMedia("(prefers-color-scheme: dark)");
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const slim = innerWidth < 520;
function styled({data, layout}) {
  const axis = a => ({automargin: true, gridcolor: colour("--line"), zerolinecolor: colour("--line"), ...a});
  return {autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: {color: colour("--ink"), family: "system-ui, sans-serif", size: 12}, margin: {l: 40, r: 14, t: slim ? 24 : 40, b: 40},
    modebar: {bgcolor: "rgba(0,0,0,0)", color: colour("--line"), activecolor: colour("--soft")},
    legend: {orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, traceorder: "normal"}, hovermode: "closest",
    hoverlabel: {namelength: -1, bgcolor: colour("--card"), bordercolor: colour("--line"), font: {color: colour("--ink")}},
    ...layout, height: (layout.height ?? 400) + (slim ? 12 * data.length : 0), xaxis: axis(layout.xaxis), yaxis: axis(layout.yaxis)};
}
const options = {responsive: true, displaylogo: false, displayModeBar: slim ? false : "hover", modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"]};
function draw() {
  for (const [id, figure] of Object.entries(FIGURES))
    Plotly.react(id, figure.data, styled(figure), options);
}
draw();
dark.addEventListener("change", draw);

const table = document.getElementById("ranked"), body = table.tBodies[0], filter = document.getElementById("filter");
function sortBy(column, head) {
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const th of table.tHead.rows[0].cells) th.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = row => row.cells[column].dataset.v;
  const order = (a, b) => isNaN(value(a)) || isNaN(value(b)) ? value(a).localeCompare(value(b)) : value(a) - value(b);
  body.append(...[...body.rows].sort((a, b) => down ? order(b, a) : order(a, b)));
}
[...table.tHead.rows[0].cells].forEach((head, column) => head.firstChild.addEventListener("click", () => sortBy(column, head)));
function narrow() {
  const words = filter.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let shown = 0;
  for (const row of body.rows) {
    row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
    shown += !row.hidden;
  }
  document.getElementById("shown").textContent = `${shown} of ${body.rows.length} layouts`;
}
filter.addEventListener("input", narrow);
narrow();
document.documentElement.dataset.ready = "yes";
"""
