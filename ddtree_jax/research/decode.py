"""Owns the decoding of many prompts with one step function, slots refilled as they end.

Does not know what is measured. What a prompt gives does not depend on its slot or on
its neighbours, so neither does a measurement.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from ddtree_jax.errors import ConfigError, EngineError
from ddtree_jax.research.models import Models
from ddtree_jax.spec import (
    Assignment,
    StepResult,
    StepStatus,
    abstract_state,
    assign,
    init_state,
    make_prefill,
    release,
)
from ddtree_jax.spec.step import StepFunction

_PAGE_SIZE = 64
_CHUNK = 128


class Answer(NamedTuple):
    """What one prompt gave.

    Attributes:
      tokens: The text: the prefill's token, then those of the steps. The last step
        may lead past `max_tokens`; a stop token ends it.
      emitted: Tokens that each step emitted, its bonus token included.
    """

    tokens: list[int]
    emitted: list[int]


class Decoder:
    """Slots on the device, used by one shape after the other.

    Args:
      max_rows: Most tokens that a slot commits.

    Raises:
      ConfigError: The models have no positions for `max_rows`.
    """

    def __init__(self, models: Models, *, slots: int, max_rows: int):
        c, dc = models.config, models.draft_config
        limit = min(c.max_position_embeddings, dc.max_position_embeddings)
        if max_rows > limit:
            raise ConfigError(
                f"the longest prompt needs {max_rows} positions with --max-tokens and "
                f"a draft, and the models have {limit}"
            )
        self.models, self.slots, self.max_rows = models, slots, max_rows
        self.pages_per_slot = -(-max_rows // _PAGE_SIZE)
        self.abstract = abstract_state(
            c,
            dc,
            models.mesh,
            slots=slots,
            pages_per_slot=self.pages_per_slot,
            num_pages=slots * self.pages_per_slot,
            page_size=_PAGE_SIZE,
            dtype=models.dtype,
        )
        self.state = init_state(self.abstract)
        self._assign = jax.jit(assign, donate_argnums=0)
        self._release = jax.jit(release, donate_argnums=0)
        self._prefill = make_prefill(c, dc, models.mesh)

    def start(
        self, slot: int, prompt: Sequence[int], *, budget: int, temperature: float, seed
    ) -> int:
        """Returns the first token of the answer; the slot decodes from now on."""
        first_page = slot * self.pages_per_slot
        assignment = Assignment(
            page_table=first_page + np.arange(self.pages_per_slot, dtype=np.int32),
            max_context_len=np.int32(self.max_rows),
            tree_budget=np.int32(budget),
            temperature=np.float32(temperature),
            top_k=np.int32(0),
            top_p=np.float32(1),
            min_p=np.float32(0),
            seed=np.uint32(seed),
        )
        self.state = self._assign(self.state, np.int32(slot), assignment)
        result = None
        for begin in range(0, len(prompt), _CHUNK):
            part = prompt[begin : begin + _CHUNK]
            tokens = np.zeros(_CHUNK, np.int32)
            tokens[: len(part)] = part
            self.state, result = self._prefill(
                self.models.params,
                self.state,
                np.int32(slot),
                tokens,
                np.int32(len(part)),
                np.bool_(begin + _CHUNK >= len(prompt)),
            )
        assert result is not None, "an empty prompt"
        _check(result.status[0])
        return int(result.tokens[0, 0])

    def step(self, step: StepFunction) -> StepResult:
        """Runs one step of all slots; returns its result on the host."""
        self.state, result = step(self.models.params, self.state)
        return jax.device_get(result)

    def stop(self, slot: int) -> None:
        """Takes the slot back."""
        self.state = self._release(self.state, np.int32(slot))

    def answers(
        self,
        step: StepFunction,
        prompts: Sequence[Sequence[int]],
        *,
        budget: int,
        temperature: float,
        max_tokens: int,
        on_answer: Callable[[], None] | None = None,
    ) -> list[Answer]:
        """Returns what each prompt gives; prompt i is sampled with seed i.

        Raises:
          EngineError: A step reported a fault.
        """
        found: dict[int, Answer] = {}
        running: dict[int, int] = {}
        waiting = deque(range(len(prompts)))

        def is_done(answer: Answer) -> bool:
            return len(answer.tokens) >= max_tokens or self._stops(answer.tokens[-1])

        def end(slot: int) -> None:
            self.stop(slot)
            del running[slot]
            if on_answer is not None:
                on_answer()

        while waiting or running:
            for slot in range(self.slots):
                if slot in running or not waiting:
                    continue
                i = running[slot] = waiting.popleft()
                first = self.start(
                    slot, prompts[i], budget=budget, temperature=temperature, seed=i
                )
                found[i] = Answer([first], [])
                if is_done(found[i]):
                    end(slot)
            if not running:
                continue
            result = self.step(step)
            for slot, i in list(running.items()):
                _check(result.status[slot])
                new = result.tokens[slot, : result.num_tokens[slot]].tolist()
                self._append(found[i], new)
                if is_done(found[i]):
                    end(slot)
        return [found[i] for i in range(len(prompts))]

    def _append(self, answer: Answer, new: list[int]) -> None:
        """Adds what a step emitted, up to a stop token."""
        ends = (n for n, token in enumerate(new, 1) if self._stops(token))
        new = new[: next(ends, len(new))]
        answer.tokens.extend(new)
        answer.emitted.append(len(new))

    def _stops(self, token: int) -> bool:
        return token in self.models.stop_token_ids


def _check(status) -> None:
    if status != StepStatus.OK:
        raise EngineError(f"a step reported {StepStatus(int(status)).name}")
