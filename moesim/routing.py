"""How unevenly do routed tokens load experts and ranks, and what is dropped?

A router sends each token to top_k distinct experts. `load_shares` says how the rows spread over experts,
`expert_load` folds that into a few dimensionless factors of an expert-parallel layout: multiply a balanced figure by
them. Experts lie contiguously on ranks: rank r holds experts r*E/ep .. (r+1)*E/ep - 1. Rows are expectations, so
counting noise of finite batches is not in them (at 4,096 rows an expert it is about 1.6% a standard deviation).

Letters of shapes: M microbatches, L layers, E experts.
"""
import json
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from pathlib import Path

import numpy as np

KINDS = ("balanced", "zipf", "dirichlet", "histogram")
# Expert shares drawn at most for one answer: 16 microbatches of 64 layers of 256 experts. More layers or experts get
# fewer microbatches; never fewer layers, as memory sums over them.
MAX_DRAWN = 2**18
NUM_DIRICHLET = 16  # weight vectors drawn; every layer and microbatch takes one of them, shuffled


@dataclass(frozen=True)
class ExpertLoad:
    """What one layout's routed experts meet; floats, or arrays in the shape of `ep` where that was an array.

    requested_rows, kept_rows: routed rows a rank, mean over ranks, a layer and microbatch. buffer_rows: rows a rank
    must hold room for: its capacity, or, dropless, its worst layer and microbatch.
    Factors over the mean of what was requested, after drops:
    max_over_mean_rank: the busiest rank, mean over layers and microbatches (grouped-GEMM rows, received bytes).
    max_over_mean_expert: the busiest expert of that rank (the longest group of its grouped GEMM).
    memory_factor: the largest sum over layers of any rank in any microbatch (stored routed activations).
    drop_fraction: of all requested rows.
    """

    requested_rows: float | np.ndarray
    kept_rows: float | np.ndarray
    buffer_rows: float | np.ndarray
    max_over_mean_rank: float | np.ndarray
    max_over_mean_expert: float | np.ndarray
    memory_factor: float | np.ndarray
    drop_fraction: float | np.ndarray

    @property
    def padding(self) -> float | np.ndarray:
        """Share of the buffer that holds no row, mean over ranks."""
        return 1 - self.kept_rows / self.buffer_rows


def expert_load(routing, num_experts: int, top_k: int, tokens_per_rank: int, ep, num_layers: int, num_microbatches: int, etp: int = 1) -> ExpertLoad:
    """The load of ep ranks that each bring tokens_per_rank tokens (times etp where experts are split further).

    routing: kind, zipf_s, dirichlet_alpha, file, seed, capacity_factor (None: dropless), capacity_scope, as in
    RoutingSpec. ep: an int or an array of ints, each a divisor of num_experts. num_layers: MoE layers of the stage.

    Capacity "rank": a rank takes ceil(c*T*k*etp) rows from all sources together, and what overflows is the tail of
    its rows ordered by local expert. Capacity "expert": an expert takes ceil(c*T*k*etp*ep/E) rows; each sender
    counting for itself gives the same expectation. ValueError on impossible integers or a bad histogram file.
    """
    _check_integers(num_experts, top_k, num_layers, num_microbatches, tokens_per_rank)
    sizes = np.asarray(ep)
    rest = (num_layers, num_microbatches)
    answers = [_one_load(_key(routing), num_experts, top_k, tokens_per_rank * top_k * etp, int(n), *rest) for n in sizes.ravel()]
    if sizes.ndim == 0:
        return answers[0]
    return ExpertLoad(*(np.array(column).reshape(sizes.shape) for column in zip(*(vars(a).values() for a in answers))))


def rank_loads(routing, num_experts: int, top_k: int, tokens_per_rank: int, ep: int, num_layers: int, num_microbatches: int, etp: int = 1) -> np.ndarray:
    """Rows that each rank keeps over the mean requested, [M, L, ep]: what expert_load summarises. M may be smaller
    than num_microbatches (see load_shares); microbatch m then takes row m % M. A histogram gives every layer of its file."""
    _check_integers(num_experts, top_k, num_layers, num_microbatches, tokens_per_rank)
    loads, _ = _kept_loads(_key(routing), num_experts, top_k, tokens_per_rank * top_k * etp, ep, num_layers, num_microbatches)
    return loads.sum(-1)


def _key(routing) -> tuple:
    """The fields that decide a load, hashable; a histogram file counts as the bytes it holds now."""
    stamp = Path(routing.file).stat().st_mtime_ns if routing.kind == "histogram" and Path(routing.file).is_file() else None
    fields = ("kind", "zipf_s", "dirichlet_alpha", "file", "seed", "capacity_factor", "capacity_scope")
    return tuple(getattr(routing, name) for name in fields) + (stamp,)


@lru_cache(maxsize=65536)
def _one_load(key: tuple, num_experts: int, top_k: int, rows: int, ep: int, num_layers: int, num_microbatches: int) -> ExpertLoad:
    loads, capacity = _kept_loads(key, num_experts, top_k, rows, ep, num_layers, num_microbatches)
    return _summarise(loads, capacity, rows, num_layers)


def _kept_loads(key: tuple, num_experts: int, top_k: int, rows: int, ep: int, num_layers: int, num_microbatches: int) -> tuple[np.ndarray, float | None]:
    """Rows kept by each expert, [M, L, ep, E/ep], and a rank's capacity (None: dropless), both over a rank's mean request."""
    *_, capacity_factor, scope, _stamp = key
    if ep < 1 or num_experts % ep:
        raise ValueError(f"routing: ep {ep} must divide num_experts {num_experts}")
    shares = _cached_shares(key, num_experts, top_k, num_layers, num_microbatches)
    loads = shares.reshape(*shares.shape[:2], ep, -1) * ep
    if capacity_factor is None:
        return loads, None
    num_sharing = num_experts // ep if scope == "expert" else 1
    capacity = ceil(capacity_factor * rows / num_sharing) / rows
    return _drop(loads, capacity, scope), capacity * num_sharing


def _drop(loads: np.ndarray, capacity: float, scope: str) -> np.ndarray:
    """Rows kept, [M, L, ep, E/ep], of `loads` under a capacity an expert or a rank."""
    if scope == "expert":
        return np.minimum(loads, capacity)
    taken = np.minimum(np.cumsum(loads, axis=-1), capacity)
    return np.diff(taken, axis=-1, prepend=0.0)


def _summarise(loads: np.ndarray, capacity: float | None, rows: int, num_layers: int) -> ExpertLoad:
    ranks = loads.sum(-1)
    busiest = ranks.argmax(-1)
    heaviest_expert = np.take_along_axis(loads.max(-1), busiest[..., None], -1)[..., 0]
    running = np.concatenate([np.zeros_like(ranks[:, :1]), ranks.cumsum(1)], axis=1)
    windows = running[:, num_layers:] - running[:, :-num_layers]  # num_layers neighbours: a histogram may hold more
    kept = float(ranks.mean())
    return ExpertLoad(
        requested_rows=float(rows),
        kept_rows=rows * kept,
        buffer_rows=rows * float(ranks.max() if capacity is None else capacity),
        max_over_mean_rank=float(ranks.max(-1).mean()),
        max_over_mean_expert=float(heaviest_expert.mean()) * loads.shape[-1],
        memory_factor=float(windows.max()) / num_layers,
        drop_fraction=0.0 if capacity is None else max(0.0, 1 - kept),
    )


# --- who gets how much ------------------------------------------------------------------------------------------------


def load_shares(
    kind: str, num_experts: int, top_k: int, *, zipf_s: float | None = None, dirichlet_alpha: float | None = None,
    file: str | None = None, seed: int = 0, num_layers: int = 1, num_microbatches: int = 1,
) -> np.ndarray:
    """Share of the routed rows that each expert gets, [M, L, E]; each layer and microbatch sums to 1, none is above 1/top_k.

    balanced: equal. zipf: the i-th most liked expert has weight i**-zipf_s, shuffled anew for each layer and
    microbatch. dirichlet: weights are drawn anew, alpha small = skewed. In both, weights are what a router that
    samples top_k experts without replacement prefers, so a share is less skewed than its weight. histogram: the
    recorded counts of every layer in the file, the same in every microbatch. M is smaller than num_microbatches where
    the draws would pass MAX_DRAWN.
    """
    _check_integers(num_experts, top_k, num_layers, num_microbatches)
    if kind == "balanced":
        return np.full((1, num_layers, num_experts), 1 / num_experts)
    if kind == "histogram":
        return _recorded_shares(file, num_experts, top_k, num_layers)[None]
    if kind not in KINDS:
        raise ValueError(f"routing kind {kind!r}: expected one of {', '.join(KINDS)}")
    pool = _share_pool(kind, zipf_s, dirichlet_alpha, seed, num_experts, top_k)
    rng = np.random.default_rng(seed)
    picks = rng.integers(len(pool), size=(_num_drawn(num_experts, num_layers, num_microbatches), num_layers))
    return rng.permuted(pool[picks], axis=-1)


@lru_cache(maxsize=64)
def _share_pool(kind: str, zipf_s: float | None, alpha: float | None, seed: int, num_experts: int, top_k: int) -> np.ndarray:
    """[vectors, E] shares to be shuffled."""
    if kind == "zipf":
        weights = np.arange(1, num_experts + 1)[None] ** -float(zipf_s)
    else:
        weights = np.random.default_rng(seed).standard_gamma(alpha, (NUM_DIRICHLET, num_experts))
    return np.array([inclusion(row, top_k) for row in weights]) / top_k


def _num_drawn(num_experts: int, num_layers: int, num_microbatches: int) -> int:
    return max(1, min(num_microbatches, MAX_DRAWN // (num_layers * num_experts)))


@lru_cache(maxsize=16)
def _drawn_shares(kind, zipf_s, alpha, file, seed, stamp, num_experts: int, top_k: int, num_layers: int, num_microbatches: int) -> np.ndarray:
    return load_shares(
        kind, num_experts, top_k, zipf_s=zipf_s, dirichlet_alpha=alpha, file=file, seed=seed, num_layers=num_layers, num_microbatches=num_microbatches
    )


def _cached_shares(key: tuple, num_experts: int, top_k: int, num_layers: int, num_microbatches: int) -> np.ndarray:
    kind, zipf_s, alpha, file, seed, _factor, _scope, stamp = key
    drawn = _num_drawn(num_experts, num_layers, num_microbatches)
    return _drawn_shares(kind, zipf_s, alpha, file, seed, stamp, num_experts, top_k, num_layers, drawn)


def inclusion(weights: np.ndarray, top_k: int) -> np.ndarray:
    """How likely is each expert to be among a token's top_k, drawn one by one without replacement in proportion to `weights`?

    weights [E] >= 0; returns [E], summing to top_k. Such draws are a race of exponential clocks with these rates (or
    the top k of log-weights plus Gumbel noise), so expert e is in if it rings at a time t when fewer than k others
    have rung: the integral over t of weight*exp(-weight*t) * P(others rung by t < k), taken over log t.
    """
    num_experts = len(weights)
    if top_k == num_experts:
        return np.ones(num_experts)
    weights = np.maximum(weights / weights.max(), 1e-12)  # top_k experts need a weight above 0
    latest = 40 / np.sort(weights)[-top_k - 1]  # by then top_k others have rung, whoever e is
    step = min(0.4, 1 / top_k**0.5)  # finer than the k-th ring is spread over log t
    t = np.exp(np.arange(np.log(1e-10), np.log(latest) + step, step))
    rung = 1 - np.exp(-np.outer(weights, t))
    density = weights[:, None] * t * (1 - rung) * step
    probability = np.minimum((density * _fewer_others(rung, top_k)).sum(1), 1)
    spread = probability * (1 - probability)  # what the sum lacks, below 1e-6 of it, goes where a chance can still move
    return probability + (top_k - probability.sum()) * spread / spread.sum()


def _fewer_others(rung: np.ndarray, top_k: int) -> np.ndarray:
    """P(fewer than top_k of the others are rung), [E, times], from each expert's own chance `rung` [E, times].

    Counts among the experts before e, and among those after it, are built up one expert at a time.
    """
    before = _running_counts(rung, top_k)
    after = _running_counts(rung[::-1], top_k)[::-1].cumsum(1)
    return (before * after[:, ::-1]).sum(1)


def _running_counts(rung: np.ndarray, top_k: int) -> np.ndarray:
    """[E, top_k, times]: P(exactly j of the experts before e are rung), j < top_k."""
    counts = np.zeros((len(rung), top_k, rung.shape[1]))
    counts[0, 0] = 1
    for e in range(1, len(rung)):
        np.multiply(counts[e - 1], 1 - rung[e - 1], out=counts[e])
        counts[e, 1:] += counts[e - 1, :-1] * rung[e - 1]
    return counts


# --- recorded histograms ------------------------------------------------------------------------------------------------


def _recorded_shares(file: str, num_experts: int, top_k: int, num_layers: int) -> np.ndarray:
    counts = read_histogram(file)
    if counts.shape[1] != num_experts:
        raise ValueError(f"{file}: {counts.shape[1]} experts a layer, the model has {num_experts}")
    if counts.shape[0] < num_layers:
        raise ValueError(f"{file}: {counts.shape[0]} layers, the layout has {num_layers} MoE layers on a stage")
    shares = counts / counts.sum(1, keepdims=True)
    if shares.max() * top_k > 1 + 1e-9:
        layer = int(shares.max(1).argmax())
        raise ValueError(f"{file}: layer {layer} gives one expert {shares.max():.3g} of the rows, with top_k {top_k} at most {1 / top_k:.3g} is possible")
    return shares


def read_histogram(file: str) -> np.ndarray:
    """Requested rows of each expert, [L, E] of ints, from JSON `{"layers": [[3, 5], [4, 4]]}` or CSV, a line a layer.

    Counts are requests before any drop, so every layer holds the same total. ValueError with one line otherwise.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: can't be read as text ({type(error).__name__})") from None
    layers = _json_layers(file, text) if text.lstrip().startswith("{") else _csv_layers(file, text)
    if not layers or not layers[0]:
        raise ValueError(f"{file}: holds no layers")
    for i, layer in enumerate(layers):
        _check_layer(file, i, layer, layers[0])
    return np.array(layers, dtype=np.int64)


def _check_layer(file: str, i: int, layer: list, first: list) -> None:
    if len(layer) != len(first):
        raise ValueError(f"{file}: layer {i} has {len(layer)} experts, layer 0 has {len(first)}")
    for expert, count in enumerate(layer):
        if type(count) is not int or not 0 <= count < 2**53:
            raise ValueError(f"{file}: layer {i}, expert {expert}: expected a whole count of rows, got {str(count)[:40]!r}")
    if sum(layer) != sum(first) or sum(layer) == 0:
        raise ValueError(f"{file}: layer {i} holds {sum(layer)} rows, layer 0 {sum(first)}; every layer routes the same tokens, at least one")


def _json_layers(file: str, text: str) -> list[list]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON ({type(error).__name__})") from None
    layers = data.get("layers")
    if set(data) != {"layers"} or not isinstance(layers, list) or not all(isinstance(layer, list) for layer in layers):
        raise ValueError(f'{file}: expected {{"layers": [[count of each expert], ...]}} and nothing else')
    return layers


def _csv_layers(file: str, text: str) -> list[list]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [[int(cell) if cell.strip().isdecimal() else cell for cell in line.split(",")] for line in lines]


# --- distinct groups a token reaches --------------------------------------------------------------------------------------


def distinct_groups(num_groups, num_experts: int, top_k: int, limit: int | None = None):
    """How many distinct groups (nodes, ranks) does a token reach, in expectation, if every set of top_k experts is as likely?

    N(1 - C(E - E/N, k)/C(E, k)): the hypergeometric chance that a group is missed. num_groups: int or array of
    ints, each a divisor of num_experts; returns a float or an array of that shape. limit: the router looks at so many
    of the groups only (DeepSeek-V3, arXiv:2412.19437 section 2.1.2), so no more are reached. It picks groups for
    their best experts, so nearly all it looks at are reached: 3.96 of 4, sampled for E = 256, k = 8, N = 8.
    """
    groups = np.asarray(num_groups)
    if np.any(groups < 1) or np.any(num_experts % groups):
        raise ValueError(f"routing: {num_groups} groups must divide num_experts {num_experts}")
    _check_integers(num_experts, top_k)
    left = num_experts - num_experts // groups  # experts outside one group
    missed = np.ones(groups.shape)
    for i in range(top_k):
        missed = missed * np.maximum(left - i, 0) / (num_experts - i)
    reached = groups * (1 - missed)
    if limit is not None:
        reached = np.minimum(reached, limit)
    return float(reached) if groups.ndim == 0 else reached


def _check_integers(num_experts: int, top_k: int, *positive: int) -> None:
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"routing: top_k {top_k} must be between 1 and num_experts {num_experts}")
    for value in positive:
        if value < 1:
            raise ValueError(f"routing: layers, microbatches and tokens must be at least 1, got {value}")
