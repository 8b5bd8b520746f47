"""The small model's training: the same functions as the engine's, and its stages."""

import itertools
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from ddtree_jax.model.cache import abstract_draft_cache, commit_rows
from ddtree_jax.model.draft import context_rows, draft_hidden
from ddtree_jax.model.params import (
    DFlash,
    KimiK2,
    named_parameters,
    partition_specs,
)
from tests.support.models import run_in_chunks
from tiny import corpus
from tiny.random_checkpoint import write_checkpoint
from tiny.train import __main__ as command
from tiny.train.draft_model import draft_blocks
from tiny.train.generate import WritingPlan, distinct_share, make_generator
from tiny.train.optimiser import orthogonalise
from tiny.train.pace import Pace
from tiny.train.parameters import matrix_shape, quantise, shapes, straight_through
from tiny.train.rounding import usable
from tiny.train.target import Windows, balanced
from tiny.train.target_model import forward
from tiny.train.weights import load_pieces, save_pieces


def stored_arrays(model) -> dict[str, np.ndarray]:
    return {p: np.asarray(v.get_value()) for p, v in named_parameters(model).items()}


def test_training_forward_equals_the_engine(tiny1):
    c = tiny1.config
    params = usable(stored_arrays(tiny1.params.target), jnp.float32)
    ids = np.random.default_rng(0).integers(0, c.vocab_size, 70).astype(np.int32)
    layers = (3, 0, 2)
    want = run_in_chunks(tiny1, ids, [len(ids)], feature_layers=layers)
    got = jax.jit(lambda p, t: forward(p, c, t, feature_layers=layers))(
        params, jnp.asarray(ids)[None]
    )
    np.testing.assert_allclose(got.hidden[0], want.hidden[0], atol=1e-4)
    np.testing.assert_allclose(got.features[0], want.features[0], atol=1e-4)


def test_blocks_equal_the_engines_drafts(tiny1):
    c, d = tiny1.config, tiny1.draft_config
    ids = np.random.default_rng(1).integers(0, c.vocab_size, 40).astype(np.int32)
    layers = d.target_layer_ids
    features = run_in_chunks(tiny1, ids, [len(ids)], layers).features
    target, draft = (stored_arrays(m) for m in tiny1.params)
    anchors = np.array([[1, 17, 31, 17]], np.int32)
    got = jax.jit(lambda p, *rest: draft_blocks(p, d, *rest))(
        draft, target["embed"], features, ids[anchors], anchors
    )
    for block, anchor in enumerate(anchors[0]):
        want = engine_draft(tiny1, features[:, :anchor], int(ids[anchor]))
        np.testing.assert_allclose(got[0, block], want[0], atol=1e-4)


def engine_draft(tiny, features, root: int):
    """Returns what the engine drafts at the end of some features."""
    d, count = tiny.draft_config, features.shape[1]
    shapes = abstract_draft_cache(d, num_pages=4, page_size=16, dtype=jnp.float32)
    empty = jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), shapes)
    table = jnp.asarray([[2, 0, 3, 1]], jnp.int32)
    start = jnp.zeros(1, jnp.int32)

    def body(draft, embedding):
        positions = jnp.arange(count, dtype=jnp.int32)[None]
        rows = context_rows(draft, d, jnp.asarray(features), positions)
        cache = commit_rows(empty, rows, table, start, start + count)
        return draft_hidden(
            draft,
            d,
            embedding,
            root_token=start + root,
            cache=cache,
            page_table=table,
            context_len=start + count,
        )

    mapped = jax.shard_map(
        body,
        mesh=tiny.mesh,
        in_specs=(partition_specs(DFlash(d)), P("tensor")),
        out_specs=P(),
        check_vma=False,
    )
    return jax.jit(mapped)(tiny.params.draft, tiny.params.target.embed[...])


def test_generator_continues_as_the_whole_sequence_does(tiny1):
    c = tiny1.config
    params = usable(stored_arrays(tiny1.params.target), jnp.float32)
    rng = np.random.default_rng(2)
    given = rng.integers(0, c.vocab_size, (3, 24)).astype(np.int32)
    lengths = np.array([4, 9, 24], np.int32)
    generate = make_generator(c, 24, end=-1)
    tokens = np.asarray(
        generate(params, given, greedy_plan(lengths), jax.random.key(0))
    )
    hidden = forward(params, c, jnp.asarray(tokens)).hidden
    greedy = np.argmax(hidden @ params["head"].T, axis=-1)
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(tokens[row, :length], given[row, :length])
        np.testing.assert_array_equal(
            tokens[row, length:], greedy[row, length - 1 : -1]
        )


def greedy_plan(lengths: np.ndarray) -> WritingPlan:
    return WritingPlan(lengths, lengths, np.zeros(len(lengths), np.float32))


def test_generator_lengthens_prompts_at_chance(tiny1):
    c = tiny1.config
    params = usable(stored_arrays(tiny1.params.target), jnp.float32)
    given = np.zeros((64, 12), np.int32)
    lengths = np.full(64, 3, np.int32)
    plan = greedy_plan(lengths)._replace(chance_until=lengths + 4)
    generate = make_generator(c, 12, end=-1)
    tokens = np.asarray(generate(params, given, plan, jax.random.key(0)))
    assert all(len(set(tokens[:, place])) > 8 for place in range(3, 7))
    hidden = forward(params, c, jnp.asarray(tokens)).hidden
    greedy = np.argmax(hidden @ params["head"].T, axis=-1)
    np.testing.assert_array_equal(tokens[:, 7:], greedy[:, 6:-1])
    assert (tokens[:, 3:7] != greedy[:, 2:6]).mean() > 0.5


def test_generator_takes_the_given_text_after_an_end(tiny1):
    c = tiny1.config
    params = usable(stored_arrays(tiny1.params.target), jnp.float32)
    given = np.random.default_rng(3).integers(0, c.vocab_size, (1, 20)).astype("i4")
    run = (params, given, greedy_plan(np.array([5], "i4")), jax.random.key(0))
    end = int(make_generator(c, 20, end=-1)(*run)[0, 8])
    tokens = np.asarray(make_generator(c, 20, end=end)(*run))[0]
    first = 5 + int(np.argmax(tokens[5:] == end))
    assert first <= 8
    np.testing.assert_array_equal(tokens[first + 1 :], given[0, first + 1 :])


def test_loops_have_few_distinct_runs():
    rows = np.stack(
        [
            np.tile(np.arange(4), 10),
            np.arange(40),
            np.random.default_rng(0).integers(0, 2, 40),
        ]
    )
    runs = [{tuple(row[i : i + 8]) for i in range(33)} for row in rows]
    share = distinct_share(jnp.asarray(rows, jnp.int32), 8)
    np.testing.assert_allclose(share, [len(r) / 33 for r in runs], rtol=1e-6)


@pytest.mark.parametrize("name", ["random_7x160", "random_64x128"])
def test_quantiser_equals_compressed_tensors(golden, name):
    data = golden("int4")
    weight = data[f"{name}_weight_bits"].view(jnp.bfloat16)
    packed, scale = quantise(weight)
    np.testing.assert_array_equal(packed, data[f"{name}_packed"])
    np.testing.assert_array_equal(scale.view(np.uint16), data[f"{name}_scale_bits"])
    with pytest.raises(ValueError, match="a group of 32 weights is zero"):
        quantise(np.zeros((2, 64), np.float32))


def test_rounding_in_training_is_the_quantisers_but_for_bfloat16():
    weight = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    moved, gradient = jax.vjp(lambda w: straight_through(w, jnp.float32(1)), weight)
    groups = weight.reshape(8, 2, 32)
    amax = np.abs(groups).max(-1, keepdims=True)
    want = np.rint(groups / (amax / 7.5)) * (amax / 7.5)
    # The largest is 7.5 steps long, a tie that falls to either side.
    inner = np.abs(groups) < amax
    got = np.asarray(moved).reshape(groups.shape)
    np.testing.assert_allclose(got[inner], want[inner], atol=1e-6)
    assert np.all(np.abs(got - groups) <= amax / 15 * 1.001)
    np.testing.assert_array_equal(gradient(weight)[0], weight)
    np.testing.assert_array_equal(straight_through(weight, jnp.float32(0)), weight)


def test_orthogonalised_matrices_keep_directions_and_lose_sizes():
    rng = np.random.default_rng(0)
    for shape in ((2, 24, 16), (16, 24)):
        matrix = rng.standard_normal(shape).astype(np.float32)
        u, _, vt = np.linalg.svd(matrix, full_matrices=False)
        got = np.asarray(orthogonalise(jnp.asarray(matrix)), np.float32)
        sizes = np.linalg.svd(got)[1]
        assert sizes.min() > 0.6 and sizes.max() < 1.3
        overlap = np.einsum("...ij,...ij->...", got, u @ vt) / sizes.sum(-1)
        assert np.all(overlap > 0.95)


def test_every_projection_has_its_matrix(tiny1):
    target = shapes(KimiK2(tiny1.config))
    assert target["moe/experts/down"] == (3, 16, 128, 256)
    want = {
        "moe/experts/down": (3, 16, 128, 256),
        "moe/attention/q_b": (3, 8 * 48, 96),
        "moe/attention/o": (3, 128, 8 * 32),
        "dense/attention/k_up": (1, 8 * 32, 64),
        "moe/router_bias": None,
        "moe/attention/kv_a_norm": None,
        "embed": None,
        "head": (512, 128),
    }
    for path, shape in want.items():
        assert matrix_shape(path, target[path]) == shape
    draft = shapes(DFlash(tiny1.draft_config))
    assert matrix_shape("fc", draft["fc"]) == (128, 3 * 128)
    assert matrix_shape("layers/o", draft["layers/o"]) == (2, 128, 16 * 16)


def test_bias_moves_towards_equal_load():
    load = jnp.asarray([[4.0, 0.0, 2.0, 2.0]])
    moved = balanced(jnp.zeros((1, 4)), load, jnp.float32(0.5))
    np.testing.assert_allclose(moved, [[-0.5, 0.5, 0.0, 0.0]])


def test_windows_cover_an_epoch_once():
    windows = Windows(1000, length=10, batch=7, seed=3)
    assert windows.count == 98
    offsets = np.concatenate([windows.offsets(step) for step in range(28)])
    first, second = offsets[:98], offsets[98:196]
    for epoch in (first, second):
        assert sorted(epoch) == list(range(min(epoch), min(epoch) + 980, 10))
        assert min(epoch) in range(10)
    assert list(first) != list(second)
    np.testing.assert_array_equal(windows.offsets(13), offsets[91:98])
    with pytest.raises(ValueError, match="15 tokens are too few for windows of 10"):
        Windows(15, length=10, batch=1, seed=0)


def test_pace_anneals_within_its_plan(monkeypatch):
    clock = iter(itertools.count())
    monkeypatch.setattr(time, "monotonic", lambda: float(next(clock)))
    pace = Pace(minutes=10.0, steps=None, elapsed=100.0, began=0.0)
    assert pace.planned is None and pace.rate(0, 1.0) == 1 / 200
    pace.measure(0)
    assert pace.measure(10) == pytest.approx(0.1)
    # 600 s less 100 s and the few that the clock has told, at 0.1 s a step.
    assert pace.planned == pytest.approx(10 + 4970, abs=10)
    assert pace.rate(pace.planned, 1.0) == pytest.approx(0.02)
    assert pace.rate(pace.planned // 2, 1.0) == pytest.approx(0.51, abs=1e-3)
    assert not pace.finished(5000)
    assert Pace(minutes=0.0, steps=5, elapsed=0.0, began=0.0).finished(5)


def test_pieces_are_all_or_nothing(tmp_path):
    tensors = {f"t{i}": np.full((10, 10), i, np.float32) for i in range(5)}
    paths = save_pieces(tmp_path, "w", tensors, piece_bytes=900)
    assert [path.name for path in paths] == [f"w-{i}.safetensors" for i in range(3)]
    got = load_pieces(tmp_path, "w")
    assert got.keys() == tensors.keys()
    assert all((got[name] == tensors[name]).all() for name in tensors)
    paths[1].unlink()
    with pytest.raises(FileNotFoundError, match="w-1"):
        load_pieces(tmp_path, "w")


def small_model(directory: Path) -> Path:
    """Writes the forms of two layers and one, with a vocabulary of bytes."""
    write_checkpoint(directory, seed=0)
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config["text_config"]["num_hidden_layers"] = 2
    path.write_text(json.dumps(config))
    path = directory / "draft" / "config.json"
    config = json.loads(path.read_text())
    config |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    config |= {"num_target_layers": 2, "max_window_layers": 1}
    config["dflash_config"]["target_layer_ids"] = [0, 1]
    path.write_text(json.dumps(config))
    return directory


def small_corpus(directory: Path, model: Path) -> Path:
    """Writes token files as `corpus.build` does, of this repository's own text."""
    directory.mkdir()
    codec = corpus.Codec(model)
    texts = [path.read_text() for path in sorted(Path("tiny").glob("*.py"))]
    tokens = [np.array(codec.document(text), np.uint16) for text in texts]
    splits = {"train": tokens, "heldout": tokens[:2], "prompts": tokens[2:]}
    record = {"name": "tiny", "files": 1, "bytes": 1, "split": "train"}
    corpus._write(directory, splits, codec.bytes_per_token, [record])
    return directory


def test_stages_run_resume_and_hand_on(tmp_path, monkeypatch, capsys):
    model = small_model(tmp_path / "model")
    data = small_corpus(tmp_path / "data", model)

    def run(stage: str, *flags: object) -> str:
        common = [stage, "--model", model, "--out", tmp_path / stage]
        argv = ["tiny.train", *common, *flags]
        monkeypatch.setattr(sys, "argv", [str(word) for word in argv])
        # JAX's attention and optax rely on promotions that these tests forbid.
        with jax.numpy_dtype_promotion("standard"):
            command.main()
        return capsys.readouterr().out

    target = tmp_path / "target"
    with pytest.raises(SystemExit, match=f"{target} holds no trained target"):
        run("quantise", "--target", target, "--data", data)
    sizes = ("--data", data, "--batch", 2, "--length", 32)
    out = run("target", *sizes, "--steps", 3, "--limit", 1e-9)
    assert "not done: run the same command again" in out
    assert "the plan is done" in run("target", *sizes, "--steps", 3)
    assert '"step": 1, ' in (target / "log.jsonl").read_text()
    again = run("target", *sizes, "--steps", 4)
    assert '"step": 4, ' in again and "the plan is done" in again
    run("quantise", "--target", target, "--data", data, "--length", 32)
    facts = json.loads((tmp_path / "quantise" / "quantise.jsonl").read_text())
    assert facts["ratio"] == pytest.approx(1.0, abs=0.02)
    for _ in range(2):  # The second finds texts and state of the first.
        out = run(
            *("draft", "--target", tmp_path / "quantise", "--data", data),
            *("--batch", 2, "--length", 208, "--blocks", 3),
            *("--steps", 2, "--writers", 4, "--writing", 1e-9),
        )
        assert "the plan is done" in out
    run("export", "--draft", tmp_path / "draft")
    stored = load_pieces(tmp_path / "export", "draft")
    assert stored["fc"].shape == (128, 2, 128) and stored["fc"].dtype == jnp.bfloat16
