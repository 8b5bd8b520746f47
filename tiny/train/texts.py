"""Owns the texts that the drafter learns from: the target's own, as tokens."""

import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from ddtree_jax.config import ModelConfig
from tiny.train.generate import distinct_share, make_generator
from tiny.train.pace import Log
from tiny.train.parameters import Params

# Least and most tokens of a prompt.
PROMPTS = (32, 192)
# Greedy text, and text with some and with all of the target's chance.
_TEMPERATURES, _SHARES = (0.0, 0.7, 1.0), (0.6, 0.15, 0.25)
# Below this share of distinct runs of eight a text is one loop.
_LEAST_DISTINCT = 0.25
_HELD_OUT_TEXTS = 256


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

    `train` follows training prompts; `greedy` and `chance` (temperature 1) follow
    held-out ones.
    """
    path = out / "texts.npz"
    if path.is_file():
        with np.load(path) as stored:
            return dict(stored)
    log = Log(out / "log.jsonl")
    held_out = min(_HELD_OUT_TEXTS, batch)
    kinds = {
        "train": ("train", seconds, 2**62, (_TEMPERATURES, _SHARES), 0),
        "greedy": ("heldout", 1e9, held_out, ((0.0,), (1.0,)), 1),
        "chance": ("heldout", 1e9, held_out, ((1.0,), (1.0,)), 2),
    }
    texts = {
        name: make_texts(
            c,
            target,
            data[source],
            length=length,
            batch=batch,
            seconds=time_limit,
            most=most,
            temperatures=temperatures,
            seed=seed,
            log=log,
        )
        for name, (source, time_limit, most, temperatures, seed) in kinds.items()
    }
    out.mkdir(parents=True, exist_ok=True)
    np.savez(path, allow_pickle=False, **texts)
    return texts


def make_texts(
    c: ModelConfig,
    target: Params,
    tokens: np.ndarray,
    *,
    length: int,
    batch: int,
    seconds: float,
    most: int,
    temperatures: tuple[tuple[float, ...], tuple[float, ...]],
    seed: int,
    log: Log,
) -> np.ndarray:
    """Returns texts `[n, length]` that the target wrote after prompts from `tokens`.

    It stops after so many seconds, or at `most` texts.
    """
    generate = make_generator(c, length, end=c.eos_token_ids[0])
    rng = np.random.default_rng(seed)
    texts: list[np.ndarray] = []
    began, count, dropped = time.monotonic(), 0, 0
    while count < most and time.monotonic() - began < seconds:
        offsets = rng.integers(len(tokens) - length, size=batch)
        given = tokens[offsets[:, None] + np.arange(length)[None]].astype(np.int32)
        written = generate(
            target,
            jnp.asarray(given),
            jnp.asarray(rng.integers(*PROMPTS, size=batch), jnp.int32),
            jnp.asarray(rng.choice(temperatures[0], batch, p=temperatures[1]), "f4"),
            jax.random.key(int(rng.integers(2**31))),
        )
        good = np.asarray(distinct_share(written, 8) >= _LEAST_DISTINCT)
        texts.append(np.asarray(written)[good].astype(np.uint16))
        count += int(good.sum())
        dropped += int((~good).sum())
        log.write(texts=count, loops_dropped=dropped, seconds=time.monotonic() - began)
    if not count:
        raise ValueError("every text was one loop; is the target trained?")
    return np.concatenate(texts)[:most]
