"""SGLang's expert layouts against their construction in steps and published hashes."""

import hashlib

import numpy as np
import pytest

from convert.sglang.layouts import LAYOUTS, MARLIN, RAW, TRITON
from tests.convert.sglang_fixture import BF16, PACK, SCALES, nibbles

SHAPES = [(64, 32), (64, 64), (128, 32), (192, 96), (320, 160), (64, 2048)]


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def golden() -> np.ndarray:
    """Returns words [128, 8] of u[n, k] = (7 k + 3 n) mod 16."""
    n, k = np.arange(128)[:, None], np.arange(64)
    u = (7 * k + 3 * n) % 16
    eights = u.reshape(128, 8, 8) << (4 * np.arange(8))
    return eights.sum(-1).astype(np.uint32).view(np.int32)


def random_words(outputs: int, inputs: int) -> np.ndarray:
    noise = np.random.default_rng(outputs + inputs)
    shape = (outputs, inputs // 8)
    return noise.integers(-(2**31), 2**31, shape).astype(np.int32)


def random_scales(outputs: int, inputs: int) -> np.ndarray:
    noise = np.random.default_rng(outputs + inputs)
    return noise.standard_normal((outputs, inputs // 32)).astype(BF16)


def test_the_golden_weight():
    words = golden()
    assert digest(words) == "3e4d2487ad4dc16b"
    assert digest(RAW.packed.encode(words)) == "17682ab2a99fcfd8"
    marlin = MARLIN.packed.encode(words)
    assert marlin.shape == (4, 256)
    assert [hex(w) for w in marlin.view(np.uint32)[0, :4]] == ["0x7ff70880"] * 4
    assert digest(marlin) == "18c9ced61c35066d"


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_packed_is_the_construction_in_steps(layout, outputs, inputs):
    form, words = LAYOUTS[layout].packed, random_words(outputs, inputs)
    block = form.encode(words)
    assert block.shape == form.shape(outputs, inputs)
    np.testing.assert_array_equal(block, PACK[layout](nibbles(words).T))
    np.testing.assert_array_equal(form.decode(block), words)


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_scales_are_the_construction_in_steps(layout, outputs, inputs):
    form, scales = LAYOUTS[layout].scale, random_scales(outputs, inputs)
    block = form.encode(scales)
    assert block.shape == form.shape(outputs, inputs)
    np.testing.assert_array_equal(block, SCALES[layout](scales.T))
    np.testing.assert_array_equal(form.decode(block), scales)


def test_a_weight_larger_than_a_block_of_tiles():
    # 112 tiles of depth 16 are more than are worked on at a time.
    words = random_words(7168, 256)
    block = MARLIN.packed.encode(words)
    np.testing.assert_array_equal(block, PACK["marlin"](nibbles(words).T))
    np.testing.assert_array_equal(MARLIN.packed.decode(block), words)


@pytest.mark.parametrize("layout", list(LAYOUTS.values()), ids=list(LAYOUTS))
def test_runs_of_outputs_are_decoded_alone(layout):
    words, scales = random_words(256, 64), random_scales(256, 64)
    for form, whole in ((layout.packed, words), (layout.scale, scales)):
        part = form.outputs(form.encode(whole), 64, 192)
        np.testing.assert_array_equal(form.decode(part), whole[64:192])


def test_arguments_are_not_changed():
    words = random_words(64, 64)
    words.flags.writeable = False
    for layout in (MARLIN, RAW, TRITON):
        block = layout.packed.encode(words)
        block.flags.writeable = False
        layout.packed.decode(block)
