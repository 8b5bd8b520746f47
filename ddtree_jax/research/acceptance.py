"""Owns the measurement of acceptance lengths over tree shapes and temperatures."""

from collections.abc import Callable, Sequence
from typing import Any

from ddtree_jax.errors import EngineError
from ddtree_jax.research.decode import Answer, Decoder
from ddtree_jax.research.shapes import Shape, step_of
from ddtree_jax.research.statistics import bootstrap_interval, distinct_ngrams

DEFINITION = (
    "acceptance_length = tokens emitted per decoding step, bonus token included "
    "(1 is plain decoding); the token that prefill yields belongs to no step, the last "
    "step counts whole, and a step with a stop token counts up to it"
)

type Row = dict[str, Any]


def measure(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    shapes: Sequence[Shape],
    temperatures: Sequence[float],
    max_tokens: int,
    case: dict[str, Any],
    mask_slot_0: bool = False,
    on_row: Callable[[Row], None] | None = None,
    on_answer: Callable[[], None] | None = None,
) -> list[Row]:
    """Returns one row a temperature and shape, on the same prompts and seeds.

    Args:
      case: What all rows have in common.
      on_row: Called with each row when it is known.
      on_answer: Called after each prompt of each row.

    Raises:
      EngineError: In float32 a shape gave another greedy text than the first one.
    """
    rows: list[Row] = []
    steps = {s: step_of(decoder.models, s, mask_slot_0=mask_slot_0) for s in shapes}
    for temperature in temperatures:
        reference = None
        for shape, step in steps.items():
            answers = decoder.answers(
                step,
                prompts,
                budget=shape.budget,
                temperature=temperature,
                max_tokens=max_tokens,
                on_answer=on_answer,
            )
            texts = [a.tokens[:max_tokens] for a in answers]
            reference = texts if reference is None else reference
            different = _differing(texts, reference)
            if different and temperature == 0 and decoder.models.dtype == "float32":
                raise EngineError(_refusal(shape, shapes[0], texts, reference))
            named = {
                **case,
                "temperature": temperature,
                "shape": shape.name,
                "budget": shape.budget,
            }
            rows.append({"case": named, **figures(answers, texts)})
            rows[-1]["diverged"] = len(different) / len(texts)
            if on_row is not None:
                on_row(rows[-1])
    return rows


def figures(answers: Sequence[Answer], texts: Sequence[Sequence[int]]) -> Row:
    """Returns the figures of a row; see DEFINITION."""
    tokens = [sum(a.emitted) for a in answers]
    steps = [len(a.emitted) for a in answers]
    if not sum(steps):
        raise EngineError("no decoding step was needed: every text ended in prefill")
    low, high = bootstrap_interval(tokens, steps)
    return {
        "acceptance_length": sum(tokens) / sum(steps),
        "ci_low": low,
        "ci_high": high,
        "distinct_4grams": distinct_ngrams(texts),
        "steps": sum(steps),
        "tokens": sum(tokens),
    }


def _differing(texts: list[list[int]], reference: list[list[int]]) -> list[int]:
    pairs = zip(texts, reference, strict=True)
    return [i for i, (text, other) in enumerate(pairs) if text != other]


def _refusal(shape: Shape, first: Shape, texts, reference) -> str:
    prompt = _differing(texts, reference)[0]
    pair = zip(texts[prompt], reference[prompt], strict=False)
    place = next(
        (i for i, (a, b) in enumerate(pair) if a != b),
        min(len(texts[prompt]), len(reference[prompt])),
    )
    return (
        f"greedy text of {shape.name} {shape.budget} differs from that of "
        f"{first.name} {first.budget} at prompt {prompt}, token {place}: nothing is "
        "reported, since decoding in float32 must not depend on the tree"
    )
