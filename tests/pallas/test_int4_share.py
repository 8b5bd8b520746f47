"""How the units and rows of the experts are shared out among all blocks of a GPU.

The interpreter runs one block only, so what several do is looked at here in numbers.
"""

import itertools

import jax.numpy as jnp
import pytest

from ddtree_jax.pallas.int4_matmul import block
from ddtree_jax.pallas.int4_matmul.config import ROWS, choose
from ddtree_jax.pallas.int4_matmul.kernel import DEVICES

# Kimi's experts on one of eight devices: slices of all, or some of them whole. And of
# a model with fewer rows of the result than blocks, nearly all of which are late then.
LAYOUTS = {"tp8": (7168, 256), "ep8": (7168, 2048), "narrow": (512, 256)}


def problem(device: str, tokens: int, inner: int, hidden: int = 7168) -> block.Problem:
    gpu = DEVICES[device]
    return block.Problem(
        tokens=tokens,
        experts=384,
        hidden=hidden,
        inner=inner,
        config=choose(
            tokens=tokens,
            hidden=hidden,
            blocks=gpu.blocks,
            memory=gpu.memory,
            warpgroups=gpu.warpgroups,
        ),
        interpret=False,
    )


def shares(monkeypatch, p: block.Problem, count: int):
    """Yields block and share of every warpgroup."""
    for number in range(p.config.blocks):
        monkeypatch.setattr(block.lax, "axis_index", lambda _, n=number: jnp.int32(n))
        for warpgroup in range(p.config.warpgroups):
            yield number, block.share_of(p, jnp.int32(warpgroup), jnp.int32(count))


CASES = [
    pytest.param(device, tokens, count, hidden, inner, id=f"{device}-{name}-{tokens}")
    for device, (tokens, count), (name, (hidden, inner)) in itertools.product(
        DEVICES, ((3, 1), (9, 63), (64, 290)), LAYOUTS.items()
    )
]


@pytest.mark.parametrize(("device", "tokens", "count", "hidden", "inner"), CASES)
def test_every_unit_is_done_once(monkeypatch, device, tokens, count, hidden, inner):
    p = problem(device, tokens, inner, hidden)
    on_time, late, last_blocks = [], [], set()
    for number, share in shares(monkeypatch, p, count):
        units = [int(share.unit(jnp.int32(i))) for i in range(int(share.units))]
        on_time += units[: int(share.late)]
        late += units[int(share.late) :]
        if share.is_late:
            last_blocks.add(number)
        assert len(units) == int(share.late) or share.is_late
    blocks, groups = p.config.blocks, p.hidden // ROWS
    # Those that have no group of rows where others have one.
    assert last_blocks == set(range(groups % blocks, blocks))
    assert sorted(on_time) == list(range(len(on_time)))
    assert sorted(on_time + late) == list(range(count * p.units))
    assert len(late) == int(p.late_units(jnp.int32(count)))
    # Late blocks have what takes as long as the rows they do not have, but for a
    # quarter of a unit a warpgroup.
    most = count * p.items * len(last_blocks) / p.unit_stages
    assert len(late) <= most + len(last_blocks) * p.config.warpgroups / 4


def test_every_group_of_rows_is_done_once(monkeypatch):
    p = problem("9.0", 9, 256)
    done = [
        number + i * p.config.blocks
        for number, share in shares(monkeypatch, p, 63)
        for i in range(int(share.groups))
    ]
    each = p.config.warpgroups
    assert sorted(done) == [g for g in range(7168 // ROWS) for _ in range(each)]


def test_nothing_is_late_where_rows_are_even(monkeypatch):
    p = problem("9.0", 9, 256, hidden=132 * ROWS)
    assert p.config.late_blocks == 0
    assert not any(share.is_late for _, share in shares(monkeypatch, p, 63))
    assert int(p.late_units(jnp.int32(63))) == 0


def test_more_are_late_where_few_would_be_waited_for():
    p, saved = problem("9.0", 65, 256), 0
    for count in range(1, 385):
        late = int(p.late_units(jnp.int32(count)))
        on_time, even = count * p.units - late, count * p.items * 20 // p.unit_stages
        rule = even * 7 // 8
        beyond = (count * p.units - rule) % p.config.stride
        if late != rule:
            saved += 1
            assert on_time % p.config.stride == 0 and late == rule + beyond
        else:
            assert not beyond or rule + beyond > even + 20 or on_time < 528
    assert saved == 28
