"""Owns which parameter of SGLang holds which Hugging Face tensors, and its division.

Declarative: a row of a table is a parameter's name, the axis along which ranks divide
it (None: each has it whole), what is never cut in that division, and the tensors whose
rows it holds, one after the other. Shapes come from `ddtree_jax.model.params`.
"""

import dataclasses
from collections.abc import Iterable, Mapping

from convert.rules import draft_rules, source_shape, target_rules
from convert.tensor import DTYPE_NAMES
from ddtree_jax.config import DraftConfig, ModelConfig
from ddtree_jax.model.params import DFlash, KimiK2, named_parameters

# (dtype by safetensors' name, shape)
type Kind = tuple[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Part:
    """Rows (or columns) of one Hugging Face tensor in a parameter.

    Attributes:
      start: First row of the tensor.
      size: Rows; columns, when columns are divided.
      units: Pieces that are never cut, such as heads.
      shared: Whether more ranks than units hold copies, as of key-value heads.
    """

    tensor: str
    start: int
    size: int
    units: int
    shared: bool = False

    def cuts(self, split: int) -> int | None:
        """Returns into how many pieces `split` ranks divide it, or None."""
        if self.units % split == 0:
            return split
        if self.shared and split % self.units == 0:
            return self.units
        return None


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter that a rank holds whole, or divided along one axis.

    Attributes:
      axis: The axis that ranks divide; with 1 there is one part.
      shape: Of the whole, as in the Hugging Face tensors.
    """

    name: str
    axis: int | None
    parts: tuple[Part, ...]
    dtype: str
    shape: tuple[int, ...]

    def shape_of(self, split: int) -> tuple[int, ...] | None:
        """Returns the shape on a rank when it is split so, or None if it cannot be."""
        if split == 1:
            return self.shape
        cuts = [part.cuts(split) for part in self.parts]
        if self.axis is None or None in cuts:
            return None
        sizes = (
            part.size // (n or 1) for part, n in zip(self.parts, cuts, strict=True)
        )
        shape = list(self.shape)
        shape[self.axis] = sum(sizes)
        return tuple(shape)


@dataclasses.dataclass(frozen=True)
class Routed:
    """The routed experts of one layer: w13 (gate, then up) and w2 (down).

    Attributes:
      name: What SGLang's names begin with: "….mlp.experts.".
      view: What the Hugging Face names begin with.
      inner: Width of an expert.
    """

    name: str
    view: str
    experts: int
    hidden: int
    inner: int


type Entry = tuple[str, int | None, tuple[str, ...], tuple[str, ...]]


def _plain(name: str, axis: int | None = None, unit: str = "all") -> Entry:
    return name, axis, (unit,), (name,)


_ATTENTION: tuple[Entry, ...] = (
    _plain("input_layernorm.weight"),
    (
        "self_attn.fused_qkv_a_proj_with_mqa.weight",
        None,
        ("all", "all"),
        ("self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    ),
    _plain("self_attn.q_a_layernorm.weight"),
    _plain("self_attn.q_b_proj.weight", 0, "heads"),
    _plain("self_attn.kv_a_layernorm.weight"),
    _plain("self_attn.kv_b_proj.weight", 0, "heads"),
    _plain("self_attn.o_proj.weight", 1, "heads"),
    _plain("post_attention_layernorm.weight"),
)


def _mlp(name: str) -> tuple[Entry, ...]:
    gate_up = (f"{name}.gate_proj.weight", f"{name}.up_proj.weight")
    return (
        (f"{name}.gate_up_proj.weight", 0, ("any", "any"), gate_up),
        _plain(f"{name}.down_proj.weight", 1, "any"),
    )


_DENSE = (*_ATTENTION, *_mlp("mlp"))
_MOE = (
    *_ATTENTION,
    _plain("mlp.gate.weight"),
    _plain("mlp.gate.e_score_correction_bias"),
    *_mlp("mlp.shared_experts"),
)
_DRAFT: tuple[Entry, ...] = (
    _plain("input_layernorm.weight"),
    (
        "self_attn.qkv_proj.weight",
        0,
        ("heads", "kv_heads", "kv_heads"),
        tuple(f"self_attn.{w}_proj.weight" for w in "qkv"),
    ),
    _plain("self_attn.o_proj.weight", 1, "heads"),
    _plain("self_attn.q_norm.weight"),
    _plain("self_attn.k_norm.weight"),
    _plain("post_attention_layernorm.weight"),
    *_mlp("mlp"),
)

# A forward pass makes this the name under which the same tensor is saved.
KV_B_ALIAS = ("self_attn.attn_mha.kv_b_proj.weight", "self_attn.kv_b_proj.weight")


def target_parameters(
    config: ModelConfig, view: Iterable[str]
) -> list[Parameter | Routed]:
    """Returns the parameters of a target's text model, layer by layer.

    Args:
      view: Names of the Hugging Face view: at least embedding and head.
    """
    rules = target_rules(config, view)
    pattern = {rule.path: rule.pattern for rule in rules}
    root = pattern["embed"].removesuffix("embed_tokens.weight")
    # SGLang keeps K2's names and puts every form of K2.5 under one prefix.
    outer = "" if root == "model." else "language_model."
    kinds = _kinds(rules, KimiK2(config), config.qk_nope_head_dim + config.v_head_dim)
    build = _Builder({"heads": config.num_attention_heads}, kinds)
    out: list[Parameter | Routed] = [
        build(f"{outer}model.embed_tokens.weight", 0, ("any",), (pattern["embed"],))
    ]
    for number in range(config.num_hidden_layers):
        dense = number < config.first_k_dense_replace
        name, hf = f"{outer}model.layers.{number}.", f"{root}layers.{number}."
        out += [build.entry(name, hf, entry) for entry in (_DENSE if dense else _MOE)]
        if not dense:
            sizes = (
                config.n_routed_experts,
                config.hidden_size,
                config.moe_intermediate_size,
            )
            out.append(Routed(f"{name}mlp.experts.", f"{hf}mlp.experts.", *sizes))
    out += [
        build(f"{outer}model.norm.weight", None, ("all",), (pattern["norm"],)),
        build(f"{outer}lm_head.weight", 0, ("any",), (pattern["head"],)),
    ]
    return out


def draft_parameters(config: DraftConfig, view: Iterable[str]) -> list[Parameter]:
    """Returns the parameters of a DFlash drafter, layer by layer."""
    rules = draft_rules(view)
    pattern = {rule.path: rule.pattern for rule in rules}
    root = pattern["fc"].removesuffix("fc.weight")
    units = {
        "heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
    }
    build = _Builder(units, _kinds(rules, DFlash(config), 0))
    out = [build.entry("", root, _plain("fc.weight"))]
    for number in range(config.num_hidden_layers):
        name = f"layers.{number}."
        out += [build.entry(name, f"{root}{name}", entry) for entry in _DRAFT]
    out += [
        build.entry("", root, _plain(f"{name}.weight"))
        for name in ("hidden_norm", "norm")
    ]
    return out


def _kinds(rules, model, head_rows: int) -> dict[str, Kind]:
    """Returns dtype and shape of every tensor of the view but the routed experts."""
    arrays = named_parameters(model)
    return {
        name: (
            DTYPE_NAMES[arrays[rule.path].dtype],
            source_shape(rule, tuple(arrays[rule.path].shape), head_rows),
        )
        for rule in rules
        if rule.lead < 2
        for name in rule.names(arrays[rule.path].shape)
    }


class _Builder:
    """Makes parameters from entries.

    Attributes:
      units: How many there are of each named unit.
      kinds: Dtype and shape of each Hugging Face tensor.
    """

    def __init__(self, units: Mapping[str, int], kinds: Mapping[str, Kind]):
        self.units = units
        self.kinds = kinds

    def entry(self, name: str, view: str, entry: Entry) -> Parameter:
        suffix, axis, units, tensors = entry
        return self(name + suffix, axis, units, tuple(view + t for t in tensors))

    def __call__(
        self,
        name: str,
        axis: int | None,
        units: tuple[str, ...],
        tensors: tuple[str, ...],
    ) -> Parameter:
        parts = []
        for unit, tensor in zip(units, tensors, strict=True):
            _, shape = self.kinds[tensor]
            size = shape[axis or 0]
            count = {"any": size, "all": 1}.get(unit) or self.units[unit]
            parts.append(Part(tensor, 0, size, count, unit == "kv_heads"))
        dtype, shape = self.kinds[tensors[0]]
        if len(parts) > 1:
            shape = (sum(part.size for part in parts), *shape[1:])
        return Parameter(name, axis, tuple(parts), dtype, shape)
