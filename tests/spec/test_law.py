"""The law of the output at temperature 1, and that no shape of the step changes it.

All slots continue one page of prompt after one root token, each with a seed of its
own. The exact law of three tokens comes from plain forward passes.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from ddtree_jax.mesh import make_mesh
from ddtree_jax.spec import (
    StepStatus,
    abstract_state,
    init_state,
    make_prefill,
    make_step,
    sampling,
)
from tests.spec.statistics import chi_square_p
from tests.support.models import (
    PAGE_SIZE,
    Tiny,
    make_forward,
    poison,
    poisoned_cache,
)
from tests.support.random_model import random_tiny

VOCAB = 8
# Chosen so that half of the steps accept drafts, and 64 slots differ in 27 triples.
PROMPT = np.random.default_rng(23).integers(0, VOCAB, PAGE_SIZE).astype(np.int32)
ROOT = 0
TOKENS = 3
LEAST_P = 1e-4
REJECTED = 1e-10


@functools.cache
def tiny(devices: int) -> Tiny:
    return random_tiny(make_mesh(devices), vocab_size=VOCAB)


@functools.cache
def _prefill(devices: int):
    return make_prefill(
        tiny(devices).config, tiny(devices).draft_config, tiny(devices).mesh
    )


class Sampler:
    """Slots that share the page of the prompt; each writes to a page of its own."""

    def __init__(self, devices: int, num_nodes: int, slots: int):
        self.tiny, self.slots, self.num_nodes = tiny(devices), slots, num_nodes
        models = self.tiny.config, self.tiny.draft_config, self.tiny.mesh
        self.step = make_step(*models, num_nodes=num_nodes)
        self.everywhere = NamedSharding(self.tiny.mesh, PartitionSpec())
        abstract = abstract_state(
            *models,
            slots=slots,
            pages_per_slot=2,
            num_pages=slots + 1,
            page_size=PAGE_SIZE,
            dtype=jnp.float32,
        )
        own = 1 + np.arange(slots, dtype=np.int32)
        pages = {
            "page_table": np.stack([np.zeros_like(own), own], axis=1),
            "max_context_len": np.full(slots, 2 * PAGE_SIZE, np.int32),
        }
        self.state = poison(init_state(abstract))._replace(
            **jax.device_put(pages, self.everywhere)
        )
        self.state, result = _prefill(devices)(
            self.tiny.params,
            self.state,
            np.int32(slots - 1),
            PROMPT,
            np.int32(PAGE_SIZE),
            np.bool_(True),
        )
        assert result.status.tolist() == [StepStatus.OK]

    def sample(self, seeds, count: int = TOKENS) -> tuple[np.ndarray, np.ndarray]:
        """Returns the first tokens `[slots, count]`, and how many came in steps."""
        slots = self.slots
        start = {
            "context_len": np.full(slots, PAGE_SIZE, np.int32),
            "root_token": np.full(slots, ROOT, np.int32),
            "tree_budget": np.full(slots, self.num_nodes - 1, np.int32),
            "active": np.ones(slots, bool),
            "sampling": sampling.Sampling(
                temperature=np.ones(slots, np.float32),
                top_k=np.zeros(slots, np.int32),
                top_p=np.ones(slots, np.float32),
                min_p=np.zeros(slots, np.float32),
                seed=np.asarray(seeds, np.uint32),
            ),
        }
        self.state = self.state._replace(**jax.device_put(start, self.everywhere))
        answers: list[list[int]] = [[] for _ in range(slots)]
        steps = []
        while min(map(len, answers)) < count:
            self.state, result = self.step(self.tiny.params, self.state)
            result = jax.device_get(result)
            for answer, new, n, status in zip(answers, *result, strict=True):
                # Whoever waits for the others may fill its page meanwhile.
                full = len(answer) == PAGE_SIZE
                assert status == (StepStatus.NO_ROOM if full else StepStatus.OK)
                answer += new[:n].tolist()
            steps.append(result.num_tokens)
        return np.asarray([a[:count] for a in answers]), np.concatenate(steps)

    def counts(self, rounds: int, *, first_seed: int = 0):
        """Returns how often each triple came, and the tokens of every step."""
        counts, steps = np.zeros((VOCAB,) * TOKENS, np.int64), []
        for r in range(rounds):
            seeds = first_seed + r * self.slots + np.arange(self.slots)
            tokens, num_tokens = self.sample(seeds)
            np.add.at(counts, tuple(tokens.T), 1)
            steps.append(num_tokens)
        return counts, np.concatenate(steps)


@functools.cache
def sampler(num_nodes: int, slots: int = 256, devices: int = 1) -> Sampler:
    return Sampler(devices, num_nodes, slots)


@functools.cache
def exact_law() -> np.ndarray:
    """Returns the probability of each triple after the root, from plain passes."""
    run = make_forward(tiny(1), ())
    cache = poisoned_cache(tiny(1).config, 2)
    table, start = jnp.asarray([[1, 0]], jnp.int32), jnp.zeros(1, jnp.int32)
    law = np.zeros((VOCAB,) * TOKENS)
    for first, second in itertools.product(range(VOCAB), repeat=2):
        ids = jnp.asarray([[*PROMPT, ROOT, first, second]], jnp.int32)
        logits = np.asarray(run(cache, table, start, ids).logits, np.float64)
        weights = np.exp(logits[0, PAGE_SIZE:])
        after = weights / weights.sum(-1, keepdims=True)
        law[first, second] = after[0, first] * after[1, second] * after[2]
    assert law.sum() == pytest.approx(1)
    return law


def p_values(counts: np.ndarray) -> dict[str, float]:
    """Returns the p-value of the joint law, and of each token's own."""
    law = exact_law()
    p = {"joint": chi_square_p(counts, law)}
    for token in range(TOKENS):
        others = tuple(t for t in range(TOKENS) if t != token)
        p[f"token {token}"] = chi_square_p(counts.sum(others), law.sum(others))
    return p


def test_chi_square_knows_its_table():
    """The 5 % points of the distribution for 1, 10 and 100 degrees of freedom."""
    for freedom, statistic in [(1, 3.841), (10, 18.307), (100, 124.342)]:
        cells, each = freedom + 1, 10_000
        off = np.sqrt(statistic * each / 2)
        counts = np.full(cells, float(each))
        counts[0] += off
        counts[1] -= off
        assert chi_square_p(counts, np.full(cells, 1 / cells)) == pytest.approx(
            0.05, rel=1e-3
        )
    assert chi_square_p(np.asarray([5, 5, 1]), np.asarray([0.5, 0.5, 0])) == 0


@pytest.mark.parametrize(("num_nodes", "rounds"), [(9, 80), (1, 40)])
def test_three_tokens_follow_the_law_of_the_target(num_nodes, rounds):
    counts, num_tokens = sampler(num_nodes).counts(rounds)
    assert counts.sum() == rounds * 256
    p = p_values(counts)
    assert min(p.values()) > LEAST_P, p
    accepted = (num_tokens > 1).mean()
    assert accepted > 0.3 if num_nodes > 1 else accepted == 0


def test_eight_devices_follow_the_law_too():
    """And yield what one device yields, token for token."""
    eight = sampler(9, 128, 8)
    counts, num_tokens = eight.counts(8)
    p = p_values(counts)
    assert min(p.values()) > LEAST_P, p
    assert (num_tokens > 1).mean() > 0.3
    got, _ = eight.sample(np.arange(128), 8)
    want, _ = sampler(9).sample(np.arange(256), 8)
    np.testing.assert_array_equal(got, want[:128])


@pytest.mark.parametrize(("num_nodes", "slots"), [(9, 256), (2, 16), (33, 16)])
def test_trees_and_batches_do_not_change_the_output(num_nodes, slots):
    """Same seeds, same tokens: 9 in a row, as plain decoding of 256 slots has them."""
    plain, _ = sampler(1).sample(np.arange(256), 9)
    assert len(np.unique(plain, axis=0)) > 100
    # In another order, so that neither slot nor neighbours matter.
    seeds = np.random.default_rng(0).permutation(256)[:slots]
    tokens, num_tokens = sampler(num_nodes, slots).sample(seeds, 9)
    np.testing.assert_array_equal(tokens, plain[seeds])
    assert num_tokens.max() > 1


# --- these tests can fail

SAME_AT_EVERY_POSITION, BY_NODE = 0, 2**31


def test_wrong_noise_is_noticed(monkeypatch):
    """Noise that ignores the position, or is keyed by node, ties the tokens.

    Both in one compiled step: the highest bit of the seed says which.
    """
    right = sampling.gumbel_noise

    def wrong(seed, position, token_ids):
        nodes = jnp.broadcast_to(jnp.arange(position.shape[1])[None], position.shape)
        by_node = (seed >= jnp.uint32(BY_NODE))[:, None]
        return right(seed, jnp.where(by_node, nodes, 0), token_ids)

    monkeypatch.setattr(sampling, "gumbel_noise", wrong)
    tied = Sampler(1, 9, 256)
    for first_seed in (SAME_AT_EVERY_POSITION, BY_NODE):
        counts, _ = tied.counts(6, first_seed=first_seed)
        p = p_values(counts)
        assert p["joint"] < REJECTED, (first_seed, p)
        # The first token alone does not show it.
        assert p["token 0"] > LEAST_P, (first_seed, p)
