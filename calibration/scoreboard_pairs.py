"""Does changing one thing change the speed as it did in print? (Pairs of runs that differ in one knob, and one scaling series.)

These are regression checks, known by heart while the model was made: no evidence, but the first place where a wrong mechanism shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping

from calibration.scoreboard_rows import Answer
from moesim.runs import Run


@dataclass(frozen=True)
class Pair:
    """other over base: tokens/s of two rows that differ in ``knob``. Where no row holds the other side, ``change`` states its cells and
    ``printed`` the ratio; ``source`` says where that is from."""

    name: str
    knob: str
    base: str
    other: str = ""
    change: tuple[tuple[str, str], ...] = ()
    printed: float | None = None
    source: str = ""


PAIRS = (
    Pair("EP overlap, Qwen3-30B on 16 H100", "overlap_flags", "mbpr-q30-h100-16-noovl", "mbpr-q30-h100-16-ovl"),
    Pair("full CUDA graph, Qwen3-30B on 8 GB200", "cuda_graphs", "mb-26.04.01-qwen3-30b-gb200-8-mxfp8-g512", change=(("cuda_graphs", "full_iteration"),),
         printed=1.26, source="Megatron-Bridge 26.06 over 26.04 (https://docs.nvidia.com/nemo/megatron-bridge/latest/performance-summary.html); the later row is not in the table"),
    Pair("EP64 to EP8, GPT-OSS-120B on 64 B300", "ep, dispatcher", "mb-26.02-gpt-oss-120b-b300-64-bf16-g1280", "mb-26.02.01-gpt-oss-120b-b300-64-bf16-g1280"),
)
STRONG = "strong-dsv3-gb200-mlperf60"
"""DeepSeek-V3 on 256 to 8,192 GB200: five rows."""


def changed_rows(rows: Mapping[str, Mapping[str, str]]) -> list[dict[str, str]]:
    """Rows that no table holds: the base of a pair with its knob turned."""
    return [{**rows[p.base], **dict(p.change), "id": changed_id(p)} for p in PAIRS if p.change and p.base in rows]


def changed_id(pair: Pair) -> str:
    return f"{pair.base} with {', '.join(f'{k}={v}' for k, v in pair.change)}"


def pair_figures(found: Mapping[str, Answer], runs: Mapping[str, Run]) -> list[dict[str, Any]]:
    """Ratio predicted and measured of every pair whose two sides were answered."""
    out = []
    for pair in PAIRS:
        other = pair.other or changed_id(pair)
        if any(name not in found or found[name].reason for name in (pair.base, other)):
            out.append({"name": pair.name, "knob": pair.knob, "predicted": None, "measured": pair.printed})
            continue
        rates = [runs[name].measured.tokens_per_s_per_gpu for name in (pair.base, other)]
        measured = pair.printed or rates[1] / rates[0]
        out.append({"name": pair.name, "knob": pair.knob, "predicted": found[other].tokens_per_s_per_gpu / found[pair.base].tokens_per_s_per_gpu, "measured": measured})
    return out


def kept_share(found: Mapping[str, Answer], runs: Mapping[str, Run]) -> dict[str, Any]:
    """Share of the smallest size's tokens/s/GPU kept along STRONG, by number of GPUs."""
    members = sorted((run for run in runs.values() if run.series == STRONG and run.id in found and not found[run.id].reason), key=lambda run: run.cluster.num_gpus)
    if len(members) < 2:
        return {}
    first = members[0]
    share = lambda rate: {str(run.cluster.num_gpus): rate(run) / rate(first) for run in members[1:]}  # noqa: E731
    return {"series": STRONG, "predicted": share(lambda run: found[run.id].tokens_per_s_per_gpu), "measured": share(lambda run: run.measured.tokens_per_s_per_gpu)}
