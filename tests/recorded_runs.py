"""What would a run's folder hold whose ranks did exactly what the engine plays? (Span files and a log without a trainer.)"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from calibration.planned import ENTRY, Planned
from calibration.run_folder import full_layout, on_world
from moesim import engine
from moesim.evaluate import Evaluator
from moesim.load import parse_scenario
from moesim.program import COMPUTE
from moesim.step_ops import step_ops

TEXT = """
name: {name}
model: {{name: m, num_layers: 3, hidden_size: 64, vocab_size: 128, num_heads: 4, num_kv_heads: 2, head_dim: 16, intermediate_size: 96,
        num_experts: 4, top_k: 2, moe_intermediate_size: 32, num_shared_experts: 1, num_leading_dense_layers: 1}}
cluster: cpu_gloo
workload: {{seq_len: 32, global_batch_tokens: 512}}
layout: {layout}
train: {{dtype: bfloat16}}
"""


def plan_of(layout: str, world: int = 1, name: str = "recorded") -> Planned:
    scenario = on_world(parse_scenario(TEXT.format(name=json.dumps(name), layout=layout)), world)
    return Planned(Evaluator(scenario), full_layout(scenario, layout, world))


def issued(planned: Planned):
    return step_ops(planned.evaluator.program(planned.layout))


def write_run(folder: Path, planned: Planned, *, steps: int = 2, slower: Mapping[str, float] = {}, seconds: tuple[float, ...] = ()) -> Path:
    """A folder with ``steps`` recorded steps. slower: role -> factor of its compute spans, everything behind them later (for one rank whose
    streams don't overlap). seconds: of the log's steps; those of the recorded ones by default."""
    (folder / "spans").mkdir(parents=True)
    layout, timeline = planned.layout, engine.run(planned.program)
    width = layout.world // layout.pp
    late, makespan = 0.0, timeline.makespan
    lines: dict[int, list[dict]] = {rank: [] for rank in range(layout.world)}
    for span in timeline.spans:
        slot = planned.slot(span)
        if span.stream > 3 or (span.end == span.start and slot.layer < 0 and not slot.phase):
            continue
        more = (span.end - span.start) * (slower.get(slot.role, 1.0) - 1.0) if span.stream == COMPUTE else 0.0
        where = ENTRY.search(span.entry)
        extra = {"phase": slot.phase, "microbatch": int(where[3])} if slot.phase else {}
        extra |= {"layer": slot.layer} if slot.layer >= 0 else {}
        for rank in range(span.rank * width, (span.rank + 1) * width):
            lines[rank].append({"line": "span", "rank": rank, "stream": span.stream, "name": slot.role, "kind": slot.role, "start": span.start + late,
                                "end": span.end + late + more, "entry": span.entry, "terms": [], "solo": 0.0, "cause": "host", "transfer": 0.0, "extra": extra})
        late += more
    makespan += late
    for rank, spans in lines.items():
        with (folder / "spans" / f"spans-rank{rank:05d}.jsonl").open("w") as file:
            for step in range(1, steps + 1):
                header = {"line": "step", "schema": 1, "rank": rank, "step": step, "clock": 1e9 + step, "makespan": makespan}
                file.writelines(json.dumps(line) + "\n" for line in [header, *({**span, "step": step} for span in spans)])
    log = [{"kind": "step", "step": i, "seconds": s} for i, s in enumerate(seconds or (makespan,) * steps, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    config = {"kind": "start", "body": {"config": planned.evaluator.scenario.model_dump(mode="json"), "layout": str(layout), "world": layout.world}}
    (folder / "manifest.json").write_text(json.dumps({"records": [config]}))
    return folder
