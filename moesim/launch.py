"""How does the winner of a plan become a job? (A folder with the trainer's config and the torchrun command that starts it.)

``train.yaml`` holds everything the trainer needs (model, layout text, workload, seed) and what was predicted, so that a run can
be held against its plan. ``launch.sh`` runs on every node; ranks are numbered node by node, which is what keeps a layout's inner
groups inside a node. The config is written first: a folder that holds it is known as ours.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moesim import __version__
from moesim.files import write_atomically
from moesim.plan import Candidate
from moesim.spec import Scenario

CONFIG, SCRIPT = "train.yaml", "launch.sh"
MARK = "# Written by moesim plan --launch"


def check_directory(directory: str | os.PathLike[str]) -> Path:
    """The folder as a path. ValueError in one line where writing into it would mix a launch with something else."""
    path = Path(directory)
    if path.exists() and not path.is_dir():
        raise ValueError(f"--launch {path}: exists and is not a folder")
    parent = next(p for p in path.absolute().parents if p.exists())
    if not path.exists() and not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise ValueError(f"--launch {path}: {parent} is not a folder that can be written to")
    if path.is_dir() and any(path.iterdir()) and not _is_ours(path):
        raise ValueError(f"--launch {path}: the folder is not empty and holds no earlier launch; name a new folder")
    return path


def _is_ours(path: Path) -> bool:
    try:
        with open(path / CONFIG, encoding="utf-8", errors="replace") as file:
            return file.readline().startswith(MARK)
    except OSError:
        return False


def write_launch(directory: str | os.PathLike[str], scenario: Scenario, winner: Candidate) -> tuple[Path, Path]:
    """Write config and script of ``winner`` into ``directory`` (made when missing); returns their paths. ValueError, OSError."""
    path = check_directory(directory)
    path.mkdir(parents=True, exist_ok=True)
    write_atomically(path / CONFIG, _config(scenario, winner))
    write_atomically(path / SCRIPT, _script(scenario))
    (path / SCRIPT).chmod(0o755)
    return path / CONFIG, path / SCRIPT


def _config(scenario: Scenario, winner: Candidate) -> str:
    cluster = scenario.cluster
    content = {
        "scenario": {"name": scenario.name, "hash": scenario.hash, "moesim_version": __version__},
        "layout": winner.layout,
        "num_microbatches": winner.num_microbatches,
        "model": scenario.model.model_dump(mode="json"),
        "workload": scenario.workload.model_dump(mode="json"),
        "seed": scenario.seed,
        "cluster": {"name": cluster.name, "gpu": cluster.gpu.name, "num_nodes": cluster.num_nodes, "gpus_per_node": cluster.gpus_per_node},
        "predicted": {key: value for key, value in asdict(winner).items()
                      if key in ("tokens_per_s_per_gpu", "low", "high", "step_s", "mfu", "mfu_denominator", "peak_bytes")},
    }
    return f"{MARK} (moesim {__version__}); start it with ./{SCRIPT}\n" + to_yaml(content)


def to_yaml(content: Mapping[str, Any], indent: int = 0) -> str:
    """Nested mappings of scalars and flat lists as YAML that any parser, 1.1 or 1.2, reads back equal."""
    lines = []
    for key, value in content.items():
        head = " " * indent + _scalar(key) + ":"
        if isinstance(value, Mapping) and value:
            lines.append(head + "\n" + to_yaml(value, indent + 2).rstrip("\n"))
        else:
            lines.append(f"{head} {_scalar(value)}")
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_scalar(v) for v in value) + "]"
    # A plain word needs no quotes as a key; everything else is JSON, which YAML contains.
    return value if isinstance(value, str) and _is_plain(value) else json.dumps(value)


def _is_plain(text: str) -> bool:
    special = ("true", "false", "null", "yes", "no", "on", "off", "y", "n", "inf", "nan")
    return text.isascii() and text.replace("_", "").isalpha() and text.lower() not in special


def _float(value: float) -> str:
    if not math.isfinite(value):
        raise ValueError(f"a launch config can't hold {value}")
    text = repr(value)
    mantissa, e, exponent = text.partition("e")
    # YAML 1.1 takes 1e-05 for text; it wants a point in the mantissa.
    return f"{mantissa}.0e{exponent}" if e and "." not in mantissa else text


def _script(scenario: Scenario) -> str:
    cluster = scenario.cluster
    if cluster.num_nodes == 1:
        where = "--standalone"
        need = ""
    else:
        where = ('--nnodes={n} --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="${{MASTER_PORT:-29500}}"'
                 .format(n=cluster.num_nodes))
        need = """# Run on every node. Slurm sets SLURM_NODEID; elsewhere set NODE_RANK (0 on the node at MASTER_ADDR).
NODE_RANK="${NODE_RANK:-${SLURM_NODEID:?set NODE_RANK}}"
: "${MASTER_ADDR:?set MASTER_ADDR to the host name of node 0}"
"""
    return f"""#!/usr/bin/env bash
{MARK} (scenario {scenario.hash})
set -euo pipefail
cd "$(dirname "${{BASH_SOURCE[0]}}")"
{need}exec torchrun {where} --nproc-per-node={cluster.gpus_per_node} \\
  -m moetrain train {CONFIG} "$@"
"""
