"""Owns the examination of a checkpoint: what is wrong, what is odd, what was not seen.

Each line begins with how it is: "ok", "differs" (from what is published, which may be
meant), "wrong" (it cannot be used, or not trusted), or "not checked", and why.
"""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from convert.checkpoint import DRAFT, Checkpoint
from convert.detect import open_checkpoint
from convert.hf_source import FORMAT, INDEX, read_directory
from convert.perplexity import RANKS, score
from convert.plan import Plan, make_plan
from convert.rules import is_extra
from ddtree_jax.config import ModelConfig
from ddtree_jax.errors import DDTreeError, UnsupportedFormatError
from ddtree_jax.hf_config import config_deviations
from ddtree_jax.hf_config.doctor import PUBLISHED_TARGET
from ddtree_jax.hf_config.fields import read_json
from ddtree_jax.model.restore import FORMAT as OURS

type Verdict = Literal["ok", "differs", "wrong", "not checked"]

# Kimi K2.6's inventory, `weight_shape` as int32: tensors and bytes.
_PUBLISHED = {"text": (208_215, 594_205_904_896), "image": (335, 942_287_840)}
_WEIGHT_SHAPE_BYTES = 8
_SIZES = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("v_head_dim", "intermediate_size", "moe_intermediate_size"),
    *("n_routed_experts", "n_shared_experts", "first_k_dense_replace"),
)
# Arrays in the file's dtypes and in float32, and what a forward pass makes.
_MEMORY_FACTOR = 3
_MEMINFO = Path("/proc/meminfo")  # of Linux


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of a report."""

    verdict: Verdict
    text: str

    def __str__(self) -> str:
        return f"{self.verdict}: {' '.join(self.text.split())}"


def examine(path: Path) -> Iterator[Finding]:
    """Yields what is found in a checkpoint of any format, one thing at a time.

    Args:
      path: Its directory, or a config.json alone.

    Raises:
      ConfigError: There is no config.json, or it is no JSON object.
    """
    yield from _config(path)
    if not path.is_dir():
        yield Finding(
            "not checked", "weights, tokenizer and perplexity: PATH is one file"
        )
        return
    yield from _tokenizer(path)
    yield from _weights(path)
    if (path / DRAFT / "config.json").exists():
        for finding in (*_config(path / DRAFT), *_weights(path / DRAFT)):
            yield Finding(finding.verdict, f"{DRAFT}: {finding.text}")


def _config(path: Path) -> Iterator[Finding]:
    lines = config_deviations(path)
    for line in lines:
        yield Finding("wrong" if line.startswith("refused") else "differs", line)
    if not lines:
        yield Finding("ok", "config.json is as published")


def _tokenizer(directory: Path) -> Iterator[Finding]:
    if read_json(directory / "config.json").get("architectures") == [
        "DFlashDraftModel"
    ]:
        yield Finding("not checked", "tokenizer: a drafter uses its target's")
        return
    kinds = [n for n in (RANKS, "tokenizer.json") if (directory / n).is_file()]
    if not kinds:
        yield Finding(
            "wrong", f"tokenizer: {directory} has neither {RANKS} nor tokenizer.json"
        )
    else:
        yield Finding("ok", f"tokenizer: {' and '.join(kinds)} there")
    needs = {
        "tokenizer_config.json": "special tokens have no names",
        "generation_config.json": "the token that ends a turn is not stated",
    }
    for name, consequence in needs.items():
        if not (directory / name).is_file():
            yield Finding("differs", f"tokenizer: {name} is absent: {consequence}")
    if not _has_chat_template(directory):
        yield Finding(
            "differs", "tokenizer: there is no chat template: no chat completions"
        )


def _has_chat_template(directory: Path) -> bool:
    names = ("chat_template.jinja", "chat_template.json")
    if any((directory / name).is_file() for name in names):
        return True
    path = directory / "tokenizer_config.json"
    return path.is_file() and "chat_template" in read_json(path)


def _weights(directory: Path) -> Iterator[Finding]:
    try:
        checkpoint = open_checkpoint(directory)
    except UnsupportedFormatError as error:
        try:
            checkpoint = open_checkpoint(directory, quantise_experts=True)
        except DDTreeError:
            yield Finding("wrong", str(error))
            yield _unseen("they are refused")
            return
        yield Finding("differs", str(error))
    except DDTreeError as error:
        yield Finding("wrong", str(error))
        yield _unseen("the files are not whole")
        return
    try:
        plan = make_plan(checkpoint)
        plan.check_stated_shapes()
    except DDTreeError as error:
        yield Finding("wrong", str(error))
        yield _unseen("tensors are not as they must be")
        return
    yield Finding(
        "ok",
        f"weights: {checkpoint.format}, every tensor of the model there once, "
        f"{len(checkpoint.tensors)} tensors, {checkpoint.nbytes} bytes, in "
        f"{len(checkpoint.files)} files",
    )
    for loss in checkpoint.losses:
        yield Finding("differs", f"weights: not bit for bit: {loss}")
    if checkpoint.format == OURS:
        yield Finding("not checked", "hashes of arrays and files: `verify` does that")
    yield from _index(checkpoint)
    yield from _totals(checkpoint)
    yield from _perplexity(checkpoint, plan)


def _unseen(why: str) -> Finding:
    return Finding("not checked", f"contents of the weights, perplexity: {why}")


def _index(checkpoint: Checkpoint) -> Iterator[Finding]:
    if checkpoint.format != FORMAT:
        yield Finding("not checked", f"{INDEX}: {checkpoint.format} has none")
        return
    path = checkpoint.directory / INDEX
    if not path.exists():
        yield Finding("not checked", f"{INDEX}: there is none")
        return
    metadata = read_json(path).get("metadata")
    stated = metadata.get("total_size") if isinstance(metadata, dict) else None
    stored = read_directory(checkpoint.directory).tensors.values()
    found = sum(tensor.nbytes for tensor in stored)
    what = f"{len(stored)} tensors in {len(checkpoint.files)} files, as it says"
    if stated is None:
        yield Finding("ok", f"{INDEX}: {what}; it states no total_size")
    elif stated == found:
        yield Finding("ok", f"{INDEX}: {what}, and {found} bytes of tensors")
    else:
        yield Finding(
            "differs", f"{INDEX}: total_size is {stated}; the tensors have {found}"
        )


def _totals(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Compares with the published inventory, whose weight_shape tensors are int32."""
    config = checkpoint.config
    if not isinstance(config, ModelConfig) or any(
        getattr(config, key) != PUBLISHED_TARGET[key] for key in _SIZES
    ):
        yield Finding("not checked", "totals of Kimi K2.6: another architecture")
        return
    parts = {"text": [0, 0], "image": [0, 0]}
    for name, tensor in checkpoint.tensors.items():
        if name.endswith(".weight_shape"):
            continue
        part = parts["image" if is_extra(name) else "text"]
        part[0] += 1
        part[1] += tensor.nbytes
        if name.endswith(".weight_packed"):
            part[0] += 1
            part[1] += _WEIGHT_SHAPE_BYTES
    if not parts["image"][0]:
        yield Finding("differs", "totals: no tensors of the image path")
        del parts["image"]
    for name, (count, nbytes) in parts.items():
        published = _PUBLISHED[name]
        what = f"totals, {name} model: {count} tensors, {nbytes} bytes"
        if (count, nbytes) == published:
            yield Finding("ok", f"{what}, as Kimi K2.6 has")
        else:
            yield Finding("differs", f"{what}; Kimi K2.6 has {list(published)}")


def _perplexity(checkpoint: Checkpoint, plan: Plan) -> Iterator[Finding]:
    if not isinstance(checkpoint.config, ModelConfig):
        yield Finding("not checked", "perplexity: a drafter borrows its target's head")
        return
    ranks = checkpoint.directory / RANKS
    if not ranks.is_file():
        yield Finding("not checked", f"perplexity: there is no {RANKS}")
        return
    needed, free = _MEMORY_FACTOR * plan.nbytes, _free_memory()
    if needed > free:
        yield Finding(
            "not checked",
            f"perplexity: needs {needed / 1e9:.0f} GB of memory; {free / 1e9:.0f} GB "
            "are free",
        )
        return
    try:
        found = score(plan, checkpoint.config, ranks)
    except DDTreeError as error:
        yield Finding("wrong", str(error))
        return
    what = (
        f"perplexity: {found.bits_per_byte:.2f} bits per byte on {found.tokens} tokens "
        f"of a bundled text, zlib {found.zlib_bits_per_byte:.2f}"
    )
    if found.bits_per_byte < found.zlib_bits_per_byte:
        yield Finding("ok", what)
    else:
        why = "weights or configuration are not those of a trained model"
        yield Finding("wrong", f"{what}: {why}")


def _free_memory() -> int:
    """Returns the bytes that a new process can have, or all where none says."""
    if _MEMINFO.exists():
        for line in _MEMINFO.read_text().splitlines():
            name, value = line.split(":")
            if name == "MemAvailable":
                return int(value.removesuffix("kB")) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
