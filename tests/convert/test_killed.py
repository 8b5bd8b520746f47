"""A conversion that was killed at any moment is absent, incomplete, or whole."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.convert.command import ROOT

# Kills in the usual tests, and in the slow ones.
KILLS = {
    ("ours", "moments"): (3, 50),
    ("ours", "steps"): (4, 60),
    ("ours", "power"): (4, 60),
    ("hf", "moments"): (3, 50),
    ("hf", "steps"): (0, 40),
    ("hf", "power"): (4, 40),
    ("sglang", "moments"): (3, 50),
    ("sglang", "steps"): (0, 40),
    ("sglang", "power"): (4, 40),
}


def killed(
    target: str, mode: str, source: Path, out: Path, count: int, seed: int
) -> Counter:
    out.mkdir()
    command = [sys.executable, "-m", "tests.convert.killing", target, mode]
    done = subprocess.run(
        [*command, source, out, str(count), str(seed)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.partition(" ")[2] for line in done.stdout.splitlines()]
    found = Counter(line for line in lines if "bytes written" not in line)
    assert found.total() == count
    assert found.keys() <= {"whole", "went on", "began anew"}
    return found


@pytest.mark.parametrize(
    ("target", "mode"), [case for case, (usual, _) in KILLS.items() if usual]
)
def test_killed_run_is_resumed(source, tmp_path, target, mode):
    count, _ = KILLS[target, mode]
    found = killed(target, mode, source, tmp_path / "out", count, 0)
    assert found["went on"] or mode == "moments"


# A busy machine takes ten times as long as an idle one.
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("target", "mode"), KILLS)
def test_killed_run_is_resumed_at_many_moments(source, tmp_path, target, mode):
    _, count = KILLS[target, mode]
    found = killed(target, mode, source, tmp_path / "out", count, 1)
    assert found["went on"] >= count // 8, found
