"""Who gets a slot, and when."""

import pytest

from ddtree_jax.engine.request import Request
from ddtree_jax.engine.scheduler import Scheduler, Sequence


def sequence(name: str, prompt: int, max_tokens: int) -> Sequence:
    request = Request(request_id=name, prompt_ids=(0,) * prompt, max_tokens=max_tokens)
    return Sequence(request, on_delta=print, assembler=None)


def admitted(scheduler: Scheduler) -> dict[int, str]:
    return {slot: s.request.request_id for slot, s in scheduler.admit()}


def test_first_come_first_served_in_free_slots():
    scheduler = Scheduler(slots=2, num_pages=100, page_size=16)
    for name in "abc":
        scheduler.enqueue(sequence(name, 5, 5))
    assert admitted(scheduler) == {0: "a", 1: "b"}
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    scheduler.release(0)
    assert admitted(scheduler) == {0: "c"}


def test_pages_cover_all_that_can_be_committed_and_no_more():
    scheduler = Scheduler(slots=1, num_pages=10, page_size=16)
    # 30 prompt tokens and 3 more: the last one is never committed.
    scheduler.enqueue(sequence("a", 30, 3))
    [(_, a)] = scheduler.admit()
    assert len(a.pages) == 2
    scheduler.release(0)
    scheduler.enqueue(sequence("b", 30, 4))
    [(_, b)] = scheduler.admit()
    assert len(b.pages) == 3


def test_a_small_request_does_not_overtake_one_that_waits_for_pages():
    scheduler = Scheduler(slots=3, num_pages=4, page_size=16)
    scheduler.enqueue(sequence("a", 40, 1))
    scheduler.enqueue(sequence("large", 40, 1))
    scheduler.enqueue(sequence("small", 1, 1))
    assert admitted(scheduler) == {0: "a"}
    assert admitted(scheduler) == {}
    scheduler.release(0)
    assert admitted(scheduler) == {0: "large", 1: "small"}


def test_remove_frees_slot_and_pages_or_forgets_the_waiting():
    scheduler = Scheduler(slots=1, num_pages=4, page_size=16)
    scheduler.enqueue(sequence("a", 40, 1))
    scheduler.enqueue(sequence("b", 1, 1))
    admitted(scheduler)
    assert scheduler.remove("b") is None
    assert scheduler.num_waiting == 0
    assert scheduler.remove("unknown") is None
    assert scheduler.remove("a") == 0
    assert (scheduler.num_running, scheduler.pages.num_free) == (0, 4)


def test_prefill_comes_before_decoding():
    scheduler = Scheduler(slots=2, num_pages=10, page_size=16)
    scheduler.enqueue(sequence("a", 5, 5))
    [(_, a)] = scheduler.admit()
    assert scheduler.prefilling() == (0, a)
    assert scheduler.decoding() == []
    a.num_prefilled = 5
    assert scheduler.prefilling() is None
    assert scheduler.decoding() == [(0, a)]


def test_releasing_a_free_slot_is_a_fault():
    with pytest.raises(ValueError, match="slot 0 is released but free"):
        Scheduler(slots=1, num_pages=1, page_size=1).release(0)
