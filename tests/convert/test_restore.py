"""What was converted comes back bit for bit, on any mesh, or is refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from orbax.checkpoint import v1 as ocp_v1

from ddtree_jax.errors import CheckpointError, ConfigError, DDTreeError
from ddtree_jax.mesh import make_mesh, partition_spec
from ddtree_jax.model.params import named_parameters
from ddtree_jax.model.restore import restore_draft, restore_target
from tests.convert.inverse import draft_to_hugging_face, to_hugging_face
from tests.convert.support import TINY_DRAFT, read_checkpoint


def arrays(model) -> dict[str, np.ndarray]:
    return {path: np.asarray(p[...]) for path, p in named_parameters(model).items()}


def assert_same_bits(got: dict[str, np.ndarray], tensors) -> None:
    assert got.keys() == tensors.keys()
    for name, array in got.items():
        tensor = tensors[name]
        assert array.dtype == tensor.array().dtype, name
        assert array.shape == tensor.shape, name
        assert array.tobytes() == tensor.data, name


@pytest.mark.parametrize("devices", [1, 8])
def test_target_round_trip(converted, tensors, devices):
    mesh = make_mesh(devices)
    config, model = restore_target(converted, mesh, dtype=jnp.bfloat16)
    language = {n: t for n, t in tensors.items() if n.startswith("language_model.")}
    got = to_hugging_face(arrays(model), config.first_k_dense_replace)
    assert_same_bits(got, language)
    for p in named_parameters(model).values():
        assert p[...].sharding.mesh == mesh
        assert p[...].sharding.spec == partition_spec(p.axes)


@pytest.mark.parametrize("devices", [1, 8])
def test_draft_round_trip(converted, devices):
    _, model = restore_draft(converted / "draft", make_mesh(devices), dtype="bfloat16")
    tensors = read_checkpoint(TINY_DRAFT)
    assert_same_bits(draft_to_hugging_face(arrays(model)), tensors)


def test_float32_widens_all_but_the_scales(converted):
    mesh = make_mesh(8)
    _, narrow = restore_target(converted, mesh, dtype=jnp.bfloat16)
    _, wide = restore_target(converted, mesh, dtype=jnp.float32)
    wide_arrays = arrays(wide)
    for path, array in arrays(narrow).items():
        widened = array.dtype == jnp.bfloat16 and not path.endswith("/scale")
        expected = array.astype(np.float32) if widened else array
        assert wide_arrays[path].dtype == expected.dtype, path
        np.testing.assert_array_equal(wide_arrays[path], expected)


def test_knobs(converted):
    mesh = make_mesh(1)
    config, _ = restore_target(converted, mesh, dtype="bfloat16", latent_norm_eps=1e-5)
    assert config.latent_norm_eps == 1e-5
    draft, _ = restore_draft(
        converted / "draft", mesh, dtype="bfloat16", rope_amplitude=1.0
    )
    assert draft.rope_amplitude == 1.0


@pytest.mark.parametrize("reader", ["standard", "pytree", "v1"])
@pytest.mark.filterwarnings("ignore:.*TensorStore data files not found.*")
def test_orbax_reads_it_without_our_help(converted, tensors, reader):
    path = (converted / "params").absolute()
    if reader == "standard":
        tree = ocp.StandardCheckpointer().restore(path)
    elif reader == "pytree":
        tree = ocp.PyTreeCheckpointer().restore(path)
    else:
        tree = ocp_v1.load(path)
    expert = tensors[
        "language_model.model.layers.2.mlp.experts.5.gate_proj.weight_packed"
    ]
    got = np.asarray(tree["moe"]["experts"]["gate"]["packed"][1, 5])
    assert got.tobytes() == expert.data
    assert len(jax.tree.leaves(tree)) == 37


def test_extra_tensors_bit_for_bit(converted, tensors):
    extra = ocp.StandardCheckpointer().restore((converted / "extra").absolute())
    expected = {n: t for n, t in tensors.items() if not n.startswith("language_model.")}
    assert_same_bits({n: np.asarray(a) for n, a in extra.items()}, expected)


@pytest.fixture
def copy(converted, tmp_path):
    """A checkpoint to spoil."""
    return shutil.copytree(converted, tmp_path / "copy")


def refused(
    directory, match: str, kind: type[DDTreeError] = CheckpointError, devices=1
):
    with pytest.raises(kind, match=match) as info:
        restore_target(directory, make_mesh(devices), dtype=jnp.bfloat16)
    assert "\n" not in str(info.value)


def edit(path, **changes) -> None:
    values = json.loads(path.read_text())
    values.update(changes)
    path.write_text(json.dumps(values))


def test_incomplete(copy):
    (copy / "manifest.json").unlink()
    refused(copy, "has no manifest.json: it is not a ddtree_jax-checkpoint, or its")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"format": "other"}, "expected format 'ddtree_jax-checkpoint'"),
        ({"version": 1}, "version 1; expected 2; convert the source again"),
        ({"kind": "draft"}, "kind 'draft'; expected 'target'"),
        (
            {"tensors": {}},
            "dense/attention/input_norm is missing; config.json does not",
        ),
        ({"tensors": None}, "tensors is missing; expected an object"),
    ],
)
def test_manifest_that_does_not_fit(copy, changes, match):
    edit(copy / "manifest.json", **changes)
    refused(copy, match)


def test_manifest_that_is_cut(copy):
    path = copy / "manifest.json"
    path.write_text(path.read_text()[:-9])
    refused(copy, "manifest.json cannot be read: ")


def test_draft_is_no_target(copy):
    refused(copy / "draft", "kind 'draft'; expected 'target'")
    with pytest.raises(CheckpointError, match="kind 'target'; expected 'draft'"):
        restore_draft(copy, make_mesh(1), dtype=jnp.bfloat16)


def test_config_of_another_model(copy, config):
    config["text_config"]["vocab_size"] = 1024
    (copy / "config.json").write_text(json.dumps(config))
    refused(copy, r"embed is bfloat16 \[\d+, 128\]; expected bfloat16 \[1024, 128\]")


CHUNK = "params/moe.experts.gate.packed/c/1/0/3/0"


def test_missing_chunk(copy):
    (copy / CHUNK).unlink()
    refused(copy, f"{CHUNK} is missing; the manifest names it")


def test_truncated_chunk(copy):
    (copy / CHUNK).write_bytes((copy / CHUNK).read_bytes()[:-1])
    refused(copy, f"{CHUNK} has 32767 bytes; expected 32768")


def test_missing_array(copy):
    shutil.rmtree(copy / "params/norm")
    refused(copy, "params/norm/zarr.json is missing; the manifest names it")


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (
            "[128]",
            "[64]",
            r"says \('bfloat16', \[64\], \[64\]\); expected \('bfloat16', ",
        ),
        ("bfloat16", "float16", "says .'float16'"),
        ("{", "[", "is not a zarr3 array's"),
        ("data_type", "type", "is not a zarr3 array's: KeyError"),
    ],
)
def test_array_that_is_not_as_the_manifest_says(copy, old, new, match):
    path = copy / "params/norm/zarr.json"
    path.write_text(path.read_text().replace(old, new))
    refused(copy, f"params/norm/zarr.json {match}")


def test_orbax_metadata_that_is_missing(copy):
    (copy / "params/_METADATA").unlink()
    refused(copy, "params cannot be restored: ")


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("num_attention_heads", 4, "num_attention_heads = 4 does not split over 8"),
        ("moe_intermediate_size", 128, "moe_intermediate_size = 128 does not split"),
        ("vocab_size", 1028, "vocab_size = 1028 does not split over 8 devices"),
    ],
)
def test_mesh_that_does_not_divide(copy, config, key, value, match):
    text = config["text_config"]
    text[key] = value
    if key == "num_attention_heads":
        text["num_key_value_heads"] = value
    (copy / "config.json").write_text(json.dumps(config))
    refused(copy, match, ConfigError, devices=8)
