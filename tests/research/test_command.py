"""The command as it is used: records, picture, and one clear line for bad input."""

import json
import re

import jax
import pytest

from ddtree_jax.errors import ConfigError
from ddtree_jax.research import record
from ddtree_jax.research.__main__ import main
from ddtree_jax.research.prompts import read_prompts

ROW_KEYS = {
    "case",
    "acceptance_length",
    "ci_low",
    "ci_high",
    "distinct_4grams",
    "steps",
    "tokens",
    "diverged",
}


@pytest.fixture(autouse=True)
def precision():
    """The command raises JAX's matmul precision for its process."""
    before = jax.config.jax_default_matmul_precision
    yield
    jax.config.update("jax_default_matmul_precision", before)


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt_ids": [1, 2, 3]}, {"prompt_ids": [4], "source": "a.py:1"}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def check_record(path, topic):
    got = json.loads(path.read_text())
    assert got["topic"] == topic
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", got["date"])
    assert re.fullmatch(r"[0-9a-f]{40}( \(dirty\))?|unknown", got["commit"])
    assert got["command"].startswith("python -m ddtree_jax.research ")
    assert str(path.parent) not in path.read_text()
    assert got["versions"].keys() >= {"jax", "jaxlib", "flax", "python"}
    assert got["device"] and got["definition"]
    assert got["settings"]["num_prompts"] == 2
    return got


def test_accept_writes_a_record_and_a_picture(
    tiny_checkpoint, prompt_file, tmp_path, capsys
):
    out, plot = tmp_path / "acceptance.json", tmp_path / "curve.png"
    arguments = ["accept", "--model", str(tiny_checkpoint), "--prompts"]
    arguments += [str(prompt_file), "--out", str(out), "--plot", str(plot)]
    arguments += ["--devices", "1", "--shapes", "plain,ddtree", "--budgets", "8"]
    arguments += ["--temperatures", "0", "--max-tokens", "6", "--mask-slot-0"]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "tokens emitted per decoding step, bonus token included" in printed
    got = check_record(out, "acceptance")
    plain, tree = got["rows"]
    assert plain.keys() == tree.keys() == ROW_KEYS
    assert plain["acceptance_length"] == 1.0 and plain["tokens"] == plain["steps"] > 0
    assert tree["case"] == {
        "model": "tiny",
        "prompts": "prompts.jsonl",
        "mask_slot_0": True,
        "temperature": 0.0,
        "shape": "ddtree",
        "budget": 8,
    }
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_record_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "r.json"
    record.write_record(path, {"rows": [1]})
    with pytest.raises(TypeError):
        record.write_record(path, {"rows": object()})
    assert json.loads(path.read_text()) == {"rows": [1]}
    (tmp_path / "directory").mkdir()
    with pytest.raises(IsADirectoryError):
        record.write_record(tmp_path / "directory", {"rows": [1]})
    # Nothing half-written is left behind.
    assert {p.name for p in tmp_path.iterdir()} == {"r.json", "directory"}


def test_a_record_names_no_place_of_this_machine():
    argv = ["accept", "--model", "/home/me/DIR", "--out=/tmp/a.json", "--slots", "8"]
    got = record.make_record("acceptance", [], program="p", argv=argv)
    assert got["command"] == ("python -m p accept --model DIR --out=a.json --slots 8")


def test_bad_input_is_one_line(tiny_checkpoint, prompt_file, tmp_path, capsys):
    arguments = ["accept", "--prompts", str(prompt_file), "--devices", "1"]
    model = ["--model", str(tiny_checkpoint)]
    out = ["--out", str(tmp_path / "o.json")]
    for extra, message in [
        ([*model, "--out", str(tmp_path)], "cannot be written; expected a file's name"),
        (["--model", str(tmp_path), *out], "manifest.json"),
        ([*model, *out, "--shapes", "bush"], "--shapes: 'bush' is unknown"),
    ]:
        assert main([*arguments, *extra]) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        assert message in error
    assert not (tmp_path / "o.json").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "p.jsonl:1 is not JSON"),
        ('{"prompt": "a"}', 'p.jsonl:1 has no "prompt_ids"; `python -m bench prompts`'),
        ('{"prompt_ids": [1], "ids": 2}', "p.jsonl:1: 'ids' is unknown; expected"),
        ('{"prompt_ids": []}', '"prompt_ids" is not a list of one token id or more'),
        ('{"prompt_ids": [true]}', '"prompt_ids" is not a list of one token id'),
        ('{"prompt_ids": [8]}', "p.jsonl:1: token id 8 is outside 0 .. 7"),
        ('{"prompt_ids": [-1]}', "p.jsonl:1: token id -1 is outside 0 .. 7"),
    ],
)
def test_bad_prompts_are_named(tmp_path, line, message):
    (tmp_path / "p.jsonl").write_text(line + "\n")
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_prompts(tmp_path / "p.jsonl", vocab_size=8)


def test_a_directory_is_read_in_order_and_must_hold_prompts(tmp_path):
    with pytest.raises(ConfigError, match=r"has no prompts; expected lines of JSON"):
        read_prompts(tmp_path, vocab_size=8)
    (tmp_path / "b.jsonl").write_text('{"prompt_ids": [2]}\n')
    (tmp_path / "a.jsonl").write_text('{"prompt_ids": [1]}\n')
    assert read_prompts(tmp_path, vocab_size=8).ids == [[1], [2]]
    with pytest.raises(ConfigError, match=r"none.jsonl cannot be read"):
        read_prompts(tmp_path / "none.jsonl", vocab_size=8)
