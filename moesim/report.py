"""What does a person at a terminal need to see of a plan? (Tables of a Plan or of one Candidate on a rich console.)

The tables fit 100 columns and carry no colour when the console isn't a terminal. Also home of the number formats that the
HTML page shares. Names come from files people wrote: they are shown as text, never as markup or escape codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moesim.plan import UNKNOWN, Candidate, Plan, Rejection

if TYPE_CHECKING:
    from moesim.compare import Comparison

GIB = 2**30
NUM_SKEWED_SHOWN = 5
BAR_WIDTH, SLIM_BAR = 24, 12
PROVENANCE = {"measured": "meas", "interpolated": "int", "extrapolated": "ext", "datasheet": "data", "assumed": "asm"}
"""Where a priced second comes from, most trusted first, with its short form in tables."""
SHORT_FORMS = "priced from (% of the priced seconds): " + ", ".join(f"{short} = {word}" for word, short in PROVENANCE.items()) + "."


def clean(value: Any) -> str:
    """One printable line: control characters (escape codes, newlines) become spaces."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(value)).split())


def compact(value: float | None) -> str:
    """Three digits and a letter: 49.1K, 1.23M, 15.6T."""
    if value is None:
        return UNKNOWN
    for scale, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if abs(value) >= scale * 0.9995:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"


def percent(share: float | None, digits: int = 1) -> str:
    return UNKNOWN if share is None else f"{100 * share:.{digits}f}%"


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f}"


def usd(value: float | None) -> str:
    return UNKNOWN if value is None else f"${value:,.0f}" if value < 1e5 else f"${compact(value)}"


def days(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def seconds(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.2f}" if value < 100 else f"{value:.1f}"


def marks(candidate: Candidate) -> list[str]:
    """What is special about a row, in words."""
    flags = (("tied", candidate.tied), ("pinned", candidate.pinned), ("does not fit", not candidate.fits))
    return [word for word, on in flags if on]


def share_text(shares: Mapping[str, float]) -> str:
    """Largest first, shares under half a percent left out: "measured 62%, extrapolated 38%"."""
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    return ", ".join(f"{clean(name)} {percent(share, 0)}" for name, share in ranked if share >= 0.005) or UNKNOWN


def gap_text(gap: float | None) -> str:
    if gap is None:
        return "gap UNKNOWN (every layout was played, or none)"
    if gap <= 0:
        return f"gap {percent(gap)}: no layout left unplayed can beat the winner"
    return f"gap {percent(gap)}: a layout left unplayed could be faster by at most that"


def count_text(plan: Plan) -> str:
    return (f"{plan.num_layouts:,} legal, {plan.num_fit:,} fit, {plan.num_bounded:,} bounded, {plan.num_path:,} by longest path, "
            f"{plan.num_played:,} played; {plan.elapsed_s:.1f} s")


def profile_text(plan: Plan) -> str:
    profile = plan.profile
    anchored = clean(profile["anchored"]) if profile.get("anchored") else "not anchored to a site"
    return f"{clean(profile.get('name', UNKNOWN))} ({'; '.join([*_stamp(profile), anchored])})"


def _stamp(profile: Mapping[str, Any]) -> list[str]:
    """Who measured a profile's terms, and how many of them: in words."""
    terms, stamp = profile.get("terms") or {}, profile.get("stamp")
    said = []
    if stamp:
        dates = " to ".join(dict.fromkeys(clean(stamp[key])[:10] for key in ("first_date", "last_date")))
        said.append(f"{stamp['num_lines']:,} measurements of {dates} on {', '.join(clean(v) for v in list(stamp['device'].values())[:1])}")
    if terms:
        said.append(f"{terms.get('measured', 0)} of {sum(terms.values())} terms measured here")
    return said


def advice_text(advice: Mapping[str, Any] | None) -> str:
    """What to measure next, in one sentence; "" where nothing fits."""
    return clean(advice["text"]) if advice else ""


def cost_text(plan: Plan) -> str:
    cost = plan.cost
    price = UNKNOWN if cost.usd_per_gpu_hour is None else f"${cost.usd_per_gpu_hour:,.2f} a GPU-hour ({clean(cost.source)})"
    return f"days and $ for {compact(cost.tokens)} tokens at {price}; {clean(cost.note)}"


def workload_text(plan: Plan) -> str:
    scenario = plan.scenario
    seq_len, batch = scenario.get("seq_len"), scenario.get("global_batch_tokens")
    return (f"sequences of {seq_len:,} tokens, {batch:,} tokens a step; routing {clean(scenario.get('routing', UNKNOWN))}, "
            f"skew {clean(scenario.get('skew', UNKNOWN))}")


def header_rows(plan: Plan) -> list[tuple[str, str]]:
    """(label, text) lines that say what was asked and how it was answered; shared by the terminal and the page."""
    scenario = plan.scenario
    return [
        ("scenario", f"{clean(scenario.get('name', UNKNOWN))}  {clean(scenario.get('hash', ''))}"),
        ("model", clean(scenario.get("model", UNKNOWN))),
        ("cluster", f"{clean(scenario.get('cluster', UNKNOWN))}: {scenario.get('num_gpus', 0):,} x {clean(scenario.get('gpu', UNKNOWN))}"),
        ("workload", workload_text(plan)),
        ("profile", profile_text(plan)),
        ("search", count_text(plan)),
        ("", gap_text(plan.gap)),
        ("memory", clean(plan.memory_rule)),
        ("cost", cost_text(plan)),
    ]


def denominators(plan: Plan) -> str:
    return "; ".join(sorted({clean(c.mfu_denominator) for c in plan.candidates}))


def measured_rows(plan: Plan) -> list[tuple[str, str]]:
    """The user's own measurement beside the prediction, one (label, text) for each thing that was found."""
    facts = dict(plan.measured or {})
    causes = facts.pop("explanations", ())
    rows = [(clean(key).replace("_", " "), _value_text(value)) for key, value in facts.items()]
    said = "; ".join(f"{clean(e['cause'])} taking {e['factor']:.2f}x as long" for e in causes)
    return [*rows, ("any one explains it", said or "no single cause is large enough")] if facts else []


def _value_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{clean(k)} {_value_text(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return "; ".join(_value_text(v) for v in value)
    return f"{value:,.4g}" if isinstance(value, float) and abs(value) < 1e3 else f"{value:,.0f}" if isinstance(value, float) else clean(value)


# ---- terminal -----------------------------------------------------------------------------------------------------------


def print_plan(plan: Plan, console: Console) -> None:
    """Header, ranked table, legend, rejections, warnings. Without candidates only the reasons are left to show."""
    console.print(_facts(header_rows(plan)))
    if plan.candidates:
        console.print("", _ranking(plan), sep="\n")
        console.print(_legend(plan))
    if plan.advice:
        console.print(Text(f"to be surer: {advice_text(plan.advice)}"))
    if not any(c.fits for c in plan.candidates):
        console.print(Text("No layout of this search fits." if plan.num_layouts else "No layout of this search is legal.", style="bold red"))
    if plan.measured:
        console.print(Text("Measured against predicted", style="bold"))
        console.print(_facts(measured_rows(plan)))
    if plan.rejections:
        console.print("", _rejections(plan.rejections), sep="\n")
    for warning in plan.warnings:
        console.print(Text(f"warning: {clean(warning)}", style="yellow"))


def _facts(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(Text(label), Text(text))
    return table


def _table(title: str) -> Table:
    return Table(title=Text(title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD, leading=1, pad_edge=False,
                 collapse_padding=True, border_style="dim", header_style="bold")


def _ranking(plan: Plan) -> Table:
    table = _table("Ranked layouts")
    table.add_column("#", no_wrap=True, justify="right")
    table.add_column("layout\nlimited by; priced from", overflow="fold", ratio=1)
    for head in ("tok/s/GPU\n80% interval", "skewed\nchange", "MFU\nstep s", "GiB\nof HBM", "days\n$"):
        table.add_column(head, no_wrap=True, justify="right")
    for rank, candidate in enumerate(plan.candidates, 1):
        table.add_row(*_row(plan, rank, candidate), style="bold" if rank == 1 and candidate.fits else "")
    return table


def _row(plan: Plan, rank: int, c: Candidate) -> tuple[Text, ...]:
    layout = Text(clean(c.layout)).append(f"\n{clean(c.limited_by)}; {_short_shares(c.provenance)}", "dim not bold")
    for note in c.notes:
        layout.append("\n" + clean(note), "yellow not bold")
    memory = Text(gib(c.peak_bytes) + "\n" + _of_hbm(plan, c), style="" if c.fits else "red")
    return (
        Text(_rank_mark(rank, c), "cyan" if c.pinned else ""),
        layout,
        Text(f"{c.tokens_per_s_per_gpu:,.0f}\n{compact(c.low)}-{compact(c.high)}"),
        _skewed(c) if rank <= NUM_SKEWED_SHOWN or c.pinned else Text("-"),
        Text(f"{percent(c.mfu)}\n{seconds(c.step_s)}"),
        memory,
        Text(f"{days(c.days)}\n{usd(c.usd)}"),
    )


def _short_shares(shares: Mapping[str, float]) -> str:
    """"meas 58 int 22 ext 14 asm 6%": the classes by the letters that tell them apart, in order of trust."""
    known = [f"{PROVENANCE[name]} {100 * shares[name]:.0f}" for name in PROVENANCE if shares.get(name, 0) >= 0.005]
    return " ".join(known) + "%" if known else UNKNOWN


def _rank_mark(rank: int, c: Candidate) -> str:
    return f"{rank}{'=' if c.tied else ''}" + ("\npin" if c.pinned else "")


def _of_hbm(plan: Plan, c: Candidate) -> str:
    if not c.fits:
        return "no fit"
    hbm = plan.scenario.get("hbm_bytes")
    return percent(c.peak_bytes / hbm, 0) if hbm else "fits"


def _skewed(c: Candidate) -> Text:
    if c.skewed is None:
        return Text("-")
    change = c.skewed.tokens_per_s_per_gpu / c.tokens_per_s_per_gpu - 1
    own = f"\nown drop {percent(c.drop_fraction)}" if c.drop_fraction else ""
    text = Text(f"{c.skewed.tokens_per_s_per_gpu:,.0f}\n{100 * change:+.1f}%{own}")
    if c.skewed.drop_fraction:
        text.append(f"\ndrop {percent(c.skewed.drop_fraction)}")
    return text if c.skewed.fits else text.append("\nno fit", "red")


def _legend(plan: Plan) -> Text:
    lines = [f"MFU against {denominators(plan)}.",
             SHORT_FORMS]
    if any(c.skewed for c in plan.candidates):
        lines.append(f"skewed: the same layout when routing is {clean(plan.scenario.get('skew', UNKNOWN))}.")
    if any(c.tied for c in plan.candidates):
        lines.append("= within the interval of the best: the model can't tell these from the winner.")
    if any(c.pinned for c in plan.candidates):
        lines.append("pin: the layout given with --pin.")
    return Text("\n".join(lines), style="dim")


def _rejections(rejections: Iterable[Rejection]) -> Table:
    table = _table("Why not")
    table.add_column("family\nfor example", overflow="fold", ratio=2)
    table.add_column("layouts", justify="right", no_wrap=True)
    table.add_column("what binds", overflow="fold", ratio=2)
    table.add_column("what would flip it", overflow="fold", ratio=2)
    for r in rejections:
        family = Text(clean(r.family)).append("\n" + clean(r.example), "dim")
        table.add_row(family, f"{r.count:,}", Text(clean(r.reason)), Text(clean(r.flip) or "-"))
    return table


def print_every_rank(candidate: Candidate, step_s: float, peak_bytes: Sequence[float], console: Console) -> None:
    """The play of all ranks beside that of one representative rank a stage."""
    console.print(_facts([("every rank", f"step {seconds(step_s)} s, the representative rank's {100 * (candidate.step_s / step_s - 1):+.1f}%; "
                                         f"memory {gib(min(peak_bytes))} to {gib(max(peak_bytes))} GiB over {len(peak_bytes)} ranks")]))


def print_candidate(candidate: Candidate, console: Console) -> None:
    """One layout in full: headline, seconds of the step by term, bytes of the heaviest stage by category."""
    c = candidate
    fits = "fits" if c.fits else "does NOT fit"
    rows = [
        ("layout", clean(c.layout)),
        ("tok/s/GPU", f"{c.tokens_per_s_per_gpu:,.0f}  (80% interval {c.low:,.0f} to {c.high:,.0f})"),
        ("step", f"{seconds(c.step_s)} s, {c.num_microbatches:,} microbatches, by {clean(c.evaluator)}; limited by {clean(c.limited_by)}"),
        ("MFU", f"{percent(c.mfu)} of {clean(c.mfu_denominator)}"),
        ("memory", f"{gib(c.peak_bytes)} GiB on stage {c.heaviest_stage}, the heaviest: {fits}"),
        ("priced from", share_text(c.provenance)),
    ]
    if c.drop_fraction:
        rows.append(("dropped", f"{percent(c.drop_fraction)} of the routed tokens"))
    if c.skewed:
        rows.append(("skewed", f"{c.skewed.tokens_per_s_per_gpu:,.0f} tok/s/GPU under {clean(c.skewed.routing)}, {gib(c.skewed.peak_bytes)} GiB"
                               f"{'' if c.skewed.fits else ', does NOT fit'}"))
    if c.days is not None or c.usd is not None:
        rows.append(("cost", f"{days(c.days)} days, {usd(c.usd)} before failures"))
    console.print(_facts(rows))
    console.print(_parts("Where the step goes", "ms", c.breakdown, lambda s: f"{1e3 * s:,.2f}", c.sources))
    if c.sources:
        console.print(Text(SHORT_FORMS, style="dim"))
    console.print(_parts("Where the memory goes", "GiB", c.memory, lambda b: f"{b / GIB:,.2f}"))
    if c.saved_tensors:
        console.print(Text(f"saved for backward as kernels keep it, set {clean(c.saved_tensors)}", style="dim"))
    for note in c.notes:
        console.print(Text(f"note: {clean(note)}", style="yellow"))


def print_comparison(found: Comparison, console: Console) -> None:
    """Two runs term by term: milliseconds of a step, their difference, and the source that prices each term."""
    gap = found.predicted_gap_s
    table = _table("Term by term, ms of a step")
    table.leading, table.show_footer = 0, True
    table.add_column("term", footer="predicted gap", overflow="fold")
    for name, total in (("first", sum(d.first_s for d in found.differences)), ("second", sum(d.second_s for d in found.differences)), ("difference", gap)):
        table.add_column(name, footer=f"{1e3 * total:,.1f}", justify="right", no_wrap=True)
    table.add_column("of the gap", footer="100.0%", justify="right", no_wrap=True)
    table.add_column("priced by", overflow="fold")
    for d in found.differences:
        share = percent(d.excess_s / gap) if gap else "-"
        table.add_row(Text(clean(d.role)), f"{1e3 * d.first_s:,.1f}", f"{1e3 * d.second_s:,.1f}", f"{1e3 * d.excess_s:,.1f}", share, Text(clean(d.source)))
    console.print(_facts([("first", clean(found.first)), ("second", clean(found.second))]))
    console.print(table)
    if found.measured_gap_s is not None:
        console.print(_facts([("measured gap", f"{1e3 * found.measured_gap_s:,.1f} ms"), ("predicted gap", f"{1e3 * gap:,.1f} ms"),
                              ("unexplained", f"{1e3 * found.unexplained_s:,.1f} ms, {percent(found.unexplained_s / found.measured_gap_s)} of the measured gap")]))


def print_advice(advice: Mapping[str, Any], console: Console) -> None:
    """What to measure, best first, and what one run would do instead."""
    console.print(_facts(advice_rows(advice)))
    table = _table("Measure next")
    for head in ("op", "priced by", "why"):
        table.add_column(head, overflow="fold", ratio={"op": 3, "why": 3}.get(head, 2))
    for line in advice["measure"]:
        table.add_row(Text(clean(line["words"])), Text(f"{clean(line['term'])}\n{clean(line['provenance'])}"), Text(clean(line["why"])))
    console.print("", table if advice["measure"] else Text("No op of these layouts is worth measuring."), sep="\n")


def advice_rows(advice: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(label, text): how sure a plan is, and what would make it surer."""
    anchor = advice["anchor"]
    return [
        ("winner", clean(advice["winner"])),
        ("unsure by", f"prices {percent(advice['sigma_prices'])}, the model itself {percent(advice['sigma_model'])} (one standard deviation)"),
        ("another is best", f"with {percent(advice['another_is_best'], 0)}; choosing this one loses {percent(advice['expected_regret'])} of the step on average"),
        ("chosen for", {"ranking": "the ranking of the leading layouts"}.get(advice["goal"], "the winner's interval")),
        ("an anchor run", f"of {clean(anchor['layout'])} would leave {anchor['low']:,.0f} to {anchor['high']:,.0f} tokens/s a GPU"),
        ("to be surer", advice_text(advice)),
    ]


def _parts(title: str, unit: str, parts: Mapping[str, float], form, sources: Mapping[str, Mapping[str, float]] | None = None) -> Table:
    """A table whose rows add up to its last line; ``sources``: what each row is priced from."""
    total = sum(parts.values())
    largest = max(parts.values(), default=0.0)
    table = _table(title)
    table.leading, table.show_footer = 0, True
    table.add_column("part", footer="total", overflow="fold")
    table.add_column(unit, footer=form(total), justify="right", no_wrap=True)
    table.add_column("share", footer="100.0%" if total else "-", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    if sources:
        table.add_column("priced from", no_wrap=True)
    for name, value in sorted(parts.items(), key=lambda item: -item[1]):
        bar = "#" * round((SLIM_BAR if sources else BAR_WIDTH) * value / largest) if largest > 0 else ""
        origin = [Text(_short_shares(sources.get(name, {})))] if sources else []
        table.add_row(Text(clean(name)), form(value), percent(value / total) if total else "-", bar, *origin)
    return table
