"""GPipe: when do all forwards run before all backwards?

Huang et al. 2018, arXiv:1811.06965. Every microbatch's activations are live at the turn; backward takes the
microbatches in the order of forward, as torch.distributed.pipelining does.
"""
from moesim.schedules import Action


def rank_order(rank: int, pp: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    return [Action(rank, letter, m) for letter in "FB" for m in range(num_microbatches)]


def refuse(pp: int, num_microbatches: int, num_chunks: int) -> str | None:
    return None if num_chunks == 1 else f"one chunk a rank, got {num_chunks}"
