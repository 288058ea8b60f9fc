"""How does a checkpoint of any layout become whole tensors in one process, and from there a Hugging Face model?"""

from __future__ import annotations

from pathlib import Path

from moesim.layout import Layout
from moesim.load import read_dump
from moetrain.build import Job, make_job
from moetrain.checkpoint import CheckpointError, Checkpointer, folders
from moetrain.export import cli as exporting
from moetrain.export.constants import Constants


def load_whole(where: str | Path) -> tuple[Job, int]:
    """(the model of a checkpoint in this process, its step). Needs memory for all parameters. ValueError in one line."""
    path = Path(where)
    if not folders.PUBLISHED.fullmatch(path.name):
        found = next((p for p in folders.newest_first(path) if folders.whole(p)), None) if path.is_dir() else None
        if found is None:
            raise CheckpointError(f"{path}: no whole checkpoint there")
        path = found
    stored = folders.read_state(path)
    scenario = read_dump(stored.extra.get("config"), str(path))
    scenario = scenario.model_copy(update={"train": scenario.train.model_copy(update={"dtype": "float32", "device": "cpu"})})
    job = make_job(scenario, Layout())
    Checkpointer(path.parent, asynchronous=False).load(path, job.parts)
    return job, stored.step


def export_checkpoint(where: str, form: str, out: str, dtype: str, tokenizer: str | None) -> str:
    """Writes ``out``; one line about what is in it."""
    job, step = load_whole(where)
    (part,) = job.parts
    tensors = {part.logical_name(name): tensor for name, tensor in part.state_dict().items()}
    scenario, n = job.scenario, job.scenario.train.network
    constants = Constants(n.rope_theta, n.norm_eps, n.embed_scale, max_positions=scenario.workload.seq_len)
    if not (scenario.model.score_correction_bias or scenario.train.moe.bias_rate):
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("balance_bias")}
    return f"step {step}: {exporting.export_checkpoint(tensors, scenario.model, form, out, constants, dtype, tokenizer=tokenizer)}"
