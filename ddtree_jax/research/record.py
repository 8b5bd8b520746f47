"""Owns the JSON form of a measurement: what was run, where, and its rows."""

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

type Record = dict[str, Any]


def make_record(
    topic: str, rows: list[dict[str, Any]], *, program: str, argv: Sequence[str]
) -> Record:
    """Returns a record of rows measured here and now; add keys at will.

    Args:
      program: Module that was run.
      argv: Its arguments. Of absolute paths only the name is kept, since the rest
        means nothing elsewhere.
    """
    return {
        "topic": topic,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit(),
        "command": shlex.join(["python", "-m", program, *map(_shortened, argv)]),
        "device": device(),
        "versions": versions(),
        "rows": rows,
    }


def _shortened(argument: str) -> str:
    flag, equals, value = argument.rpartition("=")
    return flag + equals + Path(value).name if os.path.isabs(value) else argument


def write_record(path: Path, record: Record) -> None:
    """Writes the record; a reader sees the old file or the new one, never a part."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        scratch.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def commit() -> str:
    """Returns the commit of this source tree, "dirty" added when files differ."""
    root = Path(__file__).parents[2]

    def git(*words: str) -> str:
        command = ["git", "-C", str(root), *words]
        return subprocess.run(
            command, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        # An installed copy may lie inside a repository that is not this one.
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return "unknown"
        changed = git("status", "--porcelain")
        return git("rev-parse", "HEAD") + (" (dirty)" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def device() -> str:
    """Returns how many devices of which kind JAX has here."""
    first = jax.devices()[0]
    if first.platform == "cpu":
        return f"{_cpu_name()}, {os.cpu_count()} cores"
    return f"{len(jax.devices())} × {first.device_kind}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if "model name" in line)
    return next(names, platform.processor() or platform.machine())


def versions() -> dict[str, str]:
    """Returns the versions that a figure may depend on."""
    found = {
        name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")
    }
    found["python"] = platform.python_version()
    if jax.devices()[0].platform == "gpu":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True)
        found["driver"] = driver.stdout.splitlines()[0].strip()
    return found
