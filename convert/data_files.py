"""Owns which files besides the weights go with a checkpoint, and their copying."""

import shutil
import sys
from collections.abc import Collection
from pathlib import Path

from convert.checkpoint import Checkpoint

# Carried byte for byte. Code files are never carried, and never run.
DATA_FILES = (
    "config.json",
    "generation_config.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "tokenizer.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
# They say where tensors are, which every target says in its own way.
_INDEXES = frozenset(("model.safetensors.index.json", "manifest.json"))


def copy_data_files(
    source: Checkpoint, directory: Path, *, apart: Collection[Path] = ()
) -> list[str]:
    """Returns the names of the files that it copied; says which it did not.

    Args:
      apart: Paths in the source that are no business of this copy, such as a
        drafter that is converted by itself.
    """
    files = [name for name in DATA_FILES if (source.directory / name).is_file()]
    for name in files:
        shutil.copyfile(source.directory / name, directory / name)
    if source.config_json is not None:
        (directory / "config.json").write_bytes(source.config_json)
    weights = {path.relative_to(source.directory).parts[0] for path in source.files}
    known = weights | _INDEXES | set(files)
    others = {
        path.name
        for path in source.directory.iterdir()
        if path.name not in known and path not in apart
    }
    if others:
        names = ", ".join(sorted(others))
        print(f"not carried from {source.directory}: {names}", file=sys.stderr)
    return files
