"""Filters against transformers, and choices on one and on eight devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ddtree_jax.mesh import make_mesh
from ddtree_jax.spec.sampling import (
    Sampling,
    choose,
    keep_threshold,
    top_log_probs,
)
from tests.spec.statistics import chi_square_p

SPLIT, WHOLE = P(None, None, "tensor"), P()
LEAST_P = 1e-4
# A logarithm of a sum of 1000 exponentials, and a difference, in float32.
LOG_PROB_ERROR = 2e-6


@functools.cache
def choose_on(devices: int):
    mapped = jax.shard_map(
        choose,
        mesh=make_mesh(devices),
        in_specs=(SPLIT, WHOLE, WHOLE),
        out_specs=WHOLE,
        check_vma=False,
    )
    return jax.jit(mapped)


def sampling(batch: int, **settings) -> Sampling:
    """Returns the parameters of `batch` requests; numbers or one each."""
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
    dtypes = (jnp.float32, jnp.int32, jnp.float32, jnp.float32, jnp.uint32)
    assert settings.keys() <= off.keys()
    return Sampling(
        *(
            jnp.broadcast_to(jnp.asarray(value, dtype), (batch,))
            for value, dtype in zip((off | settings).values(), dtypes, strict=True)
        )
    )


def positions(batch: int, n: int, start: int = 0) -> jax.Array:
    return jnp.broadcast_to(start + jnp.arange(n, dtype=jnp.int32)[None], (batch, n))


def pick(logits, settings: Sampling, position=None, *, devices: int = 1) -> np.ndarray:
    logits = jnp.asarray(logits, jnp.float32)
    if position is None:
        position = positions(*logits.shape[:2])
    return np.asarray(choose_on(devices)(logits, position, settings))


def rows(*shape: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_normal(shape)).astype(np.float32)


# --- filters


@pytest.fixture(scope="module")
def processors(golden):
    """The golden file, with its settings as `Sampling`."""
    data = golden("sampling")
    names = ("temperature", "top_k", "top_p", "min_p")
    count = len(data["temperature"])
    return data, sampling(count, **{name: data[name] for name in names})


def test_what_is_left_is_what_transformers_leave(processors):
    data, settings = processors
    scaled = data["logits"][None] / data["temperature"][:, None, None]
    threshold = np.asarray(keep_threshold(jnp.asarray(scaled), settings))
    allowed = scaled >= threshold[..., None]
    seen = set()
    for place in np.ndindex(*data["tie_split"].shape):
        ours, theirs, values = allowed[place], data["allowed"][place], scaled[place]
        split = bool(data["tie_split"][place])
        seen.add(split)
        if split:
            # They keep some of the equal ones, we all.
            theirs = values >= values[theirs].min()
            assert (ours & ~data["allowed"][place]).any(), place
        np.testing.assert_array_equal(ours, theirs, str(place))
    assert seen == {True, False}


def test_choices_follow_the_probabilities_of_transformers(processors):
    """4096 positions a row: what is refused never comes, the rest as it should."""
    data, settings = processors
    n = 4096
    for row, logits in enumerate(data["logits"]):
        repeated = np.broadcast_to(logits, (len(settings.seed), n, len(logits)))
        seeds = settings._replace(seed=settings.seed + jnp.uint32(row))
        chosen = pick(repeated, seeds)
        for setting in np.flatnonzero(~data["tie_split"][:, row]):
            counts = np.bincount(chosen[setting], minlength=len(logits))
            assert not counts[~data["allowed"][setting, row]].any()
            p = chi_square_p(counts, data["probs"][setting, row])
            assert p > LEAST_P, (setting, row, p)


def test_no_filter_keeps_every_token():
    """Also where the mass before a token rounds to 1."""
    logits = np.zeros((1, 1, 64), np.float32)
    logits[..., 0] = 40.0
    threshold = keep_threshold(jnp.asarray(logits), sampling(1))
    assert threshold.tolist() == [[0.0]]


def test_top_k_keeps_k_whatever_their_mass():
    logits = np.zeros((1, 1, 64), np.float32)
    logits[..., 1:20] = 5.0
    logits[..., 0] = 40.0
    threshold = keep_threshold(jnp.asarray(logits), sampling(1, top_k=20))
    assert threshold.tolist() == [[5.0]]


# --- choices


def test_greedy_takes_the_smallest_of_equal_ids():
    """Ties within a shard of eight tokens, across shards, and of all tokens."""
    logits = np.zeros((1, 5, 64), np.float32)
    ties = [(3, 5), (7, 8), (20, 60), (63,)]
    for node, ids in enumerate(ties):
        logits[0, node, list(ids)] = 1.5
    for devices in (1, 8):
        got = pick(logits, sampling(1, temperature=0.0), devices=devices)
        assert got.tolist() == [[3, 7, 20, 63, 0]]


def test_greedy_ignores_the_other_parameters():
    logits = rows(4, 3, 64)
    settings = sampling(
        4,
        temperature=[0.0, 0.0, 0.0, 1.0],
        top_k=[0, 2, 0, 0],
        top_p=[0.1, 1, 1, 1],
        min_p=[0, 0, 0.9, 0],
        seed=[1, 2, 3, 4],
    )
    np.testing.assert_array_equal(pick(logits, settings)[:3], logits[:3].argmax(-1))


# Greedy, plain, each filter, all at once: neighbours in one batch.
MIXED = {
    "temperature": [0.0, 1.0, 1.0, 1.0, 1.0, 0.7, 2.0, 0.0],
    "top_k": [0, 0, 5, 0, 0, 20, 0, 3],
    "top_p": [1.0, 1.0, 1.0, 0.8, 1.0, 0.9, 1.0, 0.5],
    "min_p": [0.0, 0.0, 0.0, 0.0, 0.2, 0.05, 0.0, 0.1],
    "seed": [0, 1, 2, 3, 4, 5, 2**32 - 1, 7],
}


@pytest.mark.parametrize("name", ["greedy", "plain", "top_k", "top_p", "min_p"])
def test_the_mesh_does_not_matter(name):
    request = ["greedy", "plain", "top_k", "top_p", "min_p"].index(name)
    settings = {key: values[request] for key, values in MIXED.items()}
    settings["seed"] = np.arange(8)
    logits = rows(8, 40, 64, seed=request)
    one, eight = (pick(logits, sampling(8, **settings), devices=d) for d in (1, 8))
    np.testing.assert_array_equal(one, eight)
    assert len(np.unique(one)) > 20


@pytest.mark.parametrize("devices", [1, 8])
def test_mixed_settings_in_one_batch(devices):
    """Each request gets what it gets alone, on one device."""
    logits = rows(8, 40, 64, seed=9)
    mixed = pick(logits, sampling(8, **MIXED), devices=devices)
    for b in range(8):
        alone = sampling(1, **{key: values[b] for key, values in MIXED.items()})
        np.testing.assert_array_equal(mixed[b], pick(logits[b : b + 1], alone)[0])


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_tokens_are_never_chosen(temperature, devices):
    """Four left of 64, whole shards of minus infinity, plain and filtered."""
    logits = np.full((3, 400, 64), -np.inf, np.float32)
    allowed = [2, 17, 18, 63]
    logits[..., allowed] = rows(3, 400, 4, scale=0.5)
    settings = sampling(
        3, temperature=temperature, top_k=[0, 3, 0], top_p=[1, 1, 0.9], seed=[1, 2, 3]
    )
    chosen = pick(logits, settings, devices=devices)
    assert sorted(np.unique(chosen).tolist()) == allowed


def test_temperature_divides_the_logits():
    logits = np.broadcast_to(rows(1, 1, 16, scale=1.0), (3, 4096, 16))
    temperatures = [0.25, 1.0, 4.0]
    chosen = pick(logits, sampling(3, temperature=temperatures, seed=[1, 2, 3]))
    for b, temperature in enumerate(temperatures):
        weights = np.exp(logits[b, 0].astype(np.float64) / temperature)
        counts = np.bincount(chosen[b], minlength=16)
        assert chi_square_p(counts, weights / weights.sum()) > LEAST_P


def test_choice_depends_on_seed_and_position_only():
    """One row of logits at many nodes: same position, same token."""
    logits = np.broadcast_to(rows(1, 1, 64), (2, 33, 64))
    depth = np.arange(33) % 8
    position = jnp.asarray(np.stack([100 + depth, 103 + depth]), jnp.int32)
    chosen = pick(logits, sampling(2, seed=7), position)
    by_position = {}
    for where, token in zip(np.ravel(position), np.ravel(chosen), strict=True):
        assert by_position.setdefault(int(where), token) == token
    assert len(set(by_position.values())) > 3
    # Another width of the tree, another batch, another seed.
    few = pick(logits[:1, :8], sampling(1, seed=7), position[:1, :8])
    np.testing.assert_array_equal(few[0], chosen[0, :8])
    other = pick(logits[:1, :8], sampling(1, seed=8), position[:1, :8])
    assert (other != few).any()


# --- log-probabilities of the draft


@functools.cache
def top_on(devices: int, count: int):
    mapped = jax.shard_map(
        functools.partial(top_log_probs, count=count),
        mesh=make_mesh(devices),
        in_specs=SPLIT,
        out_specs=WHOLE,
        check_vma=False,
    )
    return jax.jit(mapped)


def check_top(logits: np.ndarray, count: int, devices: int) -> None:
    value, ids = map(np.asarray, top_on(devices, count)(jnp.asarray(logits)))
    wide = logits.astype(np.float64)
    largest = wide.max(-1, keepdims=True)
    total = largest + np.log(np.exp(wide - largest).sum(-1, keepdims=True))
    # Stable, so the smaller id comes first.
    order = np.argsort(-wide, axis=-1, kind="stable")[..., :count]
    np.testing.assert_array_equal(ids, order)
    want = np.take_along_axis(wide - total, order, axis=-1)
    scale = np.abs(logits[np.isfinite(logits)]).max()
    np.testing.assert_allclose(value, want, rtol=0, atol=LOG_PROB_ERROR * scale)
    assert value.dtype == np.float32
    assert ids.dtype == np.int32


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("count", [1, 5, 8, 20, 64, 100])
def test_top_log_probs(count, devices):
    """8 tokens a shard on eight devices: up to more than a shard, than there are."""
    logits = rows(6, 7, 64, scale=3.0)
    # Without -0, which `top_k` puts behind 0.
    logits[1] = np.round(logits[1]) + np.float32(0)
    logits[2] = 0.25
    # The best all in one shard; all but one shard banned; a large offset.
    logits[3, :, 40:48] += 50
    logits[4, :, :56] = -np.inf
    logits[5] += 300
    for case in logits:
        check_top(case[None], count, devices)


def test_top_log_probs_of_a_thousand_tokens():
    logits = rows(2, 7, 1000, scale=4.0, seed=3)
    check_top(logits, 31, 8)
    check_top(logits, 31, 1)
