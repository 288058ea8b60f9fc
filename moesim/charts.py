"""Which figures explain a plan? (Plan -> plotly figures as plain dicts; no plotly needed to build them.)

Each function returns {"data": traces, "layout": axes}. Colours of text, grid and background are left to the page, which knows
whether it is light or dark. plotly reads a small markup in labels, so every text that came from a file is escaped.
"""

from __future__ import annotations

from html import escape
from typing import Any, Iterable, Mapping, Sequence

from moesim.plan import Candidate, Plan
from moesim.program import STREAMS
from moesim.report import GIB, PROVENANCE, clean

Figure = dict[str, Any]

COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d", "#ff9da6", "#79706e")
PROVENANCE_COLOURS = dict(zip(PROVENANCE, ("#2e8b57", "#72b7b2", "#eeca3b", "#f58518", "#e45756")))
MAX_ROLES = 10
MAX_SPANS = 5000


def figures(plan: Plan) -> dict[str, Figure]:
    """Chart id -> figure, in reading order. A plan without candidates has none; one without a timeline lacks that chart."""
    if not plan.candidates:
        return {}
    rows = plan.candidates
    found = {
        "scatter": scatter(plan),
        "breakdown": _stacked([c.breakdown for c in rows], rows, "seconds of a step", 1.0),
        "memory": _stacked([c.memory for c in rows], rows, "GiB on the heaviest stage", 1 / GIB),
        "provenance": _stacked([c.provenance for c in rows], rows, "% of the priced seconds", 100.0, PROVENANCE_COLOURS),
    }
    return found | ({"timeline": timeline(plan.timeline)} if plan.timeline else {})


def _label(text: Any) -> str:
    return escape(clean(text))


def scatter(plan: Plan) -> Figure:
    """Throughput (with its 80% interval) against memory; vertical lines where HBM ends and where the rule draws the limit."""
    groups = (("winner", "#e45756", "star"), ("tied with it", "#f58518", "circle"), ("other", "#4c78a8", "circle"),
              ("does not fit", "#79706e", "x"))
    ranked = list(enumerate(plan.candidates, 1))
    first = next((rank for rank, c in ranked if c.fits), 0)
    traces = []
    for name, colour, symbol in groups:
        chosen = [(rank, c) for rank, c in ranked if _group(c, rank == first) == name]
        if chosen:
            traces.append(_points(name, colour, symbol, chosen))
    lines = [(plan.scenario.get(key), label) for key, label in (("memory_limit_bytes", "limit"), ("hbm_bytes", "HBM"))]
    return {
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": "peak memory of the heaviest stage, GiB"}, "rangemode": "tozero"},
            "yaxis": {"title": {"text": "tokens/s a GPU"}, "rangemode": "tozero", "tickformat": "~s"},
            "shapes": [_vertical(x / GIB) for x, _ in lines if x],
            "annotations": [_vertical_label(x / GIB, label, side) for (x, label), side in zip(lines, ("right", "left")) if x],
        },
    }


def _group(c: Candidate, first: bool) -> str:
    return "does not fit" if not c.fits else "winner" if first else "tied with it" if c.tied else "other"


def _points(name: str, colour: str, symbol: str, chosen: Sequence[tuple[int, Candidate]]) -> Figure:
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": [c.peak_bytes / GIB for _, c in chosen],
        "y": [c.tokens_per_s_per_gpu for _, c in chosen],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [c.high - c.tokens_per_s_per_gpu for _, c in chosen],
            "arrayminus": [c.tokens_per_s_per_gpu - c.low for _, c in chosen],
            "thickness": 1,
            "width": 3,
        },
        "marker": {"color": colour, "symbol": symbol, "size": 13 if symbol == "star" else 9},
        "text": [f"#{rank}{' (pinned)' if c.pinned else ''} {_label(c.layout)}" for rank, c in chosen],
        "hovertemplate": "%{text}<br>%{y:,.0f} tokens/s a GPU<br>%{x:.1f} GiB<extra></extra>",
    }


def _vertical(x: float) -> Figure:
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1, "line": {"color": "#e45756", "dash": "dash", "width": 1}}


def _vertical_label(x: float, text: str, side: str) -> Figure:
    return {"x": x, "y": 1, "yref": "paper", "text": text, "showarrow": False, "yanchor": "bottom", "xanchor": side,
            "font": {"color": "#e45756"}}


def _stacked(parts: Sequence[Mapping[str, float]], rows: Sequence[Candidate], title: str, scale: float,
             colours: Mapping[str, str] | None = None) -> Figure:
    """One horizontal bar a candidate, one segment a part; best layout on top."""
    names = list(colours) if colours else _largest(parts)
    shade = colours or dict(zip([*names, "other"], (*COLOURS, "#bab0ac")))
    ranks = [f"#{rank}" for rank in range(1, len(rows) + 1)]
    merged = [_merge(p, names) for p in parts]
    present = [n for n in dict.fromkeys([*names, "other"]) if any(m.get(n) for m in merged)]
    return {
        "data": [
            {
                "type": "bar",
                "orientation": "h",
                "name": _label(name),
                "y": ranks,
                "x": [scale * m.get(name, 0.0) for m in merged],
                "text": [_label(c.layout) for c in rows],
                "textposition": "none",
                "marker": {"color": shade.get(name, "#bab0ac")},
                "hovertemplate": "%{fullData.name}: %{x:.3~g}<br>%{y} %{text}<extra></extra>",
            }
            for name in present
        ],
        "layout": {
            "barmode": "stack",
            "xaxis": {"title": {"text": title}},
            "yaxis": {"autorange": "reversed", "type": "category"},
            "height": 190 + 24 * len(rows) + 9 * len(present),
        },
    }


def _largest(parts: Sequence[Mapping[str, float]]) -> list[str]:
    totals: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            totals[name] = totals.get(name, 0.0) + value
    return sorted(totals, key=lambda name: -totals[name])[:MAX_ROLES]


def _merge(part: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """The named parts, and the sum of the rest as "other": a stacked bar still ends where the total is."""
    kept = {name: part[name] for name in names if name in part}
    rest = sum(value for name, value in part.items() if name not in kept)
    return kept | ({"other": kept.get("other", 0.0) + rest} if rest else {})


# ---- timeline -----------------------------------------------------------------------------------------------------------


def timeline(spans: Sequence[Mapping[str, Any]]) -> Figure:
    """Gantt chart of one step: a lane for each stream of each stage, coloured by kind of work.

    Where that is more than a browser draws with ease and the spans name their ``entry``, a lane for each stage coloured by
    kind of action (forward, backward, ...) instead.
    """
    drawn, note = spans, ""
    if len(spans) > MAX_SPANS:
        drawn, resolution = coalesce(actions(spans) if all("entry" in s for s in spans) else spans, MAX_SPANS)
        note = f" ({len(spans):,} kernels drawn as {len(drawn):,} bars" + (f", gaps under {1e3 * resolution:.2g} ms closed)" if resolution else ")")
    lanes = sorted({_lane(s) for s in drawn})
    names = [f"{rank} {_label(stream)}" for rank, _, stream in lanes]
    kinds = _largest([{s["kind"]: s["end"] - s["start"]} for s in drawn])
    shade = dict(zip(kinds, COLOURS))
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for span in drawn:
        grouped.setdefault(span["kind"] if span["kind"] in shade else "other", []).append(span)
    return {
        "data": [_bars(kind, grouped[kind], shade.get(kind, "#bab0ac")) for kind in dict.fromkeys([*kinds, "other"]) if kind in grouped],
        "layout": {
            "barmode": "overlay",
            "xaxis": {"title": {"text": "seconds from the start of the step" + note}},
            "yaxis": {"type": "category", "categoryorder": "array", "categoryarray": names[::-1], "dtick": 1},
            "height": 190 + 18 * len(names) + 9 * len(kinds),
            "bargap": 0.15,
        },
    }


ACTION_KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient", "(": "overlapped pair"}


def actions(spans: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One span for each action (``entry``) of each rank: from the first start to the last end on its compute and comm streams."""
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for span in spans:
        if _stream(span) in ("compute", "comm"):
            entry = str(span["entry"])
            whole = found.setdefault((span["rank"], entry), {"rank": span["rank"], "stream": "compute", "name": entry, "kind": _action_kind(entry),
                                                             "start": span["start"], "end": span["end"]})
            whole.update(start=min(whole["start"], span["start"]), end=max(whole["end"], span["end"]))
    return list(found.values())


def _action_kind(entry: str) -> str:
    """Of `2F0` the letter, of `(2F0|5B1)` the bracket; prologue and epilogue are their own kinds."""
    return ACTION_KINDS.get(entry[0] if entry.startswith("(") else entry.strip("0123456789"), entry)


def _stream(span: Mapping[str, Any]) -> str:
    """Its name; a number is an index in STREAMS."""
    return STREAMS[span["stream"]] if isinstance(span["stream"], int) else str(span["stream"])


def _lane(span: Mapping[str, Any]) -> tuple[int, int, str]:
    stream = _stream(span)
    return span["rank"], STREAMS.index(stream) if stream in STREAMS else len(STREAMS), stream


def _bars(kind: str, spans: Iterable[Mapping[str, Any]], colour: str) -> Figure:
    spans = list(spans)
    return {
        "type": "bar",
        "orientation": "h",
        "name": _label(kind),
        "y": [f"{s['rank']} {_label(_stream(s))}" for s in spans],
        "base": [round(s["start"], 9) for s in spans],
        "x": [round(s["end"] - s["start"], 9) for s in spans],
        "text": [_label(s["name"]) for s in spans],
        "textposition": "none",
        "marker": {"color": colour, "line": {"width": 0}},
        "hovertemplate": "%{text}<br>%{x:.3~s}s from %{base:.6f} s<extra>%{fullData.name}</extra>",
    }


def coalesce(spans: Sequence[Mapping[str, Any]], most: int) -> tuple[list[dict[str, Any]], float]:
    """At most ``most`` spans (or one a lane) that draw the same picture, and the resolution in seconds used (0: untouched).

    Neighbours in a lane closer than the resolution join when they are of one kind or one of them is shorter than it; the joined
    span takes kind and name of the longer. The resolution doubles until few enough are left.
    """
    lanes: dict[tuple[int, int, str], list[Mapping[str, Any]]] = {}
    for span in sorted(spans, key=lambda s: s["start"]):
        lanes.setdefault(_lane(span), []).append(span)
    if len(spans) <= most:
        return [dict(s) for s in spans], 0.0
    length = max(s["end"] for s in spans) - min(s["start"] for s in spans)
    resolution = length / most
    while True:
        joined = [span for lane in lanes.values() for span in _join(lane, resolution)]
        if len(joined) <= max(most, len(lanes)):
            return joined, resolution
        resolution *= 2


def _join(lane: Sequence[Mapping[str, Any]], resolution: float) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    longest = 0.0  # of the spans inside out[-1]
    for span in lane:
        length = span["end"] - span["start"]
        last = out[-1] if out else None
        near = last is not None and span["start"] - last["end"] <= resolution
        if near and (span["kind"] == last["kind"] or min(length, last["end"] - last["start"]) < resolution):
            if length > longest:
                longest = length
                last.update(kind=span["kind"], name=span["name"])
            last["end"] = max(last["end"], span["end"])
        else:
            out.append(dict(span))
            longest = length
    return out
