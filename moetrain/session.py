"""What surrounds a training loop: checks before it, the record it leaves, the watchdog beside it?"""

from __future__ import annotations

from moesim.spec import Scenario
from moetrain.distributed import Seat
from moetrain.train import prepare, train


def run_training(scenario: Scenario, layout_text: str | None, seat: Seat, init_from: str | None = None) -> int:
    """A whole run of this rank; its exit code. ValueError in one line for what can't start."""
    run = prepare(scenario, layout_text, seat)
    return train(run)
