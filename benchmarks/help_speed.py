"""How long does a person wait for `moesim --help`? (Bar: 0.5 s.)

Run: python benchmarks/help_speed.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

REPEATS = 9
COMMANDS = (("--help",), ("plan", "--help"), ("--version",))


def main() -> None:
    for arguments in COMMANDS:
        times = [_seconds(arguments) for _ in range(REPEATS)]
        print(f"moesim {' '.join(arguments):12} median {statistics.median(times):.3f} s, worst {max(times):.3f} s of {REPEATS} fresh processes")


def _seconds(arguments: tuple[str, ...]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "moesim", *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
