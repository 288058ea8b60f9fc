"""Which runs of a site serve as its anchors? (A fixed rule, blind to errors: lowest, median and highest tokens a microbatch.)

`python -m calibration.anchoring DIR` writes the rows and ids, so that `moesim predict RUNS.csv --anchors DIR/anchors.csv` and
`python -m calibration.score P.csv --fit DIR/anchors.txt --anchored DIR/anchored.txt` judge what anchors bring.
"""

from __future__ import annotations

import argparse
import csv
import io
from collections import defaultdict
from pathlib import Path
from typing import Iterable, Sequence

from calibration.folds import MEASUREMENTS, read_excluded
from calibration.write import write_text
from moesim.predict import read_rows
from moesim.runs import Run, parse_runs

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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m calibration.anchoring", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="where to write anchors.csv (the anchors' rows), anchors.txt and anchored.txt (ids)")
    args = parser.parse_args(argv)
    rows = read_rows(MEASUREMENTS / "published_runs.csv")
    runs = [run for run in parse_runs(rows) if isinstance(run, Run) and run.id not in read_excluded()]
    chosen = choose(runs)
    anchors = {name for ids in chosen.values() for name in ids}
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(row for row in rows if row["id"] in anchors)
    write_text(args.directory / "anchors.csv", out.getvalue())
    write_text(args.directory / "anchors.txt", "\n".join(sorted(anchors)) + "\n")
    rest = sorted(run.id for run in runs if run.site in chosen and run.id not in anchors)
    write_text(args.directory / "anchored.txt", "\n".join(rest) + "\n")
    print(f"{len(anchors)} anchors of {len(chosen)} sites; {len(rest)} other runs of those sites")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
