"""Rebuilds Hugging Face tensors from restored parameters, written from the names.

Independent of the converter's rules: an error in a rule does not cancel here.
"""

import numpy as np


def to_hugging_face(p: dict[str, np.ndarray], dense: int) -> dict[str, np.ndarray]:
    """Returns the language model's tensors from canonical arrays by path."""
    layers = dense + len(p["moe/router"])
    out = {
        "language_model.model.embed_tokens.weight": p["embed"],
        "language_model.model.norm.weight": p["norm"],
        "language_model.lm_head.weight": p["head"],
    }
    for number in range(layers):
        group, i = ("dense", number) if number < dense else ("moe", number - dense)
        name = f"language_model.model.layers.{number}."
        out |= attention(p, f"{group}/attention/", i, name + "self_attn.")
        out[name + "input_layernorm.weight"] = p[f"{group}/attention/input_norm"][i]
        out[name + "post_attention_layernorm.weight"] = p[f"{group}/post_norm"][i]
        if group == "dense":
            for w in ("gate", "up", "down"):
                out[f"{name}mlp.{w}_proj.weight"] = p[f"dense/mlp/{w}"][i]
            continue
        out[name + "mlp.gate.weight"] = p["moe/router"][i]
        out[name + "mlp.gate.e_score_correction_bias"] = p["moe/router_bias"][i]
        for w in ("gate", "up", "down"):
            out[f"{name}mlp.shared_experts.{w}_proj.weight"] = p[f"moe/shared/{w}"][i]
            packed, scale = (p[f"moe/experts/{w}/{k}"][i] for k in ("packed", "scale"))
            for e in range(len(packed)):
                expert = f"{name}mlp.experts.{e}.{w}_proj."
                out[expert + "weight_packed"] = packed[e]
                out[expert + "weight_scale"] = scale[e]
                shape = (packed.shape[1], 8 * packed.shape[2])
                out[expert + "weight_shape"] = np.array(shape, np.int32)
    return out


def attention(p: dict[str, np.ndarray], path: str, i: int, name: str):
    q_b, o = p[path + "q_b"][i], p[path + "o"][i]
    heads = []
    for keys, values in zip(p[path + "k_up"][i], p[path + "v_up"][i], strict=True):
        heads += [keys, values]
    return {
        name + "q_a_proj.weight": p[path + "q_a"][i],
        name + "q_a_layernorm.weight": p[path + "q_a_norm"][i],
        name + "q_b_proj.weight": np.concatenate(list(q_b)),
        name + "kv_a_proj_with_mqa.weight": p[path + "kv_a"][i],
        name + "kv_a_layernorm.weight": p[path + "kv_a_norm"][i],
        name + "kv_b_proj.weight": np.concatenate(heads),
        name + "o_proj.weight": np.concatenate(
            [o[:, head] for head in range(o.shape[1])], axis=1
        ),
    }


def draft_to_hugging_face(p: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the drafter's tensors from canonical arrays by path."""
    fc = p["fc"]
    out = {
        "fc.weight": np.concatenate([fc[:, f] for f in range(fc.shape[1])], axis=1),
        "hidden_norm.weight": p["hidden_norm"],
        "norm.weight": p["norm"],
    }
    for i in range(len(p["layers/q"])):
        name = f"layers.{i}."
        o = p["layers/o"][i]
        for w in ("q", "k", "v"):
            heads = list(p[f"layers/{w}"][i])
            out[f"{name}self_attn.{w}_proj.weight"] = np.concatenate(heads)
        out[name + "self_attn.o_proj.weight"] = np.concatenate(
            [o[:, head] for head in range(o.shape[1])], axis=1
        )
        for w in ("q", "k"):
            out[f"{name}self_attn.{w}_norm.weight"] = p[f"layers/{w}_norm"][i]
        out[name + "input_layernorm.weight"] = p["layers/input_norm"][i]
        out[name + "post_attention_layernorm.weight"] = p["layers/post_norm"][i]
        for w in ("gate", "up", "down"):
            out[f"{name}mlp.{w}_proj.weight"] = p[f"layers/mlp/{w}"][i]
    return out
