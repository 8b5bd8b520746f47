"""Owns text ↔ token ids. Does not know about chat turns, requests or the model.

`tokenizer.py` makes a `Tokenizer` from a checkpoint's files, whatever their format.

Every id stands for some bytes, and text is those bytes joined and read as UTF-8.
So a token may hold part of a character; `detokenise.py` deals with that.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Sequence

from ddtree_jax.errors import RequestError

SHIELD = "\ufdd0"  # A Unicode noncharacter: never part of interchanged text.


class Tokenizer:
    """Translates between text and ids, with and without special tokens.

    Special tokens are the markers of the file (`<|im_end|>`, `<think>`, …). They
    become ids only where the caller says so; in a user's text they are spelled
    out like any other text.

    Attributes:
      special_tokens: Text of every special token → its id.
      skipped_ids: Ids left out of the text by `skip_special`: those whose file
        entry says `"special": true`. Markers that carry meaning for a parser
        (`<think>`, tool calls) say false and stay.
      vocab_size: One more than the largest id.
    """

    def __init__(
        self,
        pieces: Sequence[bytes],
        special_tokens: dict[str, int],
        skipped_ids: Iterable[int],
        encode_plain: Callable[[str], list[int]],
    ):
        self.special_tokens = special_tokens
        self.skipped_ids = frozenset(skipped_ids)
        self.vocab_size = len(pieces)
        self._pieces = tuple(pieces)
        self._encode_plain = encode_plain
        # Longest first: of two markers that start alike, the longer one is meant.
        longest_first = sorted(special_tokens, key=len, reverse=True)
        # `(?!)` matches nowhere: there are no special tokens.
        either = "|".join(map(re.escape, longest_first)) or "(?!)"
        self._special = re.compile(f"(?<!{SHIELD})(?:{either})")
        self._special_start = re.compile(f"(?={either})")

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Returns the ids of a text.

        Args:
          allow_special: Special tokens in the text become their ids, except those
            that `shield` protected. By default they are ordinary text.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text holds a lone surrogate at character {error.start}; "
                "expected valid Unicode"
            ) from None
        if not allow_special:
            return self._encode_plain(text)
        ids, start = [], 0
        for match in self._special.finditer(text):
            ids += self._encode_plain(text[start : match.start()].replace(SHIELD, ""))
            ids.append(self.special_tokens[match[0]])
            start = match.end()
        return ids + self._encode_plain(text[start:].replace(SHIELD, ""))

    def shield(self, text: str) -> str:
        """Returns the text with `SHIELD` before all that could pass for a marker.

        `encode(..., allow_special=True)` then takes the text for plain text,
        wherever it is pasted into a template, and drops the shields again before
        it encodes. Merges across the borders of the pasted text are therefore
        those of the whole. Nor can the template's own text complete a marker:
        beginnings of one at the text's end, and ends at its start, are shielded
        as well.
        """
        if SHIELD in text:
            raise RequestError(
                f"the text holds the noncharacter U+{ord(SHIELD):04X}, "
                "which is not for interchange"
            )
        prefixes, suffixes = self._fragments
        longest = max(map(len, prefixes), default=0)
        lengths = range(1, min(longest, len(text)) + 1)
        at = {match.start() for match in self._special_start.finditer(text)}
        at |= {len(text) - n for n in lengths if text[-n:] in prefixes}
        if any(text[:n] in suffixes for n in lengths):
            at.add(0)
        borders = [0, *sorted(at), len(text)]
        return SHIELD.join(text[a:b] for a, b in itertools.pairwise(borders))

    @functools.cached_property
    def _fragments(self) -> tuple[frozenset[str], frozenset[str]]:
        """Proper beginnings, and proper ends, of the special tokens."""
        cuts = [(t[:i], t[i:]) for t in self.special_tokens for i in range(1, len(t))]
        return frozenset(a for a, _ in cuts), frozenset(b for _, b in cuts)

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one id; none for the model's padding rows."""
        return self._pieces[token_id] if 0 <= token_id < self.vocab_size else b""

    def decode_bytes(self, ids: Iterable[int], *, skip_special: bool = False) -> bytes:
        """Returns the bytes of the ids, joined."""
        skipped = self.skipped_ids if skip_special else ()
        return b"".join(self.token_bytes(i) for i in ids if i not in skipped)

    def decode(self, ids: Iterable[int], *, skip_special: bool) -> str:
        """Returns the text of the ids; U+FFFD stands for broken characters."""
        return self.decode_bytes(ids, skip_special=skip_special).decode(
            errors="replace"
        )
