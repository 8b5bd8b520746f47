"""Owns the training of the drafter on text of the frozen, quantised target."""

import functools
import shutil
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ddtree_jax.arrays import Array
from ddtree_jax.config import DraftConfig, ModelConfig
from ddtree_jax.model.params import DFlash
from tiny.train.draft_model import draft_blocks
from tiny.train.optimiser import make_optimiser
from tiny.train.pace import Log, Pace
from tiny.train.parameters import Params, cast, initialise, shapes
from tiny.train.target import STATE_FILE, TrainState, descend, save
from tiny.train.target_model import Attention, forward, token_losses
from tiny.train.texts import PROMPTS
from tiny.train.weights import load_state, save_pieces

_RATE = 3e-3
# Earlier slots count more: a later one matters only when all before it are right.
_SLOT_DECAY = 4.0
_SAVE_SECONDS = 120.0
NAME = "draft"


def initial_draft(c: DraftConfig, seed: int) -> TrainState:
    """Returns random parameters and an optimiser that has seen nothing."""
    params = initialise(shapes(DFlash(c)), seed)
    return TrainState(params, make_optimiser().init(params))


def export(c: DraftConfig, draft: Path, out: Path) -> None:
    """Writes the trained drafter in bfloat16, and the log beside it.

    Raises:
      FileNotFoundError: `draft` holds no trained drafter.
    """
    state, _ = load_state(draft / STATE_FILE, initial_draft(c, seed=1))
    stored = {
        path: np.asarray(value).astype(ml_dtypes.bfloat16)
        for path, value in state.params.items()
    }
    save_pieces(out, NAME, stored)
    shutil.copyfile(draft / "log.jsonl", out / "draft.jsonl")


def make_draft_step(
    c: ModelConfig, d: DraftConfig, blocks: int, attention: Attention, dtype
):
    """Returns the compiled training step of the drafter."""
    optimiser = make_optimiser()
    # Slots are counted from 0 here.
    slot_weights = np.exp(-np.arange(d.draft_horizon) / _SLOT_DECAY).astype(np.float32)
    slot_weights /= slot_weights.sum()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(
        state: TrainState,
        target: Params,
        texts: Array,
        rows: Array,
        rate: Array,
        key: Array,
    ):
        tokens = texts[rows].astype(jnp.int32)
        features = _features(c, d, target, tokens, attention)
        anchors = _random_anchors(d, key, tokens.shape, blocks)

        def loss_of(params: Params):
            losses, accepted = _block_losses(
                cast(params, dtype), d, target, tokens, features, anchors
            )
            weighted = losses * slot_weights[None, None]
            return jnp.mean(jnp.sum(weighted, axis=-1)), jnp.mean(accepted)

        results, gradient = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        loss, accepted = results
        state = descend(optimiser, state, gradient, rate)
        return state, {"loss": loss, "accepted": accepted}

    return step


def _features(c, d, target: Params, tokens: Array, attention: Attention) -> Array:
    layers = d.target_layer_ids
    out = forward(target, c, tokens, feature_layers=layers, attention=attention)
    return jax.lax.stop_gradient(out.features)


def _random_anchors(d: DraftConfig, key: Array, shape, blocks: int) -> Array:
    # The last slot needs a label too.
    batch, length = shape
    last = length - d.draft_block_size
    return jax.random.randint(key, (batch, blocks), 1, last + 1, jnp.int32)


def _block_losses(
    params: Params,
    d: DraftConfig,
    target: Params,
    tokens: Array,
    features: Array,
    anchors: Array,
) -> tuple[Array, Array]:
    """Returns each slot's loss `[B, A, D]`, and tokens per step `[B, A]`.

    The second is what greedy verification would commit were the text the target's
    own greedy one: slots that are right up to the first wrong, and the bonus.
    """
    batch, num_blocks = anchors.shape
    roots = jnp.take_along_axis(tokens, anchors, axis=1)
    hidden = draft_blocks(params, d, target["embed"], features, roots, anchors)
    steps = jnp.arange(1, d.draft_block_size, dtype=jnp.int32)
    slots = anchors[..., None] + steps[None, None]
    labels = jnp.take_along_axis(tokens, slots.reshape(batch, -1), axis=1)
    flat = hidden.reshape(batch, -1, hidden.shape[-1])
    losses, _, right = token_losses(target["head"], flat, labels)
    shape = (batch, num_blocks, d.draft_horizon)
    runs = jnp.cumprod(right.reshape(shape).astype(jnp.float32), axis=-1)
    return losses.reshape(shape), 1.0 + jnp.sum(runs, axis=-1)


def make_draft_evaluation(
    c: ModelConfig, d: DraftConfig, blocks: int, attention: Attention
):
    """Returns `evaluate(params, target, texts)` → loss of slot 1, tokens per step."""

    @jax.jit
    def measure(params: Params, target: Params, tokens: Array):
        features = _features(c, d, target, tokens, attention)
        # Text of the target's own begins after the longest prompt.
        first, last = PROMPTS[1], tokens.shape[1] - d.draft_block_size
        places = np.linspace(first, last, blocks).astype(np.int32)
        anchors = jnp.broadcast_to(places[None], (tokens.shape[0], blocks))
        losses, accepted = _block_losses(params, d, target, tokens, features, anchors)
        return jnp.mean(losses, axis=(0, 1)), jnp.mean(accepted)

    def evaluate(params: Params, target: Params, texts: np.ndarray):
        losses, accepted = measure(params, target, jnp.asarray(texts, jnp.int32))
        return [round(float(loss), 4) for loss in losses], float(accepted)

    return evaluate


def train_draft(
    c: ModelConfig,
    d: DraftConfig,
    target: Params,
    texts: np.ndarray,
    heldout: dict[str, np.ndarray],
    out: Path,
    *,
    pace: Pace,
    state: TrainState,
    first_step: int,
    batch: int,
    blocks: int,
    attention: Attention,
    dtype,
    limit: float,
    log_every: int = 50,
    evaluate_every: int = 500,
) -> bool:
    """Trains until the plan is done or `limit` seconds are over; returns which.

    Args:
      target: The quantised target's parameters in the dtype of computation.
      texts: `[n, T]` tokens.
      heldout: Texts of the target's after held-out prompts, by name.
    """
    log = Log(out / "log.jsonl")
    step_function = make_draft_step(c, d, blocks, attention, dtype)
    evaluate = make_draft_evaluation(c, d, blocks, attention)
    on_device = jnp.asarray(texts)
    step, saved = first_step, time.monotonic()

    def report() -> None:
        for name, held in heldout.items():
            slots, accepted = evaluate(cast(state.params, dtype), target, held)
            log.write(
                step=step, heldout=name, tokens_per_step=accepted, losses=str(slots)
            )
        pace.pause(step)

    while not (pace.finished(step) or pace.elapsed >= limit):
        rows = np.random.default_rng([1, step]).integers(len(texts), size=batch)
        rate = pace.rate(step, _RATE)
        state, metrics = step_function(
            state,
            target,
            on_device,
            jnp.asarray(rows, jnp.int32),
            jnp.asarray(rate, jnp.float32),
            jax.random.key(step),
        )
        step += 1
        if step % log_every == 0 or step == first_step + 1:
            shown = {key: float(value) for key, value in metrics.items()}
            took = pace.measure(step)
            if not np.isfinite(shown["loss"]):
                raise FloatingPointError(f"the loss is {shown['loss']} at step {step}")
            log.write(
                step=step,
                planned=pace.planned or 0,
                seconds=pace.elapsed,
                **shown,
                rate=rate,
                blocks_per_s=batch * blocks / took if took else 0.0,
            )
        if step % evaluate_every == 0:
            report()
        if time.monotonic() - saved > _SAVE_SECONDS:
            save(out, state, step, pace)
            saved = time.monotonic()
            pace.pause(step)
    save(out, state, step, pace)
    report()
    return pace.finished(step)
