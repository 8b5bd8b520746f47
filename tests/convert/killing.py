"""Kills conversions, and goes on.

    python -m tests.convert.killing TARGET MODE SRC OUT N SEED

A process of its own, which has imported everything and has started no thread, so
that each conversion is a fork that begins at once. TARGET is ours, hf or sglang; MODE
is one of

    moments   SIGKILL at N random moments of a conversion
    steps     SIGKILL just before one of the calls by which things become durable
    power     as steps, and then what was not synced is lost: files are cut to the
              length, and directories to the entries, that they had when last synced

After each, DST has to be absent or whole, and the next run has to make it whole, with
the bytes of an uninterrupted run. One line a kill: where, what was found, and whether
the run that followed went on or began anew.
"""

import faulthandler
import hashlib
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

from convert import detect, dry_run, leaf, ours_target, write
from convert.__main__ import main

# What `main` imports only when it needs it.
IMPORTED = (detect, dry_run, ours_target)
# Files of a part of the checkpoint, so that there is much to go on with.
EXPORT = ("--part-bytes", "60000", "--to")
COMMANDS = {
    "ours": ("hf", ()),
    "hf": ("export", (*EXPORT, "hf")),
    "sglang": ("export", (*EXPORT, "sglang", "--tp", "2", "--layout", "raw")),
}
HANGS_AFTER_S = 100
WRITES = ("fsync", "ftruncate", "pwrite", "pwritev")
STEPS = (*WRITES, "rename", "unlink", "rmdir", "mkdir")


def arguments(target: str, source: Path, destination: Path) -> list[str]:
    """Returns those of the command that makes the target."""
    command, flags = COMMANDS[target]
    return [command, str(source), str(destination), *flags]


def convert_once(command: list[str], log: Path) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.dump_traceback_later(HANGS_AFTER_S, exit=True)
    code = main(command)
    sys.stdout.flush()
    os._exit(code)


def fork(command: list[str], log: Path, before=None) -> int:
    child = os.fork()
    if child == 0:
        try:
            if before is not None:
                before()
            convert_once(command, log)
        finally:
            os._exit(99)
    return child


def tree(directory: Path) -> dict[str, str]:
    """Returns the hash of every file but Orbax's, which holds the time of day."""
    return {
        str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != "_CHECKPOINT_METADATA"
    }


class Steps:
    """Counts the calls that change the disk, and acts before one of them."""

    def __init__(self, at: int | None, act=None):
        self.count = 0
        self.lock = threading.RLock()
        self.at, self.act = at, act
        self.lengths: dict[int, int] = {}
        self.entries: dict[int, set[str]] = {}
        for name in STEPS:
            setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name, call):
        def counted(*arguments, **keywords):
            # One at a time, so that what is noted here is what happened.
            with self.lock:
                if self.count == self.at:
                    self.act(self)
                    os.kill(os.getpid(), signal.SIGKILL)
                self.count += 1
                result = call(*arguments, **keywords)
                if name == "fsync":
                    self._synced(arguments[0])
                return result

        return counted

    def _synced(self, descriptor: int) -> None:
        state = os.fstat(descriptor)
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.path.isdir(path):
            self.entries[state.st_ino] = set(os.listdir(path))
        else:
            self.lengths[state.st_ino] = state.st_size


def nothing(steps: Steps) -> None:
    """A kill loses nothing that was written."""


class PowerLoss:
    def __init__(self, root: Path):
        self.root = root

    def __call__(self, steps: Steps) -> None:
        steps.at = None
        for parent, directories, files in os.walk(self.root):
            known = steps.entries.get(os.stat(parent).st_ino, set())
            for name in {*directories, *files} - known - {".lock"}:
                os.system(f"rm -rf '{os.path.join(parent, name)}'")
            directories[:] = [name for name in directories if name in known]
            for name in set(files) & known - {".journal"}:
                self._cut(steps, os.path.join(parent, name))
        # Last, since other threads are writing to it.
        if (self.root / ".journal").exists():
            self._cut(steps, self.root / ".journal")

    def _cut(self, steps: Steps, path) -> None:
        state = os.stat(path)
        length = steps.lengths.get(state.st_ino, 0)
        if state.st_size > length:
            os.truncate(path, length)


def count_steps(command: list[str]) -> int:
    """Returns how many steps an uninterrupted conversion takes."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        steps = Steps(None)
        main(command)
        os.write(write, str(steps.count).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(read, 20))


def finish(command: list[str], destination: Path, log: Path, expected) -> str:
    """Runs again what was killed, and returns how that went."""
    root = destination.parent / f".{destination.name}.converting"
    if destination.exists():
        assert tree(destination) == expected, "what was there is not whole"
        return "whole"
    assert root.exists() or not list(destination.parent.glob(".dst*"))
    status = os.waitpid(fork(command, log), 0)[1]
    text = log.read_text()
    assert status == 0, text
    assert "Traceback" not in text and "error" not in text, text
    # The journal is the first defence, the look at the chunks the second.
    assert "not as noted" not in text, text
    found = tree(destination)
    differ = {name for name, _ in found.items() ^ expected.items()}
    assert not differ, (text, differ)
    assert not root.exists()
    return "went on" if "going on with" in text else "began anew"


def step_to_kill_at(number: int, count: int, total: int) -> int:
    """Returns a step: in turn one of those spread over all, and one of the last."""
    if number % 2:
        return total - 1 - number // 2
    return (total - 1) * number // count


def run(target: str, mode: str, source: Path, out: Path, count: int, seed: int) -> None:
    # Small slabs, each noted at once, so that there are many moments to be killed at.
    leaf.MAX_CHUNK_BYTES = 2**17
    write.MAX_UNNOTED_BYTES = 1
    choose = random.Random(seed)
    log = out / "log"
    for name in ("first", "uninterrupted"):  # the first one also warms caches
        begin = time.monotonic()
        command = arguments(target, source, out / name)
        status = os.waitpid(fork(command, log), 0)[1]
        duration = time.monotonic() - begin
        assert status == 0, log.read_text()
    expected = tree(out / "uninterrupted")
    counted = arguments(target, source, out / "counted")
    total = count_steps(counted) if mode != "moments" else 0
    for number in range(count):
        destination = out / str(number) / "dst"
        destination.parent.mkdir()
        command = arguments(target, source, destination)
        if mode == "moments":
            where = choose.uniform(0, 1.05 * duration)
            child = fork(command, log)
            time.sleep(where)
            os.kill(child, signal.SIGKILL)
        else:
            where = step_to_kill_at(number, count, total)
            root = destination.parent / ".dst.converting"
            act = PowerLoss(root) if mode == "power" else nothing
            child = fork(command, log, lambda a=act, w=where: Steps(w, a))
        os.waitpid(child, 0)
        print(f"{where:.3f} {finish(command, destination, log, expected)}", flush=True)


if __name__ == "__main__":
    target, mode, source, out, count, seed = sys.argv[1:]
    run(target, mode, Path(source), Path(out), int(count), int(seed))
