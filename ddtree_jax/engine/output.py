"""Owns what of the committed tokens a request gets to see, and when it is done.

Does not know about the engine, HTTP, tool calls or reasoning.
"""

import dataclasses
from collections.abc import Iterable
from typing import Literal

from ddtree_jax.engine.detokenise import Detokeniser
from ddtree_jax.engine.token_codec import Tokenizer
from ddtree_jax.errors import RequestError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """What one step adds to a request's answer.

    Attributes:
      token_ids: The tokens of the answer, each once. A stop token is one of them,
        as is the token that completes a stop string: the model made them, and
        usage counts them.
      text: Text to append. Never holds a stop token or any part of a stop string.
      finish_reason: Set exactly once, with the last tokens: "stop" if the stop
        lies within `max_tokens`, the last token included, else "length".
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: Literal["stop", "length"] | None = None


class OutputAssembler:
    """Assembles one request's answer from the tokens that each step commits.

    A step may commit many tokens at once. They are looked at one by one, in order,
    and those past the end are dropped, so that the answer does not depend on how
    tokens are spread over steps. A token is tested as a stop token first, then for
    completing a stop string, then against the cap.

    Text is cut before the earliest stop string; text that may be the beginning of
    one is held back until it is not, or until the answer ends.

    Args:
      max_tokens: Cap on the tokens of the answer.
      stop: Stop strings.
      stop_token_ids: The request's own stop tokens.
      eos_token_ids: The model's stop tokens; `ignore_eos` turns these off.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        max_tokens: int,
        stop: Iterable[str] = (),
        stop_token_ids: Iterable[int] = (),
        eos_token_ids: Iterable[int] = (),
        ignore_eos: bool = False,
        skip_special_tokens: bool = True,
    ):
        if max_tokens < 1:
            raise RequestError(
                f"max_tokens is {max_tokens}; expected at least 1", param="max_tokens"
            )
        self._stop = tuple(stop)
        if "" in self._stop:
            raise RequestError("stop holds an empty string", param="stop")
        self._stop_ids = frozenset(stop_token_ids)
        if not ignore_eos:
            self._stop_ids |= frozenset(eos_token_ids)
        self._detokeniser = Detokeniser(tokenizer, skip_special=skip_special_tokens)
        self._tokens_left = max_tokens
        self._held = ""
        self._finish_reason: Literal["stop", "length"] | None = None

    @property
    def finished(self) -> bool:
        """Whether the answer is complete; further tokens are dropped."""
        return self._finish_reason is not None

    def feed(self, ids: Iterable[int]) -> Output:
        """Returns what the newly committed tokens add to the answer."""
        if self.finished:
            return Output()
        kept, text = [], ""
        for token_id in ids:
            kept.append(token_id)
            text += self._take(token_id)
            if self.finished:
                break
        return Output(
            token_ids=tuple(kept), text=text, finish_reason=self._finish_reason
        )

    def _take(self, token_id: int) -> str:
        """Returns the text that one more token sets free."""
        self._tokens_left -= 1
        if token_id in self._stop_ids:
            return self._end("stop")
        self._held += self._detokeniser.feed((token_id,))
        if (cut := self._find_stop()) is not None:
            return self._finish("stop", self._held[:cut])
        if not self._tokens_left:
            return self._end("length")
        free = self._free_chars()
        text, self._held = self._held[:free], self._held[free:]
        return text

    def _end(self, reason: Literal["stop", "length"]) -> str:
        """Returns the held text; the model may have ended within a character."""
        self._held += self._detokeniser.flush()
        if (cut := self._find_stop()) is not None:
            return self._finish("stop", self._held[:cut])
        return self._finish(reason, self._held)

    def _finish(self, reason: Literal["stop", "length"], text: str) -> str:
        self._finish_reason, self._held = reason, ""
        return text

    def _find_stop(self) -> int | None:
        """Returns where the earliest stop string begins, if there is one."""
        found = [self._held.find(stop) for stop in self._stop]
        return min((at for at in found if at >= 0), default=None)

    def _free_chars(self) -> int:
        """Returns how much of the held text no stop string can begin in."""
        longest = max(map(len, self._stop), default=1)
        first = max(0, len(self._held) - longest + 1)
        return next(
            (
                at
                for at in range(first, len(self._held))
                if any(stop.startswith(self._held[at:]) for stop in self._stop)
            ),
            len(self._held),
        )
