"""Does a run that was interrupted, moved to other ranks, fed a bad step or given bad input end where it should?"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import events, extra_of, kept, losses, mounted, run, runs, scenario_file, shards, steps, texts

from moesim.layout import parse_layout
from moetrain import checkpoint, step, train
from moetrain.checkpoint import Checkpointer
from moetrain.observe import manifest
from moetrain.observe.metrics import FILE, read_lines
from moetrain.observe.verify import sound, verify
from moetrain.testing import run_ranks

ROOT = Path(__file__).resolve().parent.parent


def tell(number: int, rank: int):
    """A hook: sends a signal to one rank."""
    return lambda run: os.kill(os.getpid(), number) if run.seat.rank == rank else None


def verified(folder: Path) -> bool:
    return sound(verify(folder))


# --- interrupted and resumed at the same layout ---------------------------------------------------------------------------------


def whole_and_first_half(rank, world, layout, folder, sets):
    """Two undisturbed runs, and one that is told to stop in step 3."""
    codes = [run(rank, world, layout, folder / name, sets) for name in ("whole", "again")]
    return [*codes, run(rank, world, layout, folder / "halved", sets, [("one_step", 3, tell(signal.SIGTERM, world - 1))])]


@pytest.mark.parametrize("layout, world, kind", [
    ("mb2", 1, "muon"), ("dp2 ep2 mb2", 2, "adamw"), pytest.param("pp2 mb2", 2, "muon", marks=pytest.mark.full),
    pytest.param("dp4 ep2 zero3 mb1", 4, "adamw", marks=pytest.mark.full), pytest.param("tp2 ep2 dp2 mb2", 4, "adamw", marks=pytest.mark.full),
])
def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path, layout, world, kind):
    """Bit for bit: losses of every later step, weights, moments and router biases, sampler and guard. And two runs are one."""
    sets = [f"train.optimizer.kind={kind}", "train.steps=7", "train.data.kind=shards", f"train.data.sources=[{{path: {shards(tmp_path / 'data')}}}]"]
    codes = run_ranks(whole_and_first_half, world, layout, tmp_path, sets)
    assert codes == [[0, 0, 143]] * world
    halved = tmp_path / "halved"
    assert sorted(kept(halved)) == [3] and len(losses(halved)) == 3
    assert runs(layout, world, halved, sets) == [0] * world
    whole = losses(tmp_path / "whole")
    assert len(whole) == 7 and len(set(whole)) == 7
    assert losses(tmp_path / "again") == whole == losses(halved)
    assert [s.grad_norm for s in steps(halved)] == [s.grad_norm for s in steps(tmp_path / "whole")]
    end, again, other = (kept(folder)[7] for folder in (tmp_path / "whole", tmp_path / "again", halved))
    assert end["tensors"] == again["tensors"] == other["tensors"]
    names = end["tensors"]
    assert any("balance_bias" in name for name in names) and sum(name.startswith("optim.") for name in names) > len(names) / 2
    for part in ("loader", "guard", "identity"):
        assert extra_of(halved, 7)[part] == extra_of(tmp_path / "whole", 7)[part]
    assert extra_of(halved, 7)["loader"]["sample"] == 7 * 8
    assert verified(halved) and verified(tmp_path / "whole")


# --- resumed on other layouts ---------------------------------------------------------------------------------------------------


def saves_what_it_loaded(folder: Path):
    """A hook: a checkpoint of what a run resumed from, before it takes a step."""
    return lambda run: Checkpointer(folder, asynchronous=False).save(run.done, run.job.parts, run.optimizer, {}) and None


CHAINS = {
    "experts": ("adamw", [("dp4 ep4 mb1", 4), ("dp2 ep2 mb2", 2), ("mb2", 1)]),
    "stages": ("adamw", [("pp2 mb2", 2), ("dp2 zero3 mb2", 2), ("dp2 zero1 mb1", 2), ("mb2", 1)]),
    "muon": ("muon", [("dp2 ep2 zero3 mb2", 2), ("mb4", 1), ("pp2 mb2", 2)]),
    "tensors": ("adamw", [("tp2 mb2", 2), ("cp2 mb2", 2), ("pp2 dp2 ep2 mb2", 4), ("dp4 rep2 mb1", 4), ("mb1", 1), ("dp4 ep4 mb1", 4)]),
    "muon on four": ("muon", [("tp2 dp2 ep2 mb2", 4), ("dp4 ep2 mb1", 4), ("pp2 vpp2 zbv mb2", 2), ("dp2 zero1 mb2", 2)]),
}


@pytest.mark.parametrize("name", ["experts", "stages", "muon", *(pytest.param(n, marks=pytest.mark.full) for n in ("tensors", "muon on four"))])
def test_a_run_goes_on_under_any_layout(tmp_path, name):
    """EP4 -> EP2 -> EP1 and the like: losses are the single process's but for rounding, and what is loaded is what was saved."""
    kind, chain = CHAINS[name]
    sets, folder = [f"train.optimizer.kind={kind}", "model.num_layers=5" if "vpp2" in str(chain) else "train.seed=4"], tmp_path / "run"
    if "cp2" in str(chain) or "tp2" in str(chain):
        sets.append("train.moe.aux_loss=0")  # its shares are counted over a rank's part of a sequence
    for turn, (layout, world) in enumerate(chain):
        end, loaded = 2 * turn + 2, tmp_path / f"loaded{turn}"
        hooks = [("one_step", end - 1, saves_what_it_loaded(loaded))] if turn else []
        assert runs(layout, world, folder, [*sets, f"train.steps={end}", "train.checkpoint.keep=99"], hooks) == [0] * world
        if turn:
            (found,) = checkpoint.inspect(loaded, verify=True)
            assert found["ok"] and found["tensors"] == kept(folder)[end - 2]["tensors"], (layout, "came out otherwise than it went in")
    total = 2 * len(chain)
    assert runs("mb2", 1, tmp_path / "alone", [*sets, f"train.steps={total}"]) == [0]
    assert losses(folder) == pytest.approx(losses(tmp_path / "alone"), rel=2e-6)
    assert [s.grad_norm for s in steps(folder)] == pytest.approx([s.grad_norm for s in steps(tmp_path / "alone")], rel=2e-5)
    experts = [n for n in kept(folder)[total]["tensors"] if n.endswith("moe.experts.down")]
    assert [kept(folder)[total]["tensors"][n]["shape"][0] for n in experts] == [8] * len(experts)
    lines = list(read_lines(folder / FILE))
    assert [line["from_step"] for line in lines if line.get("event") in ("start", "restart")] == list(range(0, total, 2))
    assert sorted({line["restart"] for line in lines}) == list(range(len(chain)))
    assert not any(line.get("rerun") for line in lines)
    assert [n for n in texts(folder, "note").splitlines() if n.startswith("layout was")] == [
        f"layout was '{parse_layout(old)}' and is '{parse_layout(new)}'" for (old, _), (new, _) in itertools.pairwise(chain)]
    assert verified(folder)


@pytest.mark.parametrize("layouts", [[("dp2 ep2 mb4", 2), ("pp2 mb2", 2)],
                                     pytest.param([("dp4 zero3 mb2", 4), ("cp2 mb1", 2), ("tp2 mb2", 2)], marks=pytest.mark.full)])
def test_validation_is_the_same_under_any_layout(tmp_path, layouts):
    """Ten sequences, which no number of ranks here divides; their mean is over tokens, not over ranks or batches."""
    sets = ["train.data.kind=shards", f"train.data.sources=[{{path: {shards(tmp_path / 'data')}}}]", "train.steps=1", "train.optimizer.lr=1e-9",
            f"train.data.validation={{path: {shards(tmp_path / 'held', seed=1)}, every: 1, sequences: 10}}", "train.data.mask_documents=true"]
    found = {}
    for layout, world in [("mb2", 1), *layouts]:
        folder = tmp_path / layout
        assert runs(layout, world, folder, sets) == [0] * world
        (event,) = events(folder, "validation")
        (end,) = events(folder, "end")
        assert event["step"] == 1 and end["validation"] == event["loss"]
        found[layout] = event["loss"]
    assert found == pytest.approx(dict.fromkeys(found, found["mb2"]), rel=1e-6)


# --- bad steps ------------------------------------------------------------------------------------------------------------------


def spoilt(number: int, factor: float, rank: int):
    """A hook: this step's loss and gradients are multiplied on one rank."""
    def spoil(run):
        original = step.forward_backward

        def once(job, microbatches):
            step.forward_backward = original
            found = original(job, microbatches)
            if run.seat.rank != rank:
                return found
            for part in job.parts:
                for parameter in part.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)
            return found * factor

        step.forward_backward = once

    return ("one_step", number, spoil)


def never_seen(number: int):
    """A hook: the data of step ``number`` is left out, and all later steps come one earlier."""
    def skip(run):
        make = run.loader._make
        run.loader._prefetcher.clear()
        run.loader._prefetcher._make = lambda step: make(step + (step >= number - 1))

    return ("one_step", 1, skip)


def spoils_and_not(rank, world, layout, folder, sets, factor):
    codes = [run(rank, world, layout, folder / "clean", [*sets, "train.steps=8"], [never_seen(6)])]
    return [*codes, run(rank, world, layout, folder / "spoilt", [*sets, "train.steps=9"], [spoilt(6, factor, world - 1)])]


@pytest.mark.parametrize("factor, reason", [(float("nan"), "the loss is nan"), (50.0, "the loss"),
                                            pytest.param(float("inf"), "the loss is inf", marks=pytest.mark.full)])
def test_a_bad_step_is_as_if_it_had_never_been(tmp_path, factor, reason):
    """On one rank of two: both skip; weights, moments, their step counts and router biases are those of a run without that batch."""
    sets = ["train.optimizer.skip.window=8"]
    assert run_ranks(spoils_and_not, 2, "dp2 ep2 mb2", tmp_path, sets, factor) == [[0, 0]] * 2
    done = steps(tmp_path / "spoilt")
    assert [s.step for s in done if s.skipped] == [6] and reason in done[5].skipped
    (event,) = events(tmp_path / "spoilt", "skip")
    assert event["step"] == 6 and reason in event["reason"]
    assert [s.loss for s in done[:5] + done[6:]] == losses(tmp_path / "clean")
    assert kept(tmp_path / "spoilt")[9]["tensors"] == kept(tmp_path / "clean")[8]["tensors"]
    assert extra_of(tmp_path / "spoilt", 9)["guard"]["skipped"] == {"loss outlier" if factor == 50.0 else "loss not finite": 1}


def test_too_many_bad_steps_end_the_run_with_the_last_good_state_kept(tmp_path):
    def ends(rank, world, folder):
        hooks = [spoilt(number, float("nan"), 0) for number in (4, 5, 6)]
        with pytest.raises(RuntimeError, match="step 6: 3 steps skipped in a row, the last because the loss is nan"):
            run(rank, world, "mb2", folder, ["train.steps=9", "train.optimizer.skip.max_consecutive=3"], hooks)

    run_ranks(ends, 1, tmp_path)
    assert sorted(kept(tmp_path)) == [3]


# --- signals --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number, code, where", [
    (signal.SIGTERM, 143, "one_step"), (signal.SIGINT, 130, "measure"), (signal.SIGTERM, 143, "note_published"),
])
def test_a_signal_to_one_rank_ends_all_after_the_same_step(tmp_path, number, code, where):
    """Sent before, within and after step 3, which is one with a checkpoint: in the last two cases it is heard with step 4."""
    assert runs("dp2 mb2", 2, tmp_path, hooks=[(where, 3, tell(number, 1))]) == [code, code]
    last = 3 if where == "one_step" else 4
    assert max(kept(tmp_path)) == last == len(losses(tmp_path)) == events(tmp_path, "end")[0]["step"]
    assert verified(tmp_path)


def test_a_signal_in_the_last_step_ends_a_run_that_is_done(tmp_path):
    assert runs("dp2 mb2", 2, tmp_path, hooks=[("measure", 6, tell(signal.SIGTERM, 1))]) == [0, 0]
    assert max(kept(tmp_path)) == 6


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def test_sigterm_to_a_real_process(tmp_path):
    path = scenario_file(tmp_path, ("steps: 6", "steps: 100000"))
    process = subprocess.Popen([sys.executable, "-m", "moetrain", "train", str(path)], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    log = tmp_path / "runs" / "small" / FILE
    deadline = time.monotonic() + 60
    while not (log.exists() and '"step":2,' in log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.terminate()
    _, said = process.communicate(timeout=30)
    assert process.returncode == 143, said
    assert not said.strip()
    folder = tmp_path / "runs" / "small"
    assert max(kept(folder)) == len(losses(folder)) >= 2


# --- disks ----------------------------------------------------------------------------------------------------------------------


def no_large_files(rank: int, allowed: int = 100_000):
    """A hook: from now on no file of this rank grows beyond a size, which the system then refuses as it does on a full disk."""
    import resource

    def limit(run):
        run.checkpoints.wait()
        if run.seat.rank == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (allowed, resource.RLIM_INFINITY))

    return limit


def look_at(folder: Path):
    """A hook: the one good checkpoint is that of step 3."""
    def look(run):
        run.checkpoints._flight and run.checkpoints._flight.thread.join()
        assert sorted(kept(folder)) == [3]

    return look


def large_files(run):
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_checkpoint_that_cannot_be_written_is_a_warning(tmp_path, asynchronous):
    """On rank 1 of 2 the disk is full for the checkpoint of step 6: training goes on, that of step 3 stays, that of step 9 is written."""
    hooks = [("one_step", 4, no_large_files(1)), ("one_step", 8, look_at(tmp_path)), ("one_step", 8, large_files)]
    sets = ["train.steps=10", f"train.checkpoint.asynchronous={str(asynchronous).lower()}"]
    assert runs("dp2 ep2 mb2", 2, tmp_path, sets, hooks) == [0, 0]
    assert "checkpoint of step 6" in texts(tmp_path, "warning") and "File too large" in texts(tmp_path, "warning")
    assert sorted(kept(tmp_path)) == [3, 9, 10] and len(losses(tmp_path)) == 10
    assert not list((tmp_path / "checkpoints").glob(".*")) and verified(tmp_path)


def test_a_disk_that_is_really_full(tmp_path):
    """Room for one checkpoint and a half, apart from the log: the run goes on to its end, and the first checkpoint stays."""
    assert runs("mb2", 1, tmp_path / "roomy", ["train.steps=3"]) == [0]
    size = sum(-(-p.stat().st_size // 4096) * 4096 for p in (tmp_path / "roomy" / "checkpoints").rglob("*"))
    with mounted(tmp_path / "disk", f"size={size * 3 // 2}") as disk:
        assert runs("mb2", 1, tmp_path / "run", [f"train.checkpoint.folder={disk}", "train.log.preflight=true"]) == [train.NOT_KEPT]
        assert [(e["step"], e["ok"]) for e in checkpoint.inspect(disk, verify=True)] == [(3, True)]
    assert texts(tmp_path / "run", "warning").count("No space left on device") == 1 and len(losses(tmp_path / "run")) == 6


def test_a_last_checkpoint_that_cannot_be_written_is_no_good_end(tmp_path):
    """The exit code says so, so that a launcher starts the run anew; it goes on from the last good one."""
    assert runs("dp2 mb2", 2, tmp_path, hooks=[("one_step", 4, no_large_files(0))]) == [train.NOT_KEPT] * 2
    assert "File too large" in texts(tmp_path, "warning") and sorted(kept(tmp_path)) == [3]
    assert runs("dp2 mb2", 2, tmp_path) == [0, 0]
    assert sorted(kept(tmp_path)) == [3, 6] and events(tmp_path, "restart")[0]["from_step"] == 3 and verified(tmp_path)


def test_a_checkpoint_folder_that_goes_away_is_a_warning(tmp_path):
    folder = tmp_path / "checkpoints"

    def away(run):
        run.checkpoints.wait()
        train.note_published(run)
        folder.rename(tmp_path / "elsewhere")
        folder.write_text("a file in the way")

    def back(run):
        folder.unlink()
        (tmp_path / "elsewhere").rename(folder)

    assert runs("mb2", 1, tmp_path, ["train.steps=9"], [("one_step", 5, away), ("one_step", 8, back)]) == [0]
    assert "checkpoint of step 6" in texts(tmp_path, "warning") and sorted(kept(tmp_path)) == [3, 9]


def test_a_log_that_cannot_be_written_ends_the_run(tmp_path):
    """A run that can't log is no run; what was kept stays."""
    def ends(rank, world, folder):
        with pytest.raises(RuntimeError, match="rank 0 failed with 5 steps done: .*File too large"):
            run(rank, world, "mb2", folder, hooks=[("one_step", 5, no_large_files(0, 1000))])

    run_ranks(ends, 1, tmp_path)
    assert sorted(kept(tmp_path)) == [3]
    assert runs("mb2", 1, tmp_path) == [0]
    assert len(losses(tmp_path)) == 6 and verified(tmp_path)


# --- longer and finished runs ---------------------------------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in (folder / "checkpoints").rglob("*")}


def test_a_finished_run_says_so_and_a_longer_one_goes_on(tmp_path):
    assert runs("mb2", 1, tmp_path) == [0]
    before, result = contents(tmp_path), losses(tmp_path)
    for _ in range(2):
        assert runs("mb2", 1, tmp_path) == [0]
        assert contents(tmp_path) == before and losses(tmp_path) == result
    assert texts(tmp_path, "note").count("nothing to do: 6 of 6 steps are done; --set train.steps=N with a larger N goes on") == 2
    assert runs("mb2", 1, tmp_path, ["train.steps=4"]) == [0]
    assert "6 of 4 steps are done" in texts(tmp_path, "note") and contents(tmp_path) == before
    assert runs("mb2", 1, tmp_path, ["train.steps=8"]) == [0]
    assert runs("mb2", 1, tmp_path / "whole", ["train.steps=8"]) == [0]
    assert losses(tmp_path) == losses(tmp_path / "whole") and "config.train.steps was 6 and is 8" in texts(tmp_path, "note")
    assert verified(tmp_path)
    results = [r["body"]["step"] for r in manifest.read(tmp_path) if r["kind"] == "result"]
    assert results == [6, 8]


def test_a_run_that_starts_over_keeps_what_it_had(tmp_path):
    """resume: never, in a folder that holds a run: its checkpoints are set aside, not deleted."""
    assert runs("mb2", 1, tmp_path) == [0]
    assert runs("mb2", 1, tmp_path, ["train.checkpoint.resume=never", "train.seed=9"]) == [0]
    names = sorted(p.name.partition(".superseded")[0] for p in (tmp_path / "checkpoints").iterdir())
    assert names.count("step-00000003") == names.count("step-00000006") == 2
