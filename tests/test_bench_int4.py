"""The benchmark of the INT4 products; nothing here measures a time."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import (
    int4,
    int4_arms,
    int4_baselines,
    int4_cases,
    int4_inputs,
    int4_table,
    int4_truth,
)
from bench.__main__ import main
from bench.device_time import DeviceTiming
from bench.int4_arms import Job
from bench.int4_baselines import Draw, Experts
from bench.int4_cases import BenchCase, Load
from bench.limits import Deadline
from bench.timing import Timing
from ddtree_jax.errors import ConfigError
from ddtree_jax.pallas.int4_matmul.cases import DenseCase, GroupedCase
from ddtree_jax.pallas.int4_matmul.reference import (
    int4_grouped_swiglu_reference,
    int4_matmul_reference,
)
from ddtree_jax.pallas.int4_matmul.tiles import from_tiles
from ddtree_jax.quant import unpack

GROUPED = GroupedCase(
    size="ci",
    layout="ep8",
    tokens=9,
    layers=2,
    experts=12,
    routed_experts=24,
    experts_per_token=3,
    hidden=128,
    inner=64,
)
KIND = dataclasses.replace(GROUPED, tokens=1)
DENSE = DenseCase(size="ci", tokens=9, inputs=128, outputs=48)
SMALL = BenchCase(shape=GROUPED, peers={"Marlin": 3.0}, must=1e9, aim=1e-9)
SMALL_DENSE = BenchCase(shape=DENSE, peers={})
TIMING = DeviceTiming(Timing(20.0, 19.0, 120.0), 19.0)


def named(pattern: str) -> BenchCase:
    [case] = int4_cases.chosen([pattern])
    return case


# Microseconds at 4.3 TB/s and 790 TFLOP/s, from a table made apart from the code.
@pytest.mark.parametrize(
    ("pattern", "experts", "pairs", "memory", "compute"),
    [
        ("kimi-tp8-m1-*", 8, 8, 5.77, 0.11),
        ("kimi-tp8-m9-*", 63, 72, 45.4, 1.0),
        ("kimi-tp8-m65-*", 282.5, 520, 204.0, 7.25),
        ("kimi-ep8-m9-*", 8, 9, 46.3, 1.0),
        ("kimi-m1-k7168-*", None, None, 1.92, 0.037),
        ("kimi-m64-k2048-*", None, None, 2.19, 2.38),
    ],
)
def test_floors(pattern, experts, pairs, memory, compute):
    load = None if experts is None else Load(experts, pairs)
    got = int4_cases.floor(named(pattern), load, gbps=4300)
    assert got.memory_us == pytest.approx(memory, rel=3e-3)
    assert got.compute_us == pytest.approx(compute, rel=0.05)
    assert got.us == max(got.memory_us, got.compute_us)
    assert got.bytes == pytest.approx(got.memory_us * 4.3e6)


def test_a_grouped_floor_needs_a_load():
    with pytest.raises(ValueError, match=r"kimi-tp8-m1-.*: a grouped case has a load"):
        int4_cases.floor(named("kimi-tp8-m1-*"), None, gbps=1)


def test_every_case_that_has_a_goal_is_timed():
    goals = {
        (case.shape.layout, case.tokens): (case.must, case.aim)
        for case in int4_cases.chosen(())
        if isinstance(case.shape, GroupedCase)
    }
    assert goals == {
        ("tp8", 1): (24, 12),
        ("tp8", 9): (80, 58),
        ("tp8", 17): (130, 100),
        ("tp8", 33): (200, 158),
        ("tp8", 65): (290, 228),
        ("tp8", 256): (450, 340),
        ("ep8", 1): (None, None),
        ("ep8", 9): (None, None),
        ("ep8", 65): (None, None),
    }
    dense = {
        (c.shape.inputs, c.shape.outputs, c.tokens): c.peers["cuBLAS bf16"]
        for c in int4_cases.chosen(())
        if isinstance(c.shape, DenseCase)
    }
    assert dense == {
        (7168, 2048, 1): 12.7,
        (7168, 2048, 9): 12.8,
        (7168, 2048, 64): 13.3,
        (2048, 7168, 1): 9.95,
        (2048, 7168, 9): 9.90,
        (2048, 7168, 64): 10.6,
    }


def test_cases_are_chosen_by_pattern():
    got = int4_cases.chosen(["*-m65-*", "kimi-m1-*"])
    assert [c.tokens for c in got] == [65, 65, 1, 1]
    with pytest.raises(
        ConfigError, match=r"--cases '\*-m2' matches none of kimi-tp8-m9-"
    ):
        int4_cases.chosen(["*-m65-*", "*-m2"])


def test_a_cpu_is_refused(capsys, tmp_path):
    out = tmp_path / "r.json"
    assert main(["int4", "--output", str(out)]) == 1
    assert capsys.readouterr().err == (
        "error: int4: expected a GPU of compute capability 9.0, found cpu; "
        "absolute times count only there\n"
    )
    assert not out.exists()


def test_draws_are_uniform_without_repeats_and_differ():
    case = named("kimi-tp8-m65-*")
    made = int4_inputs.draws(case, 3)
    all_ids = np.stack([draw.expert_ids for draw in made])
    assert all_ids.shape == (3, 65, 8)
    assert (np.diff(np.sort(all_ids)) > 0).all()
    assert 0 <= all_ids.min() < 5 and 379 < all_ids.max() < 384
    assert len({ids.tobytes() for ids in all_ids}) == 3
    load = int4_inputs.load_of(case.shape, made)
    assert 275 < load.experts < 295 and load.pairs == 520
    first, *_ = int4_inputs.draws(case, 1)
    assert (first.expert_ids == made[0].expert_ids).all()


def test_a_draw_without_an_expert_that_is_here_is_given_one():
    case = named("kimi-ep8-m1-*")
    made = int4_inputs.draws(case, 40)
    here = [int((np.asarray(draw.expert_ids) < 48).sum()) for draw in made]
    assert min(here) == 1 and max(here) > 1
    assert all(len(set(np.ravel(d.expert_ids))) == 8 for d in made)
    # 14 of them or so were given one, not always the same.
    lowest = [int(d.expert_ids.min()) for d in made]
    assert max(lowest.count(i) for i in lowest) < 7
    load = int4_inputs.load_of(case.shape, made)
    assert load.pairs == load.experts == np.mean(here) < 2
    one = int4_inputs.load_of(
        GROUPED, [Draw(jnp.array([[0, 11, 12], [0, 13, 1]]), jnp.zeros((2, 3)))]
    )
    assert one == (3, 4)


def test_weights_of_the_kernel_are_those_of_the_baselines():
    weights = int4_inputs.grouped_weights(KIND)
    for name in Experts._fields:
        back = from_tiles(getattr(weights.stacks, name))
        for i, layer in enumerate(weights.layers):
            canonical = getattr(layer, name)
            assert (back.packed[i] == canonical.packed).all()
            assert (back.scale[i] == canonical.scale).all()
    first, second = (layer.gate for layer in weights.layers)
    assert not (first.packed == second.packed).any()
    assert set(np.unique(unpack(first.packed))) == set(range(-8, 8))
    assert int4_inputs.grouped_weights(KIND) is weights
    dense = int4_inputs.dense_weights(dataclasses.replace(DENSE, tokens=1))
    assert len(dense.tiles) == 32
    assert (from_tiles(dense.tiles[5]).packed == dense.canonical[5].packed).all()


@pytest.mark.parametrize("tokens", [1, 9])
def test_what_xla_computes_is_what_the_kernel_should(tokens):
    shape = dataclasses.replace(GROUPED, tokens=tokens)
    case = dataclasses.replace(SMALL, shape=shape)
    # Of 9 tokens some have no expert here, and 27 pairs are more than 12 experts.
    exact = exact_of(KIND)
    for implementation in ("xla", "bfloat16"):
        product = int4_arms.grouped_product(Job(case, implementation), shape)
        assert (
            product.run
            is {
                (1, "xla"): int4_baselines.by_pair,
                (1, "bfloat16"): int4_baselines.by_pair,
                (9, "xla"): int4_baselines.by_expert,
                (9, "bfloat16"): int4_baselines.by_expert_by_output,
            }[tokens, implementation]
        )
        down = product.weights[0].down.shape
        assert down == (
            (128, 12, 64) if "output" in str(product.run) else (12, 128, 64)
        )
        x = int4_inputs.activations(tokens, shape.hidden)
        [got] = product.run(x, product.weights[0], product.draws[0])[None]
        expected = int4_truth.truth(exact, KIND, x, product.draws[0])
        assert int4.check([got], expected) < 0.004


def exact_of(kind: DenseCase | GroupedCase) -> jax.stages.Compiled:
    with ThreadPoolExecutor(1) as compilers:
        return int4_truth.submit_exact(compilers, kind).result()


def test_truth_is_the_reference_however_many_tokens():
    exact = exact_of(KIND)
    case = dataclasses.replace(
        SMALL, shape=dataclasses.replace(GROUPED, tokens=int4_truth.ROWS + 5)
    )
    x = int4_inputs.activations(70, GROUPED.hidden)
    [draw] = int4_inputs.draws(case, 1)
    stacks = jax.tree.map(
        lambda w: w[None], int4_inputs.grouped_weights(KIND).layers[0]
    )
    expected = int4_grouped_swiglu_reference(
        x.astype(jnp.float32), *stacks, jnp.int32(0), *draw
    )
    got = int4_truth.truth(exact, KIND, x, draw)
    assert got.shape == (70, 128) and got.dtype == np.float32
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    kind = dataclasses.replace(DENSE, tokens=1)
    exact = exact_of(kind)
    x = int4_inputs.activations(9, 128)
    weight = int4_inputs.dense_weights(kind).canonical[0]
    got = int4_truth.truth(exact, kind, x, ())
    dense = int4_arms.dense_product(Job(SMALL_DENSE, "xla"), DENSE)
    assert len(dense.weights) == len(dense.draws) == 16
    assert 1e-4 < int4.check([dense.run(x, weight, ())], got) < 0.003


def test_calls_of_a_train_need_the_one_before():
    x = jnp.full((2, 8), 3, jnp.bfloat16)

    def ids_or_nan(_, weight, draw):
        ids = draw.expert_ids.astype(jnp.float32)
        return jnp.tile(jnp.where(weight, ids, jnp.nan), (1, 4))

    draws = [Draw(jnp.full((2, 2), i, jnp.int32), jnp.zeros((2, 2))) for i in range(4)]
    # Weights are taken in turn; the first of these makes results NaN.
    weights = [jnp.bool_(False), jnp.bool_(True)]
    arguments = x, weights, draws
    got = int4_arms.lower_train(ids_or_nan, arguments).compile()(*arguments)
    assert [float(y[1, 7]) for y in got[1::2]] == [2, 4]
    assert all(jnp.isnan(y).all() for y in got[::2])

    def widened(x, weight, _):
        return jnp.concatenate([x * weight, x], axis=-1)

    weights = [jnp.bfloat16(1000), jnp.bfloat16(0)]
    arguments = x, weights, [()] * 3
    got = int4_arms.lower_train(widened, arguments).compile()(*arguments)
    assert [float(y[0, 8]) for y in got] == [3, 6, 3]


def test_trains_of_the_kernel_read_more_than_the_cache_holds():
    calls = {
        (c.shape.layout, c.tokens): int4_arms.calls_of(c.shape)
        for c in int4_cases.chosen(())
        if isinstance(c.shape, GroupedCase)
    }
    assert calls[("tp8", 1)] == calls[("ep8", 1)] == 24
    assert calls[("tp8", 9)] == calls[("ep8", 65)] == 6
    for case in int4_cases.chosen(["kimi-tp8-*", "kimi-ep8-*"]):
        n = calls[(case.shape.layout, case.tokens)]
        load = int4_inputs.load_of(case.shape, int4_inputs.draws(case, n))
        assert n * load.experts * int4_cases.expert_bytes(case.shape) > 256e6


def test_wrong_results_are_no_times():
    truth = np.ones((2, 3), np.float32)
    good = jnp.ones((2, 3))
    assert int4.check([good, good * 5], truth) == 0
    assert int4.check([good], None) is None
    with pytest.raises(ValueError, match=r"by 0\.02; expected less than 0\.01"):
        int4.check([good * 1.02, good], truth)
    with pytest.raises(ValueError, match="a result is not finite"):
        int4.check([good, good * jnp.nan], None)


def test_what_counts_most_comes_first():
    first, last = int4.stages(int4_cases.chosen(()))
    kernels, others, dense = first
    assert [job.case.tokens for job in kernels] == [9, 1, 65, 17, 33, 256]
    assert {job.implementation for job in (*kernels, *others)} == {"pallas"}
    assert len(others) == 9 and len(dense) == 12
    assert [
        (job.case.shape.layout, job.case.tokens) for stage in last for job in stage[::2]
    ] == [(layout, m) for layout in ("tp8", "ep8") for m in (9, 1, 65)]


def test_rows_and_their_table():
    case = named("kimi-tp8-m9-*")
    load = Load(63, 72)
    row = int4.row_of(Job(case, "pallas"), load, TIMING, calls=6, gbps=4300)
    assert row["case"] == {
        "name": "kimi-tp8-m9-e384-k7168-n256",
        "product": "tp8",
        "tokens": 9,
        "experts": 384,
        "inputs": 7168,
        "inner": 256,
        "implementation": "pallas",
    }
    assert (row["us"], row["p10"], row["p90"]) == (20, 19, 120)
    assert (row["floor_us"], row["compute_us"]) == (45.46, 1.0)
    assert (row["bound"], row["x_floor"]) == ("memory", 0.44)
    assert (row["megabytes"], row["gbps"]) == (195.47, 9774)
    assert row["copy_share"] == pytest.approx(2.273)
    assert (row["must_us"], row["aim_us"]) == (80, 58)
    row["error"] = 0.0
    row |= {"us": 60.0, "kernels_us": {"a": 12.0, "b": 3.04}}
    other = int4.row_of(Job(case, "xla"), load, TIMING, calls=2, gbps=4300)
    assert not {"must_us", "gbps", "peers_us"} & other.keys()
    dense = int4.row_of(
        Job(named("kimi-m64-k2048-*"), "pallas"), None, TIMING, calls=32, gbps=4300
    )
    assert dense["bound"] == "compute" and "pairs" not in dense
    wide = {**dense, "case": {**dense["case"], "name": "w", "inputs": 7168}}
    *_, grouped_line, wide_line, dense_line = int4_table.table(
        {"rows": [dense, row, wide, other]}
    ).splitlines()
    assert wide_line.startswith("| dense 7168 × 7168 |")
    assert grouped_line == (
        "| TP8 384 × 256 | 9 | 63 | 60.0 | 19.0–120 | 15.0 | 20.0 | – | 45.5 | 0.44 "
        "| 9,774 | 227% | 0.0 | 68.3 | 78.7 | – | 80 | 58, missed |"
    )
    assert dense_line.startswith("| dense 2048 × 7168 | 64 | – | 20.0 | 19.0–120 | – ")
    assert dense_line.endswith("| – | 12.0 | 22.9 | 10.6 | – | – |")


def grouped_by_reference(x, weight, draw):
    stacks, layer = weight
    return int4_grouped_swiglu_reference(x, *map(from_tiles, stacks), layer, *draw)


def dense_too_large(x, weight, _):
    return int4_matmul_reference(x, from_tiles(weight)) * 1.02


def test_all_is_measured_and_one_that_fails_does_not_stop_the_others(
    monkeypatch, capsys
):
    monkeypatch.setattr(int4_arms, "_grouped_pallas", grouped_by_reference)
    monkeypatch.setattr(int4_arms, "_dense_pallas", dense_too_large)
    monkeypatch.setattr(int4, "time_trains", lambda *_, **__: TIMING)
    monkeypatch.setattr(int4, "kernel_times", lambda *_, calls: {"k": 2.0 * calls})
    rows, saved = [], []

    def measure(seconds: float) -> list[str]:
        return int4.measure(
            [SMALL, SMALL_DENSE],
            rows,
            gbps=4300,
            save=lambda: saved.append(len(rows)),
            deadline=Deadline.after(seconds),
        )

    assert "ci-ep8-m9-e12-k128-n64 xla: TimeoutError: out of time" in measure(-1)
    assert rows == []
    [wrong] = measure(1000)
    assert wrong.startswith("ci-m9-k128-n48 pallas: ValueError: the result differs ")
    assert wrong in capsys.readouterr().out
    got = [(r["case"]["product"], r["case"]["implementation"]) for r in rows]
    assert got == [
        ("ep8", "pallas"),
        ("dense", "bfloat16"),
        ("dense", "xla"),
        ("ep8", "xla"),
        ("ep8", "bfloat16"),
    ]
    assert all(0 <= row["error"] < 0.004 for row in rows)
    calls = rows[0]["distinct_calls"]
    assert [row.get("kernels_us") for row in rows[:2]] == [
        {"k": 2.0 * calls},
        {"k": 2.0 * 16},
    ]
    assert saved == [1, 2, 3, 3, 3, 3, 4, 5]


def test_nothing_is_timed_after_the_deadline(monkeypatch):
    monkeypatch.setattr(int4_arms, "_grouped_pallas", grouped_by_reference)
    left = iter([None])

    class Soon(Deadline):
        def check(self):
            if next(left, self) is self:
                raise TimeoutError("out of time")

    rows = []
    wrong = int4.measure([SMALL], rows, gbps=1, save=rows.clear, deadline=Soon(0))
    assert rows == []
    assert wrong == [
        f"{SMALL.name} {name}: TimeoutError: out of time"
        for name in ("pallas", "xla", "bfloat16")
    ]
