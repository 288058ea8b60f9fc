"""Does a pipeline train the model that one process trains, in the order that the planner wrote, and send what the planner counts?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from moesim.layout import parse_layout, stage_layers
from moesim.load import parse_scenario
from moesim.ops import Group
from moesim.program import COMPUTE
from moesim.schedules import SCHEDULES, Action, flatten, live_vectors
from moetrain import build, pipeline, sharding, step
from moetrain.data.batch import Batch
from moetrain.observe.trace import SpanRecorder
from moetrain.optim import grad_norm, stage_copies
from moetrain.router import Router
from moetrain.testing import run_ranks

ROWS, SEQ_LEN, VOCAB, TOP_K = 16, 16, 64, 2
TEXT = f"""
name: pipes
seed: 3
model: {{name: tiny, num_layers: 4, hidden_size: 32, vocab_size: {VOCAB}, num_heads: 4, num_kv_heads: 2, head_dim: 8, intermediate_size: 48,
  num_experts: 8, top_k: {TOP_K}, moe_intermediate_size: 24, num_shared_experts: 1, num_leading_dense_layers: 1, qk_norm: per_head}}
cluster: cpu_gloo
workload: {{seq_len: {SEQ_LEN}, global_batch_tokens: {ROWS * SEQ_LEN}, routing: {{kind: balanced}}}}
train: {{moe: {{aux_loss: 0.02, z_loss: 0.001}}, optimizer: {{lr: 0.01, clip: 0}}, network: {{head_z_loss: 0.001}}}}
"""
EIGHT = ("model.num_layers=8",)
TIED = ("model.tie_embeddings=true",)
PP2 = {"gpipe": "pp2 gpipe mb2", "1f1b": "pp2 1f1b mb2", "interleaved": "pp2 vpp2 interleaved mb2", "interleaved_zb": "pp2 vpp2 interleaved_zb mb2",
       "zbv": "pp2 vpp2 zbv mb2", "dualpipev": "pp2 vpp2 dualpipev mb2"}
MIXES = ["pp2 dp2 ep2 vpp2 zbv mb2", "pp2 dp2 ep2 1f1b mb1", "pp2 tp2 vpp2 interleaved_zb mb2", "pp2 cp2 vpp2 interleaved mb2",
         "pp2 dp2 ep2 vpp2 dualpipev zero0 mb2", "pp2 dp2 ep2 vpp2 zbv zero3 noreshard mb2"]
TOLERANCE = 1e-5


# --- one step on every rank, and what it left --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a step. ``done`` the actions that ran, ``live`` the most microbatches whose activations it held at once."""

    loss: np.ndarray
    norm: float
    grads: dict[str, np.ndarray]
    requested: dict[int, np.ndarray]
    messages: list[tuple]
    done: list[Action]
    live: int
    evaluation: float
    margin: float


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def rows_of(layout, rank: int, together: int) -> torch.Tensor:
    """Row numbers of data rank ``rank`` in the order that it takes them. One process that stands for ``together`` data ranks takes
    each microbatch of theirs as one."""
    if together == 1:
        return torch.arange(ROWS).chunk(layout.dp)[rank]
    return torch.arange(ROWS).view(together, -1, layout.mb // together).transpose(0, 1).flatten()


def batch_of(job, together: int = 1, seed: int = 1) -> Batch:
    ids = torch.randint(0, VOCAB, (ROWS, SEQ_LEN + 1), generator=torch.Generator().manual_seed(seed))
    ids = ids[rows_of(job.layout, job.mesh["dp"].rank, together)]
    labels = ids[:, 1:].contiguous()
    labels[:, 5] = -100
    return Batch(ids[:, :-1], labels, torch.zeros_like(labels, dtype=torch.int32))


def job_of(text: str, world: int, sets) -> build.Job:
    scenario = parse_scenario(TEXT, list(sets))
    return build.make_job(scenario, build.layout_of(scenario, text, world))


def watch_margins() -> list[float]:
    """Fills with the distance, in logits, by which each token's last chosen expert beat the first that was not."""
    margins, forward = [], Router.forward

    def wrapped(self, *args):
        routing = forward(self, *args)
        best = routing.logits.detach().sort(-1, descending=True).values
        margins.append(float((best[:, TOP_K - 1] - best[:, TOP_K]).min()))
        return routing

    Router.forward = wrapped
    return margins


def watch_actions() -> tuple[list[Action], list[int]]:
    """Fills with what the stages of this rank do, and how many microbatches are held after each."""
    done, live, stage_class = [], [], pipeline._PipelineStage
    stages = set()

    def watched(name: str, letter):
        inner = getattr(stage_class, name)

        def wrapped(self, chunk, *args, **kwargs):
            out = inner(self, chunk, *args, **kwargs)
            done.append(Action(self.stage_index, letter(kwargs), chunk))
            stages.add(self)
            live.append(sum(len(s.fwd_cache) + len(s.backward_state) for s in stages))
            return out

        setattr(stage_class, name, wrapped)

    watched("forward_one_chunk", lambda kwargs: "F")
    watched("backward_one_chunk", lambda kwargs: "B" if kwargs["full_backward"] else "I")
    watched("backward_weight_one_chunk", lambda kwargs: "W")
    return done, live


def norm_of(job) -> float:
    return float(grad_norm([sharding.once(job.parts)], job.mesh["world"].pg, stage_copies(job.layout.world // job.layout.pp)))


def grads_of(job) -> dict[str, torch.Tensor]:
    return {name: whole(p.grad).float().clone() for name, p in sharding.named_parameters(job.parts)}


def one_step(rank: int, world: int, text: str, sets, together: int) -> tuple:
    margins, (done, live) = watch_margins(), watch_actions()
    job = job_of(text, world, sets)
    microbatches = step.cut(batch_of(job, together), job, 0)
    job.mesh.log.recording = True
    loss = step.reduce_loss(job, step.forward_backward(job, microbatches))
    messages = [(e.kind, e.role, e.bytes, e.group, e.phase) for e in job.mesh.log.entries if e.kind == "send_recv"]
    done, live = list(done), max(live, default=0)
    requested = {layer: load.requested for layer, load in job.statistics.collect(job.mesh["data"]).items()}
    grads, norm = grads_of(job), norm_of(job)
    evaluation = float(step.evaluate(job, microbatches)) / job.layout.tp
    # An evaluation counts no routes and leaves gradients and memory as they were.
    assert not job.statistics.collect(job.mesh["data"])
    again = grads_of(job)
    assert all(torch.equal(grads[name], again[name]) for name in grads)
    assert job.pipeline is None or all(info.buffer.is_meta for stage in job.pipeline.training._stages
                                       for infos in (*stage.args_recv_info.values(), *stage.grad_recv_info.values())
                                       for info in infos if getattr(info, "buffer", None) is not None)
    return tuple(getattr(part, "tolist", lambda part=part: part)() if i == 0 else part for i, part in enumerate(
        (loss, norm, grads, requested, messages, done, live, evaluation, min(margins, default=1.0))))


@lru_cache(maxsize=64)
def run(text: str, sets: tuple[str, ...] = (), together: int = 1) -> list[Seen]:
    skip_unless_runnable(text)
    world = parse_layout(text).world
    return [Seen(np.array(loss), *rest) for loss, *rest in run_ranks(one_step, world, text, sets, together)]


def skip_unless_runnable(text: str) -> None:
    if SCHEDULES[parse_layout(text).schedule].splits_backward and not pipeline.can_split_backward():
        pytest.skip(f"torch {torch.__version__} can't split a backward")


def reference(text: str, sets: tuple[str, ...] = ()) -> Seen:
    """One process on the same microbatches: those of all data ranks side by side."""
    layout = parse_layout(text)
    (seen,) = run(f"mb{layout.mb * layout.dp}", sets, layout.dp)
    return seen


def gathered(ranks: list[Seen]) -> dict[str, np.ndarray]:
    return {name: grad for seen in ranks for name, grad in seen.grads.items()}


def assert_same_step(text: str, sets: tuple[str, ...] = (), tolerance: float = TOLERANCE) -> None:
    ranks, one = run(text, sets), reference(text, sets)
    # Rounding can't send a token elsewhere: what differs is arithmetic.
    assert one.margin > 2e-5, f"choose another seed: a token's choice is as close as {one.margin}"
    grads = gathered(ranks)
    assert grads.keys() == one.grads.keys()
    for seen in ranks:
        np.testing.assert_allclose(seen.loss, one.loss, rtol=tolerance)
        assert seen.norm == pytest.approx(one.norm, rel=tolerance)
    for name, grad in one.grads.items():
        assert np.abs(grads[name] - grad).max() <= tolerance * np.abs(grad).max(), name
    assert sum(seen.evaluation for seen in ranks) == pytest.approx(one.evaluation, rel=tolerance)


def assert_order_and_messages(text: str, sets: tuple[str, ...] = ()) -> None:
    layout, ranks = parse_layout(text), run(text, sets)
    n, width = ROWS // (layout.dp * layout.mb), layout.world // layout.pp
    schedule = SCHEDULES[layout.schedule]
    orders, placement = schedule.orders(layout.pp, n, layout.vpp), schedule.placement(layout.pp, layout.vpp)
    size = layout.mb * SEQ_LEN // (layout.cp * layout.tp) * 32 * 4
    most = [max(map(sum, vectors)) for vectors in live_vectors(orders, placement, layout.vpp)]
    for rank, seen in enumerate(ranks):
        stage_rank = rank // width
        order = list(flatten(orders[stage_rank]))
        assert seen.done == order
        away = {stage: [0 <= other < len(placement) and placement[other] != stage_rank for other in (stage + 1, stage - 1)] for stage in
                range(len(placement))}
        expected = {"forward": sum(away[a.stage][0] for a in order if a.letter == "F"),
                    "backward": sum(away[a.stage][1] for a in order if a.letter in "BI")}
        sent = {phase: [m for m in seen.messages if m[-1] == phase] for phase in expected}
        assert {phase: len(found) for phase, found in sent.items()} == expected
        assert all(m[:4] == ("send_recv", "pp_send", size, Group(2, width)) for m in seen.messages)
        assert seen.live == most[stage_rank]


def assert_counted_once(text: str, sets: tuple[str, ...] = ()) -> None:
    layout, ranks = parse_layout(text), run(text, sets)
    width = layout.world // layout.pp
    layers = [layer for seen in ranks[::width] for layer in seen.requested]
    assert sorted(layers) == sorted(reference(text, sets).requested)
    for seen in ranks:
        for layer, counts in seen.requested.items():
            assert counts.sum() == ROWS * SEQ_LEN * TOP_K
            assert np.array_equal(counts, reference(text, sets).requested[layer])


# --- every schedule, every mix -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEDULES)
def test_two_stages_train_as_one_process(name):
    assert_same_step(PP2[name])
    assert_order_and_messages(PP2[name])
    assert_counted_once(PP2[name])


@pytest.mark.parametrize("text", MIXES)
def test_pipelines_mix_with_every_axis(text):
    assert_same_step(text)
    assert_order_and_messages(text)
    assert_counted_once(text)


@pytest.mark.parametrize("text", ["pp2 1f1b mb2", "pp2 vpp2 zbv mb2"])
def test_both_copies_of_a_tied_embedding_get_the_whole_gradient(text):
    """First and last stage on two ranks, and in a V on one."""
    assert_same_step(text, TIED)
    for seen in run(text, TIED):
        if "embed.weight" in seen.grads:
            np.testing.assert_allclose(seen.grads["embed.weight"], reference(text, TIED).grads["embed.weight"], rtol=0,
                                       atol=TOLERANCE * np.abs(reference(text, TIED).grads["embed.weight"]).max())


@pytest.mark.parametrize("text", ["pp2 1f1b mb2 st:3/1", "pp2 vpp2 zbv mb2 st:1/0/3/0", "pp2 vpp2 interleaved_zb mb2 st:0/2/0/2"])
def test_stages_may_be_uneven_or_empty(text):
    layout = parse_layout(text)
    assert stage_layers(layout, 4) == layout.stages
    assert_same_step(text)
    assert_order_and_messages(text)
    assert_counted_once(text)


@pytest.mark.parametrize("rc", ["rc:full", "rc:moe_act+norm"])
def test_recompute_in_a_split_backward(rc):
    """Replayed forwards count no tokens, and their collectives stay in step on all ranks in I and W."""
    text = f"pp2 dp2 ep2 vpp2 zbv mb2 {rc}"
    assert_same_step(text)
    assert_counted_once(text)


@pytest.mark.full
@pytest.mark.parametrize("name", SCHEDULES)
def test_four_stages_train_as_one_process(name):
    text = PP2[name].replace("pp2", "pp4", 1).replace("mb2", "mb1")
    assert_same_step(text, EIGHT)
    assert_order_and_messages(text, EIGHT)
    assert_counted_once(text, EIGHT)


@pytest.mark.full
@pytest.mark.parametrize("text, sets", [
    ("pp4 1f1b mb8", EIGHT), ("pp2 vpp4 interleaved mb2", EIGHT), ("pp2 vpp4 interleaved_zb mb2", EIGHT), ("pp4 1f1b mb2 st:2/0/1/1", ()),
    ("pp2 vpp2 zbv mb4", ("train.moe.chunks=2",)), ("pp2 dp2 ep2 vpp2 dualpipev mb1 syncfree ov:shared", ()),
    ("pp2 dp2 vpp2 interleaved zero0 mb1", TIED), ("pp2 tp2 vpp2 dualpipev mb2", TIED), ("pp2 dp2 cp2 tp2 ep4 vpp2 zbv mb2", ()),
])  # fmt: skip
def test_more_mixes(text, sets):
    """Among them fewer microbatches than stages, which torch's own 1F1B refuses, and four stages a rank."""
    assert_same_step(text, sets)
    assert_order_and_messages(text, sets)
    assert_counted_once(text, sets)


# --- precision ---------------------------------------------------------------------------------------------------------------------


def distance(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Of whole gradients, relative, in the 2-norm."""
    off = sum(np.square(found[name] - grad).sum() for name, grad in expected.items())
    return float(np.sqrt(off / sum(np.square(grad).sum() for grad in expected.values())))


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipev"])
def test_bfloat16(name):
    """Compute rounds to 2^-9, gradients are summed in float32: the pipeline is as far from float32 as one process in bfloat16 is, a
    few roundings of a 4-layer model, and equal to it. Weight gradients added up in bfloat16 would differ by 2^-9."""
    forced = ("train.moe.routing=random",)
    half = (*forced, "train.dtype=bfloat16")
    found, exact, same = (gathered(run(PP2[name], half)), reference(PP2[name], forced).grads, reference(PP2[name], half).grads)
    assert distance(found, exact) < 0.02
    assert distance(found, same) < 1e-6


# --- steps, evaluations, refusals -----------------------------------------------------------------------------------------------------


def three_steps(rank: int, world: int, text: str, sets) -> tuple:
    job = job_of(text, world, sets)
    optimizer = build.make_optimizer(job)
    losses = []
    for number in range(3):
        microbatches = step.cut(batch_of(job, seed=number), job, number)
        losses.append(step.reduce_loss(job, step.forward_backward(job, microbatches)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        sharding.gather_early(job.parts, job.layout)
        # Other counts and sizes than a step's.
        held_out = step.cut(batch_of(job, seed=9), job, number, num_microbatches=2**number)
        value = torch.zeros(1, dtype=torch.float64) + step.evaluate(job, held_out)
        losses.append(step.reduce_loss(job, torch.cat([value, value])))
    return torch.stack(losses), {name: whole(p).clone() for name, p in sharding.named_parameters(job.parts)}


@pytest.mark.parametrize("text", ["pp2 vpp2 zbv mb2", "pp2 dp2 ep2 1f1b mb2 ov:param"])
def test_weights_move_and_evaluations_see_them(text):
    """Three steps of AdamW with an evaluation after each. No auxiliary loss: it would depend on the microbatches."""
    skip_unless_runnable(text)
    sets = ("train.moe.aux_loss=0",)
    (losses, weights), *_ = run_ranks(three_steps, 1, "mb2", sets)
    ranks = run_ranks(three_steps, parse_layout(text).world, text, sets)
    found = {name: weight for _, part in ranks for name, weight in part.items()}
    for own, _ in ranks:
        np.testing.assert_allclose(own, losses, rtol=1e-5)
    for name, weight in weights.items():
        assert np.abs(found[name] - weight).max() <= 1e-3 * np.abs(weight).max(), name


def spans_of_a_step(rank: int, world: int, folder: str) -> list[tuple]:
    job = job_of("pp2 vpp2 interleaved mb2", world, ())
    spans = SpanRecorder(folder, rank, 1, 1)
    job.mesh.log.spans = spans
    for number in (0, 1, 2):
        spans.begin_step(number)
        step.forward_backward(job, step.cut(batch_of(job), job, 0))
        spans.end_step()
    spans.close()
    lines = [json.loads(line) for line in spans.path.read_text().splitlines()]
    return [(line["entry"], line["start"], line["end"]) for line in lines if line.get("line") == "span" and line["stream"] == COMPUTE]


def test_actions_of_a_recorded_step_are_spans(tmp_path):
    """In the order of the schedule, one after another."""
    orders = SCHEDULES["interleaved"].orders(2, 8, 2)
    for order, spans in zip(orders, run_ranks(spans_of_a_step, 2, str(tmp_path)), strict=True):
        assert [entry for entry, _ in groupby(entry for entry, *_ in spans)] == list(map(str, order))
        assert all(begin <= end <= later for (_, begin, end), (_, later, _) in pairwise(spans))


def wrong_number(rank: int, world: int) -> str:
    job = job_of("pp2 1f1b mb2", world, ())
    with pytest.raises(ValueError) as refused:
        step.forward_backward(job, step.cut(batch_of(job), job, 0)[:3])
    return str(refused.value)


def test_a_wrong_number_of_microbatches_is_one_line():
    for line in run_ranks(wrong_number, 2):
        assert line == "this pipeline runs 8 microbatches a step, got 3"


def bad_input_in_a_stage(rank: int, world: int) -> str:
    job = job_of("pp2 1f1b mb2", world, ())
    microbatches = step.cut(batch_of(job), job, 0)

    def refuse(*_):
        raise ValueError("train.moe.replay: the record has no layer.1")

    for part in job.parts if rank == 0 else ():
        for layer in part.layers.values():
            layer.attention.forward = refuse
    # The other rank, whose input is good, waits until this one is gone.
    with pytest.raises(Exception if rank else ValueError) as refused:
        step.forward_backward(job, microbatches)
    return str(refused.value)


def test_bad_input_found_in_a_stage_stays_one_line():
    assert run_ranks(bad_input_in_a_stage, 2)[0] == "train.moe.replay: the record has no layer.1"


def test_another_order_is_refused():
    """Were torch's lists ever to change the order, the run would not start."""

    def refused(rank, world):
        real = pipeline.lowered
        pipeline.lowered = lambda *args: {r: actions[::-1] for r, actions in real(*args).items()}
        with pytest.raises(ValueError, match="not the schedule's order") as error:
            job_of("pp2 1f1b mb2", world, ())
        return str(error.value)

    assert all("\n" not in line for line in run_ranks(refused, 2))
