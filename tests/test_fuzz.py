"""Does any scenario text, however broken, end in success or in one clear line?"""

import random
import re

import pytest
from typer.testing import CliRunner

from moesim.cli import app
from moesim.load import scenarios_dir

SCENARIOS = [p for p in sorted(scenarios_dir().glob("*.yaml")) if "model:" in p.read_text()]
VALUES = ["", "null", "0", "-1", "1e400", "nan", "true", "[]", "{}", "[1, [2]]", "'x'", "3.5", "10**9", "99999999999999999999", "512", "8 GB", "-5 us", "1 parsec",
          "olmo_core3_seed", "../../etc/passwd", "\"\\u202e\"", "&a [*a]", "!!python/object:os.system x", "dp8 ep8", "no", "0x10", "1_000"]


def mutate(text: str, rng: random.Random) -> str:
    lines = text.splitlines()
    for _ in range(rng.randint(1, 3)):
        i = rng.randrange(len(lines))
        change = rng.randrange(8)
        if change == 0:
            lines[i] = lines[i].partition(":")[0] + ": " + rng.choice(VALUES)
        elif change == 1:
            del lines[i]
        elif change == 2:
            lines.insert(i, lines[rng.randrange(len(lines))])
        elif change == 3 and lines[i]:
            at = rng.randrange(len(lines[i]))
            lines[i] = lines[i][:at] + rng.choice("{}[]:,#&*!|>'\"%@`\t\0é ") + lines[i][at + 1:]
        elif change == 4:
            lines[i] = " " * rng.randint(0, 5) + lines[i].lstrip()
        elif change == 5:
            lines[i] = re.sub(r"\d+", lambda m: str(rng.choice([0, 1, 3, 7, 10**6, -4, 2**40])), lines[i])
        elif change == 6 and ":" in lines[i]:
            key, _, rest = lines[i].partition(":")
            lines[i] = key + rng.choice(["s", "_", "x", ""]) + ":" + rest
        else:
            lines = lines[:i] or [""]
        if not lines:
            lines = [""]
    return "\n".join(lines)


def run(command: list[str], path):
    result = CliRunner().invoke(app, [*command, str(path)])
    said = result.output.strip().splitlines()
    where = f"{command}: {path.read_bytes()!r}\n{result.output}"
    assert result.exit_code in (0, 2, 3), where
    assert result.exception is None or isinstance(result.exception, SystemExit), where
    assert "Traceback" not in result.output, where
    if result.exit_code == 2:
        assert len(said) == 1 and len(said[0]) > 10, where
    return result.exit_code


def mutants(seed: int, count: int, tmp_path):
    rng = random.Random(seed)
    for n in range(count):
        path = tmp_path / f"m{n}.yaml"
        path.write_bytes(mutate(rng.choice(SCENARIOS).read_text(), rng).encode("utf-8", "surrogatepass"))
        yield path


def test_validate_never_breaks(tmp_path):
    codes = [run(["validate"], path) for path in mutants(1, 300, tmp_path)]
    assert set(codes) == {0, 2}


@pytest.mark.full
@pytest.mark.parametrize("seed", range(10))
def test_validate_never_breaks_on_thousands(seed, tmp_path):
    codes = [run(["validate"], path) for path in mutants(100 + seed, 400, tmp_path)]
    assert set(codes) == {0, 2}


@pytest.mark.full
def test_what_validates_can_be_planned(tmp_path):
    planned = 0
    for path in mutants(7, 2000, tmp_path):
        if "512_nodes" in path.read_text() or run(["validate"], path):
            continue
        assert run(["plan", "-q", "--top", "2"], path) in (0, 2, 3)
        planned += 1
        if planned == 30:
            return
    raise AssertionError(f"only {planned} mutants validated")
