"""DualPipeV: which forward runs together with which backward?

DualPipe (DeepSeek-V3, arXiv:2412.19437 section 3.2.1) cut in half along its mirror line by Sea AI Lab
(https://huggingface.co/blog/ufotalent/cut-in-half): each rank holds a first-half and a second-half chunk, and in the steady
state the forward of one runs in a pair with the backward of the other, so that one's all-to-all can hide under the
other's compute. Warm-up and cooldown split the backward as zero bubble does.
"""
from collections import deque

from moesim.schedules import Action, Pair


def rank_order(rank: int, pp: int, num_microbatches: int, num_chunks: int) -> list[Action | Pair]:
    return _Rank(rank, pp).run(num_microbatches)


class _Rank:
    """One rank's list while it is being written; W not yet run waits in a queue."""

    def __init__(self, rank: int, pp: int):
        self.rank, self.pp = rank, pp
        self.down, self.up = rank, 2 * pp - 1 - rank
        self.num_forward = {self.down: 0, self.up: 0}
        self.num_backward = {self.down: 0, self.up: 0}
        self.waiting: deque[Action] = deque()
        self.order: list[Action | Pair] = []

    def run(self, num_microbatches: int) -> list[Action | Pair]:
        down, up, below = self.down, self.up, self.pp - 1 - self.rank
        for _ in range(2 * below):
            self.order.append(self.forward(down))
        for _ in range(self.rank + 1):
            self.order += self.forward(down), self.forward(up)
        for _ in range(below):
            self.order += self.input_gradient(up), self.waiting.popleft(), self.forward(up)
        self.steady(num_microbatches - 2 * self.pp + self.rank + 1)
        for _ in range(below):
            self.order += self.backward(up), self.pair(up, down)
        for i in range(2 * (self.rank + 1)):  # whole backwards, then I alone so that the ranks above go on
            step = self.backward if i <= self.rank else self.input_gradient
            self.order.append(step(down if i % 2 else up))
        for _ in range(below):
            self.order += self.waiting.popleft(), self.input_gradient(down)
        return self.order + list(self.waiting)

    def steady(self, times: int) -> None:
        for i in range(times):
            if i == 0 and self.rank == self.pp - 1:  # at the turn nothing is in flight yet to overlap with
                self.order += self.forward(self.down), self.backward(self.up)
            else:
                self.order.append(self.pair(self.down, self.up))
            self.order.append(self.pair(self.up, self.down))

    def pair(self, forward: int, backward: int) -> Pair:
        return Pair(self.forward(forward), self.backward(backward))

    def forward(self, stage: int) -> Action:
        self.num_forward[stage] += 1
        return Action(stage, "F", self.num_forward[stage] - 1)

    def backward(self, stage: int) -> Action:
        self.num_backward[stage] += 1
        return Action(stage, "B", self.num_backward[stage] - 1)

    def input_gradient(self, stage: int) -> Action:
        m = self.backward(stage).microbatch
        self.waiting.append(Action(stage, "W", m))
        return Action(stage, "I", m)


def refuse(pp: int, num_microbatches: int, num_chunks: int) -> str | None:
    if num_chunks != 2:
        return f"exactly 2 chunks a rank, got {num_chunks}"
    if num_microbatches < 2 * pp:
        return f"at least as many microbatches as virtual stages, 2*pp = {2 * pp}, got {num_microbatches}"
    return None
