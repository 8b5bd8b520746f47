"""Owns the names: which source tensors make which canonical array, and how.

Declarative: a rule is a canonical path, the pattern of its sources' names and
how a source's shape follows from the canonical one. Shapes, dtypes and axes
come from `ddtree_jax.model.params` and stand nowhere here.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

from ddtree_jax.config import ModelConfig

type Shape = Literal["same", "rows", "columns", "keys", "values"]


@dataclasses.dataclass(frozen=True)
class Rule:
    """How one canonical array is made.

    Attributes:
      path: The canonical array.
      pattern: Name of the sources after the prefix, with {layer} and {expert}.
      shape: A source has the canonical shape without its leading dimensions:
        as it is ("same"); with its first two axes in one ("rows"); its last two
        ("columns"); or it is "keys" or "values", a part of each head's rows.
      first_layer: The source layer of index 0.
    """

    path: str
    pattern: str
    shape: Shape = "same"
    first_layer: int = 0

    @property
    def lead(self) -> int:
        """Number of leading canonical dimensions that number the sources."""
        return self.pattern.count("{")

    def names(self, shape: Sequence[int]) -> list[str]:
        """Returns the sources' names, in the order of the leading dimensions."""
        layers = range(shape[0]) if self.lead > 0 else (0,)
        experts = range(shape[1]) if self.lead > 1 else (0,)
        return [
            self.pattern.format(layer=layer + self.first_layer, expert=expert)
            for layer in layers
            for expert in experts
        ]

    def summary(self, shape: Sequence[int]) -> str:
        """Returns the sources' names in one: layers.{1..60}.mlp.experts.{0..383}.…"""
        ranges = {"layer": "", "expert": ""}
        if self.lead > 0:
            last = self.first_layer + shape[0] - 1
            ranges["layer"] = f"{{{self.first_layer}..{last}}}"
        if self.lead > 1:
            ranges["expert"] = f"{{0..{shape[1] - 1}}}"
        return self.pattern.format(**ranges)


_LAYER: tuple[tuple[str, str, Shape], ...] = (
    ("attention/input_norm", "input_layernorm.weight", "same"),
    ("attention/q_a", "self_attn.q_a_proj.weight", "same"),
    ("attention/q_a_norm", "self_attn.q_a_layernorm.weight", "same"),
    ("attention/q_b", "self_attn.q_b_proj.weight", "rows"),
    ("attention/kv_a", "self_attn.kv_a_proj_with_mqa.weight", "same"),
    ("attention/kv_a_norm", "self_attn.kv_a_layernorm.weight", "same"),
    ("attention/k_up", "self_attn.kv_b_proj.weight", "keys"),
    ("attention/v_up", "self_attn.kv_b_proj.weight", "values"),
    ("attention/o", "self_attn.o_proj.weight", "columns"),
    ("post_norm", "post_attention_layernorm.weight", "same"),
)
_DENSE: tuple[tuple[str, str, Shape], ...] = (
    ("mlp/gate", "mlp.gate_proj.weight", "same"),
    ("mlp/up", "mlp.up_proj.weight", "same"),
    ("mlp/down", "mlp.down_proj.weight", "same"),
)
_MOE: tuple[tuple[str, str, Shape], ...] = (
    ("router", "mlp.gate.weight", "same"),
    ("router_bias", "mlp.gate.e_score_correction_bias", "same"),
    ("shared/gate", "mlp.shared_experts.gate_proj.weight", "same"),
    ("shared/up", "mlp.shared_experts.up_proj.weight", "same"),
    ("shared/down", "mlp.shared_experts.down_proj.weight", "same"),
    *(
        (f"experts/{w}/{part}", f"mlp.experts.{{expert}}.{w}_proj.{name}", "same")
        for w in ("gate", "up", "down")
        for part, name in (("packed", "weight_packed"), ("scale", "weight_scale"))
    ),
)
_DRAFT_LAYER: tuple[tuple[str, str, Shape], ...] = (
    ("input_norm", "input_layernorm.weight", "same"),
    ("q", "self_attn.q_proj.weight", "rows"),
    ("k", "self_attn.k_proj.weight", "rows"),
    ("v", "self_attn.v_proj.weight", "rows"),
    ("o", "self_attn.o_proj.weight", "columns"),
    ("q_norm", "self_attn.q_norm.weight", "same"),
    ("k_norm", "self_attn.k_norm.weight", "same"),
    ("post_norm", "post_attention_layernorm.weight", "same"),
    *_DENSE,
)

# Prefix of the text model → names under which its head is known.
_TARGET_PREFIXES = {
    "model.": ("lm_head.weight",),
    "language_model.model.": ("language_model.lm_head.weight",),
    "model.language_model.": ("lm_head.weight", "model.lm_head.weight"),
    "language_model.": ("language_model.lm_head.weight", "lm_head.weight"),
}
_PUBLISHED_PREFIX = "language_model.model."
_PUBLISHED_HEAD = "language_model.lm_head.weight"
_DRAFT_PREFIXES = ("", "model.")
_NUMBER = re.compile(r"(\d+)")
_EXTRA = re.compile(r"(model\.)?(vision_tower|mm_projector|multi_modal_projector)\..*")


def target_rules(config: ModelConfig, names: Iterable[str]) -> list[Rule]:
    """Returns the rules of a target, with the prefix that `names` have."""
    prefix, head = target_prefix(set(names))
    dense = config.first_k_dense_replace
    return [
        Rule("embed", f"{prefix}embed_tokens.weight"),
        Rule("norm", f"{prefix}norm.weight"),
        Rule("head", head),
        *_layer_rules("dense", f"{prefix}layers", (*_LAYER, *_DENSE), 0),
        *_layer_rules("moe", f"{prefix}layers", (*_LAYER, *_MOE), dense),
    ]


def draft_rules(names: Iterable[str]) -> list[Rule]:
    """Returns the rules of a DFlash drafter, with the prefix that `names` have."""
    prefix = draft_prefix(set(names))
    return [
        Rule("fc", f"{prefix}fc.weight", "columns"),
        Rule("hidden_norm", f"{prefix}hidden_norm.weight"),
        Rule("norm", f"{prefix}norm.weight"),
        *_layer_rules("layers", f"{prefix}layers", _DRAFT_LAYER, 0),
    ]


def published_names(names: Collection[str], *, is_target: bool) -> dict[str, str]:
    """Returns, for each name of a view, the one in the published checkpoint.

    They differ in the prefix of the text model and of the image path only. Names of
    no known form stand for themselves.
    """
    if not is_target:
        prefix = draft_prefix(names)
        return {name: name.removeprefix(prefix) for name in names}
    prefix, head = target_prefix(names)
    published = {}
    for name in names:
        if name == head:
            published[name] = _PUBLISHED_HEAD
        elif is_extra(name):
            published[name] = name.removeprefix("model.")
        elif name.startswith(prefix):
            published[name] = _PUBLISHED_PREFIX + name.removeprefix(prefix)
        else:
            published[name] = name
    return published


def target_prefix(names: Collection[str]) -> tuple[str, str]:
    """Returns the prefix of a text model with these tensors, and its head's name."""
    prefix = next(
        (p for p in _TARGET_PREFIXES if f"{p}embed_tokens.weight" in names), "model."
    )
    heads = _TARGET_PREFIXES[prefix]
    return prefix, next((name for name in heads if name in names), heads[0])


def draft_prefix(names: Collection[str]) -> str:
    """Returns the prefix of a drafter with these tensors."""
    return next((p for p in _DRAFT_PREFIXES if f"{p}fc.weight" in names), "")


def reading_order(name: str) -> list[tuple[int, str]]:
    """Returns a key that sorts names by layer and expert, layer 2 before layer 10."""
    return [
        (int(part), "") if part.isdigit() else (-1, part)
        for part in _NUMBER.split(name)
    ]


def is_extra(name: str) -> bool:
    """Says whether a tensor belongs to the image path, which is carried as it is."""
    return _EXTRA.fullmatch(name) is not None


def source_shape(rule: Rule, shape: tuple[int, ...], head_rows: int) -> tuple[int, ...]:
    """Returns the shape that each source of an array of this `shape` must have.

    Args:
      shape: Canonical, leading dimensions included.
      head_rows: Rows of one head in a source that is split into keys and values.
    """
    rest = shape[rule.lead :]
    match rule.shape:
        case "same":
            return rest
        case "rows":
            return (rest[0] * rest[1], *rest[2:])
        case "columns":
            return (*rest[:-2], rest[-2] * rest[-1])
        case "keys" | "values":
            return (rest[0] * head_rows, *rest[2:])


def _layer_rules(
    root: str, prefix: str, rows: Iterable[tuple[str, str, Shape]], first: int
) -> list[Rule]:
    return [
        Rule(f"{root}/{path}", f"{prefix}.{{layer}}.{name}", shape, first)
        for path, name, shape in rows
    ]
