"""Answers against a loop that sees one token at a time and decides with hindsight."""

import itertools
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree_jax.engine.output import Output, OutputAssembler
from ddtree_jax.engine.tokenizer import load_tokenizer
from ddtree_jax.errors import RequestError

KIMI = load_tokenizer(pathlib.Path(__file__).parent / "data")
END = KIMI.special_tokens["<|im_end|>"]
EOS = KIMI.special_tokens["[EOS]"]
THINK = KIMI.special_tokens["<think>"]
BOS = KIMI.special_tokens["[BOS]"]


def visible(ids, skip):
    return b"".join(KIMI.token_bytes(i) for i in ids if not (skip and i == BOS))


def may_grow(rest: bytes) -> bool:
    """Whether some continuation makes exactly one character of the bytes."""
    for more in itertools.chain.from_iterable(
        itertools.product((0x80, 0x90, 0xA0), repeat=n) for n in (1, 2, 3)
    ):
        try:
            if len((rest + bytes(more)).decode()) == 1:
                return True
        except UnicodeDecodeError:
            continue
    return False


def whole_characters(data: bytes) -> str:
    """The text of the bytes, without a last character that may still grow."""
    cuts = range(max(len(data) - 3, 0), len(data))
    cut = next((cut for cut in cuts if may_grow(data[cut:])), len(data))
    return data[:cut].decode("utf-8", "replace")


def oracle(ids, *, cap, stops=(), stop_ids=(), skip=True):
    """Takes tokens one by one; returns (tokens, text, reason) of the answer."""
    taken = []

    def cut(text):
        return min((text.find(s) for s in stops if s in text), default=None)

    for token in ids:
        taken.append(token)
        if token in stop_ids:
            text = visible(taken[:-1], skip).decode("utf-8", "replace")
            at = cut(text)
            return taken, text[:at], "stop"
        text = whole_characters(visible(taken, skip))
        if (at := cut(text)) is not None:
            return taken, text[:at], "stop"
        if len(taken) == cap:
            text = visible(taken, skip).decode("utf-8", "replace")
            at = cut(text)
            return taken, text[:at], "length" if at is None else "stop"
    return taken, None, None


def run(ids, cuts, **options):
    assembler = OutputAssembler(KIMI, **options)
    borders = [0, *sorted(min(c, len(ids)) for c in cuts), len(ids)]
    return assembler, [assembler.feed(ids[a:b]) for a, b in itertools.pairwise(borders)]


def joined(outputs):
    reasons = [o.finish_reason for o in outputs if o.finish_reason]
    assert len(reasons) <= 1
    tokens = [i for o in outputs for i in o.token_ids]
    return tokens, "".join(o.text for o in outputs), reasons[0] if reasons else None


@pytest.mark.parametrize("stop_at", range(8))
@pytest.mark.parametrize("cap", range(1, 9))
def test_every_stop_position_cap_and_split(stop_at, cap):
    ids = [97 + i for i in range(8)]
    ids[stop_at] = END
    want = oracle(ids, cap=cap, stop_ids={END})
    assert want[2] == ("stop" if stop_at < cap else "length")
    for accepted in range(1, 9):
        cuts = range(0, 8, accepted)
        _, outputs = run(ids, cuts, max_tokens=cap, eos_token_ids=[EOS, END])
        assert joined(outputs) == want


@given(
    ids=st.lists(
        st.one_of(
            st.sampled_from(
                [97, 98, 99, END, EOS, BOS, THINK, THINK + 1, *"好😀".encode()]
            ),
            st.integers(0, 655),
        ),
        max_size=24,
    ),
    cap=st.integers(1, 26),
    stops=st.lists(
        st.sampled_from(["a", "ab", "abc", "bca", "好", "b好", "aab", "<think>", "�"]),
        max_size=3,
    ),
    cuts=st.lists(st.integers(0, 24), max_size=8),
    skip=st.booleans(),
    ignore_eos=st.booleans(),
)
@settings(max_examples=500)
def test_any_split_equals_one_token_at_a_time(ids, cap, stops, cuts, skip, ignore_eos):
    stop_ids = {THINK + 1} | (set() if ignore_eos else {END, EOS})
    hidden = {END, EOS} if ignore_eos and skip else set()
    # The oracle hides no token but [BOS].
    ids = [i for i in ids if i < 400 or i in {END, EOS, BOS, THINK, THINK + 1} - hidden]
    want = oracle(ids, cap=cap, stops=stops, stop_ids=stop_ids, skip=skip)
    assembler, outputs = run(
        ids,
        cuts,
        max_tokens=cap,
        stop=stops,
        stop_token_ids=[THINK + 1],
        eos_token_ids=[END, EOS],
        ignore_eos=ignore_eos,
        skip_special_tokens=skip,
    )
    tokens, text, reason = joined(outputs)
    assert (tokens, reason) == (want[0], want[2])
    assert assembler.finished == (reason is not None)
    if reason is not None:
        assert text == want[1]
        return
    # Unfinished: what is withheld is the shortest that has to be.
    shown = whole_characters(visible(ids, skip))
    assert shown.startswith(text)
    held = shown[len(text) :]
    assert held in {"", *(s[:n] for s in stops for n in range(1, len(s)))}
    tails = {shown[-n:] for n in range(1, 8) if n <= len(shown)}
    longest = [t for t in tails if any(s.startswith(t) and s != t for s in stops)]
    assert len(held) == max(map(len, longest), default=0)


def test_stop_string_across_tokens_steps_and_characters():
    ids = list("x好👍yz".encode())
    _, outputs = run(ids, range(len(ids)), max_tokens=99, stop=["好👍y"])
    assert [o.text for o in outputs if o.text] == ["x"]
    assert outputs[9].finish_reason == "stop"
    assert joined(outputs)[0] == ids[:9]


def test_text_that_only_resembles_a_stop_string_comes_late_but_comes():
    assembler = OutputAssembler(KIMI, max_tokens=9, stop=["abcd"])
    assert assembler.feed(b"xab") == Output(token_ids=(120, 97, 98), text="x")
    assert assembler.feed(b"ca").text == "abc"
    assert assembler.feed([END]).text == ""
    assembler = OutputAssembler(KIMI, max_tokens=9, stop=["abcd"], eos_token_ids=[END])
    assert assembler.feed(b"xabc").text == "x"
    assert assembler.feed([END]) == Output(
        token_ids=(END,), text="abc", finish_reason="stop"
    )


def test_held_text_comes_out_when_the_cap_ends_the_answer():
    assembler = OutputAssembler(KIMI, max_tokens=2, stop=["abc"])
    assert assembler.feed(b"abc") == Output(
        token_ids=(97, 98), text="ab", finish_reason="length"
    )


def test_a_stop_string_may_be_completed_by_the_end_itself():
    half = "好".encode()[:2]
    _, outputs = run([97, *half], [], max_tokens=3, stop=["\ufffd"])
    assert joined(outputs) == ([97, *half], "a", "stop")
    _, outputs = run([97, *half], [], max_tokens=3, stop=["x"])
    assert joined(outputs) == ([97, *half], "a\ufffd", "length")


def test_the_earliest_of_two_stop_strings_cuts():
    (token,) = [i for i in range(256, 400) if KIMI.token_bytes(i) == b" the"]
    _, outputs = run([97, token, 98], [], max_tokens=9, stop=["he", " th"])
    assert joined(outputs) == ([97, token], "a", "stop")


def test_stop_token_counts_but_is_not_text():
    options = {"max_tokens": 9, "eos_token_ids": [END], "skip_special_tokens": False}
    _, outputs = run([97, END, 98], [], **options)
    assert joined(outputs) == ([97, END], "a", "stop")


def test_ignore_eos_keeps_the_requests_own_stop_tokens():
    _, outputs = run(
        [97, END, 98, 99, 100],
        [],
        max_tokens=9,
        eos_token_ids=[END],
        stop_token_ids=[99],
        ignore_eos=True,
        skip_special_tokens=False,
    )
    assert joined(outputs) == ([97, END, 98, 99], "a<|im_end|>b", "stop")


def test_skip_special_tokens_leaves_markers_with_meaning():
    ids = [THINK, 97, BOS, 98]
    _, outputs = run(ids, [], max_tokens=9)
    assert joined(outputs) == (ids, "<think>ab", None)
    _, outputs = run(ids, [], max_tokens=9, skip_special_tokens=False)
    assert joined(outputs) == (ids, "<think>a[BOS]b", None)


def test_tokens_after_the_end_are_dropped():
    assembler = OutputAssembler(KIMI, max_tokens=1)
    assert assembler.feed([97, 98]).finish_reason == "length"
    assert assembler.feed([99]) == Output()


def test_impossible_requests_are_refused():
    with pytest.raises(RequestError, match="stop holds an empty string") as caught:
        OutputAssembler(KIMI, max_tokens=1, stop=["a", ""])
    assert caught.value.param == "stop"
    with pytest.raises(RequestError, match="max_tokens is 0; expected at least 1"):
        OutputAssembler(KIMI, max_tokens=0)
