"""Owns the image path's names: vision tower and projector, carried as they are.

SGLang renames some of them and divides the attention by heads, unless each rank
encodes whole images (data parallel), when every rank has all of it.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from convert.sglang.names import Kind, Parameter, Part
from convert.tensor import Tensor
from ddtree_jax.errors import CheckpointError
from ddtree_jax.hf_config.fields import read_json

_BLOCK = "vision_tower.encoder.blocks.{n}."
_KEPT = (
    "vision_tower.patch_embed.proj.{k}",
    "vision_tower.patch_embed.pos_emb.weight",
    *(f"{_BLOCK}{name}.{{k}}" for name in ("norm0", "norm1", "mlp.fc0", "mlp.fc1")),
    "vision_tower.encoder.final_layernorm.{k}",
    "mm_projector.pre_norm.{k}",
)
# (Hugging Face's, SGLang's); n is a number and k weight or bias.
_NAMES = (
    *((name, name) for name in _KEPT),
    (_BLOCK + "wqkv.{k}", _BLOCK + "attn.qkv_proj.{k}"),
    (_BLOCK + "wo.{k}", _BLOCK + "attn.proj.{k}"),
    ("mm_projector.proj.0.{k}", "mm_projector.linear_1.{k}"),
    ("mm_projector.proj.2.{k}", "mm_projector.linear_2.{k}"),
)


def _pattern(name: str) -> re.Pattern[str]:
    escaped = re.escape(name).replace(r"\{n\}", r"(?P<n>\d+)")
    return re.compile(escaped.replace(r"\{k\}", "(?P<k>weight|bias)"))


_TO_SGLANG = tuple((_pattern(theirs), ours) for theirs, ours in _NAMES)
_TO_VIEW = tuple((_pattern(ours), theirs) for theirs, ours in _NAMES)


def sglang_name(name: str) -> str | None:
    """Returns SGLang's name of one of Hugging Face's, or None for another tensor."""
    return _renamed(name, _TO_SGLANG)


def view_name(name: str) -> str | None:
    """Returns the Hugging Face name of one of SGLang's, or None for another tensor."""
    return _renamed(name, _TO_VIEW)


def vision_parameters(view: Mapping[str, Kind], directory: Path) -> list[Parameter]:
    """Returns the parameters that hold the image tensors among those of a view.

    Args:
      view: Dtype and shape of tensors by Hugging Face name.
      directory: Where config.json is, which says how many heads there are.
    """
    named = [(name, target) for name in view if (target := sglang_name(name))]
    heads = _heads(directory) if named else 0
    out = []
    for name, target in named:
        dtype, shape = view[name]
        if not shape:
            raise CheckpointError(f"{name} is a scalar; expected at least one axis")
        axis, parts = _division(name, target, shape, heads)
        out.append(Parameter(target, axis, parts, dtype, shape))
    return out


def stored_kinds(stored: Mapping[str, Tensor]) -> dict[str, Kind]:
    """Returns dtype and whole shape of the image tensors that a rank holds.

    Under their Hugging Face names, that of every tensor that may be divided being
    inferred from one of the same block that never is.
    """
    return {
        view: (tensor.dtype, _whole_shape(name, tensor, stored))
        for name, tensor in stored.items()
        if (view := view_name(name))
    }


def _renamed(name: str, names: Iterable[tuple[re.Pattern[str], str]]) -> str | None:
    for pattern, other in names:
        if match := pattern.fullmatch(name):
            return other.format(**match.groupdict())
    return None


def _whole_shape(
    name: str, tensor: Tensor, stored: Mapping[str, Tensor]
) -> tuple[int, ...]:
    """Returns the shape that a possibly divided tensor has as a whole."""
    root, _, last = name.rpartition(".attn.")
    if not last.startswith(("qkv_proj.", "proj.weight")):
        return tensor.shape
    norm = f"{root}.norm0.weight"
    if norm not in stored:
        raise CheckpointError(f"{tensor.file}: tensors missing (1): {norm}")
    width = stored[norm].shape[0]
    if last == "proj.weight":
        return (tensor.shape[0], width)
    return (3 * width, *tensor.shape[1:])


def _division(
    name: str, target: str, shape: tuple[int, ...], heads: int
) -> tuple[int | None, tuple[Part, ...]]:
    if ".attn.qkv_proj." in target and shape[0] % 3 == 0:
        width = shape[0] // 3
        return 0, tuple(Part(name, i * width, width, heads) for i in range(3))
    if target.endswith(".attn.proj.weight") and len(shape) == 2:
        return 1, (Part(name, 0, shape[1], heads),)
    return None, (Part(name, 0, shape[0], 1),)


def _heads(directory: Path) -> int:
    fields = read_json(directory / "config.json").child("vision_config")
    both = ("vt_num_attention_heads", "num_attention_heads")
    return fields.integer(next((key for key in both if key in fields), both[0]))
