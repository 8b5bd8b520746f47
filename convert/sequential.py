"""Owns a large file that is written from the front, past the page cache.

Why past it is said in `durable.py`. A block is collected, then written, so that
writing never needs the data twice, and any number of bytes may come at a time.
"""

import errno
import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType

# A multiple of the alignment that direct writes need.
BLOCK_BYTES = 8 * 2**20
_DIRECT = getattr(os, "O_DIRECT", 0)


class SequentialFile:
    """A new file, in place of any; on disk, as long as what was written, when closed.

    Every OSError has the file's path.
    """

    def __init__(self, path: Path):
        self._path = path
        self._block = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        self._filled = 0
        self._at = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        try:
            self._descriptor = os.open(path, flags | _DIRECT, 0o666)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # The file system has no direct writes; through the cache, then.
            self._descriptor = os.open(path, flags, 0o666)

    def __enter__(self) -> "SequentialFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._finish()
        finally:
            os.close(self._descriptor)

    def write(self, data: memoryview) -> None:
        """Appends `data`, one byte an item."""
        while data:
            room = BLOCK_BYTES - self._filled
            part = data[:room]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            data = data[room:]
            if self._filled == BLOCK_BYTES:
                self._flush(BLOCK_BYTES)

    def _finish(self) -> None:
        size = self._at + self._filled
        if self._filled:
            self._flush(-(-self._filled // mmap.PAGESIZE) * mmap.PAGESIZE)
        try:
            os.ftruncate(self._descriptor, size)
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._named(error) from error

    def _flush(self, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            try:
                done += os.pwrite(
                    self._descriptor, self._block[done:nbytes], self._at + done
                )
            except OSError as error:
                if error.errno != errno.EINVAL or not self._drop_direct():
                    raise self._named(error) from error
        self._at += nbytes
        self._filled = 0

    def _drop_direct(self) -> bool:
        """Returns whether direct writes were on; they are off then."""
        flags = fcntl.fcntl(self._descriptor, fcntl.F_GETFL)
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flags & ~_DIRECT)
        return bool(flags & _DIRECT)

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self._path))
