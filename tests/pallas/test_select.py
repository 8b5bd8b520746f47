"""The choice of an implementation, and the names of the shared cases."""

import pytest

from ddtree_jax.pallas.int4_matmul.cases import DENSE_CASES, GROUPED_CASES
from ddtree_jax.pallas.select import select
from ddtree_jax.pallas.tree_mla.cases import CASES


def fast():
    """Stands for a kernel."""


def plain():
    """Stands for a reference."""


BOTH = {"pallas": fast, "reference": plain}


@pytest.mark.parametrize(
    ("implementation", "available", "want"),
    [
        ("auto", BOTH, fast),
        ("pallas", BOTH, fast),
        ("reference", BOTH, plain),
        ("auto", {"reference": plain}, plain),
    ],
)
def test_the_named_or_the_first_is_taken(implementation, available, want):
    assert select("op", implementation, available) is want


def test_a_missing_implementation_is_never_replaced():
    message = "^op: no 'pallas' implementation; available: reference$"
    with pytest.raises(NotImplementedError, match=message):
        select("op", "pallas", {"reference": plain})


def test_an_unknown_name_is_refused():
    message = "^op: implementation must be 'auto', 'pallas' or 'reference', got 'cuda'$"
    with pytest.raises(ValueError, match=message):
        select("op", "cuda", BOTH)


@pytest.mark.parametrize("cases", [CASES, DENSE_CASES, GROUPED_CASES])
def test_case_names_are_unique_and_both_sizes_exist(cases):
    names = [case.name for case in cases]
    assert len(set(names)) == len(names)
    assert {case.size for case in cases} == {"ci", "kimi"}


def test_kimi_cases_cover_the_decided_shapes():
    shapes = {
        (c.heads, c.nodes, c.context_len[0])
        for c in CASES
        if c.size == "kimi" and len(c.context_len) == 1
    }
    assert shapes == {
        (heads, nodes, context)
        for heads in (8, 64)
        for nodes in (1, 9, 17, 33, 65)
        for context in (1_024, 5_632, 16_384, 65_536, 200_000)
    }
    assert {(c.layout, c.experts, c.inner) for c in GROUPED_CASES} >= {
        ("tp8", 384, 256),
        ("ep8", 48, 2048),
    }


def test_case_names_by_literals():
    assert CASES[0].name == "ci-heads4-batch6-nodes1-context53-page16"
    assert CASES[-1].name == "kimi-heads64-batch32-nodes9-context5632-page64"
    assert CASES[-1].pages_per_request == 88
    assert CASES[0].pages_per_request == 4
    assert DENSE_CASES[0].name == "ci-m1-k32-n1"
    assert GROUPED_CASES[-1].name == "kimi-ep8-m1024-e48-k7168-n2048"
