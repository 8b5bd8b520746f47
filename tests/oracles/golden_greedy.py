"""Makes greedy.npz and completions.json from transformers' kimi_k25."""

from pathlib import Path

import numpy as np

from tiny.tokenizer_files import NUM_BYTES

from .checkpoint_files import write_json
from .decode import STOP_TOKENS, greedy, reply
from .draw import Draw
from .load import load_target
from .margins import check

TOKENS = 48
# Bytes, and which draw. Prompts were tried until every margin held, both stop tokens
# occurred, and of the completions some were stopped and some were not.
RANDOM_PROMPTS = ((1, "b"), (17, "g"), (40, "a"), (64, "a"))
TEXT_PROMPTS = (
    "café",
    "How far is the moon? Now, please!",
    "Nobody sleeps near the old bridge; in German one says “über den Fluß”, "
    "in Japanese 川を渡..",
    "你好世界",
)


def _random_prompt(draw: Draw, length: int, name: str) -> list[int]:
    """Bytes only, as in a user's text, though seldom UTF-8."""
    return draw.integers(f"{name}/{length}", (length,), below=NUM_BYTES).tolist()


def build(directory: Path, target: Path) -> None:
    """Writes both files into `directory` for the checkpoint `target`."""
    draw, model = Draw("golden_greedy"), load_target(target)
    prompts = [_random_prompt(draw, *prompt) for prompt in RANDOM_PROMPTS]
    prompts += [list(text.encode()) for text in TEXT_PROMPTS]
    arrays, outputs = {}, []
    for number, ids in enumerate(prompts):
        tokens, margins = greedy(model, f"greedy prompt {number}", ids, TOKENS)
        outputs.append(tokens)
        arrays[f"prompt_{number}"] = np.array(ids, np.int32)
        arrays[f"tokens_{number}"] = np.array(tokens, np.int32)
        arrays[f"margins_{number}"] = np.array(margins, np.float32)
    for token in STOP_TOKENS:
        found = any(token in tokens for tokens in outputs)
        check(found, f"no greedy output contains the stop token {token}")
    np.savez_compressed(directory / "greedy.npz", **arrays)

    first = len(RANDOM_PROMPTS)
    completions = [
        {
            "greedy_prompt": number,
            "prompt": text,
            "prompt_tokens": len(prompts[number]),
            "max_tokens": TOKENS,
            **reply(outputs[number]),
        }
        for number, text in enumerate(TEXT_PROMPTS, start=first)
    ]
    reasons = {completion["finish_reason"] for completion in completions}
    check(len(reasons) == 2, f"the completions end with {reasons} only")
    write_json(directory / "completions.json", completions)
