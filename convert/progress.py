"""Owns how a conversion reports: bytes done, rate and time left."""

import sys
import time
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_LINE_INTERVAL_S = 10.0


class Reporter(Protocol):
    """What the writer tells: bytes that are done."""

    def advance(self, nbytes: int) -> None:
        """Counts `nbytes` more."""
        ...

    def close(self) -> None:
        """Reports the end."""
        ...


def make_reporter(total_bytes: int) -> Reporter:
    """Returns a bar on a terminal, and otherwise plain lines, both on stderr."""
    if sys.stderr.isatty():
        return _Bar(total_bytes)
    return _Lines(total_bytes)


class _Bar:
    def __init__(self, total_bytes: int):
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("converting", total=total_bytes)
        self._progress.start()

    def advance(self, nbytes: int) -> None:
        self._progress.advance(self._task, nbytes)

    def close(self) -> None:
        self._progress.stop()


class _Lines:
    def __init__(self, total_bytes: int):
        self._total = total_bytes
        self._done = 0
        self._start = self._last = time.monotonic()

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        now = time.monotonic()
        if now - self._last >= _LINE_INTERVAL_S:
            self._last = now
            self._print(now)

    def close(self) -> None:
        self._print(time.monotonic())

    def _print(self, now: float) -> None:
        rate = self._done / max(now - self._start, 1e-9)
        left = (self._total - self._done) / max(rate, 1e-9)
        print(
            f"{self._done / 1e9:.2f} / {self._total / 1e9:.2f} GB  "
            f"{rate / 1e9:.2f} GB/s  {left:.0f} s left",
            file=sys.stderr,
        )
