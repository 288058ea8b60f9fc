"""Is the closed form of an overlapped pair a lower bound of the pair, and exact where nothing queues?"""

import random

import numpy as np
import pytest

from moesim.assembly import interleave
from moesim.overlap import Alternation, pieces
from moesim.play import play
from moesim.program import COMM, COMPUTE, Program, Task
from moesim.schedules import Action, Pair


def layers(rng, n, scale):
    """Bodies of n MoE layers and what the closed form needs of them; half the time short collectives that never queue."""
    one = lambda top=1.0: rng.uniform(0.05, top)  # noqa: E731
    f, b = [one() for _ in range(3)], [one() for _ in range(3)]
    fc, bc = [one(scale) for _ in range(2)], [one(scale) for _ in range(2)]
    fa, ba, f_lead, f_tail, b_lead, b_tail = (one() for _ in range(6))
    forward = [("c", f_lead)] + [t for _ in range(n) for t in (("c", fa), ("c", f[0]), ("m", fc[0]), ("c", f[1]), ("m", fc[1]), ("c", f[2]))] + [("c", f_tail)]
    backward = [("c", b_tail)] + [t for _ in range(n) for t in (("c", b[0]), ("m", bc[0]), ("c", b[1]), ("m", bc[1]), ("c", b[2]), ("c", ba))] + [("c", b_lead)]
    total = lambda ts: sum(s for k, s in ts if k == "c")  # noqa: E731
    column = lambda v: np.array([[v]])  # noqa: E731
    row = lambda vs: np.array([[v] for v in vs])  # noqa: E731
    form = Alternation(f=row(f), b=row(b), f_comm=row(fc), b_comm=row(bc), f_attention=np.array([fa]), b_attention=np.array([ba]), f_lead=column(f_lead),
                       f_tail=column(f_tail), b_lead=column(b_lead), b_tail=column(b_tail), f_compute=column(total(forward)), b_compute=column(total(backward)),
                       layers=np.array([n]), valid=np.array([[True]]))
    return forward, backward, form


def body(items, slot):
    tasks, last = [], -1
    for kind, seconds in items:
        if kind == "c":
            deps = (len(tasks) - 1,) if tasks and tasks[-1].stream == COMM else ()
            tasks.append(Task("c", "gemm", COMPUTE, seconds, deps=deps))
            last = len(tasks) - 1
        else:
            tasks.append(Task("m", "dispatch", COMM, seconds, deps=(last,)))
    return tuple(Task(t.name, t.kind, t.stream, t.seconds, deps=t.deps, input=slot if i == 0 else -1, output=slot if i == last else -1) for i, t in enumerate(tasks))


def pair_seconds(forward, backward):
    """The pair alone on a rank: its forward is that of a stage in the middle whose backward meets it."""
    first, second = Action(0, "F", 1), Action(0, "B", 0)
    one = Program(orders=((Action(0, "F", 0), Pair(first, second), Action(0, "B", 1)),), placement=(0,),
                  body_index=((0, 1, 2),), bodies=(body([("c", 0.0)], 0), interleave(body(forward, 0), body(backward, 1)), body([("c", 0.0)], 0)))
    return play(one).makespan


@pytest.mark.parametrize("scale", [0.04, 1.0, 3.0])
def test_closed_form_bounds_the_pair(scale):
    rng = random.Random(scale)
    ratios = []
    for _ in range(60):
        forward, backward, form = layers(rng, rng.randint(1, 5), scale)
        least, actual = float(form.ways(0, 0)[0, 0]), pair_seconds(forward, backward)
        assert least <= actual * (1 + 1e-12)
        ratios.append(least / actual)
    if scale < 0.05:  # every collective ends under the run beside it: the pair is all of its compute
        assert min(ratios) == pytest.approx(1.0, rel=1e-12)
    assert np.median(ratios) > 0.88


def test_unequal_stages_have_no_closed_form():
    _, _, form = layers(random.Random(1), 2, 1.0)
    assert np.isneginf(Alternation(**{**vars(form), "layers": np.array([2, 3]), "valid": np.array([[True, True]])}).ways(0, 1)).all()


def test_pieces_end_where_a_collective_stands():
    tasks = body([("c", 1.0), ("c", 2.0), ("m", 0.5), ("m", 0.25), ("c", 4.0)], 0)
    assert pieces(tasks) == [(3.0, 0.75), (4.0, 0.0)]
    assert pieces(tasks[2:]) == []
