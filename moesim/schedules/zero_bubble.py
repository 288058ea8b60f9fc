"""Zero bubble in a V (ZBV): which weight gradients fill the idle time?

Qi et al. 2023, arXiv:2401.10241 section 6. The backward is split: I (gradient of the input) is what the rank above
waits for, W (gradient of the weights) can wait. Each rank holds one chunk of the first half and one of the second;
idle time vanishes if F, I and W take equally long. (The interleaved zero-bubble schedule is in interleaved.py.)
"""
from moesim.schedules import Action


def rank_order(rank: int, pp: int, num_microbatches: int, num_chunks: int) -> list[Action]:
    """The pattern is whole from 2*pp - 1 microbatches on; a shorter step is that pattern without the missing ones."""
    pattern = _pattern(rank, pp, max(num_microbatches, 2 * pp - 1))
    return [action for action in pattern if action.microbatch < num_microbatches]


def _pattern(rank: int, pp: int, num_microbatches: int) -> list[Action]:
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


def refuse(pp: int, num_microbatches: int, num_chunks: int) -> str | None:
    return None if num_chunks == 2 else f"exactly 2 chunks a rank, got {num_chunks}"
