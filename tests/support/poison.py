"""Traps in everything that must not be read: NaN rows, impossible ids, garbage."""

import numpy as np

# Past every pool; below zero, where NumPy's rules would wrap; the extremes.
IMPOSSIBLE_IDS = (1 << 20, -1, np.iinfo(np.int32).max, np.iinfo(np.int32).min, -7)


def committed_rows(
    page_table: np.ndarray, context_len: np.ndarray, num_pages: int, page_size: int
) -> np.ndarray:
    """Returns `[pages, S]`: whether the row holds a committed token of anyone."""
    rows = np.zeros((num_pages, page_size), bool)
    for table, length in zip(page_table, context_len, strict=True):
        for t in range(length):
            rows[table[t // page_size], t % page_size] = True
    return rows


def poison_rows(pages: np.ndarray, committed: np.ndarray) -> np.ndarray:
    """Returns the pages `[pages, S, …]` with NaN in every row not committed."""
    pages = pages.copy()
    pages[~committed] = np.nan
    return pages


def poison_table(
    page_table: np.ndarray, context_len: np.ndarray, page_size: int
) -> np.ndarray:
    """Returns the table with impossible ids past each request's last page in use."""
    table = page_table.copy()
    for row, length in zip(table, context_len, strict=True):
        first_unused = -(-length // page_size)
        for column in range(first_unused, len(row)):
            row[column] = IMPOSSIBLE_IDS[column % len(IMPOSSIBLE_IDS)]
    return table


def poison_tail(tail: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Returns the tail rows `[B, N, …]` with NaN in those of padding nodes."""
    tail = tail.copy()
    tail[~used] = np.nan
    return tail


def poison_experts(
    packed: np.ndarray, scale: np.ndarray, layer: int, picked: set[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns stacks `[layers, experts, …]`, NaN in all but the picked experts."""
    packed, scale = packed.copy(), scale.copy()
    unread = np.ones(scale.shape[:2], bool)
    unread[layer, sorted(picked)] = False
    packed[unread] = np.iinfo(np.int32).max
    scale[unread] = np.nan
    return packed, scale
