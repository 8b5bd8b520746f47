"""sharded_state and presharded, written independently, as the Hugging Face view."""

import dataclasses
import json
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from convert.detect import open_checkpoint
from convert.sglang import experts
from convert.sglang.presharded import read_presharded
from convert.sglang.source import open_sglang
from convert.tensor import read_array
from ddtree_jax.errors import (
    CheckpointError,
    ConfigError,
    DDTreeError,
    UnsupportedFormatError,
)
from tests.convert.command import refused, run
from tests.convert.sglang_fixture import (
    EXPERTS,
    INNER,
    LM,
    Saved,
    aggregate,
    config,
    hugging_face,
    presharded,
    rank_tensors,
    save,
)
from tests.convert.support import Raw, read_file, renamed, write_file

ALIAS = "self_attn.attn_mha.kv_b_proj.weight"
MOE = f"{LM}layers.1.mlp.experts."


@pytest.fixture(scope="module")
def hf() -> dict[str, Raw]:
    return hugging_face()


def check_equal(directory: Path, hf: dict[str, Raw]) -> None:
    view = open_checkpoint(directory).tensors
    assert view.keys() == hf.keys()
    for name, tensor in view.items():
        want = hf[name]
        assert (tensor.dtype, tensor.shape) == (want.dtype, want.shape), name
        data = bytearray(tensor.nbytes)
        tensor.read_into(memoryview(data), 0)
        assert bytes(data) == want.data, name


@pytest.mark.parametrize("layout", ["marlin", "raw", "triton"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_every_layout_and_number_of_ranks(tmp_path, hf, tp, layout):
    check_equal(save(tmp_path / "s", hf, Saved(tp=tp, layout=layout)), hf)


@pytest.mark.parametrize(
    "saved",
    [
        Saved(kv_b=ALIAS),
        Saved(parts=2),
        Saved(parts=7, tp=2),
        Saved(weight_shape=False),
        Saved(whole_vision=True),
        Saved(attention_dp=8),
        Saved(attention_dp=2),
        Saved(ep=8),
        Saved(ep=2, layout="raw"),
        Saved(ep=4, layout="triton", attention_dp=8),
        Saved(moe_copies=2),
        Saved(moe_copies=2, ep=2, layout="triton"),
    ],
    ids=lambda saved: "-".join(
        f"{f.name}_{getattr(saved, f.name)}"
        for f in dataclasses.fields(saved)
        if getattr(saved, f.name) != f.default
    ),
)
def test_every_way_in_which_an_engine_divides(tmp_path, hf, saved):
    check_equal(save(tmp_path / "s", hf, saved), hf)


def test_the_names_of_k2(tmp_path, hf):
    text = {name: tensor for name, tensor in hf.items() if name.startswith("lang")}
    k2 = renamed(text, text="model.", head="lm_head.")
    check_equal(save(tmp_path / "s", k2, Saved()), k2)


def test_rows_are_read_in_any_order(tmp_path, hf):
    view = open_sglang(save(tmp_path / "s", hf, Saved(tp=4))).tensors
    noise = np.random.default_rng(1)
    for which in ("gate", "up", "down"):
        for what in ("packed", "scale"):
            name = f"{MOE}5.{which}_proj.weight_{what}"
            for _ in range(20):
                first, last = sorted(noise.integers(0, len(hf[name].data), 2))
                data = bytearray(last - first)
                view[name].read_into(memoryview(data), first)
                assert bytes(data) == hf[name].data[first:last]


def edit(directory: Path, rank: int, change, part: int = 0) -> Path:
    path = directory / f"model-rank-{rank}-part-{part}.safetensors"
    tensors = read_file(path)
    change(tensors)
    write_file(path, tensors)
    return path


def flipped(tensor: Raw, at: int = 0) -> Raw:
    data = bytearray(tensor.data)
    data[at] ^= 1
    return dataclasses.replace(tensor, data=bytes(data))


def infinite(tensor: Raw) -> Raw:
    """Returns a tensor of bfloat16 or float32 whose last number is none."""
    return dataclasses.replace(tensor, data=tensor.data[:-2] + b"\x80\x7f")


def replaced(name: str, tensor_of):
    def change(tensors):
        tensors[name] = tensor_of(tensors[name])

    return change


def reading_fails(directory: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        for tensor in open_sglang(directory).tensors.values():
            read_array(tensor)


@pytest.mark.parametrize(
    ("saved", "name", "rank", "first"),
    [
        (Saved(), f"{LM}norm.weight", 5, 0),
        (Saved(), f"{LM}layers.1.mlp.gate.e_score_correction_bias", 1, 0),
        (Saved(), "vision_tower.encoder.blocks.0.attn.proj.bias", 7, 0),
        (Saved(attention_dp=8), f"{LM}layers.0.self_attn.q_b_proj.weight", 3, 0),
        (Saved(attention_dp=2), f"{LM}layers.0.self_attn.o_proj.weight", 6, 2),
        (Saved(moe_copies=2), f"{MOE}w13_weight_packed", 7, 3),
    ],
)
def test_copies_that_differ(tmp_path, hf, saved, name, rank, first):
    directory = save(tmp_path / "s", hf, saved)
    path = edit(directory, rank, replaced(name, flipped))
    reading_fails(
        directory,
        rf"{path}: {name} differs from its copy in model-rank-{first}-part-0",
    )


@pytest.mark.parametrize(
    "name",
    [
        f"{LM}layers.1.mlp.experts.w13_weight_scale",
        f"{LM}layers.1.mlp.experts.w2_weight_scale",
        f"{LM}layers.0.self_attn.q_b_proj.weight",
        f"{LM}layers.0.self_attn.o_proj.weight",
        f"{LM}layers.1.mlp.gate.e_score_correction_bias",
    ],
)
@pytest.mark.parametrize("to", ["ours", "hf", "sglang"])
def test_numbers_that_are_not_finite(tmp_path, capsys, hf, name, to):
    """The file that holds them is named, and not that of the first rank."""
    directory = save(tmp_path / "s", hf, Saved(tp=4))
    edit(directory, 2, replaced(name, infinite))
    export = ("export", directory, tmp_path / "d", "--to")
    command = {
        "ours": ("sglang", directory, tmp_path / "d"),
        "hf": (*export, "hf"),
        "sglang": (*export, "sglang", "--tp", "2"),
    }[to]
    file = directory / "model-rank-2-part-0.safetensors"
    refused(capsys, f"{file}: {name} holds NaN or infinity", *command)
    assert not (tmp_path / "d").exists()


def test_image_numbers_that_are_not_finite_are_carried(tmp_path, hf):
    name = "mm_projector.pre_norm.bias"
    bad = hf | {name: infinite(hf[name])}
    check_equal(save(tmp_path / "s", bad, Saved(tp=4)), bad)


@pytest.mark.parametrize("key", ["w13_weight_packed", "w2_weight_scale"])
def test_one_bit_of_an_expert_is_one_bit_of_the_view(tmp_path, hf, key):
    directory = save(tmp_path / "s", hf, Saved())
    edit(directory, 3, replaced(MOE + key, flipped))
    view = open_sglang(directory).tensors
    bits = 0
    for name, want in hf.items():
        have = read_array(view[name]).reshape(-1).view(np.uint8)
        bits += int(np.bitwise_count(have ^ np.frombuffer(want.data, np.uint8)).sum())
    assert bits == 1


def test_a_rank_is_missing(tmp_path, hf):
    directory = save(tmp_path / "s", hf, Saved())
    missing = directory / "model-rank-3-part-0.safetensors"
    missing.unlink()
    with pytest.raises(CheckpointError, match=f"{missing} is missing"):
        open_sglang(directory)


def test_the_last_rank_is_missing(tmp_path, hf):
    # Nothing says how many there were but the shapes.
    directory = save(tmp_path / "s", hf, Saved())
    (directory / "model-rank-7-part-0.safetensors").unlink()
    with pytest.raises(
        CheckpointError,
        match=r"embed_tokens.weight is BF16 \[128, 64\]; expected BF16 "
        r"\[1024, 64\] on 7 ranks",
    ):
        open_sglang(directory)


def test_a_part_is_missing(tmp_path, hf):
    directory = save(tmp_path / "s", hf, Saved(parts=3))
    missing = directory / "model-rank-2-part-1.safetensors"
    missing.unlink()
    with pytest.raises(CheckpointError, match=f"{missing} is missing"):
        open_sglang(directory)


def test_the_last_part_of_one_rank_is_missing(tmp_path, hf):
    directory = save(tmp_path / "s", hf, Saved(parts=3))
    (directory / "model-rank-2-part-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is of rank 0 and not of rank 2"):
        open_sglang(directory)


def test_files_of_another_name(tmp_path, hf):
    directory = save(tmp_path / "s", hf, Saved(tp=1))
    other = directory / "model-rank-01-part-0.safetensors"
    (directory / "model-rank-0-part-0.safetensors").rename(other)
    with pytest.raises(CheckpointError, match=f"{other} is no file of an SGLang"):
        open_sglang(directory)


def test_a_tensor_that_is_there_twice(tmp_path, hf):
    directory = save(tmp_path / "s", hf, Saved(tp=1, parts=2))
    name = next(iter(read_file(directory / "model-rank-0-part-0.safetensors")))

    def again(tensors):
        tensors[name] = Raw("BF16", (1,), b"\0\0")

    edit(directory, 0, again, part=1)
    with pytest.raises(CheckpointError, match=f"{name} is in .* too; expected it once"):
        open_sglang(directory)


def test_both_names_of_kv_b(tmp_path, hf):
    directory = save(tmp_path / "s", hf, Saved(tp=1))

    def both(tensors):
        name = f"{LM}layers.0.self_attn.kv_b_proj.weight"
        tensors[f"{LM}layers.0.{ALIAS}"] = tensors[name]

    edit(directory, 0, both)
    with pytest.raises(CheckpointError, match="are both there; expected one"):
        open_sglang(directory)


def test_names_that_are_left_over_or_missing(tmp_path, hf):
    directory = save(tmp_path / "s", hf, Saved(tp=2))
    norm = f"{LM}layers.0.input_layernorm.weight"

    def add(tensors):
        tensors["model.k_scale"] = Raw("F32", (1,), b"\0\0\0\0")

    def drop(tensors):
        del tensors["model.k_scale"], tensors[norm]

    edit(directory, 0, add)
    with pytest.raises(
        CheckpointError, match=r"model\.k_scale is of rank 0 and not of rank 1"
    ):
        open_sglang(directory)
    edit(directory, 1, add)
    with pytest.raises(
        CheckpointError, match=r"tensors left over \(1\): model.k_scale"
    ):
        open_sglang(directory)
    edit(directory, 0, drop)
    edit(directory, 1, drop)
    with pytest.raises(CheckpointError, match=rf"tensors missing \(1\): {norm}"):
        open_sglang(directory)


@pytest.mark.parametrize(
    ("name", "change", "match"),
    [
        (
            f"{LM}layers.0.self_attn.q_b_proj.weight",
            {"dtype": "F16"},
            r"q_b_proj.weight is F16 \[96, 32\]; expected BF16 \[96, 32\] as in "
            "model-rank-0-part-0",
        ),
        (
            f"{LM}layers.0.mlp.down_proj.weight",
            {"shape": (8, 64)},
            r"down_proj.weight is BF16 \[8, 64\]; expected BF16 \[64, 8\]",
        ),
        (
            f"{MOE}w2_weight_shape",
            {"shape": (2, EXPERTS)},
            r"w2_weight_shape is BF16 \[2, 8\]; expected BF16 \[8, 2\]",
        ),
    ],
)
def test_one_rank_has_another_kind(tmp_path, hf, name, change, match):
    directory = save(tmp_path / "s", hf, Saved(tp=2 if "q_b" in name else 8))
    edit(directory, 1, replaced(name, lambda t: dataclasses.replace(t, **change)))
    with pytest.raises(CheckpointError, match=match):
        open_sglang(directory)


@pytest.mark.parametrize(
    ("name", "shape", "match"),
    [
        (f"{LM}layers.0.input_layernorm.weight", (2, 32), r"expected BF16 \[64\]"),
        (
            f"{LM}layers.0.self_attn.q_b_proj.weight",
            (192 * 2, 8),
            r"expected BF16 \[192, 32\] or \[96, 32\]",
        ),
        (f"{MOE}w13_weight_shape", (2, EXPERTS), r"expected BF16 \[8, 2\]"),
    ],
)
def test_all_ranks_have_another_shape(tmp_path, hf, name, shape, match):
    directory = save(tmp_path / "s", hf, Saved(tp=2))
    for rank in (0, 1):
        edit(
            directory,
            rank,
            replaced(name, lambda t: Raw(t.dtype, shape, bytes(2 * np.prod(shape)))),
        )
    with pytest.raises(CheckpointError, match=match):
        open_sglang(directory)


@pytest.mark.parametrize(
    "name", ["vision_tower.patch_embed.pos_emb.weight", f"{LM}norm.weight"]
)
def test_a_scalar(tmp_path, hf, name):
    directory = save(tmp_path / "s", hf, Saved(tp=1))
    path = edit(directory, 0, replaced(name, lambda _: Raw("BF16", (), b"\0\0")))
    with pytest.raises(CheckpointError, match=f"{path}: {name} is a scalar"):
        open_sglang(directory)


@pytest.mark.parametrize(
    "name",
    ["vision_tower.encoder.blocks.0.wqkv.weight", "mm_projector.linear_3.weight"],
)
def test_an_image_tensor_of_another_model(tmp_path, hf, name):
    directory = save(tmp_path / "s", hf, Saved(tp=1))
    path = edit(
        directory, 0, lambda tensors: tensors.update({name: Raw("BF16", (1,), b"\0\0")})
    )
    with pytest.raises(CheckpointError, match=rf"{path}: tensors left over .*{name}"):
        open_sglang(directory)


@pytest.mark.parametrize("key", ["w13_weight_packed", "w2_weight_scale"])
def test_experts_that_lack_an_array(tmp_path, hf, key):
    directory = save(tmp_path / "s", hf, Saved(tp=1))
    edit(directory, 0, lambda tensors: tensors.pop(MOE + key))
    with pytest.raises(CheckpointError, match=rf"tensors missing \(1\): {MOE}{key}"):
        open_sglang(directory)


def test_padded_experts(tmp_path, hf):
    # 32 inputs a rank, padded to 64 with more rows.
    directory = save(tmp_path / "s", hf, Saved(tp=16))

    def pad(tensors):
        for key in ("w2_weight_packed", "w2_weight_scale"):
            tensor = tensors[MOE + key]
            e, rows, columns = tensor.shape
            twice = Raw(tensor.dtype, (e, 2 * rows, columns), tensor.data * 2)
            tensors[MOE + key] = twice

    for rank in range(16):
        edit(directory, rank, pad)
    with pytest.raises(
        CheckpointError,
        match=r"w2_weight_packed I32\[8, 4, 128\].* are in no layout of 16 ranks",
    ):
        open_sglang(directory)


@pytest.mark.parametrize(
    ("key", "tensor", "match"),
    [
        (
            "w13_weight_packed",
            Raw("U8", (EXPERTS, 1, 2 * INNER, 32), bytes(EXPERTS * 2 * INNER * 32)),
            r"FlashInfer's shuffled MXINT4 layout \(.*w13_weight_packed is U8 \[8, 1,",
        ),
        ("w13_weight_offset", Raw("BF16", (1,), bytes(2)), "Ascend NPU layout"),
        ("w13_weight", Raw("BF16", (1,), bytes(2)), "experts that are not INT4"),
        ("w13_weight", Raw("I32", (1,), bytes(4)), "Ascend NPU layout"),
        ("w13_weight_scale_inv", Raw("F32", (1,), bytes(4)), "FP8 experts in blocks"),
        ("w13_weight_scale_2", Raw("F32", (1,), bytes(4)), "NVFP4 experts"),
    ],
)
def test_layouts_that_are_refused_by_name(tmp_path, hf, key, tensor, match):
    directory = save(tmp_path / "s", hf, Saved(tp=1))
    path = edit(directory, 0, lambda tensors: tensors.update({MOE + key: tensor}))
    with pytest.raises(UnsupportedFormatError, match=f"{path}.*{match}"):
        open_sglang(directory)


def test_vllm_names_its_files_alike(tmp_path, hf):
    directory = save(tmp_path / "s", hf, Saved(tp=1))

    def rename(tensors):
        for name in list(tensors):
            if name.endswith("_with_mqa.weight"):
                tensors[name.replace("_with_mqa", "")] = tensors.pop(name)

    path = edit(directory, 0, rename)
    with pytest.raises(UnsupportedFormatError, match=f"{path}.*vLLM's sharded_state"):
        open_sglang(directory)


def test_a_config_that_is_refused(tmp_path, hf):
    directory = save(tmp_path / "s", hf, Saved(tp=1))
    (directory / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_sglang(directory)
    other = config()
    other["text_config"]["quantization_config"]["config_groups"]["group_0"]["weights"][
        "actorder"
    ] = "group"
    (directory / "config.json").write_text(json.dumps(other))
    with pytest.raises((ConfigError, UnsupportedFormatError), match="actorder"):
        open_sglang(directory)


def test_a_directory_with_nothing_of_sglang(tmp_path):
    with pytest.raises(CheckpointError, match="nor a presharded dump"):
        open_sglang(tmp_path)


def test_blocks_are_read_once_for_gate_and_up(tmp_path, hf, monkeypatch):
    reads = []
    real = experts.read_rows

    def counted(tensor, start, stop):
        reads.append(tensor.name)
        return real(tensor, start, stop)

    monkeypatch.setattr(experts, "read_rows", counted)
    view = open_sglang(save(tmp_path / "s", hf, Saved(tp=4))).tensors
    for which in ("gate", "up"):
        read_array(view[f"{MOE}2.{which}_proj.weight_packed"])
    assert reads == [f"{MOE}w13_weight_packed"] * 4


class TestPresharded:
    @pytest.fixture
    def dump(self, tmp_path, hf) -> Path:
        saved = Saved(tp=4)
        ranks = [rank_tensors(hf, saved, rank) for rank in range(4)]
        dump = presharded(tmp_path / "model", ranks)
        (tmp_path / "model" / "config.json").write_text(json.dumps(config()))
        return dump

    def test_is_the_view(self, dump, hf):
        check_equal(dump, hf)
        check_equal(dump.parents[1], hf)
        assert open_sglang(dump).format == "SGLang presharded of 4 ranks"

    def test_beside_the_weights_it_was_made_from(self, dump, hf):
        model = dump.parents[1]
        write_file(model / "model.safetensors", hf)
        assert open_checkpoint(model).format.startswith("Hugging Face")
        assert open_sglang(model).format.startswith("SGLang presharded of 4 ranks")

    @pytest.mark.parametrize("inner", ["", "presharded/TP-4-sig-0123456789abcdef"])
    def test_by_a_relative_path(self, dump, hf, capsys, monkeypatch, inner):
        monkeypatch.chdir(dump.parents[1] / inner)
        destination = dump.parents[2] / "ours"
        assert run(capsys, "sglang", ".", destination)[0] == 0
        check_equal(destination, hf)

    def test_not_complete(self, dump):
        (dump / "READY").unlink()
        with pytest.raises(CheckpointError, match="READY is missing"):
            open_sglang(dump)

    def test_a_file_is_missing(self, dump):
        path = dump / "model-00000-common.safetensor"
        path.unlink()
        with pytest.raises(CheckpointError, match=f"{path} is missing"):
            open_sglang(dump)

    def test_two_dumps(self, dump, hf):
        second = dump.parent / "TP-8-sig-0"
        second.mkdir()
        (second / "checksum.json").write_text("{}")
        with pytest.raises(CheckpointError, match=r"2 dumps \(TP-4.*, TP-8-sig-0\)"):
            open_sglang(dump.parents[1])

    def test_a_stored_tensor_that_nobody_reads(self, dump):
        path = dump / "model-00000-common.safetensor"
        tensors = read_file(path)
        write_file(path, tensors | {"f" * 32: Raw("BF16", (1,), b"\0\0")})
        with pytest.raises(CheckpointError, match=r"f{32} is read by no rank"):
            open_sglang(dump)

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"version": 2}, "version 2; expected 1"),
            ({"world_size": 8}, "world_size 4; expected 8"),
            ({"shard_config": {"pp": 2}}, "pipeline parallel"),
            ({"files": [{"filename": "../x.safetensor"}]}, "'../x.safetensor'"),
            ({"files": 3}, "files is 3; expected a list"),
            ({"rank_to_reads": {"0": []}}, r"ranks \['0'\]; expected 0 to 3"),
        ],
    )
    def test_a_plan_that_is_refused(self, dump, change, match):
        path = dump / "checksum.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises((CheckpointError, ConfigError), match=match):
            open_sglang(dump)

    @pytest.mark.parametrize(
        ("field", "value", "match"),
        [
            ("stored_key", "0" * 32, "rank 1: no 0{32} in"),
            ("filename", "other.safetensor", "in 'other.safetensor'"),
            ("name", "other", "rank_checksums: rank 1 has"),
            ("is_extra", 0, "expected filename, stored_key, name and is_extra"),
        ],
    )
    def test_a_read_that_is_wrong(self, dump, field, value, match):
        path = dump / "checksum.json"
        plan = json.loads(path.read_text())
        plan["rank_to_reads"]["1"][3][field] = value
        path.write_text(json.dumps(plan))
        with pytest.raises((CheckpointError, ConfigError), match=match):
            open_sglang(dump)

    def test_a_tensor_that_is_read_twice(self, dump):
        path = dump / "checksum.json"
        plan = json.loads(path.read_text())
        reads = plan["rank_to_reads"]["1"]
        reads.append(reads[0])
        plan["rank_checksums"]["1"] = aggregate(reads)
        path.write_text(json.dumps(plan))
        with pytest.raises((CheckpointError, ConfigError), match="twice"):
            open_sglang(dump)


@pytest.fixture(scope="module")
def small_dump(tmp_path_factory) -> Path:
    """A dump of two ranks with a common tensor and one of each, and no model."""
    common = Raw("BF16", (2,), b"abcd")
    own = [Raw("I32", (1,), bytes([rank] * 4)) for rank in range(2)]
    model = tmp_path_factory.mktemp("small") / "model"
    dump = presharded(model, [{"a.b": common, "c": tensor} for tensor in own])
    (model / "config.json").write_text("{}")
    return dump


@settings(max_examples=300)
@given(data=st.data())
def test_any_plan_is_read_as_it_was_or_refused(small_dump, data):
    path = small_dump / "checksum.json"
    good = path.read_text()
    want = read_presharded(small_dump)
    spoilt = node = json.loads(good)
    while True:
        keys = sorted(node) if isinstance(node, dict) else range(len(node))
        key = data.draw(st.sampled_from(list(keys)))
        inner = node[key]
        if not isinstance(inner, dict | list) or not inner or data.draw(st.booleans()):
            break
        node = inner
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
    node[key] = data.draw(plain | st.just([]) | st.just({}) | st.just([[]]))
    path.write_text(json.dumps(spoilt))
    try:
        assert read_presharded(small_dump) == want
    except DDTreeError as error:
        assert str(small_dump) in str(error) and "\n" not in str(error)
    finally:
        path.write_text(good)


def test_the_command(tmp_path, hf, capsys):
    directory = save(tmp_path / "s", hf, Saved(tp=4))
    code, out, _ = run(capsys, "sglang", directory, tmp_path / "ours")
    assert code == 0 and "bytes written" in out
    check_equal(tmp_path / "ours", hf)
    edit(directory, 2, replaced(f"{LM}norm.weight", flipped))
    refused(capsys, "differs from its copy", "sglang", directory, tmp_path / "again")
    assert not (tmp_path / "again").exists()
