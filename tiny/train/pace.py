"""Owns how long a stage trains: the plan in steps, the learning rate, the log."""

import json
import time
from pathlib import Path

STARTED = time.monotonic()  # Start-up and compilation count too.
_WARM_UP = 200
_LAST_RATE = 0.02


class Pace:
    """The plan of one stage, kept up to date from measured steps.

    Attributes:
      planned: Steps in all, as far as is known.
    """

    def __init__(
        self, *, minutes: float, steps: int | None, elapsed: float, began: float
    ):
        """Starts the plan.

        Args:
          minutes: Of the whole stage, over all commands.
          steps: In place of what fits into the minutes.
          elapsed: Seconds that earlier commands took.
          began: Clock at which this command's seconds begin.
        """
        self._minutes, self._steps, self._elapsed = minutes, steps, elapsed
        self._began = began
        self._mark: tuple[int, float] | None = None
        self.planned = steps

    @property
    def elapsed(self) -> float:
        """Seconds of this stage, those of earlier commands included."""
        return self._elapsed + time.monotonic() - self._began

    def measure(self, step: int) -> float:
        """Returns the seconds a step since the last call, and renews the plan."""
        now = time.monotonic()
        took = 0.0
        if self._mark is not None and step > self._mark[0]:
            took = (now - self._mark[1]) / (step - self._mark[0])
            if self._steps is None:
                left = max(60 * self._minutes - self.elapsed, 0.0)
                self.planned = step + int(left / took)
        self._mark = (step, now)
        return took

    def pause(self, step: int) -> None:
        """Leaves out of the next measurement what happened since the last."""
        self._mark = (step, time.monotonic())

    def progress(self, step: int) -> float:
        """Returns which share of the plan is done."""
        return 0.0 if self.planned is None else min(step / max(self.planned, 1), 1.0)

    def rate(self, step: int, peak: float) -> float:
        """Returns the learning rate: a warm-up, then linear to almost nothing."""
        warm = min((step + 1) / _WARM_UP, 1.0)
        return peak * warm * (1.0 - (1.0 - _LAST_RATE) * self.progress(step))

    def finished(self, step: int) -> bool:
        """Whether the plan is done; time counts unless steps were given."""
        if self._steps is not None:
            return step >= self._steps
        return self.elapsed >= 60 * self._minutes


class Log:
    """A file of JSON lines that is shown too."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path

    def write(self, **facts: float | int | str) -> None:
        """Appends one line."""
        rounded = {
            key: round(value, 5) if isinstance(value, float) else value
            for key, value in facts.items()
        }
        line = json.dumps(rounded)
        print(line, flush=True)
        with self._path.open("a") as file:
            file.write(line + "\n")
