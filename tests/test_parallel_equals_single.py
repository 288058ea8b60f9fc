"""Does every layout take the step that one process takes: loss, every gradient, their norm, every route counted?

Float32 to a relative 1e-5 of each gradient's largest value; the summation order is all that differs. A router's decision never hangs
on it: the reference refuses one near a tie. bfloat16 to a stated bound, with routing that doesn't depend on values.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import numpy as np
import pytest
import reference_model as definition
import torch
from one_step import DOCUMENTS, TEXT, Seen, check, difference, parallel, reference, settings, skewed_record, worst_gradient

from moesim.layout import RECOMPUTE_ROLES, parse_layout
from moesim.load import parse_scenario
from moetrain import mesh as meshes
from moetrain.kernels import backend
from moetrain.moe import MoE, MoEOptions
from moetrain.place import place
from moetrain.recompute import Recompute
from moetrain.statistics import RoutingStatistics
from moetrain.testing import run_ranks

TOLERANCE = 1e-5
ALL_ROLES = "rc:" + "+".join(RECOMPUTE_ROLES)
CHUNKS = ("train.moe.chunks=2",)
MICRO, SEQUENCE = ("train.moe.aux_scope=micro",), ("train.moe.aux_scope=sequence",)


class Case(NamedTuple):
    """A layout of a model, its settings, and how many neighbouring data ranks the reference takes together (0: all)."""

    layout: str
    model: str = "pre"
    sets: tuple[str, ...] = ()
    ranks: int = 0
    keep: str = ""
    steps: int = 1

    @property
    def world(self) -> int:
        return parse_layout(self.layout).world


def ident(case: Case) -> str:
    return " ".join([case.model, case.layout.replace(ALL_ROLES, "rc:all"), *(s.removeprefix("train.").removeprefix("moe.") for s in case.sets if "/" not in s)])


def on_ranks(case: Case) -> list[Seen]:
    results = run_ranks(parallel, case.world, [(case.layout, case.model, case.sets)], case.steps)
    return [Seen(*rank[0]) for rank in results]


def wanted(case: Case) -> Seen:
    return reference(case.model, case.sets, case.layout, case.ranks, case.keep, case.steps)


def verify(case: Case) -> list[Seen]:
    found = on_ranks(case)
    for seen in found if parse_layout(case.layout).pp == 1 else [merged(found)]:
        check(seen, wanted(case), TOLERANCE)
    return found


def merged(found: list[Seen]) -> Seen:
    """What the stages of a pipeline saw together."""
    grads, loads = ({name: value for seen in found for name, value in getattr(seen, what).items()} for what in ("grads", "loads"))
    return replace(found[-1], grads=grads, loads=loads)


# --- the layer that all of it is about ------------------------------------------------------------------------------------------

LAYERS = [("reference", torch.float64, 1e-12), ("reference", torch.float32, 1e-5), ("grouped_mm", torch.float32, 1e-5), ("grouped_mm", torch.bfloat16, 3e-2)]
"""Backend, precision, and its bound on outputs and gradients relative to the largest value."""


@pytest.mark.parametrize("model", ["groups", "gate"])
@pytest.mark.parametrize("name, dtype, bound", LAYERS)
def test_route_permute_compute_and_combine_are_the_double_loop(model, name, dtype, bound):
    """Token by token, expert by expert, in float64, on the very same values."""
    spec = parse_scenario(TEXT, settings(model, ())).model
    options = MoEOptions(backend(name, "cpu", dtype))
    layer = MoE(spec, 1, meshes.single(), options, (0.3, 0.3), Recompute(), RoutingStatistics(spec.num_experts)).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(3)
    for tensor in [*layer.parameters(), layer.router.balance_bias]:
        tensor.data.normal_(0, 0.3, generator=generator)
    layer = layer.to(dtype)
    x = torch.randn(2, 12, spec.hidden_size, generator=generator).to(dtype).requires_grad_()
    upstream = torch.randn(x.shape, generator=generator)
    routed, shared = layer(x, place(None, torch.arange(2), 12, 1, 0))
    ((routed + shared) * upstream.to(dtype)).sum().backward()

    own = {"moe." + n: t.detach().double().requires_grad_() for n, t in [*layer.named_parameters(), *layer.named_buffers()]}
    y = x.detach().double().flatten(0, 1).requires_grad_()
    routing = definition.route(own, y, spec)
    wanted = definition._routed(own, y, routing, spec) + definition._shared(own, y, spec)
    (wanted * upstream.double().flatten(0, 1)).sum().backward()
    pairs = [((routed + shared).flatten(0, 1), wanted), (x.grad.flatten(0, 1), y.grad)] + [(p.grad, own["moe." + n].grad) for n, p in layer.named_parameters()]
    for found, right in pairs:
        assert float((found.double() - right).abs().max() / right.abs().max()) < bound


# --- one mix for each pair of axes ----------------------------------------------------------------------------------------------

MIXES = [
    Case("dp2 ep2 zero3 mb2 rc:full", "post"),
    Case("dp2 tp2 ep4 zero3 mb2 syncfree " + ALL_ROLES, "gate", CHUNKS),
    Case("dp2 cp2 ep2 zero2 mb2 syncfree ov:shared " + ALL_ROLES, "post", CHUNKS),
    Case("dp2 tp2 zero2 mb2 rc:full ov:shared", "tied", CHUNKS),
    Case("dp2 cp2 ep4 zero3 mb2 ov:shared rc:full", "mla", CHUNKS + DOCUMENTS),
    Case("dp4 rep2 ep2 zero3 mb1 syncfree ov:shared " + ALL_ROLES, "groups", CHUNKS),
    Case("dp2 cp2 tp2 ep4 zero0 mb2 syncfree ov:shared " + ALL_ROLES, "window", CHUNKS),
    Case("dp2 cp2 tp2 rep2 ep8 zero2 mb2", "branch"),
    Case("pp2 dp2 ep2 zero1 mb1 vpp2 zbv " + ALL_ROLES, "interval"),
]  # fmt: skip
AXES = {
    "ep": lambda layout, sets: layout.ep > 1, "tp": lambda layout, sets: layout.tp > 1, "cp": lambda layout, sets: layout.cp > 1,
    "rep": lambda layout, sets: layout.rep > 1, "zero0": lambda layout, sets: layout.zero == 0, "zero2": lambda layout, sets: layout.zero == 2,
    "zero3": lambda layout, sets: layout.zero == 3, "sync_free": lambda layout, sets: layout.dispatcher == "sync_free",
    "chunks": lambda layout, sets: CHUNKS[0] in sets, "shared": lambda layout, sets: layout.overlaps("shared"),
    "recompute": lambda layout, sets: bool(layout.recompute), "accumulation": lambda layout, sets: layout.mb * layout.dp < 8,
}  # fmt: skip
IMPOSSIBLE = {("rep", "zero0"), ("zero0", "zero2"), ("zero0", "zero3"), ("zero2", "zero3")}


@pytest.mark.parametrize("case", MIXES, ids=ident)
def test_a_mix_of_axes_takes_the_step_of_one_process(case):
    verify(case)


def test_every_pair_of_axes_is_in_a_mix():
    seen = [{name for name, has in AXES.items() if has(parse_layout(case.layout), case.sets)} for case in MIXES]
    missing = {pair for pair in combinations(AXES, 2) if not any(set(pair) <= axes for axes in seen)}
    assert missing == IMPOSSIBLE


# --- each axis alone, and more mixes (full) -------------------------------------------------------------------------------------

ALONE = [
    "dp2 ep2 mb4", "dp4 ep4 mb2", "dp8 ep8 mb1", "dp2 zero0 mb4", "dp2 zero1 mb2", "dp2 zero2 mb2", "dp2 zero3 mb2", "dp2 zero3 noreshard mb2", "dp4 rep2 zero1 mb1",
    "dp4 rep2 zero2 mb1", "dp4 rep2 zero3 mb1", "dp4 rep2 zero3 noreshard mb1", "tp2 mb8", "tp2 mb4", "cp2 mb8", "cp4 mb2", "dp2 ep2 syncfree mb4", "dp2 ep2 ov:shared mb4",
    "dp2 ep2 zero3 ov:fsdp1 mb2", "dp2 ep2 zero3 ov:param mb2",
]  # fmt: skip
SINGLES = [
    *(Case(layout, "post") for layout in ALONE), Case("tp2 ep2 mb8", "gate"), Case("cp2 ep2 mb8", "post"), Case("dp2 ep2 mb4", "pre", CHUNKS),
    *(Case(f"dp2 ep2 zero3 mb2 rc:{role}", model) for role in RECOMPUTE_ROLES for model in ("post", "mla")), Case("tp2 mb8 rc:full"),
]  # fmt: skip
MORE = [
    *(Case(layout, model) for model in ("pre", "mla", "mla_direct", "groups", "gate", "tied", "branch", "interval", "window", "full_norm")
      for layout in ("dp2 ep2 zero3 mb2", "dp2 cp2 ep4 mb4 " + ALL_ROLES, *(() if model == "full_norm" else ("dp2 tp2 ep4 zero3 mb2 rc:full",)))),
    *(Case(layout, model, DOCUMENTS) for model in ("post", "mla", "window") for layout in ("dp2 ep2 mb2", "cp2 ep2 mb8", "cp2 tp2 ep2 mb4 " + ALL_ROLES)),
    Case("dp4 cp2 ep8 zero3 noreshard mb2 rc:full", "post", CHUNKS), Case("dp4 tp2 ep2 rep4 zero3 mb1", "tied"), Case("dp2 tp4 ep8 mb4", "mla", CHUNKS),
    Case("dp8 ep4 rep2 zero2 mb1 syncfree", "groups"), Case("cp4 tp2 ep8 mb2 ov:shared", "mla", CHUNKS), Case("dp2 ep2 mb4", "pre", ("train.moe.chunks=5",)),
    Case("pp2 dp2 ep2 zero1 mb1 vpp2 zbv rc:full", "interval", CHUNKS), Case("pp2 tp2 dp2 ep4 mb2 1f1b " + ALL_ROLES, "mla"),
    Case("pp2 cp2 ep2 mb2 vpp2 dualpipev rc:full", "interval", MICRO), Case("pp2 dp2 ep2 zero3 noreshard mb1 gpipe rc:full", "tied"),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("case", [*SINGLES, *MORE], ids=ident)
def test_each_axis_alone_and_more_mixes_take_the_step_of_one_process(case):
    verify(case)


# --- what depends on which tokens stand together --------------------------------------------------------------------------------

SCOPES = [Case("dp2 ep2 mb2", "pre", MICRO, 1), Case("dp2 ep2 mb2", "pre", SEQUENCE, 1), Case("cp2 tp2 ep4 mb4", "pre", MICRO, 1)]
MORE_SCOPES = [
    Case("dp4 mb2", "pre", MICRO, 1), Case("dp2 cp2 ep2 mb4", "pre", SEQUENCE, 1), Case("tp2 mb2", "pre", SEQUENCE, 1), Case("dp4 ep4 zero3 mb1 rc:full", "groups", MICRO, 1),
    Case("dp2 ep2 mb2", "pre", ("train.moe.aux_loss=0", "train.moe.z_loss=0.1")), Case("dp2 ep2 mb2", "groups", ("train.moe.aux_loss=0.5",)),
]  # fmt: skip


@pytest.mark.parametrize("case", SCOPES, ids=ident)
def test_balance_losses_of_a_rank_or_a_sequence_are_those_of_its_tokens(case):
    verify(case)


@pytest.mark.full
@pytest.mark.parametrize("case", MORE_SCOPES, ids=ident)
def test_more_balance_losses_are_those_of_their_tokens(case):
    verify(case)


def test_a_rank_scoped_balance_loss_differs_from_a_global_one():
    """Else the cases above would prove nothing."""
    apart, one = reference("pre", MICRO, "dp4 mb2", 1), reference("pre", (), "dp4 mb2")
    assert abs(apart.loads[1][2] / one.loads[1][2] - 1) > 1e-3


# --- capacity, against double loops ---------------------------------------------------------------------------------------------

NO_BALANCE = ("train.moe.aux_loss=0", "train.moe.routing=random")


def capped(factor: float, scope: str, *more: str) -> tuple[str, ...]:
    return (f"workload.routing.capacity_factor={factor}", f"workload.routing.capacity_scope={scope}", *NO_BALANCE, *more)


CAPACITIES = [Case("dp2 ep2 mb2", "pre", capped(1.0, "expert"), 2, "expert"), Case("dp2 ep2 mb4 rc:full", "pre", capped(0.9, "rank"), 2, "rank"),
              Case("dp2 ep2 syncfree mb4", "pre", capped(0.9, "rank"), 2, "pair")]
MORE_CAPACITIES = [
    Case("dp4 ep4 mb2", "pre", capped(0.8, "expert"), 4, "expert"), Case("dp4 ep2 zero3 mb1 " + ALL_ROLES, "pre", capped(1.1, "expert"), 2, "expert"),
    Case("dp4 ep4 mb2", "pre", capped(0.8, "rank"), 4, "rank"), Case("dp8 ep4 mb1", "pre", capped(1.0, "rank"), 4, "rank"),
    Case("dp4 ep4 syncfree mb2 zero3 rc:full", "pre", capped(0.7, "rank"), 4, "pair"), Case("dp2 ep1 mb2", "pre", capped(0.9, "expert"), 1, "expert"),
]  # fmt: skip


@pytest.mark.parametrize("case", CAPACITIES, ids=ident)
def test_capacity_drops_what_a_double_loop_drops(case):
    requested, kept, *_ = verify(case)[0].loads[1]
    assert kept.sum() < requested.sum()


@pytest.mark.full
@pytest.mark.parametrize("case", MORE_CAPACITIES, ids=ident)
def test_more_capacities_drop_what_a_double_loop_drops(case):
    requested, kept, *_ = verify(case)[0].loads[1]
    assert kept.sum() < requested.sum()


# --- routing that is given, or moved by a bias ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> tuple[str, ...]:
    path = skewed_record(tmp_path_factory.mktemp("record") / "skewed.safetensors")
    return ("train.moe.routing=replay", f"train.moe.replay={path}")


REPLAYED = ["dp2 tp2 ep4 zero3 mb2 " + ALL_ROLES]
MORE_REPLAYED = ["dp8 ep8 mb1", "dp4 ep4 syncfree mb2 rc:full", "cp2 ep2 mb4 ov:shared", "dp2 ep2 zero0 mb4"]


def verify_replay(layout: str, record) -> None:
    seen = verify(Case(layout, "pre", record))[0]
    assert (seen.loads[1][0][-2:] == 0).all(), "the record has experts without a token"
    for name in ("gate_up", "down"):
        assert not seen.grads[f"layers.1.moe.experts.{name}"][-2:].any()


@pytest.mark.parametrize("layout", REPLAYED)
def test_a_skewed_record_is_replayed_alike_with_idle_experts(layout, record):
    verify_replay(layout, record)


@pytest.mark.full
@pytest.mark.parametrize("layout", MORE_REPLAYED)
def test_a_skewed_record_is_replayed_alike_under_more_layouts(layout, record):
    verify_replay(layout, record)


BIASED = ("train.moe.bias_rate=0.05", "train.moe.aux_loss=0")


@pytest.mark.parametrize("case", [Case("dp2 ep2 zero3 mb2 rc:full", "pre", BIASED, steps=2),
                                  pytest.param(Case("dp2 cp2 tp2 ep4 mb2", "groups", BIASED, steps=2), marks=pytest.mark.full)], ids=ident)
def test_the_bias_that_balances_without_a_loss_moves_alike_and_moves_the_choice(case):
    found = verify(case)
    for seen in found:
        for layer, bias in wanted(case).biases.items():
            np.testing.assert_array_equal(seen.biases[layer], bias)
            assert bias.any()
    still = reference(case.model, ("train.moe.aux_loss=0",), case.layout, steps=2, ties=True)
    assert any((still.loads[i][0] != load[0]).any() for i, load in wanted(case).loads.items())


# --- bfloat16 -------------------------------------------------------------------------------------------------------------------

BF16 = ("train.dtype=bfloat16", "train.moe.routing=random")
BF16_EACH, BF16_ALL, BF16_RATIO = 0.08, 0.03, 1.25
"""Error to float32, as a share (root of summed squares), of the worst gradient and of all as one vector; and how much further from
float32 than one bf16 process a layout may be. Unit roundoff is 2^-9; the worst are the few sums over all tokens of a norm's gains."""


def errors(found: Seen, exact: Seen) -> tuple[float, float]:
    """(of the worst gradient, of all)."""
    apart = {name: float(np.linalg.norm(found.grads[name] - grad)) for name, grad in exact.grads.items()}
    return max(apart[name] / float(np.linalg.norm(grad)) for name, grad in exact.grads.items()), float(np.linalg.norm(list(apart.values()))) / exact.norm


@pytest.mark.parametrize("case", [Case("dp2 ep2 zero3 mb4 " + ALL_ROLES, "post", BF16),
                                  *(pytest.param(Case(layout, "post", BF16), marks=pytest.mark.full) for layout in (
                                      "dp2 tp2 ep4 mb4", "cp2 ep2 mb8 rc:full", "dp4 ep4 syncfree mb2 zero0", "dp4 rep2 ep2 zero2 mb1"))], ids=ident)
def test_a_bfloat16_layout_is_as_near_to_float32_as_one_process(case):
    exact = reference(case.model, (BF16[1],), case.layout)
    alone = errors(on_ranks(Case("mb8", case.model, BF16))[0], exact)
    for seen in on_ranks(case):
        worst, total = errors(seen, exact)
        assert worst < BF16_EACH and total < BF16_ALL and total < alone[1] * BF16_RATIO, (worst, total, alone)
        assert difference(seen.loss, exact.loss) < 1e-3 and abs(seen.norm / exact.norm - 1) < 5e-3


def test_the_comparison_sees_a_gradient_that_is_off_by_a_factor():
    """A norm multiplied by the number of expert ranks, one gradient twice as large, one route lost: each fails."""
    good = reference("pre")
    for bad in (good.__class__(**{**vars(good), "norm": good.norm * 2**0.5}),
                good.__class__(**{**vars(good), "grads": {**good.grads, "layers.1.moe.experts.down": good.grads["layers.1.moe.experts.down"] * 2}}),
                good.__class__(**{**vars(good), "loads": {**good.loads, 1: (good.loads[1][0] + 1, *good.loads[1][1:])}})):
        with pytest.raises(AssertionError):
            check(bad, good, TOLERANCE)
    assert worst_gradient(good, good)[0] == 0.0
