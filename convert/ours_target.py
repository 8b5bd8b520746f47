"""Owns the writing of the canonical checkpoint from any other, target or drafter."""

import contextlib
from pathlib import Path

from convert.checkpoint import DRAFT, Checkpoint, report_losses
from convert.data_files import copy_data_files
from convert.identity import identify
from convert.journal import Job
from convert.manifest import write_manifest
from convert.ours_source import EXTRA
from convert.plan import Plan, make_plan
from convert.progress import Reporter, make_reporter
from convert.staging import Staging, check_apart, check_space, staged
from convert.write import write_leaves
from ddtree_jax.config import DraftConfig, ModelConfig
from ddtree_jax.errors import CheckpointError, ConfigError
from ddtree_jax.hf_config import check_draft_fits
from ddtree_jax.model.restore import FORMAT, PARAMS, VERSION


def convert_to_ours(
    source: Checkpoint, destination: Path, *, draft: Checkpoint | None
) -> None:
    """Writes the canonical checkpoint of `source`, or nothing.

    Args:
      source: A target or a drafter, from any format.
      destination: The directory to make; it must not exist.
      draft: A drafter, converted into `destination`/draft.

    Raises:
      DDTreeError: The source is not usable; the message names file and tensor.
    """
    jobs = [(source, make_plan(source), Path())]
    if draft is not None:
        check_draft(source, draft)
        jobs.append((draft, make_plan(draft), Path(DRAFT)))
    for checkpoint, plan, _ in jobs:
        check_apart(checkpoint.directory, destination)
        plan.check_stated_shapes()
    total = sum(plan.nbytes for _, plan, _ in jobs)
    check_space(destination, total)
    for checkpoint, *_ in jobs:
        report_losses(checkpoint)
    reporting = contextlib.closing(make_reporter("converting", total))
    converted = [checkpoint.directory for checkpoint, *_ in jobs]
    job = _identify(jobs)
    with staged(destination, job) as staging, reporting as reporter:
        # The main directory's manifest is written last.
        for checkpoint, plan, place in reversed(jobs):
            _write(checkpoint, plan, staging, place, reporter, converted)
        if _identify(jobs) != job:
            raise CheckpointError(f"{source.directory} has changed meanwhile")
    print(f"{destination}: {total} bytes written")


def check_draft(target: Checkpoint, draft: Checkpoint) -> None:
    """Raises ConfigError unless `draft` is a drafter of the target `target`."""
    if not isinstance(target.config, ModelConfig):
        raise ConfigError(
            f"{target.directory} is a drafter; --draft goes with a target"
        )
    if not isinstance(draft.config, DraftConfig):
        raise ConfigError(f"{draft.directory} is a target; --draft expects a drafter")
    check_draft_fits(draft.config, target.config)


def _write(
    source: Checkpoint,
    plan: Plan,
    staging: Staging,
    place: Path,
    reporter: Reporter,
    converted: list[Path],
) -> None:
    directory = staging.directory / place
    directory.mkdir(exist_ok=True)
    files = copy_data_files(source, directory, apart=converted)
    digests: dict[str, str] = {}
    for part, leaves in ((PARAMS, plan.params), (EXTRA, plan.extra)):
        if leaves:
            digests |= write_leaves(
                directory / part,
                leaves,
                nested=part == PARAMS,
                staging=staging,
                reporter=reporter,
            )
    write_manifest(directory, source=source, plan=plan, digests=digests, files=files)


def _identify(jobs: list[tuple[Checkpoint, Plan, Path]]) -> Job:
    """Returns all that the result depends on."""
    sources = {
        place.name or "source": identify(
            checkpoint,
            [
                (leaf.path, leaf.shape, leaf.dtype.name, leaf.layout(), leaf.pattern)
                for leaf in plan.leaves
            ],
        )
        for checkpoint, plan, place in jobs
    }
    return {"to": f"{FORMAT} {VERSION}", **sources}
