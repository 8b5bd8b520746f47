"""Where a kernel's tests run: in the interpreter, on a CPU, and on a GPU.

A test runs on the `machine` that its parameter names. The GPU's need one; there they
are run by `JAX_PLATFORMS=cuda scripts/test -m gpu`.
"""

import pytest

INTERPRETER = pytest.param("interpreter", id="interpreter")
GPU = pytest.param("gpu", id="gpu", marks=pytest.mark.gpu)
# The interpreter multiplies with NumPy.
quiet_arithmetic = pytest.mark.filterwarnings(
    "ignore:(invalid value|overflow) encountered:RuntimeWarning"
)
on_every_machine = pytest.mark.parametrize("machine", [INTERPRETER, GPU], indirect=True)
