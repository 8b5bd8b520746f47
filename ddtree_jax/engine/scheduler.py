"""Owns which requests wait, which run in which slot, and what is done next.

First come, first served; a request gets all its pages when it gets its slot, so
it can never run out of them later. Does not know about arrays.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator

from ddtree_jax.engine.output import OutputAssembler
from ddtree_jax.engine.pages import PageAllocator
from ddtree_jax.engine.request import Delta, Request


@dataclasses.dataclass
class Sequence:
    """A request on its way through the engine.

    Attributes:
      pages: Its pages, in token order; empty while it waits.
      num_prefilled: Prompt tokens committed.
    """

    request: Request
    on_delta: Callable[[Delta], None]
    assembler: OutputAssembler
    pages: list[int] = dataclasses.field(default_factory=list)
    num_prefilled: int = 0

    @property
    def max_rows(self) -> int:
        """Most tokens it can commit: the answer's last one never is."""
        return len(self.request.prompt_ids) + self.request.max_tokens - 1

    @property
    def is_prefilled(self) -> bool:
        """Whether the whole prompt is committed."""
        return self.num_prefilled == len(self.request.prompt_ids)


class Scheduler:
    """The queue and the slots."""

    def __init__(self, *, slots: int, num_pages: int, page_size: int):
        self.pages = PageAllocator(num_pages)
        self._page_size = page_size
        self._waiting: deque[Sequence] = deque()
        self._slots: list[Sequence | None] = [None] * slots

    def pages_needed(self, rows: int) -> int:
        """Returns the pages that hold `rows` tokens."""
        return -(-rows // self._page_size)

    @property
    def num_waiting(self) -> int:
        """Requests without a slot."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests with a slot."""
        return sum(sequence is not None for sequence in self._slots)

    def enqueue(self, sequence: Sequence) -> None:
        """Adds a request at the end of the queue."""
        self._waiting.append(sequence)

    def admit(self) -> Iterator[tuple[int, Sequence]]:
        """Yields requests that get a slot and pages now, in order of arrival."""
        for slot, occupant in enumerate(self._slots):
            if occupant is not None or not self._waiting:
                continue
            # A later, smaller request must not overtake the first one for ever.
            pages = self.pages.allocate(self.pages_needed(self._waiting[0].max_rows))
            if pages is None:
                return
            sequence = self._waiting.popleft()
            sequence.pages = pages
            self._slots[slot] = sequence
            yield slot, sequence

    def prefilling(self) -> tuple[int, Sequence] | None:
        """Returns a slot whose prompt is not committed yet, the lowest, or None."""
        return next(
            ((i, s) for i, s in enumerate(self._slots) if s and not s.is_prefilled),
            None,
        )

    def decoding(self) -> list[tuple[int, Sequence]]:
        """Returns the slots that decode."""
        return [(i, s) for i, s in enumerate(self._slots) if s and s.is_prefilled]

    def release(self, slot: int) -> None:
        """Frees a slot and its pages."""
        sequence = self._slots[slot]
        if sequence is None:
            raise ValueError(f"slot {slot} is released but free")
        self.pages.free(sequence.pages)
        self._slots[slot] = None

    def remove(self, request_id: str) -> int | None:
        """Forgets a request; returns its slot, released, or None if it had none."""
        for sequence in self._waiting:
            if sequence.request.request_id == request_id:
                self._waiting.remove(sequence)
                return None
        for slot, sequence in enumerate(self._slots):
            if sequence and sequence.request.request_id == request_id:
                self.release(slot)
                return slot
        return None

    def everyone(self) -> list[Sequence]:
        """Returns every request, running or waiting."""
        return [*filter(None, self._slots), *self._waiting]
