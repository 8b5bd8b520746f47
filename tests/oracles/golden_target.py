"""Makes target_forward.npz from transformers' kimi_k25."""

import copy
from pathlib import Path

import numpy as np
import torch

from .compare import FLOAT32_NOISE, distance
from .draw import Draw
from .load import load_target
from .make_tiny_draft import MASK
from .margins import check, check_experts
from .probes import trace, trace_stepwise

PROMPT_LENGTHS = (37, 90)


def _prompts(draw: Draw, lengths: tuple[int, ...]) -> list[list[int]]:
    """Ordinary tokens only: the mask and what follows it are special."""
    return [draw.integers(f"prompt/{n}", (n,), below=MASK).tolist() for n in lengths]


def _forward(model: torch.nn.Module, prompts: list[list[int]]) -> dict:
    arrays = {}
    for number, ids in enumerate(prompts):
        t = trace(model, ids)
        check_experts(f"prompt {number}", t)
        exact = trace(copy.deepcopy(model).double(), ids)
        for name, other, ours in (
            ("logits, token by token", trace_stepwise(model, ids), t.logits),
            ("logits in float64", exact.logits, t.logits),
            ("hidden states in float64", exact.hidden_states, t.hidden_states),
        ):
            error = distance(ours, other)
            check(
                error < FLOAT32_NOISE,
                f"prompt {number}: {name} differ by {error:.1e} of their size, "
                f"want < {FLOAT32_NOISE}",
            )
        arrays[f"ids_{number}"] = np.array(ids, np.int32)
        arrays[f"logits_{number}"] = t.logits.numpy()
        if number:
            continue
        share = t.bias_changed_choice.float().mean(-1)
        check(bool((share > 0.1).all()), f"the bias changes too little: {share}")
        arrays["hidden_states_0"] = t.hidden_states.numpy()
        arrays["final_norm_0"] = t.final_norm.numpy()
        arrays["experts_0"] = t.experts.numpy().astype(np.int32)
        arrays["expert_weights_0"] = t.expert_weights.numpy()
        arrays["router_margin_0"] = t.router_margin.numpy()
        arrays["bias_changed_choice_0"] = t.bias_changed_choice.numpy()
    return arrays


def build(directory: Path, target: Path) -> None:
    """Writes target_forward.npz into `directory` for the checkpoint `target`."""
    draw, model = Draw("golden_target"), load_target(target)
    forward = _forward(model, _prompts(draw, PROMPT_LENGTHS))
    np.savez_compressed(directory / "target_forward.npz", **forward)
