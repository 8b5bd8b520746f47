"""Owns the conversion of a Hugging Face checkpoint, target or drafter."""

import contextlib
import shutil
import sys
from pathlib import Path

from convert.manifest import write_manifest
from convert.plan import Plan, make_plan
from convert.progress import Reporter, make_reporter
from convert.source import INDEX, Source, open_source
from convert.staging import staged
from convert.write import write_leaves
from ddtree_jax.config import DraftConfig, ModelConfig
from ddtree_jax.errors import CheckpointError, ConfigError
from ddtree_jax.hf_config import (
    check_draft_fits,
    check_quantisation,
    read_draft_config,
    read_model_config,
    read_stop_token_ids,
)
from ddtree_jax.hf_config.fields import read_json
from ddtree_jax.model.restore import PARAMS

EXTRA = "extra"
DRAFT = "draft"

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


def convert_hf(source: Path, destination: Path, *, draft: Path | None) -> None:
    """Writes the canonical checkpoint of `source`, or nothing.

    Args:
      source: A Hugging Face directory of a target or of a DFlash drafter.
      destination: The directory to make; it must not exist.
      draft: A drafter's directory, converted into `destination`/draft.

    Raises:
      DDTreeError: The source is not usable; the message names file and tensor.
    """
    for directory in (source, *([draft] if draft else [])):
        _check_apart(directory, destination)
    config = read_config(source)
    jobs = [(source, config, Path())]
    if draft is not None:
        draft_config = read_config(draft)
        if not isinstance(config, ModelConfig):
            raise ConfigError(f"{source} is a drafter; --draft goes with a target")
        if not isinstance(draft_config, DraftConfig):
            raise ConfigError(f"{draft} is a target; --draft expects a drafter")
        check_draft_fits(draft_config, config)
        jobs.append((draft, draft_config, Path(DRAFT)))
    plans = [
        (opened, make_plan(opened, c), isinstance(c, ModelConfig), place)
        for opened, c, place in ((open_source(s), c, p) for s, c, p in jobs)
    ]
    total = sum(leaf.nbytes for _, plan, _, _ in plans for leaf in _leaves(plan))
    _check_space(destination, total)
    reporting = contextlib.closing(make_reporter(total))
    converted = [opened.directory for opened, *_ in plans]
    with staged(destination) as staging, reporting as reporter:
        # The main directory's manifest is written last.
        for opened, plan, is_target, place in reversed(plans):
            _write(opened, plan, staging / place, is_target, reporter, converted)
    print(f"{destination}: {total} bytes written")


def read_config(directory: Path) -> ModelConfig | DraftConfig:
    """Returns the configuration of a Hugging Face directory, as what it is.

    Raises:
      ConfigError: config.json is missing or unsupported.
      UnsupportedFormatError: Its quantisation is refused.
    """
    raw = read_json(directory / "config.json")
    if raw.get("architectures") == ["DFlashDraftModel"]:
        return read_draft_config(directory)
    check_quantisation(directory)
    read_stop_token_ids(directory)
    return read_model_config(directory)


def _write(
    source: Source,
    plan: Plan,
    directory: Path,
    is_target: bool,
    reporter: Reporter,
    converted: list[Path],
) -> None:
    directory.mkdir(exist_ok=True)
    files = _copy_data_files(source, directory, converted)
    digests = write_leaves(
        directory / PARAMS, plan.params, nested=True, reporter=reporter
    )
    if plan.extra:
        digests |= write_leaves(
            directory / EXTRA, plan.extra, nested=False, reporter=reporter
        )
    write_manifest(
        directory,
        kind="target" if is_target else "draft",
        source=source.directory,
        plan=plan,
        digests=digests,
        files=files,
    )


def _copy_data_files(
    source: Source, directory: Path, converted: list[Path]
) -> list[str]:
    """Returns the names of the files that it copied; says which it did not.

    Args:
      converted: Directories that this command converts, which may lie in the source.
    """
    files = [name for name in DATA_FILES if (source.directory / name).is_file()]
    for name in files:
        shutil.copyfile(source.directory / name, directory / name)
    weights = {file.name for file in source.files} | {INDEX}
    known = weights | set(files)
    others = {
        path.name
        for path in source.directory.iterdir()
        if path.name not in known and path not in converted
    }
    if others:
        names = ", ".join(sorted(others))
        print(f"not carried from {source.directory}: {names}", file=sys.stderr)
    return files


def _leaves(plan: Plan):
    return (*plan.params, *plan.extra)


def _check_apart(source: Path, destination: Path) -> None:
    inside, outside = destination.absolute().resolve(), source.absolute().resolve()
    if inside == outside or outside in inside.parents:
        raise CheckpointError(f"{destination} lies in the source {source}")


def _check_space(destination: Path, needed: int) -> None:
    parent = destination.absolute().parent
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise CheckpointError(
            f"{parent} has {free} bytes free; expected at least {needed}"
        )
