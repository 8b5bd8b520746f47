"""Owns the small models' vocabularies: byte pairs, then 256 special tokens.

The special tokens have Kimi's names at Kimi's distances from the first of them. The
random model's vocabulary is the 256 bytes alone.
"""

import base64
import json
import shutil
from pathlib import Path

NUM_BYTES = 256
NUM_SPECIAL = 256

# As `ddtree_jax.engine.tokenizer` has it. It is written here too, so that training
# needs none of the engine's dependencies.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

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


def special_token_id(name: str, *, ranks: int = NUM_BYTES) -> int:
    """Returns the id of a special token above a vocabulary of `ranks` tokens."""
    return ranks + SPECIAL_OFFSETS[name]


def write_tokenizer(directory: Path) -> None:
    """Writes the files of a tokenizer whose tokens are the 256 bytes."""
    write_ranks(directory / "tiktoken.model", [bytes([b]) for b in range(NUM_BYTES)])
    write_tokenizer_config(directory, ranks=NUM_BYTES)


def write_ranks(path: Path, tokens: list[bytes]) -> None:
    """Writes tokens in the order of their ranks, in tiktoken's form."""
    lines = (
        f"{base64.b64encode(token).decode()} {rank}\n"
        for rank, token in enumerate(tokens)
    )
    path.write_text("".join(lines))


def read_ranks(path: Path) -> list[bytes]:
    """Returns the tokens of a file that `write_ranks` wrote."""
    return [
        base64.b64decode(line.split()[0]) for line in path.read_bytes().splitlines()
    ]


def write_tokenizer_config(directory: Path, *, ranks: int) -> None:
    """Writes tokenizer_config.json and chat_template.jinja."""
    config = json.dumps(_tokenizer_config(ranks), indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(config)
    template = Path(__file__).with_name("chat_template.jinja")
    shutil.copyfile(template, directory / template.name)


def _tokenizer_config(ranks: int) -> dict[str, object]:
    return {
        "added_tokens_decoder": {
            str(special_token_id(name, ranks=ranks)): {
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
