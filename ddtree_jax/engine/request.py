"""Owns what goes into the engine and what comes out. Does not know about arrays."""

import dataclasses
from typing import Literal

type FinishReason = Literal["stop", "length", "error"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen.

    Attributes:
      temperature: 0 means greedy.
      top_k: Tokens kept; 0 means all.
      top_p: Probability mass kept, after top-k; 1 means all.
      min_p: Least probability kept, relative to the largest; 0 means all.
      seed: Fixes the noise; None draws a new seed for every request.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt to be continued.

    Attributes:
      request_id: Unique among the requests that the engine knows.
      max_tokens: Cap on the tokens of the answer.
      stop: Strings that end the answer and are not part of it.
      stop_token_ids: Tokens that end it, besides the model's own.
      ignore_eos: Turns the model's own stop tokens off.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
    """What one step adds to an answer.

    Attributes:
      token_ids: New tokens.
      text: New text; may be empty while a character or stop string is incomplete.
      finish_reason: Set once, with the last delta.
      error: Says what went wrong when the reason is "error".
      num_accepted: Drafted tokens accepted, one entry a decoding step.
    """

    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_accepted: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """A whole answer: all its deltas put together."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    error: str | None
    num_accepted: tuple[int, ...]


def join(deltas: list[Delta]) -> Completion:
    """Returns the answer that the deltas, the last one included, make up."""
    last = deltas[-1]
    if last.finish_reason is None:
        raise ValueError("the last delta has no finish_reason")
    return Completion(
        token_ids=tuple(i for d in deltas for i in d.token_ids),
        text="".join(d.text for d in deltas),
        finish_reason=last.finish_reason,
        error=last.error,
        num_accepted=tuple(n for d in deltas for n in d.num_accepted),
    )
