"""Trains the byte-level BPE vocabulary, and writes it in tiktoken's form.

    python -m tiny.vocabulary DST [--ranks N]

`DST` is a file such as tiktoken.model. Words are Kimi's words; merges are the most
frequent pairs of the installed permissive texts, held-out packages excluded.
"""

import argparse
import collections
import heapq
import itertools
from collections.abc import Iterable
from pathlib import Path

import regex

from tiny.sources import packages, texts
from tiny.tokenizer_files import KIMI_PATTERN, write_ranks

# Version 1 of `regex` has the class intersections of the pattern.
_WORD = regex.compile(KIMI_PATTERN, regex.V1)
_BYTES_A_PACKAGE = 4_000_000

type Pair = tuple[bytes, bytes]


def count_words(documents: Iterable[str]) -> collections.Counter[bytes]:
    """Returns how often each of Kimi's words occurs."""
    counts: collections.Counter[bytes] = collections.Counter()
    for text in documents:
        counts.update(word.encode() for word in _WORD.findall(text))
    return counts


def train(counts: collections.Counter[bytes], ranks: int) -> list[bytes]:
    """Returns tokens by rank: 256 bytes, then the merges in their order."""
    tokens = [bytes([byte]) for byte in range(256)]
    words = [
        [tokens[byte] for byte in word]
        for word, count in sorted(counts.items())
        if count > 1 and len(word) > 1
    ]
    weights = [
        count for word, count in sorted(counts.items()) if count > 1 and len(word) > 1
    ]
    table = _PairTable(words, weights)
    known = set(tokens)
    while len(tokens) < ranks:
        pair = table.pop()
        merged = b"".join(pair)
        table.merge(pair)
        if merged not in known:  # Two pairs can spell the same bytes.
            known.add(merged)
            tokens.append(merged)
    return tokens


class _PairTable:
    """How often neighbours occur, kept up to date as they are merged."""

    def __init__(self, words: list[list[bytes]], weights: list[int]):
        self._words, self._weights = words, weights
        self._counts: collections.Counter[Pair] = collections.Counter()
        self._where: dict[Pair, set[int]] = collections.defaultdict(set)
        for index in range(len(words)):
            self._add(index, 1)
        self._heap = [(-count, pair) for pair, count in self._counts.items()]
        heapq.heapify(self._heap)

    def _add(self, index: int, sign: int) -> set[Pair]:
        word = self._words[index]
        pairs = list(itertools.pairwise(word))
        for pair in pairs:
            self._counts[pair] += sign * self._weights[index]
            if sign > 0:
                self._where[pair].add(index)
        return set(pairs)

    def pop(self) -> Pair:
        """Returns the most frequent pair; of equals the smallest."""
        while True:
            count, pair = heapq.heappop(self._heap)
            if -count == self._counts[pair]:  # Others are out of date.
                return pair

    def merge(self, pair: Pair) -> None:
        """Joins the pair wherever it occurs."""
        changed: set[Pair] = set()
        for index in self._where.pop(pair):
            changed |= self._add(index, -1)
            self._words[index] = _joined(self._words[index], pair)
            changed |= self._add(index, 1)
        for other in changed:
            if self._counts[other] > 0:
                heapq.heappush(self._heap, (-self._counts[other], other))


def _joined(word: list[bytes], pair: Pair) -> list[bytes]:
    result: list[bytes] = []
    position = 0
    while position < len(word):
        if tuple(word[position : position + 2]) == pair:
            result.append(b"".join(pair))
            position += 2
        else:
            result.append(word[position])
            position += 1
    return result


def installed_texts() -> Iterable[str]:
    """Yields the training texts installed here, a bounded amount of each package."""
    for package in packages():
        if package.split == "heldout" or package.name.startswith("httpx"):
            continue
        left = _BYTES_A_PACKAGE
        for _, text in texts(package):
            if (left := left - len(text)) < 0:
                break
            yield text


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tiny.vocabulary")
    parser.add_argument("destination", type=Path, metavar="DST")
    parser.add_argument("--ranks", type=int, default=2816, metavar="N")
    arguments = parser.parse_args()
    tokens = train(count_words(installed_texts()), arguments.ranks)
    write_ranks(arguments.destination, tokens)


if __name__ == "__main__":
    main()
