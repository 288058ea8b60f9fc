"""What does the trainer's machinery cost beside a plain single-file torch loop of the same model?

    python benchmarks/trainer_cost.py [--steps 20] [--json F]

Both train the quick start's model on the same batches in one process and one thread; steps alternate, so that what else the machine
does falls on both, and the ratio of the medians is the answer. The plain loop below has the model, AdamW, clipping, the balance losses
and nothing else: no layouts, no statistics, no log.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from moesim.load import load_scenario
from moetrain import step as steps
from moetrain.build import layout_of, make_job, make_optimizer
from moetrain.data.synthetic import SyntheticLoader
from moetrain.optim import clip_, grad_norm, stage_copies
from moetrain.sharding import named_parameters


class PlainLayer(nn.Module):
    """Attention and FFN or experts, as one would write them for one process."""

    def __init__(self, m, dense: bool):
        super().__init__()
        d, kv, hd = m.hidden_size, m.num_kv_heads, m.head_dim
        self.m, self.dense = m, dense
        self.norm1, self.norm2 = nn.RMSNorm(d, 1e-6), nn.RMSNorm(d, 1e-6)
        self.qkv, self.out = nn.Linear(d, (m.num_heads + 2 * kv) * hd, bias=False), nn.Linear(m.num_heads * hd, d, bias=False)
        self.q_norm, self.k_norm = nn.RMSNorm(hd, 1e-6), nn.RMSNorm(hd, 1e-6)
        inner = m.intermediate_size if dense else m.shared_intermediate_size
        self.gate, self.up, self.down = nn.Linear(d, inner, bias=False), nn.Linear(d, inner, bias=False), nn.Linear(inner, d, bias=False)
        if not dense:
            self.router = nn.Linear(d, m.num_experts, bias=False)
            self.w_up = nn.Parameter(torch.randn(m.num_experts, 2 * m.moe_intermediate_size, d) * 0.02)
            self.w_down = nn.Parameter(torch.randn(m.num_experts, d, m.moe_intermediate_size) * 0.02)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        h = self.norm2(x)
        y, loss = self.down(F.silu(self.gate(h)) * self.up(h)), 0.0
        if not self.dense:
            routed, loss = self.experts(h.flatten(0, 1))
            y = y + routed.view_as(y)
        return x + y, loss

    def attention(self, x, cos, sin):
        m = self.m
        q, k, v = self.qkv(x).split([m.num_heads * m.head_dim] + [m.num_kv_heads * m.head_dim] * 2, -1)
        q, k, v = (t.unflatten(-1, (-1, m.head_dim)) for t in (q, k, v))
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))

    def experts(self, x):
        m = self.m
        logits = self.router(x)
        scores = logits.softmax(-1)
        weights, chosen = scores.topk(m.top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=m.num_experts)
        ends = counts.cumsum(0).int()
        gate, up = F.grouped_mm(x[order // m.top_k], self.w_up.transpose(1, 2), offs=ends).chunk(2, -1)
        rows = F.grouped_mm(F.silu(gate) * up, self.w_down.transpose(1, 2), offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        routed = (rows[back].view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)
        balance = 0.01 * m.num_experts * (counts.float() / counts.sum() * scores.mean(0)).sum()
        return routed, balance + 0.001 * logits.logsumexp(-1).square().mean()


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Plain(nn.Module):
    """The whole model."""

    def __init__(self, m, seq_len: int):
        super().__init__()
        self.embed, self.norm = nn.Embedding(m.vocab_size, m.hidden_size), nn.RMSNorm(m.hidden_size, 1e-6)
        self.layers = nn.ModuleList(PlainLayer(m, kind == "dense") for kind in m.layer_kinds())
        angle = torch.arange(seq_len)[:, None] * 10_000.0 ** (-torch.arange(0, m.head_dim, 2) / m.head_dim)
        self.cos, self.sin = angle.cos()[:, None], angle.sin()[:, None]
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens, labels):
        x, extra = self.embed(tokens), 0.0
        for layer in self.layers:
            x, loss = layer(x, self.cos, self.sin)
            extra = extra + loss
        return F.cross_entropy((self.norm(x) @ self.embed.weight.t()).flatten(0, 1), labels.flatten()) + extra


def clock() -> tuple[float, float]:
    """(wall, processor time of this process), seconds: the second hardly feels what else the machine does."""
    return time.perf_counter(), time.process_time()


def since(begin: tuple[float, float]) -> tuple[float, float]:
    return tuple(now - then for now, then in zip(clock(), begin))


def plain_step(model, optimizer, microbatches) -> tuple[float, float]:
    """Seconds of one step of the plain loop."""
    begin = clock()
    for tokens, labels in microbatches:
        (model(tokens, labels) / len(microbatches)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return since(begin)


def trainer_step(job, optimizer, batch) -> tuple[float, float]:
    """Seconds of one step of the trainer, statistics and reductions included."""
    begin = clock()
    steps.reduce_loss(job, steps.forward_backward(job, steps.cut(batch, job, 0))).tolist()
    job.statistics.collect(job.mesh["data"])
    named = list(named_parameters(job.parts))
    norm = grad_norm([named], None, stage_copies(1), job.device)
    clip_([named], norm, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return since(begin)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--json", default=None)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    scenario = load_scenario("quickstart", ["train.data={kind: synthetic}"])
    layout = layout_of(scenario, None, 1)
    job = make_job(scenario, layout)
    optimizer = make_optimizer(job)
    model = Plain(scenario.model, scenario.workload.seq_len)
    other = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows = scenario.workload.global_batch_tokens // scenario.workload.seq_len
    loader = SyntheticLoader(scenario.model.vocab_size, scenario.workload.seq_len, rows, micro_batch=layout.mb, prefetch=0)
    times = SimpleNamespace(plain=[], trainer=[])
    for i in range(options.steps + 3):
        batch = loader.batch(i)
        pieces = [(part.tokens, part.labels) for part in batch.split(job.num_microbatches)]
        pair = [(times.plain, lambda: plain_step(model, other, pieces)), (times.trainer, lambda: trainer_step(job, optimizer, batch))]
        for kept, run in pair if i % 2 else pair[::-1]:
            seconds = run()
            if i >= 3:
                kept.append(seconds)
    found = {"steps": options.steps, "parameters": sum(p.numel() for p in model.parameters()), "torch": str(torch.__version__)}
    for column, name in enumerate(("wall", "processor")):
        plain, trainer = ([pair[column] for pair in kept] for kept in (times.plain, times.trainer))
        found[name] = {"plain_s": statistics.median(plain), "trainer_s": statistics.median(trainer),
                       "ratio_of_medians": statistics.median(trainer) / statistics.median(plain),
                       "median_of_ratios": statistics.median(t / p for t, p in zip(trainer, plain))}
    assert found["parameters"] == scenario.model.num_params
    for name in ("wall", "processor"):
        print("{0} time: plain {plain_s:.3f} s, trainer {trainer_s:.3f} s a step: ratio {ratio_of_medians:.3f} "
              "(median of paired ratios {median_of_ratios:.3f})".format(name, **found[name]))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()
