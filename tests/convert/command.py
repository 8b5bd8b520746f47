"""Runs `python -m convert`, here and as a process of its own."""

import subprocess
import sys
from pathlib import Path

from convert.__main__ import main
from tests.convert.support import TINY, read_config

ROOT = Path(__file__).parents[2]


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys, match: str, *arguments) -> None:
    """Checks for exit code 1 and one line, which contains `match`."""
    code, _, err = run(capsys, *arguments)
    assert code == 1
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and match in lines[0], err


def shell(*arguments, limit: str = "") -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "convert", *map(str, arguments)]
    if limit:
        command = ["bash", "-c", f'{limit}; exec "$@"', "bash", *command]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def wide_config(**changes: int) -> dict:
    config = read_config(TINY)
    config["text_config"].update(changes)
    return config
