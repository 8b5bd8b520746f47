"""Owns the token files that training reads, and the list of what went into them.

`build` writes train.npy, heldout.npy and prompts.npy (uint16), bytes_per_token.npy,
packages.json (every distribution with its licence) and manifest.json, last. What
the target writes after prompts is what the drafter learns; prompts.npy has tests of
the training packages, which the target has not learnt by heart.
"""

import collections
import dataclasses
import hashlib
import json
import multiprocessing
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from tiny import sources
from tiny.dialogues import dialogues
from tiny.sources import Package
from tiny.tokenizer_files import KIMI_PATTERN, read_ranks, special_token_id

# Few packages are a quarter of all text, and much of theirs repeats itself.
_BYTES_A_PACKAGE = 32_000_000
_PROMPT_BYTES_A_PACKAGE = 2_000_000
_DIALOGUE_SHARE = 0.3
# A training file with this share of held-out lines is a copy of a held-out file.
_COPIED_SHARE = 0.1
_SEED = 0


class Codec:
    """Text to token ids, special tokens by name."""

    def __init__(self, model: Path):
        tokens = read_ranks(model / "tiktoken.model")
        self.ranks = len(tokens)
        self._encoding = tiktoken.Encoding(
            "tiny",
            pat_str=KIMI_PATTERN,
            mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
            special_tokens={},
        )
        # Special tokens stand for no text.
        self.bytes_per_token = np.zeros(self.ranks + 256, np.uint8)
        self.bytes_per_token[: self.ranks] = [len(token) for token in tokens]

    def document(self, text: str) -> list[int]:
        """Returns the tokens of a text and the token that ends it."""
        return [*self._encoding.encode_ordinary(text), self.special("[EOS]")]

    def dialogue(self, pieces: list[str]) -> list[int]:
        """Returns the tokens of texts (even places) and special tokens (odd ones)."""
        ids: list[int] = []
        for place, piece in enumerate(pieces):
            if place % 2:
                ids.append(self.special(piece))
            else:
                ids += self._encoding.encode_ordinary(piece)
        return ids

    def special(self, name: str) -> int:
        """Returns the id of a special token."""
        return special_token_id(name, ranks=self.ranks)


@dataclasses.dataclass(frozen=True)
class _Document:
    """One file in tokens, with the tokens of the chats made from it."""

    digest: bytes
    num_bytes: int
    tokens: np.ndarray
    chats: np.ndarray


class _Worker:
    """What each process holds: the codec and the lines that are held out."""

    codec: Codec
    held_out_lines: frozenset[int]

    @classmethod
    def start(cls, model: Path, held_out_lines: frozenset[int]) -> None:
        cls.codec, cls.held_out_lines = Codec(model), held_out_lines

    @classmethod
    def run(cls, job: tuple[str, Path | str]) -> _Document | None:
        name, source = job
        is_path = isinstance(source, Path)
        text = sources.read(source) if is_path else sources.usable(source)
        lines = _long_lines(text)
        copied = len(lines & cls.held_out_lines)
        if not text or copied > _COPIED_SHARE * max(len(lines), 1):
            return None
        chats: list[int] = []
        if is_path and source.suffix == ".py":
            rng = random.Random(name)
            for pieces in dialogues(text, rng, share=_DIALOGUE_SHARE):
                chats += cls.codec.dialogue(pieces)
        raw = text.encode()
        return _Document(
            hashlib.sha256(raw).digest(),
            len(raw),
            np.array(cls.codec.document(text), np.uint16),
            np.array(chats, np.uint16),
        )


def _long_lines(text: str) -> set[int]:
    """Returns hashes of the lines that are too long to be alike by chance."""
    lines = (line.strip() for line in text.split("\n"))
    return {
        int.from_bytes(hashlib.blake2b(line.encode(), digest_size=8).digest())
        for line in lines
        if len(line) >= 40
    }


def build(model: Path, out: Path, *, processes: int, max_bytes: int | None) -> None:
    """Writes the token files of everything permissive that is installed here.

    Args:
      model: Directory of tiktoken.model.
      max_bytes: Most bytes of one package, for a quick try.
    """
    out.mkdir(parents=True, exist_ok=True)
    found = sources.packages()
    held_out = [package for package in found if package.split == "heldout"]
    lines = frozenset().union(
        *(_long_lines(text) for p in held_out for _, text in sources.texts(p))
    )
    limit = _BYTES_A_PACKAGE if max_bytes is None else max_bytes
    splits: dict[str, list[np.ndarray]] = {"train": [], "heldout": [], "prompts": []}
    records: list[dict[str, Any]] = []
    seen: set[bytes] = set()
    with multiprocessing.get_context("fork").Pool(
        processes, _Worker.start, (model, lines)
    ) as pool:
        for package in found:
            # Held-out files are no copies of themselves.
            documents = pool.imap(
                _Worker.run if package.split == "train" else _held_out,
                _jobs(package, limit),
                chunksize=8,
            )
            kept = _take(documents, seen, limit)
            splits[package.split] += [document.tokens for document in kept]
            if package.split == "train":
                splits["train"] += [d.chats for d in kept if len(d.chats)]
            records.append(_record(package, kept))
        # After all else, so that what is trained on does not depend on them.
        limit = min(limit, _PROMPT_BYTES_A_PACKAGE)
        for package, record in zip(found, records, strict=True):
            tests = package.tests if package.split == "train" else ()
            jobs = _paths_to_jobs(package, tests, limit)
            kept = _take(pool.imap(_Worker.run, jobs, chunksize=8), seen, limit)
            splits["prompts"] += [document.tokens for document in kept]
            record["prompt_bytes"] = sum(document.num_bytes for document in kept)
    order = np.random.default_rng(_SEED).permutation(len(splits["train"]))
    splits["train"] = [splits["train"][i] for i in order]
    _write(out, splits, Codec(model).bytes_per_token, records)


def _held_out(job: tuple[str, Path | str]) -> _Document | None:
    _, source = job
    text = sources.read(source) if isinstance(source, Path) else sources.usable(source)
    if not text:
        return None
    tokens = np.array(_Worker.codec.document(text), np.uint16)
    raw = text.encode()
    nothing = np.zeros(0, np.uint16)
    return _Document(hashlib.sha256(raw).digest(), len(raw), tokens, nothing)


def _jobs(package: Package, limit: int) -> list[tuple[str, Path | str]]:
    """Returns a package's texts to train on."""
    jobs = _paths_to_jobs(package, package.paths, limit)
    if package.description:
        return [(f"{package.name}/METADATA", package.description), *jobs]
    return jobs


def _paths_to_jobs(
    package: Package, paths: tuple[Path, ...], limit: int
) -> list[tuple[str, Path | str]]:
    """Returns files with their names, in an order of no meaning where not all fit."""
    jobs: list[tuple[str, Path | str]] = []
    total = 0
    for path in sorted(paths, key=_name_digest):
        total += path.stat().st_size
        if total > 1.5 * limit:
            break
        jobs.append((f"{package.name}/{path.name}", path))
    return jobs


def _name_digest(path: Path) -> bytes:
    return hashlib.sha256(path.name.encode()).digest()


def _take(
    documents: Iterator[_Document | None], seen: set[bytes], limit: int
) -> list[_Document]:
    """Returns the documents that are new, up to `limit` bytes."""
    kept, total = [], 0
    for document in documents:
        if document is None or document.digest in seen:
            continue
        if (total := total + document.num_bytes) > limit:
            break
        seen.add(document.digest)
        kept.append(document)
    return kept


def _record(package: Package, kept: list[_Document]) -> dict[str, Any]:
    return {
        "name": package.name,
        "version": package.version,
        "licence": package.licence,
        "licence_files": list(package.licence_files)[:4],
        "files": len(kept),
        "bytes": sum(document.num_bytes for document in kept),
        "split": package.split,
    }


def _write(
    out: Path,
    splits: dict[str, list[np.ndarray]],
    bytes_per_token: np.ndarray,
    records: list[dict[str, Any]],
) -> None:
    nothing = np.zeros(0, np.uint16)
    arrays = {name: np.concatenate([nothing, *p]) for name, p in splits.items()}
    arrays["bytes_per_token"] = bytes_per_token
    sizes, digests = {}, {}
    for name, array in arrays.items():
        np.save(out / f"{name}.npy", array)
        sizes[name] = int(array.size)
        digests[name] = hashlib.sha256(array.tobytes()).hexdigest()
    records = [record for record in records if record["files"]]
    _write_json(out / "packages.json", records)
    totals: collections.Counter[str] = collections.Counter()
    for record in records:
        totals[record["split"]] += record["bytes"]
        totals["prompts"] += record.get("prompt_bytes", 0)
    manifest = {"tokens": sizes, "bytes": dict(totals), "sha256": digests}
    _write_json(out / "manifest.json", manifest)


def _write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, indent=1)
    # One line a record: the list is read by people, and compared.
    text = re.sub(r"\n  +", " ", text)
    path.write_text(text + "\n")


def load(directory: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a built corpus by name."""
    names = json.loads((directory / "manifest.json").read_text())["tokens"]
    return {name: np.load(directory / f"{name}.npy") for name in names}
