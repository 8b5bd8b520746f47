"""Every form of config.json gives the same config; everything else is refused."""

import copy
import json
import math

import pytest

from ddtree_jax.errors import ConfigError, DDTreeError, UnsupportedFormatError
from ddtree_jax.hf_config import (
    check_draft_fits,
    config_deviations,
    read_draft_config,
    read_model_config,
    read_quantisation,
    read_stop_token_ids,
)
from ddtree_jax.hf_config.draft import default_target_layer_ids
from ddtree_jax.hf_config.quantisation import INT4 as INT4_NAME
from ddtree_jax.hf_config.quantisation import Quantisation

# The published values, written a second time: the package's own table is tested.
TEXT = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163585,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 262144,
    "model_type": "kimi_k2",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "pad_token_id": 163839,
    "pretraining_tp": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 64.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
INT4 = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": 32,
                "num_bits": 4,
                "observer": "minmax",
                "observer_kwargs": {},
                "strategy": "group",
                "symmetric": True,
                "type": "int",
            },
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
DRAFT = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "block_size": 8,
    "dflash_config": {
        "mask_token_id": 163838,
        "target_layer_ids": [1, 12, 24, 35, 47, 58],
    },
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "layer_types": ["full_attention"] * 6,
    "max_position_embeddings": 262144,
    "model_type": "qwen3",
    "num_attention_heads": 64,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "num_target_layers": 61,
    "rms_norm_eps": 1e-5,
    "rope_scaling": TEXT["rope_scaling"],
    "rope_theta": 50000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 163840,
}


def without(values: dict, *keys: str) -> dict:
    return {key: value for key, value in values.items() if key not in keys}


def nested(**changes) -> dict:
    """K2.5 and K2.6."""
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "bos_token_id": 163584,
        "eos_token_id": 163585,
        "pad_token_id": 163839,
        "ignore_index": -100,
        "media_placeholder_token_id": 163605,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "text_config": TEXT | {"quantization_config": INT4} | changes,
        "vision_config": {"patch_size": 14},
    }


def flat(**changes) -> dict:
    """K2-Thinking."""
    old = without(TEXT, "dtype") | {"torch_dtype": "bfloat16"}
    return old | {"quantization_config": INT4} | changes


def resaved() -> dict:
    """What transformers 5.24 writes after it has read `nested`."""
    rope = TEXT["rope_scaling"] | {"rope_type": "yarn", "rope_theta": 50000}
    text = without(TEXT, "rope_scaling", "rope_theta", "architectures") | {
        "model_type": "deepseek_v3",
        "rope_parameters": rope,
        "rope_interleave": True,
        "head_dim": 64,
        "qk_head_dim": 192,
        "output_router_logits": False,
    }
    return nested() | {
        "text_config": text,
        "transformers_version": "5.24.0",
        "video_token_id": 163840,
        "projection_layer_norm_eps": 1e-5,
    }


@pytest.fixture
def write(tmp_path):
    def run(values, name: str = "config.json"):
        path = tmp_path / name
        path.write_text(values if isinstance(values, str) else json.dumps(values))
        return path

    return run


def refused(call, match: str, kind: type[DDTreeError] = ConfigError) -> None:
    with pytest.raises(kind, match=match) as info:
        call()
    message = str(info.value)
    assert "\n" not in message and "config.json" in message


def test_published_values(write):
    config = read_model_config(write(nested()))
    assert config.num_moe_layers == 60 and config.qk_head_dim == 192
    assert config.eos_token_ids == (163585,)
    assert config.latent_norm_eps == 1e-6 and config.rms_norm_eps == 1e-5
    assert config.rope.amplitude == 1.0
    m = 0.1 * math.log(64) + 1
    assert config.softmax_scale == pytest.approx(192**-0.5 * m * m, rel=1e-12)
    assert config.softmax_scale == pytest.approx(0.14467962580268923, rel=1e-12)


@pytest.mark.parametrize("form", [flat, resaved])
def test_forms_of_one_model(write, form):
    assert read_model_config(write(form())) == read_model_config(
        write(nested(), "n.json")
    )


def test_k2_differs_where_it_should(write):
    rope = TEXT["rope_scaling"] | {"factor": 32.0, "beta_fast": 1.0}
    k2 = flat(
        rope_scaling=rope,
        rms_norm_eps=1e-6,
        max_position_embeddings=131072,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    )
    del k2["pad_token_id"]
    config = read_model_config(write(k2))
    assert (config.rope.factor, config.rope.beta_fast) == (32.0, 1.0)
    assert config.softmax_scale == pytest.approx(0.13086079996, rel=1e-9)
    assert config.rms_norm_eps == 1e-6 and config.pad_token_id is None
    lines = config_deviations(write(k2))
    for text in (
        "rms_norm_eps is 1e-06; published 1e-05",
        "rope factor is 32.0; published 64.0",
        "rope beta_fast is 1.0; published 32.0",
        "max_position_embeddings is 131072; published 262144",
        "pad_token_id is absent; published 163839",
        "quantization_config is FP8 in blocks; published INT4 pack-quantized",
    ):
        assert any(text in line for line in lines), text
    assert len(lines) == 6


def test_knobs(write):
    path = write(nested())
    assert read_model_config(path, latent_norm_eps=1e-5).latent_norm_eps == 1e-5
    with pytest.raises(ConfigError, match="latent_norm_eps is 0; expected a positive"):
        read_model_config(path, latent_norm_eps=0)


ROPE = TEXT["rope_scaling"]


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": without(ROPE, "type") | {"rope_type": "yarn"}},
        {"rope_scaling": ROPE | {"rope_type": "yarn"}},
        {"rope_scaling": ROPE | {"rope_theta": 50000}},
        {"rope_parameters": ROPE | {"rope_theta": 50000.0}},
        {"rope_parameters": ROPE, "rope_scaling": None},
        {"rope_scaling": ROPE | {"truncate": True, "attention_factor": None}},
    ],
)
def test_rope_forms(write, changes):
    expected = read_model_config(write(nested(), "n.json"))
    assert read_model_config(write(nested(**changes))) == expected


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rope_scaling": without(ROPE, "type")}, r"type \(or rope_type\) is missing"),
        *(
            ({"rope_scaling": without(ROPE, key)}, f"rope_scaling: {key} is missing")
            for key in ROPE
            if key != "type"
        ),
        (
            {"rope_scaling": ROPE | {"type": "linear"}},
            'type is "linear"; expected "yarn"',
        ),
        (
            {"rope_scaling": ROPE | {"rope_type": "default"}},
            "type and rope_type disagree",
        ),
        (
            {"rope_parameters": ROPE | {"factor": 32.0}},
            "rope_scaling and rope_parameters disagree on factor",
        ),
        (
            {"rope_scaling": ROPE | {"rope_theta": 10000}},
            "rope_theta is 50000.0 outside and 10000.0 inside",
        ),
        (
            {"rope_scaling": ROPE | {"factor": "64"}},
            'factor is "64"; expected a positive',
        ),
        (
            {"rope_scaling": ROPE | {"factor": True}},
            "factor is true; expected a positive",
        ),
        (
            {"rope_scaling": ROPE | {"factor": 0.5}},
            "factor is 0.5; expected a number ≥ 1",
        ),
        ({"rope_scaling": ROPE | {"beta_fast": 0.5}}, "beta_fast is 0.5; expected at"),
        ({"rope_scaling": ROPE | {"attention_factor": 2.0}}, "attention_factor is 2.0"),
        ({"rope_scaling": ROPE | {"truncate": False}}, "truncate is false"),
        ({"rope_scaling": ROPE | {"long_factor": []}}, "long_factor is not supported"),
        ({"rope_scaling": "yarn"}, 'rope_scaling is "yarn"; expected an object'),
        ({"rope_theta": -1.0}, "rope_theta is -1.0; expected a positive number"),
    ],
)
def test_bad_rope(write, changes, match):
    refused(lambda: read_model_config(write(nested(**changes))), match)


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        (("rope_scaling",), r"rope_scaling \(or rope_parameters\) is missing"),
        (("rope_theta",), "rope_theta is missing; expected a positive number"),
    ],
)
def test_rope_keys_that_are_missing(write, keys, match):
    values = nested()
    values["text_config"] = without(values["text_config"], *keys)
    refused(lambda: read_model_config(write(values)), f"text_config: {match}")


def test_explicit_plain_rope(write):
    for changes in ({"rope_scaling": None}, {"rope_scaling": {"rope_type": "default"}}):
        rope = read_model_config(write(nested(**changes))).rope
        assert (rope.factor, rope.theta, rope.amplitude) == (1.0, 50000.0, 1.0)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("attention_bias", True, "false"),
        ("n_group", 8, "1"),
        ("n_group", True, "1"),
        ("attention_bias", 0, "false"),
        ("topk_group", 4, "1"),
        ("topk_method", "greedy", '"noaux_tc"'),
        ("scoring_func", "softmax", '"sigmoid"'),
        ("norm_topk_prob", False, "true"),
        ("moe_layer_freq", 2, "1"),
        ("hidden_act", "gelu", '"silu"'),
        ("tie_word_embeddings", True, "false"),
        ("num_nextn_predict_layers", 1, "0"),
        ("rope_interleave", False, "true"),
        ("sliding_window", 4096, "null"),
        ("final_logit_softcapping", 30.0, "null"),
        ("index_topk", 2048, "null"),
        ("num_key_value_heads", 8, "64"),
        ("qk_head_dim", 128, "192"),
        ("model_type", "deepseek_v32", '"kimi_k2" or "deepseek_v3"'),
    ],
)
def test_unsupported_values(write, key, value, expected):
    path = write(nested(**{key: value}))
    shown = json.dumps(value)
    refused(
        lambda: read_model_config(path), f"{key} is {shown}; expected {expected}, the"
    )
    assert any(f"{key} is {shown}" in line for line in config_deviations(path))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hidden_size": "7168"}, 'hidden_size is "7168"; expected an integer ≥ 1'),
        ({"hidden_size": 7168.0}, "hidden_size is 7168.0; expected an integer ≥ 1"),
        ({"hidden_size": 0}, "hidden_size is 0; expected an integer ≥ 1"),
        ({"vocab_size": True}, "vocab_size is true; expected an integer ≥ 1"),
        ({"q_lora_rank": None}, "q_lora_rank is null; expected an integer ≥ 1"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps is Infinity; expected a positive"),
        ({"first_k_dense_replace": 61}, "first_k_dense_replace is 61; expected less"),
        ({"num_experts_per_tok": 385}, "num_experts_per_tok is 385; expected at most"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim is 63; expected an even number"),
        (
            {"eos_token_id": 163586},
            r"eos_token_id is \[163585\] here and \[163586\] in",
        ),
        (
            {"vocab_size": 163585},
            "eos_token_id is 163585; expected less than vocab_size",
        ),
    ],
)
def test_bad_values(write, changes, match):
    refused(lambda: read_model_config(write(nested(**changes))), match)


@pytest.mark.parametrize(
    "key",
    sorted(
        {
            *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
            *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
            *("v_head_dim", "intermediate_size", "moe_intermediate_size", "n_group"),
            *("n_routed_experts", "num_experts_per_tok", "n_shared_experts"),
            *("first_k_dense_replace", "max_position_embeddings", "rms_norm_eps"),
            *("routed_scaling_factor", "initializer_range", "topk_group"),
            *("norm_topk_prob", "hidden_act", "tie_word_embeddings", "model_type"),
            *("bos_token_id", "eos_token_id"),
        }
    ),
)
def test_missing_keys(write, key):
    refused(lambda: read_model_config(write(without(flat(), key))), f"{key} is missing")


def test_tied_outside(write):
    values = nested() | {"tie_word_embeddings": True}
    refused(lambda: read_model_config(write(values)), "tie_word_embeddings is true")
    values = without(nested(), "tie_word_embeddings")
    refused(lambda: read_model_config(write(values)), "tie_word_embeddings is missing")


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "is not valid JSON"),
        ("[]", "holds no JSON object"),
        ('{"model_type": "a", "model_type": "b"}', "model_type stands twice"),
        ("[" * 100_000, "is not valid JSON"),
    ],
    ids=["cut", "list", "twice", "deep"],
)
def test_bad_files(write, content, match):
    refused(lambda: read_model_config(write(content)), match)


def test_missing_file(tmp_path):
    refused(lambda: read_model_config(tmp_path), "config.json is missing")


@pytest.mark.parametrize(
    ("eos", "expected"),
    [
        (163586, (163585, 163586)),
        ([163586, 163585], (163585, 163586)),
        (None, (163585,)),
    ],
)
def test_stop_token_ids(write, tmp_path, eos, expected):
    write(nested())
    assert read_stop_token_ids(tmp_path) == (163585,)
    write({"max_length": 262144, "eos_token_id": eos}, "generation_config.json")
    assert read_stop_token_ids(tmp_path) == expected


@pytest.mark.parametrize("eos", [163840, "163586", -1, [], [1.5]])
def test_bad_stop_token_ids(write, tmp_path, eos):
    write(nested())
    write({"eos_token_id": eos}, "generation_config.json")
    refused(
        lambda: read_stop_token_ids(tmp_path), "generation_config.json: eos_token_id"
    )


def test_eos_list_in_the_config(write, tmp_path):
    write(flat(eos_token_id=[163585, 163586]))
    assert read_stop_token_ids(tmp_path) == (163585, 163586)


@pytest.mark.parametrize("form", [nested, flat, resaved])
def test_doctor_finds_nothing_in_the_published_file(write, form):
    assert config_deviations(write(form())) == []


def test_doctor_lists_unknown_keys(write):
    lines = config_deviations(write(nested(odd_key=1) | {"outer_key": 2}))
    assert [line.split(": ")[-1] for line in lines] == [
        "odd_key is unknown and not used",
        "outer_key is unknown and not used",
    ]


def test_int4_passes(write):
    for values in (nested(), flat(), nested() | {"quantization_config": INT4}):
        assert read_quantisation(write(values)).schemes == (INT4_NAME,)
    assert read_quantisation(write(resaved())).schemes == ()


FP8 = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "desc_act": False,
    "damp_percent": 0.01,
    "lm_head": False,
}
# As compressed-tensors 0.20.1 writes its preset FP8_BLOCK.
FP8_BLOCK = {
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "group_size": None,
                "strategy": "block",
                "block_structure": [128, 128],
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "float",
                "symmetric": True,
                "group_size": 128,
                "strategy": "group",
                "dynamic": True,
            },
            "output_activations": None,
            "format": None,
        }
    },
    "quant_method": "compressed-tensors",
    "kv_cache_scheme": None,
    "format": "float-quantized",
    "quantization_status": "compressed",
    "global_compression_ratio": None,
    "ignore": ["lm_head"],
    "moe_sparsity_config": None,
}


@pytest.mark.parametrize("form", [nested, flat])
@pytest.mark.parametrize(
    ("config", "schemes", "zero"),
    [
        (FP8, ("FP8 in blocks",), None),
        (FP8_BLOCK, ("FP8 in blocks",), None),
        (GPTQ, ("GPTQ INT4",), None),
        (GPTQ | {"checkpoint_format": "gptq"}, ("GPTQ INT4",), 7),
        (GPTQ | {"checkpoint_format": "gptq_v2"}, ("GPTQ INT4",), 8),
    ],
)
def test_other_formats_that_the_converter_reads(write, form, config, schemes, zero):
    path = write(form(quantization_config=config))
    assert read_quantisation(path) == Quantisation(schemes, zero)
    assert any(
        line.endswith(f"quantization_config is {schemes[0]}; published {INT4_NAME}")
        for line in config_deviations(path)
    )


def test_mixed_precision(write):
    mixed = copy.deepcopy(INT4) | {"format": "mixed-precision"}
    groups = mixed["config_groups"]
    groups["group_0"]["format"] = "pack-quantized"
    groups["group_1"] = copy.deepcopy(FP8_BLOCK["config_groups"]["group_0"])
    groups["group_1"]["format"] = "float-quantized"
    path = write(nested(quantization_config=mixed))
    assert read_quantisation(path).schemes == ("FP8 in blocks", INT4_NAME)
    groups["group_1"]["input_activations"]["dynamic"] = False
    refused(
        lambda: read_quantisation(write(nested(quantization_config=mixed))),
        "group_1: input_activations: .*dynamic False",
        UnsupportedFormatError,
    )


def int4(place: str, **changes) -> dict:
    values = copy.deepcopy(INT4)
    group = values["config_groups"]["group_0"]
    {"outer": values, "group": group, "weights": group["weights"]}[place].update(
        changes
    )
    return values


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"quant_method": "fp8"}, "unsupported quantisation format FP8"),
        ({"quant_method": "gptq"}, "unsupported quantisation format GPTQ"),
        ({"quant_method": "awq"}, "unsupported quantisation format AWQ"),
        ({"quant_method": "modelopt"}, "unsupported quantisation format NVFP4"),
        ({"quant_method": "mxfp4"}, "unsupported quantisation format MXFP4"),
        ({"quant_method": "quark"}, "unsupported quantisation format MXFP4"),
        ({"quant_method": "novel"}, "unsupported quantisation format novel"),
        (
            int4("outer", format="nvfp4-pack-quantized"),
            "format compressed-tensors nvfp4",
        ),
        (int4("outer", quantization_status="frozen"), "quantization_status 'frozen'"),
        (int4("outer", kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme"),
        (int4("outer", odd=1), "unknown key 'odd'"),
        (int4("outer", config_groups={}), "no group"),
        (int4("outer", format="mixed-precision"), "mixed-precision"),
        (int4("group", format="int-quantized"), "compressed-tensors int-quantized"),
        (int4("weights", num_bits=3), "num_bits 3"),
        (
            FP8 | {"weight_block_size": [64, 128]},
            r"FP8 .*weight_block_size \[64, 128\]",
        ),
        (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2'"),
        (FP8 | {"activation_scheme": "static"}, "activation_scheme 'static'"),
        (FP8 | {"odd": 1}, "unknown key 'odd'"),
        (FP8_BLOCK | {"format": "pack-quantized"}, "input_activations"),
        (GPTQ | {"bits": 8}, "GPTQ .*bits 8"),
        (GPTQ | {"group_size": 128}, r"GPTQ .*group_size 128\); expected 32"),
        (GPTQ | {"sym": False}, "GPTQ .*sym False"),
        (GPTQ | {"desc_act": True}, "GPTQ .*desc_act True"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        (GPTQ | {"odd": 1}, "unknown key 'odd'"),
        (int4("group", input_activations={"num_bits": 8}), "input_activations"),
        (int4("weights", group_size=128), "group_size 128"),
        (int4("weights", num_bits=8), "num_bits 8"),
        (int4("weights", symmetric=False), "symmetric False"),
        (int4("weights", strategy="channel"), "strategy 'channel'"),
        (int4("weights", type="float"), "type 'float'"),
        (int4("weights", actorder="group"), "actorder 'group'"),
        (int4("weights", dynamic=True), "dynamic True"),
    ],
)
def test_quantisation_is_refused_by_name(write, config, match):
    path = write(nested(quantization_config=config))
    refused(lambda: read_quantisation(path), match, UnsupportedFormatError)
    assert any(line.startswith("refused: ") for line in config_deviations(path))


def test_two_quantisation_configs_that_differ(write):
    values = nested() | {"quantization_config": int4("weights", group_size=64)}
    refused(lambda: read_quantisation(write(values)), "quantization_config differs")


def test_draft_published_values(write):
    path = write(DRAFT)
    config = read_draft_config(path)
    assert config.draft_block_size == 8 and config.draft_horizon == 7
    assert config.target_layer_ids == (1, 12, 24, 35, 47, 58)
    assert config.mask_token_id == 163838
    assert config.rope_amplitude == pytest.approx(1.4158883083359673, rel=1e-12)
    assert read_draft_config(path, rope_amplitude=1.0).rope_amplitude == 1.0
    assert config_deviations(path) == []
    check_draft_fits(config, read_model_config(write(nested(), "target.json")))


def test_draft_default_layers(write):
    assert default_target_layer_ids(61, 6) == (1, 12, 24, 35, 47, 58)
    assert default_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(61, 1) == (30,)
    values = DRAFT | {"dflash_config": {"mask_token_id": 163838}}
    assert read_draft_config(write(values)) == read_draft_config(write(DRAFT, "d.json"))


def test_draft_forms(write):
    expected = read_draft_config(write(DRAFT, "d.json"))
    inner = DRAFT["dflash_config"] | {"block_size": 8, "causal": False}
    rope = ROPE | {"rope_theta": 50000}
    for values in (
        without(DRAFT, "block_size", "layer_types") | {"dflash_config": inner},
        without(DRAFT, "rope_scaling", "rope_theta") | {"rope_parameters": rope},
        without(DRAFT, "sliding_window"),
        DRAFT | {"sliding_window": 4096, "use_sliding_window": False},
        DRAFT | {"draft_vocab_size": 163840, "is_causal": False},
    ):
        assert read_draft_config(write(values)) == expected


def test_draft_without_scaling_has_amplitude_one(write):
    values = DRAFT | {"rope_scaling": None}
    assert read_draft_config(write(values)).rope_amplitude == 1.0


DFLASH = DRAFT["dflash_config"]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "expected .*DFlashDraftModel"),
        ({"model_type": "llama"}, 'model_type is "llama"; expected "qwen3"'),
        ({"input_embedding_scale": 2.0}, "input_embedding_scale is 2.0"),
        ({"output_multiplier": 0.5}, "output_multiplier is 0.5"),
        ({"final_logit_softcapping": 30}, "final_logit_softcapping is 30"),
        ({"is_causal": True}, "is_causal is true"),
        ({"attention_sink_bias": True}, "attention_sink_bias is true"),
        ({"mask_embedding": True}, "mask_embedding is true"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size is 32000; expected 163840"),
        ({"is_neox_style": False}, "is_neox_style is false"),
        ({"sample_from_anchor": True}, "sample_from_anchor is true"),
        ({"conv_kernel_size": 4}, "conv_kernel_size is 4"),
        ({"selector_rank": 64}, "selector_rank is 64"),
        ({"use_sliding_window": True}, "use_sliding_window is true"),
        (
            {"sliding_window": 4096, "use_sliding_window": None},
            "sliding_window is 4096; expected null",
        ),
        ({"layer_types": ["sliding_attention"] * 6}, "layer_types is .*full_attention"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types .*; expected 6 times"),
        ({"quantization_config": INT4}, "quantization_config is"),
        ({"num_key_value_heads": 7}, "expected a multiple of num_key_value_heads, 7"),
        ({"block_size": 1}, "block_size is 1; expected an integer ≥ 2"),
        (
            {"dflash_config": DFLASH | {"block_size": 16}},
            "block_size is 8 here and 16 in dflash_config",
        ),
        ({"dflash_config": DFLASH | {"causal": True}}, "causal is true"),
        ({"dflash_config": DFLASH | {"odd": 1}}, "dflash_config: odd is not supported"),
        (
            {"dflash_config": DFLASH | {"target_layer_ids": [1, 61]}},
            "expected distinct ids below num_target_layers, 61",
        ),
        (
            {"dflash_config": DFLASH | {"target_layer_ids": [1, 1]}},
            r"target_layer_ids is \[1, 1\]; expected distinct ids",
        ),
        (
            {"dflash_config": DFLASH | {"mask_token_id": 163840}},
            "mask_token_id is 163840; expected less than vocab_size",
        ),
        ({"dflash_config": {"target_layer_ids": [1]}}, "mask_token_id is missing"),
    ],
)
def test_draft_refusals(write, changes, match):
    path = write(DRAFT | changes)
    refused(lambda: read_draft_config(path), match)


@pytest.mark.parametrize(
    "key", ["block_size", "dflash_config", "rope_theta", "head_dim"]
)
def test_draft_missing_keys(write, key):
    path = write(without(DRAFT, key))
    refused(lambda: read_draft_config(path), f"{key} is missing")


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", 64), ("vocab_size", 163839), ("num_target_layers", 60)],
)
def test_draft_for_another_target(write, key, value):
    target = read_model_config(write(nested(), "target.json"))
    dflash = {"target_layer_ids": [1], "mask_token_id": 5}
    draft = read_draft_config(write(DRAFT | {key: value, "dflash_config": dflash}))
    with pytest.raises(ConfigError, match=f"the drafter's {key} is {value}; expected"):
        check_draft_fits(draft, target)
