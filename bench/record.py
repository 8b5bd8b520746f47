"""Owns where records lie and how one is read: one file a topic and device."""

import json
from collections.abc import Sequence
from pathlib import Path

import jax

from bench.timing import copy_gbps
from ddtree_jax.errors import ConfigError
from ddtree_jax.research.record import Record, make_record

RESULTS = Path(__file__).parent / "results"


def bench_record(topic: str, rows: list[dict], argv: Sequence[str]) -> Record:
    """Returns a record of timings, with the device's copy rate beside them."""
    record = make_record(topic, rows, program="bench", argv=argv)
    record["copy_gbps"] = round(copy_gbps(), 2)
    return record


def results_path(topic: str) -> Path:
    """Returns the file of a topic on this device: `tree_build-cpu.json`."""
    device = jax.devices()[0]
    kind = "cpu" if device.platform == "cpu" else device.device_kind.split()[-1]
    return RESULTS / f"{topic}-{kind.lower()}.json"


def read_record(path: Path) -> Record:
    """Returns a record.

    Raises:
      ConfigError: The file is not one.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a record: {error}") from None
    if not isinstance(record, dict) or not {"topic", "device", "rows"} <= record.keys():
        raise ConfigError(f"{path} is not a record: expected topic, device and rows")
    return record
