"""Owns what each rank of SGLang holds, as tensors made from the Hugging Face view."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from convert.checkpoint import DRAFT, Checkpoint, report_losses
from convert.data_files import copy_data_files
from convert.identity import identify
from convert.journal import Job
from convert.plan import make_plan
from convert.progress import make_reporter
from convert.rules import is_extra
from convert.sglang.division import Division
from convert.sglang.experts import make_cache
from convert.sglang.layouts import LAYOUTS
from convert.sglang.names import (
    Parameter,
    Routed,
    draft_parameters,
    target_parameters,
)
from convert.sglang.pieces import RowRange, Rows, take_columns
from convert.sglang.target_experts import RankExperts
from convert.sglang.vision import sglang_name, vision_parameters
from convert.sglang.write import write_ranks
from convert.staging import check_apart, check_space, staged
from convert.tensor import FiniteTensor, Tensor
from ddtree_jax.config import ModelConfig
from ddtree_jax.errors import CheckpointError, ConfigError

FORMAT = "SGLang sharded_state"

# SGLang pads the vocabulary to a multiple of this, which is not written.
_VOCAB_RUN = 64


def convert_to_sglang(
    source: Checkpoint,
    destination: Path,
    *,
    draft: Checkpoint | None,
    tp: int,
    ep: int = 1,
    layout: str = "marlin",
    part_bytes: int,
) -> None:
    """Writes `source` as SGLang's sharded_state, or nothing.

    Args:
      source: A target or a drafter, from any format.
      destination: The directory to make; it must not exist.
      draft: A drafter, written into `destination`/draft for as many ranks.
      tp: Number of ranks.
      ep: Groups of ranks that divide the experts; each group divides their width.
      layout: Of the routed experts: "marlin", "raw" or "triton".
      part_bytes: Bytes of tensors in a file, at most; a larger tensor stands alone.

    Raises:
      DDTreeError: The source is not usable, or a dimension does not divide.
    """
    division = make_division(tp, ep, layout)
    jobs = [(source, Path()), *([(draft, Path(DRAFT))] if draft else [])]
    work = []
    for checkpoint, place in jobs:
        check_apart(checkpoint.directory, destination)
        make_plan(checkpoint).check_stated_shapes()
        report_losses(checkpoint)
        work.append((checkpoint, place, rank_tensors(checkpoint, tp, division)))
    total = sum(t.nbytes for _, _, ranks in work for own in ranks for t in own)
    check_space(destination, total)
    settings: Job = {"tp": tp, "ep": ep, "layout": layout, "part_bytes": part_bytes}
    job = _identify(jobs, settings)
    apart = [checkpoint.directory for checkpoint, _ in jobs]
    reporting = contextlib.closing(make_reporter("writing", total))
    with staged(destination, job) as staging, reporting as reporter:
        for checkpoint, place, ranks in reversed(work):
            directory = staging.directory / place
            directory.mkdir(exist_ok=True)
            copy_data_files(checkpoint, directory, apart=apart)
            write_ranks(directory, ranks, part_bytes, staging, reporter)
        if _identify(jobs, settings) != job:
            raise CheckpointError(f"{source.directory} has changed meanwhile")
    print(f"{destination}: {total} bytes written")


def make_division(tp: int, ep: int, layout: str) -> Division:
    """Returns how the experts lie on `tp` ranks, as `convert_to_sglang` divides them.

    Raises:
      ConfigError: The ranks do not divide in `ep` groups.
    """
    if tp % ep:
        raise ConfigError(f"--ep {ep} does not divide --tp {tp}")
    return Division(LAYOUTS[layout], tp // ep, ep)


def rank_tensors(source: Checkpoint, tp: int, division: Division) -> list[list[Tensor]]:
    """Returns the tensors of each rank, in the same order on all.

    Raises:
      ConfigError: A dimension does not divide.
      CheckpointError: A tensor has no place in SGLang's model.
    """
    config = source.config
    view = {name: _checked(tensor) for name, tensor in source.tensors.items()}
    parameters: list[Parameter | Routed]
    if isinstance(config, ModelConfig):
        if config.vocab_size % _VOCAB_RUN or config.vocab_size % tp:
            raise ConfigError(
                f"vocab_size {config.vocab_size} does not divide by {_VOCAB_RUN} and "
                f"by {tp} ranks, and padding is not written"
            )
        kinds = {name: (t.dtype, t.shape) for name, t in view.items() if is_extra(name)}
        _refuse_other_images(source)
        parameters = [
            *target_parameters(config, view),
            *vision_parameters(kinds, source.directory),
        ]
    else:
        parameters = [*draft_parameters(config, view)]
    cache = make_cache()
    ranks: list[list[Tensor]] = [[] for _ in range(tp)]
    for parameter in parameters:
        if isinstance(parameter, Routed):
            _check_division(parameter, division)
        elif parameter.axis is not None and parameter.shape_of(tp) is None:
            part = next(p for p in parameter.parts if p.cuts(tp) is None)
            raise ConfigError(
                f"{part.tensor} has {part.units} heads or rows, which {tp} ranks do "
                "not divide"
            )
        for rank, own in enumerate(ranks):
            if isinstance(parameter, Routed):
                own += RankExperts(view, parameter, division, rank, cache).tensors()
            else:
                own.append(_divided(view, parameter, tp, rank))
    return ranks


def _identify(jobs: Sequence[tuple[Checkpoint, Path]], settings: Job) -> Job:
    return settings | {
        "to": FORMAT,
        **{
            place.name or "source": identify(
                checkpoint,
                [(t.name, t.dtype, t.shape) for t in checkpoint.tensors.values()],
            )
            for checkpoint, place in jobs
        },
    }


def _checked(tensor: Tensor) -> Tensor:
    """Returns a tensor whose numbers must be finite, unless it is an image's."""
    return tensor if is_extra(tensor.name) else FiniteTensor(tensor)


def _check_division(routed: Routed, division: Division) -> None:
    problem = division.problem(routed)
    if problem is not None:
        raise ConfigError(
            f"{problem}: it does not divide, as layout {division.layout.name} needs"
        )


def _refuse_other_images(source: Checkpoint) -> None:
    for name, tensor in source.tensors.items():
        if is_extra(name) and sglang_name(name) is None:
            raise CheckpointError(
                f"{tensor.file}: {name} has no place in SGLang's model; expected image "
                "tensors named as Kimi's"
            )


def _divided(
    view: Mapping[str, Tensor], parameter: Parameter, tp: int, rank: int
) -> Tensor:
    """Returns what a rank holds of a parameter."""
    first = view[parameter.parts[0].tensor]
    if parameter.axis == 1:
        width = parameter.parts[0].size // tp
        return take_columns(parameter.name, first, rank * width, (rank + 1) * width)
    split = 1 if parameter.axis is None else tp
    ranges = []
    for part in parameter.parts:
        cuts = part.cuts(split) or 1
        size = part.size // cuts
        start = part.start + rank % split * cuts // split * size
        ranges.append(RowRange(view[part.tensor], start, start + size))
    return Rows(parameter.name, tuple(ranges))
