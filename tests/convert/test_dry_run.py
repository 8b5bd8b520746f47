"""A dry run checks all of the real model's 208,550 tensors, and writes nothing."""

import math
import re
import shutil
import time
from pathlib import Path

import pytest

from convert import dry_run
from convert.hf_source import open_hf
from convert.plan import make_plan
from ddtree_jax.mesh import make_mesh
from ddtree_jax.model.params import KimiK2, named_parameters, with_shardings
from tests.convert.command import refused, run, run_with_peak
from tests.convert.full_size import (
    EXPERTS,
    FILES,
    HIDDEN,
    LAYERS,
    NBYTES,
    TENSORS,
    files,
    write_full_size,
    write_holes,
)
from tests.convert.support import DTYPES, TINY, TINY_DRAFT, read_file

MAX_SECONDS = 60
MAX_RSS_BYTES = 2**30
SHAPES_BYTES = (LAYERS - 1) * EXPERTS * 3 * 8
WRITTEN = NBYTES - SHAPES_BYTES
# On one of eight devices: what a mesh does not divide, and an eighth of the rest.
REPLICATED = sum(
    math.prod(shape) * DTYPES[dtype].itemsize
    for tensors in files()
    for name, (dtype, shape) in tensors.items()
    if name.startswith("language_model.")
    and any(
        part in name
        for part in ("norm", "q_a_proj", "kv_a_proj", "mlp.gate.", "correction_bias")
    )
)
IMAGE_BYTES = 942_287_840
# What SGLang keeps of the text model on each of eight ranks, and of the image path.
RANK_TENSORS, IMAGE_TENSORS = 1_093, 335
DEVICE_BYTES = (NBYTES - IMAGE_BYTES - SHAPES_BYTES - REPLICATED) // 8 + REPLICATED


@pytest.fixture(scope="module")
def full_size(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("full") / "k26"
    assert write_full_size(directory) == (TENSORS, NBYTES)
    assert len(list(directory.glob("*.safetensors"))) == FILES
    return directory


def test_the_real_model_in_a_minute_and_a_gibibyte(full_size, tmp_path):
    begin = time.monotonic()
    peak, done = run_with_peak("hf", full_size, tmp_path / "dst", "--dry-run")
    seconds = time.monotonic() - begin
    text = done.stdout
    # That the disk of a test machine is too small is said after all else.
    assert done.stderr == "" or f"expected at least {WRITTEN}" in done.stderr
    assert f"{TENSORS} tensors in {FILES} files, {NBYTES} bytes, names, shapes" in text
    assert "69120 weight_shape tensors, not read now" in text
    assert "nothing is lost" in text
    assert "moe/experts/down/packed int32 [60, 384, 7168, 256]: 169114337280" in text
    left = [memory - DEVICE_BYTES for memory in (141 * 10**9, 96 * 10**9)]
    for name, memory, rest in zip(dry_run.MACHINES, (141, 96), left, strict=True):
        assert (
            f"{name}: {DEVICE_BYTES} bytes of weights a device of {memory}000000000: "
            f"fits, {rest} left"
        ) in text
    assert f"{WRITTEN} bytes to write, " in text
    assert seconds < MAX_SECONDS
    assert peak < MAX_RSS_BYTES
    assert not (tmp_path / "dst").exists()


WRONG = {
    "model-00061": ("layers.60.mlp.experts.383.down_proj.weight_scale", (64, HIDDEN)),
    "model-00001": ("layers.0.self_attn.q_a_layernorm.weight", (768, 2)),
    "model-00040": ("layers.39.mlp.experts.7.up_proj.weight_shape", (1, 2)),
    "model-00062": ("language_model.lm_head.weight", (HIDDEN, 163_840)),
}


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=[pytest.mark.slow] if number else [])
        for number, file in enumerate(WRONG)
    ],
)
def test_one_wrong_shape_among_all(capsys, full_size, tmp_path, file):
    part, wrong = WRONG[file]
    path = next(full_size.glob(f"{file}-*"))
    tensors = list(files())[int(file[-5:]) - 1]
    name = next(name for name in tensors if name.endswith(part))
    dtype = tensors[name][0]
    write_holes(path, tensors | {name: (dtype, wrong)})
    try:
        match = f"{path}: {name} is {dtype} {list(wrong)}; expected "
        refused(capsys, match, "hf", full_size, tmp_path / "dst", "--dry-run")
    finally:
        write_holes(path, tensors)


def test_bytes_of_a_device_are_those_of_its_shards():
    for leaf in make_plan(open_hf(TINY)).params:
        assert dry_run.device_bytes(leaf, 8) == shard_bytes()[leaf.path]


def shard_bytes() -> dict[str, int]:
    """Returns the bytes of each array of the tiny target on one of eight devices."""
    model = with_shardings(KimiK2(open_hf(TINY).config), make_mesh(8))
    arrays = {n: p.get_value() for n, p in named_parameters(model).items()}
    return {
        name: math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize
        for name, a in arrays.items()
    }


def test_report_of_target_and_drafter(capsys, tmp_path):
    code, out, err = run(
        capsys, "hf", TINY, tmp_path / "dst", "--draft", TINY_DRAFT, "--dry-run"
    )
    assert code == 0 and err == ""
    assert "524 tensors in 3 files, 4861696 bytes" in out
    assert "25 tensors in 1 files, 886400 bytes" in out
    assert "35 tensors of the image path, 142272 bytes" in out
    assert "144 weight_shape tensors, not read now" in out
    assert f"{tmp_path}/dst: 5746944 bytes to write, " in out
    assert list(tmp_path.iterdir()) == []


def test_a_machine_that_is_too_small(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(dry_run, "MACHINES", {"small": (8, 800_000), "odd": (3, 10**9)})
    assert run(capsys, "hf", TINY, tmp_path / "dst", "--dry-run")[0] == 0
    dry_run.report_to_ours(open_hf(TINY), tmp_path / "dst", draft=None)
    out = capsys.readouterr().out
    used = sum(shard_bytes().values())
    assert f"small: {used} bytes of weights a device of 800000: fits, " in out
    assert "odd: vocab_size = 512 does not split over 3 devices" in out
    monkeypatch.setattr(dry_run, "MACHINES", {"small": (8, used - 5)})
    dry_run.report_to_ours(open_hf(TINY), tmp_path / "dst", draft=None)
    assert "does not fit, 5 short" in capsys.readouterr().out


def test_what_a_conversion_would_refuse(capsys, tmp_path):
    (tmp_path / "dst").mkdir()
    refused(capsys, "dst exists; expected", "hf", TINY, tmp_path / "dst", "--dry-run")
    inside = TINY / "dst"
    refused(capsys, "lies in the source", "hf", TINY, inside, "--dry-run")


def test_a_disk_that_is_too_small(capsys, monkeypatch, tmp_path):
    usage = shutil.disk_usage(tmp_path)._replace(free=4_860_543)
    monkeypatch.setattr("shutil.disk_usage", {tmp_path: usage}.get)
    match = f"{tmp_path} has 4860543 bytes free; expected at least 4860544"
    refused(capsys, match, "hf", TINY, tmp_path / "dst", "--dry-run")


EXPORTS = {
    "hf": ("--to", "hf", "--part-bytes", "900000"),
    "raw": ("--to", "sglang", "--tp", "2", "--layout", "raw"),
    "groups": ("--to", "sglang", "--tp", "2", "--ep", "2", "--layout", "triton"),
    "parts": ("--to", "sglang", "--tp", "1", "--layout", "raw", "--part-bytes", "9000"),
}


@pytest.mark.parametrize("flags", EXPORTS.values(), ids=list(EXPORTS))
def test_an_export_is_as_its_dry_run_says(capsys, converted, tmp_path, flags):
    """With the drafter that goes along."""
    export = ("export", converted, tmp_path / "dst", *flags)
    code, out, err = run(capsys, *export, "--dry-run")
    assert code == 0 and err == "" and list(tmp_path.iterdir()) == []
    stated = [re.search(r"(\d+) files?(?: each|, at most (\d+))", line)
              for line in out.splitlines() if line.startswith("  to ")]  # fmt: skip
    assert out.count("nothing is lost") == 2
    assert run(capsys, *export)[0] == 0
    total, ranks = 0, int(flags[3]) if "--tp" in flags else 1
    for match, place in zip(stated, (".", "draft"), strict=True):
        found = [*map(read_file, (tmp_path / "dst" / place).glob("*.safetensors"))]
        assert match is not None and int(match[1]) * ranks == len(found)
        sizes = [sum(len(t.data) for t in tensors.values()) for tensors in found]
        assert match[2] is None or int(match[2]) == max(sizes)
        total += sum(sizes)
    assert f"{tmp_path}/dst: {total} bytes to write, " in out


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (("--to", "sglang", "--tp", "3"), "vocab_size 512 does not divide"),
        (("--to", "sglang", "--tp", "4", "--ep", "3"), "--ep 3 does not divide --tp 4"),
    ],
)
def test_an_export_that_would_be_refused(capsys, tmp_path, flags, match):
    export = ("export", TINY, tmp_path / "dst", *flags, "--dry-run")
    refused(capsys, match, *export)


@pytest.mark.parametrize("to", [("hf",), ("sglang", "--tp", "1", "--layout", "raw")])
def test_where_an_export_would_be_refused(capsys, monkeypatch, tmp_path, to):
    export = ("export", TINY, tmp_path / "dst", "--to", *to, "--dry-run")
    inside = ("export", TINY, TINY / "dst", "--to", *to, "--dry-run")
    refused(capsys, "lies in the source", *inside)
    (tmp_path / "dst").mkdir()
    refused(capsys, "dst exists; expected", *export)
    (tmp_path / "dst").rmdir()
    usage = shutil.disk_usage(tmp_path)._replace(free=1)
    monkeypatch.setattr("shutil.disk_usage", {tmp_path: usage}.get)
    refused(capsys, f"{tmp_path} has 1 bytes free; expected at least", *export)


def test_the_real_model_on_eight_ranks(full_size, tmp_path):
    flags = ("--to", "sglang", "--tp", "8", "--dry-run")
    peak, done = run_with_peak("export", full_size, tmp_path / "dst", *flags)
    assert (
        f"marlin, tp 8, ep 1: {RANK_TENSORS + IMAGE_TENSORS} tensors, "
    ) in done.stdout, done.stderr
    assert peak < MAX_RSS_BYTES and not (tmp_path / "dst").exists()
