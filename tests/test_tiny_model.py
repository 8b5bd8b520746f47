"""The bundled model's files: whole, small enough, and of the recipe's form."""

import hashlib
import json
from pathlib import Path

import pytest
from safetensors import safe_open

from ddtree_jax.hf_config import read_draft_config, read_model_config
from ddtree_jax.model.params import check_divisible
from tiny.tokenizer_files import read_ranks
from tiny.trained_forms import RANKS, write_forms

TINY = Path(__file__).parents[1] / "tiny"
MODEL = TINY / "model"
FILES = sorted(path for path in MODEL.rglob("*") if path.is_file())


def test_files_are_those_of_the_checksums():
    sums = json.loads((TINY / "checksums.json").read_text())
    found = {
        path.relative_to(MODEL).as_posix(): hashlib.sha256(path.read_bytes())
        for path in FILES
    }
    assert {name: digest.hexdigest() for name, digest in found.items()} == sums


def test_all_of_it_is_small():
    sizes = {path.name: path.stat().st_size for path in FILES}
    assert sum(sizes.values()) <= 39_000_000
    assert all(size < 10_000_000 for size in sizes.values()), sizes


def test_configurations_are_the_recipes(tmp_path):
    write_forms(tmp_path)
    for path in tmp_path.rglob("*"):
        if path.is_file():
            shipped = MODEL / path.relative_to(tmp_path)
            assert shipped.read_bytes() == path.read_bytes(), shipped
    assert len(read_ranks(MODEL / "tiktoken.model")) == RANKS


def test_eight_devices_can_share_it():
    target, draft = read_model_config(MODEL), read_draft_config(MODEL / "draft")
    check_divisible(target, 8)
    check_divisible(draft, 8)
    assert (target.kv_lora_rank, target.qk_rope_head_dim) == (512, 64)
    assert target.num_moe_layers >= 4
    assert draft.draft_block_size == 8 and len(draft.target_layer_ids) > 1


def test_index_names_every_tensor_of_the_shards():
    index = json.loads((MODEL / "model.safetensors.index.json").read_text())
    shards = sorted(MODEL.glob("model-*.safetensors"))
    assert {path.name for path in shards} == set(index["weight_map"].values())
    for path in shards:
        with safe_open(path, "numpy") as file:
            names = set(file.keys())
        assert names == {n for n, f in index["weight_map"].items() if f == path.name}
        assert all(name.startswith("language_model.") for name in names)


def read_log(name: str) -> list[dict]:
    lines = (TINY / "data" / name).read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_log_has_what_the_rounding_cost():
    [facts] = read_log("quantise.jsonl")
    ratio = facts["bits_per_byte_after"] / facts["bits_per_byte_before"]
    assert facts["ratio"] == pytest.approx(ratio, abs=1e-4)
    assert 0.9 < ratio < 1.02
    key = "heldout_bits_per_byte"
    bits = [line[key] for line in read_log("target.jsonl") if key in line]
    assert bits[-1] < bits[0]


def test_log_has_the_drafters_progress_on_held_out_texts():
    for name, least in (("greedy", 3.5), ("chance", 1.5)):
        lines = [x for x in read_log("draft.jsonl") if x.get("heldout") == name]
        lengths = [line["tokens_per_step"] for line in lines]
        assert lengths[0] < lengths[-1] > least
