"""Owns the argument checks that kernel entries share."""

type Shape = tuple[int, ...]


def check_ranks(operation: str, ranks: dict[str, tuple[Shape, int]]) -> None:
    """Raises ValueError for the first shape that has not the rank beside it."""
    for name, (shape, rank) in ranks.items():
        if len(shape) != rank:
            raise ValueError(
                f"{operation}: {name} has shape {shape}, expected {rank} dimensions"
            )


def check_shapes(
    operation: str, shapes: dict[str, tuple[Shape, Shape]], *, basis: str
) -> None:
    """Raises ValueError for the first shape that differs from the one beside it.

    Args:
      shapes: Name → (got, expected).
      basis: What the expected shapes follow from, for the message.
    """
    for name, (got, want) in shapes.items():
        if got != want:
            raise ValueError(
                f"{operation}: {name} has shape {got}, expected {want} from {basis}"
            )
