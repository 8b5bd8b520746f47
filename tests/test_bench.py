"""Records, tables and comparisons; nothing here measures a time."""

import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from bench import (
    compare,
    device_time,
    limits,
    prompts,
    record,
    tables,
    timing,
    tree_mla,
    tree_mla_arms,
    tree_mla_cases,
    tree_mla_inputs,
    tree_mla_table,
)
from bench.__main__ import main
from ddtree_jax.engine.tokenizer import load_tokenizer
from ddtree_jax.errors import ConfigError, DDTreeError
from ddtree_jax.pallas.tree_mla.cases import CASES, TreeMlaCase

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
    "<!-- tree mla -->\n<!-- /tree mla -->\n<!-- int4 -->\n<!-- /int4 -->\n"
    "b\n<!-- tree build -->\n<!-- /tree build -->\nc\n"
    "<!-- agreement -->\n<!-- /agreement -->\n"
    "<!-- convert -->\n<!-- /convert -->\n"
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
    assert "Conversion has not been timed yet." in text
    assert "Agreement has not been measured yet." in text
    assert text.count("The kernel has not been timed yet.") == 2
    with pytest.raises(ConfigError, match="expected one block <!-- tree build -->"):
        tables.updated(EMPTY.replace("<!-- tree build -->", ""), tmp_path)


def test_agreement_table_has_rates_and_margins(tmp_path):
    case = {"model": "m", "prompts": "p", "budget": 32}
    row = {
        "case": {**case, "reference": "float32 plain", "tested": "bfloat16 ddtree"},
        "texts": 24,
        "diverged": 1 / 12,
        "tokens": 1000,
        "per_1000_tokens": 2.0,
        "margin_median": 0.0123,
        "margin_max": 0.5,
        "beyond_near_ties": 1,
        "differences": [{}, {}],
    }
    same = row | {"per_1000_tokens": 0.0, "beyond_near_ties": 0, "differences": []}
    same |= {"margin_median": None, "margin_max": None}
    record = {**ACCEPTANCE, "rows": [row, same], "float32_margins": {"near_ties": 0.09}}
    (tmp_path / "agreement-h200.json").write_text(json.dumps(record))
    text = tables.updated(EMPTY, tmp_path)
    start = "| m | bfloat16 ddtree | float32 plain | 32 |"
    assert "9% of the places of the float32 texts are near-ties" in text
    assert f"{start} 2 of 24 | 2.0 | 0.012 | 0.500 | 1 |" in text
    assert f"{start} 0 of 24 | 0.0 | – | – | 0 |" in text


def a_record(**figures) -> dict:
    rows = [{"case": {"n": int(n[1:])}, "us": us} for n, us in figures.items()]
    return {"topic": "t", "device": "d", "rows": rows}


def test_a_record_that_is_not_whole_is_written_and_says_so(capsys, tmp_path):
    path = tmp_path / "r.json"

    def measure(rows, *, save):
        rows.append(a_record(n1=2.0)["rows"][0])
        save()
        return ["case 2: out of time"]

    with pytest.raises(DDTreeError, match=r"^t: not measured: case 2: out of time$"):
        record.fill(a_record(), path, measure, lambda made: f"{len(made['rows'])} row")
    assert record.read_record(path)["rows"] == a_record(n1=2.0)["rows"]
    assert capsys.readouterr().out == f"1 row\n{path} written\n"


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


def of_kimi(heads: int, nodes: int, context: int, batch: int = 1) -> TreeMlaCase:
    [case] = (
        c
        for c in CASES
        if (c.size, c.heads, c.nodes) == ("kimi", heads, nodes)
        and c.context_len == (context,) * batch
    )
    return case


# From a table made apart from the code: microseconds, m(emory) or c(ompute).
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (of_kimi(8, 9, 1_024), "0.3m"),
        (of_kimi(8, 17, 1_024), "0.4c"),
        (of_kimi(8, 1, 5_632), "1.5m"),
        (of_kimi(8, 9, 16_384), "4.4m"),
        (of_kimi(8, 33, 16_384), "11.9c"),
        (of_kimi(8, 65, 65_536), "94.0c"),
        (of_kimi(8, 9, 200_000), "53.6m"),
        (of_kimi(8, 65, 200_000), "286.6c"),
        (of_kimi(64, 9, 65_536), "104.0c"),
        (of_kimi(64, 1, 65_536), "17.6m"),
        (of_kimi(8, 9, 5_632, batch=32), "49.5m"),
        (of_kimi(64, 9, 5_632, batch=8), "71.6c"),
    ],
    ids=str,
)
def test_tree_mla_floors(case, expected):
    got = tree_mla_cases.floor(case)
    assert f"{got.us:.1f}{got.bound[0]}" == expected


def test_tree_mla_times_every_case_that_has_a_goal():
    cases = tree_mla_cases.chosen(())
    got = {
        (s.heads, len(s.context_len), s.nodes, s.context_len[0]): (case.must, case.aim)
        for case in cases
        for s in [case.shape]
    }
    assert got == {
        (8, 1, 9, 1_024): (18, 10),
        (8, 1, 9, 5_632): (30, 14),
        (8, 1, 9, 16_384): (40, 20),
        (8, 1, 9, 65_536): (60, 32),
        (8, 1, 9, 200_000): (115, 75),
        (8, 32, 9, 5_632): (110, 65),
        (64, 1, 9, 65_536): (160, 120),
        (8, 1, 65, 65_536): (160, 115),
        (8, 1, 17, 5_632): (None, None),
        (8, 1, 17, 65_536): (None, None),
        (8, 1, 33, 5_632): (None, None),
        (8, 1, 33, 65_536): (None, None),
        (8, 1, 1, 5_632): (None, None),
        (8, 1, 1, 65_536): (None, None),
        (8, 1, 512, 4_096): (None, None),
    }
    assert [case.form for case in cases] == ["tree"] * 14 + ["chain"]
    # The best of the trees, and the best of the chains, at the five contexts.
    best = [
        (min(cascade, p.get("SGLang decode", cascade)), min(p["FlashMLA"], p["FA3"]))
        for p in (case.peers for case in cases[:5])
        for cascade in [p["cascade"]]
    ]
    trees, chains = zip(*best, strict=True)
    assert [round(us) for us in trees] == [18, 45, 54, 74, 127]
    assert [round(us) for us in chains] == [14, 20, 25, 48, 102]


def test_tree_mla_cases_are_chosen_by_pattern():
    got = tree_mla_cases.chosen(["*-context1024-*", "*-nodes512-*"])
    assert [c.shape.nodes for c in got] == [9, 512]
    with pytest.raises(
        ConfigError, match=r"--cases '\*9' matches none of kimi-heads8-"
    ):
        tree_mla_cases.chosen(["*-nodes512-*", "*9"])


def test_tree_mla_refuses_a_cpu(capsys, tmp_path):
    out = tmp_path / "r.json"
    assert main(["tree-mla", "--output", str(out)]) == 1
    assert capsys.readouterr().err == (
        "error: tree-mla: expected a GPU of compute capability 9.0, found cpu; "
        "absolute times count only there\n"
    )
    assert not out.exists()


SMALL = tree_mla_cases.BenchCase(
    shape=TreeMlaCase(
        size="ci",
        heads=2,
        nodes=9,
        context_len=(40, 130),
        latent=32,
        rope=16,
        page_size=16,
    ),
    form="tree",
    peers={"cascade": 3.0},
    must=1e9,
    aim=1e-9,
)


def small_shared(pages: int = 40) -> tree_mla_inputs.Shared:
    return tree_mla_inputs.make_shared(SMALL, tree_mla_inputs.make_pool(SMALL, pages))


def test_calls_read_every_page_before_one_again():
    tables = tree_mla_inputs.page_tables(SMALL, pages=40, calls=5)
    walk = np.concatenate([np.ravel(t) for t in tables])
    assert tables[0].shape == (2, 9) and len(walk) == 90
    assert sorted(walk[:40]) == list(range(40)) and (walk[:40] == walk[40:80]).all()
    assert list(walk[:40]) != list(range(40))
    shared = small_shared()
    trains = tree_mla_arms.make_trains(SMALL, shared, calls=2)
    # 18 pages a call, 36 a train: two trains read all 40.
    assert [len(group) for _, group in trains] == [2, 2]
    with pytest.raises(ValueError, match="needs 18 pages; the pool has 17"):
        tree_mla_inputs.page_tables(SMALL, pages=17, calls=1)


def test_timed_trees_are_trees_and_chunks_are_chains():
    tree = tree_mla_inputs.ancestors(SMALL)
    assert tree[:, :, 0].all() and not np.triu(tree, 1).any()
    for request in tree:
        for node in range(1, 9):
            # The parent is the last ancestor, and sees all others.
            parent = np.flatnonzero(request[node])[-2]
            assert node - parent <= 6
            assert (request[node, :node] == request[parent, :node]).all()
    chunk = tree_mla_cases.chosen(["*-nodes512-*"])[0]
    chain = tree_mla_inputs.ancestors(chunk)
    assert (chain == np.tril(np.ones((512, 512), bool))).all()


def test_a_train_chains_its_calls_and_xla_agrees_with_the_reference():
    shared = small_shared()
    assert np.isnan(shared.tail_latent[:, 9:]).all()
    [arguments, *_] = tree_mla_arms.make_trains(SMALL, shared, calls=2)
    truth = tree_mla_arms.exact_call(*arguments)
    for name in ("xla bfloat16", "reference"):
        attention = tree_mla_arms.IMPLEMENTATIONS[name]
        train = tree_mla_arms.lower_train(attention, arguments).compile()
        result = train(*arguments)
        error, lse_error = tree_mla.check(result, tuple(map(np.asarray, truth)))
        assert 1e-4 < error < 4e-3 and lse_error < 1e-4
        first, last, lse = result
        second = (shared._replace(q_latent=first), arguments[1][1:])
        output, sums = tree_mla_arms.exact_call(*second)
        tree_mla.check((last, last, [lse[1]]), (np.asarray(output), np.asarray(sums)))


def test_wrong_results_are_no_times():
    truth = np.ones((2, 3), np.float32), np.zeros(2, np.float32)
    good = (jnp.ones((2, 3)), jnp.ones((2, 3)), [jnp.zeros(2)])
    assert tree_mla.check(good, truth) == (0, 0)
    for bad in (
        (good[0] * 1.02, *good[1:]),
        (*good[:2], [jnp.full(2, 0.02)]),
    ):
        with pytest.raises(ValueError, match=r"by 0\.02.*; expected less than 0\.01"):
            tree_mla.check(bad, truth)
    for bad in (
        (good[0], good[1] * jnp.inf, good[2]),
        (*good[:2], [*good[2], jnp.full(2, jnp.nan)]),
    ):
        with pytest.raises(ValueError, match="a result is not finite"):
            tree_mla.check(bad, truth)


class Device:
    """A clock, a host that launches trains and a device that runs them in order."""

    def __init__(self, monkeypatch, *, launch_s: float, train_s: float):
        self.now = self.free = 0.0
        self.launch_s, self.train_s = launch_s, train_s
        monkeypatch.setattr(device_time.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(device_time.jax, "block_until_ready", self.wait)
        monkeypatch.setattr(device_time, "hold", self.hold)

    def hold(self, seconds: float) -> None:
        self.free = max(self.free, self.now) + seconds

    def run(self, argument):
        self.now += self.launch_s
        self.hold(self.train_s)
        return argument

    def wait(self, _) -> None:
        # Whatever waiting costs the host.
        self.now = max(self.now, self.free) + 9


def test_only_the_device_counts_where_launching_takes_longer(monkeypatch):
    device = Device(monkeypatch, launch_s=5e-3, train_s=1e-3)
    got = device_time.time_trains(device.run, [(1,), (2,)], calls=10)
    assert got.device == pytest.approx((100, 100, 100))
    assert got.host_us == pytest.approx(500)


def test_a_host_that_becomes_slow_is_refused(monkeypatch):
    device = Device(monkeypatch, launch_s=5e-3, train_s=1e-3)

    def hold(seconds):
        device.launch_s = 1.0
        device.hold(seconds)

    monkeypatch.setattr(device_time, "hold", hold)
    with pytest.raises(RuntimeError, match="launching a call took 100000 us"):
        device_time.time_trains(device.run, [(1,)], calls=10)


def test_kernels_are_summed_a_call():
    run = [("a_mosaic_gpu_kernel", 0.002), ("b", 0.010), ("a_mosaic_gpu_kernel", 0.004)]
    slow = [(name, 9 * ms) for name, ms in run]
    got = device_time.by_kernel([run, slow, run], calls=2)
    assert got == pytest.approx({"a": 3, "b": 5})


def test_tree_mla_rows_and_their_table():
    timing_ = device_time.DeviceTiming(timing.Timing(20.0, 19.0, 120.0), 19.0)
    row = tree_mla.row_of(SMALL, "pallas", timing_, calls=96)
    assert row["case"] == {
        "name": "ci-heads2-batch2-nodes9-context130-page16",
        "heads": 2,
        "batch": 2,
        "nodes": 9,
        "context": 130,
        "form": "tree",
        "implementation": "pallas",
    }
    assert (row["us"], row["p10"], row["p90"]) == (20, 19, 120)
    assert row["must_us"] == 1e9 and row["peers_us"] == {"cascade": 3}
    row |= {"kernels_us": {"a": 12.0, "b": 3.04}, "floor_us": 2.0, "x_floor": 10.0}
    other = tree_mla.row_of(SMALL, "xla bfloat16", timing_, calls=4)
    assert "peers_us" not in other
    *_, line = tree_mla_table.table({"rows": [row, other]}).splitlines()
    assert line == (
        "| 2 | 2 | 9 | 130 | 20.0 | 19.0–120 | 15.0 | 20.0 | – | 2.0 | 10.0 "
        "| – | – | 3.0 | – | 1e+09 | 1e-09, missed |"
    )


def test_one_case_that_fails_or_comes_late_does_not_stop_the_others(capsys):
    wrong = []
    pool = tree_mla_inputs.make_pool(SMALL, 40)
    arms = tree_mla_arms.compile_arms(
        [SMALL], pool, "reference", wrong, limits.Deadline.after(-1)
    )
    assert arms == {}
    assert wrong == [f"{SMALL.name} reference: TimeoutError: out of time"]
    with limits.noted(wrong, f"{SMALL.name} pallas"):
        raise ValueError("two\nlines")
    assert wrong[1] == f"{SMALL.name} pallas: ValueError: two lines"
    assert wrong[1] in capsys.readouterr().out
