"""Any checkpoint written as SGLang saves it: rank files equal to independent ones."""

import contextlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from convert.detect import open_checkpoint
from convert.progress import make_reporter
from convert.sglang import target
from convert.sglang.target import convert_to_sglang
from convert.sglang.write import write_ranks
from convert.staging import staged
from convert.tensor import DerivedTensor
from convert.verify import verify
from ddtree_jax.errors import CheckpointError, ConfigError
from tests.convert.command import ROOT, refused, run, shell
from tests.convert.sglang_fixture import (
    BF16,
    LM,
    Saved,
    config,
    hugging_face,
    rank_tensors,
    save,
)
from tests.convert.support import (
    TINY,
    TINY_DRAFT,
    Raw,
    read_file,
    renamed,
    write_checkpoint,
)

PART = 10**9
LAYOUTS = ["marlin", "raw", "triton"]


@pytest.fixture(scope="module")
def hf() -> dict[str, Raw]:
    return hugging_face()


@pytest.fixture(scope="module")
def source(tmp_path_factory, hf) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("hf") / "hf", hf, config())


def export(source: Path, destination: Path, **options) -> Path:
    options = {"draft": None, "part_bytes": PART} | options
    convert_to_sglang(open_checkpoint(source), destination, **options)
    return destination


def ranks_of(directory: Path, count: int) -> list[dict[str, Raw]]:
    out = []
    for rank in range(count):
        own: dict[str, Raw] = {}
        for path in directory.glob(f"model-rank-{rank}-part-*.safetensors"):
            own |= read_file(path)
        out.append(own)
    return out


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_rank_files_are_those_of_the_independent_writer(
    tmp_path, source, hf, tp, layout
):
    made = export(source, tmp_path / "s", tp=tp, layout=layout)
    saved = Saved(tp=tp, layout=layout)
    for rank, own in enumerate(ranks_of(made, tp)):
        want = rank_tensors(hf, saved, rank)
        assert own.keys() == want.keys()
        assert [name for name in want if own[name] != want[name]] == []
    files = {path.name for path in made.iterdir()}
    assert files == {"config.json"} | {
        f"model-rank-{rank}-part-0.safetensors" for rank in range(tp)
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_there_and_back(tmp_path, capsys, source, tp, layout):
    sglang, ours, back = (tmp_path / name for name in ("sglang", "ours", "back"))
    flags = ("--to", "sglang", "--tp", tp, "--layout", layout)
    assert run(capsys, "export", source, sglang, *flags)[0] == 0
    assert run(capsys, "sglang", sglang, ours)[0] == 0
    assert run(capsys, "export", ours, back, "--to", "hf")[0] == 0
    assert run(capsys, "verify", source, back)[0] == 0
    for path in sorted(source.glob("*.json")):
        if path.name == "config.json":
            assert (back / path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("key", ["w13_weight_packed", "w2_weight_scale"])
def test_verify_sees_one_bit(tmp_path, capsys, source, key):
    made = export(source, tmp_path / "s", tp=4)
    assert run(capsys, "verify", source, made)[0] == 0
    spoil(made / "model-rank-2-part-0.safetensors", f"{LM}layers.1.mlp.experts.{key}")
    code, out, _ = run(capsys, "verify", source, made)
    # The last byte is of the last expert.
    what = key.replace("w13", "up_proj.").replace("w2", "down_proj.").replace("._", ".")
    assert code == 1 and f"{LM}layers.1.mlp.experts.7.{what}" in out


def spoil(path: Path, name: str) -> None:
    """Changes one bit, in the last byte of a tensor."""
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start + json.loads(content[8:start])[name]["data_offsets"][1] - 1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(("tp", "ep"), [(8, 8), (8, 2), (4, 2)])
def test_experts_in_groups(tmp_path, source, hf, tp, ep):
    made = export(source, tmp_path / "s", tp=tp, ep=ep)
    for rank, own in enumerate(ranks_of(made, tp)):
        assert own == rank_tensors(hf, Saved(tp=tp, ep=ep), rank)
    assert verify(source, made)


def test_from_another_layout_and_number_of_ranks(tmp_path, hf, source):
    first = save(tmp_path / "first", hf, Saved(tp=16, layout="triton"))
    second = export(first, tmp_path / "second", tp=2, layout="marlin")
    third = export(source, tmp_path / "third", tp=2, layout="marlin")
    assert ranks_of(second, 2) == ranks_of(third, 2)


@pytest.mark.parametrize(
    ("text", "head", "name"),
    [
        ("model.", "lm_head.", "model."),
        ("model.language_model.", "lm_head.", LM),
        ("language_model.", "language_model.lm_head.", LM),
    ],
)
def test_every_prefix(tmp_path, hf, text, head, name):
    own = {key: tensor for key, tensor in hf.items() if key.startswith("lang")}
    directory = write_checkpoint(
        tmp_path / "hf", renamed(own, text=text, head=head), config()
    )
    (rank,) = ranks_of(export(directory, tmp_path / "s", tp=1), 1)
    assert rank[f"{name}norm.weight"] == hf[f"{LM}norm.weight"]
    assert ("lm_head.weight" in rank) == (name == "model.")


def test_several_parts(tmp_path, source):
    whole = export(source, tmp_path / "whole", tp=2)
    parts = export(source, tmp_path / "parts", tp=2, part_bytes=100_000)
    assert len(list(parts.glob("model-rank-1-part-*.safetensors"))) > 5
    assert ranks_of(parts, 2) == ranks_of(whole, 2)
    for path in parts.glob("*.safetensors"):
        tensors = read_file(path)
        size = sum(len(tensor.data) for tensor in tensors.values())
        assert size <= 100_000 or len(tensors) == 1


def test_every_tensor_is_aligned(tmp_path):
    noise = np.random.default_rng(0)
    odd, wide = noise.standard_normal(3).astype(BF16), np.ones(2, np.float32)
    ranks = [
        [
            DerivedTensor("odd", tmp_path, "BF16", (3,), partial(_rows, odd)),
            DerivedTensor("wide", tmp_path, "F32", (2,), partial(_rows, wide)),
        ]
    ]
    reporting = contextlib.closing(make_reporter("writing", 14))
    with staged(tmp_path / "s", {}) as staging, reporting as reporter:
        write_ranks(staging.directory, ranks, PART, staging, reporter)
    path = tmp_path / "s" / "model-rank-0-part-0.safetensors"
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    assert (start + header["wide"]["data_offsets"][0]) % 4 == 0
    assert read_file(path)["odd"].data == odd.tobytes()


def _rows(array: np.ndarray, start: int, stop: int) -> np.ndarray:
    return array[start:stop]


def test_files_go_along(tmp_path):
    made = export(TINY, tmp_path / "s", tp=2)
    for name in ("config.json", "tiktoken.model", "chat_template.jinja"):
        assert (made / name).read_bytes() == (TINY / name).read_bytes()
    assert not (made / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("tp", [1, 8, 16])
def test_a_drafter_and_back(tmp_path, tp):
    made = export(TINY_DRAFT, tmp_path / "s", tp=tp)
    assert verify(TINY_DRAFT, made)
    arrays = {
        name: tensor.array()
        for name, tensor in read_file(TINY_DRAFT / "model.safetensors").items()
    }
    a = "layers.1.self_attn."
    for rank, own in enumerate(ranks_of(made, tp)):
        q = np.split(arrays[f"{a}q_proj.weight"], tp)[rank]
        # 8 heads of keys and values: of 16 ranks, two neighbours have the same.
        number = rank * min(tp, 8) // tp
        k, v = (
            np.split(arrays[f"{a}{w}_proj.weight"], min(tp, 8))[number] for w in "kv"
        )
        have = own[f"{a}qkv_proj.weight"].array()
        np.testing.assert_array_equal(have, np.concatenate([q, k, v]))
        o = np.split(arrays[f"{a}o_proj.weight"], tp, axis=1)[rank]
        np.testing.assert_array_equal(own[f"{a}o_proj.weight"].array(), o)
        gate = np.split(arrays["layers.0.mlp.gate_proj.weight"], tp)[rank]
        up = np.split(arrays["layers.0.mlp.up_proj.weight"], tp)[rank]
        have = own["layers.0.mlp.gate_up_proj.weight"].array()
        np.testing.assert_array_equal(have, np.concatenate([gate, up]))
        np.testing.assert_array_equal(own["fc.weight"].array(), arrays["fc.weight"])


def test_copies_of_a_drafters_heads_are_compared(tmp_path):
    made = export(TINY_DRAFT, tmp_path / "s", tp=16)
    path = made / "model-rank-5-part-0.safetensors"
    name = "layers.1.self_attn.qkv_proj.weight"
    spoil(path, name)
    with pytest.raises(CheckpointError, match=f"{path}: {name} differs from its copy"):
        verify(TINY_DRAFT, made)


def test_a_drafter_goes_along(tmp_path, capsys):
    ours, made, back = tmp_path / "ours", tmp_path / "s", tmp_path / "back"
    assert run(capsys, "hf", TINY, ours, "--draft", TINY_DRAFT)[0] == 0
    assert run(capsys, "export", ours, made, "--to", "sglang", "--tp", 2)[0] == 0
    assert (made / "draft" / "model-rank-1-part-0.safetensors").exists()
    assert run(capsys, "sglang", made, back, "--draft", made / "draft")[0] == 0
    assert run(capsys, "verify", ours, back)[0] == 0
    assert run(capsys, "verify", TINY_DRAFT, back / "draft")[0] == 0


@pytest.mark.parametrize(
    ("tp", "options", "match"),
    [
        (3, {}, r"vocab_size 1024 does not divide by 64 and by 3 ranks"),
        (32, {}, r"layers.0.self_attn.q_b_proj.weight has 16 heads or rows, which 32"),
        (8, {"ep": 3}, "--ep 3 does not divide --tp 8"),
        (16, {"ep": 16}, "n_routed_experts 8 by ep 16: it does not divide"),
    ],
)
def test_dimensions_that_do_not_divide(tmp_path, source, tp, options, match):
    with pytest.raises(ConfigError, match=match):
        export(source, tmp_path / "s", tp=tp, **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("tp", "match"),
    [
        (8, r"vision_tower.encoder.blocks.0.wqkv.*has 2 heads or rows, which 8 ranks"),
        (16, r"self_attn.q_b_proj.weight has 8 heads or rows, which 16 ranks"),
    ],
)
def test_heads_of_the_golden_checkpoint(tmp_path, tp, match):
    with pytest.raises(ConfigError, match=match):
        export(TINY, tmp_path / "s", tp=tp)


def test_widths_that_the_layout_cannot_cut(tmp_path, capsys):
    directory = tmp_path / "hf"
    text = {k: t for k, t in hugging_face().items() if k.startswith("lang")}
    small = config()
    small["text_config"]["moe_intermediate_size"] = 256
    made = {}
    for name, tensor in text.items():
        if "experts" in name:
            a = tensor.array()
            down = "down_proj" in name
            if name.endswith("_shape"):
                a = np.where(a == 512, 256, a).astype(np.int32)
            elif down:
                a = np.ascontiguousarray(a[:, : a.shape[1] // 2])
            else:
                a = a[:256]
            tensor = Raw(tensor.dtype, a.shape, a.tobytes())
        made[name] = tensor
    write_checkpoint(directory, made, small)
    flags = ("--to", "sglang", "--tp", "16")
    refused(
        capsys,
        "moe_intermediate_size 256 by 16 ranks × 32: it does not divide",
        "export",
        directory,
        tmp_path / "s",
        *flags,
    )


def test_values_that_are_not_finite(tmp_path, hf):
    name = f"{LM}layers.1.mlp.experts.3.down_proj.weight_scale"
    scale = hf[name].array().copy()
    scale[5, 3] = np.inf
    spoilt = hf | {name: Raw("BF16", scale.shape, scale.tobytes())}
    directory = write_checkpoint(tmp_path / "hf", spoilt, config())
    file = next(f for f in directory.glob("*.safetensors") if name in read_file(f))
    with pytest.raises(CheckpointError, match=f"^{file}: {name} holds NaN or infinity"):
        export(directory, tmp_path / "s", tp=4)
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}


def test_disk_that_is_full(tmp_path, source):
    flags = ("--to", "sglang", "--tp", "2")
    limit = "ulimit -f 300"
    done = shell("export", source, tmp_path / "s", *flags, limit=limit)
    assert done.returncode == 1, done.stderr
    assert "model-rank-" in done.stderr and "not written: File too la" in done.stderr
    assert "Traceback" not in done.stderr and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        "multi_modal_projector.linear_1.weight",
        "mm_projector.linear_1.weight",
        "model.vision_tower.encoder.final_layernorm.weight",
        "vision_tower.encoder.blocks.0.attn.q_proj.weight",
    ],
)
def test_images_of_another_model(tmp_path, hf, name):
    directory = write_checkpoint(
        tmp_path / "hf", hf | {name: hf["mm_projector.proj.2.bias"]}, config()
    )
    with pytest.raises(CheckpointError, match=f"{name} has no place in SGLang's model"):
        export(directory, tmp_path / "s", tp=1)


def test_a_source_that_changes_meanwhile(tmp_path, hf, monkeypatch):
    directory = write_checkpoint(tmp_path / "hf", hf, config())
    write = target.write_ranks

    def write_and_touch(*arguments):
        write(*arguments)
        os.utime(next(directory.glob("*.safetensors")), (0, 0))

    monkeypatch.setattr(target, "write_ranks", write_and_touch)
    with pytest.raises(CheckpointError, match=f"{directory} has changed meanwhile"):
        export(directory, tmp_path / "s", tp=1)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (("--to", "hf", "--tp", "2"), "--tp goes with --to sglang"),
        (("--to", "hf", "--layout", "raw"), "--layout goes with --to sglang"),
        (("--to", "sglang"), "--to sglang needs --tp"),
    ],
)
def test_flags_that_do_not_go_together(tmp_path, capsys, flags, match):
    code, _, err = run(capsys, "export", TINY, tmp_path / "s", *flags)
    assert code == 2 and match in err


def test_a_stopped_export_goes_on(tmp_path, source):
    whole = export(source, tmp_path / "whole", tp=4, part_bytes=60_000)
    made = tmp_path / "made"
    flags = ("--to", "sglang", "--tp", "4", "--part-bytes", "60000")
    # Killed as soon as a part has been noted.
    program = (
        "import os, signal\n"
        "from convert.journal import Journal\n"
        "note = Journal.note\n"
        "def noted(self, notes):\n"
        "    note(self, notes)\n"
        "    if 'part-2' in notes[0][0]: os.kill(os.getpid(), signal.SIGKILL)\n"
        "Journal.note = noted\n"
        "from convert.__main__ import main\n"
        f"main(['export', {str(source)!r}, {str(made)!r}, *{flags!r}])\n"
    )
    died = subprocess.run([sys.executable, "-c", program], cwd=ROOT)
    assert died.returncode == -9 and not made.exists()
    name = "model-rank-3-part-2.safetensors"
    written = (tmp_path / ".made.converting" / "made" / name).stat().st_mtime_ns
    again = subprocess.run(
        [sys.executable, "-m", "convert", "export", str(source), str(made), *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert again.returncode == 0 and "going on with" in again.stderr
    assert (made / name).stat().st_mtime_ns == written
    assert ranks_of(made, 4) == ranks_of(whole, 4)
