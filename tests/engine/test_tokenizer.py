"""The tokenizer against tiktoken, `tokenizers`, and a merge loop written out here."""

import base64
import itertools
import json
import os
import pathlib
import shutil
import time

import hypothesis
import pytest
import regex
import tiktoken
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax.engine.token_codec import SHIELD
from ddtree_jax.engine.tokenizer import KIMI_PATTERN, load_tokenizer
from ddtree_jax.errors import RequestError, TokenizerError

DATA = pathlib.Path(__file__).parent / "data"
BASE = 400  # Ranks in the fixture; special slots follow.
KIMI = load_tokenizer(DATA)

# Kimi's split once more, for another engine and by another construction: letters as
# a set difference, in the words of the description.
_UPPER = r"[[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]--[\p{Han}]]"
_LOWER = r"[[\p{Ll}\p{Lm}\p{Lo}\p{M}]--[\p{Han}]]"
_WORD_END = r"(?i:'(?:s|t|re|ve|m|ll|d))?"
SPLIT = regex.compile(
    r"(?V1)\p{Han}+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_WORD_END}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_WORD_END}"
    r"|\p{N}{1,3}"
    r"|\ ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+"
    r"|\s+(?!\S)"
    r"|\s+"
)

TEXTS = st.text(
    st.one_of(
        st.sampled_from(
            "aAbEeTthr  \n\r\t'sS1234你好世界のカ한éǅʰ!?.:/<|>[]_😀\u0301\u3000"
        ),
        # Characters not yet assigned are letters to one engine and none to the other.
        st.characters(exclude_categories=["Cs", "Cn"]),
    ),
    max_size=40,
)
MARKED = st.lists(
    st.one_of(TEXTS, st.sampled_from(sorted(KIMI.special_tokens))), max_size=8
).map("".join)


def ranks_of(directory):
    lines = (directory / "tiktoken.model").read_text().splitlines()
    return {base64.b64decode(t): int(r) for t, r in map(str.split, lines)}


RANKS = ranks_of(DATA)


def merge(piece: bytes) -> list[int]:
    """Byte pair encoding as it is defined: join the pair of lowest rank, repeat."""
    parts = [bytes([b]) for b in piece]
    while pairs := [
        (RANKS[a + b], i)
        for i, (a, b) in enumerate(itertools.pairwise(parts))
        if a + b in RANKS
    ]:
        _, i = min(pairs)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return [RANKS[part] for part in parts]


def write(directory, *, model=None, config=None):
    shutil.copytree(DATA, directory, dirs_exist_ok=True)
    if model is not None:
        (directory / "tiktoken.model").write_text(model)
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def refused(directory, match):
    with pytest.raises(TokenizerError, match=match) as caught:
        load_tokenizer(directory)
    assert "\n" not in str(caught.value)


@given(TEXTS)
@settings(max_examples=150)
def test_plain_text_equals_split_and_merge_as_defined(text):
    want = [i for piece in SPLIT.findall(text) for i in merge(piece.encode())]
    assert KIMI.encode(text) == want
    assert KIMI.decode(want, skip_special=False) == text


def split(text: str) -> list[str]:
    """The pieces that tiktoken makes, with every stretch of the text as a token."""
    spans = itertools.combinations(range(len(text) + 1), 2)
    tokens = {text[a:b].encode() for a, b in spans} | {bytes([b]) for b in range(256)}
    encoding = tiktoken.Encoding(
        "split",
        pat_str=KIMI_PATTERN,
        mergeable_ranks={token: i for i, token in enumerate(sorted(tokens))},
        special_tokens={},
    )
    ids = encoding.encode_ordinary(text)
    return [encoding.decode_single_token_bytes(i).decode() for i in ids]


@pytest.mark.parametrize(
    "pieces",
    [
        ["Hello", "世界", "abc"],
        ["A", "中", "a"],
        ["it's", " IT'S", " we'LL"],
        ["HTTPServer"],
        ["ab", "CD"],
        ["123", "45"],
        ["a", " ", " b"],
        ["x", "!!\n\n", "y"],
        [" \n", " a"],
        ["カナ", "漢字"],
        ["a", "  "],
    ],
)
def test_split_of_known_texts(pieces):
    assert split("".join(pieces)) == pieces


@given(TEXTS)
@settings(max_examples=150)
def test_split_as_described(text):
    assert split(text) == SPLIT.findall(text)


@given(MARKED)
@settings(max_examples=100)
def test_special_tokens_equal_tiktoken(text):
    encoding = tiktoken.Encoding(
        "oracle",
        pat_str=KIMI_PATTERN,
        mergeable_ranks=RANKS,
        special_tokens=KIMI.special_tokens,
    )
    assert KIMI.encode(text, allow_special=True) == encoding.encode(
        text, allowed_special="all"
    )
    plain = KIMI.encode(text)
    assert plain == encoding.encode(text, disallowed_special=())
    assert not any(i >= BASE for i in plain)
    ids = KIMI.encode(text, allow_special=True)
    assert KIMI.decode_bytes(ids) == encoding.decode_bytes(ids) == text.encode()


def test_special_slots_have_the_names_of_the_file_or_are_reserved():
    special = KIMI.special_tokens
    assert len(special) == 256
    assert special["[BOS]"] == BASE
    assert special["<|im_end|>"] == BASE + 2
    assert special["</think>"] == BASE + 23
    assert special[f"<|reserved_token_{BASE + 5}|>"] == BASE + 5
    assert special["[PAD]"] == BASE + 255
    assert KIMI.vocab_size == BASE + 256


def test_skip_special_follows_the_flag_of_each_token():
    text = "<think>a</think>b<|im_end|>"
    ids = KIMI.encode(text, allow_special=True)
    assert KIMI.decode(ids, skip_special=False) == text
    assert KIMI.decode(ids, skip_special=True) == "<think>a</think>b"
    assert BASE + 5 in KIMI.skipped_ids


def test_the_longer_of_two_markers_is_meant_and_no_flag_means_skipped(tmp_path):
    contents = {"400": "<a", "401": "<ab", "402": "<abc"}
    config = {"added_tokens_decoder": {k: {"content": v} for k, v in contents.items()}}
    tokenizer = load_tokenizer(write(tmp_path, config=config))
    assert tokenizer.encode("<abc<ab<a", allow_special=True) == [402, 401, 400]
    assert tokenizer.decode([402, 97], skip_special=True) == "a"


def test_ids_without_text_decode_to_nothing():
    assert KIMI.decode([97, BASE + 256, 10**6, -1, 98], skip_special=False) == "ab"


@pytest.mark.parametrize("unit", ["a", " ", "中", "\n", "!", "😀", "1", "a "])
def test_a_megabyte_of_one_character_is_quick(unit):
    text = unit * (1_000_000 // len(unit.encode()))
    began = time.monotonic()
    ids = KIMI.encode(text)
    assert time.monotonic() - began < 20
    assert KIMI.decode_bytes(ids) == text.encode()


def test_long_runs_are_cut_as_kimi_cuts_them():
    run = "a" * 25_000
    assert KIMI.encode("b " + run + "a") == [*KIMI.encode("b " + run), 97]
    # Within the limit nothing is cut: " a" stays one piece.
    assert KIMI.encode("x" * 25_000 + " the") == [
        *KIMI.encode("x" * 25_000),
        *KIMI.encode(" the"),
    ]
    assert KIMI.encode("x" * 25_000 + "the") == [
        *KIMI.encode("x" * 25_000),
        *KIMI.encode("the"),
    ]
    spaces = KIMI.encode(" " * 50_001)
    assert spaces == [*KIMI.encode(" " * 25_000), *KIMI.encode(" " * 25_000), 32]
    # Cut after 400,000 characters whatever stands there.
    text = "the " * 100_000 + "the"
    head, tail = text[:400_000], text[400_000:]
    assert KIMI.encode(text) == KIMI.encode(head) + KIMI.encode(tail)
    text = "x" + "the " * 100_000
    head, tail = text[:400_000], text[400_000:]
    assert KIMI.encode(text) == KIMI.encode(head) + KIMI.encode(tail)


def test_lone_surrogate_is_refused():
    with pytest.raises(RequestError, match="lone surrogate at character 1"):
        KIMI.encode("a\ud800")


class TestShield:
    @given(st.lists(st.tuples(MARKED, MARKED), max_size=4))
    @settings(max_examples=100)
    def test_markers_of_the_template_only_become_ids(self, pairs):
        shielded = "".join(t + KIMI.shield(content) for t, content in pairs)
        got = KIMI.encode(shielded, allow_special=True)
        whole = "".join(t + content for t, content in pairs)
        assert KIMI.decode_bytes(got) == whole.encode()
        alone = [i for t, _ in pairs for i in KIMI.encode(t, allow_special=True)]
        assert [i for i in got if i >= BASE] == [i for i in alone if i >= BASE]

    @given(TEXTS, TEXTS)
    @settings(max_examples=100)
    def test_text_without_markers_merges_with_what_surrounds_it(self, left, content):
        # Hypothesis knows the markers from this file, and they fit the alphabet.
        hypothesis.assume(not any(m in left + content for m in KIMI.special_tokens))
        text = f"<|im_user|>{left}{KIMI.shield(content)} the<|im_end|>"
        plain = f"<|im_user|>{left}{content} the<|im_end|>"
        assert KIMI.encode(text, allow_special=True) == KIMI.encode(
            plain, allow_special=True
        )

    @pytest.mark.parametrize("cut", range(1, len("<|im_end|>")))
    def test_template_and_content_cannot_share_a_marker(self, cut):
        marker = "<|im_end|>"
        ending = KIMI.shield("a" + marker[:cut]) + marker[cut:]
        starting = marker[:cut] + KIMI.shield(marker[cut:] + "a")
        for text in (ending, starting):
            ids = KIMI.encode(text, allow_special=True)
            assert ids == KIMI.encode(text.replace(SHIELD, ""))

    def test_ordinary_text_is_not_touched(self):
        assert KIMI.shield("Hello, 世界! a < b") == "Hello, 世界! a < b"

    def test_the_shield_itself_is_refused(self):
        with pytest.raises(RequestError, match=r"noncharacter U\+FDD0"):
            KIMI.shield(f"a{SHIELD}b")


class TestBrokenFiles:
    def test_no_file(self, tmp_path):
        refused(tmp_path, "expected tiktoken.model or tokenizer.json")

    @pytest.mark.parametrize("line", ["a!b= 400", "YQ==", "YQ== x", "YQ== 1 2", "YQ 4"])
    def test_bad_line(self, tmp_path, line):
        text = (DATA / "tiktoken.model").read_text() + line + "\n"
        refused(write(tmp_path, model=text), "line 401: expected a base64 token")

    def test_duplicate_rank(self, tmp_path):
        text = (DATA / "tiktoken.model").read_text() + "eHh4eA== 7\n"
        refused(write(tmp_path, model=text), "line 401: rank 7 a second time")

    def test_duplicate_token(self, tmp_path):
        text = (DATA / "tiktoken.model").read_text() + "AA== 400\n"
        refused(write(tmp_path, model=text), r"token b'\\x00' a second time")

    @pytest.mark.parametrize("hole", [0, 300])
    def test_hole(self, tmp_path, hole):
        lines = (DATA / "tiktoken.model").read_text().splitlines()
        del lines[hole]
        refused(write(tmp_path, model="\n".join(lines)), f"no rank {hole}; expected 0")

    def test_missing_byte(self, tmp_path):
        lines = (DATA / "tiktoken.model").read_text().splitlines()
        lines[65] = base64.b64encode(b"no byte").decode() + " 65"
        refused(write(tmp_path, model="\n".join(lines)), "no token for byte 0x41")

    @pytest.mark.parametrize("token_id", [399, 656])
    def test_special_token_outside_the_slots(self, tmp_path, token_id):
        config = {"added_tokens_decoder": {str(token_id): {"content": "<x>"}}}
        match = f"special token '<x>' has id {token_id}; expected 400 to 655"
        refused(write(tmp_path, config=config), match)

    def test_special_token_twice(self, tmp_path):
        entry = {"content": "<x>"}
        config = {"added_tokens_decoder": {"400": entry, "401": entry}}
        refused(write(tmp_path, config=config), "special token '<x>' has two ids")

    @pytest.mark.parametrize("entry", [{}, {"content": ""}, "<x>"])
    def test_special_token_without_content(self, tmp_path, entry):
        config = {"added_tokens_decoder": {"400": entry}}
        refused(write(tmp_path, config=config), "expected an id and its content")

    def test_vocabulary_larger_than_the_models(self, tmp_path):
        write(tmp_path)
        (tmp_path / "config.json").write_text('{"vocab_size": 655}')
        refused(tmp_path, "656 token ids, but config.json says vocab_size 655")

    def test_config_that_is_no_json(self, tmp_path):
        write(tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("{")
        refused(tmp_path, "tokenizer_config.json: not JSON")


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    """A `tokenizer.json` made by the library itself, with markers and indentation."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(
        ["the tree of the drafts 你好世界 <think>"] * 9, trainer
    )
    backend.add_tokens(["<think>", "    "])
    backend.enable_truncation(4)
    directory = tmp_path_factory.mktemp("fast")
    backend.save(str(directory / "tokenizer.json"))
    backend.no_truncation()
    return directory, backend


class TestTokenizerJson:
    @given(
        st.lists(
            st.one_of(TEXTS, st.sampled_from(["<s>", "<think>", "    ", " the"])),
            max_size=8,
        ).map("".join)
    )
    @settings(max_examples=100)
    def test_equals_the_library(self, fast, text):
        directory, backend = fast
        ours = load_tokenizer(directory)
        ids = ours.encode(text, allow_special=True)
        assert ids == backend.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids, skip_special=True) == backend.decode(ids)
        assert ours.decode_bytes(ids) == text.encode()

    def test_markers_in_plain_text_stay_text(self, fast):
        ours = load_tokenizer(fast[0])
        text = "<s>the<think></s><|end|>    x"
        ids = ours.encode(text)
        assert not set(ids) & set(ours.special_tokens.values())
        assert ours.decode(ids, skip_special=True) == text
        # Indentation is spelling, not a marker.
        assert fast[1].token_to_id("    ") in ids
        assert set(ours.special_tokens) == {"<s>", "<|end|>", "<think>"}

    def test_tiktoken_wins_over_tokenizer_json(self, fast, tmp_path):
        shutil.copy(fast[0] / "tokenizer.json", write(tmp_path))
        assert load_tokenizer(tmp_path).encode(" the") == KIMI.encode(" the")

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"decoder": {"type": "Metaspace"}}, "expected ByteLevel"),
            ({"decoder": None}, r"decoder \[None\]; expected ByteLevel"),
            ({"model": {"type": "Unigram"}}, "model Unigram; expected BPE"),
            ({"pre_tokenizer": {"type": "Nope"}}, "tokenizer.json: "),
            ({"model": {"type": "BPE"}}, "tokenizer.json: "),
            ({"added_tokens": [{"id": 0}]}, "tokenizer.json: "),
        ],
    )
    def test_other_kinds_are_refused(self, fast, tmp_path, change, match):
        data = json.loads((fast[0] / "tokenizer.json").read_text()) | change
        (tmp_path / "tokenizer.json").write_text(json.dumps(data))
        refused(tmp_path, match)

    def test_tokens_that_swallow_blanks_are_refused(self, fast, tmp_path):
        data = json.loads((fast[0] / "tokenizer.json").read_text())
        data["added_tokens"][0]["lstrip"] = True
        (tmp_path / "tokenizer.json").write_text(json.dumps(data))
        refused(tmp_path, "added token '<s>' has lstrip")


@pytest.mark.skipif(
    "DDTREE_KIMI_TOKENIZER" not in os.environ,
    reason="runs when DDTREE_KIMI_TOKENIZER names a folder with Kimi's tiktoken.model "
    "and tokenizer_config.json",
)
def test_ids_of_kimis_own_files():
    tokenizer = load_tokenizer(pathlib.Path(os.environ["DDTREE_KIMI_TOKENIZER"]))
    assert tokenizer.vocab_size == 163840
    assert tokenizer.special_tokens["<|im_end|>"] == 163586
    assert tokenizer.special_tokens["[PAD]"] == 163839
    text = (
        "<|im_system|>system<|im_middle|>You are a helpful assistant.<|im_end|>"
        "<|im_user|>user<|im_middle|>Who are you?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>My name is Qwen2.<|im_end|>"
    )
    ids = (
        "163594 14062 163601 3900 554 261 13205 26626 13 163586 "
        "163587 2482 163601 24328 554 398 30 163586 "
        "163588 69702 163601 6725 1530 387 1999 33249 17 13 163586"
    )
    assert tokenizer.encode(text, allow_special=True) == list(map(int, ids.split()))
