"""Owns the making of prompt files from texts: token ids, cut at line starts."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddtree_jax.engine.tokenizer import Tokenizer, load_tokenizer
from ddtree_jax.errors import ConfigError

# No tokenizer's tokens are longer on average, so this much text is enough.
_CHARACTERS_PER_TOKEN = 32


def write_prompts(
    model: Path, texts: Sequence[Path], out: Path, *, tokens: int, count: int
) -> int:
    """Writes at most `count` prompts of `tokens` tokens; returns how many.

    They do not overlap, start at line starts and are spread evenly over the texts.

    Raises:
      ConfigError: A text cannot be read, or none is long enough.
    """
    tokenizer = load_tokenizer(model)
    found = []
    for path in texts:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {path} cannot be read: {error}") from None
        found += [
            {"prompt_ids": ids, "source": f"{path.name}:{line}"}
            for line, ids in _cuts(text, tokenizer, tokens)
        ]
    if not found:
        raise ConfigError(f"no text has {tokens} tokens; expected longer ones")
    count = min(count, len(found))
    chosen = [found[i * len(found) // count] for i in range(count)]
    out.write_text("".join(json.dumps(entry) + "\n" for entry in chosen))
    return count


def _cuts(
    text: str, tokenizer: Tokenizer, tokens: int
) -> Iterator[tuple[int, list[int]]]:
    """Yields line numbers and the tokens from there on."""
    start, line = 0, 1
    while start < len(text):
        ids = tokenizer.encode(text[start : start + tokens * _CHARACTERS_PER_TOKEN])
        ids = ids[:tokens]
        if len(ids) < tokens:
            return
        yield line, ids
        used = len(tokenizer.decode_bytes(ids).decode("utf-8", "ignore"))
        newline = text.find("\n", start + used - 1)
        if newline < 0:
            return
        line += text.count("\n", start, newline + 1)
        start = newline + 1
