"""How far off may the price of each op be, and which causes do prices have in common?

The logarithm of an op's seconds is off by a sum of loadings on independent standard normal causes:

* a term's name: what the term's formula misses (``sigma_log``);
* a name in ``Term.shared``: a cause that several terms have in common;
* "NAME fit J": directions in which the parameters fitted to measurements may be wrong (the columns of a root of their covariance), so
  that an op unlike any measured one is less certain than its neighbours are;
* "NAME beyond": outside the range that was measured, by ``BEYOND`` for each octave from its edge;
* "ROLE in a step": what a role costs inside a step beside the price of its ops, where a profile holds that;
* "software STACK J": directions in which the factors fitted to published runs of a stack may be wrong;
* "model NAME": at a site with runs of its own, what a model's whole step costs there beside all that;
* "host": what one launch costs.

All layouts of a site load on the same causes: draws of theirs belong together, and what one measurement tells of one layout it tells of
the others too. Where runs of a stack fixed its factors, they took up part of what prices are off by: of those ``share`` is left. Runs of
a site show sums of causes: loadings are those on causes as such runs leave them (the square root of their covariance is taken in).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Sequence

import numpy as np

from moesim.coverage import KINDS, scaled_kind
from moesim.ops import Op
from moesim.origins import Subject, subjects, transfer_op
from moesim.parts import Parts
from moesim.pricing import Prices
from moesim.profile import HardwareProfile, Term
from moesim.program import Body, Program
from moesim.site import MODEL_SIGMA, NOISE

BEYOND = 0.05
"""Standard deviation that ln(seconds) gains an octave outside the measured range, in quadrature: the largest sizes of dense products and
of collectives held out by one to three octaves give 0.037 (bf16), 0.049 (collectives), 0.054 (nvfp4) and 0.109 (fp8): the middle of
them, which the other kinds take too (``python -m calibration beyond``)."""
HOST = "host"
SOFTWARE, MODEL = "software ", "model "
LONGEST_STEP = 1.0
"""Largest standard deviation of ln(parameter): the widest belief that a fit starts from (calibration/network.py). Rows that say little
of a parameter leave it there, not without end."""


class Uncertainty:
    """Loadings of priced ops and programs named after them, for layouts that share one ``Parts``."""

    def __init__(self, parts: Parts, share: float = 1.0, factors: float = 1.0):
        """share: of the errors of prices, 0 to 1; factors: scales those of the stack's factors."""
        self.parts, self.profile, self.site, self.share = parts, parts.profile, parts.site, share
        self.software = factors * parts.factor_errors if parts.factor_errors is not None else np.zeros((len(KINDS), 0))
        self.names: dict[Subject, str] = {}
        self.rows: dict[str, np.ndarray] = {}
        self.bodies: dict[int, tuple[Body, Body]] = {}

    @cached_property
    def causes(self) -> tuple[str, ...]:
        """Every cause of the profile, in a fixed order: the same draw means the same world for each layout."""
        terms = self.profile.terms
        fits = [fit_cause(t, j) for t in terms for j in range(len(t.covariance))]
        shared = sorted({cause for t in terms for cause in t.shared})
        software = [self._software(j) for j in range(self.software.shape[1])]
        models = sorted({name for run in self.site.seen for name in run if name.startswith(MODEL)} | {self.model}) if self.site.seen else ()
        return (HOST, *(t.name for t in terms), *shared, *fits, *(beyond_cause(t) for t in terms), *map(step_cause, sorted(self.steps)), *software, *models)

    @cached_property
    def model(self) -> str:
        """The cause that the whole step of this model has at the site."""
        return self.site.model_constant(self.parts.model)

    @cached_property
    def of_prices(self) -> np.ndarray:
        """[causes] whether a cause is one of prices, not of a stack's factors or a site's model."""
        return np.array([not cause.startswith((SOFTWARE, MODEL)) for cause in self.causes])

    @cached_property
    def of_software(self) -> np.ndarray:
        """Positions of the causes of a stack's factors."""
        return np.array([self.at[self._software(j)] for j in range(self.software.shape[1])], dtype=int)

    def _software(self, direction: int) -> str:
        """Of one stack: directions of another's covariance are others."""
        return f"{SOFTWARE}{self.parts.stack.name} {direction}"

    @cached_property
    def shown(self) -> tuple[np.ndarray, np.ndarray]:
        """What the site's runs show of the causes: orthonormal directions [causes, runs], and the part that each loses of its length.
        What a run shows of causes that are none here (another stack's factors) is noise."""
        seen = np.array([[run.get(cause, 0.0) for cause in self.causes] for run in self.site.seen])
        elsewhere = np.array([math.hypot(*(x for cause, x in run.items() if cause not in self.at)) for run in self.site.seen])
        seen *= (NOISE / np.hypot(NOISE, elsewhere))[:, None]
        _, size, directions = np.linalg.svd(seen, full_matrices=False)
        return directions.T, 1.0 - NOISE / np.hypot(NOISE, size)

    def _left(self, row: np.ndarray, in_step: bool = True) -> np.ndarray:
        """A loading on causes as the site's runs leave them. in_step: of what runs inside a step, which the model's factor scales."""
        if not self.site.seen:
            return row
        if in_step:
            row[self.at[self.model]] += MODEL_SIGMA
        directions, lost = self.shown
        return row - (row @ directions * lost) @ directions.T

    def alone(self, op: Op, hidden: Sequence[str]) -> np.ndarray:
        """[causes] what timing an op by itself shows: nothing of ``hidden`` causes, of the stack's factors or of the model."""
        return self._alone(self._raw([Subject(self.parts.price(op)[4], op)])[0], hidden)

    def host_alone(self) -> np.ndarray:
        """[causes] what timing launches by themselves shows."""
        row = np.zeros(len(self.causes))
        row[self.at[HOST]] = self.profile.host.sigma_log * self.share
        return self._alone(row, ())

    def _alone(self, row: np.ndarray, hidden: Sequence[str]) -> np.ndarray:
        row[[self.at[cause] for cause in hidden if cause in self.at]] = 0.0
        return self._left(row, in_step=False)

    @cached_property
    def steps(self) -> dict[str, float]:
        """Role -> standard deviation of ln(seconds) that its in-step cost leaves, the larger of its phases'."""
        found: dict[str, float] = {}
        for step in self.profile.in_step:
            found[step.role] = max(step.sigma_log, found.get(step.role, 0.0))
        return found

    @cached_property
    def at(self) -> dict[str, int]:
        return {cause: i for i, cause in enumerate(self.causes)}

    def draws(self, seed: int, count: int) -> np.ndarray:
        """Standard normals [count, causes]."""
        return np.random.default_rng(seed).standard_normal((count, len(self.causes)))

    def named(self, program: Program) -> Program:
        """The program with each share of seconds named after its op: what a draw of op prices multiplies. Seconds are as they were."""
        bodies = {which: tuple(map(self._named, getattr(program, which))) for which in ("bodies", "prologue", "epilogue")}
        self._load([s for s in self.names if self.names[s] not in self.rows])
        return replace(program, **bodies)

    def loads(self, program: Program) -> dict[str, np.ndarray]:
        """Loadings [causes] of everything a named program's seconds are made of: names of ops, "host", and "send" for its transfers."""
        used = {term for bodies in (program.bodies, program.prologue, program.epilogue) for body in bodies for task in body for _, term, _ in task.terms}
        rows = {name: self.rows[name] for name in sorted(used)} | {HOST: self._host()}
        if (sent := transfer_op(program)) is not None:
            rows["send"] = self.loading(sent)
        return rows

    def factors(self, program: Program, normals: np.ndarray) -> dict[str, np.ndarray]:
        """Multipliers of a named program's seconds for each row of ``normals`` [D, causes]: name of an op -> [D]; "host"; "send"."""
        rows = self.loads(program)
        return dict(zip(rows, np.exp(normals @ np.stack(list(rows.values())).T).T))

    def loading(self, op: Op) -> np.ndarray:
        """[causes] of one op, priced if it wasn't."""
        subject = Subject(self.parts.price(op)[4], op)
        self._name(subject)
        self._load([subject])
        return self.rows[self.names[subject]]

    def _host(self) -> np.ndarray:
        row = np.zeros(len(self.causes))
        row[self.at[HOST]] = self.profile.host.sigma_log * self.share
        row[self.of_software] = self.software[KINDS.index("host")]
        return self._left(row)

    def _named(self, body: Body) -> Body:
        known = self.bodies.get(id(body))
        if known is None or known[0] is not body:
            named = tuple(replace(task, terms=tuple((role, self._name(self._inside(s, role, task.uses)), part) for (role, _, part), s in zip(task.terms, subjects(task, self.parts))))
                          for task in body)
            known = self.bodies[id(body)] = (body, named)
        return known[1]

    def _inside(self, subject: Subject, role: str, uses) -> Subject:
        kind = scaled_kind(role, subject.term, uses) if self.software.size else None
        return replace(subject, role=role if role in self.steps else "", kind=kind or "")

    def _name(self, subject: Subject) -> str:
        if subject not in self.names:
            self.names[subject] = f"{subject.term} #{len(self.names)}"
        return self.names[subject]

    def _load(self, wanted: Sequence[Subject]) -> None:
        new = [s for s in wanted if self.names[s] not in self.rows]
        for row, subject in zip(self._raw(new), new):
            if subject.kind:
                row[self.of_software] = self.software[KINDS.index(subject.kind)]
            self.rows[self.names[subject]] = self._left(row)

    def _raw(self, subjects: Sequence[Subject]) -> np.ndarray:
        """[subjects, causes] from prices alone, whatever the site's runs show."""
        rows = np.zeros((len(subjects), len(self.causes)))
        for row, subject in zip(rows, subjects):
            for cause, sigma in own_causes(self.profile.term(subject.term)).items():
                row[self.at[cause]] = sigma
            if subject.role:
                row[self.at[step_cause(subject.role)]] = self.steps[subject.role]
        ops = [(i, s) for i, s in enumerate(subjects) if s.op is not None]
        if ops:
            self._load_ops(rows, [i for i, _ in ops], [s.op for _, s in ops])
        return rows * self.share

    def _load_ops(self, rows: np.ndarray, at: list[int], ops: list[Op]) -> None:
        """Fits and distances of ``ops``, into the rows ``at``."""
        prices = self.profile.price(ops, self.parts.cluster)
        for i, octaves, number in zip(at, prices.beyond, prices.term):
            rows[i, self.at[beyond_cause(self.profile.terms[number])]] = BEYOND * octaves
        for term in self.profile.terms:
            touched = _touched(term, prices, self.profile) if term.covariance else []
            if len(touched):
                found = slopes(self.profile, term, [ops[i] for i in touched], self.parts.cluster)
                for j, column in enumerate(found.T):
                    rows[np.array(at)[touched], self.at[fit_cause(term, j)]] = column


def fit_cause(term: Term, direction: int) -> str:
    return f"{term.name} fit {direction}"


def beyond_cause(term: Term) -> str:
    return f"{term.name} beyond"


def step_cause(role: str) -> str:
    return f"{role} in a step"


def own_causes(term: Term) -> dict[str, float]:
    """Loadings that every op of a term has."""
    return {term.name: term.sigma_log, **term.shared}


def _touched(term: Term, prices: Prices, profile: HardwareProfile) -> np.ndarray:
    """Rows of ``prices`` that the parameters of a term take part in: its own, and of a network's all that cross it."""
    if term.name.startswith("network."):
        return np.flatnonzero(np.array([profile.terms[i].name.endswith(".nic") for i in prices.term]))
    return np.flatnonzero(prices.term == profile.term_index[term.name])


def slopes(profile: HardwareProfile, term: Term, ops: Sequence[Op], cluster) -> np.ndarray:
    """Change of ln(seconds) of each op for one standard deviation along each direction of a term's fit, [ops, directions]."""
    names = list(term.covariance)
    covariance = np.array([[term.covariance[a][b] for b in names] for a in names])
    values, vectors = np.linalg.eigh(covariance / np.outer(*[_scale(term, names)] * 2))
    columns = []
    for step in (vectors * np.sqrt(np.maximum(values, 0.0))).T:
        step = step * min(1.0, LONGEST_STEP / max(np.abs(step).max(), 1e-12))
        up, down = (_moved(profile, term, names, sign * step).price(ops, cluster).seconds for sign in (1.0, -1.0))
        columns.append((np.log(up) - np.log(down)) / 2.0)
    return np.stack(columns, axis=1)


def _scale(term: Term, names: Sequence[str]) -> np.ndarray:
    """Positive parameters move in their logarithm, others by themselves."""
    return np.array([term.parameters[name] if term.parameters[name] > 0 else 1.0 for name in names])


def _moved(profile: HardwareProfile, term: Term, names: Sequence[str], step: np.ndarray) -> HardwareProfile:
    """The profile with a term's parameters moved along ``step``."""
    moved: dict[str, float] = {}
    for name, by in zip(names, step):
        value = term.parameters[name]
        moved[name] = float(value * np.exp(by)) if value > 0 else max(0.0, float(by))
    other = term.model_copy(update={"parameters": {**term.parameters, **moved}})
    return profile.model_copy(update={"terms": tuple(other if t is term else t for t in profile.terms)})
