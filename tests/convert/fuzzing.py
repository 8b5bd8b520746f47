"""Spoils one file of a small checkpoint in one place, and judges what comes of it."""

import copy
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np

from convert.checkpoint import Checkpoint
from convert.plan import make_plan
from ddtree_jax.errors import DDTreeError
from tests.convert.support import (
    TINY,
    Raw,
    raw,
    read_checkpoint,
    read_config,
    write_checkpoint,
    write_sparse,
)

SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}


def few(count: int):
    """More examples when they are asked for by hypothesis's own options."""
    return hypothesis.settings(
        max_examples=count,
        suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    )


def write_small(root: Path, *, image: Sequence[str] = (), **sizes: int) -> Path:
    """Writes a small checkpoint of random finite numbers, in two files.

    Args:
      image: Names of tensors of the image path.
      sizes: Of the configuration.
    """
    config = read_config(TINY)
    config["text_config"].update(SMALL | sizes)
    write_sparse(root / "zeros", config)
    rng = np.random.default_rng(0)
    tensors = {}
    for name, tensor in read_checkpoint(root / "zeros").items():
        words = rng.integers(0, 0x4000, len(tensor.data) // 2, np.uint16)
        tensors[name] = Raw(tensor.dtype, tensor.shape, words.tobytes())
        if name.endswith(".weight_packed"):
            shape = (tensor.shape[0], 8 * tensor.shape[1])
            stated = name.replace("packed", "shape")
            tensors[stated] = raw(np.array(shape, np.int32))
    for name in image:
        tensors[name] = raw(rng.integers(0, 9, (3, 5), np.int32))
    return write_checkpoint(root / "small", tensors, config, shards=2)


class Contents(dict[str, tuple[str, tuple[int, ...], bytes]]):
    """Tensors by name; hypothesis does not print their bytes."""

    def __repr__(self) -> str:
        return f"<{len(self)} tensors>"


def contents(checkpoint: Checkpoint) -> Contents:
    """Reads a checkpoint as a target does: planned, checked, then every tensor."""
    plan = make_plan(checkpoint)
    plan.check_stated_shapes()
    for leaf in plan.leaves:
        for block in leaf.slabs():
            shape = tuple(s.stop - s.start for s in block)
            leaf.read(block, np.empty(shape, leaf.dtype))
    found = Contents()
    for name, tensor in checkpoint.tensors.items():
        out = bytearray(tensor.nbytes)
        tensor.read_into(memoryview(out), 0)
        found[name] = (tensor.dtype, tensor.shape, bytes(out))
    return found


def check(read: Callable[[], object], want: Callable[[], object], *names: str) -> None:
    """Checks that `read` is refused in a line with one of `names`, or is as wanted."""
    try:
        got = read()
    except DDTreeError as error:
        message = str(error)
        assert "\n" not in message and any(name in message for name in names), message
        hypothesis.event(f"refused: {type(error).__name__}")
    else:
        assert got == want()
        hypothesis.event("as it was")


class Spoilt:
    """A file that holds something else for a while."""

    def __init__(self, path: Path, content: bytes):
        self.path, self.content = path, content

    def __enter__(self) -> Path:
        self.good = self.path.read_bytes()
        self.path.write_bytes(self.content)
        return self.path

    def __exit__(self, *_) -> None:
        self.path.write_bytes(self.good)


# JSON, the odd kinds included.
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**400, 1e308, 0.5, math.nan]),
    st.sampled_from(["", "BF16", "F32", "a.b", "../x", "x\0", "\ud800", "é", "0"]),
    st.text(max_size=5),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)


def places(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Yields the path of everything inside a JSON value."""
    items: list = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


@st.composite
def changed(draw, value):
    """Draws a JSON value that differs in one place: replaced, removed, or added."""
    out = copy.deepcopy(value)
    *path, last = draw(st.sampled_from(list(places(out))))
    holder = out
    for key in path:
        holder = holder[key]
    match draw(st.sampled_from(["replace", "remove", "add", "retype", "near"])):
        case "remove":
            del holder[last]
        case "add" if isinstance(holder, dict):
            holder[draw(st.text(max_size=6))] = draw(JSON)
        case "near" if isinstance(holder[last], int):
            holder[last] += draw(st.sampled_from([-1, 1, 2, 64]))
        case "retype":
            holder[last] = draw(st.sampled_from([[holder[last]], {"a": holder[last]},
                                                 str(holder[last])]))  # fmt: skip
        case _:
            holder[last] = draw(JSON)
    return out


def encoded(value: object) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def with_header(content: bytes, header: bytes) -> bytes:
    """Returns a safetensors file with another header."""
    start = 8 + int.from_bytes(content[:8], "little")
    return len(header).to_bytes(8, "little") + header + content[start:]
