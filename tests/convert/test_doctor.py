"""`doctor` says what is wrong, what is odd, and what it did not look at."""

import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import regex

from convert import doctor, perplexity
from convert.checkpoint import Checkpoint, read_config
from convert.detect import open_checkpoint
from convert.plan import make_plan
from ddtree_jax.engine.tokenizer import KIMI_PATTERN, load_tokenizer
from ddtree_jax.errors import CheckpointError
from tests.convert.command import run, shell, wide_config
from tests.convert.other_formats import DENSE, EXPERT, to_bfloat16, to_fp8
from tests.convert.support import (
    INDEX,
    TINY,
    TINY_DRAFT,
    Raw,
    read_checkpoint,
    write_checkpoint,
)

BUNDLED = Path(__file__).parents[2] / "tiny" / "model"
LM = "language_model.model."


def lines(capsys, path, *, code: int) -> list[str]:
    got, out, err = run(capsys, "doctor", path)
    assert got == code, out + err
    verdicts = ("ok: ", "differs: ", "wrong: ", "not checked: ")
    assert all(line.startswith(verdicts) for line in out.splitlines()), out
    return out.splitlines()


def has(found: list[str], start: str, *parts: str) -> str:
    """Returns the one line that begins so; it has all the parts."""
    [line] = [line for line in found if line.startswith(start)]
    assert all(part in line for part in parts), line
    return line


def whole(directory: Path, tensors: dict[str, Raw], config: dict) -> Path:
    """Writes a checkpoint with the files of a tokenizer."""
    write_checkpoint(directory, tensors, config)
    for name in ("tiktoken.model", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / name, directory)
    return directory


@pytest.fixture
def no_score(monkeypatch):
    """Leaves perplexity out, where a test is about something else."""
    monkeypatch.setattr(doctor, "_free_memory", lambda: 0)


def test_random_weights(capsys):
    found = lines(capsys, TINY, code=1)
    assert any("text_config: hidden_size is 128; published 7168" in x for x in found)
    has(found, "ok: weights: Hugging Face", "524 tensors, 4861696 bytes, in 3 files")
    has(found, f"ok: {INDEX}: 524 tensors in 3 files, as it says, and 4861696 bytes")
    has(found, "ok: tokenizer: tiktoken.model there")
    has(found, "not checked: totals of Kimi K2.6: another architecture")
    has(found, "wrong: perplexity: 1", "not those of a trained model")


def test_config_alone(capsys, tmp_path):
    write_checkpoint(tmp_path, {}, wide_config(n_group=8), shards=1)
    found = lines(capsys, tmp_path / "config.json", code=1)
    has(found, "wrong: refused: ", "n_group is 8; expected 1")
    has(found, "not checked: weights, tokenizer and perplexity: PATH is one file")


def test_names_that_are_no_text(tmp_path):
    config = wide_config()
    config["text_config"] |= {"\ud800": 1, "two\nlines": 2}
    write_checkpoint(tmp_path, {}, config, shards=1)
    done = shell("doctor", tmp_path / "config.json")
    assert done.returncode == 0 and done.stderr == ""
    assert "text_config: \\ud800 is unknown and not used\n" in done.stdout
    assert "text_config: two lines is unknown and not used\n" in done.stdout


def test_drafter(capsys):
    found = lines(capsys, TINY_DRAFT, code=0)
    has(found, "not checked: tokenizer: a drafter uses its target's")
    has(found, "not checked: perplexity: a drafter borrows its target's head")
    has(found, f"not checked: {INDEX}: there is none")


def test_ours(capsys, converted, no_score):
    found = lines(capsys, converted, code=0)
    has(found, "ok: weights: ddtree_jax-checkpoint", "524 tensors, 4861696 bytes")
    has(found, "not checked: hashes of arrays and files: `verify` does that")
    has(found, f"not checked: {INDEX}: ddtree_jax-checkpoint has none")
    has(found, "ok: draft: weights: ddtree_jax-checkpoint")
    [chunk, *_] = sorted((converted / "params" / "norm").rglob("c/*"))
    content = chunk.read_bytes()
    chunk.unlink()
    try:
        found = lines(capsys, converted, code=1)
    finally:
        chunk.write_bytes(content)
    has(found, "wrong: ", "params/norm", "missing")
    has(found, "not checked: contents of the weights, perplexity")


def test_other_formats(capsys, tmp_path, tensors, config, no_score):
    fp8, _ = to_fp8(tensors, DENSE)
    found = lines(capsys, whole(tmp_path / "a", fp8, config), code=0)
    has(found, "differs: weights: not bit for bit: 32 weights (", "FP8 in blocks")
    total = sum(len(t.data) for t in fp8.values())
    has(found, f"ok: {INDEX}: {len(fp8)} tensors in 3 files", f"and {total} bytes")
    plain = whole(tmp_path / "b", to_bfloat16(tensors), config)
    found = lines(capsys, plain, code=0)
    line = next(x for x in found if "the flag --quantise-experts" in x)
    assert line.startswith("differs: ") and "routed expert" in line
    name = next(n for n in tensors if EXPERT.match(n))
    broken = dict(tensors) | {f"{name.rsplit('.', 1)[0]}.weight_zero_point": Raw(
        "I32", (1,), bytes(4)
    )}  # fmt: skip
    found = lines(capsys, whole(tmp_path / "c", broken, config), code=1)
    has(found, "wrong: ", "asymmetric INT4")
    has(found, "not checked: contents of the weights, perplexity: they are refused")


@pytest.fixture
def copy(tmp_path) -> Path:
    return shutil.copytree(TINY, tmp_path / "copy")


def test_missing_file(capsys, copy):
    (copy / "model-00002-of-000003.safetensors").unlink()
    found = lines(capsys, copy, code=1)
    has(found, "wrong: ", "model-00002-of-000003.safetensors is missing; model.saf")
    has(found, "not checked: contents of the weights, perplexity: the files are not")


def test_missing_tensor(capsys, tmp_path, tensors, config):
    name = f"{LM}layers.2.mlp.experts.7.up_proj.weight_packed"
    rest = {n: t for n, t in tensors.items() if n != name}
    source = whole(tmp_path / "src", rest, config)
    found = lines(capsys, source, code=1)
    has(found, f"wrong: {source}: tensors missing (1): {name}")
    has(found, "not checked: contents of the weights, perplexity: tensors are not")


@pytest.mark.parametrize(
    ("metadata", "line"),
    [
        ({"total_size": 5}, "differs: INDEX: total_size is 5; the tensors have 4861"),
        ({"total_size": "4861696"}, "differs: INDEX: total_size is 4861696; the t"),
        ({}, "ok: INDEX: 524 tensors in 3 files, as it says; it states no total_s"),
    ],
)
def test_index_total(capsys, copy, no_score, metadata, line):
    index = json.loads((copy / INDEX).read_text()) | {"metadata": metadata}
    (copy / INDEX).write_text(json.dumps(index))
    has(lines(capsys, copy, code=0), line.replace("INDEX", INDEX))


def test_tokenizer_files(capsys, copy, no_score):
    assert not [x for x in lines(capsys, copy, code=0) if x.startswith("differs: tok")]
    for name, line in (
        ("chat_template.jinja", "differs: tokenizer: there is no chat template"),
        ("generation_config.json", "differs: tokenizer: generation_config.json is ab"),
        ("tokenizer_config.json", "differs: tokenizer: tokenizer_config.json is abs"),
    ):
        (copy / name).unlink()
        has(lines(capsys, copy, code=0), line)
    (copy / "tiktoken.model").unlink()
    found = lines(capsys, copy, code=1)
    has(found, "wrong: tokenizer: ", "has neither tiktoken.model nor tokenizer.json")
    has(found, "not checked: perplexity: there is no tiktoken.model")


def test_what_does_not_fit_into_memory(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_free_memory", lambda: 14 * 10**6)
    found = lines(capsys, TINY, code=0)
    has(found, "not checked: perplexity: needs 0 GB of memory; 0 GB are free")
    monkeypatch.undo()
    free = doctor._free_memory()
    monkeypatch.setattr(doctor, "_MEMINFO", Path("/absent"))
    assert 10**7 < free < doctor._free_memory() < 2**60


def test_weight_that_is_not_finite(capsys, tmp_path, tensors, config):
    name = f"{LM}layers.2.self_attn.o_proj.weight"
    values = tensors[name].array().copy()
    values[5, 6] = np.nan
    bad = tensors | {name: Raw("BF16", values.shape, values.tobytes())}
    source = whole(tmp_path / "src", bad, config)
    has(lines(capsys, source, code=1), "wrong: ", f"{name} holds NaN or infinity")


@pytest.fixture(scope="module")
def bundled() -> perplexity.Score:
    return score_of(BUNDLED)


def score_of(directory: Path) -> perplexity.Score:
    checkpoint = open_checkpoint(directory)
    plan = make_plan(checkpoint)
    return perplexity.score(plan, read_config(directory), directory / perplexity.RANKS)


def test_trained_weights(bundled):
    assert bundled.tokens == 512
    assert 0.4 < bundled.bits_per_byte < 0.8
    assert 3 < bundled.zlib_bits_per_byte < 4


def test_trained_weights_are_known_by_the_command(capsys):
    has(lines(capsys, BUNDLED, code=0), "ok: perplexity: 0.5", "512 tokens")


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        (f"{LM}embed_tokens.weight", lambda w: np.roll(w, 1, axis=0)),
        ("language_model.lm_head.weight", lambda w: np.roll(w, 1, axis=1)),
    ],
)
def test_weights_in_the_wrong_place(tmp_path, bundled, part, damage):
    """Headers are right; only the model's own prediction tells."""
    source = shutil.copytree(BUNDLED, tmp_path / "src")
    stored = read_checkpoint(source)
    moved = damage(stored[part].array())
    stored[part] = dataclasses.replace(
        stored[part], data=np.ascontiguousarray(moved).tobytes()
    )
    for file in source.glob("*.safetensors"):
        file.unlink()
    config = json.loads((source / "config.json").read_text())
    write_checkpoint(source, stored, config)
    assert score_of(source).bits_per_byte > bundled.bits_per_byte + 1


def test_words_are_split_as_the_model_splits_them():
    text = perplexity.TEXT.read_text(encoding="ascii")
    tokenizer = load_tokenizer(BUNDLED)
    encoding = perplexity._read_encoding(BUNDLED / perplexity.RANKS)
    assert encoding.encode_ordinary(text) == tokenizer.encode(text)
    hard = "It's I'LL don'T x2345 67\n\n\t a  b _A1 (x)==y;\r\n END.  "
    assert encoding.encode_ordinary(hard) == tokenizer.encode(hard)
    for sample in (text, hard):
        kimi = regex.findall(KIMI_PATTERN, sample, regex.V1)
        assert regex.findall(perplexity._ASCII_PATTERN, sample) == kimi


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"AA== x\n", "is no list of tokens; expected a base64 token and its rank"),
        (b"AA== 0 1\n", "is no list of tokens"),
        (b"AA== 0\n", "has 1 tokens; expected all bytes and ranks unbroken"),
    ],
)
def test_ranks_that_cannot_be_read(tmp_path, content, match):
    (tmp_path / "r").write_bytes(content)
    with pytest.raises(CheckpointError, match=match):
        perplexity._read_encoding(tmp_path / "r")


def test_ranks_of_another_model(tmp_path):
    source = shutil.copytree(TINY, tmp_path / "src")
    shutil.copy(BUNDLED / "tiktoken.model", source)
    with pytest.raises(CheckpointError, match="expected less than vocab_size, 512"):
        score_of(source)


@dataclasses.dataclass
class Declared:
    """A tensor of which only the header is known."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path = Path("f")

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * {"BF16": 2, "I32": 4, "F32": 4}[self.dtype]


def published_tensors() -> dict[str, Declared]:
    """The inventory of Kimi K2.6, from its table of names and shapes."""
    found: dict[str, Declared] = {}

    def add(name: str, *shape: int, dtype: str = "BF16") -> None:
        found[name] = Declared(name, dtype, shape)

    def mlp(name: str, inner: int) -> None:
        for which in ("gate", "up"):
            add(f"{name}.{which}_proj.weight", inner, 7168)
        add(f"{name}.down_proj.weight", 7168, inner)

    add(f"{LM}embed_tokens.weight", 163840, 7168)
    add("language_model.lm_head.weight", 163840, 7168)
    add(f"{LM}norm.weight", 7168)
    for n in range(61):
        layer = f"{LM}layers.{n}"
        add(f"{layer}.input_layernorm.weight", 7168)
        add(f"{layer}.post_attention_layernorm.weight", 7168)
        for part, *shape in (
            ("q_a_proj", 1536, 7168), ("q_a_layernorm", 1536), ("q_b_proj", 12288,
            1536), ("kv_a_proj_with_mqa", 576, 7168), ("kv_a_layernorm", 512),
            ("kv_b_proj", 16384, 512), ("o_proj", 7168, 8192),
        ):  # fmt: skip
            add(f"{layer}.self_attn.{part}.weight", *shape)
        if n == 0:
            mlp(f"{layer}.mlp", 18432)
            continue
        add(f"{layer}.mlp.gate.weight", 384, 7168)
        add(f"{layer}.mlp.gate.e_score_correction_bias", 384, dtype="F32")
        mlp(f"{layer}.mlp.shared_experts", 2048)
        for e, w in itertools.product(range(384), ("gate", "up", "down")):
            out, inp = (7168, 2048) if w == "down" else (2048, 7168)
            expert = f"{layer}.mlp.experts.{e}.{w}_proj"
            add(f"{expert}.weight_packed", out, inp // 8, dtype="I32")
            add(f"{expert}.weight_scale", out, inp // 32)
            add(f"{expert}.weight_shape", 2, dtype="I32")
    # The image path, of which only the number and the bytes count here.
    for i in range(334):
        add(f"vision_tower.t{i}", 1)
    add("mm_projector.t", 942_287_840 // 2 - 334)
    return found


def test_totals_of_the_published_model():
    published = published_tensors()
    assert len(published) == 208_550
    assert sum(t.nbytes for t in published.values()) == 595_148_192_736
    config = dataclasses.replace(read_config(TINY), **{
        key: doctor.PUBLISHED_TARGET[key] for key in doctor._SIZES
    })  # fmt: skip

    def found(tensors) -> list[str]:
        source = Checkpoint(Path(), "f", config, tensors, ())
        return list(map(str, doctor._totals(source)))

    same = "as Kimi K2.6 has"
    text = f"ok: totals, text model: 208215 tensors, 594205904896 bytes, {same}"
    assert found(published) == [
        text,
        f"ok: totals, image model: 335 tensors, 942287840 bytes, {same}",
    ]
    language = {n: t for n, t in published.items() if n.startswith("language_model.")}
    assert found(language) == ["differs: totals: no tensors of the image path", text]
    without = {n: t for n, t in language.items() if not n.endswith("weight_shape")}
    assert found(without)[1] == text
    del without[f"{LM}norm.weight"]
    assert found(without)[1] == (
        "differs: totals, text model: 208214 tensors, 594205890560 bytes; "
        "Kimi K2.6 has [208215, 594205904896]"
    )
