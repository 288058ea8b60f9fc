"""What does a training run decide that its model, cluster, workload and layout do not? (The `train:` block of a scenario.)

The planner reads none of it; it stands here so that one file describes a run to both halves and is checked as a whole before either
starts. Counts are plain integers, times seconds. Defaults train a small model sensibly on one process.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from .hardware import Count, Positive, Spec, Text

Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Weight = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]


class _Nested(Spec):
    """Blocks inside `train:`."""


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


class SourceSpec(_Nested):
    """One folder of tokenised shards, and its weight in the mix."""

    path: Text
    weight: Rate = 1.0


class ValidationSpec(_Nested):
    """A folder of held-out shards; every how many steps it is read, and how many sequences of it."""

    path: Text | None = None
    every: Positive = 100
    sequences: Positive = 64


class DataSpec(_Nested):
    """synthetic: random ids, for benchmarks. shards: folders that `moetrain data` built."""

    kind: Literal["synthetic", "shards"] = "synthetic"
    sources: Annotated[tuple[SourceSpec, ...], BeforeValidator(_as_tuple)] = ()
    mask_documents: bool = False  # attention stays inside a document
    validation: ValidationSpec = ValidationSpec()

    @model_validator(mode="after")
    def _check(self) -> DataSpec:
        if self.kind == "shards" and not self.sources:
            raise ValueError("data of kind 'shards' needs sources, such as [{path: data/train}]; `moetrain data --help` shows how to make one")
        if self.kind == "synthetic" and (self.sources or self.validation.path):
            raise ValueError("data of kind 'synthetic' reads no folder: leave out sources and validation.path, or say kind: shards")
        return self


class SkipSpec(_Nested):
    """Steps whose loss or gradient norm lies ``sigma`` standard deviations above the mean of the last ``window`` are skipped."""

    enabled: bool = True
    window: Positive = 128
    sigma: Rate = 12.0
    max_consecutive: Positive = 10


class OptimizerSpec(_Nested):
    """AdamW, or Muon for matrices with AdamW for the rest. Precision of the moments is the layout's `opt:`."""

    kind: Literal["adamw", "muon"] = "adamw"
    lr: Rate = 3e-4
    beta1: Share = 0.9
    beta2: Share = 0.95
    eps: Rate = 1e-8
    weight_decay: Weight = 0.1
    decay_embeddings: bool = False
    momentum: Share = 0.95  # of Muon
    clip: Weight = 1.0  # of the global gradient norm; 0: not clipped
    schedule: Literal["constant", "cosine", "wsd"] = "cosine"
    warmup_steps: Count = 0
    decay_steps: Count = 0  # of wsd: the last ones
    min_lr_ratio: Share = 0.1
    skip: SkipSpec = SkipSpec()


class NetworkSpec(_Nested):
    """Numbers of the model that cost nothing: no part of a ModelSpec."""

    rope_theta: Rate = 500_000.0
    norm_eps: Rate = 1e-6
    init_std: Rate = 0.02
    embed_scale: Rate = 1.0  # the embedding's output is multiplied by it
    head_z_loss: Weight = 0.0
    loss_chunk: Positive = 4096  # tokens whose logits exist at one time


class RoutingRunSpec(_Nested):
    """How tokens are routed in this run, and what balances them. Capacity follows `workload.routing` where it is not given here."""

    routing: Literal["learned", "balanced", "random", "replay"] = "learned"
    replay: Text | None = None  # what `record` left in its folder, or a routing file
    aux_loss: Weight = 0.01
    aux_scope: Literal["micro", "sequence", "global"] = "global"
    z_loss: Weight = 0.001
    bias_rate: Weight = 0.0  # loss-free balancing: step of the selection bias
    backend: Literal["auto", "triton", "grouped_mm", "reference"] = "auto"
    chunks: Annotated[int, Field(ge=1, le=64)] = 1  # of a layer's tokens: one travels while another computes
    record: Text | None = None  # folder for routing histograms

    @model_validator(mode="after")
    def _check(self) -> RoutingRunSpec:
        if (self.routing == "replay") != (self.replay is not None):
            raise ValueError("routing 'replay' and the file `replay` belong together")
        return self


class CheckpointSpec(_Nested):
    """Where and how often the state is saved. resume: auto (the newest good one in the folder) | never | a path."""

    folder: Text | None = None  # default: RUN/checkpoints
    every: Count = 0  # steps; 0: at the end only
    keep: Positive = 3
    asynchronous: bool = True
    resume: Text = "auto"


class LogSpec(_Nested):
    """What a run leaves in its folder. spans: first and last step whose spans are recorded."""

    folder: Text = "runs/{name}"
    tensorboard: bool = False
    every: Positive = 1
    spans: Annotated[tuple[int, int] | None, BeforeValidator(_as_tuple)] = None
    profile: Annotated[tuple[int, int] | None, BeforeValidator(_as_tuple)] = None  # steps under torch.profiler
    warmup: Count = 5  # steps left out of the throughput
    preflight: bool = True


class TrainSpec(Spec):
    """A training run, beside its scenario and layout."""

    steps: Positive = 100
    seed: Count | None = None  # default: the scenario's
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of compute; auto: bfloat16 on a GPU, float32 on a CPU
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deterministic: bool = False
    compile: bool = False  # torch.compile of norms and dense FFNs
    data: DataSpec = DataSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    network: NetworkSpec = NetworkSpec()
    moe: RoutingRunSpec = RoutingRunSpec()
    checkpoint: CheckpointSpec = CheckpointSpec()
    log: LogSpec = LogSpec()
    watchdog_s: Count = 600  # without a step before a rank reports what it waits for and ends; 0: off
