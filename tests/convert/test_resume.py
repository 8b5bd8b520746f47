"""A conversion that was stopped, anyhow and at any moment, goes on and ends whole."""

import errno
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

import convert.chunk_files
import convert.ours_target
from convert.__main__ import main
from convert.hf_source import open_hf
from convert.journal import Journal
from convert.leaf import Leaf
from convert.plan import make_plan
from tests.convert.command import refused, run, shell
from tests.convert.killing import tree
from tests.convert.support import TINY


@pytest.fixture
def small_steps(monkeypatch):
    monkeypatch.setattr("convert.leaf.MAX_CHUNK_BYTES", 2**17)
    monkeypatch.setattr("convert.write.MAX_UNNOTED_BYTES", 1)


class Failing:
    """Counts the slabs that are read, and the chunks written until one fails."""

    def __init__(self, monkeypatch, error: int | None, after: int = 0):
        self.slabs = 0
        self.after, self.error = after, error
        self._read, self._write = Leaf.read, convert.chunk_files.write_file
        monkeypatch.setattr(Leaf, "read", self.read())
        monkeypatch.setattr("convert.chunk_files.write_file", self.write)

    def read(self):
        def read(leaf, block, out):
            self.slabs += 1
            self._read(leaf, block, out)

        return read

    def write(self, path, parts, nbytes):
        self.after -= 1
        if self.error is not None and self.after < 0:
            raise OSError(self.error, os.strerror(self.error), str(path))
        self._write(path, parts, nbytes)


# A packed array of the tiny checkpoint has as many slabs.
LAYERS = 3


def stop(capsys, source, destination, *, error=errno.ENOSPC, after=200) -> int:
    """Starts a conversion that fails, and returns how many slabs it noted."""
    with pytest.MonkeyPatch.context() as patch:
        Failing(patch, error, after)
        refused(
            capsys,
            f"not written: {os.strerror(error)}; "
            f"{destination.parent}/.dst.converting is kept, and the same command "
            "goes on from there",
            "hf",
            source,
            destination,
        )
    assert not destination.exists()
    return noted_slabs(destination.parent / ".dst.converting")


def noted_slabs(staging: Path) -> int:
    """Returns how many slabs are noted; a tree's note has no digest."""
    lines = (staging / ".journal").read_text().splitlines()[1:]
    return sum(digest != "" for _, digest in map(json.loads, lines))


@pytest.fixture
def expected(small_steps, source, tmp_path) -> dict[str, str]:
    assert main(["hf", str(source), str(tmp_path / "uninterrupted")]) == 0
    return tree(tmp_path / "uninterrupted")


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_what_is_done_is_not_done_again(
    capsys, monkeypatch, source, tmp_path, expected, error
):
    noted = stop(capsys, source, tmp_path / "dst", error=error)
    assert noted > 20
    rest = Failing(monkeypatch, None)
    code, _, err = run(capsys, "hf", source, tmp_path / "dst")
    assert code == 0 and "going on with what is in" in err
    leaves = make_plan(open_hf(source)).leaves
    assert noted + rest.slabs == sum(len(list(leaf.slabs())) for leaf in leaves)
    assert tree(tmp_path / "dst") == expected


def test_disk_that_is_full(tmp_path):
    done = shell("hf", TINY, tmp_path / "dst", limit="ulimit -f 20")
    assert done.returncode == 1, done.stderr
    assert "not written: File too large" in done.stderr
    assert "is kept, and the same command goes on" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == [".dst.converting"]
    done = shell("hf", TINY, tmp_path / "dst")
    assert done.returncode == 0 and "going on with" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["dst"]


def touch(source: Path) -> str:
    file = sorted(source.glob("*.safetensors"))[1]
    os.utime(file, ns=(0, 0))
    return f"source.files.{file.name}"


def replace_a_weight(source: Path) -> str:
    """A twin: the same names, sizes and times."""
    file = sorted(source.glob("*.safetensors"))[1]
    times = file.stat()
    content = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    packed = [v["data_offsets"][1] for k, v in header.items() if "_packed" in k]
    content[start + max(packed) - 1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    return f"source.files.{file.name}"


@pytest.mark.parametrize("change", [touch, replace_a_weight])
def test_another_source_begins_anew(capsys, source, tmp_path, expected, change):
    stop(capsys, source, tmp_path / "dst")
    where = change(source)
    assert main(["hf", str(source), str(tmp_path / "other")]) == 0
    code, _, err = run(capsys, "hf", source, tmp_path / "dst")
    assert code == 0
    assert f"is of another conversion ({where}); beginning anew" in err
    assert tree(tmp_path / "dst") == tree(tmp_path / "other")
    assert (tree(tmp_path / "dst") == expected) == (change is touch)


def test_another_chunking_begins_anew(capsys, monkeypatch, source, tmp_path, expected):
    stop(capsys, source, tmp_path / "dst")
    monkeypatch.setattr("convert.leaf.MAX_CHUNK_BYTES", 2**14)
    code, _, err = run(capsys, "hf", source, tmp_path / "dst")
    assert code == 0 and "(source.view); beginning anew" in err


def test_source_that_moved_is_the_same(capsys, source, tmp_path, expected):
    stop(capsys, source, tmp_path / "dst")
    (tmp_path / "elsewhere").mkdir()
    shutil.move(source, tmp_path / "elsewhere" / "src")
    code, _, err = run(capsys, "hf", tmp_path / "elsewhere" / "src", tmp_path / "dst")
    assert code == 0 and "going on with" in err
    assert tree(tmp_path / "dst") == expected


def test_source_that_changes_meanwhile(capsys, monkeypatch, source, tmp_path):
    write_manifest = convert.ours_target.write_manifest

    def changing(*arguments, **keywords):
        touch(source)
        write_manifest(*arguments, **keywords)

    monkeypatch.setattr("convert.ours_target.write_manifest", changing)
    refused(capsys, "src has changed meanwhile", "hf", source, tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def a_chunk(array: Path) -> Path:
    """Returns the first chunk of an array, which is noted before any other."""
    return min(path for path in (array / "c").rglob("*") if path.is_file())


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("change", [flip, shorten, Path.unlink])
def test_chunk_that_is_not_as_noted(capsys, source, tmp_path, expected, change):
    """A disk that lies: the array is written anew, and nobody takes it for whole."""
    stop(capsys, source, tmp_path / "dst", after=60)
    staging = tmp_path / ".dst.converting"
    lines = (staging / ".journal").read_text().splitlines()[1:]
    slabs = Counter(json.loads(line)[0] for line in lines)
    key = next(key for key, n in slabs.items() if "packed" in key and n < LAYERS)
    change(a_chunk(staging / "dst" / key))
    code, _, err = run(capsys, "hf", source, tmp_path / "dst")
    assert code == 0
    assert f"{key}: not as noted; it is written anew" in err
    assert tree(tmp_path / "dst") == expected


@pytest.mark.parametrize("change", [shorten, Path.unlink])
def test_chunk_of_a_finished_array(capsys, source, tmp_path, expected, change):
    stop(capsys, source, tmp_path / "dst", after=400)
    array = tmp_path / ".dst.converting/dst/params/moe.experts.gate.packed"
    change(a_chunk(array))
    code, _, err = run(capsys, "hf", source, tmp_path / "dst")
    assert code == 0
    assert "moe.experts.gate.packed: not as noted; it is written anew" in err
    assert tree(tmp_path / "dst") == expected


@pytest.mark.parametrize(
    "tail", [b'["params/em', b"\0" * 40, b'["a", 1', b'{}\n["b"]\n']
)
def test_torn_journal(capsys, source, tmp_path, expected, tail):
    noted = stop(capsys, source, tmp_path / "dst")
    journal = tmp_path / ".dst.converting/.journal"
    whole = journal.read_bytes()
    journal.write_bytes(whole + tail)
    assert Journal.read(journal) is not None
    assert journal.read_bytes() == whole
    assert noted_slabs(journal.parent) == noted
    code, _, err = run(capsys, "hf", source, tmp_path / "dst")
    assert code == 0 and "going on with" in err
    assert tree(tmp_path / "dst") == expected


@pytest.mark.parametrize("content", [b"", b"[]\n", b"\0\0", b'{"to": '])
def test_journal_that_has_not_begun(capsys, source, tmp_path, expected, content):
    stop(capsys, source, tmp_path / "dst")
    (tmp_path / ".dst.converting/.journal").write_bytes(content)
    code, _, err = run(capsys, "hf", source, tmp_path / "dst")
    assert code == 0 and "going on with" not in err
    assert tree(tmp_path / "dst") == expected


def test_space_of_a_stopped_run_counts(capsys, monkeypatch, source, tmp_path, expected):
    """Or a disk that holds the checkpoint once could not finish it."""
    stop(capsys, source, tmp_path / "dst", after=400)
    usage = shutil.disk_usage(tmp_path)._replace(free=3_000_000)
    monkeypatch.setattr("shutil.disk_usage", {tmp_path: usage}.get)
    refused(
        capsys,
        f"{tmp_path} has 3000000 bytes free; expected at least 4",
        "hf",
        source,
        tmp_path / "fresh",
    )
    assert run(capsys, "hf", source, tmp_path / "dst")[0] == 0
