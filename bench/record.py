"""Owns where records lie, how one is filled and read: one file a topic and device."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax

from bench.timing import copy_gbps
from ddtree_jax.errors import ConfigError, DDTreeError
from ddtree_jax.research.record import Record, make_record, write_record

RESULTS = Path(__file__).parent / "results"


def bench_record(topic: str, rows: list[dict], argv: Sequence[str]) -> Record:
    """Returns a record of timings, with the device's copy rate beside them."""
    record = make_record(topic, rows, program="bench", argv=argv)
    record["copy_gbps"] = round(copy_gbps(), 2)
    return record


def fill(
    record: Record,
    path: Path,
    measure: Callable[..., list[str]],
    table: Callable[[Record], str],
) -> None:
    """Has a record filled, row by row, and prints it.

    Args:
      path: Where it is written, anew after each row.
      measure: Adds rows, calls `save` whenever it has, and returns what went wrong.
      table: Makes the record's rows readable.

    Raises:
      DDTreeError: Something was not measured; all else is written.
    """
    save = partial(write_record, path, record)
    wrong = measure(record["rows"], save=save)
    print(table(record))
    if record["rows"]:
        print(f"{path} written")
    if wrong:
        raise DDTreeError(f"{record['topic']}: not measured: " + "; ".join(wrong))


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
