"""Names the shapes that tests, bench and tuner share. No arrays, no numerics."""

import dataclasses
import itertools
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeMlaCase:
    """The shape of one `tree_mla_attention` call.

    Attributes:
      size: "ci" runs in seconds on a CPU; "kimi" has Kimi K2.6's widths.
      heads: Of one device.
      nodes: Tree nodes of each request, the root included.
      context_len: Committed tokens of each request; its length is the batch.
      latent: Latent width.
      rope: Rope width.
      page_size: Tokens a page.
    """

    size: Literal["ci", "kimi"]
    heads: int
    nodes: int
    context_len: tuple[int, ...]
    latent: int
    rope: int
    page_size: int

    @property
    def name(self) -> str:
        """Unique among `CASES`, and stable, since records are kept by it."""
        batch, longest = len(self.context_len), max(self.context_len)
        return (
            f"{self.size}-heads{self.heads}-batch{batch}-nodes{self.nodes}"
            f"-context{longest}-page{self.page_size}"
        )

    @property
    def pages_per_request(self) -> int:
        """Width of the page table."""
        return -(-max(self.context_len) // self.page_size)


def _ci(heads: int, nodes: int, page_size: int) -> TreeMlaCase:
    """Returns a case with contexts around the page border, none included."""
    around = (0, 1, page_size - 1, page_size, page_size + 1, 3 * page_size + 5)
    return TreeMlaCase(
        size="ci",
        heads=heads,
        nodes=nodes,
        context_len=around,
        latent=32,
        rope=16,
        page_size=page_size,
    )


def _kimi(heads: int, nodes: int, context: int, batch: int = 1) -> TreeMlaCase:
    return TreeMlaCase(
        size="kimi",
        heads=heads,
        nodes=nodes,
        context_len=(context,) * batch,
        latent=512,
        rope=64,
        page_size=64,
    )


# All heads on one device, and one of eight devices.
_HEADS = (8, 64)

CASES: tuple[TreeMlaCase, ...] = (
    _ci(heads=4, nodes=1, page_size=16),
    _ci(heads=1, nodes=9, page_size=16),
    _ci(heads=2, nodes=32, page_size=32),
    _ci(heads=2, nodes=33, page_size=64),
    _ci(heads=1, nodes=65, page_size=16),
    *itertools.starmap(
        _kimi,
        itertools.product(
            _HEADS, (1, 9, 17, 33, 65), (1_024, 5_632, 16_384, 65_536, 200_000)
        ),
    ),
    *itertools.starmap(_kimi, itertools.product(_HEADS, (9,), (5_632,), (8, 32))),
)
