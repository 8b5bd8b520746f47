"""Makes bundled.npz and bundled.json: what transformers writes with tiny/model."""

import copy
import json
from pathlib import Path

import numpy as np
import torch
from transformers.utils.chat_template_utils import render_jinja_template

from .checkpoint_files import write_json
from .compare import FLOAT32_NOISE, distance
from .decode import greedy
from .encoding import load_encoding
from .load import load_text_target
from .margins import check
from .probes import trace

MODEL = Path("tiny/model")  # scripts/oracles starts at the repository root
TOKENS = 48
# Tried until every margin held.
TEXTS = (
    "def fibonacci(n):\n",
    "class Stack:\n    def __init__(self):\n",
    "import json\n\n\ndef load(path):\n",
    "def read_lines(path):\n"
    '    """Return the lines of a text file, without their ends.\n\n',
    'class Cache:\n    """Maps keys to values and forgets the oldest.\n',
)
QUESTION = "Return the largest of three numbers."


def _prompts() -> list[str]:
    """The texts, and one turn of a chat as the model's template renders it."""
    [chat], _ = render_jinja_template(
        [[{"role": "user", "content": QUESTION}]],
        chat_template=(MODEL / "chat_template.jinja").read_text(),
        add_generation_prompt=True,
        thinking=False,
    )
    return [*TEXTS, chat]


def _check_float64(exact: torch.nn.Module, what: str, ids, tokens, margins) -> None:
    """One pass in float64 must choose the same tokens, as clearly."""
    logits = trace(exact, ids + tokens[:-1]).logits[len(ids) - 1 :]
    best = logits.topk(2)
    check(best.indices[:, 0].tolist() == tokens, f"{what}: float64 chooses others")
    error = distance(margins, best.values[:, 0] - best.values[:, 1])
    check(
        error < FLOAT32_NOISE,
        f"{what}: float64's margins differ by {error:.1e} of the largest, "
        f"want < {FLOAT32_NOISE}",
    )


def build(directory: Path) -> None:
    """Writes both files into `directory`."""
    model, encoding = load_text_target(MODEL), load_encoding(MODEL)
    exact = copy.deepcopy(model).double()
    generation = json.loads((MODEL / "generation_config.json").read_text())
    stops = (model.config.eos_token_id, generation["eos_token_id"])
    arrays, entries = {}, []
    for number, prompt in enumerate(_prompts()):
        what = f"bundled prompt {number}"
        ids = encoding.encode(prompt, allowed_special="all")
        tokens, margins = greedy(model, what, ids, TOKENS, stop_tokens=stops)
        _check_float64(exact, what, ids, tokens, margins)
        arrays[f"prompt_{number}"] = np.array(ids, np.int32)
        arrays[f"tokens_{number}"] = np.array(tokens, np.int32)
        arrays[f"margins_{number}"] = np.array(margins, np.float32)
        shown = [token for token in tokens if not encoding.is_special_token(token)]
        entries.append({"prompt": prompt, "text": encoding.decode(shown)})
    np.savez_compressed(directory / "bundled.npz", **arrays)
    write_json(directory / "bundled.json", entries)
