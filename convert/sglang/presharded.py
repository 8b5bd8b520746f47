"""Owns SGLang's presharded form: a dump of all ranks with a plan of what lies where.

    MODEL/config.json
    MODEL/presharded/TP-8-sig-…/READY            the dump is complete
    MODEL/presharded/TP-8-sig-…/checksum.json    the plan
    MODEL/presharded/TP-8-sig-…/model-00000-common.safetensor, …

Tensors are stored once under a checksum of their content, by which the plan calls
them. What the plan marks as extra is no parameter but made from parameters
(`w_kc`, `w_vc`, workspaces), so it is not read. The plan is checked in full; that the
contents are as their checksums say is checked in `contents.py`.
"""

import hashlib
from pathlib import Path

from convert.safetensors_file import FileTensor, read_header
from convert.sglang.ranks import Ranks, check_ranks
from ddtree_jax.errors import CheckpointError, UnsupportedFormatError
from ddtree_jax.hf_config.fields import Fields, read_json

_PLAN = "checksum.json"
_READY = "READY"
_VERSION = 1
_CONFIG = "config.json"


def find_dump(directory: Path) -> Path | None:
    """Returns the one dump that `directory` is or holds, or None.

    Raises:
      CheckpointError: It holds more than one.
    """
    if (directory / _PLAN).exists():
        return directory
    dumps = [path.parent for path in sorted(directory.glob(f"presharded/*/{_PLAN}"))]
    if len(dumps) > 1:
        names = ", ".join(dump.name for dump in dumps)
        raise CheckpointError(
            f"{directory / 'presharded'} holds {len(dumps)} dumps ({names}); expected "
            "the path of one of them"
        )
    return dumps[0] if dumps else None


def read_presharded(dump: Path) -> Ranks:
    """Returns what each rank reads from a dump, after checking plan and headers.

    Raises:
      CheckpointError: The dump is not complete or not as its plan says.
      UnsupportedFormatError: It is of another version, or of a pipeline.
    """
    dump = dump.absolute()
    plan = _read_plan(dump)
    count = plan.integer("world_size")
    stored = {name: _read_file(dump, name) for name in _files(plan)}
    reads = plan.child("rank_to_reads")
    checksums = plan.child("rank_checksums")
    numbers = sorted(reads.values)
    if len(numbers) != count or numbers != sorted(map(str, range(count))):
        raise reads.error(f"ranks {numbers}; expected 0 to {count - 1}")
    tensors, used = [], set()
    for rank in range(count):
        own, checksum = {}, 0
        for filename, key, name, is_extra in _reads(reads, str(rank)):
            tensor = stored.get(filename, {}).get(key)
            if tensor is None:
                raise reads.error(f"{name} of rank {rank}: no {key} in {filename!r}")
            used.add((filename, key))
            digest = hashlib.sha1(f"{name}:{key}".encode()).digest()
            checksum += int.from_bytes(digest[:8], "big")
            if name in own:
                raise reads.error(f"rank {rank} reads {name} twice; expected once")
            if not is_extra:
                own[name] = _named(tensor, name)
        if checksums.get(str(rank)) != f"{checksum % 2**64:016x}":
            raise checksums.error(
                f"rank {rank} has {checksums.get(str(rank))!r}; expected "
                f"{checksum % 2**64:016x} from its names and keys"
            )
        tensors.append(own)
    for filename, own in stored.items():
        for key in own:
            if (filename, key) not in used:
                raise CheckpointError(f"{dump / filename}: {key} is read by no rank")
    return check_ranks(
        Ranks(
            directory=_model_directory(dump),
            format=f"SGLang presharded of {count} rank{'s' * (count > 1)}",
            tensors=tuple(tensors),
            files=tuple(dump / name for name in stored),
        )
    )


def _read_plan(dump: Path) -> Fields:
    if not (dump / _READY).is_file():
        raise CheckpointError(f"{dump / _READY} is missing; the dump is not complete")
    ready, plan = read_json(dump / _READY), read_json(dump / _PLAN)
    for fields, key in ((ready, "plan_version"), (plan, "version")):
        if fields.get(key) != _VERSION:
            raise UnsupportedFormatError(
                f"{fields.name}: {key} {fields.get(key)!r}; expected {_VERSION}"
            )
    if ready.get("world_size") != plan.integer("world_size"):
        raise ready.error(
            f"world_size {ready.get('world_size')!r}; expected "
            f"{plan.get('world_size')} as in {_PLAN}"
        )
    if "shard_config" in plan and plan.child("shard_config").get("pp") not in (None, 1):
        raise UnsupportedFormatError(
            f"{plan.name}: pipeline parallel dumps are not read; expected pp 1"
        )
    return plan


def _files(plan: Fields) -> list[str]:
    """Returns the names of the dump's files, which must lie in it."""
    names = []
    for entry in _list(plan, "files"):
        name = entry.get("filename") if isinstance(entry, dict) else None
        plain = isinstance(name, str) and name == Path(name).name and "\0" not in name
        if not plain or not str(name).endswith(".safetensor"):
            raise plan.error(f"file {name!r}; expected the name of a .safetensor file")
        names.append(str(name))
    return sorted(set(names))


def _read_file(dump: Path, name: str) -> dict[str, FileTensor]:
    path = dump / name
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; {_PLAN} names it")
    return {tensor.name: tensor for tensor in read_header(path)}


def _reads(reads: Fields, rank: str):
    """Yields filename, key, name and whether it is no parameter."""
    for entry in _list(reads, rank):
        values = entry if isinstance(entry, dict) else {}
        strings = [values.get(key) for key in ("filename", "stored_key", "name")]
        is_extra = values.get("is_extra")
        if not all(isinstance(s, str) for s in strings) or type(is_extra) is not bool:
            raise reads.error(
                f"rank {rank} reads {entry!r}; expected filename, stored_key, name "
                "and is_extra"
            )
        yield (*map(str, strings), is_extra)


def _list(fields: Fields, key: str) -> list:
    value = fields.get(key)
    if not isinstance(value, list):
        raise fields.error(f"{key} is {value!r}; expected a list")
    return value


def _named(tensor: FileTensor, name: str) -> FileTensor:
    return FileTensor(
        name, tensor.file, tensor.dtype, tensor.shape, tensor.begin, tensor.nbytes
    )


def _model_directory(dump: Path) -> Path:
    """Returns where config.json is: with the dump, or where the model is."""
    for directory in (dump, dump.parents[1]):
        if (directory / _CONFIG).exists():
            return directory
    raise CheckpointError(
        f"{dump} has no {_CONFIG}, nor has the directory two above it"
    )
