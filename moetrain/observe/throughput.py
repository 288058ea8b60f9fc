"""How fast was a run, by a rule that was fixed before it was measured?

Contract: the first ``warmup`` steps of every process of the run are left out (a restart warms up again), and of the next
``window`` steps those in which something else happened too (profiling, validation, a checkpoint, compilation, a skipped
update). What is left must be at least ``least`` steps. The result is a median with its spread, and the rate over the whole
window beside it, which rare slow steps can't hide from. A result carries its key: numbers whose routing, capacity or drops
differ are not compared, because a router that drops rows is always faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from moetrain.observe.metrics import StepRecord
from moetrain.observe.words import compact, percent

DROPS_EQUAL = 1e-3
"""Drop fractions this close count as equal: a tenth of a per cent of the rows."""


@dataclass(frozen=True)
class Contract:
    """Which steps count. ``warmup`` at least 1: the first step builds caches, optimizer state and communicators."""

    warmup: int = 10
    window: int = 50
    least: int = 30

    def __post_init__(self) -> None:
        if self.warmup < 1 or not 1 <= self.least <= self.window:
            raise ValueError(f"throughput: warmup {self.warmup} >= 1 and 1 <= least {self.least} <= window {self.window} are needed")


@dataclass(frozen=True)
class Key:
    """What a throughput belongs to. ``device`` by its name, ``config`` by its hash, ``drops`` the share of requested rows."""

    config: str
    layout: str
    device: str
    num_gpus: int
    routing: str
    capacity_factor: float | None
    capacity_scope: str
    drops: float | None

    def __str__(self) -> str:
        capacity = "dropless" if self.capacity_factor is None else f"capacity {self.capacity_factor:g} an {self.capacity_scope}"
        drops = "no MoE rows logged" if self.drops is None else f"dropped {percent(self.drops, 2)}"
        return f"{self.layout}, {self.num_gpus} x {self.device}, {self.routing} routing, {capacity}, {drops}, config {self.config[:12]}"


@dataclass(frozen=True)
class Throughput:
    """One measurement. Rates are tokens/s a GPU; p10 and p90 are percentiles over steps; ``overall`` is all tokens of the used
    steps over all their seconds; ``excluded`` counts the steps of the window that were left out, by reason."""

    key: Key
    contract: Contract
    first_step: int
    last_step: int
    num_steps: int
    excluded: tuple[tuple[str, int], ...]
    median: float
    p10: float
    p90: float
    overall: float
    median_step_s: float
    mfu: float | None
    denominator: str

    def __str__(self) -> str:
        out = ", ".join(f"{count} {reason}" for reason, count in self.excluded) or "none"
        mfu = f"MFU {percent(self.mfu)} of {self.denominator}" if self.mfu is not None else "MFU UNKNOWN peak"
        return (f"{compact(self.median)} tok/s/GPU (p10 {compact(self.p10)}, p90 {compact(self.p90)}, overall {compact(self.overall)}), {mfu}; "
                f"{self.num_steps} steps {self.first_step}-{self.last_step} after {self.contract.warmup} of warm-up, excluded: {out}; {self.key}")


def measure(records: Sequence[StepRecord], contract: Contract, *, config: str, layout: str, device: str) -> Throughput:
    """The throughput of a run from its steps in order. ValueError if too few steps count or the run changed its routing."""
    window = _window(records, contract)
    used = [r for r in window if not _reason(r)]
    excluded = Counter(reason for r in window if (reason := _reason(r)))
    if len(used) < contract.least:
        raise ValueError(f"throughput: {len(used)} of {len(records)} steps count ({contract.warmup} warm-up, {sum(excluded.values())} excluded), "
                         f"the contract needs {contract.least}: run longer")
    rates = np.array([r.tokens_per_s_per_gpu for r in used])
    low, median, high = (float(v) for v in np.percentile(rates, (10, 50, 90)))
    seconds = sum(r.seconds for r in used)
    uses = [r.use for r in used if r.use]
    shares = [u.mfu for u in uses if u.mfu is not None]
    return Throughput(
        key=_key(used, config, layout, device), contract=contract, first_step=used[0].step, last_step=used[-1].step, num_steps=len(used),
        excluded=tuple(sorted(excluded.items())), median=median, p10=low, p90=high,
        overall=sum(r.tokens for r in used) / seconds / used[0].num_gpus, median_step_s=float(np.median([r.seconds for r in used])),
        mfu=float(np.median(shares)) if len(shares) == len(used) else None, denominator=uses[0].denominator if uses else "UNKNOWN peak",
    )  # fmt: skip


def _window(records: Sequence[StepRecord], contract: Contract) -> list[StepRecord]:
    """The first ``window`` steps that no warm-up covers; warm-up starts anew with each restart."""
    done: Counter[int] = Counter()
    found = []
    for r in records:
        done[r.restart] += 1
        if done[r.restart] > contract.warmup:
            found.append(r)
    return found[: contract.window]


def _reason(record: StepRecord) -> str | None:
    return "skipped update" if record.skipped else "+".join(record.also) or None


def _key(used: Sequence[StepRecord], config: str, layout: str, device: str) -> Key:
    modes = {(b.routing, b.capacity_factor, b.capacity_scope) for r in used if (b := r.balance)}
    counts = {r.num_gpus for r in used}
    if len(modes) > 1 or len(counts) > 1:
        raise ValueError(f"throughput: the window mixes routing {sorted(map(str, modes))} or GPU counts {sorted(counts)}")
    routing, factor, scope = modes.pop() if modes else ("none", None, "expert")
    requested = sum(r.balance.requested_rows for r in used if r.balance)
    kept = sum(r.balance.kept_rows for r in used if r.balance)
    return Key(config, layout, device, counts.pop(), routing, factor, scope, 1 - kept / requested if requested else None)


def difference(a: Key, b: Key, ignore: Iterable[str] = ()) -> str | None:
    """Why two results must not be compared, in words; None if they may. ``ignore``: fields that the comparison is about, such as
    layout or config."""
    skip = {*ignore, "drops"}
    for name in (n for n in Key.__dataclass_fields__ if n not in skip):
        if getattr(a, name) != getattr(b, name):
            return f"{name} differs: {getattr(a, name)} and {getattr(b, name)}"
    if (a.drops is None) != (b.drops is None) or (a.drops is not None and abs(a.drops - b.drops) > DROPS_EQUAL):
        return f"drops differ: {percent(a.drops, 2)} and {percent(b.drops, 2)} of the rows"
    return None


@dataclass(frozen=True)
class Noise:
    """How much identical runs differ: largest and standard relative deviation of their medians from the mean of them."""

    num_runs: int
    mean: float
    largest: float
    standard: float

    def __str__(self) -> str:
        return f"A/A noise over {self.num_runs} runs: standard {percent(self.standard, 2)}, largest {percent(self.largest, 2)}"


def aa_noise(results: Sequence[Throughput]) -> Noise:
    """Noise from runs of one and the same thing. ValueError for fewer than two, or if their keys differ."""
    if len(results) < 2:
        raise ValueError(f"A/A noise: {len(results)} run, at least 2 are needed")
    for other in results[1:]:
        reason = difference(results[0].key, other.key)
        if reason:
            raise ValueError(f"A/A noise: {reason}")
    medians = np.array([r.median for r in results])
    away = medians / medians.mean() - 1
    return Noise(len(results), float(medians.mean()), float(np.abs(away).max()), float(away.std(ddof=1)))


def speedup(new: Throughput, old: Throughput, noise: Noise, ignore: Iterable[str] = ("layout", "config")) -> tuple[float, bool]:
    """(new over old, is that outside the noise: more than twice its standard deviation and its largest deviation). ValueError if
    the two must not be compared."""
    reason = difference(new.key, old.key, ignore)
    if reason:
        raise ValueError(f"speed-up: not comparable: {reason}")
    ratio = new.median / old.median
    return ratio, abs(ratio - 1) > max(2 * noise.standard, noise.largest)
