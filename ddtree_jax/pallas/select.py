"""Owns the choice of an implementation behind a kernel entry."""

from collections.abc import Callable, Mapping
from typing import Literal

type Implementation = Literal["auto", "pallas", "reference"]


def select[F: Callable](
    operation: str, implementation: Implementation, available: Mapping[str, F]
) -> F:
    """Returns the named implementation, or the fastest there is for "auto".

    Args:
      operation: Name of the operation, for messages.
      implementation: The caller's choice.
      available: Implementations by name, fastest first.

    Raises:
      ValueError: The name is none of the known ones.
      NotImplementedError: The name is known but this operation lacks it.
    """
    if implementation == "auto":
        return next(iter(available.values()))
    if implementation in available:
        return available[implementation]
    if implementation in ("pallas", "reference"):
        raise NotImplementedError(
            f"{operation}: no {implementation!r} implementation; "
            f"available: {', '.join(available)}"
        )
    raise ValueError(
        f"{operation}: implementation must be 'auto', 'pallas' or 'reference', "
        f"got {implementation!r}"
    )
