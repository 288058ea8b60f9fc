"""Does the history of a run show what made it, and every way of altering it?"""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from moetrain.data.writer import ShardBuffer, shard_name, write_index
from moetrain.observe import manifest
from moetrain.observe.cli import add_commands
from moetrain.observe.log import RunLog
from moetrain.observe.manifest import Manifest, chain_problem, hash_value, part
from moetrain.observe.metrics import FILE as LOG
from moetrain.observe.metrics import StepRecord
from moetrain.observe.provenance import code_identity, data_identity, environment
from moetrain.observe.verify import sound, verify

CONFIG = {"model": {"num_layers": 2, "hidden_size": 64}, "train": {"steps": 8, "seed": 5, "optimizer": {"lr": 3e-4}}}


def shards(folder: Path) -> Path:
    folder.mkdir(parents=True)
    buffer = ShardBuffer(folder, 100)
    entries = []
    for i in range(2):
        buffer.add(np.arange(i, 50 + i), shard_name(i))
        entries.append(buffer.write(shard_name(i)))
    write_index(folder, entries, vocab_size=100, eos_id=0, tokenizer_sha256="t" * 64)
    return folder


def checkpoint(run: Path, step: int) -> Path:
    """A real one, of one tensor."""
    from moetrain.checkpoint import folders

    folder = run / "checkpoints" / folders.name_of(step)
    folder.mkdir(parents=True)
    (folder / "data.bin").write_bytes(torch.arange(step).numpy().tobytes())
    files = {"data.bin": {"bytes": (folder / "data.bin").stat().st_size, "sha256": folders.sha256(folder / "data.bin")}}
    (folder / "state.json").write_text(folders.dump_state({"format": folders.FORMAT, "step": step, "saved_at": "now", "world_size": 1, "torch": "x",
                                                          "extra": {}, "tensors": {}, "files": files}))
    return folder


class Run:
    """A run of three processes: steps 1-4, killed; 3-6, killed; 5-8, done."""

    def __init__(self, base: Path):
        self.folder, self.data = base / "run", shards(base / "data")
        tokenizer = base / "tokenizer.json"
        tokenizer.write_text("{}")
        data = data_identity([(self.data, 2.0)], tokenizer=tokenizer)
        env = environment(["cpu"])
        for from_step, world, last in ((0, 2, 4), (2, 2, 6), (4, 1, 8)):
            with RunLog(self.folder, from_step=from_step, console=Console(quiet=True)) as log:
                chain = Manifest(self.folder)
                chain.begin(config=CONFIG, code=code_identity(), data=data, environment=env, seeds={"run": 5}, layout=f"dp{world}", world=world, from_step=from_step)
                for step in range(from_step + 1, last + 1):
                    log.step(StepRecord(step, 1.0, 100, world, loss=5.0 - step / 10))
                    if step % 2 == 0:
                        folder = self.folder / "checkpoints" / f"step-{step:08d}"
                        head = chain.checkpoint(step, folder if folder.exists() else checkpoint(self.folder, step))
                        log.event("checkpoint", step=step, seconds=0.1, bytes=8, manifest=head)
        chain.result(8, {"train": 4.2})


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    return Run(tmp_path_factory.mktemp("pristine"))


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_an_untouched_run_verifies_and_tells_its_history(pristine):
    findings = verify(pristine.folder)
    assert sound(findings), [str(f) for f in findings]
    assert all(f.where == "code" for f in findings)  # somebody may be editing the sources meanwhile
    records = manifest.read(pristine.folder)
    assert [r["kind"] for r in records] == ["start", *["checkpoint"] * 2, "restart", *["checkpoint"] * 2, "restart", *["checkpoint"] * 2, "result"]
    assert [r["body"]["from_step"] for r in records if r["kind"] in ("start", "restart")] == [0, 2, 4]
    assert [r["body"]["world"] for r in records if r["kind"] in ("start", "restart")] == [2, 2, 1]
    assert "config" in records[0]["body"] and "config" not in records[3]["body"]  # unchanged: by hash only
    assert part(records, "config") == CONFIG and records[3]["body"]["config_sha256"] == hash_value(CONFIG)
    data = part(records, "data")
    assert data["sources"][0]["weight"] == 2.0 and set(data["sources"][0]["files"]) == {"00000.bin", "00000.idx", "00001.bin", "00001.idx"}
    assert part(records, "environment")["packages"]["torch"].startswith(torch.__version__.split("+")[0])


def edit(run, change):
    path = run.folder / manifest.FILE
    document = json.loads(path.read_text())
    change(document["records"])
    path.write_text(json.dumps(document))


def altered(run, word, **options):
    findings = [f for f in verify(run.folder, **options) if f.level != "note"]
    assert findings and any(word in str(f) for f in findings), [str(f) for f in findings]
    return findings


def test_an_edited_config_is_found(run):
    edit(run, lambda r: r[0]["body"]["config"]["train"].update(seed=6))
    found = altered(run, "record 0 (start) was altered")
    assert any("config is not what its hash says" in str(f) for f in found)
    with pytest.raises(ValueError, match="record 0"):
        Manifest(run.folder)  # nothing is appended to an altered past


def test_an_edited_config_with_its_hashes_made_anew_breaks_the_next_link(run):
    def change(records):
        body = records[0]["body"]
        body["config"]["train"]["seed"] = 6
        body["config_sha256"] = hash_value(body["config"])
        records[0]["sha256"] = manifest.record_hash(records[0])

    edit(run, change)
    altered(run, "record 1 (checkpoint) does not follow record 0")


def test_a_changed_record_in_the_middle_is_found(run):
    edit(run, lambda r: r[3]["body"].update(world=8))
    altered(run, "record 3 (restart) was altered")


@pytest.mark.parametrize("number", [0, 3, 4])
def test_a_removed_record_is_found(run, number):
    edit(run, lambda r: r.pop(number))
    altered(run, "a record was removed or inserted")


def test_removed_records_with_numbers_made_anew_are_found(run):
    def change(records):
        del records[3:6]
        for i, record in enumerate(records):
            record["number"] = i

    edit(run, change)
    found = altered(run, "does not follow record 2")
    assert any("the log has restarts from steps [2, 4]" in str(f) for f in found)


def test_dropping_the_last_records_shows_in_what_they_anchored(run):
    edit(run, lambda r: r.__delitem__(slice(6, None)))
    assert chain_problem(manifest.read(run.folder)) is None
    found = altered(run, "that is not in manifest.json")
    assert any("restarts from steps [2]" in str(f) for f in found)


def test_a_changed_byte_of_data_is_found(run):
    path = run.data / "00001.bin"
    content = bytearray(path.read_bytes())
    content[7] ^= 1
    path.write_bytes(content)
    altered(run, "00001.bin: SHA-256")
    assert sound(verify(run.folder, data=False))
    path.unlink()
    altered(run, "missing: ")


def test_a_changed_checkpoint_is_found(run):
    (run.folder / "checkpoints/step-00000006/data.bin").write_bytes(b"x" * 48)
    altered(run, "step-00000006")
    state = run.folder / "checkpoints/step-00000008/state.json"
    state.write_text(state.read_text().replace('"world_size": 1', '"world_size": 2'))
    altered(run, "step-00000008/state.json: SHA-256", checkpoints=False)


def test_pruned_checkpoints_are_a_note_and_the_last_one_is_not(run):
    def remove(step):
        folder = run.folder / f"checkpoints/step-{step:08d}"
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()

    remove(2)
    findings = verify(run.folder)
    assert sound(findings) and any("(pruned)" in str(f) for f in findings)
    checkpoint(run.folder, 10)
    assert sound(verify(run.folder)) and any("no record names" in str(f) for f in verify(run.folder))
    remove(8)
    altered(run, "the checkpoint of step 8 is not there")


@pytest.mark.parametrize("old, new", [('"loss":4.7', '"loss":4.1'), ('"step":3,', '"step":2,')])
def test_a_changed_log_is_found(run, old, new):
    path = run.folder / LOG
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    altered(run, "bytes are not those that record")


def test_a_step_taken_out_of_the_log_is_found(run):
    path = run.folder / LOG
    lines = path.read_text().splitlines(keepends=True)
    gone = next(i for i, line in enumerate(lines) if '"kind":"step"' in line and '"step":3,' in line)
    path.write_text("".join(line for i, line in enumerate(lines) if i != gone))
    found = altered(run, "follows where step")
    assert any("bytes are not those" in str(f) for f in found)


def test_code_is_known_by_its_sources_and_its_commit(tmp_path):
    """A checkout gives commit, dirtiness and the hash of what is not committed; a plain folder only the sources' hash."""
    (tmp_path / "moesim").mkdir()
    source = tmp_path / "moesim/a.py"
    source.write_text("x = 1\n")
    plain = code_identity(tmp_path)
    assert set(plain) == {"version", "sources_sha256"}
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=n", "-c", "user.email=e@example.org", "commit", "-q", "-m", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    clean = code_identity(tmp_path)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False and clean["diff_sha256"] is None and clean["sources_sha256"] == plain["sources_sha256"]
    source.write_text("x = 2\n")
    dirty = code_identity(tmp_path)
    assert dirty["dirty"] and dirty["diff_sha256"] and dirty["commit"] == clean["commit"] and dirty["sources_sha256"] != clean["sources_sha256"]


def command(*words):
    app = typer.Typer()
    add_commands(app)
    app.command("other")(lambda: None)
    return CliRunner().invoke(app, ["manifest", *map(str, words)])


def test_the_commands(run, tmp_path):
    good = command("verify", run.folder)
    assert good.exit_code == 0 and "as it was" in good.stdout
    shown = command("show", run.folder)
    assert shown.exit_code == 0 and "from step 2, layout dp2, 2 ranks" in shown.stdout and "weight 2, 100 tokens" in shown.stdout
    edit(run, lambda r: r[0]["body"].update(layout="\x1b[31mdp9"))
    bad = command("verify", run.folder, "--quick")
    assert bad.exit_code == 1 and "NOT as it was" in bad.stdout and "not read" in bad.stdout
    assert "\x1b" not in command("show", run.folder).stdout
    missing = command("verify", tmp_path / "nowhere")
    assert missing.exit_code == 2 and "no such file" in missing.stderr and len(missing.stderr.splitlines()) == 1


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 1, "records": [1]}', '{"schema": 2, "records": []}', "[" * 100000, '{"schema": 1, "records": []}'])
def test_what_is_no_manifest_is_refused_in_one_line(tmp_path, text):
    (tmp_path / manifest.FILE).write_text(text)
    with pytest.raises(ValueError, match="manifest.json") as error:
        verify(tmp_path)
    assert "\n" not in str(error.value)
