"""Owns the bits of Marlin's INT4 layout (no activation order), both ways.

One weight, with N outputs and K inputs, is int32 [K / 16, 2 N]. Word

    T, 128 J + 4 lane + w        J = tile of 64 outputs, lane 0 .. 31, w 0 .. 3

holds, from its lowest nibble on, the inputs k and outputs n

    n, k0   n, k8   n+8, k0   n+8, k8   n, k1   n, k9   n+8, k1   n+8, k9

    where n = 64 J + 16 w + lane / 4   and   ki = 16 T + 2 (lane mod 4) + i.

A word of the Hugging Face form has eight inputs of one output, so four words of a
lane quadruple (c = lane mod 4) hold exactly the four words of outputs n and n + 8 and
of inputs 16 T .. + 7 and .. + 15. With five bits as address of a nibble among four
words, two for the word and three for the place, the change is

    word (c1 c0), place (o h i)    →    word (h i), place (c1 c0 o)

o: the odd input of a pair; h: output n + 8; i: the second eight inputs. It takes
three exchanges of an address bit of the word with one of the place.
"""

import numpy as np

_TILE = 64
# Words of a block of tiles: it stays in a processor's own cache.
_BLOCK_WORDS = 1 << 17
# For an address bit of the place: how far apart its nibbles are, and which are 0 in it.
_BIT = {
    0: (np.uint32(4), np.uint32(0x0F0F0F0F)),
    1: (np.uint32(8), np.uint32(0x00FF00FF)),
    2: (np.uint32(16), np.uint32(0x0000FFFF)),
}


def decode(block: np.ndarray) -> np.ndarray:
    """Returns the Hugging Face words [N, K / 8] of Marlin words [K / 16, 2 N]."""
    depth, tiles = block.shape[0], block.shape[1] // (2 * _TILE)
    words = block.view(np.uint32).reshape(depth, tiles, 8, 4, 4)  # T J row c w
    out = np.empty((tiles, 4, 2, 8, depth, 2), np.uint32)  # J w h row T i
    for group in _groups(depth, tiles):
        near = np.ascontiguousarray(words[:, group])
        c = np.ascontiguousarray(near.transpose(3, 1, 4, 2, 0))  # c J w row T
        scratch = np.empty_like(c[0])
        _exchange(c[0], c[2], 2, scratch)
        _exchange(c[1], c[3], 2, scratch)
        _exchange(c[0], c[2], 0, scratch)
        _exchange(c[1], c[3], 0, scratch)
        _exchange(c[0], c[1], 1, scratch)
        _exchange(c[2], c[3], 1, scratch)
        for number, words_of in enumerate((c[0], c[2], c[1], c[3])):
            out[group, :, number // 2, :, :, number % 2] = words_of
    return out.reshape(tiles * _TILE, 2 * depth).view(np.int32)


def encode(words: np.ndarray) -> np.ndarray:
    """Returns the Marlin words [K / 16, 2 N] of Hugging Face words [N, K / 8]."""
    tiles, depth = words.shape[0] // _TILE, words.shape[1] // 2
    given = words.view(np.uint32).reshape(tiles, 4, 2, 8, depth, 2)  # J w h row T i
    out = np.empty((depth, tiles, 8, 4, 4), np.uint32)  # T J row c w
    for group in _groups(depth, tiles):
        near = given[group]
        c = np.empty((4, near.shape[0], 4, 8, depth), np.uint32)  # c J w row T
        for number, which in enumerate((0, 2, 1, 3)):
            c[which] = near[:, :, number // 2, :, :, number % 2]
        scratch = np.empty_like(c[0])
        _exchange(c[0], c[1], 1, scratch)
        _exchange(c[2], c[3], 1, scratch)
        _exchange(c[0], c[2], 0, scratch)
        _exchange(c[1], c[3], 0, scratch)
        _exchange(c[0], c[2], 2, scratch)
        _exchange(c[1], c[3], 2, scratch)
        out[:, group] = np.ascontiguousarray(c.transpose(4, 1, 3, 0, 2))
    return out.reshape(depth, tiles * 2 * _TILE).view(np.int32)


def permute_scales(scales: np.ndarray) -> np.ndarray:
    """Returns scales [groups, N] with each run of 64 transposed as 8 × 8.

    Its own inverse.
    """
    groups, outputs = scales.shape
    runs = scales.reshape(groups, outputs // _TILE, 8, 8)
    return np.ascontiguousarray(runs.swapaxes(2, 3)).reshape(groups, outputs)


def _groups(depth: int, tiles: int):
    """Yields slices of tiles that are worked on at a time."""
    step = max(1, _BLOCK_WORDS // (depth * 2 * _TILE))
    return (slice(at, at + step) for at in range(0, tiles, step))


def _exchange(zero: np.ndarray, one: np.ndarray, bit: int, scratch: np.ndarray):
    """Exchanges, in place, the address bit that tells two words apart with `bit`.

    Args:
      zero: Words in which the word's bit is 0.
      one: Words in which it is 1.
    """
    distance, low = _BIT[bit]
    np.right_shift(zero, distance, out=scratch)
    np.bitwise_xor(scratch, one, out=scratch)
    np.bitwise_and(scratch, low, out=scratch)
    np.bitwise_xor(one, scratch, out=one)
    np.left_shift(scratch, distance, out=scratch)
    np.bitwise_xor(zero, scratch, out=zero)
