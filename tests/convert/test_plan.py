"""Every source tensor is used once and every canonical array made once, or refused."""

import dataclasses

import numpy as np
import pytest

from convert.hf_source import open_hf
from convert.leaf import Block, Leaf
from convert.plan import make_plan
from ddtree_jax.errors import CheckpointError, DDTreeError
from tests.convert.support import Raw, raw, renamed, write_checkpoint

LM = "language_model.model."
EXPERT = f"{LM}layers.1.mlp.experts.3.up_proj"


@pytest.fixture
def plan(tmp_path, config):
    """Writes a checkpoint and plans its conversion."""

    def run(tensors: dict[str, Raw], values: dict | None = None):
        directory = write_checkpoint(tmp_path / "src", tensors, values or config)
        made = make_plan(open_hf(directory))
        made.check_stated_shapes()
        return made

    return run


def refused(plan, tensors, match: str, kind: type[DDTreeError] = CheckpointError):
    with pytest.raises(kind, match=match) as info:
        plan(tensors)
    assert "\n" not in str(info.value)


def values(leaves) -> dict[str, bytes]:
    return {
        leaf.path: b"".join(content(leaf, block) for block in leaf.slabs())
        for leaf in leaves
    }


def content(leaf: Leaf, block: Block) -> bytes:
    slab = np.empty(tuple(s.stop - s.start for s in block), leaf.dtype)
    leaf.read(block, slab)
    return slab.tobytes()


def test_all_tensors_used_once(plan, tensors):
    made = plan(tensors)
    used = [s.name for leaf in (*made.params, *made.extra) for s in leaf.sources]
    halves = [name for name in used if name.endswith("kv_b_proj.weight")]
    assert len(halves) == 2 * len(set(halves))
    whole = set(used) | {n for n in tensors if n.endswith(".weight_shape")}
    assert whole == tensors.keys()
    assert len(used) - len(halves) == len(set(used)) - len(set(halves))
    assert made.weight_shape_dtype == "I32"
    assert {leaf.path.split(".")[0] for leaf in made.extra} == {
        "vision_tower",
        "mm_projector",
    }


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("model.", "lm_head."),
        ("model.language_model.", "lm_head."),
        ("language_model.", "language_model.lm_head."),
        ("language_model.", "lm_head."),
    ],
)
def test_every_prefix_gives_the_same(plan, tensors, text, head):
    language = {n: t for n, t in tensors.items() if n.startswith("language_model.")}
    expected = values(plan(language).params)
    assert values(plan(renamed(language, text=text, head=head)).params) == expected


def test_image_tensors_of_a_re_save(plan, tensors):
    moved = {
        f"model.{n}" if n.startswith(("vision_tower", "mm_projector")) else n: t
        for n, t in tensors.items()
    }
    assert all(leaf.path.startswith("model.") for leaf in plan(moved).extra)


@pytest.mark.parametrize("ignore", [[], ["lm_head", "re:.*self_attn.*"]])
def test_the_ignore_list_decides_nothing(plan, tensors, config, ignore):
    expected = values(plan(tensors).params)
    config["text_config"]["quantization_config"]["ignore"] = ignore
    assert values(plan(tensors, config).params) == expected


def test_weight_shape_as_int64_or_absent(plan, tensors):
    def shapes(convert):
        return {
            n: convert(t) if n.endswith(".weight_shape") else t
            for n, t in tensors.items()
        }

    wide = shapes(lambda t: raw(t.array().astype(np.int64)))
    assert plan(wide).weight_shape_dtype == "I64"
    none = {n: t for n, t in tensors.items() if not n.endswith(".weight_shape")}
    assert plan(none).weight_shape_dtype is None
    mixed = tensors | {f"{EXPERT}.weight_shape": wide[f"{EXPERT}.weight_shape"]}
    refused(plan, mixed, "weight_shape tensors are I32 and I64; expected one")


@pytest.mark.parametrize(
    "name",
    [
        f"{LM}norm.weight",
        f"{LM}embed_tokens.weight",
        "language_model.lm_head.weight",
        f"{EXPERT}.weight_scale",
        f"{EXPERT}.weight_shape",
        f"{LM}layers.3.mlp.gate.e_score_correction_bias",
        f"{LM}layers.0.self_attn.kv_b_proj.weight",
    ],
)
def test_missing_tensor(plan, tensors, name):
    rest = {n: t for n, t in tensors.items() if n != name}
    wanted = name.removeprefix("language_") if "embed" in name else name
    refused(plan, rest, r"tensors missing \(\d+\): .*" + wanted.split(".")[-2])


def test_all_missing_tensors_are_counted(plan, tensors):
    rest = {n: t for n, t in tensors.items() if ".experts.3.up_proj.weight_s" not in n}
    refused(plan, rest, r"tensors missing \(3\): .*experts.3.up_proj.weight_scale")


@pytest.mark.parametrize(
    "name",
    [
        f"{LM}layers.0.self_attn.rotary_emb.inv_freq",
        f"{LM}layers.4.input_layernorm.weight",
        f"{LM}layers.1.mlp.experts.16.up_proj.weight_packed",
        "vision_tower_2.weight",
    ],
)
def test_tensor_left_over(plan, tensors, name):
    extra = tensors | {name: raw(np.ones(4, np.float32))}
    refused(plan, extra, rf"tensors left over \(1\): {name}")


def test_weight_shape_left_over(plan, tensors):
    name = f"{LM}layers.0.mlp.up_proj.weight_shape"
    extra = tensors | {name: raw(np.array([256, 128], np.int32))}
    refused(plan, extra, rf"tensors left over \(1\): {name}")


@pytest.mark.parametrize(
    ("name", "tensor", "match"),
    [
        (f"{LM}norm.weight", raw(np.ones(128, np.float32)), r"is F32 \[128\]; .*BF16"),
        (f"{LM}norm.weight", Raw("BF16", (64,), bytes(128)), r"is BF16 \[64\]; .*128"),
        (
            f"{LM}layers.2.mlp.gate.e_score_correction_bias",
            Raw("BF16", (16,), bytes(32)),
            r"is BF16 \[16\]; expected F32 \[16\]",
        ),
        (
            f"{LM}layers.2.self_attn.q_b_proj.weight",
            Raw("BF16", (8, 48, 96), bytes(8 * 48 * 96 * 2)),
            r"is BF16 \[8, 48, 96\]; expected BF16 \[384, 96\]",
        ),
        (
            f"{LM}layers.2.self_attn.kv_b_proj.weight",
            Raw("BF16", (64, 512), bytes(64 * 512 * 2)),
            r"is BF16 \[64, 512\]; expected BF16 \[512, 64\]",
        ),
        (
            f"{EXPERT}.weight_packed",
            Raw("I32", (256, 32), bytes(256 * 32 * 4)),
            r"is I32 \[256, 32\]; expected I32 \[256, 16\]",
        ),
        (
            f"{EXPERT}.weight_scale",
            Raw("BF16", (256, 1), bytes(512)),
            r"is BF16 \[256, 1\]; expected BF16 \[256, 4\]",
        ),
    ],
)  # fmt: skip
def test_wrong_dtype_or_shape(plan, tensors, name, tensor, match):
    refused(plan, tensors | {name: tensor}, f"{name} {match}")


@pytest.mark.parametrize(
    ("stated", "match"),
    [
        (np.array([256, 64], np.int32), r"is \[256, 64\]; expected \[256, 128\]"),
        (np.array([128, 256], np.int32), r"is \[128, 256\]; expected \[256, 128\]"),
        (np.array([256, 128, 1], np.int32), r"is I32 \[3\]; expected I32 or I64 \[2\]"),
    ],
)
def test_weight_shape_that_is_wrong(plan, tensors, stated, match):
    name = f"{EXPERT}.weight_shape"
    refused(plan, tensors | {name: raw(stated)}, f"{name} {match}")


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC1])
@pytest.mark.parametrize("at", [0, -1])
def test_scale_that_is_not_finite(plan, tensors, bits, at):
    name = f"{EXPERT}.weight_scale"
    words = np.frombuffer(tensors[name].data, np.uint16).copy()
    words[at] = bits
    bad = dataclasses.replace(tensors[name], data=words.tobytes())
    made = plan(tensors | {name: bad})
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity"):
        values(made.params)


def test_float32_bias_that_is_not_finite(plan, tensors):
    name = f"{LM}layers.3.mlp.gate.e_score_correction_bias"
    bias = tensors[name].array().copy()
    bias[7] = np.inf
    with pytest.raises(CheckpointError, match=f"{name} holds NaN or infinity"):
        values(plan(tensors | {name: raw(bias)}).params)
