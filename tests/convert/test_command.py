"""`python -m convert`: what it writes, what it refuses, and that it is atomic."""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from convert.__main__ import main
from tests.convert.support import (
    TINY,
    TINY_DRAFT,
    read_config,
    write_checkpoint,
    write_sparse,
)

ROOT = Path(__file__).parents[2]


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def refused(capsys, match: str, *arguments) -> None:
    """Checks for exit code 1 and one line, which contains `match`."""
    code, _, err = run(capsys, *arguments)
    assert code == 1
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and match in lines[0], err


def shell(*arguments, limit: str = "") -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "convert", *map(str, arguments)]
    if limit:
        command = ["bash", "-c", f'{limit}; exec "$@"', "bash", *command]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def wide_config(**changes: int) -> dict:
    config = read_config(TINY)
    config["text_config"].update(changes)
    return config


def test_data_files_are_carried_and_code_is_not(capsys, tmp_path, tensors, config):
    source = write_checkpoint(tmp_path / "src", tensors, config)
    for name in ("generation_config.json", "tokenizer_config.json"):
        (source / name).write_text('{"odd":   "spacing"}\n')
    (source / "tiktoken.model").write_bytes(b"\0\xff")
    (source / "modeling.py").write_text("raise SystemExit\n")
    (source / "generation_config.json").write_text('{"eos_token_id":  [253, 254]}')
    destination = tmp_path / "new" / "dst"
    code, _, err = run(capsys, "hf", source, destination)
    assert code == 0
    assert f"not carried from {source}: modeling.py" in err
    carried = ("config.json", "generation_config.json", "tokenizer_config.json")
    for name in (*carried, "tiktoken.model"):
        assert (destination / name).read_bytes() == (source / name).read_bytes()
    assert sorted(path.name for path in destination.iterdir()) == sorted(
        [*carried, "tiktoken.model", "manifest.json", "params", "extra"]
    )
    assert [p.name for p in destination.parent.iterdir()] == ["dst"]


def test_manifest(converted, tensors):
    manifest = json.loads((converted / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"], manifest["kind"]) == (
        "ddtree_jax-checkpoint",
        1,
        "target",
    )
    assert manifest["source"]["directory"] == "tiny_k26"
    names = [
        f"language_model.model.layers.{i}.mlp.experts.{e}.down_proj.weight_scale"
        for i in (1, 2, 3)
        for e in range(16)
    ]
    data = b"".join(tensors[name].data for name in names)
    entry = manifest["tensors"]["moe/experts/down/scale"]
    assert entry == {
        "shape": [3, 16, 128, 8],
        "dtype": "bfloat16",
        "chunk": [1, 16, 128, 1],
        "sha256": hashlib.sha256(data).hexdigest(),
        "source": "language_model.model.layers.{1..3}.mlp.experts.{0..15}."
        "down_proj.weight_scale",
    }
    config = (converted / "config.json").read_bytes()
    assert manifest["files"]["config.json"] == {
        "bytes": len(config),
        "sha256": hashlib.sha256(config).hexdigest(),
    }
    kept = [t for n, t in tensors.items() if not n.endswith("weight_shape")]
    assert manifest["total_bytes"] == sum(len(t.data) for t in kept)
    assert manifest["weight_shape_dtype"] == "I32"
    draft = json.loads((converted / "draft" / "manifest.json").read_text())
    assert draft["kind"] == "draft" and len(draft["tensors"]) == 14


def test_inspect(capsys, converted):
    code, out, _ = run(capsys, "inspect", converted)
    assert code == 0
    assert "ddtree_jax-checkpoint version 1, target, complete" in out
    assert "37 arrays, 35 extra tensors, 4729472 bytes" in out
    assert "draft: 14 arrays" in out
    code, out, _ = run(capsys, "inspect", TINY)
    assert code == 0
    assert "Hugging Face safetensors, target, 4 layers, 16 experts, INT4" in out
    assert "524 tensors in 3 files, 4730624 bytes, complete" in out
    code, out, _ = run(capsys, "inspect", TINY_DRAFT)
    assert code == 0 and "DFlash drafter, 2 layers, block of 8" in out


def test_inspect_refuses_what_is_not_whole(capsys, tmp_path):
    refused(capsys, "is not a directory", "inspect", tmp_path / "absent")
    source = shutil.copytree(TINY, tmp_path / "src")
    (source / "model-00002-of-000003.safetensors").unlink()
    refused(capsys, "000003.safetensors is missing", "inspect", source)


def test_doctor(capsys, tmp_path):
    code, out, _ = run(capsys, "doctor", TINY)
    assert code == 0 and "text_config: hidden_size is 128; published 7168" in out
    config = wide_config(n_group=8)
    write_checkpoint(tmp_path, {}, config, shards=1)
    code, out, _ = run(capsys, "doctor", tmp_path / "config.json")
    assert code == 1 and "refused: " in out and "n_group is 8; expected 1" in out


def test_usage(capsys):
    for arguments in ([], ["hf"], ["hf", "a"], ["other"], ["hf", "a", "b", "--x"]):
        with pytest.raises(SystemExit) as info:
            main(arguments)
        assert info.value.code == 2
    with pytest.raises(SystemExit) as info:
        main(["hf", "--help"])
    assert info.value.code == 0
    assert "bytes" in capsys.readouterr().out


def test_destination_that_exists(capsys, tmp_path):
    for destination in (tmp_path, tmp_path / "file", tmp_path / "link"):
        if destination.name == "file":
            destination.write_text("kept")
        if destination.name == "link":
            destination.symlink_to("nowhere")
        refused(capsys, f"{destination} exists; expected", "hf", TINY, destination)
    assert (tmp_path / "file").read_text() == "kept"


def test_destination_inside_the_source(capsys, tmp_path):
    source = shutil.copytree(TINY, tmp_path / "src")
    for destination in (source, source / "out", source / "a" / "b"):
        refused(capsys, "lies in the source", "hf", source, destination)
    link = tmp_path / "link"
    link.symlink_to(source)
    refused(capsys, "lies in the source", "hf", source, link / "out")


def test_draft_that_does_not_fit(capsys, tmp_path):
    out = tmp_path / "dst"
    refused(capsys, "--draft expects a drafter", "hf", TINY, out, "--draft", TINY)
    refused(
        capsys,
        "--draft goes with a target",
        "hf",
        TINY_DRAFT,
        out,
        "--draft",
        TINY_DRAFT,
    )
    draft = shutil.copytree(TINY_DRAFT, tmp_path / "draft")
    config = read_config(draft) | {"vocab_size": 512}
    (draft / "config.json").write_text(json.dumps(config))
    refused(
        capsys,
        "the drafter's vocab_size is 512; expected the target's, 256",
        *("hf", TINY, out, "--draft", draft),
    )
    assert not out.exists()


def test_bad_tensor_leaves_nothing(capsys, tmp_path, tensors, config):
    name = "language_model.model.layers.3.mlp.experts.0.up_proj.weight_scale"
    words = np.frombuffer(tensors[name].data, np.uint16).copy()
    words[3] = 0x7F80
    bad = type(tensors[name])("BF16", tensors[name].shape, words.tobytes())
    source = write_checkpoint(tmp_path / "src", tensors | {name: bad}, config)
    refused(capsys, f"{name} holds NaN or infinity", "hf", source, tmp_path / "dst")
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


def test_config_without_rope_keys(capsys, tmp_path, tensors, config):
    del config["text_config"]["rope_scaling"]
    source = write_checkpoint(tmp_path / "src", tensors, config)
    refused(
        capsys,
        f"{source}/config.json: text_config: rope_scaling (or rope_parameters) is",
        *("hf", source, tmp_path / "dst"),
    )


def test_disk_that_is_full(tmp_path):
    done = shell("hf", TINY, tmp_path / "dst", limit="ulimit -f 20")
    assert done.returncode == 1, done.stderr
    assert "not written" in done.stderr and "File too large" in done.stderr
    assert "Traceback" not in done.stderr and list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("parent", ["/proc/nowhere", "file"])
def test_place_that_cannot_be_written(tmp_path, parent):
    (tmp_path / "file").write_text("")
    done = shell("hf", TINY, tmp_path / parent / "dst")
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
    params = tmp_path / ".dst.converting"
    deadline = time.monotonic() + 60
    while not any(params.glob("params*/moe.experts*")):
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
    assert code == 0 and "left by an unfinished conversion" in err
    assert not (tmp_path / ".dst.converting").exists()
    assert run(capsys, "inspect", destination)[0] == 0


def test_interrupted_run_removes_what_it_wrote(tmp_path):
    process, _ = start_long(tmp_path)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted; nothing was written" in err and "Traceback" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["src"]


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


# A process that has imported JAX and Orbax has 0.3 GB; a slab here is ≤ 8 MiB.
MAX_RSS_BYTES = 400_000_000
SMALL_CHUNKS = """
import sys
import convert.leaf
convert.leaf.MAX_CHUNK_BYTES = 2**20
from convert.__main__ import main
sys.exit(main(["hf", *sys.argv[1:]]))
"""


def test_memory_does_not_grow_with_the_checkpoint(tmp_path):
    config = wide_config(
        hidden_size=2048, moe_intermediate_size=2048, n_routed_experts=40
    )
    size = write_sparse(tmp_path / "src", config)
    assert size > 2 * MAX_RSS_BYTES
    command = [sys.executable, "-c", SMALL_CHUNKS, tmp_path / "src", tmp_path / "dst"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert usage.ru_maxrss * 1024 < MAX_RSS_BYTES, usage.ru_maxrss
