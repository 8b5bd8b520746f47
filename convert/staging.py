"""Owns that a destination is absent or whole, and that a stopped run can go on.

    .NAME.converting/.lock       locked while a run lasts
    .NAME.converting/.journal    what is being made, and what of it is on disk
    .NAME.converting/NAME/       the work in progress
    NAME/                        appears by one rename, when everything is on disk

The lock is released by the kernel when its process ends, however it ends. So a
staging directory whose lock is free was left by a run that was stopped. Another run
of the same job goes on from there; one of another job begins anew.
"""

import contextlib
import dataclasses
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from convert.durable import sync, sync_tree
from convert.journal import Job, Journal
from ddtree_jax.errors import CheckpointError, DDTreeError

_LOCK = ".lock"
_JOURNAL = ".journal"


@dataclasses.dataclass(frozen=True)
class Staging:
    """A conversion in progress.

    Attributes:
      directory: Becomes the destination.
      journal: What of it is on disk for good. Files that it does not speak of may
        be there, left by a run that was stopped; they are to be written anew.
    """

    directory: Path
    journal: Journal

    def key(self, path: Path) -> str:
        """Returns the journal's key of a path below `directory`."""
        return path.relative_to(self.directory).as_posix()


@contextlib.contextmanager
def staged(destination: Path, job: Job) -> Iterator[Staging]:
    """Gives a directory that becomes `destination` when the block succeeds.

    What the block has noted in the journal is kept when it fails on the side of this
    machine (an interrupt, a full disk, a kill), for the next run with an equal `job`.

    Args:
      job: All that the result depends on, as JSON: the source above all.

    Raises:
      CheckpointError: The destination exists, or another run is making it, or a file
        cannot be written.
    """
    refuse_existing(destination)
    root = _root(destination)
    with _locked(root, destination):
        try:
            staging = _begin(root, destination, job)
            yield staging
            noted = {staging.directory / key for key in staging.journal.keys}
            sync_tree(staging.directory, but=noted)
            # A directory that appeared meanwhile is never replaced: only an
            # empty one could be, so it is refused too.
            refuse_existing(destination)
            staging.directory.rename(destination)
        except (KeyboardInterrupt, OSError) as error:
            raise _stopped(error, root) from error
        except DDTreeError:
            # The source's fault. When it is mended, it is another one.
            shutil.rmtree(root, ignore_errors=True)
            raise
        sync([destination.parent])
        shutil.rmtree(root)


def refuse_existing(destination: Path) -> None:
    """Raises CheckpointError if there is something at `destination`."""
    if destination.exists() or destination.is_symlink():
        raise CheckpointError(f"{destination} exists; expected a path that does not")


def check_apart(source: Path, destination: Path) -> None:
    """Raises CheckpointError if `destination` is or lies in `source`."""
    inside, outside = destination.absolute().resolve(), source.absolute().resolve()
    if inside == outside or outside in inside.parents:
        raise CheckpointError(f"{destination} lies in the source {source}")


def check_space(destination: Path, needed: int) -> None:
    """Raises CheckpointError unless the disk has `needed` bytes for `destination`.

    What a stopped run has left there counts as free: it is used or removed.
    """
    free = free_bytes(destination)
    if free < needed:
        raise CheckpointError(
            f"{destination.absolute().parent} has {free} bytes free; expected at "
            f"least {needed}"
        )


def free_bytes(destination: Path) -> int:
    """Returns how many bytes the disk has for `destination`."""
    parent = destination.absolute().parent
    while not parent.exists():
        parent = parent.parent
    left = sum(
        (Path(directory) / name).stat().st_size
        for directory, _, names in os.walk(_root(destination))
        for name in names
    )
    return shutil.disk_usage(parent).free + left


def _root(destination: Path) -> Path:
    return destination.parent / f".{destination.name}.converting"


@contextlib.contextmanager
def _locked(root: Path, destination: Path) -> Iterator[None]:
    """Holds the lock of `root`, which it makes if need be."""
    if root.is_symlink() or (root.exists() and not _is_ours(root)):
        raise CheckpointError(
            f"{root} exists and is no unfinished conversion; expected it absent"
        )
    root.mkdir(parents=True, exist_ok=True)
    with open(root / _LOCK, "ab") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another conversion to {destination} is running"
            ) from None
        # Between opening and locking, the other run may have ended and removed it.
        if os.fstat(lock.fileno()).st_nlink == 0:
            raise CheckpointError(f"another conversion to {destination} was running")
        yield


def _is_ours(root: Path) -> bool:
    """Whether a run has made `root`: it has a lock, or nothing yet."""
    return root.is_dir() and ((root / _LOCK).is_file() or not any(root.iterdir()))


def _begin(root: Path, destination: Path, job: Job) -> Staging:
    """Returns the work to go on with, which is empty unless `job` was begun before."""
    directory = root / destination.name
    journal = Journal.read(root / _JOURNAL)
    if journal is not None and journal.job == job and directory.is_dir():
        if not journal.is_empty:
            print(f"going on with what is in {root}", file=sys.stderr)
        return Staging(directory, journal)
    if journal is not None and not journal.is_empty:
        where = _difference(journal.job, job) or "its directory is gone"
        print(
            f"{root} is of another conversion ({where}); beginning anew",
            file=sys.stderr,
        )
    (root / _JOURNAL).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    journal = Journal.begin(root / _JOURNAL, job)
    sync([root, root.parent])
    return Staging(directory, journal)


def _difference(old: object, new: object) -> str:
    """Returns where the two first differ: "source.files.a.safetensors"."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return ""
    for key in sorted(old.keys() | new.keys()):
        if key not in old or key not in new or old[key] != new[key]:
            return f"{key}.{_difference(old.get(key), new.get(key))}".rstrip(".")
    return ""


def _stopped(error: KeyboardInterrupt | OSError, root: Path) -> BaseException:
    """Returns `error` with what becomes of the work; removes it if it is nothing."""
    journal = Journal.read(root / _JOURNAL)
    if journal is None or journal.is_empty:
        shutil.rmtree(root, ignore_errors=True)
        kept = "nothing was written"
    else:
        kept = f"{root} is kept, and the same command goes on from there"
    if isinstance(error, KeyboardInterrupt):
        return KeyboardInterrupt(kept)
    reason = error.strerror or str(error)
    return CheckpointError(f"{error.filename or root}: not written: {reason}; {kept}")
