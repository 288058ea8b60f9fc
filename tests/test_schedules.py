"""Do the schedules equal torch's lists, run without deadlock, and have the published idle time and memory?

`python tests/test_schedules.py` rewrites tests/fixtures/schedules/*.txt from the torch that is installed.
"""
import logging
import os
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from moesim.schedules import LETTERS, SCHEDULES, Action, Pair, flatten, format_order, live_vectors, local_chunks, parse_order, place

FIXTURES = Path(__file__).parent / "fixtures" / "schedules"
TORCH_CLASSES = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
GOLDEN = {
    "gpipe": [(1, 2, 1), (3, 5, 1)],
    "1f1b": [(1, 2, 1), (2, 2, 1), (4, 4, 1), (4, 10, 1)],
    "interleaved": [(1, 3, 2), (2, 4, 3), (4, 3, 2), (4, 8, 2), (4, 10, 2)],
    "interleaved_zb": [(1, 3, 2), (2, 4, 3), (4, 3, 2), (4, 8, 1), (4, 8, 2)],
    "zbv": [(1, 3, 2), (2, 1, 2), (4, 3, 2), (4, 8, 2), (5, 13, 2)],
    "dualpipev": [(1, 2, 2), (2, 4, 2), (3, 7, 2), (4, 10, 2)],
}


def cases(name, pps=(1, 2, 3, 4, 7), microbatches=(1, 2, 3, 4, 6, 8, 12, 14, 21, 28)):
    """Legal (pp, microbatches, chunks) of a schedule."""
    schedule = SCHEDULES[name]
    grid = ((pp, m, v) for pp in pps for m in microbatches for v in (1, 2, 3, 4))
    return [ints for ints in grid if schedule.legal(*ints) is None]


# --- the same lists as torch ---------------------------------------------------------------------------------------


def torch_orders(name, pp, num_microbatches, num_chunks):
    """torch's pipeline_order as text lines, compute actions only; stages are dummies and no process group is made."""
    import torch
    from torch.distributed.pipelining import schedules

    logging.getLogger("torch.distributed.pipelining").setLevel(logging.ERROR)
    num_stages = pp * num_chunks
    stages = [
        SimpleNamespace(
            stage_index=s, num_stages=num_stages, group_size=pp, group_rank=0, submod=torch.nn.Identity(),
            is_first=s == 0, is_last=s == num_stages - 1, has_backward=True,
        )
        for s, rank in enumerate(SCHEDULES[name].placement(pp, num_chunks)) if rank == 0
    ]
    arg = stages[0] if num_chunks == 1 and name in ("gpipe", "1f1b") else stages
    order = getattr(schedules, TORCH_CLASSES[name])(arg, num_microbatches).pipeline_order
    compute = {"F", "B", "I", "W", "OVERLAP_F_B"}
    kept = [[str(a) for a in order[rank] if a is not None and a.computation_type.value in compute] for rank in range(pp)]
    return [" ".join(line).replace("OVERLAP_F_B", "").replace(";", "|") for line in kept]


def as_torch_prints(name, orders):
    """Our orders as text. torch 2.13 numbers the last rank's 1F1B forwards from 1 in the list it prints (its runtime,
    which does not read that list, starts at 0 as we do): the one difference, undone here."""
    lines = [format_order(order) for order in orders]
    if name == "1f1b":
        lines[-1] = format_order(a._replace(microbatch=a.microbatch + (a.letter == "F")) for a in orders[-1])
    return lines


def read_fixture(name):
    blocks = (FIXTURES / f"{name}.txt").read_text().split("\n\n")[1:]
    for block in blocks:
        head, *lines = block.strip().splitlines()
        yield tuple(int(part.split("=")[1]) for part in head.split()), lines


@pytest.mark.parametrize("name", SCHEDULES)
def test_orders_equal_the_lists_saved_from_torch(name):
    saved = dict(read_fixture(name))
    assert list(saved) == GOLDEN[name]
    for ints, lines in saved.items():
        assert as_torch_prints(name, SCHEDULES[name].orders(*ints)) == lines, ints


@pytest.mark.parametrize("name", SCHEDULES)
def test_orders_equal_torch(name):
    pytest.importorskip("torch")
    checked = 0
    for pp, m, v in cases(name, pps=(1, 2, 3, 4, 5, 8), microbatches=(1, 2, 3, 4, 5, 8, 10, 12, 16, 20, 32)):
        if name == "1f1b" and m < pp:
            continue  # torch refuses these; the replay below covers them
        assert as_torch_prints(name, SCHEDULES[name].orders(pp, m, v)) == torch_orders(name, pp, m, v), (pp, m, v)
        checked += 1
    assert checked >= 25


@pytest.mark.parametrize("name, ints", [
    ("1f1b", (4, 8, 2)), ("gpipe", (4, 8, 2)), ("interleaved", (4, 9, 2)), ("interleaved", (4, 8, 1)),
    ("interleaved_zb", (4, 9, 2)), ("zbv", (4, 8, 3)), ("dualpipev", (4, 7, 2)), ("dualpipev", (4, 8, 1)), ("1f1b", (0, 8, 1)), ("gpipe", (4, 0, 1)),
])
def test_illegal_integers_get_one_line(name, ints):
    reason = SCHEDULES[name].legal(*ints)
    assert reason.startswith(name) and "\n" not in reason
    with pytest.raises(ValueError, match=name):
        SCHEDULES[name].orders(*ints)


@pytest.mark.parametrize("name", ["interleaved", "interleaved_zb", "dualpipev"])
def test_torch_refuses_what_we_refuse(name):
    pytest.importorskip("torch")
    for pp, m in [(2, 3), (3, 5), (3, 7), (4, 7), (4, 9), (4, 10), (4, 12)]:
        if SCHEDULES[name].legal(pp, m, 2) is None:
            torch_orders(name, pp, m, 2)
        else:
            with pytest.raises(ValueError):
                torch_orders(name, pp, m, 2)


# --- any schedule ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_microbatch_runs_once_on_its_own_rank(name):
    for pp, m, v in cases(name):
        schedule, placement = SCHEDULES[name], SCHEDULES[name].placement(pp, v)
        seen = {}
        for rank, order in enumerate(schedule.orders(pp, m, v)):
            for action in flatten(order):
                assert placement[action.stage] == rank and action.letter in LETTERS
                seen.setdefault((action.stage, action.microbatch), []).append(action.letter)
        assert set(seen) == {(s, i) for s in range(pp * v) for i in range(m)}
        whole, split = ["F", "B"], ["F", "I", "W"]
        assert all(letters == whole or (schedule.splits_backward and letters == split) for letters in seen.values())
        assert any(letters == split for letters in seen.values()) == schedule.splits_backward


def needed(action, num_stages):
    """What must have ended, on any rank, before an action may start; I stands for the input gradient of B too."""
    stage, letter, m = action
    if letter == "F":
        return {(stage - 1, "F", m)} if stage else set()
    if letter == "W":
        return {(stage, "I", m)}
    return {(stage, "F", m)} | ({(stage + 1, "I", m)} if stage + 1 < num_stages else set())


def replay(orders, placement, seconds):
    """(first start, last end) of each rank when every rank works through its list as early as dependencies allow.
    seconds: by letter; a pair takes the sum of its two. AssertionError on a deadlock."""
    ended, clock, start, todo = {}, [0.0] * len(orders), {}, [list(order)[::-1] for order in orders]
    while any(todo):
        moved = False
        for rank, rest in enumerate(todo):
            while rest and (needs := set().union(*(needed(a, len(placement)) for a in flatten(rest[-1:])))) <= ended.keys():
                actions = list(flatten([rest.pop()]))
                begin = max([clock[rank], *(ended[need] for need in needs)])
                start.setdefault(rank, begin)
                clock[rank] = begin + sum(seconds[a.letter] for a in actions)
                for stage, letter, m in actions:
                    ended[stage, "I" if letter == "B" else letter, m] = clock[rank]
                moved = True
        assert moved, f"deadlock before {[str(rest[-1]) for rest in todo if rest]}"
    return [(start[rank], clock[rank]) for rank in range(len(orders))]


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_deadlock(name):
    for pp, m, v in cases(name):
        replay(SCHEDULES[name].orders(pp, m, v), SCHEDULES[name].placement(pp, v), {"F": 1, "B": 2, "I": 1, "W": 1})


def test_replay_finds_a_deadlock():
    orders = (parse_order("0F0 0B0 0F1 0B1"), parse_order("1F1 1B1 1F0 1B0"))
    with pytest.raises(AssertionError, match="deadlock"):
        replay(orders, (0, 1), {"F": 1, "B": 2})


# --- idle time, against the papers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seconds", [{"F": 1, "B": 2}, {"F": 0.37, "B": 1.91}])
def test_bubble_of_gpipe_and_1f1b(name, seconds):
    """Idle share (p-1)/(m+p-1): arXiv:1811.06965 section 2.3, arXiv:2104.04473 section 2.2.1."""
    for pp, m, v in cases(name):
        spans = replay(SCHEDULES[name].orders(pp, m, v), SCHEDULES[name].placement(pp, v), seconds)
        makespan = max(end for _, end in spans)
        assert 1 - m * (seconds["F"] + seconds["B"]) / makespan == pytest.approx((pp - 1) / (m + pp - 1), abs=1e-9)


def test_bubble_of_interleaved():
    """Idle time over work falls to (p-1)/(v*m): arXiv:2104.04473 section 2.2.2 (microbatches divisible by p)."""
    for pp, m, v in cases("interleaved"):
        if m % pp == 0:
            spans = replay(SCHEDULES["interleaved"].orders(pp, m, v), place("loop", pp, v), {"F": 1, "B": 2})
            assert max(end for _, end in spans) - m * v * 3 == pytest.approx(3 * (pp - 1), abs=1e-9)


def test_bubble_of_interleaved_zero_bubble():
    """ZB-H1 leaves (p-1)(F+I-W) idle: arXiv:2401.10241 table 2; with equal letters one unit a rank, at any chunks."""
    for pp, m, v in cases("interleaved_zb"):
        if m % pp == 0:
            spans = replay(SCHEDULES["interleaved_zb"].orders(pp, m, v), place("loop", pp, v), {"F": 1, "I": 1, "W": 1})
            assert max(end for _, end in spans) - m * v * 3 == pytest.approx(pp - 1, abs=1e-9)


def test_zbv_has_no_bubble_when_letters_are_equal():
    """arXiv:2401.10241 section 6: each rank is busy from its first action to its last."""
    for pp, m, v in cases("zbv"):
        if m >= 2 * pp - 1:
            for begin, end in replay(SCHEDULES["zbv"].orders(pp, m, v), place("v", pp, v), {"F": 1, "I": 1, "W": 1}):
                assert end - begin == pytest.approx(m * 6, abs=1e-9)


def test_bubble_of_dualpipev():
    """(p-1)(FB + B - 3W) idle on p ranks, FB the pair: https://github.com/deepseek-ai/DualPipe, table of methods,
    where PP counts stages, two a rank. Exact on rank 0 with F = I = W and FB = F + B; nearby otherwise."""
    for pp, m, v in cases("dualpipev"):
        spans = replay(SCHEDULES["dualpipev"].orders(pp, m, v), place("v", pp, v), {"F": 1, "B": 2, "I": 1, "W": 1})
        assert spans[0][1] - spans[0][0] - m * 6 == pytest.approx((pp - 1) * (3 + 2 - 3), abs=1e-9)


# --- live microbatches --------------------------------------------------------------------------------------------------


def peaks_by_hand(order, chunks, weights, weights_after_i):
    """Peak of sum(weights[chunk]) over microbatches before their B or I, and weights_after_i between I and W."""
    state, peak = {}, 0.0
    for stage, letter, m in flatten(order):
        if letter == "F":
            state[stage, m] = weights[chunks[stage]]
        peak = max(peak, sum(state.values()))
        if letter == "I":
            state[stage, m] = weights_after_i[chunks[stage]]
        elif letter in "BW":
            del state[stage, m]
    assert not state
    return peak


@pytest.mark.parametrize("name", SCHEDULES)
def test_live_vectors_give_the_peak_for_any_weights(name):
    rng = random.Random(5)
    for pp, m, v in cases(name, pps=(1, 3, 4), microbatches=(1, 3, 8, 12)):
        schedule = SCHEDULES[name]
        orders, chunks = schedule.orders(pp, m, v), local_chunks(schedule.placement(pp, v))
        whole, by_phase = schedule.live_vectors(pp, m, v), schedule.live_vectors(pp, m, v, by_phase=True)
        for rank, order in enumerate(orders):
            weights = [rng.random() for _ in range(v)]
            after_i = [w * rng.random() for w in weights]
            dot = max(sum(n * w for n, w in zip(vector, weights)) for vector in whole[rank])
            assert dot == pytest.approx(peaks_by_hand(order, chunks, weights, weights))
            dot = max(sum(n * w for n, w in zip(vector, weights + after_i)) for vector in by_phase[rank])
            assert dot == pytest.approx(peaks_by_hand(order, chunks, weights, after_i))


@pytest.mark.parametrize("name", SCHEDULES)
def test_live_vectors_dominate_nothing_among_themselves(name):
    for ints in cases(name, pps=(4,), microbatches=(8, 12)):
        for vectors in SCHEDULES[name].live_vectors(*ints):
            assert not any(a != b and all(x >= y for x, y in zip(a, b)) for a in vectors for b in vectors)


def most_live(name, pp, m, v):
    return [max(map(sum, vectors)) for vectors in SCHEDULES[name].live_vectors(pp, m, v)]


def test_published_in_flight_bounds():
    """GPipe m; 1F1B p - r (arXiv:2006.09503); interleaved one more than its warm-up (arXiv:2104.04473); ZB-H1 the
    p of 1F1B's first rank on every rank, ZBV 2p half chunks, p microbatches' worth (arXiv:2401.10241); DualPipeV
    PP + 1 = 2p + 1 chunks (https://github.com/deepseek-ai/DualPipe)."""
    assert most_live("gpipe", 4, 16, 1) == [16] * 4
    assert most_live("1f1b", 4, 16, 1) == [4, 3, 2, 1]
    assert most_live("1f1b", 4, 2, 1) == [2, 2, 2, 1]
    assert most_live("interleaved", 4, 16, 2) == [11, 9, 7, 5]
    assert most_live("interleaved_zb", 4, 16, 1) == [4] * 4
    assert most_live("zbv", 4, 16, 2) == [8] * 4
    assert most_live("dualpipev", 4, 16, 2) == [9] * 4


def test_live_vectors_count_both_of_a_pair():
    orders = (parse_order("0F0 1F0 (0F1|1B0) 0B0 1F1 1B1 0B1"),)
    assert live_vectors(orders, (0, 0), 2) == (((2, 1),),)


# --- text and placement --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_text_round_trips(name):
    for order in SCHEDULES[name].orders(4, 8):
        assert parse_order(format_order(order)) == order


def test_text_examples():
    assert parse_order("2F0, (2F1|5B1)") == (Action(2, "F", 0), Pair(Action(2, "F", 1), Action(5, "B", 1)))
    assert str(Pair(Action(2, "F", 0), Action(5, "B", 1))) == "(2F0|5B1)"
    for bad in ("2X0", "F0", "2F", "(2F0)", "(2F0|5B1|1W1)", "-1F0", "(2F0;5B1)"):
        with pytest.raises(ValueError, match="expected"):
            parse_order(f"0F0 {bad}")


def test_placement():
    assert SCHEDULES["interleaved"].placement(3, 2) == (0, 1, 2, 0, 1, 2)
    assert SCHEDULES["zbv"].placement(3) == (0, 1, 2, 2, 1, 0)
    assert local_chunks((0, 1, 2, 2, 1, 0)) == (0, 0, 0, 1, 1, 1)


def test_registry_names_itself():
    assert all(schedule.name == name for name, schedule in SCHEDULES.items())


@pytest.mark.full
def test_orders_are_fast():
    """pp=16, m=512, chunks=4 in 50 ms on a quiet core; the limit leaves room for busy ones."""
    for name in ("interleaved", "interleaved_zb"):
        begin = time.perf_counter()
        SCHEDULES[name].orders(16, 512, 4)
        assert time.perf_counter() - begin < 0.25


def write_fixtures():
    import torch

    FIXTURES.mkdir(parents=True, exist_ok=True)
    for name, grid in GOLDEN.items():
        head = f"# pipeline_order of torch {torch.__version__} {TORCH_CLASSES[name]}, compute actions only, a line a rank.\n"
        blocks = ("\n".join([f"pp={pp} microbatches={m} chunks={v}", *torch_orders(name, pp, m, v)]) for pp, m, v in grid)
        temporary = FIXTURES / f"{name}.tmp"
        temporary.write_text(head + "\n" + "\n\n".join(blocks) + "\n")
        os.replace(temporary, FIXTURES / f"{name}.txt")


if __name__ == "__main__":
    write_fixtures()
