"""Owns the tokenizer file formats. Does not know about requests or the model.

Read `token_codec.py` first. Two formats: `tiktoken.model` (one base64 token and its
rank a line) with `tokenizer_config.json`, and `tokenizer.json` of the `tokenizers`
library, byte-level BPE only. Both are read as data; nothing of a checkpoint is ever
imported.
"""

import base64
import binascii
import functools
import itertools
import json
import re
from pathlib import Path
from typing import Any

import tiktoken
import tokenizers

from ddtree_jax.engine.token_codec import Tokenizer
from ddtree_jax.errors import TokenizerError

# Cased letters as Kimi splits words. Han characters are a word class of their own,
# hence the intersections, which `re` and `tokenizers` do not have.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

__all__ = ["KIMI_PATTERN", "Tokenizer", "load_tokenizer", "read_json"]

_SPECIAL_SLOTS = 256  # Ids after the ranks; those that no file names are reserved.
# tiktoken's regex overflows its stack on longer texts, and its merge loop is slow on
# longer words. Both cuts are part of how Kimi's ids are defined.
_MAX_CHARS = 400_000
_MAX_RUN = 25_000


def load_tokenizer(directory: Path) -> Tokenizer:
    """Returns the tokenizer of a checkpoint directory.

    `tiktoken.model` wins over `tokenizer.json`. Where both lie side by side the
    first is the model's own and the second a conversion: `tokenizers` has no class
    intersection in its patterns, so Kimi's split is at best rewritten there.
    """
    directory = Path(directory)
    if (path := directory / "tiktoken.model").is_file():
        tokenizer = _read_tiktoken(path)
    elif (path := directory / "tokenizer.json").is_file():
        tokenizer = _read_tokenizers(path)
    else:
        raise TokenizerError(
            f"{directory}: no tokenizer; expected tiktoken.model or tokenizer.json"
        )
    config = read_json(directory / "config.json")
    rows = config.get("text_config", config).get("vocab_size")
    if rows is not None and tokenizer.vocab_size > rows:
        raise TokenizerError(
            f"{path}: {tokenizer.vocab_size} token ids, but config.json says "
            f"vocab_size {rows}; expected at most as many"
        )
    return tokenizer


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file, empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TokenizerError(f"{path}: expected a JSON object")
    return value


def _read_tiktoken(path: Path) -> Tokenizer:
    ranks = _read_ranks(path)
    contents, skipped = _read_special(path.parent / "tokenizer_config.json", len(ranks))
    encoding = tiktoken.Encoding(
        path.parent.name,
        pat_str=KIMI_PATTERN,
        mergeable_ranks=ranks,
        special_tokens={},
    )
    return Tokenizer(
        [*ranks, *(text.encode() for text in contents)],
        {text: len(ranks) + slot for slot, text in enumerate(contents)},
        skipped,
        functools.partial(_encode_pieces, encoding),
    )


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Returns the tokens of `tiktoken.model` in the order of their ranks, 0 … n-1."""
    ranks: dict[bytes, int] = {}
    token_of: dict[int, bytes] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            encoded, decimal = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(decimal)
        except (ValueError, binascii.Error):
            raise TokenizerError(
                f"{path}: line {number}: expected a base64 token and its rank"
            ) from None
        if rank in token_of or token in ranks:
            what = f"rank {rank}" if rank in token_of else f"token {token!r}"
            raise TokenizerError(f"{path}: line {number}: {what} a second time")
        ranks[token], token_of[rank] = rank, token
    if holes := set(range(len(ranks))) - set(token_of):
        raise TokenizerError(
            f"{path}: no rank {min(holes)}; expected 0 to {len(ranks) - 1} unbroken"
        )
    if missing := [b for b in range(256) if bytes([b]) not in ranks]:
        raise TokenizerError(
            f"{path}: no token for byte 0x{missing[0]:02x}; expected all 256 bytes"
        )
    return {token_of[rank]: rank for rank in range(len(ranks))}


def _read_special(path: Path, base: int) -> tuple[list[str], set[int]]:
    """Returns the texts of the special slots and the ids that `skip_special` drops."""
    contents = [f"<|reserved_token_{base + i}|>" for i in range(_SPECIAL_SLOTS)]
    skipped = set(range(base, base + _SPECIAL_SLOTS))
    for key, entry in read_json(path).get("added_tokens_decoder", {}).items():
        if not (key.isdecimal() and isinstance(entry, dict) and entry.get("content")):
            raise TokenizerError(
                f"{path}: added_tokens_decoder[{key!r}]: expected an id and its content"
            )
        if not base <= (token_id := int(key)) < base + _SPECIAL_SLOTS:
            raise TokenizerError(
                f"{path}: special token {entry['content']!r} has id {key}; expected "
                f"{base} to {base + _SPECIAL_SLOTS - 1}, right after the ranks"
            )
        contents[token_id - base] = entry["content"]
        if not entry.get("special", True):
            skipped.discard(token_id)
    if len(set(contents)) < len(contents):
        twice = next(text for text in contents if contents.count(text) > 1)
        raise TokenizerError(f"{path}: special token {twice!r} has two ids")
    return contents, skipped


def _encode_pieces(encoding: tiktoken.Encoding, text: str) -> list[int]:
    ids = []
    for start in range(0, len(text), _MAX_CHARS):
        for piece in _cut_runs(text[start : start + _MAX_CHARS]):
            ids += encoding.encode_ordinary(piece)
    return ids


def _cut_runs(text: str) -> list[str]:
    """Cuts a text so that no run of (non-)whitespace is longer than `_MAX_RUN`."""
    borders = [0]
    for run in re.finditer(r"\s+|\S+", text):
        borders += range(run.start() + _MAX_RUN, run.end(), _MAX_RUN)
    borders.append(len(text))
    return [text[a:b] for a, b in itertools.pairwise(borders)]


def _read_tokenizers(path: Path) -> Tokenizer:
    """Returns the tokenizer of a `tokenizer.json`.

    Added tokens made of whitespace only are how some vocabularies spell
    indentation; all others are markers. The markers are taken out of the
    library's hands, since it would find them in a user's text too.
    """
    data = read_json(path)
    _check_byte_level(path, data)
    _backend(path, data)  # The library knows best what a sound file is.
    added = data.get("added_tokens") or []
    for entry in added:
        flags = [f for f in ("lstrip", "rstrip", "single_word") if entry.get(f)]
        if flags:
            raise TokenizerError(
                f"{path}: added token {entry['content']!r} has {flags[0]}; "
                "expected tokens that match as they stand"
            )
    markers = [entry for entry in added if entry["content"].strip()]
    blanks = [entry for entry in added if not entry["content"].strip()]
    # The library numbers added tokens anew unless the model's vocabulary has them.
    data["model"]["vocab"] |= {entry["content"]: entry["id"] for entry in blanks}
    data["added_tokens"] = blanks
    data.update(post_processor=None, truncation=None, padding=None)
    backend = _backend(path, data)
    pieces = {
        **{i: _byte_level(token) for token, i in backend.get_vocab(False).items()},
        **{entry["id"]: entry["content"].encode() for entry in added},
    }
    return Tokenizer(
        [pieces.get(i, b"") for i in range(max(pieces) + 1)],
        {entry["content"]: entry["id"] for entry in markers},
        (entry["id"] for entry in markers if entry.get("special")),
        lambda text: backend.encode(text, add_special_tokens=False).ids,
    )


def _backend(path: Path, data: dict[str, Any]) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # The library raises bare `Exception`.
        raise TokenizerError(f"{path}: {error}") from None


def _check_byte_level(path: Path, data: dict[str, Any]) -> None:
    model, decoder = data.get("model") or {}, data.get("decoder") or {}
    if model.get("type", "BPE") != "BPE":
        raise TokenizerError(f"{path}: model {model['type']}; expected BPE")
    steps = [step.get("type") for step in decoder.get("decoders", [decoder])]
    if steps != ["ByteLevel"]:
        raise TokenizerError(
            f"{path}: decoder {steps}; expected ByteLevel, where a token is its bytes"
        )


@functools.cache
def _byte_of() -> dict[str, int]:
    """Byte-level BPE writes bytes as printable characters; this reads them back."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


def _byte_level(token: str) -> bytes:
    table = _byte_of()
    if all(character in table for character in token):
        return bytes(table[character] for character in token)
    return token.encode()  # Not written at byte level; the library does the same.
