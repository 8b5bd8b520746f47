"""Records, tables and comparisons; nothing here measures a time."""

import json
import re
from pathlib import Path

import pytest

from bench import compare, prompts, record, tables, timing
from ddtree_jax.engine.tokenizer import load_tokenizer
from ddtree_jax.errors import ConfigError

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "tiny_k26"


def test_readme_tables_are_those_of_the_records():
    text = (ROOT / "README.md").read_text()
    assert tables.updated(text) == text


@pytest.mark.parametrize("path", sorted(record.RESULTS.glob("*.json")), ids=str)
def test_records_are_in_the_documented_form(path):
    got = record.read_record(path)
    assert path.name.startswith(got["topic"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", got["date"])
    assert got["commit"] and got["command"].startswith("python -m ")
    assert got["versions"]["jax"] and got["rows"]
    assert not re.search(r"/(home|tmp|work|Users)/", path.read_text())


def test_tree_build_was_timed_at_every_budget():
    rows = record.read_record(record.RESULTS / "tree_build-cpu.json")["rows"]
    budgets = {r["case"]["budget"] for r in rows if r["case"]["horizon"] == 7}
    assert budgets == {8, 16, 32, 64, 128}
    for row in rows:
        assert row["case"].keys() == {"horizon", "budget", "vocab", "implementation"}
        assert 0 < row["p10"] <= row["us"] <= row["p90"]


ACCEPTANCE = {
    "topic": "acceptance",
    "date": "2026-01-02",
    "command": "python -m ddtree_jax.research accept",
    "device": "a computer",
    "versions": {"jax": "9"},
    "definition": "tokens per step",
    "rows": [
        {
            "case": {
                "model": "m",
                "prompts": "p.jsonl",
                "temperature": 0.0,
                "shape": "ddtree",
                "budget": 32,
            },
            "acceptance_length": 3.456,
            "ci_low": 3.1,
            "ci_high": 3.8,
            "distinct_4grams": 0.9,
        }
    ],
}
EMPTY = "a\n<!-- acceptance -->\n<!-- /acceptance -->\n" + (
    "b\n<!-- tree build -->\n<!-- /tree build -->\nc\n"
)


def table_of(tmp_path, **changed) -> str:
    row = {**ACCEPTANCE["rows"][0], **changed}
    content = json.dumps({**ACCEPTANCE, "rows": [row]})
    (tmp_path / "acceptance.json").write_text(content)
    return tables.updated(EMPTY, tmp_path)


def test_acceptance_table_has_definition_and_interval(tmp_path):
    text = table_of(tmp_path)
    assert "tokens per step." in text
    row = "| m | p.jsonl | 0 | ddtree | 32 | **3.46** [3.10, 3.80] | 0.90 |"
    assert row in text
    assert text.startswith("a\n<!-- acceptance -->\n")
    assert tables.updated(text, tmp_path) == text


def test_degenerate_text_is_no_headline(tmp_path):
    text = table_of(tmp_path, distinct_4grams=0.49)
    assert "(3.46, degenerate text)" in text and "**" not in text


def test_ablations_do_not_get_into_the_table(tmp_path):
    case = {**ACCEPTANCE["rows"][0]["case"], "mask_slot_0": True}
    with pytest.raises(ConfigError, match="'mask_slot_0' is no case of this table"):
        table_of(tmp_path, case=case)


def test_what_was_not_measured_says_so_and_markers_are_needed(tmp_path):
    text = tables.updated(EMPTY, tmp_path)
    assert "Acceptance has not been measured yet." in text
    assert "The tree builder has not been timed yet." in text
    with pytest.raises(ConfigError, match="expected one block <!-- tree build -->"):
        tables.updated(EMPTY.replace("<!-- tree build -->", ""), tmp_path)


def a_record(**figures) -> dict:
    rows = [{"case": {"n": int(n[1:])}, "us": us} for n, us in figures.items()]
    return {"topic": "t", "device": "d", "rows": rows}


def test_compare_finds_what_is_slower():
    lines, good = compare.compare(
        a_record(n1=100, n2=100), a_record(n1=109, n2=50), threshold=0.1
    )
    assert good and lines[1].endswith("100 → 109  (+9.0%)")
    lines, good = compare.compare(a_record(n1=100), a_record(n1=111), threshold=0.1)
    assert not good and lines[1].endswith("WORSE")


def test_compare_wants_every_old_case():
    lines, good = compare.compare(a_record(n1=1), a_record(n2=1), threshold=0.1)
    assert not good
    assert "missing" in lines[1] and "new: 1" in lines[2]


def test_compare_knows_that_acceptance_should_be_high():
    old = {**ACCEPTANCE}
    less = {**ACCEPTANCE["rows"][0], "acceptance_length": 3.0}
    new = {**ACCEPTANCE, "rows": [less]}
    assert not compare.compare(old, new, threshold=0.1)[1]
    assert compare.compare(new, old, threshold=0.1)[1]


def test_compare_refuses_what_cannot_be_compared(tmp_path):
    with pytest.raises(ConfigError, match="topics differ: t and acceptance"):
        compare.compare(a_record(n1=1), ACCEPTANCE, threshold=0.1)
    with pytest.raises(ConfigError, match="t: a row has no us or acceptance_length"):
        bare = {"topic": "t", "device": "d", "rows": [{"case": {}}]}
        compare.compare(bare, bare, threshold=0.1)
    for text in ("{", "[]", '{"topic": 1}'):
        (tmp_path / "r.json").write_text(text)
        with pytest.raises(ConfigError, match=r"r\.json is not a record"):
            record.read_record(tmp_path / "r.json")


def test_timer_leaves_the_warm_up_out(monkeypatch):
    # Calls take 1000 s, 1000 s, and then 1, 2, … 11 s.
    durations = [1000, 1000, *range(1, 12)]
    clock = [t for d in durations for t in (0, d)]
    monkeypatch.setattr(timing.time, "perf_counter", iter(clock).__next__)
    calls = []
    got = timing.time_call(lambda: calls.append(1), warm_up=2, repeats=11)
    assert got == (6e6, 2e6, 10e6)
    assert len(calls) == 13


def test_prompts_start_at_lines_and_do_not_overlap(tmp_path):
    tokenizer = load_tokenizer(GOLDEN)
    text = "".join(f"line {i} says héllo\n" for i in range(40))
    (tmp_path / "a.txt").write_text(text)
    out = tmp_path / "out.jsonl"
    written = prompts.write_prompts(
        GOLDEN, [tmp_path / "a.txt"], out, tokens=30, count=4
    )
    entries = [json.loads(line) for line in out.read_text().splitlines()]
    assert written == len(entries) == 4
    lines = text.splitlines(keepends=True)
    end = 0
    for entry in entries:
        name, _, number = entry["source"].partition(":")
        assert name == "a.txt"
        assert len(entry["prompt_ids"]) == 30
        start = sum(map(len, lines[: int(number) - 1]))
        assert start >= end
        got = tokenizer.decode_bytes(entry["prompt_ids"])
        assert text[start:].encode().startswith(got)
        end = start + len(got.decode("utf-8", "ignore"))
    # Spread over the text, not its first cuts.
    assert end > len(text) / 2


def test_texts_that_are_too_short_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(ConfigError, match="no text has 30 tokens"):
        prompts.write_prompts(
            GOLDEN, [tmp_path / "a.txt"], tmp_path / "o", tokens=30, count=4
        )
    with pytest.raises(ConfigError, match=r"--text .*b\.txt cannot be read"):
        prompts.write_prompts(
            GOLDEN, [tmp_path / "b.txt"], tmp_path / "o", tokens=30, count=4
        )
