"""Owns the reading of quantization_config: INT4 pack-quantized, or refused by name."""

from collections.abc import Mapping
from pathlib import Path

from ddtree_jax.errors import UnsupportedFormatError
from ddtree_jax.hf_config.fields import Fields, Json, config_path, read_json, same

_FORMAT = "pack-quantized"
# Of `weights`; group_size has one owner in quant.py, and this file knows no arrays.
_WEIGHTS: dict[str, tuple[Json, ...]] = {
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
_WEIGHTS_UNUSED = ("observer", "observer_kwargs")
_WEIGHTS_NEEDED = ("num_bits", "type", "symmetric", "strategy", "group_size")
_OUTER: dict[str, tuple[Json, ...]] = {
    "quant_method": ("compressed-tensors",),
    "format": (_FORMAT,),
    "quantization_status": ("compressed",),
    "kv_cache_scheme": (None,),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
}
# The presence of X.weight_packed decides what is quantised, not the ignore list:
# two lists are in the wild, and other readers disagree on how names match them.
_OUTER_UNUSED = ("config_groups", "ignore", "version", "global_compression_ratio")


def check_quantisation(path: Path) -> None:
    """Raises UnsupportedFormatError unless the weights are INT4 as this engine reads.

    A file without quantization_config passes: the tensors decide.

    Args:
      path: A config.json, or the directory that holds it.
    """
    top = read_json(config_path(path))
    places = [top]
    if isinstance(top.get("text_config"), dict):
        places.append(top.child("text_config"))
    places = [p for p in places if p.get("quantization_config") is not None]
    found = [p.child("quantization_config") for p in places]
    if len(found) == 2 and not same(found[0].values, found[1].values):
        raise top.error("quantization_config differs here and in text_config")
    if found:
        _check(found[0])


def _check(config: Fields) -> None:
    method, form = config.get("quant_method"), config.get("format")
    if method != "compressed-tensors" or form != _FORMAT:
        raise UnsupportedFormatError(
            f"{config.name}: unsupported quantisation format {_name(method, form)}; "
            f"expected compressed-tensors {_FORMAT} INT4 in groups of 32"
        )
    _expect(config, _OUTER, unused=_OUTER_UNUSED)
    groups = config.child("config_groups")
    if len(groups.values) != 1:
        raise _refusal(groups, f"{len(groups.values)} groups", "one group")
    group = groups.child(next(iter(groups.values)))
    outer = {"input_activations": (None,), "output_activations": (None,)}
    _expect(group, outer | {"format": (None, _FORMAT)}, unused=("targets", "weights"))
    weights = group.child("weights")
    for key in _WEIGHTS_NEEDED:
        if key not in weights:
            raise _refusal(weights, f"{key} missing", repr(_WEIGHTS[key][0]))
    _expect(weights, _WEIGHTS, unused=_WEIGHTS_UNUSED)


def _expect(
    fields: Fields, allowed: Mapping[str, tuple[Json, ...]], *, unused: tuple[str, ...]
) -> None:
    for key, value in fields.values.items():
        if key in allowed:
            if not any(same(value, a) for a in allowed[key]):
                raise _refusal(fields, f"{key} {value!r}", repr(allowed[key][0]))
        elif key not in unused:
            raise _refusal(fields, f"unknown key {key}", "keys of pack-quantized INT4")


def _refusal(fields: Fields, got: str, expected: str) -> UnsupportedFormatError:
    return UnsupportedFormatError(
        f"{fields.name}: unsupported quantisation format ({got}); expected {expected}"
    )


def _name(method: Json, form: Json) -> str:
    known = {
        "fp8": "FP8 (quant_method fp8)",
        "gptq": "GPTQ (quant_method gptq)",
        "awq": "AWQ (quant_method awq)",
        "modelopt": "NVFP4 or FP8 of ModelOpt (quant_method modelopt)",
        "modelopt_fp4": "NVFP4 (quant_method modelopt_fp4)",
        "mxfp4": "MXFP4 (quant_method mxfp4)",
        "quark": "MXFP4 or NVFP4 of Quark (quant_method quark)",
    }
    return known.get(str(method), f"{method} {form}" if form else str(method))
