"""The step as a whole: tree, plain and transformers' output are one and the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from ddtree_jax.mesh import make_mesh
from ddtree_jax.model.draft import context_rows
from ddtree_jax.model.params import DFlash, partition_specs
from ddtree_jax.spec import StepStatus, make_step
from tests.support.compare import assert_close
from tests.support.models import PAGE_SIZE, Decoder, run_in_chunks
from tests.support.random_model import random_tiny

BUDGETS = [0, 1, 7, 8, 31, 64]


@pytest.fixture(scope="module")
def guessable8():
    """A target of eight tokens, so that a tree often holds the right one."""
    return random_tiny(make_mesh(8), vocab_size=8)


@pytest.fixture(scope="module")
def guessable1():
    """The same on one device."""
    return random_tiny(make_mesh(1), vocab_size=8)


def prompts(tiny, lengths) -> list[np.ndarray]:
    """Returns random prompts; lengths around page borders are the interesting ones."""
    rng = np.random.default_rng(7)
    return [
        rng.integers(0, tiny.config.vocab_size, n).astype(np.int32) for n in lengths
    ]


def answers(tiny, *, num_nodes, count=40, lengths=(1, 16, 33, 50), slots=4, **sampling):
    """Returns `count` tokens of each prompt, and the drafted tokens accepted."""
    decoder = Decoder(tiny, num_nodes=num_nodes, slots=slots)
    first = {
        slot: decoder.start(slot, prompt, seed=100 + slot, **sampling)
        for slot, prompt in enumerate(prompts(tiny, lengths))
    }
    decoded, accepted = {s: [t] for s, t in first.items()}, 0
    while min(map(len, decoded.values())) < count:
        result = decoder.step()
        for slot, tokens in decoded.items():
            if len(tokens) >= count:
                continue
            assert result.status[slot] == StepStatus.OK
            new = result.tokens[slot, : result.num_tokens[slot]].tolist()
            accepted += len(new) - 1
            tokens += new
    return {slot: tokens[:count] for slot, tokens in decoded.items()}, accepted


@pytest.mark.parametrize("budget", BUDGETS)
def test_greedy_equals_transformers(tiny8, golden, budget):
    data = golden("greedy")
    decoder = Decoder(tiny8, num_nodes=1 + budget, slots=8)
    first = {slot: decoder.start(slot, data[f"prompt_{slot}"]) for slot in range(8)}
    decoded = decoder.decode(first, 48)
    for slot, tokens in decoded.items():
        assert tokens == data[f"tokens_{slot}"].tolist(), f"prompt {slot}"


@pytest.fixture(scope="module")
def plain(guessable8):
    """Greedy and sampled answers without speculation."""
    return {
        temperature: answers(guessable8, num_nodes=1, temperature=temperature)[0]
        for temperature in (0.0, 1.0)
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("budget", BUDGETS[1:])
def test_every_budget_gives_the_plain_answer(guessable8, plain, budget, temperature):
    got, accepted = answers(guessable8, num_nodes=1 + budget, temperature=temperature)
    assert got == plain[temperature]
    # The budget must have been used, or this proves nothing.
    assert accepted >= {1: 5, 7: 15, 8: 20, 31: 30, 64: 40}[budget]


def test_answer_does_not_depend_on_the_batch(guessable8, plain):
    alone = Decoder(guessable8, num_nodes=9, slots=2)
    lengths = (1, 16, 33, 50)
    for slot, prompt in enumerate(prompts(guessable8, lengths)):
        # The other slot is idle, and this one is used again and again.
        first = alone.start(1, prompt, seed=100 + slot, temperature=1.0)
        assert alone.decode({1: first}, 40)[1] == plain[1.0][slot]


def test_answer_does_not_depend_on_the_mesh(guessable1, plain):
    for temperature, want in plain.items():
        got, _ = answers(guessable1, num_nodes=9, temperature=temperature)
        assert got == want


def test_seeds_matter(guessable8, plain):
    assert plain[1.0] != plain[0.0]
    decoder = Decoder(guessable8, num_nodes=9)
    prompt = prompts(guessable8, (50,))[0]
    first = {
        slot: decoder.start(slot, prompt, seed=slot, temperature=1.0)
        for slot in range(4)
    }
    texts = {tuple(tokens) for tokens in decoder.decode(first, 20).values()}
    assert len(texts) == 4


def test_budget_of_a_slot_is_dynamic(guessable8, plain):
    decoder = Decoder(guessable8, num_nodes=65)
    first = {
        slot: decoder.start(slot, prompt, tree_budget=budget)
        for slot, (prompt, budget) in enumerate(
            zip(prompts(guessable8, (1, 16, 33, 50)), (0, 1, 8, 64), strict=True)
        )
    }
    decoded = {slot: [token] for slot, token in first.items()}
    longest = [0] * 4
    while min(map(len, decoded.values())) < 40:
        result = decoder.step()
        for slot, tokens in decoded.items():
            longest[slot] = max(longest[slot], int(result.num_tokens[slot]))
            tokens += result.tokens[slot, : result.num_tokens[slot]].tolist()
    assert {s: t[:40] for s, t in decoded.items()} == plain[0.0]
    assert longest[0] == 1 and longest[1] <= 2 < longest[3]


def test_committed_pages_equal_those_of_sequential_decoding(guessable8):
    prompt = prompts(guessable8, (29,))[0]
    states = {}
    for num_nodes in (1, 65):
        decoder = Decoder(guessable8, num_nodes=num_nodes)
        answer = [decoder.start(2, prompt)]
        rows, crossed = len(prompt), False
        while rows < 60:
            result = decoder.step()
            count = int(result.num_tokens[2])
            crossed |= count > 1 and rows // PAGE_SIZE != (rows + count) // PAGE_SIZE
            answer += result.tokens[2, :count].tolist()
            rows += count
        assert int(decoder.state.context_len[2]) == rows
        states[num_nodes] = decoder.state, rows, answer, crossed
    assert states[65][3], "no accepted run crossed a page border"
    shared = min(state[1] for state in states.values())
    plain_state, tree_state = states[1][0], states[65][0]
    table = np.asarray(plain_state.page_table[2])
    for plain_pages, tree_pages in zip(
        jax.tree.leaves((plain_state.cache, plain_state.draft_cache)),
        jax.tree.leaves((tree_state.cache, tree_state.draft_cache)),
        strict=True,
    ):
        plain_pages, tree_pages = np.asarray(plain_pages), np.asarray(tree_pages)
        for token in range(shared):
            page, row = table[token // PAGE_SIZE], token % PAGE_SIZE
            np.testing.assert_allclose(
                tree_pages[:, page, row], plain_pages[:, page, row], atol=2e-5
            )
    # Whatever is not a committed row still is what it was: NaN.
    for state, rows, *_ in states.values():
        written = np.zeros((decoder.num_pages, PAGE_SIZE), bool)
        for token in range(rows):
            written[table[token // PAGE_SIZE], token % PAGE_SIZE] = True
        for pages in jax.tree.leaves((state.cache, state.draft_cache)):
            nan = np.isnan(np.asarray(pages)).reshape(*pages.shape[:3], -1)
            assert (nan.all(-1) == ~written[None]).all()
            assert (nan.any(-1) == ~written[None]).all()


def test_draft_rows_are_those_of_the_features_at_their_positions(guessable1):
    tiny, draft = guessable1, guessable1.params.draft
    prompt = prompts(tiny, (29,))[0]
    decoder = Decoder(tiny, num_nodes=65)
    tokens = [*prompt.tolist(), decoder.start(2, prompt)]
    while len(tokens) < 60:
        result = decoder.step()
        tokens += result.tokens[2, : result.num_tokens[2]].tolist()
    committed = int(decoder.state.context_len[2])
    layers = tiny.draft_config.target_layer_ids
    ids = np.asarray(tokens[:committed], np.int32)
    features = run_in_chunks(tiny, ids, [committed], feature_layers=layers).features

    def rows(draft, features):
        positions = jnp.arange(committed)[None]
        return context_rows(draft, tiny.draft_config, features, positions)

    specs = (partition_specs(DFlash(tiny.draft_config)), PartitionSpec())
    want = jax.jit(
        jax.shard_map(
            rows,
            mesh=tiny.mesh,
            in_specs=specs,
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )(draft, jnp.asarray(features))
    table = np.asarray(decoder.state.page_table[2])
    for got, expected in zip(decoder.state.draft_cache, want, strict=True):
        paged = np.asarray(got)[:, table[: -(-committed // PAGE_SIZE)]]
        flat = paged.reshape(paged.shape[0], -1, *paged.shape[3:])[:, :committed]
        assert_close("golden draft", flat, np.asarray(expected)[:, 0])


@pytest.mark.parametrize("room", [1, 2, 3, 5, 8])
def test_no_token_is_committed_past_the_room(guessable8, plain, room):
    decoder = Decoder(guessable8, num_nodes=65)
    prompt = prompts(guessable8, (1, 16, 33, 50))[2]
    first = decoder.start(0, prompt, max_rows=len(prompt) + room)
    answer = [first]
    while len(answer) < 1 + room:
        result = decoder.step()
        assert result.status[0] == StepStatus.OK
        answer += result.tokens[0, : result.num_tokens[0]].tolist()
    assert answer == plain[0.0][2][: 1 + room]
    assert int(decoder.state.context_len[0]) == len(prompt) + room
    result = decoder.step()
    assert (result.status[0], result.num_tokens[0]) == (StepStatus.NO_ROOM, 0)
    assert int(decoder.state.context_len[0]) == len(prompt) + room


def test_nan_in_a_committed_row_surfaces_in_that_request_alone(guessable8, plain):
    decoder = Decoder(guessable8, num_nodes=9)
    first = {
        slot: decoder.start(slot, prompt)
        for slot, prompt in enumerate(prompts(guessable8, (1, 16, 33, 50)))
    }
    page = int(decoder.state.page_table[2, 1])
    latent = decoder.state.cache.latent.at[1, page, 3, 5].set(jnp.nan)
    cache = decoder.state.cache._replace(latent=latent)
    decoder.state = decoder.state._replace(cache=cache)
    before = int(decoder.state.context_len[2])
    result = decoder.step()
    assert result.status.tolist() == [0, 0, StepStatus.NON_FINITE, 0]
    assert result.num_tokens[2] == 0
    assert int(decoder.state.context_len[2]) == before
    for slot in (0, 1, 3):
        new = result.tokens[slot, : result.num_tokens[slot]].tolist()
        assert [first[slot], *new] == plain[0.0][slot][: 1 + len(new)]


def test_nan_in_a_draft_row_is_told_from_one_of_the_target(guessable8):
    decoder = Decoder(guessable8, num_nodes=9)
    for slot, prompt in enumerate(prompts(guessable8, (1, 16, 33, 50))):
        decoder.start(slot, prompt, tree_budget=0 if slot == 1 else 8)
    for slot in (1, 2):
        page = int(decoder.state.page_table[slot, 0])
        key = decoder.state.draft_cache.key.at[0, page, 0, 0, 0].set(jnp.nan)
        draft_cache = decoder.state.draft_cache._replace(key=key)
        decoder.state = decoder.state._replace(draft_cache=draft_cache)
    result = decoder.step()
    # Slot 1 drafts nothing that counts, so its drafter's fault is none.
    assert result.status.tolist() == [0, 0, StepStatus.DRAFT_NON_FINITE, 0]
    assert result.num_tokens[2] == 0 and result.num_tokens[1] == 1


def test_idle_slots_are_left_alone(guessable8):
    decoder = Decoder(guessable8, num_nodes=9)
    decoder.start(1, prompts(guessable8, (16,))[0])
    result = decoder.step()
    idle = [0, 2, 3]
    assert (result.status[idle] == StepStatus.IDLE).all()
    assert (result.num_tokens[idle] == 0).all()
    assert (np.asarray(decoder.state.context_len)[idle] == 0).all()


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_prefill_chunks_do_not_matter(guessable8, plain, chunk):
    decoder = Decoder(guessable8, num_nodes=9, chunk=chunk)
    first = decoder.start(0, prompts(guessable8, (1, 16, 33, 50))[2])
    assert decoder.decode({0: first}, 12)[0] == plain[0.0][2][:12]


def test_first_token_has_the_noise_of_its_position(guessable8):
    prompt = prompts(guessable8, (33,))[0]
    firsts = []
    for chunk in (7, 32, 64):
        decoder = Decoder(guessable8, num_nodes=9, chunk=chunk)
        # So hot that the noise alone decides.
        firsts.append(
            [decoder.start(0, prompt, seed=s, temperature=50.0) for s in range(12)]
        )
    assert firsts[0] == firsts[1] == firsts[2]
    assert len(set(firsts[0])) > 3


def test_a_tree_needs_a_drafter(guessable8):
    with pytest.raises(ValueError, match="num_nodes = 9 needs a drafter"):
        make_step(guessable8.config, None, guessable8.mesh, num_nodes=9)
