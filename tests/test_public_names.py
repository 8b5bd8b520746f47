"""Public names can be imported, are public and documented; examples run."""

import doctest
import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import ddtree_jax

MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(ddtree_jax.__path__, "ddtree_jax.")
    if not info.name.endswith("__main__")
)
# The packages whose names other packages use, and what each offers.
OFFERS = {
    "ddtree_jax.hf_config": {"read_model_config", "read_draft_config"},
    "ddtree_jax.pallas": {"int4_grouped_swiglu", "int4_matmul", "tree_mla_attention"},
    "ddtree_jax.spec": {"make_prefill", "make_step", "abstract_state", "init_state"},
    "ddtree_jax.engine": {"Engine", "EngineConfig", "Request", "SamplingParams"},
}


def defined_here(module: ModuleType) -> dict[str, object]:
    """Returns the public functions and classes whose home is `module`."""
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    }


@pytest.mark.parametrize("name", MODULES)
def test_all_names_what_is_there(name):
    module = importlib.import_module(name)
    names = getattr(module, "__all__", [])
    assert [n for n in names if not hasattr(module, n)] == []
    assert [n for n in names if n.startswith("_")] == []
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", OFFERS)
def test_packages_offer_their_interface(name):
    assert set(importlib.import_module(name).__all__) >= OFFERS[name]


@pytest.mark.parametrize("name", MODULES)
def test_public_names_say_what_they_are(name):
    module = importlib.import_module(name)
    assert module.__file__ is not None
    if "__all__" in vars(module) or defined_here(module):
        assert inspect.getdoc(module), name
    for public, value in defined_here(module).items():
        assert value.__doc__, f"{name}.{public} has no docstring"
        # A dataclass or NamedTuple without one is given its signature.
        assert not value.__doc__.startswith(f"{public}("), f"{name}.{public}"


def test_examples_run():
    """Every doctest of the package; ancestor_mask's is among them."""
    ran = {}
    for name in MODULES:
        module = importlib.import_module(name)
        runner = doctest.DocTestRunner()
        for test in doctest.DocTestFinder(exclude_empty=True).find(module):
            report: list[str] = []
            runner.run(test, out=report.append)
            assert not report, "".join(report)
            ran[test.name] = len(test.examples)
    assert ran["ddtree_jax.spec.tree.ancestor_mask"] == 2
