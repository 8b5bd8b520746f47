"""Owns a Hugging Face checkpoint directory: which tensors it has, and where.

Does not know what the tensors mean, but for their format. The index file is
untrusted: it may name only files that lie in the directory itself.
"""

import dataclasses
from pathlib import Path

from convert.checkpoint import Checkpoint, read_config
from convert.formats import int4_config_json, refuse_foreign_formats, view_as_int4
from convert.safetensors_file import FileTensor, read_header
from ddtree_jax.config import ModelConfig
from ddtree_jax.errors import CheckpointError, UnsupportedFormatError
from ddtree_jax.hf_config.fields import read_json
from ddtree_jax.hf_config.quantisation import FP8, GPTQ, read_quantisation

FORMAT = "Hugging Face safetensors"

INDEX = "model.safetensors.index.json"


def open_hf(directory: Path, *, quantise_experts: bool = False) -> Checkpoint:
    """Returns a Hugging Face directory, of a target or a drafter.

    Args:
      quantise_experts: As in `view_as_int4`.

    Raises:
      CheckpointError: A file is missing or not as declared; the message names it.
      UnsupportedFormatError: The weights are in a format that is refused.
      ConfigError: config.json is missing or unsupported.
    """
    stored = read_directory(directory)
    config = read_config(directory)
    if not isinstance(config, ModelConfig):
        refuse_foreign_formats(stored.tensors.values())
        if quantise_experts:
            raise CheckpointError(
                f"{directory} is a drafter; --quantise-experts goes with a target"
            )
        tensors = dict(stored.tensors)
        return Checkpoint(directory, FORMAT, config, tensors, stored.files)
    stated = read_quantisation(directory)
    view = view_as_int4(
        stored.tensors,
        gptq_zero=stated.gptq_zero,
        quantise_experts=quantise_experts,
    )
    is_own = view.is_stored and not {FP8, GPTQ} & set(stated.schemes)
    return Checkpoint(
        directory=directory,
        format=FORMAT,
        config=config,
        tensors=view.tensors,
        files=stored.files,
        losses=view.losses,
        config_json=None if is_own else int4_config_json(directory),
    )


@dataclasses.dataclass(frozen=True)
class Stored:
    """What the safetensors files of a directory hold.

    Attributes:
      tensors: Every tensor by its name, as stored.
      files: The safetensors files.
    """

    tensors: dict[str, FileTensor]
    files: tuple[Path, ...]


def read_directory(directory: Path) -> Stored:
    """Returns the tensors of a checkpoint directory, after checking every header.

    Raises:
      CheckpointError: A file is missing or not as declared; the message names it.
      UnsupportedFormatError: The weights are in a container that is refused.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a directory")
    _refuse_other_containers(directory)
    index = directory / INDEX
    present = sorted(directory.glob("*.safetensors"))
    if index.exists():
        weight_map = _weight_map(index)
        files = [directory / name for name in sorted(set(weight_map.values()))]
        _check_files(index, files, present)
    else:
        weight_map, files = None, present
    if not files:
        raise CheckpointError(f"{directory} has no .safetensors file")
    tensors: dict[str, FileTensor] = {}
    for file in files:
        for tensor in read_header(file):
            if tensor.name in tensors:
                raise CheckpointError(
                    f"{tensor.name} is in {tensors[tensor.name].file.name} and in "
                    f"{file}; expected it once"
                )
            tensors[tensor.name] = tensor
    if weight_map is not None:
        _check_index(index, weight_map, tensors)
    return Stored(tensors, tuple(files))


def _weight_map(index: Path) -> dict[str, str]:
    values = read_json(index).child("weight_map").values
    for tensor, file in values.items():
        name = file if isinstance(file, str) else ""
        plain = name == Path(name).name and "\\" not in name and "\0" not in name
        if not plain or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index}: {tensor} is said to be in {file!r}; expected the name of "
                "a .safetensors file of this directory"
            )
    return {tensor: str(file) for tensor, file in values.items()}


def _check_files(index: Path, files: list[Path], present: list[Path]) -> None:
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; {index.name} names it")
    for file in present:
        if file not in files:
            raise CheckpointError(f"{file} is not named by {index.name}")


def _check_index(
    index: Path, weight_map: dict[str, str], tensors: dict[str, FileTensor]
) -> None:
    for name, tensor in tensors.items():
        if name not in weight_map:
            raise CheckpointError(f"{tensor.file}: {name} is not named by {index.name}")
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file.name != file:
            raise CheckpointError(f"{index}: {name} is not in {file}")


def _refuse_other_containers(directory: Path) -> None:
    """Raises UnsupportedFormatError for weights that are not Hugging Face's."""
    kinds = {
        "*.gguf": "GGUF",
        "model-rank-*-part-*.safetensors": "SGLang sharded_state",
        "model-*.safetensor": "SGLang presharded",
    }
    for pattern, kind in kinds.items():
        for file in sorted(directory.glob(pattern)):
            raise UnsupportedFormatError(
                f"{file}: unsupported format {kind}; expected Hugging Face .safetensors"
            )
    if not any(directory.glob("*.safetensors")):
        for pattern in ("*.bin", "*.pt", "*.pth"):
            for file in sorted(directory.glob(pattern)):
                raise UnsupportedFormatError(
                    f"{file}: pickled weights are never read; expected .safetensors"
                )
