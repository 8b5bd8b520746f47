"""Owns the reading of quantization_config: what the weights are said to be.

Which weights are quantised is decided by the tensors, never by this file: two ignore
lists are in the wild, and readers disagree on how names match them. Here every key
that would change what a stored number means is honoured or refused by name.

The engine does not ask: it loads canonical checkpoints only, whose manifest states
the dtype and shape of every array, while their config.json is still the source's.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ddtree_jax.errors import UnsupportedFormatError
from ddtree_jax.hf_config.fields import Fields, Json, config_path, read_json, same

type Scheme = Literal["INT4 pack-quantized", "FP8 in blocks", "GPTQ INT4"]
type Allowed = Mapping[str, tuple[Json, ...]]

INT4: Scheme = "INT4 pack-quantized"
FP8: Scheme = "FP8 in blocks"
GPTQ: Scheme = "GPTQ INT4"


@dataclasses.dataclass(frozen=True)
class Quantisation:
    """What a config.json says of its weights.

    Attributes:
      schemes: Empty without a quantization_config; several for mixed precision.
      gptq_zero: What GPTQ's qzeros hold for the zero point 8: 8, or 7 in the older
        convention; None when the file does not say which.
    """

    schemes: tuple[Scheme, ...] = ()
    gptq_zero: int | None = None


# Group size and block have one owner each where arrays are; this file knows none.
_INT4_WEIGHTS: Allowed = {
    "num_bits": (4,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("group",),
    "group_size": (32,),
    "dynamic": (False,),
    "actorder": (None,),
    "block_structure": (None,),
    "zp_dtype": (None,),
    "scale_dtype": (None, "bfloat16"),
}
_FP8_WEIGHTS: Allowed = {
    "num_bits": (8,),
    "type": ("float",),
    "symmetric": (True,),
    "strategy": ("block",),
    "block_structure": ([128, 128],),
    "group_size": (None,),
    "dynamic": (False,),
    "actorder": (None,),
    "zp_dtype": (None,),
    "scale_dtype": (None, "bfloat16", "float32"),
}
_WEIGHTS_UNUSED = ("observer", "observer_kwargs")
# A group's format → scheme, its weights, and the keys that they must state.
_FORMATS: dict[str, tuple[Scheme, Allowed, tuple[str, ...]]] = {
    "pack-quantized": (
        INT4,
        _INT4_WEIGHTS,
        ("num_bits", "type", "symmetric", "strategy", "group_size"),
    ),
    "float-quantized": (
        FP8,
        _FP8_WEIGHTS,
        ("num_bits", "type", "symmetric", "strategy", "block_structure"),
    ),
}
_MIXED = "mixed-precision"
_OUTER: Allowed = {
    "quant_method": ("compressed-tensors",),
    "format": (*_FORMATS, _MIXED),
    "quantization_status": ("compressed",),
    "kv_cache_scheme": (None,),
    "sparsity_config": (None, {}),
    "moe_sparsity_config": (None, {}),
    "transform_config": (None, {}),
}
_OUTER_UNUSED = ("config_groups", "ignore", "version", "global_compression_ratio")
# How activations are rounded on the way into an FP8 product. This engine computes in
# bfloat16 and rounds none; scales that were stored for them would be left over.
_FP8_ACTIVATIONS: Allowed = {"dynamic": (True, "local")}

_DEEPSEEK_FP8: Allowed = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3",),
    "weight_block_size": ([128, 128],),
    "activation_scheme": ("dynamic",),
    "scale_fmt": (None,),
    "is_checkpoint_fp8_serialized": (True,),
}
_DEEPSEEK_UNUSED = ("ignored_layers", "modules_to_not_convert")
_GPTQ: Allowed = {
    "quant_method": ("gptq",),
    "bits": (4,),
    "group_size": (32,),
    "sym": (True,),
    "desc_act": (False,),
    "checkpoint_format": (None, "gptq", "gptq_v2"),
    "pack_dtype": (None, "int32"),
    "lm_head": (False,),
}
_GPTQ_NEEDED = ("bits", "group_size", "sym", "desc_act")
# How it was made; which modules are quantised ("dynamic") the tensors say.
_GPTQ_UNUSED = (
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential"),
    *("model_name_or_path", "model_file_base_name", "dataset", "tokenizer", "meta"),
    *("dynamic", "modules_in_block_to_quantize", "quantizer", "format", "is_marlin"),
)
_STORED_ZERO = {"gptq": 7, "gptq_v2": 8}


def read_quantisation(path: Path) -> Quantisation:
    """Returns what config.json says of the weights, after refusing what is not read.

    Args:
      path: A config.json, or the directory that holds it.

    Raises:
      UnsupportedFormatError: The format, or a key of it; both are named.
      ConfigError: The file cannot be read, or says two things.
    """
    top = read_json(config_path(path))
    found = [place.child("quantization_config") for place in quantised_places(top)]
    if len(found) == 2 and not same(found[0].values, found[1].values):
        raise top.error("quantization_config differs here and in text_config")
    return _read(found[0]) if found else Quantisation()


def quantised_places(top: Fields) -> list[Fields]:
    """Returns the objects of a config.json that hold a quantization_config."""
    places = [top]
    if isinstance(top.get("text_config"), dict):
        places.append(top.child("text_config"))
    return [place for place in places if place.get("quantization_config") is not None]


def _read(config: Fields) -> Quantisation:
    match config.get("quant_method"):
        case "compressed-tensors":
            return _read_compressed_tensors(config)
        case "fp8":
            _need(config, ("weight_block_size",), _DEEPSEEK_FP8)
            _expect(config, _DEEPSEEK_FP8, unused=_DEEPSEEK_UNUSED)
            return Quantisation((FP8,))
        case "gptq":
            _need(config, _GPTQ_NEEDED, _GPTQ)
            _expect(config, _GPTQ, unused=_GPTQ_UNUSED)
            stored = config.get("checkpoint_format")
            return Quantisation((GPTQ,), _STORED_ZERO.get(str(stored)))
    raise _unknown_format(config, config.get("format"))


def _read_compressed_tensors(config: Fields) -> Quantisation:
    outer = config.get("format")
    if outer not in _OUTER["format"]:
        raise _unknown_format(config, outer)
    _expect(config, _OUTER, unused=_OUTER_UNUSED)
    groups = config.child("config_groups")
    if not groups.values:
        raise _refusal(groups, "no group", "at least one group")
    schemes = {_read_group(groups.child(name), outer) for name in groups.values}
    return Quantisation(tuple(s for s in (FP8, INT4) if s in schemes))


def _read_group(group: Fields, outer: Json) -> Scheme:
    form = group.get("format") or outer
    if form not in _FORMATS:
        raise _unknown_format(group, form)
    scheme, allowed, needed = _FORMATS[str(form)]
    inputs = group.get("input_activations")
    if scheme == FP8 and isinstance(inputs, dict):
        activations = group.child("input_activations")
        _need(activations, ("dynamic",), _FP8_ACTIVATIONS)
        _expect(activations, _FP8_ACTIVATIONS, unused=tuple(inputs))
    elif inputs is not None:
        raise _refusal(group, f"input_activations {inputs!r}", "None")
    _expect(
        group,
        {"output_activations": (None,)},
        unused=("targets", "weights", "format", "input_activations"),
    )
    weights = group.child("weights")
    _need(weights, needed, allowed)
    _expect(weights, allowed, unused=_WEIGHTS_UNUSED)
    return scheme


def _need(fields: Fields, keys: tuple[str, ...], allowed: Allowed) -> None:
    for key in keys:
        if key not in fields:
            raise _refusal(fields, f"{key} missing", repr(allowed[key][0]))


def _expect(fields: Fields, allowed: Allowed, *, unused: tuple[str, ...]) -> None:
    for key, value in fields.values.items():
        if key in allowed:
            if not any(same(value, a) for a in allowed[key]):
                raise _refusal(fields, f"{key} {value!r}", repr(allowed[key][0]))
        elif key not in unused:
            raise _refusal(fields, f"unknown key {key!r}", "the format's own keys")


def _refusal(fields: Fields, got: str, expected: str) -> UnsupportedFormatError:
    kind = _NAMES.get(str(fields.get("quant_method")), "")
    return UnsupportedFormatError(
        f"{fields.name}: unsupported quantisation format {kind}{' ' if kind else ''}"
        f"({got}); expected {expected}"
    )


_NAMES = {
    "fp8": "FP8 (quant_method fp8)",
    "gptq": "GPTQ (quant_method gptq)",
    "awq": "AWQ (quant_method awq)",
    "modelopt": "NVFP4 or FP8 of ModelOpt (quant_method modelopt)",
    "modelopt_fp4": "NVFP4 (quant_method modelopt_fp4)",
    "mxfp4": "MXFP4 (quant_method mxfp4)",
    "quark": "MXFP4 or NVFP4 of Quark (quant_method quark)",
}


def _unknown_format(fields: Fields, form: Json) -> UnsupportedFormatError:
    method = fields.get("quant_method") or "compressed-tensors"
    other = f"{method} {form}" if form else str(method)
    return UnsupportedFormatError(
        f"{fields.name}: unsupported quantisation format "
        f"{_NAMES.get(str(method), other)}; expected compressed-tensors INT4 "
        "(pack-quantized, groups of 32), FP8 in blocks, or GPTQ INT4"
    )
