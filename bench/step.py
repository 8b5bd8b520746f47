"""Owns the timing of the whole step: plain decoding beside trees."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np

from bench.timing import time_call
from ddtree_jax.research.decode import Decoder
from ddtree_jax.research.models import DtypeName, load_models
from ddtree_jax.research.shapes import Shape, step_of


@contextmanager
def random_model() -> Iterator[Path]:
    """Yields a small random checkpoint, converted, for as long as it is used."""
    from convert.hf_source import open_hf
    from convert.ours_target import convert_to_ours
    from tiny.random_checkpoint import write_checkpoint

    with tempfile.TemporaryDirectory() as scratch:
        source, converted = Path(scratch, "source"), Path(scratch, "random")
        write_checkpoint(source, seed=0)
        convert_to_ours(open_hf(source), converted, draft=open_hf(source / "draft"))
        yield converted


def measure(
    model: Path,
    *,
    devices: int | None,
    dtype: DtypeName,
    batch: int,
    context: int,
    budgets: Sequence[int],
    repeats: int,
) -> list[dict]:
    """Returns one row a budget; 0 is plain decoding.

    The context grows by what the timed steps accept, so `context` is where it starts.
    """
    models = load_models(model, devices=devices, dtype=dtype)
    horizon = models.draft_config.draft_horizon
    warm_up = 3
    rows_needed = context + (warm_up + repeats) * (horizon + 1) + 1
    decoder = Decoder(models, slots=batch, max_rows=rows_needed)
    rng = np.random.default_rng(0)
    prompts = rng.integers(0, models.config.vocab_size, (batch, context)).tolist()
    rows = []
    for budget in budgets:
        step = step_of(models, Shape("ddtree" if budget else "plain", budget))
        for slot, prompt in enumerate(prompts):
            decoder.start(slot, prompt, budget=budget, temperature=0.0, seed=slot)

        def call(step=step):
            decoder.state, result = step(models.params, decoder.state)
            return result

        timing = time_call(call, warm_up=warm_up, repeats=repeats)
        case = {
            "rank_of": models.mesh.size,
            "batch": batch,
            "nodes": 1 + budget,
            "context": context,
            "routing": "model",
        }
        rows.append({"case": case, **timing._asdict()})
        jax.block_until_ready(decoder.state)
    return rows
