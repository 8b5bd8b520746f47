"""Spoilt files of SGLang are refused in one line that names one, or change nothing."""

import json
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from convert.__main__ import main
from convert.detect import open_checkpoint
from tests.convert.fuzzing import (
    Contents,
    Spoilt,
    changed,
    check,
    contents,
    encoded,
    few,
    with_header,
    write_small,
)
from tests.convert.support import read_config

RANK = "model-rank-1-part-0.safetensors"


@pytest.fixture(scope="module", params=["marlin", "raw", "triton"])
def saved(request, tmp_path_factory) -> Path:
    """A small checkpoint as two ranks hold it."""
    root = tmp_path_factory.mktemp("fuzz")
    small = write_small(root, moe_intermediate_size=128)
    command = ["export", small, root / "sglang", "--to", "sglang", "--tp", "2"]
    assert main([*map(str, command), "--layout", request.param]) == 0
    return root / "sglang"


@pytest.fixture(scope="module")
def intact(saved) -> Contents:
    return contents(open_checkpoint(saved))


def read_header(path: Path) -> tuple[bytes, dict]:
    content = path.read_bytes()
    return content, json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])


@few(60)
@hypothesis.given(data=st.data())
def test_header_of_a_rank(saved, intact, data):
    content, header = read_header(saved / RANK)
    spoilt = with_header(content, encoded(data.draw(changed(header))))
    with Spoilt(saved / RANK, spoilt):
        check(lambda: contents(open_checkpoint(saved)), lambda: intact, str(saved))


@few(60)
@hypothesis.given(data=st.data())
def test_name_of_a_tensor(saved, intact, data):
    """A letter or a number of a name is another."""
    content, header = read_header(saved / RANK)
    name = data.draw(st.sampled_from(sorted(header)))
    at = data.draw(st.integers(0, len(name) - 1))
    letter = data.draw(st.sampled_from("0129.wk_x"))
    other = f"{name[:at]}{letter}{name[at + data.draw(st.integers(0, 1)) :]}"
    hypothesis.assume(other != name and other not in header)
    renamed = {other if n == name else n: entry for n, entry in header.items()}
    with Spoilt(saved / RANK, with_header(content, encoded(renamed))):
        check(lambda: contents(open_checkpoint(saved)), lambda: intact, str(saved))


@few(40)
@hypothesis.given(data=st.data())
def test_bytes_of_a_rank(saved, intact, data):
    """Cut, or one byte of a tensor that all ranks hold is another."""
    content, header = read_header(saved / RANK)
    start = 8 + int.from_bytes(content[:8], "little")
    if data.draw(st.booleans()):
        spoilt = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        same = [n for n in sorted(header) if n.endswith(("norm.weight", "gate.weight"))]
        begin, end = header[data.draw(st.sampled_from(same))]["data_offsets"]
        at = start + data.draw(st.integers(begin, end - 1))
        spoilt = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
    with Spoilt(saved / RANK, spoilt):
        check(lambda: contents(open_checkpoint(saved)), lambda: None, str(saved))


@few(40)
@hypothesis.given(data=st.data())
def test_config(saved, intact, data):
    config = data.draw(changed(read_config(saved)))
    with Spoilt(saved / "config.json", encoded(config)):
        check(lambda: contents(open_checkpoint(saved)), lambda: intact, str(saved))
