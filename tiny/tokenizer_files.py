"""Owns the small models' vocabulary: 256 bytes, then 256 special tokens.

The special tokens have Kimi's names at Kimi's distances from the first of them.
"""

import base64
import json
import shutil
from pathlib import Path

NUM_BYTES = 256

# Distance from the first special token. What has no name here is reserved.
SPECIAL_OFFSETS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|im_end|>": 2,
    "<|im_user|>": 3,
    "<|im_assistant|>": 4,
    "<|start_header_id|>": 6,
    "<|end_header_id|>": 7,
    "[EOT]": 9,
    "<|im_system|>": 10,
    "<|tool_calls_section_begin|>": 11,
    "<|tool_calls_section_end|>": 12,
    "<|tool_call_begin|>": 13,
    "<|tool_call_argument_begin|>": 14,
    "<|tool_call_end|>": 15,
    "<|im_middle|>": 17,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
    "<think>": 22,
    "</think>": 23,
    "[UNK]": 254,
    "[PAD]": 255,
}


def special_token_id(name: str) -> int:
    """Returns the id of a special token."""
    return NUM_BYTES + SPECIAL_OFFSETS[name]


def write_tokenizer(directory: Path) -> None:
    """Writes tiktoken.model, tokenizer_config.json and chat_template.jinja."""
    lines = (
        f"{base64.b64encode(bytes([byte])).decode()} {byte}\n"
        for byte in range(NUM_BYTES)
    )
    (directory / "tiktoken.model").write_text("".join(lines))
    config = json.dumps(_tokenizer_config(), indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(config)
    template = Path(__file__).with_name("chat_template.jinja")
    shutil.copyfile(template, directory / template.name)


def _tokenizer_config() -> dict[str, object]:
    return {
        "added_tokens_decoder": {
            str(special_token_id(name)): {
                "content": name,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for name in SPECIAL_OFFSETS
        },
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
        "tokenizer_class": "TikTokenTokenizer",
    }
