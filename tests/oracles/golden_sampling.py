"""Makes sampling.npz: what transformers' logits processors leave allowed."""

from pathlib import Path

import numpy as np
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .draw import Draw
from .load import load_target

VOCAB = 64
ROWS = ("wide", "narrow", "ties", "tied_top", "all_equal", "one_peak")
# temperature, top_k (0: off), top_p (1: off), min_p (0: off)
SETTINGS = (
    (1.0, 0, 1.0, 0.0),
    (0.6, 0, 1.0, 0.0),
    (1.0, 1, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 200, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 0.3, 0.0),
    (1.0, 0, 0.01, 0.0),
    (1.0, 0, 1.0, 0.1),
    (0.7, 0, 1.0, 0.3),
    (0.6, 20, 0.95, 0.0),
    (1.5, 10, 0.8, 0.05),
    (0.3, 8, 0.7, 0.2),
    (2.0, 40, 0.99, 0.02),
)
# A cumulative probability this near to a threshold may fall on either side.
_THRESHOLD_NOISE = 1e-5


def _logits() -> torch.Tensor:
    draw = Draw("golden_sampling")
    rows = {
        "wide": draw.float32("wide", (VOCAB,), std=3.0),
        "narrow": draw.float32("narrow", (VOCAB,), std=0.5),
        "ties": draw.float32("ties", (VOCAB,), std=2.0).mul(2).round().div(2),
        "tied_top": draw.float32("tied_top", (VOCAB,), std=1.0),
        "all_equal": torch.full((VOCAB,), 0.25),
        "one_peak": draw.float32("one_peak", (VOCAB,), std=0.5),
    }
    rows["tied_top"][[3, 17, 40]] = 5.0
    rows["one_peak"][29] = 12.0
    return torch.stack([rows[name] for name in ROWS])


def _processors(temperature: float, top_k: int, top_p: float, min_p: float):
    """Returns what `generate` would apply, in its order: T, top-k, top-p, min-p."""
    chain = LogitsProcessorList()
    if temperature != 1.0:
        chain.append(TemperatureLogitsWarper(temperature))
    if top_k:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        chain.append(TopPLogitsWarper(top_p))
    if min_p:
        chain.append(MinPLogitsWarper(min_p))
    return chain


def _check_order(model: torch.nn.Module) -> None:
    """Fails when `generate` itself would build another chain for a setting."""
    for temperature, top_k, top_p, min_p in SETTINGS:
        config = GenerationConfig(
            do_sample=True,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p or None,
            bos_token_id=0,
            num_beams=1,
        )
        theirs = [type(p) for p in model._get_logits_processor(config)]
        ours = [type(p) for p in _processors(temperature, top_k, top_p, min_p)]
        if theirs != ours:
            raise SystemExit(f"golden_sampling: generate uses {theirs}, we {ours}")


def _tie_split(logits: torch.Tensor, allowed: torch.Tensor) -> bool:
    """Whether a refused token has exactly the logit of an allowed one."""
    return bool(torch.isin(logits[~allowed], logits[allowed]).any())


def _check_threshold(logits, setting) -> None:
    """No untied decision may hang on float32 rounding."""
    temperature, top_k, top_p, min_p = setting
    before = _processors(temperature, top_k, 1.0, 0.0)(None, logits[None].double())[0]
    probs = before.softmax(-1).sort(descending=True)
    distance = [1.0]
    if top_p < 1.0:
        # Only whole runs of equal logits count: within one, order decides.
        last_of_run = torch.cat([probs.values.diff() != 0, torch.tensor([True])])
        distance += (probs.values.cumsum(-1)[last_of_run][:-1] - top_p).abs().tolist()
    if min_p:
        distance += (probs.values / probs.values[0] - min_p).abs().tolist()
    if min(distance) < _THRESHOLD_NOISE:
        raise SystemExit(f"golden_sampling: {setting} is {min(distance)} from a border")


def build(directory: Path, target: Path) -> None:
    """Writes sampling.npz into `directory`; `target` is any model of `generate`."""
    _check_order(load_target(target))
    logits = _logits()
    allowed, probs, split = [], [], []
    for setting in SETTINGS:
        for row in logits:
            _check_threshold(row, setting)
        scores = _processors(*setting)(None, logits.clone())
        kept = scores > -torch.inf
        allowed.append(kept)
        probs.append(scores.softmax(-1))
        split.append([_tie_split(*pair) for pair in zip(logits, kept, strict=True)])
    temperature, top_k, top_p, min_p = zip(*SETTINGS, strict=True)
    np.savez_compressed(
        directory / "sampling.npz",
        logits=logits.numpy(),
        temperature=np.array(temperature, np.float32),
        top_k=np.array(top_k, np.int32),
        top_p=np.array(top_p, np.float32),
        min_p=np.array(min_p, np.float32),
        allowed=torch.stack(allowed).numpy(),
        probs=torch.stack(probs).numpy(),
        tie_split=np.array(split),
    )
