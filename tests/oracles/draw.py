"""Reproducible random numbers. Does not know what they are used for.

Every array has its own seed, derived from its name, so that adding or removing
one changes no other. Values are uniform and come from PCG64's raw doubles: no
logarithm or cosine of the C library is involved, so the same bits come out on
every machine.
"""

import hashlib
import math

import numpy as np
import torch

_SQRT3 = math.sqrt(3.0)


class Draw:
    """A family of random arrays, told apart by name."""

    def __init__(self, seed: str):
        self._seed = seed

    def _generator(self, name: str) -> np.random.Generator:
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "big")))

    def array(self, name: str, shape, *, std: float, mean: float = 0.0) -> np.ndarray:
        """Returns float64 values, uniform with that mean and deviation."""
        unit = self._generator(name).random(shape)
        return mean + (2.0 * unit - 1.0) * (std * _SQRT3)

    def float32(self, name: str, shape, *, std: float, mean: float = 0.0):
        """Returns the same as `array`, as a float32 tensor."""
        values = self.array(name, shape, std=std, mean=mean)
        return torch.from_numpy(values).to(torch.float32)

    def bfloat16(self, name: str, shape, *, std: float, mean: float = 0.0):
        """Returns the same as `array`, rounded to a bfloat16 tensor."""
        return self.float32(name, shape, std=std, mean=mean).to(torch.bfloat16)

    def integers(self, name: str, shape, *, below: int) -> np.ndarray:
        """Returns int64 values in 0 .. below - 1."""
        return (self._generator(name).random(shape) * below).astype(np.int64)
