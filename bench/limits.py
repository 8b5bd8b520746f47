"""Owns how a benchmark ends: when its time is over, and when a part of it fails."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Deadline(NamedTuple):
    """When to begin nothing more."""

    end: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """Returns the deadline that is so far away."""
        return cls(time.monotonic() + seconds)

    def check(self) -> None:
        """Raises TimeoutError once it is over."""
        if time.monotonic() >= self.end:
            raise TimeoutError("out of time")


@contextmanager
def noted(wrong: list[str], what: str) -> Iterator[None]:
    """Notes an error and goes on: what else was asked for is worth having."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        wrong.append(f"{what}: {text}"[:500])
        print(wrong[-1], flush=True)
