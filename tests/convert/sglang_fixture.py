"""Writes checkpoints as SGLang saves them, from the tables and not from the converter.

Independent of it: nothing here imports `convert`. Marlin is made by its construction in
steps (tiles, a permutation of each 1024, packing), and each rank by slicing.
"""

import copy
import dataclasses
import hashlib
import json
from pathlib import Path

import ml_dtypes
import numpy as np

from tests.convert.support import TINY, Raw, raw, read_config, write_file

BF16 = np.dtype(ml_dtypes.bfloat16)
LM = "language_model.model."
EXPERTS, INNER, HIDDEN, VOCAB, HEADS, VISION = 8, 512, 64, 1024, 16, 32
NOPE, ROPE, VALUE, Q_LORA, LATENT, DENSE = 8, 4, 8, 32, 32, 64


@dataclasses.dataclass(frozen=True)
class Saved:
    """How an engine was started that saved a checkpoint, and what is odd about it.

    Attributes:
      attention_dp: Copies of attention (tp / attention_dp ranks divide it).
      moe_copies: Groups of ranks that each have all experts.
      kv_b: Name of kv_b_proj; SGLang writes the second one after a forward pass.
    """

    tp: int = 8
    layout: str = "marlin"
    ep: int = 1
    attention_dp: int = 1
    moe_copies: int = 1
    kv_b: str = "self_attn.kv_b_proj.weight"
    weight_shape: bool = True
    whole_vision: bool = False
    parts: int = 1


def config() -> dict:
    value = copy.deepcopy(read_config(TINY))
    value["text_config"].update(
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=Q_LORA,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
        vocab_size=VOCAB,
        intermediate_size=DENSE,
        moe_intermediate_size=INNER,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
    )
    value["vision_config"].update(vt_num_attention_heads=16, num_attention_heads=16)
    return value


def hugging_face(seed: int = 0) -> dict[str, Raw]:
    """Returns a small INT4 checkpoint, large enough to be divided by 16."""
    noise = np.random.default_rng(seed)
    out: dict[str, Raw] = {}

    def dense(name: str, *shape: int, dtype=BF16) -> None:
        out[name] = raw(noise.standard_normal(shape).astype(dtype))

    def mlp(name: str, inner: int) -> None:
        dense(f"{name}.gate_proj.weight", inner, HIDDEN)
        dense(f"{name}.up_proj.weight", inner, HIDDEN)
        dense(f"{name}.down_proj.weight", HIDDEN, inner)

    def int4(name: str, outputs: int, inputs: int) -> None:
        packed = noise.integers(-(2**31), 2**31, (outputs, inputs // 8))
        scale = noise.uniform(0.001, 0.1, (outputs, inputs // 32))
        out[f"{name}.weight_packed"] = raw(packed.astype(np.int32))
        out[f"{name}.weight_scale"] = raw(scale.astype(BF16))
        out[f"{name}.weight_shape"] = raw(np.array([outputs, inputs], np.int32))

    dense(f"{LM}embed_tokens.weight", VOCAB, HIDDEN)
    for number in range(2):
        layer = f"{LM}layers.{number}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            dense(f"{layer}{norm}.weight", HIDDEN)
        dense(f"{layer}self_attn.q_a_proj.weight", Q_LORA, HIDDEN)
        dense(f"{layer}self_attn.q_a_layernorm.weight", Q_LORA)
        dense(f"{layer}self_attn.q_b_proj.weight", HEADS * (NOPE + ROPE), Q_LORA)
        dense(f"{layer}self_attn.kv_a_proj_with_mqa.weight", LATENT + ROPE, HIDDEN)
        dense(f"{layer}self_attn.kv_a_layernorm.weight", LATENT)
        dense(f"{layer}self_attn.kv_b_proj.weight", HEADS * (NOPE + VALUE), LATENT)
        dense(f"{layer}self_attn.o_proj.weight", HIDDEN, HEADS * VALUE)
        if number == 0:
            mlp(f"{layer}mlp", DENSE)
            continue
        dense(f"{layer}mlp.gate.weight", EXPERTS, HIDDEN)
        dense(f"{layer}mlp.gate.e_score_correction_bias", EXPERTS, dtype=np.float32)
        mlp(f"{layer}mlp.shared_experts", INNER)
        for e in range(EXPERTS):
            int4(f"{layer}mlp.experts.{e}.gate_proj", INNER, HIDDEN)
            int4(f"{layer}mlp.experts.{e}.up_proj", INNER, HIDDEN)
            int4(f"{layer}mlp.experts.{e}.down_proj", HIDDEN, INNER)
    dense(f"{LM}norm.weight", HIDDEN)
    dense("language_model.lm_head.weight", VOCAB, HIDDEN)
    block = "vision_tower.encoder.blocks.0."
    for name, shape in {
        "vision_tower.patch_embed.proj.weight": (VISION, 3, 14, 14),
        "vision_tower.patch_embed.pos_emb.weight": (8, 8, VISION),
        f"{block}norm0.weight": (VISION,),
        f"{block}wqkv.weight": (3 * VISION, VISION),
        f"{block}wqkv.bias": (3 * VISION,),
        f"{block}wo.weight": (VISION, VISION),
        f"{block}wo.bias": (VISION,),
        f"{block}mlp.fc0.weight": (64, VISION),
        "mm_projector.pre_norm.bias": (VISION,),
        "mm_projector.proj.0.weight": (4 * VISION, 4 * VISION),
        "mm_projector.proj.2.bias": (HIDDEN,),
    }.items():
        dense(name, *shape)
    return out


def save(directory: Path, hf: dict[str, Raw], saved: Saved, **changes) -> Path:
    """Writes a sharded_state directory; `changes` are fields of config.json."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config() | changes))
    for rank in range(saved.tp):
        write_rank(directory, rank, rank_tensors(hf, saved, rank), saved.parts)
    return directory


def write_rank(
    directory: Path, rank: int, tensors: dict[str, Raw], parts: int = 1
) -> None:
    names = sorted(tensors)
    size = -(-len(names) // parts)
    for part in range(parts):
        chosen = {
            name: tensors[name] for name in names[part * size : (part + 1) * size]
        }
        write_file(directory / f"model-rank-{rank}-part-{part}.safetensors", chosen)


def rank_tensors(hf: dict[str, Raw], saved: Saved, rank: int) -> dict[str, Raw]:
    """Returns what one rank holds, by SGLang's names."""
    arrays = {name: tensor.array() for name, tensor in hf.items()}
    root = LM if f"{LM}norm.weight" in arrays else "model."
    head = "language_model.lm_head.weight" if root == LM else "lm_head.weight"
    out: dict[str, np.ndarray] = {
        f"{root}embed_tokens.weight": cut(
            arrays[f"{root}embed_tokens.weight"], 0, saved.tp, rank
        ),
        head: cut(arrays[head], 0, saved.tp, rank),
        f"{root}norm.weight": arrays[f"{root}norm.weight"],
    }
    for number in range(2):
        layer = f"{root}layers.{number}."
        out |= _attention(arrays, layer, saved, rank)
        if number == 0:
            out |= _mlp(arrays, f"{layer}mlp", saved.tp, rank)
            continue
        for name in ("mlp.gate.weight", "mlp.gate.e_score_correction_bias"):
            out[layer + name] = arrays[layer + name]
        out |= _mlp(arrays, f"{layer}mlp.shared_experts", saved.tp, rank)
        out |= _experts(arrays, f"{layer}mlp.experts.", saved, rank)
    out |= _vision(arrays, saved, rank)
    return {name: _raw(array) for name, array in out.items()}


def cut(array: np.ndarray, axis: int, count: int, number: int) -> np.ndarray:
    return np.split(array, count, axis)[number]


def _raw(array: np.ndarray) -> Raw:
    if array.dtype == np.uint8:
        return Raw("U8", array.shape, array.tobytes())
    return raw(np.ascontiguousarray(array))


def _attention(arrays, layer: str, saved: Saved, rank: int):
    a = f"{layer}self_attn."
    ranks = saved.tp // saved.attention_dp
    own = rank % ranks
    out = {
        name: arrays[name]
        for name in (
            f"{layer}input_layernorm.weight",
            f"{layer}post_attention_layernorm.weight",
            f"{a}q_a_layernorm.weight",
            f"{a}kv_a_layernorm.weight",
        )
    }
    out[f"{a}fused_qkv_a_proj_with_mqa.weight"] = np.concatenate(
        [arrays[f"{a}q_a_proj.weight"], arrays[f"{a}kv_a_proj_with_mqa.weight"]]
    )
    out[f"{a}q_b_proj.weight"] = cut(arrays[f"{a}q_b_proj.weight"], 0, ranks, own)
    out[layer + saved.kv_b] = cut(arrays[f"{a}kv_b_proj.weight"], 0, ranks, own)
    out[f"{a}o_proj.weight"] = cut(arrays[f"{a}o_proj.weight"], 1, ranks, own)
    return out


def _mlp(arrays, name: str, tp: int, rank: int):
    gate, up = (
        cut(arrays[f"{name}.{w}_proj.weight"], 0, tp, rank) for w in ("gate", "up")
    )
    return {
        f"{name}.gate_up_proj.weight": np.concatenate([gate, up]),
        f"{name}.down_proj.weight": cut(
            arrays[f"{name}.down_proj.weight"], 1, tp, rank
        ),
    }


def _vision(arrays, saved: Saved, rank: int):
    out = {}
    for name, array in arrays.items():
        if not name.startswith(("vision_tower.", "mm_projector.")):
            continue
        new = (
            name.replace("wqkv.", "attn.qkv_proj.")
            .replace("wo.", "attn.proj.")
            .replace("mm_projector.proj.0", "mm_projector.linear_1")
            .replace("mm_projector.proj.2", "mm_projector.linear_2")
        )
        if ".wqkv." in name and not saved.whole_vision:
            three = np.split(array, 3)
            array = np.concatenate([cut(w, 0, saved.tp, rank) for w in three])
        if name.endswith(".wo.weight") and not saved.whole_vision:
            array = cut(array, 1, saved.tp, rank)
        out[new] = array
    return out


def _experts(arrays, name: str, saved: Saved, rank: int):
    width = saved.tp // saved.ep // saved.moe_copies
    own = rank % (saved.tp // saved.moe_copies)
    group, number = own // width, own % width
    local = EXPERTS // saved.ep
    lists: dict[str, list] = {
        f"w{w}_weight_{k}": [] for w in (13, 2) for k in ("packed", "scale", "shape")
    }
    for e in range(group * local, (group + 1) * local):
        u, s, shape = {}, {}, {}
        for w in ("gate", "up", "down"):
            weight = f"{name}{e}.{w}_proj.weight_"
            axis = 1 if w == "down" else 0
            u[w] = cut(nibbles(arrays[f"{weight}packed"]), axis, width, number)
            s[w] = cut(arrays[f"{weight}scale"], axis, width, number)
            shape[w] = arrays[f"{weight}shape"].astype(BF16)
        for w, us, ss, stated in (
            (
                13,
                np.concatenate([u["gate"], u["up"]]),
                np.concatenate([s["gate"], s["up"]]),
                shape["up"],
            ),
            (2, u["down"], s["down"], shape["down"]),
        ):
            lists[f"w{w}_weight_packed"].append(PACK[saved.layout](us.T))
            lists[f"w{w}_weight_scale"].append(SCALES[saved.layout](ss.T))
            lists[f"w{w}_weight_shape"].append(stated)
    out = {f"{name}{key}": np.stack(arrays) for key, arrays in lists.items()}
    if not saved.weight_shape:
        out = {k: v for k, v in out.items() if not k.endswith("_weight_shape")}
    if saved.layout != "marlin":
        for w, inputs in ((13, HIDDEN), (2, INNER // width)):
            for key in (f"w{w}_weight_g_idx", f"w{w}_g_idx_sort_indices"):
                out[f"{name}{key}"] = np.zeros((local, inputs), np.int32)
    return out


def nibbles(packed: np.ndarray) -> np.ndarray:
    """Returns u [out, in] of words [out, in / 8], lowest nibble first."""
    words = packed.view(np.uint32).astype(np.int64)
    return np.stack([words >> (4 * k) & 15 for k in range(8)], -1).reshape(
        len(packed), -1
    )


def words(eights: np.ndarray) -> np.ndarray:
    """Returns int32 words of nibbles in groups of eight along the last axis."""
    total = sum(eights[..., k] << (4 * k) for k in range(8))
    return total.astype(np.uint32).view(np.int32)


def marlin(u: np.ndarray) -> np.ndarray:
    """Returns [K / 16, 2 N] of u [K, N], by the three steps of the construction."""
    inputs, outputs = u.shape
    tiles = u.reshape(inputs // 16, 16, outputs // 16, 16).transpose(0, 2, 1, 3)
    rows = tiles.reshape(inputs // 16, 16 * outputs)
    order = []
    for i in range(32):
        c = i // 4
        rho = (2 * (i % 4), 2 * (i % 4) + 1, 2 * (i % 4) + 8, 2 * (i % 4) + 9)
        eight = [16 * r + c + 8 * beta for beta in (0, 1) for r in rho]
        for tile in range(4):
            order += [256 * tile + eight[j] for j in (0, 2, 4, 6, 1, 3, 5, 7)]
    runs = rows.reshape(inputs // 16, -1, 1024)[:, :, order]
    return words(runs.reshape(inputs // 16, -1, 8))


def gptq(u: np.ndarray) -> np.ndarray:
    """Returns [K / 8, N] of u [K, N]."""
    return words(u.reshape(u.shape[0] // 8, 8, u.shape[1]).transpose(0, 2, 1))


def triton(u: np.ndarray) -> np.ndarray:
    """Returns bytes [N, K / 2] of u [K, N], the even input in the low half."""
    return (u[0::2] | u[1::2] << 4).T.astype(np.uint8)


def marlin_scales(s: np.ndarray) -> np.ndarray:
    out = s.copy()
    for run in range(0, s.shape[1], 64):
        for a in range(8):
            for b in range(8):
                out[:, run + 8 * a + b] = s[:, run + 8 * b + a]
    return out


def _same(s: np.ndarray) -> np.ndarray:
    return s


PACK = {"marlin": marlin, "raw": gptq, "triton": triton}
SCALES = {"marlin": marlin_scales, "raw": _same, "triton": np.transpose}


TORCH_NAMES = {"BF16": "torch.bfloat16", "F32": "torch.float32", "I32": "torch.int32"}


def presharded(
    directory: Path,
    ranks: list[dict[str, Raw]],
    *,
    extra: bool = True,
    made=hashlib.sha1,
) -> Path:
    """Writes a model directory with a presharded dump, and returns the dump.

    Args:
      made: The hash of the contents, by which SGLang calls them.
    """
    dump = directory / "presharded" / f"TP-{len(ranks)}-sig-0123456789abcdef"
    dump.mkdir(parents=True)
    held: dict[str, tuple[Raw, list[tuple[int, str, bool]]]] = {}
    for rank, own in enumerate(ranks):
        named = [(name, tensor, False) for name, tensor in own.items()]
        if extra:
            w_kc = raw(np.full((2, 4), rank, BF16))
            named.append(("model.layers.0.self_attn.w_kc", w_kc, True))
        for name, tensor, is_extra in named:
            text = str(tensor.shape) + TORCH_NAMES[tensor.dtype]
            key = made(text.encode() + tensor.data).hexdigest()
            held.setdefault(key, (tensor, []))[1].append((rank, name, is_extra))
    files: dict[str, dict[str, Raw]] = {}
    reads: dict[str, list[dict]] = {str(rank): [] for rank in range(len(ranks))}
    for key, (tensor, users) in held.items():
        who = sorted({rank for rank, _, _ in users})
        common = len(who) == len(ranks)
        text = "common" if common else "rank-" + ",".join(f"{r:03d}" for r in who)
        number = 0 if common else 1 + who[0]
        filename = f"model-{number:05d}-{text}.safetensor"
        files.setdefault(filename, {})[key] = tensor
        for rank, name, is_extra in users:
            reads[str(rank)].append(
                {
                    "filename": filename,
                    "stored_key": key,
                    "name": name,
                    "is_extra": is_extra,
                }
            )
    for filename, tensors in files.items():
        write_file(dump / filename, tensors)
    plan = {
        "version": 1,
        "world_size": len(ranks),
        "files": [{"filename": name} for name in files],
        "rank_to_reads": reads,
        "rank_checksums": {rank: aggregate(entries) for rank, entries in reads.items()},
        "shard_config": {"tp": len(ranks), "pp": 1},
    }
    (dump / "checksum.json").write_text(json.dumps(plan))
    ready = {"plan_version": 1, "world_size": len(ranks), "created_at": 0.0}
    (dump / "READY").write_text(json.dumps(ready))
    return dump


def aggregate(entries: list[dict]) -> str:
    total = 0
    for entry in entries:
        text = f"{entry['name']}:{entry['stored_key']}".encode()
        total += int(hashlib.sha1(text).hexdigest()[:16], 16)
    return f"{total % 2**64:016x}"
