"""Writes a small random checkpoint in Kimi K2.6's on-disk form, and its drafter.

    python -m tiny.random_checkpoint DST [--seed N]

`DST` becomes what a hub serves for K2.6, in small: nested config.json, INT4
experts, sharded safetensors with an index, tokenizer files; `DST/draft` is its
DFlash drafter. There is no vision tower, and no remote code. Equal seeds give
equal bytes. The weights are noise, and so is the text made with them.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from safetensors.numpy import save_file

from tiny.forms import Json, draft_config, generation_config, target_config
from tiny.tensors import Tensors, draft_tensors, target_shards
from tiny.tokenizer_files import write_tokenizer


def write_checkpoint(destination: Path, *, seed: int) -> None:
    """Writes target and drafter to `destination`, which appears when it is whole.

    Raises:
      FileExistsError: `destination` exists.
    """
    if destination.exists():
        raise FileExistsError(f"{destination} exists; expected a new directory")
    destination.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(
        tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent)
    )
    try:
        scratch.chmod(0o755)  # mkdtemp's directory is its owner's only
        _write_target(scratch, seed)
        _write_draft(scratch / "draft", seed)
        os.rename(scratch, destination)
    except BaseException:
        shutil.rmtree(scratch)
        raise


def _write_target(directory: Path, seed: int) -> None:
    config = target_config()
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", generation_config())
    write_tokenizer(directory)
    shards = list(target_shards(config, seed))
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        _write_tensors(directory / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    total = sum(tensor.nbytes for tensors in shards for tensor in tensors.values())
    index = {
        "metadata": {"total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    _write_json(directory / "model.safetensors.index.json", index)


def _write_draft(directory: Path, seed: int) -> None:
    config = draft_config()
    directory.mkdir()
    _write_json(directory / "config.json", config)
    _write_tensors(directory / "model.safetensors", draft_tensors(config, seed))


def _write_json(path: Path, value: Json) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _write_tensors(path: Path, tensors: Tensors) -> None:
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # save_file's file is its owner's only


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tiny.random_checkpoint",
        description="Writes a small random checkpoint in Kimi K2.6's on-disk form.",
    )
    parser.add_argument("destination", type=Path, metavar="DST")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    try:
        write_checkpoint(arguments.destination, seed=arguments.seed)
    except FileExistsError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
