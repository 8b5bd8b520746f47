"""Owns which GPUs the kernels are written for."""

from typing import Any

import jax

# Compute capabilities: of an H200, and of an RTX PRO 6000.
KNOWN = {"9.0", "12.0"}


def compute_capability() -> str | None:
    """Returns that of the GPUs, or None: no kernels for it, or they differ.

    They are the GPU that `jax.default_device` names, which need not be there, or else
    all of this process.
    """
    named: Any = jax.config.jax_default_device
    if hasattr(named, "compute_capability"):
        devices = [named]
    else:
        try:
            devices = jax.local_devices(backend="cuda")
        except RuntimeError:
            devices = []
    found = {device.compute_capability for device in devices}
    return found.pop() if len(found) == 1 and found <= KNOWN else None
