"""Both models without caches, steps or trees: whole texts, again and again.

What the research commands must agree with. Slow, and written from the formulas: the
target runs causally over a padded text, and the drafter's context is made anew from the
features of all tokens before the root.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from ddtree_jax.model.cache import commit_rows
from ddtree_jax.model.draft import context_rows, draft_hidden
from ddtree_jax.model.layers import head_logits
from ddtree_jax.model.params import DFlash, KimiK2, partition_specs
from ddtree_jax.research.models import Models
from ddtree_jax.spec import Params
from tests.support.models import PAGE_SIZE, make_forward, poisoned_cache

LENGTH = 80  # of every padded text


class Replay:
    """Plain answers of both models for a text; nothing is kept between calls."""

    def __init__(self, models: Models):
        self.models = models
        self._target = make_forward(models, models.draft_config.target_layer_ids)
        self._draft = _make_draft(models)

    def target(self, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Returns logits and features after each token."""
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(ids)] = ids
        pages = LENGTH // PAGE_SIZE
        out = self._target(
            poisoned_cache(self.models.config, pages),
            jnp.arange(pages, dtype=jnp.int32)[None],
            jnp.zeros(1, jnp.int32),
            jnp.asarray(padded),
        )
        return np.asarray(out.logits[0, : len(ids)]), np.asarray(out.features)

    def draft(self, ids: list[int], *, root: int) -> np.ndarray:
        """Returns the drafter's logits of the positions after `root`, `[D, V]`.

        Args:
          ids: The tokens before the root.
        """
        _, features = self.target([*ids, root])
        return np.asarray(
            self._draft(
                self.models.params,
                jnp.asarray(features),
                jnp.asarray([len(ids)], jnp.int32),
                jnp.asarray([root], jnp.int32),
            )
        )[0]


def _make_draft(models: Models):
    dc = models.draft_config

    def body(params: Params, features, context_len, root):
        positions = jnp.arange(LENGTH, dtype=jnp.int32)[None]
        rows = context_rows(params.draft, dc, features, positions)
        table = jnp.arange(LENGTH // PAGE_SIZE, dtype=jnp.int32)[None]
        pages = (dc.num_hidden_layers, table.size, PAGE_SIZE)
        empty = jax.tree.map(lambda r: jnp.full((*pages, *r.shape[3:]), jnp.nan), rows)
        # Only what is before the root: the root has no feature yet.
        start = jnp.zeros(1, jnp.int32)
        cache = commit_rows(empty, rows, table, start, context_len)
        hidden = draft_hidden(
            params.draft,
            dc,
            params.target.embed[...],
            root_token=root,
            cache=cache,
            page_table=table,
            context_len=context_len,
        )
        return head_logits(params.target.head[...], hidden)

    params = Params(partition_specs(KimiK2(models.config)), partition_specs(DFlash(dc)))
    mapped = jax.shard_map(
        body,
        mesh=models.mesh,
        in_specs=(params, P(), P(), P()),
        out_specs=P(None, None, "tensor"),
        check_vma=False,
    )
    return jax.jit(mapped)


def chain_dflash(
    replay: Replay, prompt: list[int], *, count: int, slot_0: int | None = None
) -> tuple[list[int], list[int]]:
    """Returns the greedy text of chain DFlash, and the tokens each round emitted.

    A round drafts the most probable token of each position, verifies root and drafts
    causally, keeps the drafts that the target would have chosen, and takes the
    target's choice after them as the next root.

    Args:
      count: Rounds go on until the text has as many tokens.
      slot_0: Given to the drafter in place of the root.
    """
    logits, _ = replay.target(prompt)
    text, emitted = [int(logits[-1].argmax())], []
    while len(text) < count:
        known = [*prompt, *text[:-1]]
        root = text[-1]
        drafted = replay.draft(known, root=root if slot_0 is None else slot_0)
        drafts = drafted.argmax(-1).tolist()
        logits, _ = replay.target([*known, root, *drafts])
        choices = logits[len(known) :].argmax(-1).tolist()
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == choices[accepted]:
            accepted += 1
        text += [*drafts[:accepted], choices[accepted]]
        emitted.append(accepted + 1)
    return text, emitted


@functools.cache
def prompts(vocab_size: int) -> list[list[int]]:
    """Returns random prompts; lengths around page and chunk borders are among them."""
    rng = np.random.default_rng(3)
    return [rng.integers(0, vocab_size, n).tolist() for n in (1, 15, 16, 30, 40)]
