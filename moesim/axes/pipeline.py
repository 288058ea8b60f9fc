"""What does each virtual pipeline stage hold? (Layers by kind, embedding, head, MTP modules.)"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from moesim.layout import stage_layers


@lru_cache(maxsize=4096)
def stage_contents(model, counts: tuple[int, ...]) -> tuple[tuple[tuple[str, int], ...], ...]:
    """For each virtual stage, ((part, count), ...) in model order. A layer is named by its kind and its attention window:
    "moe", "dense", "moe@128"; other parts: "embedding", "head", "mtp". ``counts`` = layers of each virtual stage.

    MTP modules and the head stand on the last stage; the embedding on the first.
    """
    names = [_layer_name(model, i, kind) for i, kind in enumerate(model.layer_kinds())]
    stages, start = [], 0
    for count in counts:
        stages.append(list(Counter(names[start:start + count]).items()))
        start += count
    assert start == len(names), (counts, len(names))
    stages[0].insert(0, ("embedding", 1))
    if model.num_mtp_layers:
        stages[-1].append(("mtp", model.num_mtp_layers))
    # A head tied to the embedding reads its weights where both are on one rank; a pipeline's last stage holds a copy of them.
    stages[-1].append(("tied_head" if model.tie_embeddings and len(counts) > 1 else "head", 1))
    return tuple(tuple(s) for s in stages)


def _layer_name(model, index: int, kind: str) -> str:
    window = model.window(index)
    return kind if window is None else f"{kind}@{window}"


def contents(model, layout) -> tuple[tuple[tuple[str, int], ...], ...]:
    """``stage_contents`` of a layout's own split."""
    return stage_contents(model, stage_layers(layout, model.num_layers))
