"""Decodes greedily with transformers, and says what a server answers."""

import torch
from transformers import DynamicCache

from tiny.tokenizer_files import NUM_BYTES

from .margins import check_experts, check_tokens
from .probes import trace
from .tiny_target_config import END_OF_TURN, EOS

STOP_TOKENS = (EOS, END_OF_TURN)


def greedy(
    model: torch.nn.Module,
    what: str,
    prompt: list[int],
    count: int,
    *,
    stop_tokens: tuple[int, ...] = STOP_TOKENS,
) -> tuple[list[int], list[float]]:
    """Returns `count` tokens, stop tokens not honoured, and their margins.

    `what` names the prompt if its margins are refused. transformers' own loop is
    checked to give the same up to the first of `stop_tokens`.
    """
    cache = DynamicCache(config=model.config.get_text_config())
    tokens, margins, fed = [], [], prompt
    for _ in range(count):
        t = trace(model, fed, cache)
        check_experts(what, t)
        best = t.logits[-1].topk(2)
        tokens.append(best.indices[0].item())
        margins.append((best.values[0] - best.values[1]).item())
        check_tokens(what, margins)
        fed = tokens[-1:]
    _check_generate(model, prompt, tokens, stop_tokens)
    return tokens, margins


def _answer_tokens(tokens: list[int], stop_tokens: tuple[int, ...]) -> list[int]:
    """The tokens up to the first stop token, which is one of them."""
    stops = [i for i, token in enumerate(tokens) if token in stop_tokens]
    return tokens[: stops[0] + 1] if stops else tokens


def _check_generate(
    model: torch.nn.Module,
    prompt: list[int],
    tokens: list[int],
    stop_tokens: tuple[int, ...],
):
    """transformers' own loop must stop where we say, with the same tokens."""
    ids = torch.tensor([prompt])
    whole = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=len(tokens),
        eos_token_id=list(stop_tokens),
    )
    theirs, ours = whole[0, len(prompt) :].tolist(), _answer_tokens(tokens, stop_tokens)
    if theirs != ours:
        raise SystemExit(f"oracles: generate gives {theirs}, the hand-made loop {ours}")


def reply(tokens: list[int]) -> dict:
    """Returns what a server answers when it may make `len(tokens)` tokens.

    The stop token counts as one of the answer's. Special tokens are not shown,
    and what is left need not be UTF-8.
    """
    answer = _answer_tokens(tokens, STOP_TOKENS)
    shown = bytes(token for token in answer if token < NUM_BYTES)
    return {
        "text": shown.decode("utf-8", errors="replace"),
        "completion_tokens": len(answer),
        "finish_reason": "stop" if answer[-1] in STOP_TOKENS else "length",
    }
