"""What the GPU kernels cost, by compiling them for GPUs that are not there."""

import dataclasses
import functools
import itertools
import math
import os
import re
import sys
from importlib import metadata
from pathlib import Path

import jax.numpy as jnp
import pytest

from ddtree_jax.pallas import tree_mla_attention
from ddtree_jax.pallas.tree_mla.config import TreeMlaConfig, choose
from ddtree_jax.pallas.tree_mla.kernel import tree_mla_attention_pallas
from ddtree_jax.pallas.tree_mla.mma_config import TreeMlaMmaConfig, choose_mma
from ddtree_jax.pallas.tree_mla.tuned import kernel_for
from ddtree_jax.pallas.tree_mla.wide_config import choose_wide
from tests.support.aot import TOOLS, CompileError, compile_for, shared_memory_limit
from tests.support.hlo import Program, opcode

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux",
        reason="the compilers exist for Linux only; continuous integration runs it",
    ),
    pytest.mark.skipif(
        os.environ["JAX_PLATFORMS"] != "cpu",
        reason="compiles without a GPU; scripts/test without JAX_PLATFORMS runs it",
    ),
]

ROOT = Path(__file__).parents[2]
LAYERS, PAGES, TABLE = 61, 2_000, 1_200
LATENT, ROPE = 512, 64
# What four warpgroups can have of a multiprocessor's 65,536, and three.
MAX_REGISTERS, MAX_REGISTERS_OF_THREE = 128, 168


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """Static sizes of one call."""

    heads: int
    nodes: int
    page_size: int = 64
    batch: int = 1

    def __str__(self):
        return (
            f"heads{self.heads}-nodes{self.nodes}-page{self.page_size}"
            f"-batch{self.batch}"
        )

    @property
    def rows(self) -> int:
        """Of one request."""
        return self.heads * self.nodes

    def shapes(self, tail_rows: int | None = None) -> list[tuple]:
        """Returns the arguments of `attend`: all layers' pages in one array."""
        b, n, h, s = self.batch, self.nodes, self.heads, self.page_size
        tail = tail_rows or -(-n // 64) * 64
        bf16, i32 = jnp.bfloat16, jnp.int32
        return [
            ((b, n, h, LATENT), bf16),
            ((b, n, h, ROPE), bf16),
            ((LAYERS, PAGES, s, LATENT), bf16),
            ((LAYERS, PAGES, s, ROPE), bf16),
            ((b, TABLE), i32),
            ((b,), i32),
            ((), i32),
            ((b, tail, LATENT), bf16),
            ((b, tail, ROPE), bf16),
            ((b, n, -(-n // 32)), jnp.uint32),
        ]


SHAPES = [*((8, n) for n in (1, 9, 17, 33, 65, 128)), (64, 9)]
ALL = [
    Bucket(heads=heads, nodes=nodes, page_size=page_size, batch=batch)
    for (heads, nodes), page_size, batch in itertools.product(SHAPES, (64, 16), (1, 32))
]
# Every shape, and some of them with the other page size and batch.
QUICK = [
    bucket
    for bucket in ALL
    if (bucket.page_size, bucket.batch) == (64, 1)
    or ((bucket.page_size, bucket.batch) == (16, 32) and bucket.nodes in (9, 128))
]
MANY_ROWS = [b for b in ALL if b.rows in (520, 576) and b.batch == 1]
BUCKETS = [
    pytest.param(b, id=str(b), marks=[] if b in QUICK else pytest.mark.slow)
    for b in ALL
]


def attend(*arrays, call=tree_mla_attention, **options):
    """Attends as the model does, to one layer's part of all layers' pages."""
    q_latent, q_rope, latent, rope, table, length, layer, *tails = arrays
    return call(
        q_latent,
        q_rope,
        latent.reshape(-1, *latent.shape[2:]),
        rope.reshape(-1, *rope.shape[2:]),
        table + layer * latent.shape[1],
        length,
        tail_latent=tails[0],
        tail_rope=tails[1],
        ancestor_bits=tails[2],
        softmax_scale=0.07,
        **options,
    )


@functools.cache
def compiled(target: str, bucket: Bucket, implementation: str = "pallas"):
    function = functools.partial(attend, implementation=implementation)
    return compile_for(target, function, *bucket.shapes())


# Bytes of a thread's registers that `attend` may store to memory. With blocks of 72
# rows `score` holds 64 × 72 logits in 128 threads; with fewer rows it has none. In the
# wide one it is what masks need, once a block, and a loop reads two or three a tile.
SPILLS = {"tree_mla_attend": 136, "tree_mla_attend_wide": 96}


# Hopper's kernels as the table of rules names them.
HOPPER = {
    "transposed": ("tree_mla_attend", choose),
    "wide": ("tree_mla_attend_wide", choose_wide),
}


def assert_within_an_h200(kernels, attend: str, bucket: Bucket) -> None:
    assert set(kernels) == {attend, "tree_mla_combine"}
    wide = attend == "tree_mla_attend_wide"
    for name, kernel in kernels.items():
        three = wide and name == attend
        most = MAX_REGISTERS_OF_THREE if three else MAX_REGISTERS
        assert 0 < kernel.registers <= most, name
        assert 0 < kernel.shared_memory <= 232_448, name
    spilling = wide or bucket.rows >= 72
    assert kernels[attend].spill_stores <= (SPILLS[attend] if spilling else 0)
    assert kernels["tree_mla_combine"].spill_stores == 0
    assert kernels["tree_mla_combine"].spill_loads == 0


def kernel_of(bucket: Bucket) -> str:
    """Returns which of Hopper's the table gives the bucket to."""
    return kernel_for("9.0", rows=bucket.rows, batch=bucket.batch)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_kernels_keep_within_an_h200(bucket):
    attend, _ = HOPPER[kernel_of(bucket)]
    assert_within_an_h200(compiled("h200", bucket).kernels, attend, bucket)


@pytest.mark.parametrize("bucket", MANY_ROWS, ids=str)
def test_the_kernel_that_is_not_chosen_does_too(bucket):
    [other] = HOPPER.keys() - {kernel_of(bucket)}
    name, choice = HOPPER[other]
    config = chosen(choice, 64, bucket)
    function = functools.partial(attend, call=tree_mla_attention_pallas, config=config)
    kernels = compile_for("h200", function, *bucket.shapes()).kernels
    assert_within_an_h200(kernels, name, bucket)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_kernels_keep_within_an_rtx_pro_6000(bucket):
    assert_no_spills(compiled("rtx_pro_6000", bucket).kernels)


@pytest.mark.parametrize("nodes", [1, 9])
def test_the_rtx_pro_6000s_kernels_exist_on_an_h200(nodes):
    """There the GPU tests run them."""
    bucket = Bucket(heads=8, nodes=nodes)
    function = functools.partial(
        attend, call=tree_mla_attention_pallas, config=chosen(choose_mma, 32, bucket)
    )
    kernels = compile_for("h200", function, *bucket.shapes()).kernels
    assert_no_spills(kernels)
    # The queries of 16 or 32 rows with a ring of 8 or 6 slots, and the rest.
    want = {1: 92_336, 9: 95_376}[nodes]
    assert kernels["tree_mla_attend_mma"].shared_memory == want


def assert_no_spills(kernels) -> None:
    assert set(kernels) == {"tree_mla_attend_mma", "tree_mla_combine"}
    for name, kernel in kernels.items():
        assert 0 < kernel.registers <= MAX_REGISTERS, name
        assert 0 < kernel.shared_memory <= 101_376, name
        assert (kernel.spill_stores, kernel.spill_loads) == (0, 0), name


def chosen(choice, tile: int, bucket: Bucket) -> TreeMlaConfig:
    """Returns what `choice` makes of a bucket; its tiles have so many keys."""
    return choice(
        batch=bucket.batch,
        rows=bucket.rows,
        latent=LATENT,
        rope=ROPE,
        max_tiles=-(-TABLE * bucket.page_size // tile) - (-bucket.nodes // tile),
        cores=132,
    )


@pytest.mark.parametrize(
    ("target", "kernel"),
    [("h200", "tree_mla_attend"), ("rtx_pro_6000", "tree_mla_attend_mma")],
)
def test_auto_is_the_targets_kernel(target, kernel):
    got = compiled(target, Bucket(heads=8, nodes=1), "auto").kernels
    assert set(got) == {kernel, "tree_mla_combine"}


def launches(hlo: str) -> list[str]:
    """Returns the instructions of the entry that run something on the GPU."""
    program = Program(hlo)
    free = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple"}
    lines = program.computations[program.entry]
    return [line for line in lines if opcode(line) not in free]


@pytest.mark.parametrize("target", ["h200", "rtx_pro_6000"])
@pytest.mark.parametrize("bucket", BUCKETS)
def test_call_is_two_kernels_and_copies_no_cache(bucket, target):
    kernel = kernel_of(bucket) if target == "h200" else "mma"
    block = {"transposed": 72, "wide": 64, "mma": 32}[kernel]
    hlo = compiled(target, bucket).hlo
    found = launches(hlo)
    calls = [line for line in found if 'custom_call_target="mosaic_gpu_v2"' in line]
    assert len(calls) == 2
    others = [line for line in found if line not in calls]
    # The layer's page ids.
    table = f"s32[{bucket.batch},{TABLE}]"
    assert [table in line.split(" fusion(")[0] for line in others].count(True) == 1
    rest = [line for line in others if table not in line]
    assert all("/slice" in line for line in rest), rest
    # Rows that do not fill the last block are cut off the output and its lse.
    even = bucket.rows % block == 0 or (kernel == "transposed" and bucket.rows < block)
    assert len(rest) <= (0 if even else 2), rest
    cache = LAYERS * PAGES * bucket.page_size * ROPE
    for code, line in Program(hlo).instructions():
        if code not in ("parameter", "bitcast"):
            assert largest_result(line) < cache, line


def largest_result(line: str) -> int:
    """Returns how many elements the largest array has that an instruction makes."""
    kind = line.split(" = ", 1)[1].split(f" {opcode(line)}(", 1)[0]
    shapes = re.findall(r"\w+\[([\d,]*)\]", kind)
    return max(math.prod(map(int, filter(None, s.split(",")))) for s in shapes)


def test_tail_of_a_tile_is_not_padded():
    bucket = Bucket(heads=8, nodes=1)
    whole = compiled("h200", bucket).hlo
    assert " pad(" not in whole
    # One that is no whole tile is: this is what a pad would look like.
    function = functools.partial(attend, implementation="pallas")
    padded = compile_for("h200", function, *bucket.shapes(tail_rows=63)).hlo
    assert padded.count(" pad(") == 2
    assert len(launches(padded)) == len(launches(whole)) + 2


TOO_MUCH = r"exceeds available shared memory: smem_bytes=\d+ > max_smem_bytes={}"
SMALL = TreeMlaConfig(rows=8, row_blocks=1, splits=4, slots=4, combine_warpgroups=1)


def test_too_many_slots_are_refused():
    config = dataclasses.replace(SMALL, slots=14)
    function = functools.partial(attend, call=tree_mla_attention_pallas, config=config)
    shapes = Bucket(heads=8, nodes=1).shapes()
    with pytest.raises(ValueError, match=TOO_MUCH.format(232_448)):
        compile_for("h200", function, *shapes)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            chosen(choose, 64, Bucket(heads=8, nodes=9)),
            TOO_MUCH.format(101_376),
        ),
        (
            dataclasses.replace(SMALL, row_blocks=9),
            r"wgmma[\w.]*' op is not supported on sm_120a",
        ),
        (
            TreeMlaMmaConfig(
                rows=32, row_blocks=3, splits=4, slots=7, combine_warpgroups=1
            ),
            TOO_MUCH.format(101_376),
        ),
    ],
    ids=["shared memory", "wgmma", "one slot more"],
)
def test_what_does_not_exist_on_sm_120(config, message):
    function = functools.partial(attend, call=tree_mla_attention_pallas, config=config)
    with pytest.raises((ValueError, CompileError), match=message):
        compile_for("rtx_pro_6000", function, *Bucket(heads=8, nodes=9).shapes())


@pytest.mark.parametrize(
    ("target", "limit"), [("h200", 232_448), ("rtx_pro_6000", 101_376)]
)
def test_target_has_its_shared_memory(target, limit):
    assert shared_memory_limit(target) == limit


def locked(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / name).read_text()
    return dict(re.findall(r"^([\w-]+)==([\w.]+)", text, flags=re.M))


def test_tools_are_those_of_the_lock_and_of_a_gpu():
    lock = locked("lock-aot.txt")
    installed = {d.name: d.version for d in metadata.distributions(path=[str(TOOLS)])}
    assert installed == lock
    assert lock.items() <= locked("lock-cuda13.txt").items()
