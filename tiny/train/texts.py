"""Owns the texts that the drafter learns from: the target's own, as tokens."""

import itertools
import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.config import ModelConfig
from tiny.train.generate import WritingPlan, distinct_share, make_generator
from tiny.train.pace import Log
from tiny.train.parameters import Params

# Least and most tokens of a prompt.
PROMPTS = (32, 192)
_CHANCE = (8, 64)
_HELD_OUT_TEXTS = 256


class Style(NamedTuple):
    """How texts are drawn.

    Attributes:
      temperatures: Of which each text has one.
      shares: Probabilities of those.
      chance: Share of the texts whose prompt the target lengthens at temperature 1,
        so that greedy text follows on words that it has not learnt by heart.
      least_distinct: Share of distinct runs of eight tokens below which a text is
        one loop, and is dropped.
    """

    temperatures: tuple[float, ...]
    shares: tuple[float, ...]
    chance: float = 0.0
    least_distinct: float = 0.0

    def plan(self, rng: np.random.Generator, batch: int) -> WritingPlan:
        """Returns lengths and temperatures of a batch."""
        prompts = rng.integers(*PROMPTS, size=batch)
        lengthened = (rng.random(batch) < self.chance) * rng.integers(*_CHANCE, batch)
        temperatures = rng.choice(self.temperatures, batch, p=self.shares)
        return WritingPlan(
            jnp.asarray(prompts, jnp.int32),
            jnp.asarray(prompts + lengthened, jnp.int32),
            jnp.asarray(temperatures, jnp.float32),
        )


# Greedy text, and text with some and with all of the target's chance.
_MIXED = Style((0.0, 0.7, 1.0), (0.65, 0.15, 0.2), chance=0.5, least_distinct=0.25)


def load_texts(
    c: ModelConfig,
    target: Params,
    data: dict[str, np.ndarray],
    out: Path,
    *,
    length: int,
    seconds: float,
    batch: int,
) -> dict[str, np.ndarray]:
    """Returns the target's texts by name, written now if no earlier command did.

    `train` follows training texts and tests; `greedy` and `chance` (temperature 1)
    follow held-out texts.
    """
    path = out / "texts.npz"
    if path.is_file():
        with np.load(path) as stored:
            return dict(stored)
    log = Log(out / "log.jsonl")
    held_out = min(_HELD_OUT_TEXTS, batch)
    # Half of the prompts are known by heart, as some of a user's are.
    sources = [data["train"], data["prompts"]]
    greedy, chance = Style((0.0,), (1.0,)), Style((1.0,), (1.0,))
    kinds = {
        "train": (sources, seconds, 2**62, _MIXED, 0),
        "greedy": ([data["heldout"]], 1e9, held_out, greedy, 1),
        "chance": ([data["heldout"]], 1e9, held_out, chance, 2),
    }
    texts = {
        name: make_texts(
            c,
            target,
            streams,
            length=length,
            batch=batch,
            seconds=time_limit,
            most=most,
            style=style,
            seed=seed,
            log=log,
        )
        for name, (streams, time_limit, most, style, seed) in kinds.items()
    }
    out.mkdir(parents=True, exist_ok=True)
    np.savez(path, allow_pickle=False, **texts)
    return texts


def make_texts(
    c: ModelConfig,
    target: Params,
    streams: list[np.ndarray],
    *,
    length: int,
    batch: int,
    seconds: float,
    most: int,
    style: Style,
    seed: int,
    log: Log,
) -> np.ndarray:
    """Returns texts `[n, length]` that the target wrote after prompts.

    It stops after so many seconds, or at `most` texts.

    Args:
      streams: Tokens from which prompts are cut, in turn.
    """
    generate = make_generator(c, length, end=c.eos_token_ids[0])
    rng = np.random.default_rng(seed)
    texts: list[np.ndarray] = []
    began, count, dropped = time.monotonic(), 0, 0
    for stream in itertools.cycle(streams):
        offsets = rng.integers(len(stream) - length, size=batch)
        given = stream[offsets[:, None] + np.arange(length)[None]].astype(np.int32)
        key = jax.random.key(int(rng.integers(2**31)))
        written = generate(target, jnp.asarray(given), style.plan(rng, batch), key)
        good = np.asarray(distinct_share(written, 8) >= style.least_distinct)
        texts.append(np.asarray(written)[good].astype(np.uint16))
        count += int(good.sum())
        dropped += int((~good).sum())
        log.write(texts=count, loops_dropped=dropped, seconds=time.monotonic() - began)
        if count >= most or time.monotonic() - began >= seconds:
            break
    if not count:
        raise ValueError("every text was one loop; is the target trained?")
    return np.concatenate(texts)[:most]
