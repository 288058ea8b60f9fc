"""Does a checkpoint that is broken, foreign or half written say so in one line, and leave the last good one alone?"""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import subprocess
import time
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from small_checkpoints import adam, build, contents, fresh, part_of, reference, same, step
from torch import nn

from moetrain import checkpoint
from moetrain.checkpoint import Checkpointer, CheckpointError, Checks, Damaged, dcp, folders
from moetrain.testing import run_ranks

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled"), pytest.mark.filterwarnings("ignore:Detected pickle protocol")]

# --- what does not fit ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    """Two good checkpoints, of steps 1 and 2."""
    parts = [part_of([0])]
    optimizer = adam(parts)
    checkpointer = Checkpointer(tmp_path, asynchronous=False)
    for number in (1, 2):
        step(parts, optimizer)
        checkpointer.save(number, parts, optimizer, {"identity": {"model": {"experts": 4}, "data": "abc"}, "config": {"lr": 0.1}})
    return tmp_path


@pytest.mark.parametrize("layers, words", [
    ([0, 1], "lacks 17 tensors, first model.layers.1.moe.balance_bias (nearest: model.layers.0.moe.balance_bias)"),
    ([], "holds 5 tensors, first model.layers.0.moe.balance_bias, which this run has no place for"),
])
def test_names_that_do_not_fit(folder, layers, words):
    parts = [part_of(layers)]
    optimizer = adam(parts)
    step(parts, optimizer)
    with pytest.raises(CheckpointError) as error:
        Checkpointer(folder).load("auto", parts, optimizer)
    assert words in str(error.value) and "\n" not in str(error.value) and not isinstance(error.value, Damaged)


def test_a_shape_that_does_not_fit(folder):
    parts, _ = fresh()
    parts[0].layers["0"].norm = nn.Parameter(torch.ones(6))
    with pytest.raises(CheckpointError, match=r"^model.layers.0.norm has shape \[6\] in this run and \[5\] in"):
        Checkpointer(folder).load("auto", parts, None)


def test_another_model_is_refused_and_another_setting_is_noted(folder):
    parts, optimizer = fresh()
    present = {"identity": {"model": {"experts": 8}, "data": "abc"}, "config": {"lr": 0.2}}
    with pytest.raises(CheckpointError, match="^model.experts is 8 in this run and was 4 in .*step-00000002"):
        Checkpointer(folder).load("auto", parts, optimizer, present)
    present["identity"]["model"]["experts"] = 4
    assert Checkpointer(folder).load("auto", parts, optimizer, present).notes == ("config.lr was 0.1 and is 0.2",)
    present["identity"]["tokenizer"] = "x"
    with pytest.raises(CheckpointError, match="^tokenizer is 'x' in this run and was None in"):
        Checkpointer(folder).load("auto", parts, optimizer, present)


def test_a_checkpoint_without_optimizer_says_so(tmp_path):
    Checkpointer(tmp_path, asynchronous=False).save(1, [part_of([0])])
    assert Checkpointer(tmp_path).load("auto", *fresh()).notes == ("the checkpoint holds no optimizer state: the optimizer starts afresh",)


# --- what is broken ---------------------------------------------------------------------------------------------------------


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def bomb(path: Path) -> None:
    """A pickle that would leave a file behind, where a tensor was; the bookkeeping follows, as a forger's would."""
    class Bomb:
        def __reduce__(self):
            return Path.touch, (path.parent / "exploded",)

    path.write_bytes(pickle.dumps(Bomb()))


DAMAGE = {
    "truncated": (lambda p: (p / "__0_0.distcp").write_bytes((p / "__0_0.distcp").read_bytes()[:-9]), "__0_0.distcp is truncated"),
    "flipped": (lambda p: flip(p / "__0_0.distcp", 300), "__0_0.distcp is damaged: its sha256"),
    "missing": (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "no metadata": (lambda p: (p / ".metadata").unlink(), ".metadata is missing"),
    "no index": (lambda p: (p / "index.json").unlink(), "index.json is missing"),
    "no state": (lambda p: (p / "state.json").unlink(), "is not a complete checkpoint: no state.json (it holds"),
    "state altered": (lambda p: flip(p / "state.json", 150), "state.json is damaged"),
    "state cut": (lambda p: (p / "state.json").write_text("{"), "state.json is damaged"),
    "state binary": (lambda p: (p / "state.json").write_bytes(b"\xff\xfe"), "state.json can't be read"),
    "alien": (lambda p: (shutil.rmtree(p), p.mkdir(), (p / "notes.txt").write_text("")), "no state.json (it holds notes.txt)"),
    "empty": (lambda p: (shutil.rmtree(p), p.mkdir()), "no state.json (it holds nothing)"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_says_so_and_auto_takes_the_one_before(folder, what):
    harm, words = DAMAGE[what]
    newest = folder / "step-00000002"
    harm(newest)
    with pytest.raises(Damaged) as error:
        Checkpointer(folder).load(newest, *fresh())
    assert words in str(error.value) and "\n" not in str(error.value)
    restored = Checkpointer(folder).load("auto", *fresh())
    assert restored.step == 1 and len(restored.notes) == 1 and restored.notes[0].startswith("skipped step-00000002: ") and words in restored.notes[0]
    shutil.rmtree(folder / "step-00000001")
    with pytest.raises(Damaged, match="none of the 1 checkpoints"):
        Checkpointer(folder).load("auto", *fresh())


def forge(path: Path, name: str) -> None:
    """Makes state.json agree with what a file now holds."""
    stored = json.loads((path / "state.json").read_text().partition("\n")[2])
    stored["files"][name] = {"bytes": (path / name).stat().st_size, "sha256": folders.sha256(path / name)}
    (path / "state.json").write_text(folders.dump_state(stored))


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "index.json"])
def test_no_pickle_is_ever_run(folder, name):
    newest = folder / "step-00000002"
    bomb(newest / name)
    forge(newest, name)
    if name == ".metadata":
        assert Checkpointer(folder).load(newest, *fresh()).step == 2
    else:
        with pytest.raises(Damaged, match="holds no readable tensor|is no index of a checkpoint"):
            Checkpointer(folder).load(newest, *fresh())
    assert not (newest / "exploded").exists()


@pytest.mark.parametrize("change, words", [
    (lambda t: t.update(x={"dtype": "float32"}), "is no index of a checkpoint"),
    (lambda t: next(iter(t.values()))["chunks"][0].__setitem__(2, "../../other"), "is no index of a checkpoint: ValueError: file name"),
    (lambda t: next(iter(t.values())).update(dtype="object"), "is no index of a checkpoint"),
])
def test_an_index_that_is_none(folder, change, words):
    newest = folder / "step-00000002"
    tensors = json.loads((newest / "index.json").read_text())
    change(tensors)
    (newest / "index.json").write_text(json.dumps(tensors))
    forge(newest, "index.json")
    with pytest.raises(Damaged, match=words):
        Checkpointer(folder).load(newest, *fresh())


def test_content_is_compared_after_loading(folder):
    """A shard put in another's place: the files verify, the tensor does not."""
    newest = folder / "step-00000002"
    index = json.loads((newest / "index.json").read_text())
    a, b = "optim.layers.0.norm.exp_avg", "optim.layers.0.norm.exp_avg_sq"
    index[a]["chunks"], index[b]["chunks"] = index[b]["chunks"], index[a]["chunks"]
    (newest / "index.json").write_text(json.dumps(index))
    forge(newest, "index.json")
    with pytest.raises(Damaged, match="optim.layers.0.norm.exp_avg came out with digest"):
        Checkpointer(folder).load(newest, *fresh())
    assert Checkpointer(folder).load(newest, *fresh(), checks=Checks(digests=False)).step == 2


def test_torch_s_own_tools_read_it(folder, tmp_path):
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
    dcp_to_torch_save(folder / "step-00000002", tmp_path / "whole.pt")
    parts, optimizer = fresh()
    Checkpointer(folder).load("auto", parts, optimizer)
    read = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert torch.equal(read["model.layers.0.qkv.weight"], parts[0].layers["0"].qkv.weight.data)


@pytest.mark.parametrize("where, words", [("step-00000009", "no such folder; .* holds step-00000001, step-00000002"), ("nowhere", "no such folder")])
def test_a_path_that_is_none(folder, where, words):
    with pytest.raises(Damaged, match=words):
        Checkpointer(folder).load(folder / where, *fresh())


def test_a_newer_format_is_refused(folder):
    newest = folder / "step-00000002"
    stored = json.loads((newest / "state.json").read_text().partition("\n")[2])
    (newest / "state.json").write_text(folders.dump_state({**stored, "format": 2}))
    with pytest.raises(CheckpointError, match="has format 2; this version reads format 1"):
        Checkpointer(folder).load("auto", *fresh())


# --- writing ----------------------------------------------------------------------------------------------------------------


def full_disk(after: int):
    """A file that has room for ``after`` bytes, then the error of a full disk."""
    class Full(dcp._Hashed):
        def write(self, data):
            if self.bytes + memoryview(data).nbytes > after:
                self.error = self.error or OSError(errno.ENOSPC, "No space left on device")
            return super().write(data)
    return Full


def out_of_space(rank, world, folder, asynchronous):
    parts = build(rank, world, "dp")
    optimizer = adam(parts)
    said = []
    checkpointer = Checkpointer(folder, asynchronous=asynchronous, log=said.append)
    checkpointer.save(1, parts, optimizer, {})
    checkpointer.wait()
    keep, dcp._Hashed = dcp._Hashed, full_disk(2000) if rank == 1 else dcp._Hashed
    step(parts, optimizer)
    try:
        checkpointer.save(2, parts, optimizer, {})
        checkpointer.wait()
    except CheckpointError as error:
        said.append(str(error))
    dcp._Hashed = keep
    dist.barrier()
    after_failure = sorted(p.name for p in Path(folder).iterdir())
    dist.barrier()
    checkpointer.save(3, parts, optimizer, {})
    checkpointer.wait()
    return said, after_failure, checkpointer.latest()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_on_one_rank_is_one_line_on_all_and_the_next_save_works(tmp_path, asynchronous):
    for said, after_failure, latest in run_ranks(out_of_space, 2, tmp_path, asynchronous):
        assert len(said) == 1 and "checkpoint of step 2 in" in said[0] and "rank 1: OSError: [Errno 28] No space left on device" in said[0]
        assert after_failure == ["step-00000001"] and latest.name == "step-00000003"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_file_system_that_is_really_full(tmp_path):
    """Sizes at which the data, the index or the state is what no longer fits."""
    parts, optimizer = fresh()
    step(parts, optimizer)
    Checkpointer(tmp_path / "roomy", asynchronous=False).save(1, parts, optimizer)
    whole = sum(-(-p.stat().st_size // 4096) * 4096 for p in (tmp_path / "roomy" / "step-00000001").iterdir())
    for room in range(4096, whole + 4096, 8192):
        mount = tmp_path / f"small-{room}"
        mount.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={whole + room}", "tmpfs", str(mount)], capture_output=True, check=False).returncode:
            pytest.skip("no tmpfs here")
        try:
            checkpointer = Checkpointer(mount, asynchronous=False)
            checkpointer.save(1, parts, optimizer)
            with pytest.raises(CheckpointError) as error:
                checkpointer.save(2, parts, optimizer)
            assert "No space left on device" in str(error.value) and "\n" not in str(error.value)
            assert [p.name for p in mount.iterdir()] == ["step-00000001"] and checkpointer.load("auto", parts, optimizer).step == 1
        finally:
            subprocess.run(["umount", str(mount)], check=True)


def saves_until_killed(rank, world, folder):
    parts = build(rank, world, "dp")
    optimizer = adam(parts)
    checkpointer = Checkpointer(folder, keep=2)
    restored = checkpointer.load("auto", parts, optimizer)
    for number in range(restored.step + 1 if restored else 1, 10_000):
        step(parts, optimizer)
        checkpointer.save(number, parts, optimizer, {"step": number})


def killed(folder: Path, reached: int, moment: float) -> None:
    """Two ranks that save all the time, killed without warning at some moment after they got further than ``reached``."""
    context = get_context("fork")

    def rank_of(rank):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store-{moment}", rank=rank, world_size=2)
        saves_until_killed(rank, 2, folder)

    ranks = [context.Process(target=rank_of, args=(rank,), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 60
    while not any(path.name > folders.name_of(reached) for path in folders.published(folder)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(moment)
    for process in ranks:
        process.kill()
        process.join()


@pytest.mark.parametrize("times", [3, pytest.param(40, marks=pytest.mark.full)])
def test_a_run_killed_at_any_moment_resumes_from_a_whole_checkpoint(tmp_path, times):
    """The weights after n steps are known: whatever is found there must be exactly those."""
    reached = 0
    for attempt in range(times):
        killed(tmp_path, reached, 0.007 * attempt)
        parts = [part_of([0, 1])]
        optimizer = adam(parts)
        restored = Checkpointer(tmp_path, log=lambda line: None).load("auto", parts, optimizer)
        assert restored is not None and restored.step >= reached and not restored.notes and restored.extra["step"] == restored.step
        same(contents(parts, optimizer), reference(restored.step))
        reached = restored.step
    assert reached >= times


def test_a_failure_in_the_background_is_told_once(tmp_path, monkeypatch):
    said: list[str] = []
    parts, optimizer = fresh()
    checkpointer = Checkpointer(tmp_path, log=said.append)
    with monkeypatch.context() as patch:
        patch.setattr(dcp, "_Hashed", full_disk(100))
        checkpointer.save(1, parts, optimizer)
        checkpointer._flight.thread.join()
    assert "No space left" in checkpointer.poll() and checkpointer.poll() is None
    with monkeypatch.context() as patch:
        patch.setattr(folders, "write_synced", partial(fail, OSError(errno.EIO, "Input/output error")))
        checkpointer.save(2, parts, optimizer)
        checkpointer._flight.thread.join()
    checkpointer.save(3, parts, optimizer)
    checkpointer.wait()
    assert len(said) == 1 and "step 2" in said[0] and "Input/output error" in said[0]
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]


def fail(error, *_, **__):
    raise error


def test_one_save_at_a_time(tmp_path, monkeypatch):
    import threading
    gate, said = threading.Event(), []
    sync = folders.sync_folder
    monkeypatch.setattr(folders, "sync_folder", lambda path: (gate.wait(5), sync(path))[1])
    parts, optimizer = fresh()
    checkpointer = Checkpointer(tmp_path, log=said.append)
    assert checkpointer.save(1, parts, optimizer) < 1 and checkpointer.latest() is None
    threading.Timer(0.3, gate.set).start()
    assert checkpointer.save(2, parts, optimizer) > 0.2
    checkpointer.wait()
    assert len(said) == 1 and said[0].startswith("checkpoint of step 2 waits for that of step 1, 0.")
    assert checkpointer.latest().name == "step-00000002" and checkpointer.last.step == 2


def test_staging_memory_is_reused(tmp_path):
    parts, optimizer = fresh()
    checkpointer = Checkpointer(tmp_path)
    step(parts, optimizer)
    held = []
    for number in range(3):
        checkpointer.save(number, parts, optimizer)
        held.append({key: buffer.data_ptr() for key, buffer in checkpointer._staging.buffers.items()})
    checkpointer.wait()
    assert held[0] == held[1] == held[2]


# --- folders ----------------------------------------------------------------------------------------------------------------


def test_keep_n_and_every_kth(tmp_path):
    parts, optimizer = fresh()
    checkpointer = Checkpointer(tmp_path, keep=2, keep_every=4, asynchronous=False)
    for number in range(1, 10):
        checkpointer.save(number, parts, optimizer)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step-{n:08d}" for n in (4, 8, 9)]
    checkpointer.save(9, parts, optimizer, {"again": 1})
    assert checkpointer.load("auto", parts, optimizer).extra == {"again": 1}
    with pytest.raises(CheckpointError, match="keep is 0"):
        Checkpointer(tmp_path, keep=0)


def test_an_interrupted_deletion_never_looks_complete(folder, monkeypatch):
    monkeypatch.setattr(shutil, "rmtree", partial(fail, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        folders.prune(folder, 1, None, "ab")
    assert [p.name for p in folders.published(folder)] == ["step-00000002"] and (folder / ".step-00000001.old-ab").is_dir()
    monkeypatch.undo()
    said: list[str] = []
    Checkpointer(folder, log=said.append).load("auto", *fresh())
    assert sorted(p.name for p in folder.iterdir()) == ["step-00000002"] and said == [".step-00000001.old-ab, left by a run that ended, is removed"]


def test_what_a_dead_run_left_is_made_good(folder):
    """Killed while writing: gone. Killed between the last byte and the rename: published. Strangers' files: left alone."""
    (folder / "step-00000002").rename(folder / ".step-00000002.tmp-cafe")
    (folder / ".step-00000003.tmp-beef").mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / "step-7").mkdir()
    said: list[str] = []
    checkpointer = Checkpointer(folder, log=said.append)
    checkpointer.load(folder / "step-00000001", *fresh())
    assert (folder / ".step-00000003.tmp-beef").exists() and not said  # who only reads leaves another's work alone
    assert checkpointer.load("auto", *fresh()).step == 2
    assert sorted(p.name for p in folder.iterdir()) == ["notes.txt", "step-00000001", "step-00000002", "step-7"] and len(said) == 2


def test_a_run_that_goes_back_sets_aside_what_lies_ahead(tmp_path):
    """Steps 1..3, then from 1 again: the old 2 and 3 neither count among the newest nor are they deleted."""
    said: list[str] = []
    parts, optimizer = fresh()
    checkpointer = Checkpointer(tmp_path, keep=2, asynchronous=False, log=said.append)
    for number in (1, 2, 3):
        step(parts, optimizer)
        checkpointer.save(number, parts, optimizer)
    checkpointer.load(tmp_path / "step-00000002", parts, optimizer)
    step(parts, optimizer), step(parts, optimizer)
    checkpointer.save(3, parts, optimizer)
    assert [p.name.split("-")[1] for p in sorted(tmp_path.iterdir())] == ["00000002", "00000003", "00000003.superseded"]
    assert len(said) == 1 and "step-00000003, of a step this run went back behind, is kept as step-00000003.superseded-" in said[0]
    checkpointer.save(1, parts, optimizer)
    assert [p.name for p in folders.published(tmp_path)] == ["step-00000001"] and checkpointer.latest().name == "step-00000001"
    aside = next(tmp_path.glob("step-00000002.superseded-*"))
    assert checkpointer.load(aside, parts, optimizer).step == 2


def test_nothing_there_yet(tmp_path):
    checkpointer = Checkpointer(tmp_path / "none")
    assert checkpointer.load("auto", *fresh()) is None and checkpointer.latest() is None
    (tmp_path / "none").mkdir()
    assert checkpointer.load("auto", *fresh()) is None


def test_a_listing(folder):
    flip(folder / "step-00000001" / "__0_0.distcp", 100)
    lines = checkpoint.describe(folder, verify=True).splitlines()
    assert "unusable" in lines[0] and "sha256" in lines[0] and lines[1].startswith("step-00000002  step 2")
    one = checkpoint.describe(folder / "step-00000002").splitlines()
    assert len(one) == 1 + len(checkpoint.inspect(folder / "step-00000002")[0]["tensors"]) and "model.layers.0.norm" in "".join(one)
    assert not checkpoint.inspect(folder / "nowhere")[0]["ok"]
