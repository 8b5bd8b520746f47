"""Owns the timing of conversions, beside `cp` of the same bytes, and of restoring.

The source is two layers of Kimi K2.6 in true widths, one dense and one of experts,
filled with random bytes. Each repeat times a conversion and a `cp -r` in turn, each
a process, from the same state of the page cache. `cp` syncs nothing; a conversion
has hashed, checked and synced every byte when it ends. Its start (`start_s`) counts;
Python finds its modules compiled, as an installer leaves them.
"""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from convert.rules import source_shape, target_rules
from convert.tensor import DTYPE_NAMES, DTYPES
from ddtree_jax.errors import ConfigError
from ddtree_jax.hf_config import read_model_config
from ddtree_jax.hf_config.doctor import PUBLISHED_TARGET
from ddtree_jax.model.params import KimiK2, named_parameters
from tiny.forms import target_config

FILES = 4
# A CPU holds what is restored, and for a while what was read, too.
RESTORED_EXPERTS = 32
_CHILD = (sys.executable, "-m", "bench.convert_child")
_SIZES = (
    "hidden_size",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "moe_intermediate_size",
)


def write_source(directory: Path, *, experts: int) -> int:
    """Writes the checkpoint to convert and returns the bytes of its tensors."""
    directory.mkdir()
    config = target_config()
    text = config["text_config"]
    text |= {name: PUBLISHED_TARGET[name] for name in _SIZES}
    text["num_key_value_heads"] = text["num_attention_heads"]
    text |= {"num_hidden_layers": 2, "n_routed_experts": experts}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = _tensors(directory)
    share = -(-len(tensors) // FILES)
    names = sorted(tensors)
    rng = np.random.default_rng(0)
    for number in range(FILES):
        part = {
            name: tensors[name] for name in names[number * share : (number + 1) * share]
        }
        _write_file(directory / f"model-{number + 1}.safetensors", part, rng)
    return sum(_nbytes(*tensor) for tensor in tensors.values())


def measure(scratch: Path, *, experts: int, repeats: int) -> list[dict]:
    """Returns rows: conversion with cold and warm cache, its profile, restoring.

    Args:
      scratch: A directory with room for three times the source, which is
        25 MB an expert and 1.3 GB.
    """
    source, made = scratch / "source", scratch / "made"
    nbytes = write_source(source, experts=experts)
    environment = _installed(scratch)
    convert = [*_CHILD, "convert", str(source), str(made)]
    start_s = min(_started(source, made, environment) for _ in range(3))
    rows = []
    for cache in ("cold", "warm"):
        runs = [
            tuple(
                _timed(source, made, cache, command, environment)
                for command in (convert, ["cp", "-r", str(source), str(made)])
            )
            for _ in range(repeats)
        ]
        case = {"source": "hf", "target": "ours", "bytes": nbytes, "cache": cache}
        rows.append({"case": case, **_figures(nbytes, runs), "start_s": start_s})
    profile = _run([*_CHILD, "profile", str(source), str(made)], environment)
    rows[-1]["profile"] = json.loads(profile)
    for directory in (source, made):
        shutil.rmtree(directory)
    write_source(source, experts=min(experts, RESTORED_EXPERTS))
    _run(convert, environment)
    for processes in (1, 2):
        rows.append(_restored(made, processes))
    return rows


def _figures(nbytes: int, runs: Sequence[tuple]) -> dict:
    """Returns medians, and the ratios of the repeats, of (conversion, copy) pairs."""
    ratios = sorted(copy[0] / conversion[0] for conversion, copy in runs)
    return {
        "gbps": nbytes / statistics.median(c[0] for c, _ in runs) / 1e9,
        "cp_gbps": nbytes / statistics.median(c[0] for _, c in runs) / 1e9,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "peak_rss_mb": max(c[1] for c, _ in runs),
    }


def _installed(scratch: Path) -> dict[str, str]:
    """Returns an environment in which Python keeps what it compiles, in `scratch`."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": str(scratch / "compiled")}


def _started(source: Path, made: Path, environment: Mapping[str, str]) -> float:
    """Returns the seconds until a conversion knows what it will read and write."""
    dry = [sys.executable, "-m", "convert", "hf", str(source), str(made), "--dry-run"]
    begin = time.perf_counter()
    _run(dry, environment)
    return time.perf_counter() - begin


def _timed(
    source: Path,
    made: Path,
    cache: str,
    command: Sequence[str],
    environment: Mapping[str, str],
) -> tuple[float, float]:
    """Returns seconds and peak megabytes of a command, whose output it removes."""
    for path in source.iterdir():
        with open(path, "rb", buffering=0) as file:
            if cache == "cold":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(2**24):
                    pass
    begin = time.perf_counter()
    out = _run(command, environment)
    seconds = time.perf_counter() - begin
    shutil.rmtree(made)
    return seconds, json.loads(out)["peak_rss_mb"] if out else 0.0


def _run(command: Sequence[str], environment: Mapping[str, str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise ConfigError(f"{command[0]} failed: {done.stderr[-300:]}")
    return done.stdout


def _restored(checkpoint: Path, processes: int) -> dict:
    """Returns the row of restoring over eight CPU devices of so many processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [*_CHILD, "restore", str(checkpoint)]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(processes), port],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(processes)
    ]
    # Gloo, too, writes to standard output.
    lines = [process.communicate()[0].splitlines()[-1] for process in running]
    results = [json.loads(line) for line in lines]
    target = f"{processes} × {8 // processes} devices"
    total = results[0]["total_mb"]
    return {
        "case": {"source": "ours", "target": target, "bytes": int(total * 1e6)},
        "gbps": total / 1e3 / max(result["seconds"] for result in results),
        "peak_rss_mb": max(result["peak_rss_mb"] for result in results),
        "own_mb": max(result["own_mb"] for result in results),
        "read_mb": max(result["read_mb"] for result in results),
    }


def _tensors(directory: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns dtype and shape of every tensor of the configuration in `directory`."""
    config = read_model_config(directory)
    parameters = named_parameters(KimiK2(config))
    head_rows = config.qk_nope_head_dim + config.v_head_dim
    return {
        name: (
            DTYPE_NAMES[np.dtype(parameters[rule.path].dtype)],
            source_shape(rule, parameters[rule.path].shape, head_rows),
        )
        for rule in target_rules(config, ())
        for name in rule.names(parameters[rule.path].shape)
    }


def _write_file(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], rng):
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = at + _nbytes(dtype, shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    encoded = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for dtype, shape in tensors.values():
            count = _nbytes(dtype, shape)
            words = np.frombuffer(rng.bytes(count), np.uint16).copy()
            if dtype != "I32":
                words &= 0xBFFF  # No exponent is all ones: no NaN, no infinity.
            file.write(words)


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return int(np.prod(shape)) * DTYPES[dtype].itemsize
