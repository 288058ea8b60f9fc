"""Is a pair played on arrays the pair itself where nothing but its own work is in the way, and never more than it?"""

import random

import numpy as np
import pytest

from moesim.assembly import interleave
from moesim.critical import PAIR_TIMES
from moesim.overlap import join, merged_order, pieces, play_pair
from moesim.play import play
from moesim.program import COMM, COMPUTE, Program, Task
from moesim.schedules import Action, Pair


def random_items(rng, num):
    """(kind, seconds) of a body: runs of compute, now and then collectives behind them; it begins and ends with compute."""
    items = [("c", rng.uniform(0.05, 1.0))]
    for _ in range(num):
        items += [("m", rng.uniform(0.01, 2.0))] * rng.randint(0, 2) + [("c", rng.uniform(0.05, 1.0))]
    return items


def body(items, slot):
    tasks, last = [], -1
    for kind, seconds in items:
        if kind == "c":
            deps = tuple(i for i in range(last + 1, len(tasks)) if tasks[i].stream == COMM)
            tasks.append(Task("c", "gemm", COMPUTE, seconds, deps=deps))
            last = len(tasks) - 1
        else:
            tasks.append(Task("m", "dispatch", COMM, seconds, deps=(last,)))
    return tuple(Task(t.name, t.kind, t.stream, t.seconds, deps=t.deps, input=slot if i == 0 else -1, output=slot if i == last else -1) for i, t in enumerate(tasks))


def pair_seconds(first, second):
    """The pair alone on a rank, its inputs there from the beginning."""
    empty = body([("c", 0.0)], 0)
    program = Program(orders=((Action(0, "F", 0), Pair(Action(0, "F", 1), Action(0, "B", 0)), Action(0, "B", 1)),), placement=(0,),
                      body_index=((0, 1, 0),), bodies=(empty, interleave(body(first, 0), body(second, 1))))
    return play(program).makespan


def on_arrays(items):
    return [(np.array([c]), np.array([m]) if m else None) for c, m in pieces(work(items))]


def work(items):
    return [(kind == "c", seconds) for kind, seconds in items]


@pytest.mark.parametrize("seed", range(40))
def test_played_on_arrays_is_the_pair(seed):
    rng = random.Random(seed)
    first, second = (random_items(rng, rng.randint(0, 9)) for _ in range(2))
    ways = play_pair(on_arrays(first), on_arrays(second))
    assert ways.shape == (PAIR_TIMES, 1)
    assert ways[0, 0] == pytest.approx(pair_seconds(first, second), rel=1e-12)
    compute, comm = (sum(s for k, s in first + second if k == kind) for kind in "cm")
    assert max(compute, comm) * (1 - 1e-12) <= ways[0, 0] <= (compute + comm) * (1 + 1e-12)
    assert (ways[2] <= ways[0] * (1 + 1e-12)).all() and (ways[3:5] <= ways[0] * (1 + 1e-12)).all(), "later inputs and outputs see a part of the pair"
    assert (ways[7] <= ways[3] * (1 + 1e-12)).all() and (ways[8] <= ways[4] * (1 + 1e-12)).all()


def test_order_is_the_one_that_bodies_are_interleaved_in():
    rng = random.Random(3)
    for _ in range(50):
        first, second = (random_items(rng, rng.randint(0, 9)) for _ in range(2))
        a, b = body(first, 0), body(second, 1)
        marked = [Task(f"{side}:{i}", t.kind, t.stream, t.seconds, deps=t.deps) for side, whole in enumerate((a, b)) for i, t in enumerate(whole)]
        out = [t.name for t in interleave(tuple(marked[: len(a)]), tuple(marked[len(a):])) if t.stream == COMPUTE]
        sides = [int(name[0]) for name in out]
        counts = [len(pieces(work(items))) for items in (first, second)]
        flat = [side for side, i in merged_order(*counts) for _ in range(len(runs_of((a, b)[side])[i]))]
        assert sides == flat


def runs_of(whole):
    """Compute tasks of each piece."""
    out = [[]]
    for i, task in enumerate(whole):
        if task.stream == COMPUTE:
            if i and whole[i - 1].stream == COMM and out[-1]:
                out.append([])
            out[-1].append(task)
    return out


def test_compute_runs_on_where_no_collective_stands_between():
    v = lambda x: np.array([float(x)])  # noqa: E731
    joined = join([[(v(1), None)], [(v(2), v(3))], [(v(4), None)], [(v(5), None)]])
    assert [(float(c[0]), m if m is None else float(m[0])) for c, m in joined] == [(3.0, 3.0), (9.0, None)]
