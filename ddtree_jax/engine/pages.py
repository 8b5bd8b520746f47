"""Owns which pages are free. Does not know about arrays or what pages hold."""

from ddtree_jax.errors import EngineError


class PageAllocator:
    """Hands out page ids 0 .. num_pages - 1.

    Invariant: free and handed-out pages are disjoint and together are all pages.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        # Popped from the end, so the lowest ids go first.
        self._free = list(range(num_pages))[::-1]
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Pages that can be handed out."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Returns `count` pages, or None (and takes none) if fewer are free."""
        if count > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(count)]
        self._used.update(pages)
        return pages

    def free(self, pages: list[int]) -> None:
        """Takes pages back.

        Raises:
          EngineError: A page was not handed out; nothing is taken back then.
        """
        strangers = [page for page in pages if page not in self._used]
        if strangers or len(set(pages)) != len(pages):
            raise EngineError(f"pages {strangers or pages} are freed but not in use")
        self._used.difference_update(pages)
        self._free.extend(reversed(pages))

    def check(self) -> None:
        """Raises EngineError when the invariant is broken."""
        free = set(self._free)
        if (
            len(free) != len(self._free)
            or free & self._used
            or free | self._used != set(range(self.num_pages))
        ):
            raise EngineError(
                f"page accounting is broken: {len(self._free)} free and "
                f"{len(self._used)} in use of {self.num_pages}"
            )
