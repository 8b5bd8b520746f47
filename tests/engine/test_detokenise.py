"""Text piece by piece against the text of the whole, decoded by tiktoken."""

import itertools
import pathlib

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax.engine.detokenise import Detokeniser
from ddtree_jax.engine.tokenizer import KIMI_PATTERN, load_tokenizer

KIMI = load_tokenizer(pathlib.Path(__file__).parent / "data")
ORACLE = tiktoken.Encoding(
    "oracle",
    pat_str=KIMI_PATTERN,
    mergeable_ranks={KIMI.token_bytes(i): i for i in range(400)},
    special_tokens=KIMI.special_tokens,
)
# Bytes of characters of two, three and four bytes, cut anywhere, among other tokens.
CHARACTERS = [list("é好😀\u0301".encode()), *([b] for b in "世".encode())]
IDS = st.lists(
    st.one_of(
        st.lists(st.integers(0, 655), max_size=3),
        st.lists(st.integers(0x80, 0xFF), min_size=1, max_size=4),
        st.sampled_from(CHARACTERS),
        st.text(max_size=3).map(lambda text: list(text.encode("utf-8", "ignore"))),
    ),
    max_size=12,
).map(lambda parts: list(itertools.chain(*parts)))


def pieces(ids, cuts, *, skip_special=False):
    detokeniser = Detokeniser(KIMI, skip_special=skip_special)
    borders = [0, *sorted(min(c, len(ids)) for c in cuts), len(ids)]
    out = [detokeniser.feed(ids[a:b]) for a, b in itertools.pairwise(borders)]
    return [*out, detokeniser.flush()]


@given(IDS, st.lists(st.integers(0, 40), max_size=6))
@settings(max_examples=300)
def test_pieces_are_the_whole_for_any_split(ids, cuts):
    assert "".join(pieces(ids, cuts)) == ORACLE.decode(ids)
    kept = [i for i in ids if i not in KIMI.skipped_ids]
    assert "".join(pieces(ids, cuts, skip_special=True)) == ORACLE.decode(kept)


@pytest.mark.parametrize("text", ["é", "好", "😀", "a好b😀c", "👨‍👩‍👧", "नमस्ते"])
def test_a_character_cut_at_every_place_comes_out_whole(text):
    ids = list(text.encode())
    for cut in range(len(ids) + 1):
        out = pieces(ids, [cut])
        assert "".join(out) == text
        assert "\ufffd" not in "".join(out)
    one_by_one = pieces(ids, range(len(ids)))
    assert [piece for piece in one_by_one if piece] == list(text)


def test_nothing_is_withheld_but_half_a_character():
    detokeniser = Detokeniser(KIMI, skip_special=False)
    assert detokeniser.feed([97, 98]) == "ab"
    assert detokeniser.feed([99, *"好".encode()[:2]]) == "c"
    assert detokeniser.feed([]) == ""
    assert detokeniser.feed("好".encode()[2:]) == "好"
    assert detokeniser.flush() == ""


def test_an_answer_that_ends_within_a_character_ends_in_ufffd():
    detokeniser = Detokeniser(KIMI, skip_special=True)
    assert detokeniser.feed([97, *"😀".encode()[:3]]) == "a"
    assert detokeniser.flush() == "\ufffd"


def test_bytes_that_can_be_no_character_do_not_wait():
    detokeniser = Detokeniser(KIMI, skip_special=True)
    assert detokeniser.feed([0xFF]) == "\ufffd"
    assert detokeniser.feed([0xE5, 97]) == "\ufffda"
