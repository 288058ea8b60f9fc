"""Whose end does each action of a program wait for? (Shared by the evaluators; integers only, no seconds.)

An entry is one action or pair at one position of one rank's order; entries are numbered rank after rank. Slot 2*entry + j is
what the j-th action of an entry produces. Everything here follows from `orders`, `placement` and `peers`, so it is worked out
once for a structure and remembered by the identity of those tuples (schedules hand out the same tuple again).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from moesim.program import SEND_NEXT, SEND_PREV, Entry, Program
from moesim.schedules import Action, Pair, local_chunks

AT_PROLOGUE, AT_EPILOGUE = -1, -2
"""Positions of the two ends of a step, where an entry's position is meant."""
_REMEMBERED = 256


@dataclass(frozen=True)
class Wiring:
    """source[entry] = the two slots its actions wait for, -1 where none. target[slot] = the slot (2*entry + j) of the action
    that waits for it, -1 where nobody does. stream[slot] = SEND_NEXT or SEND_PREV where a transfer to another rank lies
    between, else -1. first[rank] = number of its entry at position 0; opens[entry] = local chunks whose first action it is;
    closes[rank][chunk] = entry of the chunk's last backward (B, I or W)."""

    first: tuple[int, ...]
    rank: tuple[int, ...]
    source: tuple[tuple[int, int], ...]
    target: tuple[int, ...]
    stream: tuple[int, ...]
    opens: dict[int, tuple[int, ...]]
    closes: tuple[dict[int, int], ...]

    @property
    def num_entries(self) -> int:
        return len(self.rank)

    @cached_property
    def waits(self) -> tuple[tuple[frozenset[int], ...], ...]:
        """waits[rank][position] = which of inputs 0 and 1 the entry waits for."""
        sets = [frozenset(j for j in (0, 1) if slots[j] >= 0) for slots in self.source]
        return tuple(tuple(sets[a:b]) for a, b in zip(self.first, (*self.first[1:], len(sets))))

    @cached_property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """Entries by depth: an entry needs only entries of earlier levels, and a level holds at most one entry of a rank.
        ValueError if the orders wait for each other in a ring."""
        return _levels(self)


_known: dict[tuple[int, int, int], tuple[tuple, Wiring]] = {}


def wiring(program: Program) -> Wiring:
    """The wiring of a program. ValueError (one line) where the orders are not a legal set."""
    return wire(program.orders, program.placement, program.peers)


def wire(orders: tuple[tuple[Entry, ...], ...], placement: tuple[int, ...], peers: int = 1) -> Wiring:
    """As `wiring`, from its parts."""
    key = (id(orders), id(placement), peers)
    if key in _known:
        return _known[key][1]
    made = _wire(orders, placement, peers)
    while len(_known) >= _REMEMBERED:
        _known.pop(next(iter(_known)))
    _known[key] = ((orders, placement), made)  # holding the tuples keeps their ids theirs
    return made


def check(program: Program) -> Wiring:
    """The wiring, after checking that bodies fit it. ValueError names the rank and position that don't."""
    wires = wiring(program)
    inputs = [frozenset(task.input for task in body) for body in program.bodies]
    for r, (order, indices) in enumerate(zip(program.orders, program.body_index, strict=True)):
        if len(order) != len(indices):
            raise ValueError(f"rank {r}: {len(order)} actions but {len(indices)} bodies")
        for k, waits in set(zip(indices, wires.waits[r])):
            if not waits <= inputs[k]:
                at = next(i for i, pair in enumerate(zip(indices, wires.waits[r])) if pair == (k, waits))
                raise ValueError(f"{order[at]} on rank {r}: body {k} has no task with the input that the action waits for")
    return wires


def actions(entry: Entry) -> tuple[Action, ...]:
    return tuple(entry) if isinstance(entry, Pair) else (entry,)


def _wire(orders, placement, peers) -> Wiring:
    first, rank, flat = [], [], []
    for r, order in enumerate(orders):
        first.append(len(flat))
        flat += [actions(entry) for entry in order]
        rank += [r] * len(order)
    made = _producers(flat, rank, placement, peers)
    source, target, stream = [], [-1] * (2 * len(flat)), [-1] * (2 * len(flat))
    for e, entry in enumerate(flat):
        slots = [-1, -1]
        for j, action in enumerate(entry):
            needed = _needs(action, len(placement) - 1)
            if needed is None:
                continue
            slot = made.get((*needed, rank[e] % peers))
            if slot is None:
                raise ValueError(f"{action} on rank {rank[e]} waits for {needed[0]}{needed[1]}{needed[2]}, which no rank runs")
            if slot >> 1 == e:
                raise ValueError(f"{action} on rank {rank[e]} waits for the other half of its own pair")
            slots[j], target[slot] = slot, 2 * e + j
            if rank[slot >> 1] != rank[e]:
                stream[slot] = SEND_NEXT if needed[1] == "F" else SEND_PREV
        source.append((slots[0], slots[1]))
    opens, closes = _chunk_ends(flat, rank, len(orders), placement)
    return Wiring(tuple(first), tuple(rank), tuple(source), tuple(target), tuple(stream), opens, closes)


def _producers(flat, rank, placement, peers) -> dict[tuple[int, str, int, int], int]:
    """(stage, "F" or "B", microbatch, peer) -> slot; I counts as B. Checks that each action runs once, on its own rank."""
    made: dict[tuple[int, str, int, int], int] = {}
    for e, entry in enumerate(flat):
        for j, action in enumerate(entry):
            if not 0 <= action.stage < len(placement):
                raise ValueError(f"{action}: there are stages 0..{len(placement) - 1}")
            peer = rank[e] % peers
            if placement[action.stage] + peer != rank[e]:
                raise ValueError(f"{action} is ordered on rank {rank[e]}, but stage {action.stage} lives on rank {placement[action.stage] + peer}")
            key = (action.stage, "B" if action.letter == "I" else action.letter, action.microbatch, peer)
            if key in made:
                raise ValueError(f"{action} is ordered twice on rank {rank[e]}")
            made[key] = 2 * e + j
    return made


def _needs(action: Action, last: int) -> tuple[int, str, int] | None:
    if action.letter == "F":
        return (action.stage - 1, "F", action.microbatch) if action.stage else None
    if action.letter == "W":
        return None
    if action.stage == last:
        return (last, "F", action.microbatch)
    return (action.stage + 1, "B", action.microbatch)


def _chunk_ends(flat, rank, num_ranks, placement):
    chunk_of = local_chunks(placement)
    opens: dict[int, tuple[int, ...]] = {}
    seen: set[tuple[int, int]] = set()
    closes: tuple[dict[int, int], ...] = tuple({} for _ in range(num_ranks))
    for e, entry in enumerate(flat):
        for action in entry:
            chunk = chunk_of[action.stage]
            if (rank[e], chunk) not in seen:
                seen.add((rank[e], chunk))
                opens[e] = (*opens.get(e, ()), chunk)
            if action.letter != "F":
                closes[rank[e]][chunk] = e
    return opens, closes


def _levels(wires: Wiring) -> tuple[tuple[int, ...], ...]:
    ends = [*wires.first[1:], wires.num_entries]
    position = list(wires.first)
    level: list[int] = [-1] * wires.num_entries
    by_level: list[list[int]] = []
    moved = True
    while moved:
        moved = False
        for r, end in enumerate(ends):
            e = position[r]
            while e < end and _placed(wires.source[e], level):
                before = level[e - 1] if e > wires.first[r] else -1
                level[e] = 1 + max(before, *(level[slot >> 1] if slot >= 0 else -1 for slot in wires.source[e]))
                if level[e] == len(by_level):
                    by_level.append([])
                by_level[level[e]].append(e)
                e += 1
                moved = True
            position[r] = e
    stuck = [f"rank {r} at position {e - wires.first[r]}" for r, (e, end) in enumerate(zip(position, ends)) if e < end]
    if stuck:
        raise ValueError(f"deadlock: the orders wait for each other in a ring: {', '.join(stuck[:4])}")
    return tuple(map(tuple, by_level))


def _placed(slots: tuple[int, int], level: list[int]) -> bool:
    return all(slot < 0 or level[slot >> 1] >= 0 for slot in slots)


def closing(wires: Wiring, rank: int, chunk: int) -> int:
    """Entry of the last backward of a local chunk; ValueError if the rank runs none."""
    if chunk not in wires.closes[rank]:
        raise ValueError(f"rank {rank}: the epilogue waits for the last backward of chunk {chunk}, which it doesn't run")
    return wires.closes[rank][chunk]


def barriers(program: Program) -> tuple[int, ...]:
    """Barrier numbers in order; ValueError unless every rank's epilogue has the same ones."""
    lists = {tuple(task.barrier for task in body if task.barrier >= 0) for body in program.epilogue}
    if len(lists) > 1:
        raise ValueError("deadlock: ranks have different barriers in their epilogues, so some would wait for ever")
    return next(iter(lists), ())


def rendezvous(program: Program) -> dict[tuple, tuple[int, ...]]:
    """(position, group) or ("barrier", number) -> the ranks that meet there, each once."""
    meetings: dict[tuple, list[int]] = {("barrier", number): list(range(program.num_ranks)) for number in barriers(program)}
    grouped = [tuple(task.group for task in body if task.group >= 0) for body in program.bodies]
    for r, indices in enumerate(program.body_index):
        for i, k in enumerate(indices):
            _join(meetings, r, i, grouped[k])
    for position, bodies in ((AT_PROLOGUE, program.prologue), (AT_EPILOGUE, program.epilogue)):
        for r, body in enumerate(bodies):
            _join(meetings, r, position, tuple(task.group for task in body if task.group >= 0))
    return {key: tuple(ranks) for key, ranks in meetings.items()}


def _join(meetings: dict[tuple, list[int]], rank: int, position: int, groups: tuple[int, ...]) -> None:
    if len(set(groups)) < len(groups):
        raise ValueError(f"rank {rank} at position {position}: a body meets the same group twice; give each collective its own number")
    for group in groups:
        meetings.setdefault((position, group), []).append(rank)
