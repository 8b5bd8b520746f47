"""Owns a check of the weights as a whole: how well they predict a bundled text.

A tensor that is swapped, scaled or rotated wrongly leaves every header right, and
the model talks nonsense. What a text compressor needs is the measure: a language
model that needs more bits than zlib has wrong weights or a wrong configuration.
"""

import base64
import binascii
import math
import zlib
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tiktoken
from jax.sharding import PartitionSpec as P

from convert.plan import Plan
from ddtree_jax.config import ModelConfig
from ddtree_jax.errors import CheckpointError
from ddtree_jax.mesh import make_mesh
from ddtree_jax.model.cache import abstract_latent_cache
from ddtree_jax.model.layers import head_logits
from ddtree_jax.model.params import (
    KimiK2,
    map_parameters,
    partition_specs,
    with_shardings,
)
from ddtree_jax.model.transformer import forward

TEXT = Path(__file__).with_name("smoke_text.txt")
RANKS = "tiktoken.model"
_MAX_TOKENS = 512  # a vocabulary of bytes alone makes thousands of the text

# Kimi's split of a text into words, as far as ASCII goes.
_LEAD = r"[^\r\nA-Za-z0-9]?"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_ASCII_PATTERN = "|".join(
    (
        f"{_LEAD}[A-Z]*[a-z]+{_CONTRACTION}",
        f"{_LEAD}[A-Z]+[a-z]*{_CONTRACTION}",
        "[0-9]{1,3}",
        r" ?[^\sA-Za-z0-9]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)


class Score(NamedTuple):
    """How well a model predicts the text, its first token apart.

    Attributes:
      bits_per_byte: Of the model.
      zlib_bits_per_byte: What zlib needs for the whole text.
    """

    tokens: int
    bits_per_byte: float
    zlib_bits_per_byte: float


def score(plan: Plan, config: ModelConfig, ranks: Path) -> Score:
    """Returns how well the target of `plan` predicts the bundled text, in float32.

    Args:
      ranks: The checkpoint's tiktoken.model.

    Raises:
      CheckpointError: A tensor or `ranks` cannot be read.
    """
    encoding = _read_encoding(ranks)
    tokens = encoding.encode_ordinary(TEXT.read_text(encoding="ascii"))[:_MAX_TOKENS]
    if max(tokens) >= config.vocab_size:
        raise CheckpointError(
            f"{ranks}: token {max(tokens)}; expected less than vocab_size, "
            f"{config.vocab_size}"
        )
    logprobs = _log_probabilities(_load(plan, config), config, np.asarray(tokens))
    text = encoding.decode_bytes(tokens)
    predicted = len(text) - len(encoding.decode_bytes(tokens[:1]))
    return Score(
        tokens=len(tokens),
        bits_per_byte=-float(logprobs.sum()) / math.log(2) / predicted,
        zlib_bits_per_byte=8 * len(zlib.compress(text, 9)) / len(text),
    )


def _read_encoding(path: Path) -> tiktoken.Encoding:
    try:
        pairs = [
            line.split() for line in path.read_bytes().splitlines() if line.strip()
        ]
        ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error):
        raise CheckpointError(
            f"{path} is no list of tokens; expected a base64 token and its rank a line"
        ) from None
    missing = [b for b in range(256) if bytes([b]) not in ranks]
    if missing or sorted(ranks.values()) != list(range(len(ranks))):
        raise CheckpointError(
            f"{path} has {len(ranks)} tokens; expected all bytes and ranks unbroken"
        )
    return tiktoken.Encoding(
        path.parent.name,
        pat_str=_ASCII_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={},
    )


def _load(plan: Plan, config: ModelConfig) -> KimiK2:
    """Returns the target's parameters, whole in memory."""
    leaves = {leaf.path: leaf for leaf in plan.params}

    def read(path: str, parameter) -> jax.Array:
        leaf = leaves[path]
        array = np.empty(leaf.shape, leaf.dtype)
        for block in leaf.slabs():
            leaf.read(block, array[block])
        return jnp.asarray(array).astype(parameter.get_value().dtype)

    abstract = with_shardings(KimiK2(config), make_mesh(1), dtype=jnp.float32)
    return map_parameters(read, abstract)


def _log_probabilities(
    model: KimiK2, config: ModelConfig, tokens: np.ndarray
) -> np.ndarray:
    """Returns the log-probability of each token but the first after those before it."""
    count = len(tokens)
    shapes = abstract_latent_cache(config, num_pages=1, page_size=1, dtype=jnp.float32)
    cache = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    # Bit j of row i: token j is token i or comes before it.
    chain = np.packbits(
        np.tri(count, -(-count // 32) * 32, dtype=bool), axis=1, bitorder="little"
    )

    def body(model: KimiK2, tokens: jax.Array) -> jax.Array:
        out = forward(
            model,
            config,
            tokens=tokens,
            positions=jnp.arange(count, dtype=jnp.int32)[None],
            ancestor_bits=jnp.asarray(chain.view(np.uint32))[None],
            used=jnp.ones(tokens.shape, bool),
            cache=cache,
            page_table=jnp.zeros((1, 1), jnp.int32),
            context_len=jnp.zeros(1, jnp.int32),
            feature_layers=(),
        )
        logits = head_logits(model.head[...], out.hidden[:, :-1])
        found = jax.nn.log_softmax(logits)
        return jnp.take_along_axis(found, tokens[:, 1:, None], axis=-1)[0, :, 0]

    mapped = jax.shard_map(
        body,
        mesh=make_mesh(1),
        in_specs=(partition_specs(KimiK2(config)), P()),
        out_specs=P(),
        check_vma=False,
    )
    return np.asarray(jax.jit(mapped)(model, jnp.asarray(tokens, jnp.int32)[None]))
