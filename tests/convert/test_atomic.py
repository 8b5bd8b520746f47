"""A conversion ends with a whole destination or none, in bounded memory."""

import contextlib
import fcntl
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from convert import interrupt
from convert.__main__ import main
from convert.leaf import Leaf
from convert.write import LANES
from tests.convert.command import ROOT, refused, run, run_with_peak, shell, wide_config
from tests.convert.support import TINY, write_sparse


def test_disk_that_is_too_small(capsys, tmp_path):
    free = shutil.disk_usage(tmp_path).free
    config = wide_config(vocab_size=8 * (free // (128 * 2 * 8)), pad_token_id=None)
    write_sparse(tmp_path / "src", config)
    refused(
        capsys,
        "bytes free; expected at least",
        "hf",
        tmp_path / "src",
        tmp_path / "dst",
    )


TO_SGLANG = ("--to", "sglang", "--tp", "1", "--layout", "raw")


@pytest.mark.parametrize(
    ("parent", "command"),
    [
        ("file", ("hf",)),
        ("/proc/nowhere", ("hf",)),
        ("/proc/nowhere", ("export", "--to", "hf")),
        ("/proc/nowhere", ("export", *TO_SGLANG)),
    ],
)
def test_place_that_cannot_be_written(tmp_path, parent, command):
    (tmp_path / "file").write_text("")
    done = shell(command[0], TINY, tmp_path / parent / "dst", *command[1:])
    assert done.returncode == 1
    assert done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1


def start_long(tmp_path) -> tuple[subprocess.Popen, Path]:
    """Starts a conversion of 1 GB and waits until it has begun to write."""
    config = wide_config(moe_intermediate_size=8192, n_routed_experts=256)
    write_sparse(tmp_path / "src", config)
    destination = tmp_path / "dst"
    command = [sys.executable, "-m", "convert", "hf", tmp_path / "src", destination]
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    params = tmp_path / ".dst.converting/dst"
    deadline = time.monotonic() + 60
    while not any(params.glob("params/moe.experts*")):
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process, destination


def test_killed_run_leaves_no_destination_and_is_cleaned_up(capsys, tmp_path):
    process, destination = start_long(tmp_path)
    refused(capsys, f"another conversion to {destination} is", "hf", TINY, destination)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not destination.exists()
    assert (tmp_path / ".dst.converting").exists()
    code, _, err = run(capsys, "hf", TINY, destination)
    assert code == 0 and "is of another conversion (source.files." in err
    assert not (tmp_path / ".dst.converting").exists()
    assert run(capsys, "inspect", destination)[0] == 0


def test_an_interrupt_that_a_library_drops_is_raised_again(monkeypatch, tmp_path):
    """The signal strikes where nobody lets its exception through."""
    handler = signal.getsignal(signal.SIGINT)
    read, slabs = Leaf.read, []

    def dropping(leaf, block, out):
        with contextlib.suppress(KeyboardInterrupt):
            interrupt._note(signal.SIGINT, None)
        slabs.append(leaf.path)
        return read(leaf, block, out)

    monkeypatch.setattr(Leaf, "read", dropping)
    try:
        assert main(["hf", str(TINY), str(tmp_path / "dst")]) == 130
        assert [path.name for path in tmp_path.iterdir()] == [".dst.converting"]
        # Every lane ends after the slab that it is at.
        assert len(slabs) <= LANES
    finally:
        signal.signal(signal.SIGINT, handler)
        interrupt._interrupted.clear()


def test_interrupted_run_says_that_it_can_go_on(tmp_path):
    process, destination = start_long(tmp_path)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    kept = f"{tmp_path}/.dst.converting is kept, and the same command goes on from"
    assert f"interrupted; {kept} there" in err and "Traceback" not in err
    assert not destination.exists()


def test_interrupt_before_anything_is_written(capsys, monkeypatch, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("convert.ours_target.write_leaves", interrupted)
    code, _, err = run(capsys, "hf", TINY, tmp_path / "dst")
    assert code == 130 and "interrupted; nothing was written" in err
    assert list(tmp_path.iterdir()) == []


def test_directory_that_only_looks_like_a_leftover(capsys, tmp_path):
    staging = tmp_path / ".dst.converting"
    staging.mkdir()
    (staging / "mine").write_text("kept")
    refused(capsys, "is no unfinished conversion", "hf", TINY, tmp_path / "dst")
    assert (staging / "mine").read_text() == "kept"


def test_lock_is_held_while_converting(tmp_path):
    staging = tmp_path / ".dst.converting"
    staging.mkdir()
    with open(staging / ".lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = shell("hf", TINY, tmp_path / "dst")
    assert done.returncode == 1 and "another conversion to" in done.stderr
    assert staging.exists()


# A process that has imported JAX and Orbax has 0.3 GB; a lane's slab here is ≤ 8 MiB.
MAX_RSS_BYTES = 400_000_000


def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    config = wide_config(
        hidden_size=2048, moe_intermediate_size=2048, n_routed_experts=40
    )
    size = write_sparse(tmp_path / "src", config)
    assert size > 2 * MAX_RSS_BYTES
    arguments = ("hf", tmp_path / "src", tmp_path / "dst")
    peak, done = run_with_peak(*arguments, max_chunk_bytes=2**20)
    assert done.returncode == 0 and peak < MAX_RSS_BYTES


# docs/checkpoint.md states it: four lanes with a slab of 128 MiB and a chunk each.
STATED_RSS_BYTES = 10**9


def write_wide(directory: Path, experts: int) -> int:
    """Writes a few layers of the real widths, and returns their bytes."""
    sizes = {"hidden_size": 7168, "moe_intermediate_size": 2048}
    return write_sparse(directory, wide_config(**sizes, n_routed_experts=experts))


@pytest.mark.slow
def test_memory_of_the_real_chunks(tmp_path):
    assert write_wide(tmp_path / "src", 64) > 4 * STATED_RSS_BYTES
    peak, done = run_with_peak("hf", tmp_path / "src", tmp_path / "dst")
    assert done.returncode == 0 and 4 * 10**8 < peak < STATED_RSS_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("to", [("--to", "hf"), TO_SGLANG], ids=["hf", "sglang"])
def test_memory_of_exports_and_back(tmp_path, to):
    assert write_wide(tmp_path / "src", 32) > 2 * STATED_RSS_BYTES
    made = tmp_path / "dst"
    back = "sglang" if "sglang" in to else "hf"
    for arguments in (
        ("export", tmp_path / "src", made, *to),
        (back, made, tmp_path / "ours"),
        ("verify", tmp_path / "ours", made),
    ):
        peak, done = run_with_peak(*arguments)
        assert done.returncode == 0, done.stderr
        assert peak < STATED_RSS_BYTES, (arguments, peak)
