"""Owns what `bench.convert` measures inside a process; each prints a line of JSON."""

import contextlib
import io
import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path


def convert(source: Path, destination: Path) -> dict:
    """Returns the peak memory of the conversion command, run here."""
    from convert.__main__ import main

    if main(["hf", str(source), str(destination)]):
        sys.exit("the conversion failed")
    return {"peak_rss_mb": _peak_rss_mb()}


def profile(source: Path, destination: Path) -> dict:
    """Returns the share of each stage in the time of a conversion's lanes.

    "read" is all of `Leaf.read` but the check; "arrange" puts a chunk's rows together.
    """
    from convert import chunk_files, leaf, write
    from convert.hf_source import open_hf
    from convert.ours_target import convert_to_ours

    seconds: defaultdict[str, float] = defaultdict(float)

    def clock(owner, name: str, stage: str, inner: str = "") -> None:
        call = getattr(owner, name)

        def timed(*arguments, **keywords):
            begin = time.perf_counter()
            try:
                return call(*arguments, **keywords)
            finally:
                spent = time.perf_counter() - begin
                seconds[stage] += spent
                seconds[inner] -= spent

        setattr(owner, name, timed)

    clock(leaf.Leaf, "read", "read")
    clock(leaf, "check_finite", "check", "read")
    clock(write.Digest, "add", "hash")
    clock(write, "write_chunks", "arrange")
    clock(chunk_files, "write_file", "write", "arrange")
    clock(write, "sync", "sync")
    with contextlib.redirect_stderr(io.StringIO()):
        convert_to_ours(open_hf(source), destination, draft=None)
    del seconds[""]
    total = sum(seconds.values())
    return {stage: round(spent / total, 3) for stage, spent in seconds.items()}


def restore(checkpoint: Path, rank: int, processes: int, port: str) -> dict:
    """Returns time, memory and bytes read of restoring one process's shards."""
    local = 8 // processes
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={local}"
    import jax

    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", processes, rank)
    from ddtree_jax.mesh import make_mesh
    from ddtree_jax.model.params import named_parameters
    from ddtree_jax.model.restore import restore_target

    mesh = make_mesh()
    read, begin = _read_so_far(), time.perf_counter()
    _, model = restore_target(checkpoint, mesh, dtype="bfloat16")
    seconds, read = time.perf_counter() - begin, _read_so_far() - read
    arrays = [parameter[...] for parameter in named_parameters(model).values()]
    own = sum(
        sum({str(s.index): s.data.nbytes for s in array.addressable_shards}.values())
        for array in arrays
    )
    return {
        "seconds": seconds,
        "total_mb": sum(array.nbytes for array in arrays) / 1e6,
        "own_mb": own / 1e6,
        "read_mb": read / 1e6,
        "peak_rss_mb": _peak_rss_mb(),
    }


def _peak_rss_mb() -> float:
    """Returns the peak of this program; rusage counts the one that started it, too."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise AssertionError("no VmHWM")


def _read_so_far() -> int:
    """Returns how many bytes this process has read, cached or not."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    command, first, *rest = sys.argv[1:]
    with contextlib.redirect_stdout(sys.stderr):
        if command in ("convert", "profile"):
            run = convert if command == "convert" else profile
            result = run(Path(first), Path(rest[0]))
        else:
            result = restore(Path(first), int(rest[0]), int(rest[1]), rest[2])
    print(json.dumps(result))
