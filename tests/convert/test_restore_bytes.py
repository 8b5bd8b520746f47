"""Every process reads its own shards from the disk, and nothing else."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.convert.command import ROOT

# Headers and manifests, which everyone reads.
MAX_OTHER_BYTES = 150_000


def restored(checkpoint: Path, processes: int) -> list[dict]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    running = []
    for rank in range(processes):
        command = [sys.executable, "-m", "tests.convert.restoring", str(rank)]
        running.append(
            subprocess.Popen(
                [*command, str(processes), port, str(checkpoint)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    out = [process.communicate(timeout=120) for process in running]
    assert [p.returncode for p in running] == [0] * processes, out
    return [json.loads(text.splitlines()[-1]) for text, _ in out]


@pytest.fixture(scope="module")
def one(converted) -> list[dict]:
    return restored(converted, 1)


@pytest.fixture(scope="module")
def two(converted) -> list[dict]:
    return restored(converted, 2)


def test_one_process_reads_everything_once(one):
    assert one[0]["own"] == one[0]["total"]
    assert 0 <= one[0]["read"] - one[0]["own"] <= MAX_OTHER_BYTES


def test_each_of_two_processes_reads_its_shards(two):
    for result in two:
        # Half of what is divided, and all of what every device has.
        assert result["own"] < 0.53 * result["total"]
        assert 0 <= result["read"] - result["own"] <= MAX_OTHER_BYTES
        assert result["total"] - result["own"] > 2 * MAX_OTHER_BYTES


def test_two_processes_have_what_one_has(one, two):
    for name, shards in one[0]["shards"].items():
        found = [shard for half in two for shard in half["shards"][name]]
        assert sorted(found) == sorted(shards), name
