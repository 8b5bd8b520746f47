"""Names the shapes that tests, bench and tuner share. No arrays, no numerics."""

import dataclasses
import itertools
from typing import Literal

type Size = Literal["ci", "kimi"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseCase:
    """The shape of one `int4_matmul` call.

    Attributes:
      size: "ci" runs in seconds on a CPU; "kimi" has Kimi K2.6's widths.
      tokens: Rows of x.
      inputs: Inner size.
      outputs: Rows of the weight.
    """

    size: Size
    tokens: int
    inputs: int
    outputs: int

    @property
    def name(self) -> str:
        """Unique among `DENSE_CASES`, and stable, since records are kept by it."""
        return f"{self.size}-m{self.tokens}-k{self.inputs}-n{self.outputs}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedCase:
    """The shape of one `int4_grouped_swiglu` call.

    Attributes:
      size: As in `DenseCase`.
      layout: What is split over devices: "tp8" the inner width, "ep8" the
        experts, "whole" nothing.
      tokens: Rows of x.
      layers: Length of the stacks; one layer of them is used.
      experts: Of this device.
      routed_experts: Of the model; ids past `experts` pick nothing here.
      experts_per_token: Of the model.
      hidden: Width of x.
      inner: Inner width of one expert on this device.
    """

    size: Size
    layout: Literal["whole", "tp8", "ep8"]
    tokens: int
    layers: int
    experts: int
    routed_experts: int
    experts_per_token: int
    hidden: int
    inner: int

    @property
    def name(self) -> str:
        """Unique among `GROUPED_CASES`, and stable, since records are kept by it."""
        return (
            f"{self.size}-{self.layout}-m{self.tokens}-e{self.experts}"
            f"-k{self.hidden}-n{self.inner}"
        )


def _ci_grouped(tokens: int, experts: int, hidden: int, inner: int) -> GroupedCase:
    return GroupedCase(
        size="ci",
        layout="whole",
        tokens=tokens,
        layers=2,
        experts=experts,
        routed_experts=experts,
        experts_per_token=3,
        hidden=hidden,
        inner=inner,
    )


def _kimi_grouped(layout: Literal["tp8", "ep8"], tokens: int) -> GroupedCase:
    experts, inner = {"tp8": (384, 256), "ep8": (48, 2048)}[layout]
    return GroupedCase(
        size="kimi",
        layout=layout,
        tokens=tokens,
        # Enough that successive layers do not find their weights in the L2 cache.
        layers=2,
        experts=experts,
        routed_experts=384,
        experts_per_token=8,
        hidden=7168,
        inner=inner,
    )


DENSE_CASES: tuple[DenseCase, ...] = (
    DenseCase(size="ci", tokens=1, inputs=32, outputs=1),
    DenseCase(size="ci", tokens=9, inputs=96, outputs=40),
    DenseCase(size="ci", tokens=33, inputs=256, outputs=64),
    *(
        DenseCase(size="kimi", tokens=tokens, inputs=inputs, outputs=outputs)
        for (inputs, outputs), tokens in itertools.product(
            ((7168, 2048), (2048, 7168), (7168, 4096), (7168, 512), (1536, 1536)),
            (1, 9, 64, 256),
        )
    ),
)

GROUPED_CASES: tuple[GroupedCase, ...] = (
    _ci_grouped(tokens=1, experts=4, hidden=32, inner=32),
    _ci_grouped(tokens=9, experts=8, hidden=64, inner=96),
    _ci_grouped(tokens=33, experts=5, hidden=96, inner=32),
    *(_kimi_grouped("tp8", m) for m in (1, 9, 17, 33, 65, 256, 1024)),
    *(_kimi_grouped("ep8", m) for m in (1, 9, 17, 33, 65, 256, 1024)),
)
