"""How does the winner of a plan become a job? (A folder with the run's scenario and the scripts that start it.)

``train.yaml`` is a scenario again: the planned one with the winner as its layout, readable by `moetrain train` and by every command of
moesim. ``predicted.json`` holds what was predicted, so that a run can be held against its plan. ``launch.sh`` runs on every node;
ranks are numbered node by node, which is what keeps a layout's inner groups inside a node; ``submit.sbatch`` starts it under Slurm.
The scenario is written first: a folder that holds it is known as ours.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moesim import __version__
from moesim.fields import to_text
from moesim.files import write_atomically
from moesim.plan import Candidate
from moesim.spec import Scenario

CONFIG, PREDICTED, SCRIPT, SLURM = "train.yaml", "predicted.json", "launch.sh", "submit.sbatch"
RESTARTS = 3
"""Of all processes after one has died; a run resumes from its newest good checkpoint each time."""
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
    """Write scenario and scripts of ``winner`` into ``directory`` (made when missing); returns the paths of the scenario and the script. ValueError, OSError."""
    path = check_directory(directory)
    path.mkdir(parents=True, exist_ok=True)
    write_atomically(path / CONFIG, _config(scenario, winner))
    write_atomically(path / PREDICTED, _predicted(scenario, winner))
    write_atomically(path / SCRIPT, _script(scenario))
    (path / SCRIPT).chmod(0o755)
    write_atomically(path / SLURM, _slurm(scenario, path))
    return path / CONFIG, path / SCRIPT


def _config(scenario: Scenario, winner: Candidate) -> str:
    content = {key: value for key, value in to_text(scenario).items() if key not in ("search", "layout")} | {"layout": winner.layout}
    return f"{MARK} (moesim {__version__}); start it with ./{SCRIPT}\n" + to_yaml(content)


def _predicted(scenario: Scenario, winner: Candidate) -> str:
    kept = ("layout", "num_microbatches", "tokens_per_s_per_gpu", "low", "high", "step_s", "mfu", "mfu_denominator", "peak_bytes")
    content = {"scenario": {"name": scenario.name, "hash": scenario.hash, "moesim_version": __version__}}
    return json.dumps(content | {key: getattr(winner, key) for key in kept}, indent=1) + "\n"


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
        # The dynamic rendezvous: with the static one the agents of two nodes restart out of step after a rank has died.
        where = ('--nnodes={n} --rdzv-backend=c10d --rdzv-id={name} --rdzv-endpoint="$MASTER_ADDR:${{MASTER_PORT:-29500}}"'
                 .format(n=cluster.num_nodes, name=_word(scenario.name)))
        need = """# Run on every node.
: "${MASTER_ADDR:?set MASTER_ADDR to the host name of one of the nodes}"
"""
    return f"""#!/usr/bin/env bash
{MARK} (scenario {scenario.hash})
set -euo pipefail
cd "$(dirname "${{BASH_SOURCE[0]}}")"
{need}# Restarted ranks must not meet the addresses of dead ones in the agent's store.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun {where} --nproc-per-node={cluster.gpus_per_node} --max-restarts={RESTARTS} \\
  -m moetrain train {CONFIG} "$@"
"""


def _slurm(scenario: Scenario, path: Path) -> str:
    cluster = scenario.cluster
    return f"""#!/usr/bin/env bash
{MARK} (scenario {scenario.hash}); sbatch {SLURM}
#SBATCH --job-name={_word(scenario.name)}
#SBATCH --nodes={cluster.num_nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={cluster.gpus_per_node}
#SBATCH --exclusive
#SBATCH --chdir={path.resolve()}
#SBATCH --signal=TERM@120
# TERM two minutes before the limit: the run saves its state, and the job submitted again resumes it.
set -euo pipefail
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 bash {SCRIPT} "$@"
"""


def _word(text: str) -> str:
    """A name that no shell or scheduler takes apart."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-.") else "_" for c in text)
