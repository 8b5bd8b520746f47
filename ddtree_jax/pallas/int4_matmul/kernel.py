"""Owns the calls of the INT4 kernels with the arguments of the entries."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from ddtree_jax.arrays import BF16, F32, I32, Array
from ddtree_jax.pallas.device import compute_capability
from ddtree_jax.pallas.int4_matmul import dense, grouped
from ddtree_jax.pallas.int4_matmul.config import (
    COLUMNS,
    GroupedConfig,
    choose,
    choose_dense,
)
from ddtree_jax.pallas.int4_matmul.route import route
from ddtree_jax.pallas.int4_matmul.route_kernel import MAX_EXPERTS, route_on_device
from ddtree_jax.pallas.int4_matmul.tiles import Int4Tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """What of a GPU decides how work is cut.

    Attributes:
      blocks: Multiprocessors.
      memory: Bytes of shared memory that a block can have.
      warpgroups: That multiply, as registers allow.
      tokens: Of one launch, as shared memory allows; more are done in several.
    """

    blocks: int
    memory: int
    warpgroups: int
    tokens: int


# By compute capability: an H200, an RTX PRO 6000.
DEVICES = {
    "9.0": Device(blocks=132, memory=232_448, warpgroups=4, tokens=256),
    "12.0": Device(blocks=188, memory=101_376, warpgroups=3, tokens=64),
}


def unsupported_grouped(
    hidden: int, inner: int, experts: int, dtype: Any
) -> str | None:
    """Returns why the grouped kernel cannot take such a layer, or None.

    Args:
      inner: Of one expert on one device.
      experts: Of one device.
      dtype: Of the activations.
    """
    if dtype != jnp.bfloat16:
        return f"activations of {dtype}; expected bfloat16"
    if hidden % 512 or inner % 256:
        return (
            f"a hidden size of {hidden} and an inner one of {inner}; expected "
            "multiples of 512 and of 256"
        )
    if experts > MAX_EXPERTS:
        return f"{experts} experts; expected at most {MAX_EXPERTS}"
    return None


def int4_grouped_swiglu_pallas(
    x: BF16[Array, "T M"],
    gate: Int4Tiles,
    up: Int4Tiles,
    down: Int4Tiles,
    layer: I32[Array, ""],
    expert_ids: I32[Array, "T k"],
    expert_weights: F32[Array, "T k"],
    *,
    config: GroupedConfig | None = None,
    interpret: Any = None,
) -> F32[Array, "T M"]:
    """Returns what `int4_grouped_swiglu` documents, on a GPU that has the kernel.

    Args:
      config: How one launch is cut; None chooses for the GPU.
      interpret: Parameters of the interpreter, which runs the kernel on a CPU.

    Raises:
      ValueError: The kernel does not take these arguments, or does not know the GPU.
    """
    name = "int4_grouped_swiglu"
    _check_tiles(name, gate, up, down)
    tokens, hidden = x.shape
    _, experts, inner, _ = gate.shape
    if reason := unsupported_grouped(hidden, inner, experts, x.dtype):
        raise ValueError(f"{name}: implementation 'pallas' got {reason}")
    if config is None:
        device = _device(name)
        if tokens > device.tokens:
            starts = range(0, tokens, device.tokens)
            parts = [slice(start, start + device.tokens) for start in starts]
            results = [
                int4_grouped_swiglu_pallas(
                    x[p], gate, up, down, layer, expert_ids[p], expert_weights[p]
                )
                for p in parts
            ]
            return jnp.concatenate(results)
        config = choose(
            tokens=tokens,
            hidden=hidden,
            blocks=device.blocks,
            memory=device.memory,
            warpgroups=device.warpgroups,
        )
    make = route if interpret is not None else route_on_device
    routing = make(expert_ids, expert_weights, experts=experts, columns=COLUMNS)
    problem = grouped.Problem(
        tokens=tokens,
        experts=experts,
        hidden=hidden,
        inner=inner,
        config=config,
        interpret=interpret is not None,
    )
    return grouped.grouped_swiglu(
        problem, x, gate, up, down, layer, routing, interpret=interpret
    )


def unsupported_dense(inputs: int, dtype: Any) -> str | None:
    """Returns why the dense kernel cannot take such a product, or None."""
    if dtype != jnp.bfloat16:
        return f"activations of {dtype}; expected bfloat16"
    if inputs % 256:
        return f"{inputs} inputs; expected a multiple of 256"
    return None


def int4_matmul_pallas(
    x: BF16[Array, "T inputs"],
    weight: Int4Tiles,
    *,
    config: GroupedConfig | None = None,
    interpret: Any = None,
) -> BF16[Array, "T out"]:
    """Returns what `int4_matmul` documents, on a GPU that has the kernel.

    Args:
      config: How the work is cut; None chooses for the GPU.
      interpret: Parameters of the interpreter, which runs the kernel on a CPU.

    Raises:
      ValueError: The kernel does not take these arguments, or does not know the GPU.
    """
    name = "int4_matmul"
    _check_tiles(name, weight)
    outputs, inputs = weight.shape
    if reason := unsupported_dense(inputs, x.dtype):
        raise ValueError(f"{name}: implementation 'pallas' got {reason}")
    if config is None:
        device = _device(name)
        config = choose_dense(
            blocks=device.blocks, memory=device.memory, warpgroups=device.warpgroups
        )
    problem = dense.Problem(
        tokens=x.shape[0],
        inputs=inputs,
        outputs=outputs,
        config=config,
        interpret=interpret is not None,
    )
    return dense.dense(problem, x, weight, interpret=interpret)


def _check_tiles(name: str, *weights: Any) -> None:
    if not all(isinstance(weight, Int4Tiles) for weight in weights):
        raise ValueError(
            f"{name}: implementation 'pallas' expects weights in tiles, as `to_tiles` "
            "makes them"
        )


def _device(name: str) -> Device:
    capability = compute_capability()
    if capability is None:
        raise ValueError(
            f"{name}: implementation 'pallas' expects GPUs of one compute capability, "
            f"{' or '.join(DEVICES)}"
        )
    return DEVICES[capability]
