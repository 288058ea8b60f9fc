"""Interleaved 1F1B, with the backward whole or split: in which order does a rank visit several chunks?

Narayanan et al. 2021, arXiv:2104.04473 section 2.2: microbatches move in rounds of about pp; a round visits every
chunk before the next round starts, backward visits chunks from the last. The paper wants microbatches divisible by
pp; here, as in torch, rounds of any equal size will do: floor(microbatches/pp) rounds, at least one.

The zero-bubble form splits the backward and holds W back by one step a rank (ZB-H1 of Qi et al. 2023,
arXiv:2401.10241, on several chunks).
"""
from itertools import chain

from moesim.schedules import Action


def rank_order(rank: int, pp: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    forward, backward = (_visits(letter, rank, pp, num_microbatches, num_chunks) for letter in "FB")
    # Every chunk but the last once, then two steps for each rank below: a forward reaches the last rank and comes back.
    num_warmup = (num_chunks - 1) * _round_size(pp, num_microbatches) + 2 * (pp - 1 - rank)
    return _weave(forward, num_warmup, backward)


def rank_order_zero_bubble(rank: int, pp: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    forward, inputs, weights = (_visits(letter, rank, pp, num_microbatches, num_chunks) for letter in "FIW")
    # One step for each rank below, not two: I alone is back that much sooner.
    num_warmup = (num_chunks - 1) * _round_size(pp, num_microbatches) + pp - 1 - rank
    return _weave(forward, num_warmup, inputs, weights, delay=rank)


def _weave(forward: list[Action], num_warmup: int, backward: list[Action], weights: list[Action] = (), delay: int = 0) -> list[Action]:
    """num_warmup forwards, then steps of one forward, one backward and, `delay` steps behind, one W; each list to its end."""
    steps = [[action] for action in backward]
    for step, action in zip(steps, forward[num_warmup:]):
        step.insert(0, action)
    for step, action in zip(steps[delay:], weights):
        step.append(action)
    return forward[:num_warmup] + list(chain.from_iterable(steps)) + list(weights[max(0, len(steps) - delay) :])


def _visits(letter: str, rank: int, pp: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    """All (stage, microbatch) of one letter in the order of the rounds."""
    per_round = _round_size(pp, num_microbatches)
    stages = range(rank, pp * num_chunks, pp)[:: 1 if letter == "F" else -1]
    starts = range(0, num_microbatches, per_round)
    return [Action(stage, letter, m) for start in starts for stage in stages for m in range(start, start + per_round)]


def _round_size(pp: int, num_microbatches: int) -> int:
    return num_microbatches // max(1, num_microbatches // pp)


def refuse(pp: int, num_microbatches: int, num_chunks: int) -> str | None:
    if num_chunks < 2:
        return "at least 2 chunks a rank; one chunk is 1f1b"
    return refuse_zero_bubble(pp, num_microbatches, num_chunks)


def refuse_zero_bubble(pp: int, num_microbatches: int, num_chunks: int) -> str | None:
    num_rounds = max(1, num_microbatches // pp)
    if num_microbatches % num_rounds:
        return f"{num_microbatches} microbatches don't split into {num_rounds} equal rounds; use a multiple of pp={pp}"
    return None
