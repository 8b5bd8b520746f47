"""Owns the journal of a conversion: what of it is on disk for good.

JSON lines. The first states the job; each other one is `[key, digest]`, appended and
synced after everything that it speaks of, or `[key]`, which takes back what was noted
under the key. So an entry can be trusted after a kill and after a loss of power. A
torn line is no entry, and nor is what follows it.
"""

import json
import os
import threading
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

type Job = dict[str, object]


class Journal:
    """Digests noted by key, in order. For several threads.

    Attributes:
      job: What is being done; a journal of another job is of no use.
    """

    def __init__(self, path: Path, job: Job, entries: list[list[str]]):
        self.job = job
        self._path = path
        self._lock = threading.Lock()
        self._notes: dict[str, list[str]] = defaultdict(list)
        for key, *digest in entries:
            self._apply(key, *digest)

    @classmethod
    def begin(cls, path: Path, job: Job) -> "Journal":
        """Returns a journal with no entries, durable but for its directory's entry."""
        path.unlink(missing_ok=True)
        journal = cls(path, job, [])
        journal._append([job])
        return journal

    @classmethod
    def read(cls, path: Path) -> "Journal | None":
        """Returns the journal at `path`, or None if there is none that has a job."""
        if not path.exists():
            return None
        lines = path.read_bytes().splitlines(keepends=True)
        job = _parsed(lines[0]) if lines else None
        if not isinstance(job, dict):
            return None
        entries = []
        for line in lines[1:]:
            entry = _parsed(line)
            if not isinstance(entry, list):
                break
            entries.append(entry)
        os.truncate(path, sum(map(len, lines[: 1 + len(entries)])))
        return cls(path, job, entries)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is noted."""
        return not self._notes

    @property
    def keys(self) -> frozenset[str]:
        """The keys under which something is noted."""
        return frozenset(self._notes)

    def noted(self, key: str) -> tuple[str, ...]:
        """Returns the digests noted under `key`, in order."""
        with self._lock:
            return tuple(self._notes.get(key, ()))

    def note(self, notes: Sequence[tuple[str, str]]) -> None:
        """Notes by key that what each digest speaks of is on disk, for good."""
        if not notes:
            return
        with self._lock:
            self._append(notes)
            for key, digest in notes:
                self._apply(key, digest)

    def forget(self, key: str) -> None:
        """Takes back all that was noted under `key`."""
        with self._lock:
            self._append([[key]])
            self._apply(key)

    def _apply(self, key: str, *digest: str) -> None:
        if digest:
            self._notes[key].extend(digest)
        else:
            self._notes.pop(key, None)

    def _append(self, values: Iterable[object]) -> None:
        try:
            with open(self._path, "ab") as file:
                file.writelines(json.dumps(value).encode() + b"\n" for value in values)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self._path)) from error


def _parsed(line: bytes) -> object:
    """Returns what a whole line says, or None."""
    try:
        return json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
