"""Kernels in Pallas' GPU interpreter, of which each has to be free of races."""

import contextlib
from collections.abc import Iterator

import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, race_detection_state
from jax.experimental.pallas import mosaic_gpu as plgpu

DETECTING_RACES = plgpu.InterpretGPUParams(detect_races=True)


@contextlib.contextmanager
def no_races(*, kernels: int) -> Iterator[None]:
    """Asserts that so many kernels are interpreted inside, and no race in any.

    The interpreter keeps the findings of the last kernel only, and has to be reset
    after one that failed.
    """
    findings = []
    new = race_detection_state.GPURaceDetectionState

    def recorded(*args, **kwargs):
        findings.append(new(*args, **kwargs))
        return findings[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_callbacks, "GPURaceDetectionState", recorded)
        try:
            yield
        finally:
            gpu_callbacks.reset_gpu_interpret_mode_state()
    assert len(findings) == kernels, f"{len(findings)} kernels, expected {kernels}"
    for number, finding in enumerate(findings, 1):
        assert not finding.races_found, f"a race in kernel {number}, printed above"
