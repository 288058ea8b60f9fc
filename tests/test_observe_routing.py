"""Does recorded routing come back as it was, in the trainer and in the planner?"""

import numpy as np
import pytest
import torch

from moesim.routing import expert_load, load_shares, read_histogram
from moesim.spec import RoutingSpec
from moetrain.observe.balance import max_over_mean, rank_rows
from moetrain.observe.routing_log import RoutingRecorder, counts_of_ids, read_ids, read_rows, write_histogram, write_replay

E, K, T, LAYERS = 8, 2, 64, (1, 2, 3)


def choices(seed: int) -> torch.Tensor:
    """[T, k] distinct experts a token, skewed."""
    weights = torch.arange(1, E + 1, dtype=torch.float) ** -1.0
    return torch.multinomial(weights.expand(T, E), K, generator=torch.Generator().manual_seed(seed))


def record(folder, rank=0, steps=range(1, 6), microbatches=2, **options):
    recorder = RoutingRecorder(folder, rank, LAYERS, E, K, **options)
    want = {}
    for step in steps:
        for layer in LAYERS:
            for m in range(microbatches):
                ids = choices(1000 * step + 100 * layer + 10 * m + rank)
                rows = torch.bincount(ids.ravel(), minlength=E)
                recorder.add(layer, rows, rows.clamp(max=20), ids if recorder.wants_ids(step) else None)
                want.setdefault((step, layer), []).append(ids.numpy())
        requested, kept = recorder.end_step(step, tokens=T * microbatches)
        assert (requested.sum(1) == T * microbatches * K).all() and (kept <= requested).all()
    recorder.close()
    return want


def test_rows_and_ids_read_back(tmp_path):
    want = record(tmp_path, every=2, ids_every=4, chunk=1)
    rows = read_rows(tmp_path.glob("rows-*.npz"))
    assert rows.steps.tolist() == [2, 4] and rows.layers.tolist() == list(LAYERS)
    for i, step in enumerate(rows.steps):
        table = np.stack([np.concatenate(want[step, layer]) for layer in LAYERS])
        assert np.array_equal(rows.requested[i], counts_of_ids(table, E))
    step, layers, ids = read_ids(*tmp_path.glob("ids-*.npz"))
    assert step == 4 and layers.tolist() == list(LAYERS)
    assert np.array_equal(ids, np.stack([np.concatenate(want[4, layer]) for layer in LAYERS]))


def test_rows_of_ranks_add_up(tmp_path):
    wants = [record(tmp_path, rank, every=1, chunk=2) for rank in (0, 1)]
    rows = read_rows(tmp_path.glob("rows-*.npz"))
    assert rows.steps.tolist() == [1, 2, 3, 4, 5] and (rows.requested.sum(-1) == 2 * 2 * T * K).all()
    both = np.concatenate(wants[0][3, 2] + wants[1][3, 2])
    assert np.array_equal(rows.requested[2, 1], np.bincount(both.ravel(), minlength=E))


def test_a_step_recorded_again_after_a_restart_counts_once(tmp_path):
    record(tmp_path, steps=range(1, 5), chunk=4)
    record(tmp_path, steps=range(3, 7), chunk=4)
    rows = read_rows(tmp_path.glob("rows-*.npz"))
    assert rows.steps.tolist() == [1, 2, 3, 4, 5, 6] and (rows.requested.sum(-1) == 2 * T * K).all()


def test_the_planner_replays_a_recorded_histogram(tmp_path):
    """What `moesim.routing` makes of the file is what was measured: shares, and the busiest rank and expert of an EP layout."""
    record(tmp_path, every=1)
    rows = read_rows(tmp_path.glob("rows-*.npz"))
    path = str(tmp_path / "histogram.json")
    write_histogram(rows.requested, path)
    total = rows.requested.sum(0)
    assert np.array_equal(read_histogram(path), total)
    assert np.allclose(load_shares("histogram", E, K, file=path, num_layers=3)[0], total / total.sum(1, keepdims=True))
    load = expert_load(RoutingSpec(kind="histogram", file=path), E, K, T, 4, 3, 1)
    assert load.max_over_mean_rank == pytest.approx(max_over_mean(rank_rows(total, 4)).mean()) and load.drop_fraction == 0


def test_the_trainer_replays_recorded_ids_and_rows(tmp_path):
    """The file is what the forced router reads: the same experts token by token, or the same shares."""
    from moetrain.forced import Record, choose

    record(tmp_path, ids_every=1, steps=[1])
    _, layers, ids = read_ids(*tmp_path.glob("ids-*.npz"))
    write_replay(tmp_path / "ids.safetensors", layers.tolist(), ids=ids)
    replayed = choose("replay", torch.arange(2 * T), 2, E, K, Record.read(tmp_path / "ids.safetensors"))
    assert np.array_equal(replayed.numpy(), ids[1])
    write_replay(tmp_path / "rows.safetensors", layers.tolist(), requested=counts_of_ids(ids, E))
    assert np.array_equal(Record.read(tmp_path / "rows.safetensors").counts[3].numpy(), counts_of_ids(ids, E)[2])
    with pytest.raises(ValueError, match="either ids or requested"):
        write_replay(tmp_path / "x", [1])


def test_lost_or_double_counted_rows_are_refused(tmp_path):
    recorder = RoutingRecorder(tmp_path, 0, (1,), 4, 2)
    recorder.add(1, np.array([2, 2, 2, 2]))
    recorder.add(1, np.array([2, 2, 2, 2]))
    with pytest.raises(ValueError, match=r"layer 1 requested 16 rows, tokens \* top_k is 8"):
        recorder.end_step(1, tokens=4)
    recorder.add(1, np.array([2, 2]), np.array([3, 1]))
    with pytest.raises(ValueError, match=r"counts \(2,\), expected \(4,\)"):
        recorder.end_step(2)
    recorder.add(1, np.array([2, 2, 0, 0]), np.array([3, 1, 0, 0]))
    with pytest.raises(ValueError, match="expert 0 kept 3 rows of 2 requested"):
        recorder.end_step(3)
    with pytest.raises(ValueError, match="no MoE layer 7"):
        recorder.add(7, np.zeros(4))
    with pytest.raises(ValueError, match="top_k 5"):
        RoutingRecorder(tmp_path, 0, (1,), 4, 5)


def test_bad_files_are_refused_in_one_line(tmp_path):
    for name, content in (("a.npz", b"PK\x03\x04 not a zip"), ("b.npz", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}: not a routing file"):
            read_ids(tmp_path / name)
    np.savez(tmp_path / "c.npz", ids=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match="c.npz: not a routing file"):  # a pickle is never opened
        read_ids(tmp_path / "c.npz")
    np.savez(tmp_path / "d.npz", ids=np.zeros(3))
    with pytest.raises(ValueError, match="d.npz: holds ids; a routing file of schema 1"):
        read_ids(tmp_path / "d.npz")
    with pytest.raises(ValueError, match=r"layers hold \[3, 4\] rows"):
        write_histogram(np.array([[1, 2], [2, 2]]), tmp_path / "h.json")
    assert not (tmp_path / "h.json").exists()
    with pytest.raises(ValueError, match="no files of rows"):
        read_rows([])
