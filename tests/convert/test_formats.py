"""Other formats become INT4 experts and bfloat16, losslessly where that is possible."""

import hashlib
import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from convert.hf_source import open_hf
from convert.plan import make_plan
from ddtree_jax.hf_config import read_quantisation
from ddtree_jax.mesh import make_mesh
from ddtree_jax.model.restore import restore_target
from tests.convert.command import refused as command_refused
from tests.convert.command import run
from tests.convert.other_formats import (
    ATTENTION,
    BF16,
    DENSE,
    EXPERT,
    FP8_BLOCK_CONFIG,
    FP8_CONFIG,
    GPTQ_CONFIG,
    bases,
    multiplied_out,
    own_rule,
    to_bfloat16,
    to_fp8,
    to_gptq,
    to_int4,
)
from tests.convert.support import (
    TINY_DRAFT,
    Raw,
    raw,
    read_checkpoint,
    read_config,
    renamed,
    write_checkpoint,
)

LM = "language_model.model."
GATE = f"{LM}layers.1.mlp.experts.3.gate_proj"
Q_A = f"{LM}layers.1.self_attn.q_a_proj"


def quantised_config(config: dict, quantisation: dict | None) -> dict:
    config["text_config"]["quantization_config"] = quantisation
    return config


def there_and_back(capsys, tmp_path, tensors, config, *flags) -> tuple[Path, Path]:
    """Converts to our layout and on to Hugging Face's; returns both directories."""
    source = write_checkpoint(tmp_path / "src", tensors, config)
    ours, back = tmp_path / "ours", tmp_path / "back"
    code, _, err = run(capsys, "hf", source, ours, *flags)
    assert code == 0, err
    code, _, err = run(capsys, "export", ours, back, "--to", "hf")
    assert code == 0, err
    code, out, _ = run(capsys, "verify", source, back, *flags)
    assert code == 0, out
    return ours, back


def losses(directory: Path) -> list[str]:
    return json.loads((directory / "manifest.json").read_text())["losses"]


def same_tensors(got: dict[str, Raw], want: dict[str, Raw]) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert got[name] == want[name], name


@pytest.mark.parametrize(
    ("zero", "scales", "order", "form"),
    [(7, "F16", True, "gptq"), (8, "BF16", False, "gptq_v2"), (7, "F16", True, None)],
)
def test_gptq_there_and_back(
    capsys, tmp_path, tensors, config, zero, scales, order, form
):
    gptq = to_gptq(tensors, zero=zero, scales=scales, order=order)
    stated = GPTQ_CONFIG | ({"checkpoint_format": form} if form else {})
    published = json.loads(json.dumps(config))
    values = quantised_config(config, stated)
    ours, back = there_and_back(capsys, tmp_path, gptq, values)
    same_tensors(read_checkpoint(back), tensors)
    assert losses(ours) == []
    for directory in (ours, back):
        assert read_quantisation(directory).schemes == ("INT4 pack-quantized",)
        found = read_config(directory)
        quantisation = found["text_config"]["quantization_config"]
        quantisation["ignore"] = published["text_config"]["quantization_config"][
            "ignore"
        ]
        assert found == published


def test_gptq_layout_is_the_published_one(golden):
    """The digest of the transposed words is known from the library's own run."""
    packed = golden("int4")["formula_packed"]
    tensors = {
        "w.weight_packed": raw(packed),
        "w.weight_scale": raw(np.ones((128, 2), BF16)),
    }
    qweight = to_gptq(tensors, zero=8)["w.qweight"]
    assert hashlib.sha256(qweight.data).hexdigest().startswith("17682ab2a99fcfd8")


def test_gptq_outside_the_experts(capsys, tmp_path, tensors, config):
    int4 = to_int4(tensors, DENSE)
    gptq = to_gptq(int4, zero=7, scales="BF16")
    ours, back = there_and_back(
        capsys, tmp_path, gptq, quantised_config(config, GPTQ_CONFIG)
    )
    found = read_checkpoint(back)
    names = bases(int4, DENSE, "weight_packed")
    assert len(names) == 4 * 5 + 3 + 3 * 3
    expected = tensors | {f"{n}.weight": raw(multiplied_out(int4, n)) for n in names}
    same_tensors(found, expected)
    [line] = losses(ours)
    assert line.startswith(f"{len(names)} weights (") and line.endswith(
        "INT4, stored as the bfloat16 numbers that it means"
    )


def test_int4_outside_the_experts(capsys, tmp_path, tensors, config):
    int4 = to_int4(tensors, DENSE)
    config["text_config"]["quantization_config"]["ignore"] = ["lm_head"]
    ours, back = there_and_back(capsys, tmp_path, int4, config)
    names = bases(int4, DENSE, "weight_packed")
    expected = tensors | {f"{n}.weight": raw(multiplied_out(int4, n)) for n in names}
    same_tensors(read_checkpoint(back), expected)
    assert len(losses(ours)) == 1
    for directory in (ours, back):
        ignore = read_config(directory)["text_config"]["quantization_config"]["ignore"]
        for base in names:
            assert any(re.match(i.removeprefix("re:"), base) for i in ignore), base
        assert not any(re.match(i.removeprefix("re:"), GATE) for i in ignore)


@pytest.mark.parametrize("part", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_fp8_with_int4_experts(capsys, tmp_path, tensors, config, part, dtype):
    """Attention in FP8 and experts in INT4, as mixed precision has them."""
    fp8, means = to_fp8(tensors, DENSE, part=part, dtype=dtype)
    ours, back = there_and_back(capsys, tmp_path, fp8, config)
    expected = tensors | {name: raw(mean) for name, mean in means.items()}
    same_tensors(read_checkpoint(back), expected)
    [line] = losses(ours)
    assert line.startswith(f"{len(means)} weights (") and "FP8 in blocks" in line


def check_quantised(found: dict[str, Raw], weights: dict[str, np.ndarray]) -> None:
    for name, weight in weights.items():
        packed, scale = own_rule(weight)
        assert found[f"{name}_packed"] == raw(packed), name
        assert found[f"{name}_scale"] == raw(scale), name
        shape = np.array(weight.shape, np.int32)
        assert found[f"{name}_shape"] == raw(shape), name


@pytest.mark.parametrize("stated", [None, {}])
def test_bfloat16_experts(capsys, tmp_path, tensors, config, stated):
    plain = to_bfloat16(tensors)
    if stated is None:
        del config["text_config"]["quantization_config"]
    source = write_checkpoint(tmp_path / "plain", plain, config)
    name = next(n for n in plain if EXPERT.match(n))
    command_refused(
        capsys,
        f"the routed expert {name} is BF16; expected INT4, or the flag "
        "--quantise-experts",
        *("hf", source, tmp_path / "no"),
    )
    ours, back = there_and_back(capsys, tmp_path, plain, config, "--quantise-experts")
    found = read_checkpoint(back)
    names = bases(plain, EXPERT, "weight")
    check_quantised(found, {f"{n}.weight": plain[f"{n}.weight"].array() for n in names})
    others = {n: t for n, t in tensors.items() if not EXPERT.match(n)}
    assert {n: t for n, t in found.items() if not EXPERT.match(n)} == others
    [line] = losses(ours)
    assert line.startswith(f"{len(names)} weights (") and "--quantise-experts" in line
    assert read_quantisation(back).schemes == ("INT4 pack-quantized",)


@pytest.mark.parametrize(
    ("stated", "part", "dtype"),
    [
        (FP8_CONFIG, "weight_scale_inv", np.float32),
        (FP8_BLOCK_CONFIG, "weight_scale", BF16),
    ],
    ids=["DeepSeek", "FP8_BLOCK"],
)
def test_fp8_everywhere(capsys, tmp_path, tensors, config, stated, part, dtype):
    """K2-Instruct: every projection in FP8; the engine loads what becomes of it."""
    everything = re.compile(rf"{DENSE.pattern}|{EXPERT.pattern}")
    fp8, means = to_fp8(to_bfloat16(tensors), everything, part=part, dtype=dtype)
    source = write_checkpoint(tmp_path / "fp8", fp8, quantised_config(config, stated))
    command_refused(
        capsys, "is F8_E4M3; expected INT4, or the", "hf", source, tmp_path / "no"
    )
    ours, back = there_and_back(capsys, tmp_path, fp8, config, "--quantise-experts")
    found = read_checkpoint(back)
    routed = {n: w for n, w in means.items() if EXPERT.match(n)}
    check_quantised(found, routed)
    for name in means.keys() - routed.keys():
        assert found[name] == raw(means[name]), name
    assert len(losses(ours)) == 2
    config, target = restore_target(ours, make_mesh(1), dtype=jnp.bfloat16)
    gate = np.asarray(target.moe.experts.gate.packed[...])
    assert (gate[0, 3] == found[f"{GATE}.weight_packed"].array()).all()
    q_a = np.asarray(target.moe.attention.q_a[...])
    assert (q_a[0] == means[f"{Q_A}.weight"]).all()


def test_nothing_to_quantise(capsys, tmp_path, tensors, config):
    source = write_checkpoint(tmp_path / "src", tensors, config)
    command_refused(
        capsys,
        f"{source}: no routed expert is FP8 or bfloat16; expected some",
        *("hf", source, tmp_path / "dst", "--quantise-experts"),
    )
    assert not (tmp_path / "dst").exists()
    assert run(capsys, "hf", source, tmp_path / "ours")[0] == 0
    command_refused(
        capsys,
        "ours is ddtree_jax-checkpoint, whose experts are INT4; expected no --quantise",
        *("export", tmp_path / "ours", tmp_path / "dst", "--to", "hf"),
        "--quantise-experts",
    )
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("model.", "lm_head."),
        ("language_model.model.", "language_model.lm_head."),
        ("model.language_model.", "lm_head."),
        ("language_model.", "language_model.lm_head."),
    ],
)
@pytest.mark.parametrize("form", ["gptq", "fp8", "int4"])
def test_every_prefix(tmp_path, tensors, config, text, head, form):
    language = {n: t for n, t in tensors.items() if n.startswith("language_model.")}
    other = {
        "gptq": lambda: to_gptq(language, zero=7),
        "fp8": lambda: to_fp8(language, ATTENTION)[0],
        "int4": lambda: to_int4(language, DENSE),
    }[form]()
    moved = renamed(other, text=text, head=head)
    source = open_hf(write_checkpoint(tmp_path / "src", moved, config))
    plan = make_plan(source)
    plan.check_stated_shapes()
    assert source.tensors.keys() == renamed(language, text=text, head=head).keys()


@pytest.mark.parametrize("place", ["nested", "top", "both", "absent"])
def test_where_the_quantisation_stands(tmp_path, tensors, config, place):
    gptq = to_gptq(tensors, zero=7)
    if place in ("top", "both"):
        config["quantization_config"] = GPTQ_CONFIG
    if place in ("top", "absent"):
        del config["text_config"]["quantization_config"]
    else:
        quantised_config(config, GPTQ_CONFIG)
    made = open_hf(write_checkpoint(tmp_path / "src", gptq, config)).config_json
    assert made is not None
    values = json.loads(made)
    found = [values.get("quantization_config"), values["text_config"].get(
        "quantization_config"
    )]  # fmt: skip
    assert [f is not None for f in found] == {
        "nested": [False, True],
        "top": [True, False],
        "both": [True, True],
        "absent": [False, True],
    }[place]
    assert all(f["quant_method"] == "compressed-tensors" for f in found if f)


def test_own_config_is_kept_byte_for_byte(tmp_path, tensors, config):
    for values in (config, quantised_config(json.loads(json.dumps(config)), None)):
        source = open_hf(write_checkpoint(tmp_path / "src", tensors, values))
        assert source.config_json is None and source.losses == ()


def test_drafter_is_not_quantised(capsys, tmp_path):
    command_refused(
        capsys,
        "is a drafter; --quantise-experts goes with a target",
        *("hf", TINY_DRAFT, tmp_path / "dst", "--quantise-experts"),
    )
