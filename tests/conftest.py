"""Strict JAX on eight virtual CPU devices, and the tiny models that tests share."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

from pathlib import Path

import hypothesis
import numpy as np
import pytest

from ddtree_jax.mesh import make_mesh
from tests.support.models import Tiny, load_tiny

GOLDEN = Path(__file__).parent / "golden"

# In CI the same examples every time; at home new ones, which may find something.
# No deadlines: the first example of a jitted function compiles.
hypothesis.settings.register_profile(
    "project", deadline=None, derandomize="CI" in os.environ
)
hypothesis.settings.load_profile("project")


@pytest.fixture(scope="session")
def golden():
    """Reads a golden file by name; read-only arrays."""

    def read(name: str) -> dict[str, np.ndarray]:
        with np.load(GOLDEN / f"{name}.npz") as data:
            return dict(data)

    return read


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory) -> Path:
    """The golden target with its drafter, converted by the real command."""
    from convert.__main__ import main

    destination = tmp_path_factory.mktemp("checkpoints") / "tiny"
    source, draft = GOLDEN / "tiny_k26", GOLDEN / "tiny_draft"
    assert main(["hf", str(source), str(destination), "--draft", str(draft)]) == 0
    return destination


@pytest.fixture(scope="session")
def tiny1(tiny_checkpoint) -> Tiny:
    """Both golden models in float32 on one device."""
    return load_tiny(tiny_checkpoint, make_mesh(1))


@pytest.fixture(scope="session")
def tiny8(tiny_checkpoint) -> Tiny:
    """Both golden models in float32, split over eight devices."""
    return load_tiny(tiny_checkpoint, make_mesh(8))


@pytest.fixture(scope="session", params=[1, 8], ids=["1_device", "8_devices"])
def tiny(request) -> Tiny:
    """Both golden models in float32, on one and on eight devices."""
    return request.getfixturevalue(f"tiny{request.param}")
