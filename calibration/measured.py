"""How do the measurements of one machine become its profile? (A parent's terms, each moved by what was measured; the rest says whose it is.)"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Mapping, Sequence

import numpy as np

from calibration import cpu, measured_rest as rest
from calibration.build import GPUS
from calibration.inside import Anchors, anchors, applied
from calibration.lines import CODE, Lines, read
from calibration.measured_terms import Fitted, borrowed, fit_term, kept
from moesim.costs import collectives
from moesim.profile import HardwareProfile, MeasuredCurve, Sustained, Term, load_profile

FAMILIES = ("gemm", "grouped_gemm", "attention", "memory")


@dataclass(frozen=True)
class Made:
    """A profile and what a person should know of how it came about: a line a term, and warnings."""

    profile: HardwareProfile
    lines: Lines
    fitted: dict[str, Fitted]
    warnings: tuple[str, ...] = ()


def make(files: Sequence[Path], name: str, parent: str | None = None) -> Made:
    """The profile ``name`` from measurement files. ValueError in one line where they can't make one."""
    lines = read(files)
    base = load_profile(parent or _parent(lines))
    _match(lines, base)
    origin = "measured: " + ", ".join(lines.stamp.files)
    fitted, warnings = _terms(lines, base, origin)
    codes = lines.stamp.software.get(CODE, "").split()
    if len(codes) > 1:
        warnings.append(f"the timed sources of the trainer changed between lines: {', '.join(codes)}")
    terms = {t.name: fitted[t.name].term if t.name in fitted else _unmeasured(t, base, fitted) for t in base.terms}
    curves, told, software = _curves(lines, base, origin)
    terms |= told
    bare = base.but(name=name, terms=tuple(terms.values()), sustained={}, nccl=software, curves=curves)
    given = anchors(files) if lines.is_cpu else Anchors((), (), ())
    steps = {} if given.alone else rest.in_step(bare, lines.steps, origin)
    with_steps = {n: _moves_with_steps(t, steps.get(n)) for n, t in terms.items()}
    found = rest.beside(lines.named, bare)
    profile = bare.but(
        parent=base.name, terms=tuple(with_steps.values()), stamp=lines.stamp, sustained=_sustained(lines, base, steps),
        sustained_rule=_rule(lines, base, steps), host=_host(lines, base, origin), beside=found, gammas=rest.gammas(found, base.gammas, origin),
        storage=rest.storage(lines.named) or base.storage,
    )
    return Made(applied(profile, given, origin), lines, fitted, tuple(warnings))


def _parent(lines: Lines) -> str:
    """The profile whose device the lines name."""
    if lines.is_cpu:
        return cpu.NAME
    words = str(lines.stamp.device.get("name", "")).lower().replace("-", " ").split()
    found = [gpu for gpu in sorted(GPUS, key=len, reverse=True) if gpu in words]
    if not found:
        raise ValueError(f"no profile of {lines.stamp.device.get('name')!r} to start from: give --parent, one of {', '.join(GPUS)}")
    return found[0]


def _match(lines: Lines, base: HardwareProfile) -> None:
    if lines.is_cpu != (base.num_sms == 0):
        one, other = ("a CPU", "a GPU") if lines.is_cpu else ("a GPU", "a CPU")
        raise ValueError(f"the lines were measured on {one} ({lines.stamp.device.get('name')}), the parent {base.name!r} is of {other}")


def _terms(lines: Lines, base: HardwareProfile, origin: str) -> tuple[dict[str, Fitted], list[str]]:
    """Every term that lines of it move; dense products first, because a GPU's grouped ones are made of them."""
    fitted: dict[str, Fitted] = {}
    warnings = []
    rows_of = lines.terms
    for name in sorted(rows_of, key=lambda n: (n.startswith("grouped"), n)):
        if name not in base.term_index:
            warnings.append(f"{name}: the parent {base.name!r} has no such term; {len(rows_of[name])} lines not used")
            continue
        try:
            fitted[name] = fit_term(base, name, rows_of[name], _dense(base.term(name), fitted), origin)
        except ValueError as error:
            warnings.append(f"{name}: left as {base.name} has it: {error}")
    return fitted, warnings


def _dense(term: Term, fitted: Mapping[str, Fitted]) -> Term:
    """A GPU's grouped term with the measured parameters of the dense kernel of its dtype."""
    dense = fitted.get(f"gemm.{term.name.rsplit('.', 1)[-1]}")
    if term.kind != "grouped_gemm" or dense is None:
        return term
    return term.model_copy(update={"parameters": {**term.parameters, **dense.term.parameters}})


def _unmeasured(term: Term, base: HardwareProfile, fitted: Mapping[str, Fitted]) -> Term:
    """A guess moves with its measured siblings; what was measured elsewhere stays, and says so."""
    family = term.name.split(".")[0]
    siblings = [f.shift for n, f in fitted.items() if n.split(".")[0] == family]
    if term.provenance in ("assumed", "datasheet") and siblings and family in FAMILIES:
        spread = float(np.std(siblings)) if len(siblings) > 1 else 0.5
        return borrowed(term, float(np.median(siblings)), spread, f"a guess, moved as the measured {family} terms moved")
    return kept(term, base.name)


def _moves_with_steps(term: Term, step: Sustained | None) -> Term:
    """A term whose in-step factor was measured is as unsure as that is, too."""
    return term if step is None else term.model_copy(update={"shared": {**term.shared, "in step": step.sigma_log}})


def _sustained(lines: Lines, base: HardwareProfile, steps) -> dict[str, Sustained]:
    """In-step factors measured, by term; the parent's of a GPU for the others, 1 for those of a CPU."""
    if not lines.is_cpu:
        return {**base.sustained, **steps}
    blank = Sustained(factor=1.0, sigma_log=rest.UNSEEN_STEP, provenance="assumed", evidence={}, sources=("no op was timed inside a step",))
    return {**{dtype: blank for dtype in ("bf16", "fp32", "attention")}, **steps}


def _rule(lines: Lines, base: HardwareProfile, steps) -> str:
    if steps:
        return "By term where ops were timed inside training steps: seconds of all its work alone over those in the steps; else " + (
            "1." if lines.is_cpu else f"the parent's: {base.sustained_rule}")
    return "1: no op was timed inside a step." if lines.is_cpu else base.sustained_rule


def _host(lines: Lines, base: HardwareProfile, origin: str):
    """Seconds to issue a kernel; on a CPU the issuing thread computes, and they are part of each price."""
    found = rest.launch_seconds(lines.named)
    if lines.is_cpu or found is None:
        return base.host
    return base.host.model_copy(update={"launch_s": {name: found[0] for name in base.host.launch_s}, "sigma_log": max(0.05, found[1]), "sources": (origin,)})


def _curves(lines: Lines, base: HardwareProfile, origin: str) -> tuple[tuple[MeasuredCurve, ...], dict[str, Term], str]:
    """Measured curves; the parent's for what was not, scaled as the measured ones differ where it was only guessed; the terms of the
    measured kinds; the software that names them."""
    if not lines.curves:
        return base.curves, {}, base.nccl
    software = f"{base.nccl if lines.is_cpu else 'nccl'} as measured"
    own, terms, shifts = {}, {}, []
    for kind in collectives.KINDS:
        found = {}
        for (other, members), rows in lines.curves.items():
            made = rest.curve(kind, members, rows, software) if other == kind else None
            if made is not None:
                found[members] = (made, rows)
                shifts += _shift(made, base)
        if found:
            own |= {(kind, members): made for members, (made, _) in found.items()}
            terms[f"{kind}.nvlink"] = rest.collective_term(kind, found, base.term(f"{kind}.nvlink"), origin)
    for (kind, members), (longer, note) in rest.extended(own).items() if own else ():
        own[kind, members], term = longer, terms[f"{kind}.nvlink"]
        terms[term.name] = term.model_copy(update={"note": "; ".join(filter(None, (term.note, note)))})
    guessed = {k for k in collectives.KINDS if base.term(f"{k}.nvlink").provenance in ("assumed", "datasheet")}
    lent = []
    for c in base.curves:
        if c.software != base.nccl or (c.kind, c.members) in own or (c.kind in guessed and any(kind == c.kind for kind, _ in own)):
            continue  # beyond the members that were measured, a measured curve says more than a guess
        lent.append(rest.shifted(c, float(np.median(shifts)) if c.kind in guessed and shifts else 0.0, software).model_copy(update={"lender": base.name}))
    return (*own.values(), *lent), terms, software


def _shift(made: MeasuredCurve, base: HardwareProfile) -> list[float]:
    """Mean log of a measured curve over the parent's."""
    known = base.curve_tables.get(made.kind, {}).get(made.members)
    if known is None:
        return []
    return [float(np.mean(np.log(np.array(made.seconds) / np.interp(made.bytes, known.bytes, known.seconds))))]


# --- what is said of it -------------------------------------------------------------------------------------------------------


def report(made: Made) -> dict:
    """Figures of a fit as plain data: a row a term with its errors, what is pinned, what was not used."""
    profile = made.profile
    rows = []
    for term in profile.terms:
        if term.provenance == "measured":
            fits = {f.split: {"lines": f.num_rows, "median": f.median, "p90": f.p90, "bias": f.bias} for f in term.fits}
            level = profile.sustained.get(term.name)
            rows.append({"term": term.name, "kind": term.kind, "sigma": term.sigma_log, "errors": fits, "note": term.note, "in_step": level.factor if level else None,
                         "pinned": list(made.fitted[term.name].posterior.pinned) if term.name in made.fitted else []})
    return {"profile": profile.name, "parent": profile.parent, "stamp": profile.stamp.model_dump() if profile.stamp else None, "terms": rows,
            "beside": [b.model_dump() for b in profile.beside], "storage": [s.model_dump() for s in profile.storage],
            "warnings": list(made.warnings), "unused": made.lines.unused}


def sentences(made: Made) -> list[str]:
    """The same for a person."""
    found, out = report(made), []
    stamp = made.profile.stamp
    out.append(f"{made.profile.name}: {stamp.device.get('name')} with torch {stamp.software.get('torch')}, {stamp.num_lines} lines ({stamp.num_noisy} noisy), parent {made.profile.parent}")
    for row in found["terms"]:
        held = "  ".join(f"{split} {e['median']:.1%}/{e['p90']:.1%}" for split, e in row["errors"].items())
        lines = next(iter(row["errors"].values()))["lines"] if row["errors"] else 0
        step = f"  in step x{row['in_step']:.2f}" if row["in_step"] else ""
        out.append(f"  {row['term']:26} {lines:4d} lines  median/p90 error: {held}  sigma {row['sigma']:.1%}{step}")
        if row["note"]:
            out.append(f"    {row['note']}")
    out += [f"  beside: {b.running} on {b.ranks} ranks at once{f' beside {b.beside}' if b.beside else ''} x{b.ratio:.2f} +- {b.stderr:.2f}" for b in made.profile.beside]
    out += [f"  checkpoint {s.what} by {s.ranks} rank(s): {s.bytes_per_s / 1e9:.2f} GB/s" for s in made.profile.storage]
    others = [t.name for t in made.profile.terms if t.provenance != "measured"]
    out.append(f"  not measured, {len(others)} terms: {', '.join(others[:8])}{' ...' if len(others) > 8 else ''}")
    out += [f"  not used: {count} lines, {reason}" for reason, count in sorted(made.lines.unused.items())]
    return out + [f"warning: {w}" for w in made.warnings]
