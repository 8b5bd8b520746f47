"""Owns the recognition of a checkpoint's format from the files of its directory."""

from pathlib import Path

from convert.checkpoint import DRAFT, Checkpoint
from convert.hf_source import open_hf
from convert.ours_source import Seen, is_ours, open_ours
from convert.sglang.source import is_sglang, open_sglang
from ddtree_jax.errors import CheckpointError


def open_checkpoint(
    directory: Path, *, quantise_experts: bool = False, seen: Seen | None = None
) -> Checkpoint:
    """Returns the checkpoint in `directory`, of whatever format it is.

    Args:
      quantise_experts: As in `open_hf`, for a Hugging Face directory.
      seen: As in `open_ours`, for one of our directories.

    Raises:
      DDTreeError: It is nothing known, incomplete, or refused; the message says why.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    if is_ours(directory):
        checkpoint = open_ours(directory, seen=seen)
    elif is_sglang(directory):
        checkpoint = open_sglang(directory)
    else:
        return open_hf(directory, quantise_experts=quantise_experts)
    if quantise_experts:
        raise CheckpointError(
            f"{directory} is {checkpoint.format}, whose experts are INT4; expected no "
            "--quantise-experts"
        )
    return checkpoint


def open_draft(directory: Path, *, seen: Seen | None = None) -> Checkpoint | None:
    """Returns the drafter in `directory`/draft, or None if there is none.

    Args:
      seen: As in `open_checkpoint`.
    """
    inner = directory / DRAFT
    if not (inner / "config.json").exists():
        return None
    return open_checkpoint(inner, seen=seen)
