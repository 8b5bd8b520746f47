"""The tuned table of the attention kernels, and how it is made; nothing is timed."""

import json
from concurrent.futures import Future

import numpy as np
import pytest

from bench import tree_mla_tuning as tuning
from bench.__main__ import main
from bench.device_time import DeviceTiming
from bench.limits import Deadline
from bench.timing import Timing
from bench.tree_mla_cases import chosen
from ddtree_jax.pallas.tree_mla import kernel, tuned
from ddtree_jax.pallas.tree_mla.tuned import Rule

CAPABILITIES = ("9.0", "12.0")


def config(capability: str, rule: Rule, *, nodes: int = 9, batch: int = 1):
    sizes = {"heads": 8, "latent": 512, "rope": 64, "held": 65_536}
    return kernel.cut(capability, rule, batch=batch, nodes=nodes, **sizes)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("batch", [1, 7, 32, 1000])
@pytest.mark.parametrize("nodes", [1, 9, 65, 512])
def test_every_call_has_a_rule_that_cuts_it(capability, batch, nodes):
    rule = tuned.rule_for(capability, rows=nodes * 8, batch=batch)
    made = config(capability, rule, nodes=nodes, batch=batch)
    assert made.rows * made.row_blocks >= nodes * 8
    assert made.splits >= 1


def test_the_first_rule_that_fits_counts(monkeypatch):
    rules = (
        Rule("wide", {}, rows=72, batch=32),
        Rule("transposed", {}, rows=72),
        Rule("wide", {}),
    )
    monkeypatch.setattr(tuned, "table", lambda: {"9.0": rules})

    def place(rows: int, batch: int) -> int:
        return rules.index(tuned.rule_for("9.0", rows=rows, batch=batch))

    assert [place(72, 32), place(73, 32), place(72, 31), place(73, 1)] == [0, 2, 1, 2]


def test_options_of_a_rule_reach_the_cut():
    plain, narrow = (
        config("9.0", Rule("transposed", options)) for options in ({}, {"max_rows": 40})
    )
    assert (plain.rows, plain.row_blocks) == (72, 1)
    assert (narrow.rows, narrow.row_blocks) == (40, 2)
    assert config("9.0", Rule("wide", {"early_chunks": 3})).early_chunks == 3
    with pytest.raises(TypeError, match="unexpected keyword argument 'wide'"):
        config("9.0", Rule("transposed", {"wide": 1}))


def row(name: str, rows: int, batch: int, candidate: int, us: float) -> dict:
    case = {"name": name, "rows": rows, "batch": batch, "candidate": candidate}
    return {"case": case, "us": us}


def test_rules_are_the_fastest_candidates():
    """By shares of the first candidate, so that long contexts do not decide alone."""
    times = [
        # One context gains half, another loses a quarter: 0.875 in the mean.
        *(row("a", 72, 1, k, us) for k, us in ((0, 10.0), (2, 5.0), (3, 9.9))),
        *(row("b", 72, 1, k, us) for k, us in ((0, 100.0), (2, 125.0), (3, 99.0))),
        # Within what a measurement varies.
        *(row("c", 576, 1, k, us) for k, us in ((0, 10.0), (3, 9.8))),
        *(row("d", 72, 32, k, us) for k, us in ((0, 10.0), (4, 9.0))),
    ]
    assert tuning.rules_of(times) == [
        tuning.CANDIDATES[4]._replace(rows=72, batch=32),
        tuning.CANDIDATES[2]._replace(rows=72),
        tuning.CANDIDATES[0],
    ]


def test_candidates_are_timed_beside_the_first_and_failures_named(monkeypatch):
    """With stand-ins for what a GPU compiles; the third candidate is wrong."""
    [case] = chosen(["kimi-heads8-batch1-nodes9-context1024-*"])
    results = [np.full(4, value, np.float32) for value in (1.0, 1.001, 2.0)]

    def compiled(result) -> Future:
        future = Future()
        future.set_result(lambda *_: (result,))
        return future

    def compile_candidates(*_):
        return [
            (c, compiled(x)) for c, x in zip(tuning.CANDIDATES, results, strict=False)
        ]

    timing = DeviceTiming(Timing(10.0, 9.0, 11.0), 1.0)
    monkeypatch.setattr(tuning, "make_pool", lambda _: None)
    monkeypatch.setattr(tuning, "make_shared", lambda *_: None)
    monkeypatch.setattr(tuning, "make_trains", lambda *_: [()])
    monkeypatch.setattr(tuning, "compile_candidates", compile_candidates)
    monkeypatch.setattr(tuning.device_time, "time_trains", lambda *_, **__: timing)
    rows, saved = [], []
    wrong = tuning.measure(
        [case],
        rows,
        save=lambda: saved.append(len(rows)),
        deadline=Deadline.after(60),
    )
    assert [r["case"]["candidate"] for r in rows] == [0, 1] and saved == [1, 2]
    assert rows[1]["case"] | {"rows": 72, "batch": 1, "max_rows": 40} == rows[1]["case"]
    assert rows[1]["difference"] == 0.001 and rows[1]["us"] == 10
    [line] = wrong
    assert "differs from the first candidate by 1" in line
    late = tuning.measure([case], [], save=lambda: None, deadline=Deadline.after(-1))
    assert len(late) == 3 and all("out of time" in line for line in late)


def test_no_times_give_no_rules():
    assert tuning.rules_of([]) == []


def test_table_is_written_for_one_gpu_and_read_again(tmp_path):
    path = tmp_path / "tuned.json"
    path.write_text(tuning.TABLE.read_text())
    before = json.loads(path.read_text())
    rules = [Rule("wide", {"early_chunks": 1}, rows=72, batch=8), Rule("wide", {})]
    tuning.write_table(path, "9.0", rules)
    after = json.loads(path.read_text())
    assert tuple(Rule(**rule) for rule in after["9.0"]) == tuple(rules)
    assert after["12.0"] == before["12.0"]


def test_candidates_that_differ_are_wrong():
    x = np.linspace(1, 2, 9, dtype=np.float32)
    assert tuning.check(x, x) == 0
    for other in (x * 1.02, x * np.nan):
        with pytest.raises(ValueError, match="differs from the first candidate"):
            tuning.check(other, x)


def test_tuning_refuses_a_cpu(capsys, tmp_path):
    before = tuning.TABLE.read_text()
    assert main(["tune-tree-mla", "--output", str(tmp_path / "r.json")]) == 1
    assert "expected a GPU of compute capability 9.0" in capsys.readouterr().err
    assert tuning.TABLE.read_text() == before and not list(tmp_path.iterdir())
