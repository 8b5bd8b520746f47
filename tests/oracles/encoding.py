"""Turns texts into tokens with tiktoken itself and a checkpoint's own files."""

import json
from pathlib import Path

import tiktoken

from tiny.tokenizer_files import KIMI_PATTERN, read_ranks


def load_encoding(target: Path) -> tiktoken.Encoding:
    """Returns the tokenizer of a checkpoint."""
    config = json.loads((target / "tokenizer_config.json").read_text())
    tokens = read_ranks(target / "tiktoken.model")
    return tiktoken.Encoding(
        target.name,
        pat_str=KIMI_PATTERN,
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={
            entry["content"]: int(token_id)
            for token_id, entry in config["added_tokens_decoder"].items()
        },
    )
