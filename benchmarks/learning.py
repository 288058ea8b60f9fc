"""Does training learn, and what keeps the experts even? (The quick start on real text with each way of balancing, against none.)

    moetrain data corpus data/quickstart
    python benchmarks/learning.py [--steps 240] [--only NAME] [--out benchmarks/results/learning]

Prints, for each run, the validation loss beside the unigram entropy of the same text (the loss of a model that knows only how often
each token occurs) and the busiest expert's rows over the mean, averaged over the last tenth of the run; writes JSON and a page of plots.
A run that is there already is resumed or taken as it is.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path

import numpy as np

from moetrain.data.statistics import read_statistics
from moetrain.observe.manifest import part, read
from moetrain.observe.metrics import read_lines, read_steps

RUNS = {
    "none": ["train.moe.aux_loss=0"],
    "auxiliary loss": ["train.moe.aux_loss=0.05"],
    "loss-free bias": ["train.moe.aux_loss=0", "train.moe.bias_rate=0.004"],
    "both": ["train.moe.aux_loss=0.01", "train.moe.bias_rate=0.01"],
}


def run(name: str, steps: int, folder: Path, data: str) -> dict:
    """Trains one setting, unless its log says that it is done; what it reached."""
    target = folder / name.replace(" ", "_")
    sets = [*RUNS[name], f"train.steps={steps}", f"train.log.folder={target}", "train.log.every=20", f"train.data.sources=[{{path: {data}/train}}]",
            f"train.data.validation.path={data}/validation"]
    log = target / "metrics.jsonl"
    if not log.exists() or read_steps(log)[-1].step < steps:
        subprocess.run([sys.executable, "-m", "moetrain", "train", "quickstart", *(w for s in sets for w in ("--set", s))], check=True)
    records = read_steps(log)
    validation = [(line["step"], line["loss"]) for line in read_lines(log) if line["kind"] == "event" and line["event"] == "validation"]
    ratios = [r.balance.max_over_mean_expert for r in records]
    tail = max(1, len(records) // 10)
    return {
        "settings": RUNS[name], "step": [r.step for r in records], "loss": [r.loss for r in records], "validation": validation,
        "max_over_mean_expert": ratios, "worst_layer": [r.balance.worst_expert for r in records], "final_validation": validation[-1][1],
        "final_max_over_mean": float(np.mean(ratios[-tail:])), "final_worst_layer": float(np.mean([r.balance.worst_expert for r in records[-tail:]])),
        "tokens": sum(r.tokens for r in records), "code": part(read(target), "code"),
    }


def page(found: dict[str, dict], bar: float) -> str:
    """Losses against the unigram entropy, and the load of the busiest expert."""
    from plotly import graph_objects as go
    from plotly.subplots import make_subplots

    figure = make_subplots(1, 2, subplot_titles=("validation loss, nats a token", "rows of the busiest expert over the mean (mean of layers)"))
    for name, result in found.items():
        figure.add_scatter(x=[s for s, _ in result["validation"]], y=[v for _, v in result["validation"]], name=name, legendgroup=name, row=1, col=1)
        figure.add_scatter(x=result["step"], y=result["max_over_mean_expert"], name=name, legendgroup=name, showlegend=False, row=1, col=2)
    figure.add_hline(y=bar, line_dash="dash", annotation_text="unigram entropy", row=1, col=1)
    figure.add_hline(y=1.3, line_dash="dash", annotation_text="1.3", row=1, col=2)
    figure.update_xaxes(title_text="step")
    return figure.to_html(include_plotlyjs=True, full_html=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--steps", type=int, default=240)
    arguments.add_argument("--only", choices=RUNS, action="append")
    arguments.add_argument("--data", default="data/quickstart")
    arguments.add_argument("--runs", type=Path, default=Path("runs/learning"))
    arguments.add_argument("--out", type=Path, default=Path("benchmarks/results/learning"))
    options = arguments.parse_args()
    bar = read_statistics(options.data)["validation"]["unigram_nats"]
    found = {name: run(name, options.steps, options.runs, options.data) for name in options.only or RUNS}
    print(f"{'balancing':16} {'validation':>10} {'unigram':>8} {'max/mean':>9} {'worst layer':>12}")
    for name, result in found.items():
        print(f"{name:16} {result['final_validation']:10.3f} {bar:8.3f} {result['final_max_over_mean']:9.2f} {result['final_worst_layer']:12.2f}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    stamp = {"date": date.today().isoformat(), "machine": platform.machine(), "python": platform.python_version(), "steps": options.steps}
    options.out.with_suffix(".json").write_text(json.dumps(stamp | {"unigram_nats": bar, "runs": found}) + "\n")
    options.out.with_suffix(".html").write_text(page(found, bar))


if __name__ == "__main__":
    main()
