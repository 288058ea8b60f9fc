"""Interleaved 1F1B: in which order does a rank visit several chunks?

Narayanan et al. 2021, arXiv:2104.04473 section 2.2: microbatches move in rounds of about pp; a round visits every
chunk before the next round starts, backward visits chunks from the last. The paper wants microbatches divisible by
pp; here, as in torch, rounds of any equal size will do: floor(microbatches/pp) rounds, at least one.
"""
from moesim.schedules import Action


def rank_order(rank: int, pp: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    per_round = num_microbatches // max(1, num_microbatches // pp)
    stages = range(rank, pp * num_chunks, pp)
    forward = _visits(stages, "F", num_microbatches, per_round)
    backward = _visits(stages[::-1], "B", num_microbatches, per_round)
    # Every chunk but the last once, then two steps for each rank below: a forward reaches the last rank and comes back.
    num_warmup = min((num_chunks - 1) * per_round + 2 * (pp - 1 - rank), len(forward))
    num_steady = len(forward) - num_warmup
    steady = [action for step in zip(forward[num_warmup:], backward) for action in step]
    return forward[:num_warmup] + steady + backward[num_steady:]


def _visits(stages: range, letter: str, num_microbatches: int, per_round: int) -> list[Action]:
    starts = range(0, num_microbatches, per_round)
    return [Action(stage, letter, m) for start in starts for stage in stages for m in range(start, start + per_round)]


def refuse(pp: int, num_microbatches: int, num_chunks: int) -> str | None:
    if num_chunks < 2:
        return "at least 2 chunks a rank; one chunk is 1f1b"
    num_rounds = max(1, num_microbatches // pp)
    if num_microbatches % num_rounds:
        return f"{num_microbatches} microbatches don't split into {num_rounds} equal rounds; use a multiple of pp={pp}"
    return None
