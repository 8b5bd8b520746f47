"""Owns what a checkpoint is here, whatever its format: the Hugging Face view of it.

    hf_source, sglang, ours_source  →  Checkpoint  →  ours_target, hf_target, sglang

The view is the set of tensors that the INT4 checkpoint of Kimi K2.6, or that of a
DFlash drafter, has on Hugging Face, under those names, shapes and dtypes.
"""

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

from convert.tensor import Tensor
from ddtree_jax.config import DraftConfig, ModelConfig
from ddtree_jax.hf_config import (
    read_draft_config,
    read_model_config,
    read_stop_token_ids,
)
from ddtree_jax.hf_config.fields import read_json

# A checkpoint's drafter, if it has one, is a checkpoint in this directory of it.
DRAFT = "draft"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that is whole as far as its headers say. Nothing is read yet.

    Attributes:
      format: Its name, for people and for the manifest.
      tensors: The view: every tensor by its Hugging Face name.
      files: The files, or the directories, that hold the weights.
      losses: One line for each thing that the view does not carry bit for bit.
      config_json: The view's config.json, where it is not the directory's own.
    """

    directory: Path
    format: str
    config: ModelConfig | DraftConfig
    tensors: Mapping[str, Tensor]
    files: tuple[Path, ...]
    losses: tuple[str, ...] = ()
    config_json: bytes | None = None

    @property
    def is_target(self) -> bool:
        """Whether it is a target, and not a drafter."""
        return isinstance(self.config, ModelConfig)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the view."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def report_losses(source: Checkpoint) -> None:
    """Says on stderr what `source` does not carry bit for bit."""
    for loss in source.losses:
        print(f"{source.directory}: not bit for bit: {loss}", file=sys.stderr)


def read_config(directory: Path) -> ModelConfig | DraftConfig:
    """Returns the configuration in `directory`, as what it is; not its quantisation.

    Raises:
      ConfigError: config.json is missing or unsupported.
    """
    raw = read_json(directory / "config.json")
    if raw.get("architectures") == ["DFlashDraftModel"]:
        return read_draft_config(directory)
    read_stop_token_ids(directory)
    return read_model_config(directory)
