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


def config(capability: str, name: str, *, nodes: int = 9, batch: int = 1):
    sizes = {"heads": 8, "latent": 512, "rope": 64, "held": 65_536}
    return kernel.cut(capability, name, batch=batch, nodes=nodes, **sizes)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("batch", [1, 7, 32, 1000])
@pytest.mark.parametrize("nodes", [1, 9, 65, 512])
def test_every_call_has_a_rule_that_cuts_it(capability, batch, nodes):
    name = tuned.kernel_for(capability, rows=nodes * 8, batch=batch)
    made = config(capability, name, nodes=nodes, batch=batch)
    assert made.rows * made.row_blocks >= nodes * 8
    assert made.splits >= 1


def test_the_first_rule_that_fits_counts(monkeypatch):
    rules = (
        Rule("large", rows=72, batch=32),
        Rule("small", rows=72),
        Rule("other"),
    )
    monkeypatch.setattr(tuned, "table", lambda: {"9.0": rules})

    calls = {(72, 32): "large", (73, 32): "other", (72, 31): "small", (73, 1): "other"}
    for (rows, batch), want in calls.items():
        assert tuned.kernel_for("9.0", rows=rows, batch=batch) == want


def test_a_kernel_has_its_own_cut():
    transposed, wide = (config("9.0", name) for name in ("transposed", "wide"))
    assert (transposed.rows, transposed.row_blocks) == (72, 1)
    assert (wide.rows, wide.row_blocks) == (64, 2)


def row(name: str, rows: int, batch: int, kernel: str, us: float) -> dict:
    case = {"name": name, "rows": rows, "batch": batch, "kernel": kernel}
    return {"case": case, "us": us}


def test_rules_are_the_fastest_candidates():
    """By shares of the first candidate, so that long contexts do not decide alone."""
    first, second = tuning.CANDIDATES
    times = [
        # One context gains half, another loses a quarter: 0.875 in the mean.
        *(row("a", 72, 1, k, us) for k, us in ((first, 10.0), (second, 5.0))),
        *(row("b", 72, 1, k, us) for k, us in ((first, 100.0), (second, 125.0))),
        # Within what a measurement varies.
        *(row("c", 576, 1, k, us) for k, us in ((first, 10.0), (second, 9.8))),
        *(row("d", 72, 32, k, us) for k, us in ((first, 10.0), (second, 9.8))),
        # One rule is enough for these two and for 72 rows of one request.
        *(row("e", 8, 1, k, us) for k, us in ((first, 10.0), (second, 9.0))),
        *(row("f", 8, 8, k, us) for k, us in ((first, 10.0), (second, 9.0))),
    ]
    assert tuning.rules_of(times) == [
        Rule(first, rows=72, batch=32),
        Rule(second, rows=72),
        Rule(first),
    ]


def test_candidates_are_timed_beside_the_first_and_failures_named(monkeypatch):
    """With stand-ins for what a GPU compiles; one candidate is wrong."""
    [case] = chosen(["kimi-heads8-batch1-nodes9-context1024-*"])
    candidates = ("transposed", "wide", "wrong")
    results = [np.full(4, value, np.float32) for value in (1.0, 1.001, 2.0)]

    def compiled(result) -> Future:
        future = Future()
        future.set_result(lambda *_: (result,))
        return future

    def compile_candidates(*_):
        return [(c, compiled(x)) for c, x in zip(candidates, results, strict=True)]

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
    assert [r["case"]["kernel"] for r in rows] == ["transposed", "wide"]
    assert saved == [1, 2]
    assert rows[1]["case"] | {"rows": 72, "batch": 1} == rows[1]["case"]
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
    rules = [Rule("transposed", rows=72, batch=8), Rule("wide")]
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
