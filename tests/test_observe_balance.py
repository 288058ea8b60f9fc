"""Are the imbalance figures those of plain numpy, and do they stay sane at the edges?"""

import numpy as np
import pytest

from moetrain.observe.balance import drop_fraction, entropy_index, layer_figures, max_over_mean, of_loads, rank_rows, summarise


def test_figures_equal_their_definitions():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 100, size=(3, 5, 16))
    assert np.allclose(max_over_mean(counts), counts.max(-1) / counts.mean(-1))
    assert np.array_equal(rank_rows(counts, 4), np.stack([counts[..., 4 * r : 4 * r + 4].sum(-1) for r in range(4)], -1))
    for layer in counts.reshape(-1, 16):
        shares = layer[layer > 0] / layer.sum()
        assert entropy_index(layer) == pytest.approx(1 + (shares * np.log(shares)).sum() / np.log(16))
    kept = np.minimum(counts, 50)
    assert np.allclose(drop_fraction(counts, kept), 1 - kept.sum(-1) / counts.sum(-1))


def test_ends_of_the_scale():
    even, one, none = np.full(8, 7), np.eye(8, dtype=int)[0] * 7, np.zeros(8, int)
    assert (max_over_mean(even), entropy_index(even)) == (1, pytest.approx(0, abs=1e-12))
    assert (max_over_mean(one), entropy_index(one)) == (8, 1)
    assert (max_over_mean(none), entropy_index(none), drop_fraction(none, none)) == (1, pytest.approx(0, abs=1e-12), 0)
    assert entropy_index(np.array([5])) == 0


def test_impossible_counts_are_refused():
    with pytest.raises(ValueError, match="ep 3 must divide 8 experts"):
        rank_rows(np.ones(8), 3)
    with pytest.raises(ValueError, match="must not exceed requested"):
        drop_fraction(np.array([1, 2]), np.array([2, 1]))


def test_the_summary_conserves_rows_and_names_the_worst_layer():
    """Entropy is of what the router asked for, busiest rows of what was computed: a capacity must not hide a collapsed router."""
    requested = np.array([[90, 4, 3, 3], [25, 25, 25, 25]])
    kept = np.minimum(requested, 30)
    found = summarise(requested, kept, ep=2, capacity_factor=1.2)
    assert (found.requested_rows, found.kept_rows, found.capacity_factor) == (200, 140, 1.2)
    assert found.worst_drop == pytest.approx(0.6) and found.drop_fraction == pytest.approx(0.3)
    assert found.worst_expert == pytest.approx(30 / 10) and found.worst_rank == pytest.approx(34 / 20)
    assert found.worst_entropy > 0.6 > found.entropy_index
    assert {name: values.shape for name, values in layer_figures(requested, None, 1).items()}.keys() >= {"entropy_index"}
    assert summarise(requested, ep=4).drop_fraction == 0


def test_the_trainers_loads_become_a_balance():
    """Rows of ranks as measured by microbatch win over rows summed over the step."""
    import torch

    from moetrain.statistics import LayerLoad

    loads = {i: LayerLoad(torch.tensor([6, 2, 4, 4]), torch.tensor([5, 2, 4, 4]), busiest_rank=12.0 + i, mean_rank=8.0, balance_loss=0.0, z_loss=0.0) for i in (2, 1)}
    balance, layers, rows = of_loads(loads, ep=2, routing="learned", capacity_factor=1.25, capacity_scope="rank")
    assert balance.max_over_mean_rank == pytest.approx(13.5 / 8) and balance.worst_rank == pytest.approx(14 / 8)
    assert (balance.requested_rows, balance.kept_rows, balance.capacity_scope) == (32, 30, "rank")
    assert list(layers) == ["1", "2"] and layers["2"]["max_over_mean_rank"] == pytest.approx(14 / 8) and layers["1"]["drop_fraction"] == pytest.approx(1 / 16)
    assert rows["1"].tolist() == [6, 2, 4, 4]
    with pytest.raises(ValueError, match="no MoE layers"):
        of_loads({}, 1)
