"""Do the seed benchmark's two stacks come out as published? (`python -m calibration.seeds [--json F]`)

Five points of OLMo-core 3 on 8 B300 (https://allenai.org/papers/olmocore3, Figure 4 and Table 6). No constant is fitted to any of
them: the zero-shot column uses the shipped profile and stacks; the anchored column refits the site's few constants to the one run
in measurements/anchor_olmo_core3.csv (new stack, 8 experts), and is never mixed with the first.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from moesim.anchored import site_from_file
from moesim.compare import compare
from moesim.evaluate import Evaluator
from moesim.files import write_atomically
from moesim.load import load_scenario

ANCHOR = Path(__file__).resolve().parent / "measurements" / "anchor_olmo_core3.csv"
POINTS = (("olmo_core3_new", 8, 54_500.0), ("olmo_core3_new", 32, 54_063.0), ("olmo_core3_new", 128, 52_000.0),
          ("olmo_core3_old", 8, 50_500.0), ("olmo_core3_old", 128, 19_400.0))
GAP = (("olmo_core3_old", 19_400.0), ("olmo_core3_new", 52_000.0))


def evaluator(name: str, num_experts: int, anchored: bool) -> Evaluator:
    scenario = load_scenario(name, (f"model.num_experts={num_experts}",))
    return Evaluator(scenario, site=site_from_file(ANCHOR, scenario)) if anchored else Evaluator(scenario)


def points(anchored: bool) -> list[dict]:
    """One dict a seed point: predicted tokens/s/GPU with its 80% interval, measured, relative error, inside."""
    rows = []
    for name, experts, measured in POINTS:
        e = evaluator(name, experts, anchored)
        c = e.candidate(e.played(e.legal(e.scenario.layout)), with_skew=False)
        rows.append({"scenario": name, "experts": experts, "predicted": c.tokens_per_s_per_gpu, "low": c.low, "high": c.high, "measured": measured,
                     "error": c.tokens_per_s_per_gpu / measured - 1, "inside": c.low <= measured <= c.high, "peak_gib": c.peak_bytes / 2**30})
    return rows


def gap(anchored: bool) -> dict:
    """The old stack's step less the new one's at 128 experts: measured, predicted, unexplained share."""
    sides = [evaluator(name, 128, anchored) for name, _ in GAP]
    found = compare(*((e, e.scenario.layout) for e in sides), measured=tuple(rate for _, rate in GAP))
    return {"measured_s": found.measured_gap_s, "predicted_s": found.predicted_gap_s, "unexplained": found.unexplained_s / found.measured_gap_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="F", help="write the figures as JSON")
    args = parser.parse_args()
    result = {}
    for label, anchored in (("zero-shot", False), ("anchored", True)):
        rows, difference = points(anchored), gap(anchored)
        result[label] = {"points": rows, "gap": difference}
        print(f"{label}\n  {'scenario':<16}{'E':>5}{'predicted':>11}{'80% interval':>20}{'measured':>10}{'error':>9}  inside")
        for r in rows:
            print(f"  {r['scenario']:<16}{r['experts']:>5}{r['predicted']:>11,.0f}{r['low']:>11,.0f}-{r['high']:<8,.0f}{r['measured']:>10,.0f}{r['error']:>+9.1%}  {r['inside']}")
        drop = [1 - rows[2][k] / rows[0][k] for k in ("predicted", "measured")]
        print(f"  new stack, 8 -> 128 experts: {drop[0]:.1%} slower predicted, {drop[1]:.1%} measured; new over old at 128: "
              f"{rows[2]['predicted'] / rows[4]['predicted']:.2f} predicted, {rows[2]['measured'] / rows[4]['measured']:.2f} measured")
        print(f"  old less new at 128: {difference['predicted_s']:.2f} s of {difference['measured_s']:.2f} s a step, {difference['unexplained']:.1%} unexplained")
    if args.json:
        write_atomically(Path(args.json), json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
