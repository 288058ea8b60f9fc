"""Does the watchdog name the rank that holds up the others, within its limit, and does it keep still otherwise?"""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moetrain.hang_report import Issued, RankState, culprits, verdict, waits_for
from moetrain.testing import run_ranks
from moetrain.watchdog import EXIT_CODE, Watchdog

LIMIT = 3.0


def train(rank: int, world: int, folder: str, store: str, how: str) -> None:
    """A rank of a run: an all-reduce a step, noted as moetrain.collectives does; rank 1 fails in step 3."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    with Watchdog(folder, LIMIT, members={"data": list(range(world))}) as watchdog:
        for step in range(1000):
            watchdog.step(step)
            if rank == 1 and step == 3:
                time.sleep(1.8)  # long enough for what was done to be written down
                os.kill(os.getpid(), signal.SIGSTOP) if how == "stops" else sleep_in_the_wrong_place()
            watchdog.note("all_reduce", "loss", "data")
            dist.all_reduce(torch.ones(1))


def sleep_in_the_wrong_place() -> None:
    time.sleep(1000)


def started(world: int, tmp_path: Path, how: str):
    context = get_context("fork")
    ranks = [context.Process(target=train, args=(rank, world, str(tmp_path), str(tmp_path / "store"), how), daemon=True) for rank in range(world)]
    for process in ranks:
        process.start()
    return ranks


@pytest.mark.parametrize("how, words", [
    ("stops", "(stopped, killed or cut off); when last heard of, its last collective was all_reduce loss #3 over data in step 2"),
    ("sleeps", "its last collective was all_reduce loss #3 over data in step 2"),
])
def test_the_rank_that_hangs_is_named_in_time(tmp_path, how, words):
    ranks = started(2, tmp_path, how)
    began = time.monotonic()
    ranks[0].join(LIMIT + 10)
    assert ranks[0].exitcode == EXIT_CODE and time.monotonic() - began < LIMIT + 8
    if how == "sleeps":
        ranks[1].join(5)
        assert ranks[1].exitcode == EXIT_CODE
    ranks[1].kill()
    report = next(tmp_path.glob("*/hang-rank-00000.txt")).read_text()
    assert report.splitlines()[2].startswith("rank 1 is behind: ") and report.splitlines()[2].endswith(words)
    assert "rank 0: step 3, all_reduce loss #4 over data" in report and "waits for rank 1" in report
    assert "in train" in report and "all_reduce" in report.split("Python stacks")[1]
    if how == "sleeps":
        own = next(tmp_path.glob("*/hang-rank-00001.txt")).read_text()
        assert "in sleep_in_the_wrong_place" in own and own.splitlines()[2] == report.splitlines()[2]


def test_ranks_that_issue_different_collectives_are_told_apart(tmp_path):
    """gloo fails on some such pairs and hangs on others; what was written down names them either way."""
    def fn(rank, world):
        watchdog = Watchdog(tmp_path, 0.6, on_hang=lambda path: None)
        for _ in range(3):
            watchdog.note("all_reduce", "loss", "data")
        if rank == 0:
            watchdog.note("all_to_all", "dispatch", "ep")
            watchdog.note("all_reduce", "aux", "data")
        watchdog.note("all_reduce", "loss", "data")
        watchdog._thread.join(20)
        return next(watchdog.folder.glob(f"hang-rank-0000{rank}.txt")).read_text().splitlines()[2]

    for line in run_ranks(fn, 2):
        assert line == "rank 0 issued all_reduce aux #4 over data where rank 1 issued all_reduce loss #4 over data: they ran different code"


def test_a_run_that_moves_or_is_paused_is_left_alone_and_cleans_up(tmp_path):
    def fn(rank, world):
        fired = []
        watchdog = Watchdog(tmp_path, 1.0, on_hang=fired.append)
        for number in range(4):
            time.sleep(0.3)
            watchdog.step(number)
        with watchdog.paused("validation"), watchdog.paused("compilation"):
            time.sleep(1.5)
        time.sleep(0.3)
        dist.barrier()
        watchdog.close()
        return fired

    assert run_ranks(fn, 2) == [[], []]
    assert list(tmp_path.iterdir()) == []


def test_one_alarm_is_everyone_s_even_one_that_is_paused(tmp_path):
    def fn(rank, world):
        watchdog = Watchdog(tmp_path, 0.5, on_hang=lambda path: None)
        if rank == 0:
            watchdog.note("all_reduce", "loss", "data")
            watchdog._thread.join(20)
        else:
            with watchdog.paused("a checkpoint's loading"):
                watchdog._thread.join(20)
        return next(watchdog.folder.glob(f"hang-rank-0000{rank}.txt")).read_text()

    first, second = run_ranks(fn, 2)
    assert "no collective and no step for" in first.splitlines()[0] and "another rank raised the alarm" in second.splitlines()[0]
    assert "rank 1: step 0, no collective; paused: a checkpoint's loading" in first


def test_a_hang_with_the_interpreter_s_lock_held_ends_too(tmp_path, monkeypatch):
    """No Python thread runs then: faulthandler's own does. (A regular expression that backtracks for ever holds the lock.)"""
    def fn():
        monkeypatch.setattr("moetrain.watchdog.LOCKED_S", 0.5)
        Watchdog(tmp_path, 0.4)
        time.sleep(0.2)
        re.match("(a+)+b", "a" * 60)

    process = get_context("fork").Process(target=fn, daemon=True)
    process.start()
    process.join(20)
    assert process.exitcode == 1 and "in fn" in next(tmp_path.glob("*/stacks-rank-00000.txt")).read_text()


def test_a_rank_that_ends_by_an_error_says_why(tmp_path):
    def fn(rank, world):
        try:
            with Watchdog(tmp_path, 0.5, on_hang=lambda path: None) as watchdog:
                watchdog.step(7)
                if rank == 1:
                    raise ValueError("no such\nfile")
                watchdog._thread.join(20)
        except ValueError:
            return ""
        return next(watchdog.folder.glob("hang-rank-00000.txt")).read_text().splitlines()[2]

    assert run_ranks(fn, 2)[0] == "rank 1 is behind: it ended in step 7: ValueError: no such file"


def test_one_process_alone(tmp_path):
    fired = []
    watchdog = Watchdog(tmp_path, 0.2, on_hang=fired.append)
    watchdog._thread.join(20)
    assert fired == [watchdog.folder / "hang-rank-00000.txt"]
    assert fired[0].read_text().splitlines()[2].startswith("no rank is behind: all are before any collective")
    with pytest.raises(ValueError, match="watchdog_s is 0; a number of seconds above 0"):
        Watchdog(tmp_path, 0)


def test_a_note_costs_microseconds(tmp_path):
    watchdog = Watchdog(tmp_path, 60)
    began = time.perf_counter()
    for _ in range(10_000):
        watchdog.note("all_to_all", "dispatch", "ep")
    assert (time.perf_counter() - began) / 10_000 < 50e-6
    watchdog.close()


# --- the verdict, from made-up states ---------------------------------------------------------------------------------------


def state(rank: int, *issued: str, members=None, **more) -> RankState:
    """``issued``: names of groups, in order."""
    counts: dict[str, int] = {}
    last = []
    for number, group in enumerate(issued):
        counts[group] = counts.get(group, 0) + 1
        last.append(Issued("all_reduce", "x", group, counts[group], 0, float(number)))
    return RankState(rank, counts=counts, last=last, members=members or {}, **more)


def test_the_root_of_a_chain_of_waits():
    """0 waits for 1 over ep; 2 and 3 wait for 0 over dp: rank 1 is to blame, though rank 0 is behind too."""
    pairs = {0: {"ep": [0, 1], "dp": [0, 2]}, 1: {"ep": [0, 1], "dp": [1, 3]}, 2: {"ep": [2, 3], "dp": [0, 2]}, 3: {"ep": [2, 3], "dp": [1, 3]}}
    states = {0: state(0, "dp", "ep", members=pairs[0]), 1: state(1, "dp", members=pairs[1]),
              2: state(2, "dp", "ep", "dp", members=pairs[2]), 3: state(3, "dp", "ep", "dp", members=pairs[3])}
    assert {rank: waits_for(states, rank) for rank in states} == {0: {1}, 1: set(), 2: {0}, 3: {1}}
    assert culprits(states, 4) == [1]


def test_a_circle_names_all_in_it():
    states = {0: state(0, "a", "b", members={"a": [0, 1], "b": [0, 1]}), 1: state(1, "a", "c", members={"a": [0, 1], "c": [0, 1]})}
    states[0] = replace(states[0], last=[*states[0].last])
    assert culprits(states, 2) == [0, 1]


def test_ranks_that_never_wrote_and_ranks_gone_silent():
    assert verdict({0: state(0, "a", members={"a": [0, 1]})}, 2) == "rank 1 is behind: it never wrote a word"
    states = {0: state(0, "a", "a"), 1: replace(state(1, "a"), silent_s=40.0), 2: replace(state(2, "a"), silent_s=41.0)}
    assert verdict(states, 3).startswith("rank 1 and 1 more (ranks 1-2) are behind: silent for 40 s")


def test_all_in_the_same_collective():
    assert verdict({0: state(0, "a"), 1: state(1, "a")}, 2).startswith("no rank is behind: all are in all_reduce x #1 over a; a device or the network")
