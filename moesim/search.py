"""Which layouts are best, how sure is that, and why not the others? (enumerate -> fits -> bound -> path -> engine.)

Every legal layout is screened for memory and for a lower bound of its step. In the order of that bound the longest path is
worked out until nothing unseen can beat what is known, or the budget is used; the best of those are played in the engine, which
alone decides the order. What was not played is bounded, so that the plan can say how much better it could possibly be.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any, Callable, Iterator

import numpy as np

from moesim import advise, engine, full, paths, whynot
from moesim.evaluate import Evaluator, Played, critical_rank, routing_name
from moesim.layout import Layout, parse_layout
from moesim.ops import OP_KINDS
from moesim.part import kind_of
from moesim.plan import Candidate, Cost, Plan
from moesim.screen import Screen, Screened
from moesim.space import Space, enumerate_layouts
from moesim.timeline import Timeline, breakdown
from moesim.workers import worker_pool

Progress = Callable[[str, int, int], None]
PATHS_A_FAMILY = 4
"""Layouts of each family (one value of one axis) whose longest path is worked out in any case."""
PATH_BUDGET, ENGINE_BUDGET = 900, 200
"""Layouts whose longest path is worked out, and that are played, at most."""
PATH_BATCH, ENGINE_BATCH = 96, 16
"""How many at a time: never by the number of workers, so that what is looked at does not depend on the machine."""
PATH_CHUNK, ENGINE_CHUNK = 8, 4
"""In how large pieces a worker gets them: paths gain from being worked out together, plays from being spread evenly."""
GAP = 0.049
"""The search ends where no layout unplayed can beat the best by more than this."""
SMALL_SPACE = 5000
"""Rows below which screening stays in one process."""
NUM_SKEWED = 5
"""Best layouts that are also shown under the stated routing skew."""
_state: dict[str, Any] = {}


def plan(scenario, *, top: int = 10, profile=None, anchors=None, pin: str | None = None, measured: float | None = None, progress: Progress | None = None,
         workers: int | None = None) -> Plan:
    """Ranked, explained layouts of a scenario. ValueError (one line) on a bad layout, profile or anchor file."""
    started = time.monotonic()
    tell = progress or (lambda stage, done, total: None)
    evaluator = _evaluator(scenario, profile, anchors)
    pinned = evaluator.legal(pin) if pin else None
    space = enumerate_layouts(scenario, evaluator.stack.default_layout)
    if not len(space):
        return _nothing_legal(scenario, evaluator, space, started)
    with _pool(evaluator, workers) as pool:
        screened = pool.screen(Screen(scenario, evaluator.parts, space), tell)
        fits = screened.peak_bytes <= evaluator.budget_bytes
        found = _narrow(space, screened, fits, top, pool, tell)
        candidates = _describe(found, top, pinned, pool, tell)
        winner = candidates[0] if candidates and candidates[0].fits else None
        known = {c.layout: Played(parse_layout(c.layout), c.step_s, c.breakdown) for c in candidates}

        def play(layouts: list[Layout]) -> list[Played]:
            known.update((str(p.layout), p) for p in pool.map(_played, [layout for layout in layouts if str(layout) not in known]))
            return [known[str(layout)] for layout in layouts]

        rejections = whynot.explain(evaluator, space, screened, fits, found, winner, play)
        spans = pool.map(_spans, [c.layout for c in candidates[:1]])
    return _assemble(scenario, evaluator, space, fits, found, candidates, rejections, spans[0] if spans else [], measured, started)


def simulate(scenario, layout_text: str | None = None, *, profile=None, anchors=None, want_timeline: bool = True) -> tuple[Candidate, Timeline]:
    """One layout (the scenario's own unless given) in the engine. ValueError where it is illegal."""
    text = layout_text or scenario.layout
    if text is None:
        raise ValueError(f"scenario {scenario.name!r} has no layout of its own: give one")
    evaluator = _evaluator(scenario, profile, anchors)
    layout = evaluator.legal(text)
    program = evaluator.program(layout)
    timeline = engine.run(program)
    played = Played(layout, timeline.makespan, breakdown(timeline, critical_rank(program)))
    return evaluator.candidate(played, program), timeline


def what_to_measure(scenario, layout_text: str | None = None, *, top: int = 10, lines: int = 5, profile=None, anchors=None,
                    progress: Progress | None = None) -> dict[str, Any] | None:
    """What to measure next, for the ranking of the ``top`` layouts of a search or, of one layout, for its interval: see `moesim.advise`.
    None where nothing fits."""
    if layout_text is None:
        candidates = plan(scenario, top=top, profile=profile, anchors=anchors, progress=progress).candidates
        return advise.advice(_evaluator(scenario, profile, anchors), candidates, lines)
    evaluator = _evaluator(scenario, profile, anchors)
    return advise.advice(evaluator, [evaluator.candidate(evaluator.played(evaluator.legal(layout_text)), with_skew=False)], lines)


def explain_gap(scenario, other, layout_text: str | None = None, *, profile=None, anchors=None, measured: tuple[float, float] | None = None):
    """Why ``scenario`` (with the layout given, else its own) is slower or faster than ``other`` (with its own layout), role by role.
    ``measured``: tokens/s/GPU of both. An anchor file refits the site of both."""
    from moesim.compare import compare

    for s, text in ((scenario, layout_text), (other, None)):
        if text is None and s.layout is None:
            raise ValueError(f"scenario {s.name!r} has no layout of its own: give one")
    return compare((_evaluator(scenario, profile, anchors), layout_text or scenario.layout), (_evaluator(other, profile, anchors), other.layout), measured)


def run_simulator(anchors=None):
    """What ``predict`` plays each published run with; ``anchors``: a file whose runs refit the sites they belong to."""
    from moesim.anchored import RunSimulator, sites_from_file

    return RunSimulator(sites_from_file(anchors) if anchors is not None else {})


def list_ops(scenario, layout_text: str | None = None, *, top: int = 5, profile=None) -> Iterator[dict[str, Any]]:
    """Every distinct op that a layout's step (or the steps of the ``top`` layouts by bound) is made of, and what the profile says:
    JSON-ready dicts, most expensive first. Of one layout also the ``count``: launches a step on the pipeline rank with most. ``gain``:
    seconds by which measuring the op, after those with more of it, would narrow the step's standard deviation."""
    evaluator = Evaluator(scenario, profile)
    if layout_text or scenario.layout:
        layouts = [evaluator.legal(layout_text or scenario.layout)]
    else:
        space = enumerate_layouts(scenario, evaluator.stack.default_layout)
        screened = Screen(scenario, evaluator.parts, space).run()
        best = np.argsort(np.where(screened.peak_bytes <= evaluator.budget_bytes, screened.bound_s, np.inf), kind="stable")[:top]
        layouts = [space.layout(int(row)) for row in best]
        evaluator = Evaluator(scenario, profile)
    programs = [evaluator.program(layout) for layout in layouts]
    counts = advise.launches(evaluator, programs[0]) if len(programs) == 1 else None
    asked = advise.asked(evaluator, programs)
    gains = {a.op: gain for a, gain in zip(asked, advise.gains(evaluator, programs, [float(s) for s in paths.step_seconds(programs)], asked))}
    priced = sorted(evaluator.parts.prices.items(), key=lambda item: -item[1][0])
    for op, (seconds, _, _, sms, term, provenance) in priced:
        yield {**op_dict(op), "class": kind_of(op), "predicted_s": seconds, "term": term, "provenance": provenance, "sms": sms,
               **({} if counts is None else {"count": counts[op]}), "gain": gains.get(op, 0.0)}


def op_dict(op) -> dict[str, Any]:
    """An op as plain data: its class under "op", then its fields (a group as [size, stride])."""
    fields = {name: getattr(op, name) for name in op.__slots__}
    if "group" in fields:
        fields["group"] = [fields["group"].size, fields["group"].stride]
    name = type(op).__name__
    assert name in OP_KINDS
    return {"op": name, **fields}


def _evaluator(scenario, profile, anchors) -> Evaluator:
    if anchors is None:
        return Evaluator(scenario, profile)
    from moesim.anchored import site_from_file

    return Evaluator(scenario, profile, site=site_from_file(anchors, scenario))


class _Found:
    """What is known of the rows of a space: longest paths and steps played, in seconds."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.path: dict[int, float] = {}
        self.step: dict[int, float] = {}
        self.num_bounded = 0
        self.gap: float | None = None

    @property
    def best(self) -> float:
        return min(self.step.values(), default=np.inf)


def play_every_rank(scenario, layout_text: str | None = None, *, profile=None, anchors=None) -> tuple[float, np.ndarray]:
    """(step seconds, peak bytes of each rank [world]) of one layout with all its ranks under the scenario's routing, each layer and
    microbatch drawn anew. ValueError where it is illegal or has more than full.MAX_RANKS ranks."""
    evaluator = _evaluator(scenario, profile, anchors)
    layout = evaluator.legal(layout_text or scenario.layout)
    return engine.run(full.full_program(evaluator, layout), spans=False).makespan, full.full_peaks(evaluator, layout)


class _pool:
    """Workers that inherit the priced parts by fork; none where fork is missing or one process is enough."""

    def __init__(self, evaluator: Evaluator, workers: int | None):
        self.evaluator = evaluator
        self.workers = min(8, os.cpu_count() or 1) if workers is None else workers
        self.executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> "_pool":
        _state["evaluator"] = self.evaluator
        return self

    def screen(self, screen: Screen, tell: Progress) -> Screened:
        """All rows, structures dealt to the workers; small spaces are not worth starting them."""
        _state["screen"] = screen
        spread = (lambda lists: self._each(_screen, lists)) if len(screen.space) > SMALL_SPACE else None
        return screen.run(lambda done, total: tell("screening", done, total), spread)

    def map(self, function, items: list) -> list:
        return list(self._each(function, items))

    def _each(self, function, items: list):
        if self.workers < 2 or len(items) < 2 or "fork" not in multiprocessing.get_all_start_methods():
            return map(function, items)
        if self.executor is None:
            self.executor = worker_pool(self.workers, multiprocessing.get_context("fork"))
        return self.executor.map(function, items)

    def __exit__(self, *_) -> None:
        if self.executor is not None:
            self.executor.shutdown(cancel_futures=True)
        _state.clear()


def _screen(numbers: list[int]):
    return _state["screen"].screen_structures(numbers)


def _paths(layouts: list[Layout]) -> list[float]:
    evaluator = _state["evaluator"]
    return [float(s) for s in paths.step_seconds([evaluator.program(layout) for layout in layouts])]


def _steps(layouts: list[Layout]) -> list[float]:
    evaluator = _state["evaluator"]
    return [engine.run(evaluator.program(layout), spans=False).makespan for layout in layouts]


def _played(layout: Layout) -> Played:
    return _state["evaluator"].played(layout)


def _candidate(job: tuple[Layout, bool]) -> Candidate:
    layout, with_skew = job
    evaluator = _state["evaluator"]
    return evaluator.candidate(evaluator.played(layout), with_skew=with_skew)


def _spans(layout_text: str) -> list[dict[str, Any]]:
    evaluator = _state["evaluator"]
    timeline = engine.run(evaluator.program(parse_layout(layout_text)))
    return [{"rank": s.rank, "stream": s.stream, "name": s.name, "kind": s.kind, "entry": s.entry, "start": s.start, "end": s.end} for s in timeline.spans]


def _narrow(space: Space, screened: Screened, fits: np.ndarray, top: int, pool: _pool, tell: Progress) -> _Found:
    """Longest paths in the order of the bound and plays in the order of the path, in turn, until nothing left can beat the best step
    played by more than GAP, or a budget is used. Every family gets a few paths, so that it is judged by a layout of its own."""
    found = _Found(space)
    order = np.flatnonzero(fits)[np.argsort(screened.bound_s[fits], kind="stable")]
    found.num_bounded = len(order)
    families = _best_of_families(space, order)
    found.path.update(_work(space, families, _paths, PATH_CHUNK, pool))
    tell("longest paths", len(found.path), len(families) + PATH_BUDGET)
    rest = order[~np.isin(order, families)]
    at = 0
    while found.path and len(found.step) < ENGINE_BUDGET:
        limit = found.best / (1.0 + GAP)
        ready = [row for row in sorted(found.path, key=found.path.get) if row not in found.step]
        unseen = screened.bound_s[rest[at]] if at < min(len(rest), PATH_BUDGET) else np.inf
        if ready and (len(found.step) < top or found.path[ready[0]] <= min(limit, unseen)):
            found.step.update(_work(space, ready[:min(ENGINE_BATCH, ENGINE_BUDGET - len(found.step))], _steps, ENGINE_CHUNK, pool))
            tell("playing", len(found.step), ENGINE_BUDGET)
        elif unseen <= limit:
            rows = rest[at:at + PATH_BATCH]
            at += len(rows)
            found.path.update(_work(space, rows, _paths, PATH_CHUNK, pool))
            tell("longest paths", len(found.path), len(families) + PATH_BUDGET)
        else:
            break
    for stage, done in (("longest paths", len(found.path)), ("playing", len(found.step))):
        tell(stage, done, done)
    found.gap = _gap(found, screened, order)
    return found


def _work(space: Space, rows, function, size: int, pool: _pool) -> dict[int, float]:
    """row -> seconds, by ``function`` over lists of ``size`` layouts in the pool."""
    rows = [int(row) for row in rows]
    chunks = [rows[start:start + size] for start in range(0, len(rows), size)]
    seconds = pool.map(function, [[space.layout(row) for row in chunk] for chunk in chunks])
    return {row: value for chunk, values in zip(chunks, seconds) for row, value in zip(chunk, values)}


def _best_of_families(space: Space, order: np.ndarray) -> np.ndarray:
    """Rows, without repeats: the first few in ``order`` of every value of every axis."""
    chosen: dict[int, None] = {}
    for codes in space.codes.values():
        for code in np.unique(codes[order]):
            chosen.update(dict.fromkeys(order[codes[order] == code][:PATHS_A_FAMILY].tolist()))
    return np.array(list(chosen), dtype=np.int64)


def _gap(found: _Found, screened: Screened, order: np.ndarray) -> float | None:
    if not found.step:
        return None
    unplayed = [found.path.get(int(r), screened.bound_s[r]) for r in order if int(r) not in found.step]
    return found.best / min(unplayed) - 1.0 if unplayed else 0.0


def _describe(found: _Found, top: int, pinned: Layout | None, pool: _pool, tell: Progress) -> list[Candidate]:
    chosen = [found.space.layout(row) for row in sorted(found.step, key=found.step.get)[:top]]
    jobs = [(layout, i < NUM_SKEWED) for i, layout in enumerate(chosen)]
    if pinned is not None and pinned not in chosen:
        jobs.append((pinned, True))
    tell("describing", 0, len(jobs))
    described = pool.map(_candidate, jobs)
    tell("describing", len(jobs), len(jobs))
    described = [replace(c, pinned=True) if pinned is not None and c.layout == str(pinned) else c for c in described]
    return _mark_ties(sorted(described, key=lambda c: (not c.fits, c.step_s)))


def _mark_ties(ranked: list[Candidate]) -> list[Candidate]:
    """Candidates that the model can't tell from the best: their difference is inside the part of the error they do not share."""
    if not ranked:
        return []
    best = ranked[0]
    out = [best]
    for c in ranked[1:]:
        width = np.hypot(np.log(best.high / best.low), np.log(c.high / c.low)) / 2
        # Errors of two layouts of one site are strongly correlated; half of the variance is taken as shared.
        out.append(replace(c, tied=bool(c.fits and np.log(c.step_s / best.step_s) < width * np.sqrt(0.5))))
    return out


def _assemble(scenario, evaluator, space, fits, found, candidates, rejections, spans, measured, started) -> Plan:
    advice = advise.advice(evaluator, candidates)
    return Plan(
        scenario=_scenario(evaluator), profile=_profile(evaluator), num_layouts=len(space), num_fit=int(fits.sum()), num_bounded=found.num_bounded,
        num_path=len(found.path), num_played=len(found.step), gap=found.gap, elapsed_s=time.monotonic() - started, candidates=tuple(candidates),
        rejections=tuple(rejections), cost=_cost(scenario), memory_rule=_memory_rule(scenario), warnings=_warnings(scenario, evaluator, candidates),
        measured=whynot.compare_measured(evaluator, candidates, measured), advice=advice, timeline=tuple(spans),
    )


def _nothing_legal(scenario, evaluator, space, started) -> Plan:
    rejections = whynot.not_legal(scenario, space.dropped)
    return Plan(
        scenario=_scenario(evaluator), profile=_profile(evaluator), num_layouts=0, num_fit=0, num_bounded=0, num_path=0, num_played=0, gap=None,
        elapsed_s=time.monotonic() - started, candidates=(), rejections=tuple(rejections), cost=_cost(scenario), memory_rule=_memory_rule(scenario),
    )


def _scenario(evaluator: Evaluator) -> dict[str, Any]:
    s = evaluator.scenario
    return {
        "name": s.name, "hash": s.hash, "model": s.model.name, "cluster": s.cluster.name, "num_nodes": s.cluster.num_nodes, "num_gpus": s.cluster.num_gpus,
        "gpu": s.cluster.gpu.name, "hbm_bytes": s.cluster.gpu.hbm_bytes, "memory_limit_bytes": evaluator.budget_bytes, "stack": s.stack, "seq_len": s.workload.seq_len,
        "global_batch_tokens": s.workload.global_batch_tokens, "num_params": s.model.num_params, "num_active_params": s.model.num_active_params,
        "routing": routing_name(s.workload.routing), "skew": routing_name(s.workload.skew),
    }


def _profile(evaluator: Evaluator) -> dict[str, Any]:
    p = evaluator.profile
    stamp = getattr(p, "stamp", None)
    return {"name": p.name, "gpu": p.gpu, "parent": p.parent, "anchored": evaluator.site.text, "model_error": evaluator.model_error.source,
            "terms": dict(Counter(term.provenance for term in p.terms)), "stamp": None if stamp is None else stamp.model_dump(mode="json")}


def _cost(s) -> Cost:
    price = s.cluster.price
    source = ""
    if price is not None:
        if s.cluster.usd_per_gpu_hour is not None:
            return Cost(price, s.cluster.sources.get("usd_per_gpu_hour") or "the scenario's own price", s.workload.tokens, "before failures")
        source = s.cluster.gpu.usd_per_hour.source
    return Cost(price, source, s.workload.tokens)


def _memory_rule(s) -> str:
    gib = 2.0**30
    return (f"fits = peak x (1 + {s.memory.margin:g} margin) + {s.runtime_reserve_bytes / gib:.1f} GiB runtime reserve <= {s.cluster.gpu.hbm_bytes / gib:.1f} GiB HBM; "
            f"allocator slack {s.memory.allocator_slack:g} of moving bytes; routing {routing_name(s.workload.routing)}, skew beside it {routing_name(s.workload.skew)}")


def _warnings(s, evaluator: Evaluator, candidates: list[Candidate]) -> tuple[str, ...]:
    out = []
    best = next((c for c in candidates if c.fits and c.skewed), None)
    rivals = [c for c in candidates if best and c.fits and c.tied and c.skewed and c.skewed.step_s < best.skewed.step_s]
    if rivals:
        first = min(rivals, key=lambda c: c.skewed.step_s)
        out.append(f"under {first.skewed.routing} {first.layout}, tied with the best, is {100 * (best.skewed.step_s / first.skewed.step_s - 1):.1f}% faster")
    left = [axis for axis in type(s.search).model_fields if axis != "dp" and getattr(s.search, axis) is None]
    if left:
        out.append(f"not searched, left at the layout's default: {', '.join(left)}")
    if evaluator.profile.parent:
        out.append(f"profile {evaluator.profile.name} has terms scaled from {evaluator.profile.parent}; they are labelled extrapolated")
    if s.workload.routing.kind == "balanced":
        out.append("speeds assume balanced routing; the skew column shows the stated skew")
    return tuple(out)

