"""What does the planner say one pipeline rank holds at its worst moment, in the categories that a trainer can be asked for?"""

from __future__ import annotations

from moesim.evaluate import Evaluator
from moesim.layout import Layout
from moesim.spec import Scenario

CPU = "x86_64"


def planned(scenario: Scenario, layout: Layout, stage: int, kernels: str = "gpu") -> dict[str, float]:
    """Category -> bytes: "optimizer" (masters and moments), "gathered" (whole bf16 weights that stay), "gradients", "moving units" (weights,
    gradients and buffers of units that come and go) and "activations" (kept, made on the way, and the loss). Allocator slack is not among
    them. ``kernels`` "cpu": what a CPU's kernels keep, prices being those of the scenario's cluster all the same: bytes don't read them."""
    if kernels == "cpu" and scenario.cluster.gpu.arch != CPU:
        gpu = scenario.cluster.gpu.model_copy(update={"arch": CPU})
        scenario = scenario.model_copy(update={"cluster": scenario.cluster.model_copy(update={"gpu": gpu})})
    found = {name: float(values[0, stage]) for name, values in Evaluator(scenario).categories(layout).items()}
    return {"optimizer": found["optimizer"], "gathered": found["weights"], "gradients": found["gradients"], "moving units": found["gathered weights"],
            "activations": found["activations"] + found["logits"] + found["working set"] + found["dispatcher buffers"]}
