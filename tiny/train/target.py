"""Owns the training of the target: data windows, step, balance, evaluation."""

import functools
import math
import time
from pathlib import Path
from typing import Any, NamedTuple
from typing import cast as cast_type

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ddtree_jax.arrays import Array
from ddtree_jax.config import ModelConfig
from ddtree_jax.model.params import KimiK2
from tiny.train.optimiser import make_optimiser
from tiny.train.pace import Log, Pace
from tiny.train.parameters import (
    EXPERTS,
    ROUTER_BIAS,
    Params,
    cast,
    initialise,
    shapes,
    straight_through,
)
from tiny.train.target_model import Attention, forward, token_losses
from tiny.train.weights import load_state, save_state

STATE_FILE = "state.safetensors"
_RATE = 3e-3
_Z_LOSS = 1e-4
_BALANCE_RATE = 1e-3
# From here on the experts are trained as INT4 will have them.
_QUANTISED_FROM = 0.85
_SAVE_SECONDS = 120.0


class TrainState(NamedTuple):
    """What a step changes."""

    params: Params
    optimiser: optax.OptState


class Knobs(NamedTuple):
    """What changes from step to step without a new program, as float32 scalars."""

    rate: Array
    quantised: Array
    balance: Array


class Windows:
    """Which windows of a token stream each step sees: every token once an epoch."""

    def __init__(self, size: int, length: int, batch: int, seed: int):
        self._length, self._batch, self._seed = length, batch, seed
        # One window less leaves room for the shift of an epoch.
        self.count = (size - 1) // length - 1
        if self.count < 1:
            raise ValueError(f"{size} tokens are too few for windows of {length}")

    def offsets(self, step: int) -> np.ndarray:
        """Returns where the windows of a step begin."""
        samples = step * self._batch + np.arange(self._batch)
        epochs, places = np.divmod(samples, self.count)
        starts = np.empty(self._batch, np.int32)
        for epoch in np.unique(epochs):
            shift, order = self._epoch(int(epoch))
            mine = epochs == epoch
            starts[mine] = shift + self._length * order[places[mine]]
        return starts

    @functools.lru_cache(maxsize=2)  # noqa: B019  one object a process
    def _epoch(self, epoch: int) -> tuple[int, np.ndarray]:
        rng = np.random.default_rng([self._seed, epoch])
        return int(rng.integers(self._length)), rng.permutation(self.count)


def take_windows(tokens: Array, offsets: Array, length: int) -> Array:
    """Returns `[B, length]` int32 windows of a stream."""
    places = offsets[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
    return tokens[places].astype(jnp.int32)


def make_step(c: ModelConfig, length: int, attention: Attention, dtype):
    """Returns the compiled training step."""
    optimiser = make_optimiser()

    def loss_of(params: Params, window: Array, quantised: Array):
        rounded = {
            path: straight_through(value, quantised) if path in EXPERTS else value
            for path, value in params.items()
        }
        p = cast(rounded, dtype)
        out = forward(p, c, window[:, :-1], attention=attention)
        losses = token_losses(p["head"], out.hidden, window[:, 1:])
        loss = jnp.mean(losses.nll)
        z_loss = jnp.mean(jnp.square(losses.divisor))
        return loss + _Z_LOSS * z_loss, (loss, out.load)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, tokens: Array, offsets: Array, knobs: Knobs):
        window = take_windows(tokens, offsets, length + 1)
        gradient, (loss, load) = jax.grad(loss_of, has_aux=True)(
            state.params, window, knobs.quantised
        )
        params, moments = descend(optimiser, state, gradient, knobs.rate)
        params[ROUTER_BIAS] = balanced(params[ROUTER_BIAS], load, knobs.balance)
        worst = jnp.max(load / jnp.mean(load, axis=-1, keepdims=True))
        return TrainState(params, moments), {"loss": loss, "load": worst}

    return step


def descend(
    optimiser: optax.GradientTransformation,
    state: TrainState,
    gradient: Params,
    rate: Array,
) -> TrainState:
    """Returns the parameters and moments one step of the optimiser further."""
    updates, moments = optimiser.update(gradient, state.optimiser, state.params)
    changes = cast_type(Params, updates)
    params = {path: p - rate * changes[path] for path, p in state.params.items()}
    return TrainState(params, moments)


def balanced(bias: Array, load: Array, rate: Array) -> Array:
    """Returns the bias a step towards experts of equal load (DeepSeek-V3's rule)."""
    mean = jnp.mean(load, axis=-1, keepdims=True)
    moved = bias + rate * jnp.sign(mean - load)
    # Only differences choose.
    return moved - jnp.mean(moved, axis=-1, keepdims=True)


def make_evaluation(c: ModelConfig, length: int, attention: Attention):
    """Returns `evaluate(params, heldout, bytes_per_token)` → bits per byte."""

    @jax.jit
    def nll(params: Params, window: Array) -> Array:
        out = forward(params, c, window[:, :-1], attention=attention)
        return jnp.sum(token_losses(params["head"], out.hidden, window[:, 1:]).nll)

    def evaluate(
        params: Params, heldout: np.ndarray, bytes_per_token: np.ndarray
    ) -> float:
        batch = 32
        count = (len(heldout) - 1) // length // batch * batch
        if count == 0:
            raise ValueError(f"{len(heldout)} held-out tokens; expected more")
        places = length * np.arange(count)[:, None] + np.arange(length + 1)
        windows = heldout[places].astype(np.int32)
        total = sum(
            nll(params, jnp.asarray(windows[i : i + batch]))
            for i in range(0, count, batch)
        )
        num_bytes = bytes_per_token[windows[:, 1:]].sum(dtype=np.int64)
        return float(total) / math.log(2) / float(num_bytes)

    return evaluate


def initial_state(c: ModelConfig, seed: int) -> TrainState:
    """Returns random parameters and an optimiser that has seen nothing."""
    params = initialise(shapes(KimiK2(c)), seed)
    return TrainState(params, make_optimiser().init(params))


def train_target(
    c: ModelConfig,
    data: dict[str, np.ndarray],
    out: Path,
    *,
    pace: Pace,
    state: TrainState,
    first_step: int,
    batch: int,
    length: int,
    attention: Attention,
    dtype,
    limit: float,
    log_every: int = 50,
    evaluate_every: int = 1000,
) -> bool:
    """Trains until the plan is done or `limit` seconds are over; returns which.

    The state is saved every two minutes and at the end.
    """
    log = Log(out / "log.jsonl")
    windows = Windows(len(data["train"]), length, batch, seed=0)
    tokens = jnp.asarray(data["train"])
    step_function = make_step(c, length, attention, dtype)
    evaluate = make_evaluation(c, length, attention)
    step, saved = first_step, time.monotonic()
    while not (pace.finished(step) or pace.elapsed >= limit):
        knobs = Knobs(
            rate=jnp.asarray(pace.rate(step, _RATE), jnp.float32),
            quantised=jnp.asarray(pace.progress(step) >= _QUANTISED_FROM, jnp.float32),
            balance=jnp.asarray(_BALANCE_RATE * pace.rate(step, 1.0), jnp.float32),
        )
        state, metrics = step_function(
            state, tokens, jnp.asarray(windows.offsets(step)), knobs
        )
        step += 1
        if step % log_every == 0 or step == first_step + 1:
            shown = {key: float(value) for key, value in metrics.items()}
            if not math.isfinite(shown["loss"]):
                raise FloatingPointError(f"the loss is {shown['loss']} at step {step}")
            took = pace.measure(step)
            log.write(
                step=step,
                planned=pace.planned or 0,
                seconds=pace.elapsed,
                **shown,
                rate=float(knobs.rate),
                quantised=int(knobs.quantised),
                tokens_per_s=batch * length / took if took else 0.0,
                epoch=step * batch / windows.count,
            )
        if step % evaluate_every == 0:
            bits = evaluate(
                cast(state.params, dtype), data["heldout"], data["bytes_per_token"]
            )
            log.write(step=step, heldout_bits_per_byte=bits)
            pace.pause(step)
        if time.monotonic() - saved > _SAVE_SECONDS:
            save(out, state, step, pace)
            saved = time.monotonic()
            pace.pause(step)
    save(out, state, step, pace)
    return pace.finished(step)


def save(out: Path, state: TrainState, step: int, pace: Pace) -> None:
    """Writes the state with what is needed to go on."""
    facts: dict[str, Any] = {"step": step, "elapsed": pace.elapsed}
    save_state(out / STATE_FILE, state, facts)


def restore(out: Path, like: TrainState) -> tuple[TrainState, int, float]:
    """Returns state, step and elapsed seconds of an earlier command, if any."""
    if not (out / STATE_FILE).is_file():
        return like, 0, 0.0
    state, facts = load_state(out / STATE_FILE, like)
    return state, facts["step"], facts["elapsed"]
