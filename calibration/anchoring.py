"""Which runs of a site serve as its anchors? (A fixed rule, blind to errors: lowest, median and highest tokens a microbatch.)"""

from __future__ import annotations

from collections import defaultdict
from typing import Iterable

from moesim.runs import Run

MIN_RUNS = 8
"""Sites with fewer measured runs keep them all for scoring: three anchors would leave too few to judge."""


def tokens_per_microbatch(run: Run) -> float:
    """Tokens one rank works on at a time."""
    return run.layout.mb * run.workload.seq_len / run.layout.cp


def choose(runs: Iterable[Run]) -> dict[str, tuple[str, ...]]:
    """Site -> ids of its three anchors. Ties fall to the smaller id; runs without a measurement can't anchor."""
    sites: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if run.measured.tokens_per_s_per_gpu:
            sites[run.site].append(run)
    found = {}
    for site, members in sorted(sites.items()):
        if len(members) < MIN_RUNS:
            continue
        order = sorted(members, key=lambda run: (tokens_per_microbatch(run), run.id))
        found[site] = tuple(order[i].id for i in (0, (len(order) - 1) // 2, len(order) - 1))
    return found
