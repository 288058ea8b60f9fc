"""Do the table and the page say what the plan says, and nothing that a name in it says?"""

from __future__ import annotations

import dataclasses
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from moesim import charts, page, report
from moesim.plan import Candidate, Cost, Plan, Rejection, Skewed

FIXTURE = Path(__file__).parent / "fixtures" / "plan.json"
HOSTILE = "<script>alert(1)</script>"


def plan_from_json(path: Path = FIXTURE) -> Plan:
    """The golden plan: what `moesim plan --json` wrote, back as values."""
    data = json.loads(path.read_text())
    assert data.pop("schema_version") == 1
    candidates = tuple(_candidate(c) for c in data.pop("candidates"))
    rejections = tuple(Rejection(**r) for r in data.pop("rejections"))
    tuples = {key: tuple(data.pop(key)) for key in ("warnings", "timeline")}
    return Plan(candidates=candidates, rejections=rejections, cost=Cost(**data.pop("cost")), **tuples, **data)


def _candidate(data: dict) -> Candidate:
    skewed = Skewed(**data["skewed"]) if data["skewed"] else None
    return Candidate(**{**data, "notes": tuple(data["notes"]), "skewed": skewed})


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_from_json()


def hostile_plan(plan: Plan, text: str = HOSTILE) -> Plan:
    """The same plan with ``text`` wherever a name or a sentence can come from a file."""
    candidates = tuple(
        dataclasses.replace(c, layout=text, limited_by=text, mfu_denominator=text, notes=(text,), breakdown={text: c.step_s}, memory={text: c.peak_bytes})
        for c in plan.candidates
    )
    return dataclasses.replace(
        plan,
        scenario={**plan.scenario, **{key: text for key in ("name", "hash", "model", "cluster", "gpu", "routing", "skew")}},
        profile={"name": text, "anchored": text},
        candidates=candidates,
        rejections=(Rejection(text, 1, text, text, text),),
        cost=dataclasses.replace(plan.cost, source=text, note=text),
        memory_rule=text,
        warnings=(text,),
        measured={text: text},
        timeline=tuple({**s, "name": text, "kind": text, "stream": text} for s in plan.timeline),
    )


def printed(show, value, width: int = 100, **console) -> str:
    out = io.StringIO()
    show(value, Console(file=out, width=width, highlight=False, **console))
    return out.getvalue()


def test_round_trip(plan):
    assert json.loads(json.dumps(plan.to_dict())) == json.loads(FIXTURE.read_text())


# ---- formats ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value, text", [(None, "UNKNOWN"), (0.0, "0"), (999.4, "999"), (999.6, "1K"), (54120.0, "54.1K"), (1.5e13, "15T"), (999_600.0, "1M")])
def test_compact(value, text):
    assert report.compact(value) == text


def test_unknown_cost_is_said():
    assert (report.days(None), report.usd(None)) == ("UNKNOWN", "UNKNOWN")
    assert (report.days(0.042), report.usd(99.6), report.usd(282_000.0)) == ("0.042", "$100", "$282K")


@pytest.mark.parametrize("gap, said", [(None, "UNKNOWN"), (-0.012, "no layout left unplayed can beat"), (0.03, "3.0%: a layout left unplayed could be faster")])
def test_gap_in_words(gap, said):
    assert said in report.gap_text(gap)


# ---- terminal -----------------------------------------------------------------------------------------------------------


def test_plan_table_holds_every_number(plan):
    text = printed(report.print_plan, plan, width=160)
    for c in plan.candidates:
        assert f"{c.tokens_per_s_per_gpu:,.0f}" in text
        assert f"{report.compact(c.low)}-{report.compact(c.high)}" in text
        assert report.gib(c.peak_bytes) in text and report.seconds(c.step_s) in text and report.usd(c.usd) in text
        assert c.layout in text and c.limited_by in text
    for r in plan.rejections:
        assert r.reason in text and r.flip in text and f"{r.count:,}" in text
    for said in ("5f3c9a1be27d4410", "12,480 legal, 8,312 fit", "300 by longest path, 40 played", "before failures", plan.memory_rule, plan.warnings[0]):
        assert said in text


def test_ties_pin_and_no_fit_are_marked(plan):
    rows = printed(report.print_plan, plan, width=160).splitlines()
    line = {n: next(i for i, row in enumerate(rows) if plan.candidates[n].layout in row) for n in (0, 1, 2, 6)}
    assert "1=" in rows[line[0]] and "2=" in rows[line[1]] and "=" not in rows[line[2]]
    assert rows[line[6] + 1].strip().startswith("pin") and "no fit" in rows[line[6] + 1]


def test_skew_stands_beside_balanced(plan):
    text = printed(report.print_plan, plan, width=160)
    best = plan.candidates[0]
    row = next(row for row in text.splitlines() if best.layout in row)
    assert f"{best.tokens_per_s_per_gpu:,.0f}" in row and f"{best.skewed.tokens_per_s_per_gpu:,.0f}" in row
    assert "-6.1%" in text and "drop 1.3%" in text and "zipf(0.15)" in text


@pytest.mark.parametrize("width", [100, 120, 200])
def test_fits_the_terminal(plan, width):
    for text in (printed(report.print_plan, plan, width), printed(report.print_candidate, plan.candidates[2], width)):
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text  # nothing was cut off


def test_no_colour_when_piped(plan):
    assert "\x1b" not in printed(report.print_plan, plan)
    assert "\x1b" in printed(report.print_plan, plan, force_terminal=True, color_system="standard")


def test_names_are_neither_markup_nor_escape_codes(plan):
    text = printed(report.print_plan, hostile_plan(plan, "[red]a[/red]\x1b[2J\x07\n[/]"), width=160, force_terminal=False)
    assert "[red]a[/red]" in text and "\x1b" not in text and "\x07" not in text


def test_nothing_fits_shows_the_reasons(plan):
    text = printed(report.print_plan, dataclasses.replace(plan, candidates=()))
    assert "No layout of this search fits." in text and "tp8 does not divide" in text and "Ranked layouts" not in text


def test_measured_is_shown(plan):
    text = printed(report.print_plan, dataclasses.replace(plan, measured={"verdict": "below the band", "terms": ("host", "expert GEMM"), "error": -0.21}))
    assert "below the band" in text and "host; expert GEMM" in text and "-0.21" in text


def test_candidate_parts_are_listed_with_their_sum(plan):
    c = plan.candidates[2]
    text = printed(report.print_candidate, c)
    for name, value in c.breakdown.items():
        assert re.search(rf"{re.escape(name)} +{re.escape(f'{1e3 * value:,.2f}')} +{100 * value / c.step_s:.1f}%", text)
    assert re.search(rf"total +{re.escape(f'{1e3 * c.step_s:,.2f}')} +100.0%", text)
    assert re.search(rf"total +{c.peak_bytes / report.GIB:,.2f} +100.0%", text)
    assert "stage 3, the heaviest: fits" in text and c.notes[0] in text


# ---- charts -------------------------------------------------------------------------------------------------------------


def test_stacked_bars_add_up_to_their_totals(plan):
    found = charts.figures(plan)
    for key, totals in (("breakdown", [c.step_s for c in plan.candidates]), ("memory", [c.peak_bytes / report.GIB for c in plan.candidates]),
                        ("provenance", [100.0] * len(plan.candidates))):
        sums = [sum(column) for column in zip(*(trace["x"] for trace in found[key]["data"]))]
        assert sums == pytest.approx(totals, rel=1e-9)


def test_many_parts_are_merged_without_loss(plan):
    many = {f"part {i}": float(i + 1) for i in range(40)} | {"other": 5.0}
    c = dataclasses.replace(plan.candidates[0], breakdown=many, step_s=sum(many.values()))
    figure = charts.figures(dataclasses.replace(plan, candidates=(c,)))["breakdown"]
    names = [trace["name"] for trace in figure["data"]]
    assert len(names) == len(set(names)) == charts.MAX_ROLES + 1
    assert sum(trace["x"][0] for trace in figure["data"]) == pytest.approx(c.step_s)


def test_scatter_shows_intervals_and_hbm(plan):
    figure = charts.scatter(plan)
    assert [trace["name"] for trace in figure["data"]] == ["winner", "tied with it", "other", "does not fit"]
    assert sum(len(trace["x"]) for trace in figure["data"]) == len(plan.candidates)
    winner, best = figure["data"][0], plan.candidates[0]
    assert winner["y"][0] + winner["error_y"]["array"][0] == pytest.approx(best.high)
    assert winner["y"][0] - winner["error_y"]["arrayminus"][0] == pytest.approx(best.low)
    assert figure["layout"]["shapes"][1]["x0"] == pytest.approx(plan.scenario["hbm_bytes"] / report.GIB)


def test_timeline_draws_every_span(plan):
    figure = charts.timeline(plan.timeline)
    assert sum(len(trace["x"]) for trace in figure["data"]) == len(plan.timeline)
    assert sum(sum(trace["x"]) for trace in figure["data"]) == pytest.approx(sum(s["end"] - s["start"] for s in plan.timeline), abs=1e-6)
    assert figure["layout"]["yaxis"]["categoryarray"][-1] == "0 compute"


def test_timeline_takes_stream_numbers(plan):
    numbered = [{**s, "stream": 0 if s["stream"] == "compute" else 1} for s in plan.timeline]
    assert charts.timeline(numbered) == charts.timeline(plan.timeline)


def test_long_timelines_are_drawn_by_action(plan, monkeypatch):
    spans = [{**s, "entry": s["name"].split()[0]} for s in plan.timeline]
    monkeypatch.setattr(charts, "MAX_SPANS", len(spans) - 1)
    figure = charts.timeline(spans)
    assert {trace["name"]: len(trace["x"]) for trace in figure["data"]} == {"forward": 32, "backward": 32}  # 4 stages, 8 microbatches
    assert figure["layout"]["yaxis"]["categoryarray"] == [f"{rank} compute" for rank in (3, 2, 1, 0)]
    assert "256 kernels drawn as 64 bars" in figure["layout"]["xaxis"]["title"]["text"]
    last = max(base + x for trace in figure["data"] for base, x in zip(trace["base"], trace["x"]))
    assert last == pytest.approx(max(s["end"] for s in spans))


@pytest.mark.parametrize("entry, kind", [("12F3", "forward"), ("0B11", "backward"), ("3I0", "input gradient"), ("3W0", "weight gradient"),
                                         ("(2F0|5B1)", "overlapped pair"), ("epilogue", "epilogue")])
def test_actions_are_named(entry, kind):
    span = {"rank": 0, "stream": 0, "name": "x", "kind": "gemm", "entry": entry, "start": 1.0, "end": 2.0}
    assert charts.actions([span, {**span, "stream": 1, "start": 2.0, "end": 2.5}]) == [
        {"rank": 0, "stream": "compute", "name": entry, "kind": kind, "start": 1.0, "end": 2.5}]


def test_coalesce_keeps_the_picture():
    spans = [{"rank": r, "stream": "compute", "name": f"{i}", "kind": "ab"[i % 2], "start": i * 1e-3 + (5.0 if i >= 4000 else 0.0),
              "end": i * 1e-3 + 0.9e-3 + (5.0 if i >= 4000 else 0.0)} for r in range(4) for i in range(8000)]
    drawn, resolution = charts.coalesce(spans, 1000)
    assert len(drawn) <= 1000 and resolution > 0
    for rank in range(4):
        lane = [s for s in drawn if s["rank"] == rank]
        assert lane[0]["start"] == 0.0 and lane[-1]["end"] == pytest.approx(12.9999)
        assert all(a["end"] <= b["start"] for a, b in zip(lane, lane[1:]))
        # The pause of five seconds stays a pause.
        assert any(b["start"] - a["end"] == pytest.approx(5.0001) for a, b in zip(lane, lane[1:]))


def test_coalesce_leaves_few_spans_alone(plan):
    drawn, resolution = charts.coalesce(plan.timeline, 5000)
    assert resolution == 0.0 and drawn == [dict(s) for s in plan.timeline]


# ---- page ---------------------------------------------------------------------------------------------------------------


class _Tags(HTMLParser):
    """Every tag with its attributes, and the text of table cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


def test_page_is_one_offline_file(plan, tmp_path):
    target = tmp_path / "plan.html"
    page.write_html(plan, target)
    assert [p.name for p in tmp_path.iterdir()] == ["plan.html"]  # no temporary file stays
    text = target.read_text(encoding="utf-8")
    assert target.stat().st_size < 6_000_000
    tags = _Tags(text).tags
    assert sum(tag == "script" for tag, _ in tags) == 2  # plotly.js once, the page's own once
    assert not [(t, a) for t, a in tags if "src" in a or a.get("href", "data:").split(":")[0] != "data"]
    assert "default-src 'none'" in text


def test_page_holds_rows_charts_and_reasons(plan):
    text = page.render(plan)
    for c in plan.candidates:
        assert c.layout in text and f"{c.tokens_per_s_per_gpu:,.0f}" in text
    for key, (title, _) in page.CHARTS.items():
        assert f'id="{key}"' in text and title in text
    for r in plan.rejections:
        assert r.family in text and r.reason.replace("'", "&#x27;") in text
    assert plan.memory_rule.replace("<", "&lt;") in text and plan.warnings[0] in text
    figures = re.search(r"const FIGURES = (.*);\n", text).group(1)
    assert json.loads(figures) == json.loads(json.dumps(charts.figures(plan)))


def test_hostile_names_are_inert(plan):
    text = page.render(hostile_plan(plan))
    assert HOSTILE not in text and "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    assert sum(tag == "script" for tag, _ in _Tags(text).tags) == 2
    quoted = _Tags(page.render(hostile_plan(plan, '" onmouseover="alert(1)')))
    assert not [a for _, a in quoted.tags if any(key.startswith("on") for key in a)]


def test_data_cannot_end_its_script():
    text = page._json({"a": "</script><script>alert(1)</script>&<!--"})
    assert not set("<>&") & set(text) and json.loads(text) == {"a": "</script><script>alert(1)</script>&<!--"}


def test_page_without_candidates_still_explains(plan):
    text = page.render(dataclasses.replace(plan, candidates=(), timeline=()))
    assert "No layout of this search fits." in text and "tp8 does not divide" in text and "<script" not in text


def test_failed_write_leaves_the_old_file(plan, tmp_path, monkeypatch):
    target = tmp_path / "plan.html"
    target.write_text("old")
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        page.write_html(plan, target)
    assert target.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["plan.html"]
