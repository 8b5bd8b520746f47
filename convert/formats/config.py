"""Owns the config.json that goes with the view, where the source's would be wrong."""

import copy
import json
from pathlib import Path

from ddtree_jax.hf_config.fields import Json, config_path, read_json
from ddtree_jax.hf_config.quantisation import quantised_places
from ddtree_jax.quant import GROUP_SIZE

# Everything but the routed experts. Moonshot's list, and the image path under the
# prefixes that re-saved files have.
_IGNORE = [
    "re:.*lm_head.*",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    "re:.*vision_tower.*",
    "re:.*mm_projector.*",
    "re:.*multi_modal_projector.*",
]
_QUANTISATION: dict[str, Json] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None,
                "block_structure": None,
                "dynamic": False,
                "group_size": GROUP_SIZE,
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
    "ignore": list[Json](_IGNORE),
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def int4_config_json(path: Path) -> bytes:
    """Returns config.json with a quantization_config that tells of INT4 experts only.

    It replaces the one that is there, where that stands; else it goes to the text
    model's part. All else is kept.

    Args:
      path: The file, or the directory that holds it.
    """
    top = read_json(config_path(path))
    places = quantised_places(top)
    if not places:
        nested = isinstance(top.get("text_config"), dict)
        places = [top.child("text_config") if nested else top]
    for place in places:
        place.values["quantization_config"] = copy.deepcopy(_QUANTISATION)
    text = json.dumps(top.values, indent=2, ensure_ascii=False)
    return f"{text}\n".encode()
