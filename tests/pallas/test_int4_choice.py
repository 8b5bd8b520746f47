"""Which implementation an INT4 entry takes, what it refuses, how work is cut."""

import functools
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from ddtree_jax.pallas import int4_grouped_swiglu, int4_matmul
from ddtree_jax.pallas.int4_matmul import kernel, to_tiles
from ddtree_jax.pallas.int4_matmul.config import choose, choose_dense
from ddtree_jax.quant import Int4Weight
from tests.pallas.test_int4_grouped import Routed
from tests.support.compare import assert_bit_equal
from tests.support.weights import random_int4

BF16 = ml_dtypes.bfloat16


def dense(inputs: int = 256, dtype=BF16):
    """Returns x and a weight."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((3, inputs)).astype(dtype)
    return x, random_int4(rng, (32, inputs))


def grouped(hidden: int = 512, inner: int = 256, experts: int = 2, dtype=BF16):
    """Returns arguments of `int4_grouped_swiglu`; token 1 picks nothing."""
    rng = np.random.default_rng(1)
    up, down = (1, experts, inner, hidden), (1, experts, hidden, inner)
    return Routed(
        x=rng.standard_normal((2, hidden)).astype(dtype),
        gate=random_int4(rng, up),
        up=random_int4(rng, up),
        down=random_int4(rng, down),
        layer=np.int32(0),
        expert_ids=np.asarray([[1], [-1]], np.int32),
        expert_weights=np.ones((2, 1), np.float32),
    )


def tiled(arguments):
    """Returns the same with weights in tiles."""
    return [to_tiles(a) if isinstance(a, Int4Weight) else a for a in arguments]


ENTRIES = [
    pytest.param(int4_matmul, dense, id="int4_matmul"),
    pytest.param(int4_grouped_swiglu, grouped, id="int4_grouped_swiglu"),
]


on_a_cpu = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="runs on a CPU: scripts/test tests/pallas"
)


@on_a_cpu
@pytest.mark.parametrize(("entry", "draw"), ENTRIES)
@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_tiles_are_taken_everywhere(entry, draw, implementation):
    """On a CPU by the reference, which sees the same weights."""
    arguments = draw()
    run = jax.jit(entry, static_argnames="implementation")
    want = run(*arguments, implementation="reference")
    assert_bit_equal(run(*tiled(arguments), implementation=implementation), want)


@pytest.mark.parametrize(("entry", "draw"), ENTRIES)
def test_pallas_expects_tiles(entry, draw):
    message = (
        f"^{entry.__name__}: implementation 'pallas' expects weights in tiles, as "
        "`to_tiles` makes them$"
    )
    with pytest.raises(ValueError, match=message):
        entry(*draw(), implementation="pallas")


@pytest.mark.parametrize(("entry", "draw"), ENTRIES)
def test_pallas_is_refused_without_a_gpu(entry, draw, monkeypatch):
    monkeypatch.setattr(kernel, "compute_capability", lambda: None)
    message = (
        f"^{entry.__name__}: implementation 'pallas' expects GPUs of one compute "
        r"capability, 9\.0 or 12\.0$"
    )
    with pytest.raises(ValueError, match=message):
        entry(*tiled(draw()), implementation="pallas")


F32 = "activations of float32; expected bfloat16"
SIZES = "expected multiples of 512 and of 256"
HIDDEN = f"a hidden size of 768 and an inner one of 256; {SIZES}"
INNER = f"a hidden size of 512 and an inner one of 128; {SIZES}"


@pytest.mark.parametrize(
    ("entry", "arguments", "reason"),
    [
        (int4_matmul, dense(dtype=np.float32), F32),
        (int4_matmul, dense(320), "320 inputs; expected a multiple of 256"),
        (int4_grouped_swiglu, grouped(dtype=np.float32), F32),
        (int4_grouped_swiglu, grouped(hidden=768), HIDDEN),
        (int4_grouped_swiglu, grouped(inner=128), INNER),
    ],
    ids=["dense, float32", "inputs", "float32", "hidden", "inner"],
)
def test_what_the_kernels_do_not_take_is_named(entry, arguments, reason, monkeypatch):
    """And "auto" takes the reference for it."""
    with pytest.raises(ValueError) as error:
        entry(*tiled(arguments), implementation="pallas")
    name = entry.__name__
    assert str(error.value) == f"{name}: implementation 'pallas' got {reason}"
    pretend_a_gpu(monkeypatch)
    assert not has_kernel(entry, tiled(arguments))


def has_kernel(entry, arguments) -> bool:
    """Returns whether the entry would run a Pallas kernel, on some platform."""

    def untraced(*arguments):
        return entry(*arguments)

    return "mpmd_map" in str(jax.make_jaxpr(untraced)(*arguments))


def pretend_a_gpu(monkeypatch) -> None:
    for module in ("ddtree_jax.pallas.int4_matmul", kernel.__name__):
        known = sys.modules[module]
        monkeypatch.setattr(known, "compute_capability", lambda: "9.0")


@pytest.mark.parametrize(("entry", "draw"), ENTRIES)
def test_auto_is_the_kernel_for_tiles_on_a_gpu(entry, draw, monkeypatch):
    arguments = draw()
    assert not has_kernel(entry, tiled(arguments))
    pretend_a_gpu(monkeypatch)
    assert has_kernel(entry, tiled(arguments))
    assert not has_kernel(entry, arguments)


@on_a_cpu
@pytest.mark.parametrize(("entry", "draw"), ENTRIES)
def test_a_cpu_beside_a_gpu_runs_the_reference(entry, draw, monkeypatch):
    arguments = draw()
    want = jax.jit(functools.partial(entry, implementation="reference"))(*arguments)
    pretend_a_gpu(monkeypatch)
    got = jax.jit(functools.partial(entry, implementation="auto"))(*tiled(arguments))
    assert_bit_equal(got, want)


def test_too_many_experts_are_named():
    reason = kernel.unsupported_grouped(512, 256, 1025, jnp.bfloat16)
    assert reason == "1025 experts; expected at most 1024"
    assert kernel.unsupported_grouped(512, 256, 1024, jnp.bfloat16) is None


@pytest.mark.parametrize("device", kernel.DEVICES.values(), ids=list(kernel.DEVICES))
def test_every_number_of_tokens_has_a_ring(device):
    """Of two slots at least, and of no more than fit beside the tokens' sums."""
    sizes = {
        "blocks": device.blocks,
        "memory": device.memory,
        "warpgroups": device.warpgroups,
    }
    for tokens in range(1, device.tokens + 1):
        config = choose(tokens=tokens, hidden=7168, **sizes)
        assert config.blocks == device.blocks
        assert config.warpgroups == device.warpgroups
        assert config.row_tiles == (1 if tokens <= 8 else 2)
        # The last blocks have none of 112 groups of rows; few tokens need no help.
        late_blocks = {132: 20, 188: 76}[device.blocks] if tokens > 2 else 0
        assert config.late_blocks == late_blocks
        slots = config.warpgroups * config.slots * 16 * (64 * 16 // 2 + 64)
        sums = tokens * 72 * 4 + config.warpgroups * 2 * 4 * 128 * 4
        assert config.slots >= 2, tokens
        assert slots + sums < device.memory, tokens
    assert choose_dense(**sizes).slots >= 2


def test_each_warpgroup_has_a_warp_that_loads_for_it():
    with pytest.raises(ValueError, match="warpgroups is 5; expected at most 4"):
        choose(tokens=9, hidden=7168, blocks=132, memory=232_448, warpgroups=5)
