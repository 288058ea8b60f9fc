"""Zero bubble: which weight gradients fill the idle time?

Qi et al. 2023, arXiv:2401.10241. The backward is split: I (gradient of the input) is what the rank above waits for,
W (gradient of the weights) can wait. Two placements: interleaved chunks with W held back by one microbatch a rank
(the paper's ZB-H1 rule, memory as 1F1B), and the V of section 6 where each rank holds a first-half and a second-half
chunk and idle time vanishes if F, I and W take equally long.
"""
from moesim.schedules import Action


def rank_order_interleaved(rank: int, pp: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    per_round = num_microbatches // max(1, num_microbatches // pp)
    stages = range(rank, pp * num_chunks, pp)
    forward = _visits(stages, "F", num_microbatches, per_round)
    inputs = _visits(stages[::-1], "I", num_microbatches, per_round)
    weights = _visits(stages[::-1], "W", num_microbatches, per_round)
    # One warm-up step for each rank below, where 1F1B's interleaving has two: I alone comes back that much sooner.
    num_warmup = min((num_chunks - 1) * per_round + pp - 1 - rank, len(forward))
    order = forward[:num_warmup]
    for step, action in enumerate(inputs):
        order += forward[num_warmup + step : num_warmup + step + 1]
        order.append(action)
        if step >= rank:
            order.append(weights[step - rank])
    return order + weights[max(0, len(inputs) - rank) :]


def _visits(stages: range, letter: str, num_microbatches: int, per_round: int) -> list[Action]:
    starts = range(0, num_microbatches, per_round)
    return [Action(stage, letter, m) for start in starts for stage in stages for m in range(start, start + per_round)]


def refuse_interleaved(pp: int, num_microbatches: int, num_chunks: int) -> str | None:
    num_rounds = max(1, num_microbatches // pp)
    if num_microbatches % num_rounds:
        return f"{num_microbatches} microbatches don't split into {num_rounds} equal rounds; use a multiple of pp={pp}"
    return None


def rank_order_v(rank: int, pp: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    """The pattern is whole from 2*pp - 1 microbatches on; a shorter step is that pattern without the missing ones."""
    pattern = _v_pattern(rank, pp, max(num_microbatches, 2 * pp - 1))
    return [action for action in pattern if action.microbatch < num_microbatches]


def _v_pattern(rank: int, pp: int, num_microbatches: int) -> list[Action]:
    down, up = rank, 2 * pp - 1 - rank  # the rank's chunk of the first half, and of the second
    below = pp - rank
    next_microbatch: dict[tuple[int, str], int] = {}
    order: list[Action] = []

    def run(stage: int, letters: str) -> None:
        for letter in letters:
            m = next_microbatch.get((stage, letter), 0)
            if m < num_microbatches:
                next_microbatch[stage, letter] = m + 1
                order.append(Action(stage, letter, m))

    def repeat(times: int, *work: tuple[int, str]) -> None:
        for _ in range(times):
            for stage, letters in work:
                run(stage, letters)

    repeat(2 * below - 1, (down, "F"))  # until the first microbatch is back from the turn
    repeat(rank, (up, "F"), (down, "F"))
    repeat(below, (up, "FIW"))  # until the first gradient is back
    repeat(num_microbatches - pp, (down, "FIW"), (up, "FIW"))
    repeat(rank, (down, "I"), (up, "I"))  # ranks above wait for I: W comes later
    repeat(below, (down, "IW"))
    repeat(num_microbatches, (up, "W"))
    repeat(num_microbatches, (down, "W"))
    return order


def refuse_v(pp: int, num_microbatches: int, num_chunks: int) -> str | None:
    return None if num_chunks == 2 else f"exactly 2 chunks a rank, got {num_chunks}"
