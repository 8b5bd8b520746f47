"""Owns DDTree: draft, build, verify, accept and commit as one jitted step.

Does not know about Orbax, tokenizers, page allocation or batching policy.
Read `state.py` first, then `step.py`.
"""

from ddtree_jax.spec.slots import Assignment, assign, release
from ddtree_jax.spec.state import (
    Params,
    SpecState,
    StepResult,
    StepStatus,
    abstract_state,
    init_state,
)
from ddtree_jax.spec.step import make_prefill, make_step, param_specs

__all__ = [
    "Assignment",
    "Params",
    "SpecState",
    "StepResult",
    "StepStatus",
    "abstract_state",
    "assign",
    "init_state",
    "make_prefill",
    "make_step",
    "param_specs",
    "release",
]
