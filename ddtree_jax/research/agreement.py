"""Owns how far greedy text in bfloat16 agrees with that of the float32 reference.

Where two tokens are almost equally probable in float32, a near-tie, arithmetic of
eight bits must be expected to choose the other one. A difference anywhere else is rare
(a router with a near-tie of its own took another expert) or a fault of the engine.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from ddtree_jax.arrays import I32, Array
from ddtree_jax.errors import EngineError
from ddtree_jax.mesh import TENSOR
from ddtree_jax.model.cache import abstract_latent_cache
from ddtree_jax.model.layers import head_logits
from ddtree_jax.model.transformer import forward
from ddtree_jax.research.decode import Decoder
from ddtree_jax.research.models import Models
from ddtree_jax.research.shapes import Shape, step_of
from ddtree_jax.research.statistics import distinct_ngrams
from ddtree_jax.spec import Params, param_specs
from ddtree_jax.spec.tree import chain, chain_bits

# Rounding the residual stream to eight bits moves a logit by half a unit of the last
# place of the largest at most, and by less on average. Each layer does so twice, and
# independent errors add up in squares: one unit at most for a handful of layers, twice
# that between two logits. With the bundled model margins move by 0.36 units in the mean
# square, 99 % of them by less than 0.95.
NEAR_TIE_ULPS = 2

DEFINITION = (
    "margin = float32 logit of the reference's token less that of the tested one, in "
    "nats, at the first place where two greedy texts differ; later places are not "
    "compared; tokens = places compared; a near-tie is a margin of at most "
    f"{NEAR_TIE_ULPS} units of the last place, in bfloat16, of the logit that is "
    "largest in magnitude there; float32_margins = most probable less second most "
    "probable token at every place of the float32 texts"
)

# Steps and whole passes add in other orders: float32 logits of order 30 differ by
# some 1e-5. What differs by more is no rounding.
_REFERENCE_ERROR = 1e-3

type Row = dict[str, Any]
type Texts = list[list[int]]
type Score = Callable[[Sequence[int], Sequence[int]], np.ndarray]


class Difference(NamedTuple):
    """The first place where two texts of a prompt differ.

    Attributes:
      prompt: Index of the prompt.
      token: Index into the texts.
      margin: See DEFINITION.
      bound: Largest margin of a near-tie at this place.
    """

    prompt: int
    token: int
    margin: float
    bound: float

    @property
    def is_near_tie(self) -> bool:
        """Whether rounding explains the difference."""
        # A tested text that is compared with another one may have the better token.
        return abs(self.margin) <= self.bound


def measure(
    reference: Decoder,
    tested: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    budget: int,
    max_tokens: int,
    case: dict[str, Any],
    on_answer: Callable[[], None] | None = None,
) -> tuple[list[Row], dict[str, float]]:
    """Returns one row a pair of texts, and the margins of the reference's texts.

    Compared are trees with the reference, plain decoding with the reference, and
    trees with plain decoding, both tested.

    Args:
      reference: Decodes plainly, and its models say all margins.
      tested: Decodes plainly, and with trees of `budget`.
      case: What all rows have in common.
      on_answer: Called after each prompt: three times while decoding, and once more.

    Raises:
      EngineError: The reference did not choose what its own models say.
    """
    plain, tree = Shape("plain", 0), Shape("ddtree", budget)
    steps = {shape: step_of(tested.models, shape) for shape in (plain, tree)}

    def decode(decoder: Decoder, shape: Shape) -> Texts:
        with _precision(decoder.models):
            answers = decoder.answers(
                steps[shape],
                prompts,
                budget=shape.budget,
                temperature=0.0,
                max_tokens=max_tokens,
                on_answer=on_answer,
            )
        return [answer.tokens[:max_tokens] for answer in answers]

    truth, alone = decode(reference, plain), decode(tested, plain)
    drafted = decode(tested, tree)
    found, summary = _compare(
        reference, prompts, truth, alone, drafted, max_tokens, on_answer
    )
    exact, rounded = (f"{d.models.dtype} plain" for d in (reference, tested))
    trees = f"{tested.models.dtype} ddtree"
    pairs = [
        (exact, trees, budget, truth),
        (exact, rounded, 0, truth),
        (rounded, trees, budget, alone),
    ]
    rows = [
        _row({**case, "reference": a, "tested": b, "budget": size}, texts, differences)
        for (a, b, size, texts), differences in zip(pairs, found, strict=True)
    ]
    return rows, summary


def _compare(
    reference: Decoder,
    prompts: Sequence[Sequence[int]],
    truth: Texts,
    alone: Texts,
    drafted: Texts,
    max_tokens: int,
    on_answer: Callable[[], None] | None,
) -> tuple[list[list[Difference | None]], dict[str, float]]:
    """Returns the differences of the three pairs, and the margins of `truth`."""
    length = max(map(len, prompts)) + max_tokens
    score = make_score(reference.models, length=length, max_tokens=max_tokens)
    found: list[list[Difference | None]] = [[], [], []]
    margins, bounds = [], []
    for i, prompt in enumerate(prompts):
        with _precision(reference.models):
            logits, other = (score(prompt, texts[i]) for texts in (truth, alone))
        _check_reference(logits, truth[i], i)
        found[0].append(first_difference(i, truth[i], drafted[i], logits))
        found[1].append(first_difference(i, truth[i], alone[i], logits))
        found[2].append(first_difference(i, alone[i], drafted[i], other))
        second, first = np.partition(logits, -2, axis=-1)[:, -2:].T
        margins.append(first - second)
        bounds.append(near_tie_bound(logits))
        if on_answer is not None:
            on_answer()
    return found, _summary(np.concatenate(margins), np.concatenate(bounds), truth)


def make_score(models: Models, *, length: int, max_tokens: int) -> Score:
    """Returns `score(prompt, text)`: the logits that each token is chosen by, `[T, V]`.

    One forward pass over the whole, without steps, pages or trees.

    Args:
      length: Most tokens of prompt and text.
      max_tokens: Most tokens of a text.
    """
    c, _, params, mesh, *_ = models

    def body(params: Params, tokens: I32[Array, "1 N"], count: Array, start: Array):
        nodes = chain(tokens, count[None])
        pages = abstract_latent_cache(c, num_pages=1, page_size=64, dtype=models.dtype)
        out = forward(
            params.target,
            c,
            tokens=nodes.tokens,
            positions=nodes.depth,
            ancestor_bits=chain_bits(1, length),
            used=nodes.used,
            cache=jax.tree.map(lambda page: jnp.zeros(page.shape, page.dtype), pages),
            page_table=jnp.zeros((1, 1), jnp.int32),
            context_len=jnp.zeros(1, jnp.int32),
            feature_layers=(),
        )
        hidden = jax.lax.dynamic_slice_in_dim(out.hidden, start, max_tokens, axis=1)
        return head_logits(params.target.head[...], hidden)[0]

    everywhere = PartitionSpec()
    run = jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(param_specs(params), everywhere, everywhere, everywhere),
            out_specs=PartitionSpec(None, TENSOR),
            check_vma=False,
        )
    )

    def score(prompt: Sequence[int], text: Sequence[int]) -> np.ndarray:
        known = [*prompt, *text[:-1]]
        tokens = np.zeros((1, length), np.int32)
        tokens[0, : len(known)] = known
        # The logits after the last token of the prompt choose the first of the text.
        logits = run(params, tokens, np.int32(len(known)), np.int32(len(prompt) - 1))
        return np.asarray(logits)[: len(text)]

    return score


def first_difference(
    prompt: int, text: Sequence[int], tested: Sequence[int], logits: np.ndarray
) -> Difference | None:
    """Returns where `tested` leaves `text`, or None where it does not.

    Args:
      logits: What each token of `text` is chosen by.
    """
    if text == tested:
        return None
    # Neither is the beginning of the other: both end by length or by a stop token.
    pairs = enumerate(zip(text, tested, strict=False))
    token, (a, b) = next((i, pair) for i, pair in pairs if pair[0] != pair[1])
    margin = float(logits[token, a] - logits[token, b])
    return Difference(prompt, token, margin, float(near_tie_bound(logits[token])))


def near_tie_bound(logits: np.ndarray) -> np.ndarray:
    """Returns the largest margin of a near-tie for logits `[…, V]`; see DEFINITION."""
    _, exponent = np.frexp(np.abs(logits).max(-1))
    # frexp's mantissa is below 1; eight bits of it leave units of 2⁻⁸.
    return np.ldexp(float(NEAR_TIE_ULPS), exponent - 8)


def _precision(models: Models):
    """Returns the context of a dtype: float32 means it, bfloat16 is as served."""
    return jax.default_matmul_precision(
        "highest" if models.dtype == "float32" else None
    )


def _check_reference(logits: np.ndarray, text: Sequence[int], prompt: int) -> None:
    chosen = logits[np.arange(len(text)), text]
    gap = logits.max(-1) - chosen
    # NaN is beyond every bound.
    beyond = ~(gap <= _REFERENCE_ERROR)
    if beyond.any():
        token = int(beyond.argmax())
        raise EngineError(
            f"token {token} of the reference's text of prompt {prompt} is "
            f"{gap[token]:.3g} nats below the most probable one of a whole pass, "
            f"expected at most {_REFERENCE_ERROR}; nothing is reported"
        )


def _row(
    case: dict[str, Any], texts: Texts, differences: Sequence[Difference | None]
) -> Row:
    real = [d for d in differences if d is not None]
    tokens = sum(
        len(text) if d is None else d.token + 1
        for text, d in zip(texts, differences, strict=True)
    )
    margins = [abs(d.margin) for d in real]
    return {
        "case": case,
        "texts": len(texts),
        "diverged": len(real) / len(texts),
        "tokens": tokens,
        "per_1000_tokens": 1000 * len(real) / tokens,
        "margin_median": float(np.median(margins)) if real else None,
        "margin_max": max(margins) if real else None,
        "beyond_near_ties": sum(not d.is_near_tie for d in real),
        "differences": [d._asdict() for d in real],
    }


def _summary(margins: np.ndarray, bounds: np.ndarray, texts: Texts) -> dict[str, float]:
    p1, p5, median = np.percentile(margins, [1, 5, 50])
    return {
        "tokens": len(margins),
        "p1": float(p1),
        "p5": float(p5),
        "median": float(median),
        "bound_median": float(np.median(bounds)),
        "near_ties": float((margins <= bounds).mean()),
        "distinct_4grams": distinct_ngrams(texts),
    }
