"""Owns ids → text while the ids still arrive. Does not know about stopping."""

import codecs
from collections.abc import Iterable

from ddtree_jax.engine.token_codec import Tokenizer


class Detokeniser:
    """Turns ids into text piece by piece, whole characters only.

    **Invariant:** the pieces of `feed`, and of `flush` at the end, joined, are
    `Tokenizer.decode` of all ids, however the ids were split.

    Args:
      skip_special: Leaves out the tokens in `Tokenizer.skipped_ids`.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # Holds back a character's first bytes; bytes that can no longer become a
        # character turn into U+FFFD, exactly as in `bytes.decode`.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        """Returns the text that these ids complete."""
        return self._decoder.decode(
            self._tokenizer.decode_bytes(ids, skip_special=self._skip_special)
        )

    def flush(self) -> str:
        """Returns U+FFFD if the ids ended within a character, else nothing."""
        return self._decoder.decode(b"", final=True)
