"""Owns prompt files: JSON lines of token ids."""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from ddtree_jax.errors import ConfigError

_KEYS = {"prompt_ids", "source"}


class Prompts(NamedTuple):
    """Prompts, and what tells them from others: a name, and a digest of the ids."""

    name: str
    sha256: str
    ids: list[list[int]]


def read_prompts(path: Path, *, vocab_size: int) -> Prompts:
    """Returns the prompts of a .jsonl file, or of all those in a directory.

    A line is `{"prompt_ids": [1, 2, …]}`, with an optional "source" that says where
    it comes from.

    Raises:
      ConfigError: A line is something else; the message names it.
    """
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    ids: list[list[int]] = []
    for file in files:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from None
        for number, line in enumerate(lines, start=1):
            ids.append(_prompt(line, f"{file}:{number}", vocab_size))
    if not ids:
        raise ConfigError(f"{path} has no prompts; expected lines of JSON in .jsonl")
    digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
    return Prompts(path.name, digest, ids)


def _prompt(line: str, where: str, vocab_size: int) -> list[int]:
    try:
        entry = json.loads(line)
    except ValueError:
        raise ConfigError(f"{where} is not JSON") from None
    if not isinstance(entry, dict) or "prompt_ids" not in entry:
        raise ConfigError(
            f'{where} has no "prompt_ids"; `python -m bench prompts` makes them of text'
        )
    if unknown := entry.keys() - _KEYS:
        raise ConfigError(
            f'{where}: {min(unknown)!r} is unknown; expected "prompt_ids" and "source"'
        )
    ids = entry["prompt_ids"]
    # bool is an int to Python, and not to anyone else.
    if not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        raise ConfigError(
            f'{where}: "prompt_ids" is not a list of one token id or more'
        )
    for token in ids:
        if not 0 <= token < vocab_size:
            raise ConfigError(
                f"{where}: token id {token} is outside 0 .. {vocab_size - 1}"
            )
    return ids
