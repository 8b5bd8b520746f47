"""Owns how long work reports: bytes done, rate, time left and the current file."""

import sys
import threading
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
    """What readers and writers tell, from any thread: the place, and bytes done."""

    def at(self, place: str) -> None:
        """Says that work has come to `place`, such as a file's name."""
        ...

    def advance(self, nbytes: int) -> None:
        """Counts `nbytes` more."""
        ...

    def skip(self, nbytes: int) -> None:
        """Counts `nbytes` as not to be done, since an earlier run has done them."""
        ...

    def close(self) -> None:
        """Reports the end."""
        ...


def make_reporter(verb: str, total_bytes: int) -> Reporter:
    """Returns a bar on a terminal, and otherwise plain lines, both on stderr.

    Args:
      verb: What is being done: "converting".
    """
    if sys.stderr.isatty():
        return _Bar(verb, total_bytes)
    return _Lines(verb, total_bytes)


class _Bar:
    def __init__(self, verb: str, total_bytes: int):
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[place]}"),
            console=Console(stderr=True),
        )
        self._total = total_bytes
        self._lock = threading.Lock()
        self._task = self._progress.add_task(verb, total=total_bytes, place="")
        self._progress.start()

    def at(self, place: str) -> None:
        self._progress.update(self._task, place=place)

    def advance(self, nbytes: int) -> None:
        self._progress.advance(self._task, nbytes)

    def skip(self, nbytes: int) -> None:
        with self._lock:
            self._total -= nbytes
            self._progress.update(self._task, total=self._total)

    def close(self) -> None:
        self._progress.stop()


class _Lines:
    def __init__(self, verb: str, total_bytes: int):
        self._verb = verb
        self._place = ""
        self._total = total_bytes
        self._done = 0
        self._start = self._last = time.monotonic()
        self._lock = threading.Lock()

    def at(self, place: str) -> None:
        self._place = place

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._last >= _LINE_INTERVAL_S:
                self._last = now
                self._print(now)

    def skip(self, nbytes: int) -> None:
        with self._lock:
            self._total -= nbytes

    def close(self) -> None:
        self._print(time.monotonic())

    def _print(self, now: float) -> None:
        rate = self._done / max(now - self._start, 1e-9)
        left = (self._total - self._done) / max(rate, 1e-9)
        print(
            f"{self._verb}  {self._done / 1e9:.2f} / {self._total / 1e9:.2f} GB  "
            f"{rate / 1e9:.2f} GB/s  {left:.0f} s left  {self._place}".rstrip(),
            file=sys.stderr,
        )
