"""Makes dflash.npz from PyPI dflash on tiny_draft. README.md defines positions."""

import copy
from pathlib import Path

import numpy as np
import torch
from dflash.model import DFlashDraftModel, _crop_to, _make_cache

from .compare import FLOAT32_NOISE, distance
from .draw import Draw
from .load import load_draft, load_target
from .make_tiny_draft import BLOCK_SIZE, HIDDEN, MASK, TARGET_LAYER_IDS

# Tokens that the target has finished when each round begins; the features of
# positions starts[r - 1] .. starts[r] - 1 are new in round r.
STARTS = (11, 14)


class _Drafter:
    """The drafter with the target's embedding and head, and a growing cache."""

    def __init__(self, draft: DFlashDraftModel, target: torch.nn.Module):
        self._draft, self._head = draft, target.lm_head
        self._embed = target.get_input_embeddings()
        self.cache = _make_cache(draft.config)

    @torch.no_grad()
    def round(self, features: torch.Tensor, block: torch.Tensor, start: int):
        """Returns logits [block - 1, vocab]; absorbs the features [n, F · hidden].

        The features are those of positions start - n .. start - 1, and the
        block's first token stands at position `start`.
        """
        positions = torch.arange(start - len(features), start + len(block))
        hidden = self._draft(
            target_hidden=features[None],
            noise_embedding=self._embed(block[None]),
            position_ids=positions[None],
            past_key_values=self.cache,
            use_cache=True,
        )
        _crop_to(self.cache, start)
        return self._draft.compute_logits(hidden[:, 1:], self._head)[0]


def _rounds(draft, target, features, blocks) -> tuple[torch.Tensor, _Drafter]:
    drafter, logits, absorbed = _Drafter(draft, target), [], 0
    for block, start in zip(blocks, STARTS, strict=True):
        logits.append(drafter.round(features[absorbed:start], block, start))
        absorbed = start
    return torch.stack(logits), drafter


def _check_noise(name: str, draft, target, features, blocks, logits) -> None:
    """The cache must change nothing, and float32 must be precise enough."""
    at_once = _Drafter(draft, target).round(features, blocks[-1], STARTS[-1])
    exact, _ = _rounds(
        copy.deepcopy(draft).double(),
        copy.deepcopy(target).double(),
        features.double(),
        blocks,
    )
    for other, error in (
        ("absorbing all at once", distance(at_once, logits[-1])),
        ("float64", distance(logits, exact)),
    ):
        if error > FLOAT32_NOISE:
            raise SystemExit(
                f"golden_dflash: {name}: {other} differs by {error:.1e} of its size, "
                f"want < {FLOAT32_NOISE}"
            )


def build(directory: Path, target_path: Path, draft_path: Path) -> None:
    """Writes dflash.npz into `directory`."""
    draw, target = Draw("golden_dflash"), load_target(target_path)
    shape = (STARTS[-1], len(TARGET_LAYER_IDS) * HIDDEN)
    # Of about the size that the tiny target's residual stream has.
    features = draw.float32("features", shape, std=2.0)
    blocks = torch.full((len(STARTS), BLOCK_SIZE), MASK)
    blocks[:, 0] = torch.from_numpy(draw.integers("roots", len(STARTS), below=MASK))
    arrays = {
        "features": features.numpy(),
        "block_ids": blocks.numpy().astype(np.int32),
        "starts": np.array(STARTS, np.int32),
    }
    for name, drop_mscale in (("plain", False), ("scaled", True)):
        draft = load_draft(draft_path, drop_mscale=drop_mscale)
        logits, drafter = _rounds(draft, target, features, blocks)
        _check_noise(name, draft, target, features, blocks, logits)
        with torch.no_grad():
            context = draft.hidden_norm(draft.fc(features))
        layers = drafter.cache.layers
        arrays |= {
            f"{name}_amplitude": np.float64(draft.rotary_emb.attention_scaling),
            f"{name}_logits": logits.numpy(),
            f"{name}_keys": torch.stack([x.keys[0] for x in layers]).numpy(),
            f"{name}_values": torch.stack([x.values[0] for x in layers]).numpy(),
        }
    arrays["context"] = context.numpy()
    np.savez_compressed(directory / "dflash.npz", **arrays)
