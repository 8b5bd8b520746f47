"""Owns that a destination is absent or whole: staged as a sibling, then renamed.

    .NAME.converting/        the work in progress, with a locked file `.lock`
    NAME/                    appears by one rename, when everything is on disk

The lock is released by the kernel when its process ends, however it ends. So a
staging directory whose lock is free was left by a killed run.
"""

import contextlib
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from ddtree_jax.errors import CheckpointError

_LOCK = ".lock"


@contextlib.contextmanager
def staged(destination: Path) -> Iterator[Path]:
    """Gives an empty directory that becomes `destination` when the block succeeds.

    Raises:
      CheckpointError: The destination exists, or another run is making it.
    """
    if destination.exists() or destination.is_symlink():
        raise CheckpointError(f"{destination} exists; expected a path that does not")
    staging = destination.parent / f".{destination.name}.converting"
    if staging.exists():
        _remove_leftover(staging, destination)
    staging.mkdir(parents=True)
    try:
        with open(staging / _LOCK, "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield staging
            (staging / _LOCK).unlink()
            sync_tree(staging)
            # A directory that appeared meanwhile is never replaced: only an
            # empty one could be, so it is refused too.
            if destination.exists():
                raise CheckpointError(f"{destination} was made by another process")
            staging.rename(destination)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    _sync(destination.parent)


def sync_tree(directory: Path) -> None:
    """Makes all files and directories below `directory` durable."""
    for parent, _, files in os.walk(directory):
        for name in files:
            _sync(Path(parent) / name)
        _sync(Path(parent))


def _remove_leftover(staging: Path, destination: Path) -> None:
    if staging.is_symlink() or not (staging / _LOCK).is_file():
        if not staging.is_dir() or any(staging.iterdir()):
            raise CheckpointError(
                f"{staging} exists and is no unfinished conversion; expected it absent"
            )
    else:
        with open(staging / _LOCK, "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise CheckpointError(
                    f"another conversion to {destination} is running"
                ) from None
    print(f"removing {staging}, left by an unfinished conversion", file=sys.stderr)
    shutil.rmtree(staging)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
