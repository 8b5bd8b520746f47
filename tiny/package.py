"""Writes the trained models as a hub serves them: Kimi K2.6's names and INT4 form.

    python -m tiny.package --weights DIR [--out DIR]

It runs where compressed-tensors is (`scripts/oracles`), since that library packs the
experts; its words must be those of training's own quantiser. DIR holds target/ and
draft/ as the stages wrote them.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
from safetensors.torch import load_file

from tests.oracles import int4
from tests.oracles.checkpoint_files import write_shards, write_tensors

MODEL = Path(__file__).with_name("model")
_LM = "language_model.model."
_ATTENTION = {
    "input_norm": "input_layernorm",
    "q_a": "self_attn.q_a_proj",
    "q_a_norm": "self_attn.q_a_layernorm",
    "q_b": "self_attn.q_b_proj",
    "kv_a": "self_attn.kv_a_proj_with_mqa",
    "kv_a_norm": "self_attn.kv_a_layernorm",
    "o": "self_attn.o_proj",
}
_DRAFT = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}
_PROJECTIONS = ("gate", "up", "down")
_INPUT_HEADS = ("o", "fc")  # Their heads, or features, are part of the inputs.

Tensors = dict[str, torch.Tensor]


def read_pieces(directory: Path, name: str) -> Tensors:
    """Returns the tensors of name-0.safetensors, name-1.safetensors, …"""
    tensors: Tensors = {}
    for path in sorted(directory.glob(f"{name}-*.safetensors")):
        tensors |= load_file(path)
    if not tensors:
        raise FileNotFoundError(f"{directory} has no {name}-0.safetensors")
    return tensors


def target_shards(stored: Tensors) -> Iterator[Tensors]:
    """Yields each file's tensors: one file a layer, then embedding, head and norm."""
    left = dict(stored)
    index = 0
    for kind in ("dense", "moe"):
        for place in range(len(left[f"{kind}/post_norm"])):
            layer = {
                path.removeprefix(f"{kind}/"): value[place]
                for path, value in left.items()
                if path.startswith(f"{kind}/")
            }
            yield dict(_target_layer(layer, f"{_LM}layers.{index}."))
            index += 1
    yield {
        f"{_LM}embed_tokens.weight": left["embed"],
        f"{_LM}norm.weight": left["norm"],
        "language_model.lm_head.weight": left["head"],
    }


def _target_layer(p: Tensors, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for ours, theirs in _ATTENTION.items():
        yield f"{prefix}{theirs}.weight", _matrix(ours, p[f"attention/{ours}"])
    # Each head's key rows, then its value rows.
    both = torch.cat([p["attention/k_up"], p["attention/v_up"]], dim=1)
    yield f"{prefix}self_attn.kv_b_proj.weight", both.flatten(0, 1)
    yield f"{prefix}post_attention_layernorm.weight", p["post_norm"]
    if "router" not in p:
        for name in _PROJECTIONS:
            yield f"{prefix}mlp.{name}_proj.weight", p[f"mlp/{name}"]
        return
    yield f"{prefix}mlp.gate.weight", p["router"]
    yield f"{prefix}mlp.gate.e_score_correction_bias", p["router_bias"]
    for name in _PROJECTIONS:
        yield f"{prefix}mlp.shared_experts.{name}_proj.weight", p[f"shared/{name}"]
        packed, scale = p[f"experts/{name}/packed"], p[f"experts/{name}/scale"]
        for expert in range(len(packed)):
            full = f"{prefix}mlp.experts.{expert}.{name}_proj"
            for key, tensor in _int4(full, packed[expert], scale[expert]).items():
                yield f"{full}.{key}", tensor


def _matrix(name: str, weight: torch.Tensor) -> torch.Tensor:
    if weight.dim() < 3:
        return weight
    return weight.flatten(1) if name in _INPUT_HEADS else weight.flatten(0, 1)


def _int4(name: str, packed: torch.Tensor, scale: torch.Tensor) -> Tensors:
    shape = torch.tensor([len(packed), 8 * packed.shape[1]], dtype=torch.int32)
    ours = {"weight_packed": packed, "weight_scale": scale, "weight_shape": shape}
    theirs = int4.compress(int4.decompress(ours), scale)
    if not torch.equal(theirs["weight_packed"], packed):
        raise ValueError(f"{name}: compressed-tensors packs other words than training")
    return theirs


def draft_tensors(stored: Tensors) -> Tensors:
    """Returns the drafter's tensors by their names on disk."""
    tensors = {
        "fc.weight": _matrix("fc", stored["fc"]),
        "hidden_norm.weight": stored["hidden_norm"],
        "norm.weight": stored["norm"],
    }
    for ours, theirs in _DRAFT.items():
        for index, value in enumerate(stored[f"layers/{ours}"]):
            tensors[f"layers.{index}.{theirs}.weight"] = _matrix(ours, value)
    return tensors


def checksums(directory: Path) -> dict[str, str]:
    """Returns the SHA-256 of every file below a directory, by name."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(
            path.read_bytes()
        ).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m tiny.package")
    parser.add_argument("--weights", type=Path, required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, default=MODEL, metavar="DIR")
    arguments = parser.parse_args()
    target = read_pieces(arguments.weights / "target", "target")
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_shards(arguments.out, list(target_shards(target)))
    drafter = draft_tensors(read_pieces(arguments.weights / "draft", "draft"))
    (arguments.out / "draft").mkdir(exist_ok=True)
    write_tensors(arguments.out / "draft" / "model.safetensors", drafter)
    sums = json.dumps(checksums(arguments.out), indent=1)
    (arguments.out.parent / "checksums.json").write_text(sums + "\n")


if __name__ == "__main__":
    main()
