"""1F1B: how does a rank alternate one forward with one backward?

Narayanan et al. 2020 (PipeDream-Flush), arXiv:2006.09503. Rank r runs one forward for each rank below it, then
alternates, then drains: at most pp - r microbatches are live. Fewer microbatches than ranks are legal here (the
alternation is then short or absent); torch's own Schedule1F1B refuses them.
"""
from moesim.schedules import Action


def rank_order(rank: int, pp: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    num_warmup = min(pp - 1 - rank, num_microbatches)
    order = [Action(rank, "F", m) for m in range(num_warmup)]
    for m in range(num_microbatches - num_warmup):
        order += Action(rank, "F", m + num_warmup), Action(rank, "B", m)
    order += [Action(rank, "B", m) for m in range(num_microbatches - num_warmup, num_microbatches)]
    return order


def refuse(pp: int, num_microbatches: int, num_chunks: int) -> str | None:
    return None if num_chunks == 1 else f"one chunk a rank, got {num_chunks}; several chunks are the interleaved schedule"
