"""The random checkpoint has Kimi K2.6's tensors, and equal seeds give equal bytes."""

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from tiny.random_checkpoint import write_checkpoint
from tiny.tensors import quantise

H, Q, C = 128, 96, 64  # hidden, query rank, latent
HEADS, NOPE, ROPE, V = 8, 32, 16, 32
EXPERTS, INNER, DENSE, VOCAB = 16, 256, 256, 512


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("random") / "checkpoint"
    write_checkpoint(directory, seed=0)
    return directory


def target_tensors() -> dict[str, tuple[str, list[int]]]:
    """Every tensor of the form's table, with the sizes above."""
    lm = "language_model.model."
    want: dict[str, tuple[str, list[int]]] = {
        lm + "embed_tokens.weight": ("BF16", [VOCAB, H]),
        lm + "norm.weight": ("BF16", [H]),
        "language_model.lm_head.weight": ("BF16", [VOCAB, H]),
    }

    def bf16(name: str, *shape: int) -> None:
        want[name + ".weight"] = ("BF16", list(shape))

    def int4(name: str, out: int, inputs: int) -> None:
        want[name + ".weight_packed"] = ("I32", [out, inputs // 8])
        want[name + ".weight_scale"] = ("BF16", [out, inputs // 32])
        want[name + ".weight_shape"] = ("I32", [2])

    def mlp(write, name: str, inner: int) -> None:
        write(name + ".gate_proj", inner, H)
        write(name + ".up_proj", inner, H)
        write(name + ".down_proj", H, inner)

    for n in range(4):
        layer = f"{lm}layers.{n}."
        bf16(layer + "input_layernorm", H)
        bf16(layer + "post_attention_layernorm", H)
        bf16(layer + "self_attn.q_a_proj", Q, H)
        bf16(layer + "self_attn.q_a_layernorm", Q)
        bf16(layer + "self_attn.q_b_proj", HEADS * (NOPE + ROPE), Q)
        bf16(layer + "self_attn.kv_a_proj_with_mqa", C + ROPE, H)
        bf16(layer + "self_attn.kv_a_layernorm", C)
        bf16(layer + "self_attn.kv_b_proj", HEADS * (NOPE + V), C)
        bf16(layer + "self_attn.o_proj", H, HEADS * V)
        if n == 0:
            mlp(bf16, layer + "mlp", DENSE)
            continue
        bf16(layer + "mlp.gate", EXPERTS, H)
        want[layer + "mlp.gate.e_score_correction_bias"] = ("F32", [EXPERTS])
        mlp(bf16, layer + "mlp.shared_experts", INNER)
        for e in range(EXPERTS):
            mlp(int4, f"{layer}mlp.experts.{e}", INNER)
    return want


def draft_tensors() -> dict[str, tuple[str, list[int]]]:
    shapes = {
        "fc": [H, 3 * H],
        "hidden_norm": [H],
        "norm": [H],
    }
    for n in range(2):
        shapes |= {
            f"layers.{n}.{name}": shape
            for name, shape in {
                "input_layernorm": [H],
                "post_attention_layernorm": [H],
                "self_attn.q_proj": [16 * 16, H],
                "self_attn.k_proj": [8 * 16, H],
                "self_attn.v_proj": [8 * 16, H],
                "self_attn.o_proj": [H, 16 * 16],
                "self_attn.q_norm": [16],
                "self_attn.k_norm": [16],
                "mlp.gate_proj": [256, H],
                "mlp.up_proj": [256, H],
                "mlp.down_proj": [H, 256],
            }.items()
        }
    return {f"{name}.weight": ("BF16", shape) for name, shape in shapes.items()}


def read_header(path: Path) -> dict[str, tuple[str, list[int]]]:
    with safe_open(path, "numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {n: (s.get_dtype(), s.get_shape()) for n, s in slices.items()}


def test_target_has_every_tensor_of_the_form_and_no_other(checkpoint):
    got = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        got |= read_header(path)
    assert got == target_tensors()


def test_index_names_the_file_of_every_tensor(checkpoint):
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    files = {
        name: path.name
        for path in checkpoint.glob("*.safetensors")
        for name in read_header(path)
    }
    assert index["weight_map"] == files
    width = {"BF16": 2, "I32": 4, "F32": 4}
    size = sum(width[d] * int(np.prod(s)) for d, s in target_tensors().values())
    assert index["metadata"]["total_size"] == size


def test_draft_has_every_tensor_of_the_form_and_no_other(checkpoint):
    assert read_header(checkpoint / "draft" / "model.safetensors") == draft_tensors()


def test_weight_shape_is_the_unpacked_shape(checkpoint):
    path = checkpoint / "model-00002-of-000005.safetensors"
    expert = "language_model.model.layers.1.mlp.experts.5."
    with safe_open(path, "numpy") as file:
        shapes = [
            file.get_tensor(f"{expert}{part}_proj.weight_shape").tolist()
            for part in ("gate", "up", "down")
        ]
    assert shapes == [[INNER, H], [INNER, H], [H, INNER]]


def test_int4_words_hold_the_nearest_multiples_of_the_scale():
    rng = np.random.default_rng(7)
    weight = rng.standard_normal((3, 64), np.float32).astype(ml_dtypes.bfloat16)
    packed, scale = quantise(weight)
    assert packed.dtype == np.int32 and packed.shape == (3, 8)
    assert scale.dtype == ml_dtypes.bfloat16 and scale.shape == (3, 2)
    for o in range(3):
        for i in range(64):
            s = np.float32(scale[o, i // 32])
            group = weight[o, i // 32 * 32 :][:32].astype(np.float32)
            assert scale[o, i // 32] == ml_dtypes.bfloat16(np.abs(group).max() / 7.5)
            q = (int(packed[o, i // 8]) >> 4 * (i % 8) & 0xF) - 8
            assert q == max(-8, min(7, round(float(np.float32(weight[o, i]) / s))))


def test_tokens_stand_at_kimis_distances(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    draft = json.loads((checkpoint / "draft" / "config.json").read_text())
    generation = json.loads((checkpoint / "generation_config.json").read_text())
    tokenizer = json.loads((checkpoint / "tokenizer_config.json").read_text())
    first = 163584 - 256
    kimi = {
        int(token) + first: entry["content"]
        for token, entry in tokenizer["added_tokens_decoder"].items()
    }
    for token, name in {
        163584: "[BOS]",
        163585: "[EOS]",
        163586: "<|im_end|>",
        163588: "<|im_assistant|>",
        163594: "<|im_system|>",
        163599: "<|tool_call_end|>",
        163601: "<|im_middle|>",
        163605: "<|media_pad|>",
        163607: "</think>",
        163838: "[UNK]",
        163839: "[PAD]",
    }.items():
        assert kimi[token] == name
    assert config["media_placeholder_token_id"] + first == 163605
    for place in (config, config["text_config"], draft):
        assert place["bos_token_id"] + first == 163584
        assert place["eos_token_id"] + first == 163585
        assert place["pad_token_id"] + first == 163839
    assert generation["eos_token_id"] + first == 163586
    assert draft["dflash_config"]["mask_token_id"] + first == 163838


def test_equal_seeds_give_equal_bytes_and_others_do_not(checkpoint, tmp_path):
    write_checkpoint(tmp_path / "same", seed=0)
    write_checkpoint(tmp_path / "other", seed=1)

    def contents(directory: Path) -> dict[str, bytes]:
        return {
            str(path.relative_to(directory)): path.read_bytes()
            for path in directory.rglob("*")
            if path.is_file()
        }

    assert contents(tmp_path / "same") == contents(checkpoint)
    other = contents(tmp_path / "other")
    differing = {n for n, data in contents(checkpoint).items() if other[n] != data}
    assert differing == {n for n in other if n.endswith(".safetensors")}


def test_an_existing_destination_is_refused_and_kept(tmp_path):
    (tmp_path / "kept").write_text("mine")
    done = subprocess.run(
        [sys.executable, "-m", "tiny.random_checkpoint", tmp_path],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == f"error: {tmp_path} exists; expected a new directory\n"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("tiny.random_checkpoint.draft_tensors", fail)
    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(tmp_path / "out", seed=0)
    assert list(tmp_path.iterdir()) == []
