"""Loads the small checkpoints with other people's model code, in float32."""

import json
from pathlib import Path

import torch
from dflash import DFlashDraftModel
from transformers import (
    AutoModelForImageTextToText,
    CompressedTensorsConfig,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen3Config,
)


def _check_complete(path: Path, info: dict) -> None:
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info[kind]:
            raise SystemExit(f"{path}: {kind}: {sorted(info[kind])[:3]} …")


def load_target(path: Path) -> torch.nn.Module:
    """Returns transformers' kimi_k25 with the experts dequantised to bfloat16
    and everything then widened to float32."""
    model, info = AutoModelForImageTextToText.from_pretrained(
        path,
        dtype=torch.float32,
        quantization_config=CompressedTensorsConfig(dequantize=True),
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    _check_complete(path, info)
    # The experts stay bfloat16 whatever dtype asks for.
    return model.float().eval()


def load_text_target(path: Path) -> torch.nn.Module:
    """Returns transformers' deepseek_v3, the text model inside kimi_k25, from a
    checkpoint without a vision tower; numbers as in `load_target`."""
    text = json.loads((path / "config.json").read_text())["text_config"]
    model, info = DeepseekV3ForCausalLM.from_pretrained(
        path,
        config=DeepseekV3Config(**text | {"model_type": "deepseek_v3"}),
        key_mapping={r"^language_model\.": ""},
        dtype=torch.float32,
        quantization_config=CompressedTensorsConfig(dequantize=True),
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    _check_complete(path, info)
    return model.float().eval()


def load_draft(path: Path, *, drop_mscale: bool) -> DFlashDraftModel:
    """Returns PyPI dflash's drafter in float32.

    Args:
      drop_mscale: Without the two mscale keys transformers multiplies cos and
        sin by 0.1 ln(factor) + 1, as SGLang does; with them by 1.0.
    """
    config = Qwen3Config.from_pretrained(path)
    if drop_mscale:
        for key in ("mscale", "mscale_all_dim"):
            del config.rope_parameters[key]
    model, info = DFlashDraftModel.from_pretrained(
        path, config=config, dtype=torch.float32, output_loading_info=True
    )
    _check_complete(path, info)
    return model.float().eval()
