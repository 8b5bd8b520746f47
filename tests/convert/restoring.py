"""Restores a checkpoint as one of several processes, and says what it read.

    python -m tests.convert.restoring RANK PROCESSES PORT CHECKPOINT

Eight CPU devices in all. Prints a line of JSON.
"""

import json
import os
import sys
from hashlib import sha256
from pathlib import Path

import numpy as np

DEVICES = 8


def read_so_far() -> int:
    """Returns how many bytes this process has read, cached or not."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def restore(rank: int, processes: int, port: str, checkpoint: Path) -> dict:
    import jax

    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{port}", processes, rank)
    from ddtree_jax.mesh import make_mesh
    from ddtree_jax.model.params import named_parameters
    from ddtree_jax.model.restore import restore_target

    mesh = make_mesh()
    assert mesh.size == DEVICES
    restore_target(checkpoint, mesh, dtype="bfloat16")  # imports what it needs
    before = read_so_far()
    _, model = restore_target(checkpoint, mesh, dtype="bfloat16")
    read = read_so_far() - before
    arrays = [p[...] for p in named_parameters(model).values()]
    own = sum(
        sum({str(s.index): s.data.nbytes for s in array.addressable_shards}.values())
        for array in arrays
    )
    shards = {
        name: [
            [str(shard.index), sha256(np.asarray(shard.data).tobytes()).hexdigest()]
            for shard in p[...].addressable_shards
        ]
        for name, p in named_parameters(model).items()
    }
    total = sum(array.nbytes for array in arrays)
    return {"read": read, "own": own, "total": total, "shards": shards}


if __name__ == "__main__":
    rank, processes, port, checkpoint = sys.argv[1:]
    local = DEVICES // int(processes)
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={local}"
    result = restore(int(rank), int(processes), port, Path(checkpoint))
    print(json.dumps(result))
