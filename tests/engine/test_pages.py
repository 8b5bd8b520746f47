"""The page allocator under any sequence of moves, and what it refuses."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ddtree_jax.engine.pages import PageAllocator
from ddtree_jax.errors import EngineError

NUM_PAGES = 13


class Moves(RuleBasedStateMachine):
    """Allocates and frees against a model: a list of what is held."""

    def __init__(self):
        super().__init__()
        self.allocator = PageAllocator(NUM_PAGES)
        self.held: list[list[int]] = []

    @rule(count=st.integers(0, NUM_PAGES + 2))
    def allocate(self, count):
        free = NUM_PAGES - sum(map(len, self.held))
        pages = self.allocator.allocate(count)
        if count > free:
            assert pages is None
        else:
            assert len(pages) == count
            self.held.append(pages)

    @rule(data=st.data())
    def free(self, data):
        if self.held:
            index = data.draw(st.integers(0, len(self.held) - 1))
            self.allocator.free(self.held.pop(index))

    @invariant()
    def every_page_is_somewhere_once(self):
        self.allocator.check()
        held = [page for pages in self.held for page in pages]
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(NUM_PAGES))
        assert self.allocator.num_free == NUM_PAGES - len(held)


TestMoves = Moves.TestCase


def test_freeing_what_is_not_held_is_refused_and_changes_nothing():
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    with pytest.raises(EngineError, match=r"pages \[3\] are freed but not in use"):
        allocator.free([*pages, 3])
    with pytest.raises(EngineError, match="freed but not in use"):
        allocator.free([pages[0], pages[0]])
    allocator.check()
    assert allocator.num_free == 2


def test_check_notices_a_lost_and_a_doubled_page():
    for damage in (lambda a: a._free.pop(), lambda a: a._free.append(a._free[0])):
        allocator = PageAllocator(4)
        damage(allocator)
        with pytest.raises(EngineError, match="page accounting is broken"):
            allocator.check()
