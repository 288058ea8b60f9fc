"""In which order does each pipeline rank run its microbatches?

A schedule turns integers (ranks, microbatches, chunks a rank) into one list of actions a rank. An action is one
piece of work of one virtual stage on one microbatch: `2F0` is the forward of stage 2 on microbatch 0. Letters:
F forward, B whole backward, I gradient of the input alone, W gradient of the weights alone. `(2F0|5B1)` is a pair
whose work may overlap. Idle time is not an action: it follows from dependencies and durations, which are not known here.

Virtual stages are numbered along the model, 0 .. pp*num_chunks-1; `placement` says which rank holds each one:
"loop" gives stage s to rank s % pp, "v" walks down the ranks and back up, so rank 0 holds the first and the last stage.
"""
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from operator import ge
from typing import Literal, NamedTuple

LETTERS = "FBIW"
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_PAIR = re.compile(r"\((\d+[FBIW]\d+)\|(\d+[FBIW]\d+)\)")


class Action(NamedTuple):
    """One piece of work: `stage` is the virtual stage, `letter` one of F B I W."""

    stage: int
    letter: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}{self.microbatch}"


class Pair(NamedTuple):
    """Two actions of one rank that run together; where they can't, `first` goes before `second`."""

    first: Action
    second: Action

    def __str__(self) -> str:
        return f"({self.first}|{self.second})"


Order = tuple[Action | Pair, ...]


def flatten(order: Iterable[Action | Pair]) -> Iterator[Action]:
    """The actions of an order one by one, a pair as its first then its second."""
    for item in order:
        if isinstance(item, Pair):
            yield from item
        else:
            yield item


def format_order(order: Iterable[Action | Pair]) -> str:
    """One rank's order as text: `0F0 0F1 (0F2|0B0) 0B1`. parse_order is its inverse."""
    return " ".join(map(str, order))


def parse_order(text: str) -> Order:
    """One rank's order from text (blanks or commas between items). ValueError names the first item it can't read."""
    return tuple(map(_parse_item, text.replace(",", " ").split()))


def _parse_item(token: str) -> Action | Pair:
    if match := _ACTION.fullmatch(token):
        return Action(int(match[1]), match[2], int(match[3]))
    if match := _PAIR.fullmatch(token):
        return Pair(_parse_item(match[1]), _parse_item(match[2]))
    raise ValueError(f"action {token!r}: expected a stage, a letter of {LETTERS} and a microbatch such as 2F0, or a pair such as (2F0|5B1)")


@dataclass(frozen=True)
class Schedule:
    """A named rule. `rank_order(rank, pp, num_microbatches, num_chunks)` is asked for legal integers only;
    `refuse(pp, num_microbatches, num_chunks)` gives the one-line reason why integers are not legal, or None."""

    name: str
    rank_order: Callable[[int, int, int, int], Iterable[Action | Pair]]
    refuse: Callable[[int, int, int], str | None]
    shape: Literal["loop", "v"] = "loop"
    num_chunks: int = 1
    splits_backward: bool = False

    def legal(self, pp: int, num_microbatches: int, num_chunks: int) -> str | None:
        """None, or one line saying why this schedule can't run these integers."""
        for label, value in (("pp", pp), ("microbatches", num_microbatches), ("chunks", num_chunks)):
            if value < 1:
                return f"{self.name}: {label} must be at least 1, got {value}"
        reason = self.refuse(pp, num_microbatches, num_chunks)
        return f"{self.name}: {reason}" if reason else None

    def orders(self, pp: int, num_microbatches: int, num_chunks: int | None = None) -> tuple[Order, ...]:
        """Every rank's order, by rank. ValueError with the reason where `legal` gives one."""
        return _orders(self, pp, num_microbatches, self.num_chunks if num_chunks is None else num_chunks)

    def placement(self, pp: int, num_chunks: int | None = None) -> tuple[int, ...]:
        """The rank of each virtual stage, [pp*num_chunks]."""
        return place(self.shape, pp, self.num_chunks if num_chunks is None else num_chunks)

    def live_vectors(self, pp: int, num_microbatches: int, num_chunks: int | None = None, *, by_phase: bool = False):
        """`live_vectors` of this schedule's orders, remembered by its integers."""
        return _live_vectors(self, pp, num_microbatches, self.num_chunks if num_chunks is None else num_chunks, by_phase)


def place(shape: str, pp: int, num_chunks: int) -> tuple[int, ...]:
    """The rank of each virtual stage, [pp*num_chunks]: "loop" restarts at rank 0 for each chunk, "v" turns round."""
    assert shape in ("loop", "v"), shape
    down = tuple(range(pp))
    up = down[::-1] if shape == "v" else down
    return tuple(rank for chunk in range(num_chunks) for rank in (up if chunk % 2 else down))


def local_chunks(placement: tuple[int, ...]) -> tuple[int, ...]:
    """For each virtual stage, how many earlier stages its rank holds: its chunk index on that rank."""
    seen: dict[int, int] = {}
    chunks = []
    for rank in placement:
        chunks.append(seen.get(rank, 0))
        seen[rank] = chunks[-1] + 1
    return tuple(chunks)


@lru_cache(maxsize=64)
def _orders(schedule: Schedule, pp: int, num_microbatches: int, num_chunks: int) -> tuple[Order, ...]:
    if reason := schedule.legal(pp, num_microbatches, num_chunks):
        raise ValueError(reason)
    return tuple(tuple(schedule.rank_order(rank, pp, num_microbatches, num_chunks)) for rank in range(pp))


def live_vectors(
    orders: tuple[Order, ...], placement: tuple[int, ...], num_chunks: int, *, by_phase: bool = False
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """How many microbatches' activations does a rank hold at its worst moments?

    Returns, for each rank, the Pareto-maximal counts over the step, largest sum first. One count a local chunk:
    microbatches whose forward is done and whose B (or W, where backward is split) is not; the peak bytes are the
    maximum over the vectors of the dot product with any bytes a chunk. An action's own microbatch counts while it
    runs; both of a pair's do.

    by_phase: twice as many counts, first the microbatches before their B or I, then those after I and before W,
    which hold what the weight gradient needs. That is never more than before I, so a vector is left out also where
    another has as many of both phases together and as many of the first.
    """
    assert len(placement) == len(orders) * num_chunks, (len(placement), len(orders), num_chunks)
    chunks = local_chunks(placement)
    if not by_phase:
        return tuple(_maximal({held for _, held in _peaks(order, chunks, num_chunks)}) for order in orders)
    found = (_maximal({stored + held for stored, held in _peaks(order, chunks, num_chunks)}) for order in orders)
    return tuple(tuple(_split_phases(vector, num_chunks) for vector in vectors) for vectors in found)


def _split_phases(vector: tuple[int, ...], num_chunks: int) -> tuple[int, ...]:
    stored, held = vector[:num_chunks], vector[num_chunks:]
    return stored + tuple(h - s for s, h in zip(stored, held))


def _peaks(order: Order, chunks: tuple[int, ...], num_chunks: int) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(before B or I, before B or W) by local chunk, wherever a count is about to fall: no other moment can be a maximum."""
    stored, held = [0] * num_chunks, [0] * num_chunks
    peaks = set()
    for stage, letter, _ in flatten(order):
        chunk = chunks[stage]
        if letter == "F":
            stored[chunk] += 1
            held[chunk] += 1
            continue
        peaks.add((tuple(stored), tuple(held)))
        stored[chunk] -= letter in "BI"
        held[chunk] -= letter in "BW"
    return peaks | {(tuple(stored), tuple(held))}


def _maximal(vectors: set[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    kept: list[tuple[int, ...]] = []
    for vector in sorted(vectors, key=lambda v: (-sum(v), v)):  # nothing later can dominate what is kept
        if not any(all(map(ge, other, vector)) for other in kept):
            kept.append(vector)
    return tuple(kept)


@lru_cache(maxsize=4096)
def _live_vectors(schedule: Schedule, pp: int, num_microbatches: int, num_chunks: int, by_phase: bool):
    orders = schedule.orders(pp, num_microbatches, num_chunks)
    return live_vectors(orders, schedule.placement(pp, num_chunks), num_chunks, by_phase=by_phase)


# Below the vocabulary, because each schedule's file reads it from here.
from moesim.schedules import dualpipe, gpipe, interleaved, one_f_one_b, zero_bubble  # noqa: E402

SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule("gpipe", gpipe.rank_order, gpipe.refuse),
    "1f1b": Schedule("1f1b", one_f_one_b.rank_order, one_f_one_b.refuse),
    "interleaved": Schedule("interleaved", interleaved.rank_order, interleaved.refuse, num_chunks=2),
    "interleaved_zb": Schedule("interleaved_zb", interleaved.rank_order_zero_bubble, interleaved.refuse_zero_bubble, num_chunks=2, splits_backward=True),
    "zbv": Schedule("zbv", zero_bubble.rank_order, zero_bubble.refuse, shape="v", num_chunks=2, splits_backward=True),
    "dualpipev": Schedule("dualpipev", dualpipe.rank_order, dualpipe.refuse, shape="v", num_chunks=2, splits_backward=True),
}
