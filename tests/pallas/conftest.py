"""Skips, with what would run it, a test whose machine is not here."""

import jax
import pytest


@pytest.fixture
def machine(request) -> str:
    """Where the kernel runs."""
    if request.param == "gpu" and jax.default_backend() != "gpu":
        pytest.skip("needs one Hopper GPU: JAX_PLATFORMS=cuda scripts/test -m gpu")
    if request.param != "gpu" and jax.default_backend() != "cpu":
        pytest.skip("runs on a CPU: scripts/test tests/pallas")
    return request.param
