"""Owns GPTQ INT4: the same nibbles and scales as compressed-tensors', transposed.

qweight[j, o] = weight_packed[o, j]     int32    [in / 8, out]
scales[g, o]  = weight_scale[o, g]      float16 or bfloat16    [in / 32, out]
qzeros        the zero point 8 for all, stored as 8, or as 7 in the older form
g_idx[i]      i // 32, or absent; another order of groups is refused
"""

import numpy as np

from convert.formats.int4 import stated_shape
from convert.formats.marks import foreign
from convert.formats.parts import BF16, Int4, read_columns, wrong
from convert.tensor import DerivedTensor, Tensor, check_finite, read_array
from ddtree_jax.errors import CheckpointError
from ddtree_jax.quant import GROUP_SIZE, NIBBLES_PER_WORD

PARTS = frozenset(("qweight", "scales", "qzeros", "g_idx"))


class GptqWeight:
    """One weight of a GPTQ checkpoint, its shapes checked, its data not yet."""

    def __init__(self, parts: dict[str, Tensor], stored_zero: int | None):
        """Takes the tensors of a weight by the last part of their names.

        Args:
          stored_zero: What the qzeros must hold, 7 or 8; None takes either.

        Raises:
          UnsupportedFormatError: It is AWQ, or GPTQ of another form.
          CheckpointError: A part is missing or does not fit.
        """
        self.qweight = parts["qweight"]
        for part in ("scales", "qzeros"):
            if part not in parts:
                base = self.qweight.name.removesuffix("qweight")
                raise CheckpointError(f"{self.qweight.file}: {base}{part} is missing")
        self.scales, self.qzeros = parts["scales"], parts["qzeros"]
        self.g_idx = parts.get("g_idx")
        self.shape = self._check_shapes()
        self._stored_zeros = (7, 8) if stored_zero is None else (stored_zero,)
        self._data_are_checked = False

    def as_int4(self, base: str) -> Int4:
        """Returns the weight as compressed-tensors stores it, bit for bit."""
        outputs, inputs = self.shape
        name, file = f"{base}.weight", self.qweight.file
        packed = (outputs, inputs // NIBBLES_PER_WORD)
        scale = (outputs, inputs // GROUP_SIZE)
        return Int4(
            DerivedTensor(f"{name}_packed", file, "I32", packed, self._packed_rows),
            DerivedTensor(
                f"{name}_scale", self.scales.file, "BF16", scale, self._scale_rows
            ),
            stated_shape(base, file, self.shape),
        )

    def _packed_rows(self, start: int, stop: int) -> np.ndarray:
        self._check_order_and_zeros()
        return read_columns(self.qweight, start, stop).T

    def _check_shapes(self) -> tuple[int, int]:
        """Returns the shape [out, in] of the weight."""
        qweight, scales = self.qweight, self.scales
        if qweight.dtype != "I32" or len(qweight.shape) != 2:
            raise wrong(qweight, "an I32 matrix")
        if scales.dtype not in ("F16", "BF16") or len(scales.shape) != 2:
            raise wrong(scales, "an F16 or BF16 matrix")
        words, outputs = qweight.shape
        if scales.shape[1] == outputs * NIBBLES_PER_WORD:
            raise foreign(qweight, "AWQ")
        inputs = words * NIBBLES_PER_WORD
        groups = inputs // GROUP_SIZE
        if scales.shape != (groups, outputs) or inputs % GROUP_SIZE:
            kind = f"GPTQ in other groups than {GROUP_SIZE}, or not of 4 bits"
            raise foreign(scales, kind, expected=f"{[groups, outputs]}")
        zeros = (groups, outputs // NIBBLES_PER_WORD)
        if self.qzeros.dtype != "I32" or self.qzeros.shape != zeros:
            raise wrong(self.qzeros, f"I32 {list(zeros)}")
        if self.g_idx is not None and (
            self.g_idx.dtype != "I32" or self.g_idx.shape != (inputs,)
        ):
            raise wrong(self.g_idx, f"I32 {[inputs]}")
        return outputs, inputs

    def _check_order_and_zeros(self) -> None:
        """Raises unless the groups are in order and all zero points are 8."""
        if self._data_are_checked:
            return
        if self.g_idx is not None:
            order = np.arange(self.shape[1]) // GROUP_SIZE
            if (read_array(self.g_idx) != order).any():
                kind = "GPTQ with activation order"
                raise foreign(self.g_idx, kind, expected="groups in order, i // 32")
        found = np.unique(read_array(self.qzeros))
        if not any(np.array_equal(found, [_word(z)]) for z in self._stored_zeros):
            stored = " or ".join(map(str, self._stored_zeros))
            expected = f"the zero point 8 for all, stored as {stored}"
            raise foreign(self.qzeros, "asymmetric INT4 (GPTQ)", expected=expected)
        self._data_are_checked = True

    def _scale_rows(self, start: int, stop: int) -> np.ndarray:
        stored = read_columns(self.scales, start, stop)
        check_finite(stored, self.scales)
        scale = stored.astype(BF16)
        wrong_at = np.argwhere(scale.astype(np.float32) != stored.astype(np.float32))
        if wrong_at.size:
            row, column = wrong_at[0]
            raise CheckpointError(
                f"{self.scales.file}: {self.scales.name} holds "
                f"{float(stored[row, column])!r} at {[int(row), int(column) + start]}; "
                "expected float16 values that bfloat16 holds exactly, as those of a "
                "checkpoint with bfloat16 scales are"
            )
        return scale.T


def _word(nibble: int) -> np.int32:
    """Returns the word of eight times `nibble`."""
    return np.uint32(nibble * 0x11111111).view(np.int32)
