"""What the small model reads: licences, held-out packages, words, chats, windows."""

import collections
import email.message
import hashlib
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_jax.engine import tokenizer
from tiny import corpus, tokenizer_files
from tiny.dialogues import dialogues
from tiny.heldout import write_heldout
from tiny.sources import HELD_OUT, licence_of, packages, usable
from tiny.vocabulary import count_words, train

MODEL = Path(__file__).parents[1] / "tiny" / "model"
FUNCTION = '''
def double(x):
    """Returns twice `x`.

    More of it.
    """
    return 2 * x
'''


def metadata(*pairs: tuple[str, str]) -> email.message.Message:
    message = email.message.Message()
    for key, value in pairs:
        message[key] = value
    return message


@pytest.mark.parametrize(
    ("pairs", "want"),
    [
        ([("License-Expression", "BSD-3-Clause AND 0BSD")], "BSD-3-Clause AND 0BSD"),
        ([("License-Expression", "GPL-3.0-only OR MIT")], "GPL-3.0-only OR MIT"),
        ([("License-Expression", "MPL-2.0 AND MIT")], None),
        ([("License", "Apache License, Version 2.0")], "Apache License, Version 2.0"),
        ([("License", "MIT License\n\nCopyright")], "MIT License"),
        ([("License", "GPLv3")], None),
        ([("Classifier", "License :: OSI Approved :: BSD License")], "BSD License"),
        (
            [
                ("Classifier", "License :: OSI Approved :: MIT License"),
                ("Classifier", "License :: OSI Approved :: GNU GPL"),
            ],
            None,
        ),
        ([("License", "MIT"), ("Classifier", "License :: Other/Proprietary")], None),
        ([], None),
    ],
)
def test_only_permissive_licences_count(pairs, want):
    assert licence_of(metadata(*pairs)) == want


def test_held_out_packages_are_installed_and_marked():
    found = {package.name: package for package in packages()}
    assert set(found) >= HELD_OUT
    assert {name for name, p in found.items() if p.split == "heldout"} == HELD_OUT
    assert "python" in found
    for name, folder in (("numpy", "tests"), ("python", "test")):
        inner = [path.parts[-3:-1] for path in found[name].paths]
        assert not any(folder in parts for parts in inner)


def test_texts_lose_their_licence_header_only():
    code = "import os\n# Copyright is discussed here.\n" + "print(os.name)\n" * 10
    for header in ("#!/usr/bin/python\n", "# Copyright 2020 A. Body\n\n# B\n\n"):
        assert usable(header + code) == code
    assert usable(f"# A comment.\n{code}") == f"# A comment.\n{code}"
    assert usable("x = [" + "1, 22, " * 400 + "]\n") == ""
    assert usable("short") == ""


def test_words_are_the_tokenizers():
    assert tokenizer_files.KIMI_PATTERN == tokenizer.KIMI_PATTERN


def test_merges_are_the_most_frequent_pairs():
    counts = collections.Counter({b"abab": 5, b"abc": 4, b"zz": 3, b"once": 1})
    tokens = train(counts, 259)
    # ab occurs 14 times; then abc wins over zz.
    assert tokens[256:] == [b"ab", b"abab", b"abc"]
    assert count_words(["def  f(x)"]) == collections.Counter(
        [b"def", b" ", b" f", b"(x", b")"]
    )


def test_the_shipped_vocabulary_makes_few_tokens_of_code():
    tokens = tokenizer_files.read_ranks(MODEL / "tiktoken.model")
    assert len(set(tokens)) == len(tokens) == 2816
    codec = corpus.Codec(MODEL)
    text = Path(corpus.__file__).read_text()
    ids = codec.document(text)
    assert b"".join(tokens[i] for i in ids[:-1]).decode() == text
    assert codec.bytes_per_token[ids].sum() == len(text.encode())
    assert len(text.encode()) / len(ids) > 2.8


def test_dialogues_have_the_templates_markup():
    [pieces] = dialogues(FUNCTION, random.Random(0), share=1.0)
    assert [piece for piece in pieces[1::2] if piece] == [
        "<|im_user|>",
        "<|im_middle|>",
        "<|im_end|>",
        "<|im_assistant|>",
        "<|im_middle|>",
        "<think>",
        "</think>",
        "<|im_end|>",
        "[EOS]",
    ]
    assert pieces[14] == FUNCTION.strip() + "\n"
    ids = corpus.Codec(MODEL).dialogue(pieces)
    assert sum(i >= 2816 for i in ids) == 9
    assert dialogues(FUNCTION, random.Random(0), share=0.0) == []
    assert dialogues("def broken(:", random.Random(0), share=1.0) == []


def test_copies_of_held_out_files_are_dropped(tmp_path):
    held = "".join(
        f"value_number_{i} = compute_the_value(argument_{i})\n" for i in "abcd"
    )
    lines = corpus._long_lines(held)
    assert len(lines) == 4
    corpus._Worker.start(MODEL, frozenset(lines))
    own = "".join(
        f"another_{i} = compute_the_other_value(argument_{i})\n" for i in "abcde"
    )
    path = tmp_path / "module.py"
    for text, kept in ((held, False), (own, True), (own + held, False)):
        path.write_text(text * 2)
        document = corpus._Worker.run(("package/module.py", path))
        assert (document is not None) == kept


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A corpus of a few files a package, built by the real command."""
    out = tmp_path_factory.mktemp("corpus")
    command = [sys.executable, "-m", "tiny.train", "corpus", "--out", str(out)]
    command += ["--processes", "2", "--max-bytes", "20000"]
    subprocess.run(command, check=True, cwd=MODEL.parents[1], capture_output=True)
    return out


def test_corpus_is_what_its_manifest_says(built):
    manifest = json.loads((built / "manifest.json").read_text())
    arrays = corpus.load(built)
    for name, array in arrays.items():
        assert array.size == manifest["tokens"][name]
        assert hashlib.sha256(array.tobytes()).hexdigest() == manifest["sha256"][name]
    records = json.loads((built / "packages.json").read_text())
    assert {r["name"] for r in records if r["split"] == "heldout"} == HELD_OUT
    for split in ("train", "heldout"):
        total = sum(r["bytes"] for r in records if r["split"] == split)
        assert total == manifest["bytes"][split]
    assert all(r["licence"] and r["bytes"] <= 20000 for r in records)
    text_bytes = arrays["bytes_per_token"][arrays["heldout"]].sum()
    assert text_bytes == manifest["bytes"]["heldout"]


def test_committed_list_names_a_licence_for_every_package():
    records = json.loads((MODEL.parent / "data" / "packages.json").read_text())
    assert {r["name"] for r in records if r["split"] == "heldout"} == HELD_OUT
    assert all(r["licence"] and r["version"] for r in records)
    assert sum(r["bytes"] for r in records) > 100_000_000


def test_heldout_files_are_those_of_the_heldout_packages(tmp_path):
    count = write_heldout(tmp_path)
    files = sorted(tmp_path.iterdir())
    assert len(files) == count > 20
    assert {file.name.split("-")[0] for file in files} == HELD_OUT
    assert all(file.suffix == ".py" and file.stat().st_size > 3000 for file in files)
