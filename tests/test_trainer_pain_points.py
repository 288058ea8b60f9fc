"""What has cost users of other trainers a run: does it happen here?

NaN out of fresh memory, gradients off by the size of a group, hangs at uneven splits, wrong FLOP, statistics counted twice, drops
nobody saw, two runs that differ, overlap that changes numbers, speed measured on weights that are all zero. (Memory at resume, loss
after resume, resharding, recompilation and slow links have tests of their own.)
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import pytest
import reference_model as definition
import torch
from kernel_oracles import poisoned
from one_step import DOCUMENTS, ROWS, SEQ_LEN, TEXT, TOKENS, TOP_K, VOCAB, Seen, batch_of, check, parallel, reference, settings, skewed_record, take_step, together, whole
from safetensors.torch import save_file

from moesim.layout import RECOMPUTE_ROLES, Layout, parse_layout
from moesim.load import parse_scenario
from moetrain import build, sharding, step
from moetrain.collectives import all_to_all, start_all_to_all
from moetrain.data.batch import Batch
from moetrain.kernels.flops import flop_counter
from moetrain.mesh import build as build_mesh
from moetrain.observe.flops import row_flops, step_flops
from moetrain.optim import clip_
from moetrain.place import place
from moetrain.step import Microbatch
from moetrain.testing import run_ranks

TOLERANCE = 1e-5
ALL_ROLES = "rc:" + "+".join(RECOMPUTE_ROLES)
PLAIN = ("train.moe.aux_loss=0", "train.moe.z_loss=0", "train.network.head_z_loss=0")


@pytest.fixture(scope="module")
def skewed(tmp_path_factory) -> tuple[str, ...]:
    """Most tokens to few experts, none to the last two."""
    path = skewed_record(tmp_path_factory.mktemp("record") / "skewed.safetensors")
    return ("train.moe.routing=replay", f"train.moe.replay={path}")


@pytest.fixture(scope="module")
def hot(tmp_path_factory) -> tuple[str, ...]:
    """Every route to the last two experts: one rank gets all rows, the others none."""
    path = tmp_path_factory.mktemp("record") / "hot.safetensors"
    save_file({f"layer.{i}": torch.tensor([[6, 7]]).repeat(TOKENS, 1) for i in range(4)}, str(path))
    return ("train.moe.routing=replay", f"train.moe.replay={path}")


def on_ranks(layout: str, *sets: str, model: str = "pre", fn=parallel) -> list[Seen]:
    world = parse_layout(layout).world
    return [Seen(*rank[0]) for rank in run_ranks(fn, world, [(layout, model, sets)])]


# --- 1. fresh memory is not zero -------------------------------------------------------------------------------------------------


def poisoned_parallel(rank: int, world: int, cases) -> list:
    """As ``parallel``, where every buffer that nobody has written reads as NaN."""
    with poisoned():
        assert torch.empty(4).isnan().all() and torch.ones(2).new_empty(3).isnan().all()
        return parallel(rank, world, cases)


POISONED = ["dp2 ep2 zero3 mb2", "dp4 ep4 syncfree mb2 " + ALL_ROLES]
MORE_POISONED = ["dp8 ep8 mb1 rc:full", "cp2 tp2 ep4 mb4", "dp4 rep2 ep2 zero2 mb1", "dp2 ep2 zero0 mb2 ov:shared"]


def verify_poisoned(layout: str, sets: tuple[str, ...]) -> None:
    for seen in on_ranks(layout, *sets, fn=poisoned_parallel):
        check(seen, reference("pre", sets, layout), TOLERANCE)
        for layer in (1, 2):
            idle = seen.loads[layer][0] == 0
            assert idle.any()
            for name in ("gate_up", "down"):
                assert not seen.grads[f"layers.{layer}.moe.experts.{name}"][idle].any()


@pytest.mark.parametrize("layout", POISONED)
def test_1_poisoned_memory_and_idle_experts(layout, skewed):
    verify_poisoned(layout, skewed)


@pytest.mark.full
@pytest.mark.parametrize("layout", MORE_POISONED)
def test_1_more_poisoned_memory_and_idle_experts(layout, skewed):
    verify_poisoned(layout, skewed)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["dp8 ep8 mb1", "dp4 ep4 syncfree mb2 rc:full"])
def test_1_ranks_without_a_row(layout, hot):
    verify_poisoned(layout, hot)


# --- 2. gradients whatever the size of the expert group ---------------------------------------------------------------------------


def defined_step(sets: tuple[str, ...]) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients of the slow definition in float64, from the parameters that the trainer starts with."""
    scenario = parse_scenario(TEXT, settings("pre", sets))
    job = build.make_job(scenario, Layout(mb=ROWS))
    params = {name: p.detach().double().requires_grad_() for name, p in sharding.named_parameters(job.parts)}
    batch, network = batch_of(0), scenario.train.network
    logits = definition.forward(params, scenario.model, batch.tokens, constants=definition.Constants(network.rope_theta, network.norm_eps, network.embed_scale))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100, reduction="sum") / TOKENS
    loss.backward()
    return float(loss), {name: p.grad.numpy() for name, p in params.items()}


def test_2_gradients_and_norm_don_t_depend_on_the_expert_group():
    """Eight data ranks, experts over 1, 2, 4 and 8 of them, with and without accumulation; one answer, and it is the definition's."""
    loss, grads = defined_step(PLAIN)
    norm = math.sqrt(sum(float((g**2).sum()) for g in grads.values()))
    cases = [("dp4 mb2", 4), ("dp4 ep2 zero2 mb1", 4), ("dp4 ep4 zero3 mb2", 4), ("dp2 ep2 mb1", 2), ("dp2 zero0 mb4", 2), ("dp8 ep8 mb1", 8)]
    for world in (2, 4, 8):
        layouts = [layout for layout, size in cases if size == world]
        for rank in run_ranks(parallel, world, [(layout, "pre", PLAIN) for layout in layouts]):
            for seen in (Seen(*case) for case in rank):
                assert abs(seen.loss[0] / loss - 1) < TOLERANCE and abs(seen.norm / norm - 1) < TOLERANCE
                worst = max(float(np.abs(seen.grads[n] - g).max() / np.abs(g).max()) for n, g in grads.items())
                assert worst < TOLERANCE


# --- 6. uneven splits, and one order of collectives ------------------------------------------------------------------------------


def exchange(rank: int, world: int, rounds: int) -> list:
    """Rows r * 1000 + s * 100 + i from rank s to rank r, by random splits with zeros and one hot peer; there, and gradients back."""
    ep = build_mesh(parse_layout(f"dp{world} ep{world}"))["ep"]
    for number in range(rounds):
        splits = torch.randint(0, 4, (world, world), generator=torch.Generator().manual_seed(number))
        splits[:, number % world] = 40
        splits[number % world, :] *= number % 2
        splits = splits if number else torch.zeros_like(splits)
        send, receive = splits[rank].tolist(), splits[:, rank].tolist()
        x = torch.cat([r * 1000.0 + rank * 100 + torch.arange(n) for r, n in enumerate(send)])[:, None].expand(-1, 3).contiguous().requires_grad_()
        wait = start_all_to_all(x, send, receive, ep, "dispatch") if number % 2 else lambda x=x, s=send, r=receive: all_to_all(x, s, r, ep, "dispatch")
        out = wait()
        wanted = torch.cat([rank * 1000.0 + s * 100 + torch.arange(n) for s, n in enumerate(receive)])
        assert torch.equal(out, wanted[:, None].expand(-1, 3)), (number, send, receive)
        (out * 2).sum().backward()
        assert torch.equal(x.grad, torch.full_like(x, 2.0))
    return []


def test_6_splits_with_zeros_and_a_hot_peer_arrive_and_return():
    run_ranks(exchange, 4, 6)


def order(seen: Seen) -> list[tuple]:
    return [(e.kind, e.role, e.group, e.phase) for e in seen.entries]


@pytest.mark.parametrize("layout", ["dp2 ep2 zero3 mb2 rc:full", pytest.param("dp2 cp2 tp2 ep8 mb4 " + ALL_ROLES, marks=pytest.mark.full)])
def test_6_all_ranks_issue_the_same_collectives_in_the_same_order(layout, hot):
    """Also where one rank has every row and another none."""
    first, *others = on_ranks(layout, *hot)
    assert order(first) and all(order(other) == order(first) for other in others)
    check(first, reference("pre", hot, layout), TOLERANCE)


# --- 9. FLOP -----------------------------------------------------------------------------------------------------------------------

# A CPU has flash attention only for values as wide as keys.
FLOP_MODELS = [("pre", ()), ("gate", ()), ("groups", ()), ("tied", ()), ("interval", ()), ("mla", ("model.v_head_dim=12",)), ("mla_direct", ("model.v_head_dim=12",))]


def counted(model: str, text: str, sets: tuple[str, ...] = ()) -> tuple[float, float]:
    """(FLOP that torch counts in a step, rows dropped) in one process."""
    job = build.make_job(parse_scenario(TEXT, settings(model, sets)), parse_layout(text))
    full, rows = batch_of(0), together(job.layout, 1)
    microbatches = [Microbatch(full.tokens[r], full.labels[r], place(None, torch.tensor(r), SEQ_LEN, 1, 0)) for r in rows]
    with flop_counter(display=False) as counter:
        step.forward_backward(job, microbatches)
    loads = job.statistics.collect(job.mesh["data"])
    return float(counter.get_total_flops()), sum(load.dropped for load in loads.values())


def ledger(model: str, roles: tuple[str, ...] = (), dropped: float = 0.0, sets: tuple[str, ...] = ()) -> float:
    """The planner's FLOP of the step, attention as torch counts it: every pair of the square, and where it is recomputed."""
    spec = parse_scenario(TEXT, settings(model, sets)).model
    found = step_flops(spec, tokens=TOKENS, seq_len=SEQ_LEN, recompute=roles, dropped_rows=dropped)
    exact = TOKENS * spec.flops_by_role(SEQ_LEN)["attention_core"]
    again = exact / 3 if {"full", "core_attn"} & set(roles) else 0.0
    widths = (spec.head_dim, spec.v_head_dim if spec.attention == "mla" else spec.head_dim)
    forward = 2.0 * spec.num_layers * ROWS * spec.num_heads * SEQ_LEN**2 * sum(widths)
    # Backward of a flash kernel: scores again, then two products for each of its two forward ones.
    square = forward * (1 + bool(again)) + 2 * forward + 2.0 * spec.num_layers * ROWS * spec.num_heads * SEQ_LEN**2 * widths[0]
    return found.hardware - exact - found.attention_recompute - again + square


@pytest.mark.parametrize("model, sets", FLOP_MODELS)
def test_9_torch_counts_the_flop_of_the_ledger(model, sets):
    assert counted(model, f"mb{ROWS}", sets)[0] == pytest.approx(ledger(model, sets=sets), rel=1e-12)
    assert counted(model, "mb2", sets)[0] == pytest.approx(ledger(model, sets=sets), rel=1e-12)


@pytest.mark.parametrize("role", [*RECOMPUTE_ROLES, "full"])
def test_9_recomputed_work_is_counted_apart_and_exactly(role):
    # The one column of the shared branch's gate stands behind tp's scatter and is not done again.
    column = 2.0 * TOKENS * 32 * 2 if role == "shared" else 0.0
    assert counted("gate", f"mb4 rc:{role}")[0] == pytest.approx(ledger("gate", (role,)) - column, rel=1e-12)
    model, sets = "mla", ("model.v_head_dim=12",)
    assert counted(model, f"mb4 rc:{role}", sets)[0] == pytest.approx(ledger(model, (role,), sets=sets), rel=1e-12)


def test_9_dropped_rows_are_not_counted():
    sets = ("workload.routing.capacity_factor=0.7", "train.moe.routing=random", "train.moe.aux_loss=0")
    flops, dropped = counted("pre", f"mb{ROWS}", sets)
    assert dropped > 0 and flops == pytest.approx(ledger("pre", dropped=dropped), rel=1e-12)
    assert ledger("pre") - flops == dropped * row_flops(parse_scenario(TEXT).model)


# --- 10. counted once ----------------------------------------------------------------------------------------------------------------

ONCE = ["dp2 ep2 mb4", "dp2 ep2 mb1 rc:full", "dp2 ep2 syncfree mb2 " + ALL_ROLES]


def counted_twice_if_wrong(rank: int, world: int, texts: list[str], sets: tuple[str, ...]) -> list:
    """Loads of two steps, each with an evaluation between (which counts nothing)."""
    seen = []
    for text in texts:
        job = build.make_job(parse_scenario(TEXT, settings("pre", sets)), parse_layout(text))
        rows = torch.arange(ROWS).chunk(job.layout.dp)[job.mesh["dp"].rank]
        for number in range(2):
            full = batch_of(number)
            mine = Batch(full.tokens[rows], full.labels[rows], full.documents[rows])
            step.evaluate(job, step.cut(mine, job, number))
            seen.append(take_step(job, step.cut(mine, job, number)).loads)
    return seen


@pytest.mark.parametrize("factor", [None, 0.9])
def test_10_routes_are_counted_once(factor):
    """Under recompute, accumulation, evaluations; requested = kept + dropped; k routes for each token in each layer."""
    sets = ("train.moe.routing=random",) + (() if factor is None else (f"workload.routing.capacity_factor={factor}",))
    found = run_ranks(counted_twice_if_wrong, 2, ONCE, sets)
    assert all(len(rank) == 2 * len(ONCE) for rank in found)
    for loads in (loads for rank in found for loads in rank):
        assert sorted(loads) == [1, 2]
        for requested, kept, *_ in loads.values():
            assert requested.sum() == TOKENS * TOP_K and (kept <= requested).all()
            assert (kept.sum() < requested.sum()) == (factor is not None)


# --- 11. drops are seen, and policies compared on one trace -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> str:
    """Routes of two layers as a router with noise would have them: shares near even, different in each layer."""
    generator = torch.Generator().manual_seed(5)
    path = tmp_path_factory.mktemp("trace") / "trace.safetensors"
    save_file({f"layer.{i}": torch.multinomial(torch.rand(8, generator=generator).add(1.0).expand(TOKENS, -1), TOP_K, generator=generator)
               for i in range(4)}, str(path))
    return str(path)


@lru_cache(maxsize=None)
def drops(trace: str, policy: str, factor: float) -> float:
    """Share of routes dropped on four ranks by one policy: expert | rank (pooled over senders) | pair (each sender by itself)."""
    layout = "dp4 ep4 mb2" + (" syncfree" if policy == "pair" else "")
    scope = "expert" if policy == "expert" else "rank"
    sets = ("train.moe.routing=replay", f"train.moe.replay={trace}", f"workload.routing.capacity_factor={factor}",
            f"workload.routing.capacity_scope={scope}", "train.moe.aux_loss=0")
    loads = on_ranks(layout, *sets)[0].loads.values()
    return 1 - sum(kept.sum() for _, kept, *_ in loads) / sum(requested.sum() for requested, *_ in loads)


def test_11_drops_are_reported_and_a_pooled_receiver_drops_least(trace):
    shares = {policy: drops(trace, policy, 1.0) for policy in ("rank", "pair", "expert")}
    assert 0 < shares["rank"] < shares["pair"] and shares["rank"] < shares["expert"] < 0.5, shares


@pytest.mark.full
def test_11_drops_fall_with_capacity_to_none(trace):
    for policy in ("rank", "pair", "expert"):
        falling = [drops(trace, policy, factor) for factor in (0.8, 1.0, 1.2, 1.5, 4.0)]
        assert falling == sorted(falling, reverse=True) and falling[0] > 0.1 and falling[-1] == 0.0, (policy, falling)


# --- 12. the same run twice ----------------------------------------------------------------------------------------------------------


def short_run(rank: int, world: int, layout: str, sets: tuple[str, ...]) -> dict:
    """Parameters after two steps in deterministic mode."""
    torch.use_deterministic_algorithms(True)
    job = build.make_job(parse_scenario(TEXT, settings("groups", sets)), parse_layout(layout))
    optimizer = build.make_optimizer(job)
    rows = torch.arange(ROWS).chunk(job.layout.dp)[job.mesh["dp"].rank]
    for number in range(2):
        full = batch_of(number)
        seen = take_step(job, step.cut(Batch(full.tokens[rows], full.labels[rows], full.documents[rows]), job, number))
        clip_([sharding.named_parameters(job.parts)], torch.tensor(seen.norm), 1.0)
        optimizer.step()
    return {name: whole(p) for name, p in sharding.named_parameters(job.parts)}


@pytest.mark.parametrize("layout", ["dp2 ep2 zero3 mb2 rc:full", pytest.param("dp2 cp2 tp2 ep4 mb2 syncfree " + ALL_ROLES, marks=pytest.mark.full)])
def test_12_two_runs_are_bitwise_equal(layout):
    sets = ("train.moe.aux_loss=0.1", *DOCUMENTS, "train.moe.chunks=2")
    one, two = (run_ranks(short_run, parse_layout(layout).world, layout, sets) for _ in range(2))
    for a, b in zip(one, two, strict=True):
        assert all(a[name].tobytes() == b[name].tobytes() for name in a)


# --- 14. overlap ---------------------------------------------------------------------------------------------------------------------

OVERLAPS = [("dp2 ep2 zero3 mb2 ov:shared", ()), ("dp2 ep2 zero3 mb2 ov:fsdp1+param+grad", ())]
CHUNKED = [("dp2 ep2 zero3 mb2 ov:shared", ("train.moe.chunks=3",)), ("dp2 ep2 zero3 mb2 syncfree", ("train.moe.chunks=4",))]


def test_14_overlap_changes_no_bit_and_chunks_only_the_order_of_sums():
    cases = [("dp2 ep2 zero3 mb2", "gate", ()), *((layout, "gate", sets) for layout, sets in OVERLAPS + CHUNKED)]
    for rank in run_ranks(parallel, 2, cases):
        serial, *others = (Seen(*case) for case in rank)
        for seen in others[: len(OVERLAPS)]:
            assert seen.norm == serial.norm and all(np.array_equal(seen.grads[name], grad) for name, grad in serial.grads.items())
        for seen in others[len(OVERLAPS):]:
            check(seen, serial, TOLERANCE)


# --- 16. weights that mean something ------------------------------------------------------------------------------------------------


def test_16_training_starts_from_random_weights_and_an_even_guess():
    scenario = parse_scenario(TEXT, ["train.network.init_std=0.02", "train.moe.aux_loss=0", "train.moe.z_loss=0"])
    job = build.make_job(scenario, Layout(mb=ROWS))
    norm_like = ("norm", "bias", "sinks")
    for name, parameter in sharding.named_parameters(job.parts):
        value = parameter.detach()
        if any(word in name.split(".")[-2] or name.endswith(word) for word in norm_like):
            assert (value == 1).all(), name
            continue
        std = 0.02 / (math.sqrt(2 * scenario.model.num_layers) if name.split(".")[-2] in ("out", "down") or name.endswith("experts.down") else 1)
        # Cut at three standard deviations: 0.9866 of the plain one.
        assert abs(float(value.std()) / (0.9866 * std) - 1) < 5 / math.sqrt(2 * value.numel()), name
        assert float(value.abs().max()) <= 3 * std and value.unique().numel() > 0.99 * value.numel(), name
    experts = dict(sharding.named_parameters(job.parts))["layers.1.moe.experts.gate_up"].detach().flatten(1)
    assert (torch.corrcoef(experts) - torch.eye(len(experts))).abs().max() < 0.2
    full = batch_of(0)
    loss = take_step(job, [Microbatch(full.tokens, full.labels, place(None, torch.arange(ROWS), SEQ_LEN, 1, 0))]).loss
    labelled = float((full.labels != -100).sum()) / TOKENS
    assert float(loss[0]) / labelled == pytest.approx(math.log(VOCAB), abs=0.05)
