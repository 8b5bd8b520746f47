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


# Not by rusage: that counts the peak of the process that forked, too.
_WITH_PEAK = """
import sys
import convert.leaf
if (limit := sys.argv.pop(1)) != "usual":
    convert.leaf.MAX_CHUNK_BYTES = int(limit)
from convert.__main__ import main
code = main(sys.argv[1:])
lines = open("/proc/self/status").read().splitlines()
print(next(line for line in lines if line.startswith("VmHWM:")))
sys.exit(code)
"""


def run_with_peak(
    *arguments, max_chunk_bytes: int | None = None
) -> tuple[int, subprocess.CompletedProcess]:
    """Returns the peak memory of a command in bytes, and how it ended."""
    limit = str(max_chunk_bytes or "usual")
    command = [sys.executable, "-c", _WITH_PEAK, limit, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    peak = done.stdout.splitlines()[-1]
    return int(peak.split()[1]) * 1024, done
