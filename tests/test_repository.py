"""What the repository says about itself is so: locks, scripts, README, changelog."""

import ast
import importlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
LOCKS = {
    "lock.txt": ["serve", "convert", "research", "train", "dev"],
    "lock-cuda12.txt": ["cuda12"],
    "lock-cuda13.txt": ["cuda13"],
}
SCRIPTS = ["serve", "test", "check", "bench", "oracles"]
README = (ROOT / "README.md").read_text()


def read_lock(name: str) -> dict[str, str]:
    """Returns package → version; every entry must have hashes and nothing else."""
    text = re.sub(
        r"^ *#.*\n", "", (ROOT / "requirements" / name).read_text(), flags=re.M
    )
    versions = {}
    for entry in re.split(r"\n(?=\S)", text.strip()):
        head, *hashes = entry.split(" \\\n")
        assert hashes, f"{name}: {head} has no hash"
        for line in hashes:
            assert re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}", line), (name, line)
        found = re.fullmatch(r"([\w.-]+)==([\w.]+)( ; .*)?", head)
        assert found, f"{name}: {head}"
        versions[canonicalize_name(found[1])] = found[2]
    return versions


@pytest.mark.parametrize("name", LOCKS)
def test_lock_has_every_direct_dependency_within_its_range(name):
    lock = read_lock(name)
    wanted = [*PROJECT["dependencies"]]
    for extra in LOCKS[name]:
        wanted += EXTRAS[extra]
    for requirement in map(Requirement, wanted):
        version = lock[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}: {version}"


def test_every_extra_is_locked():
    assert sorted(extra for extras in LOCKS.values() for extra in extras) == sorted(
        EXTRAS
    )


def test_lock_has_the_pinned_versions():
    lock = read_lock("lock.txt")
    pins = (ROOT / "requirements" / "lock.in").read_text()
    for name, version in re.findall(r"^([\w-]+)==(.+)$", pins, flags=re.M):
        assert lock[name] == version
    assert lock["jax"] == "0.11.2"


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_cuda_lock_agrees_with_the_base(cuda):
    base, gpu = read_lock("lock.txt"), read_lock(f"lock-cuda{cuda}.txt")
    assert gpu[f"jax-cuda{cuda}-plugin"] == base["jax"]
    assert {n: v for n, v in gpu.items() if n in base and base[n] != v} == {}


def test_compilers_are_those_of_the_gpu_lock():
    gpu, compilers = read_lock("lock-cuda13.txt"), read_lock("lock-aot.txt")
    assert {"jax-cuda13-plugin", "nvidia-cuda-nvcc"} <= compilers.keys()
    assert {n: v for n, v in compilers.items() if gpu.get(n, v) != v} == {}


@pytest.mark.parametrize("name", [*LOCKS, "lock.in", "lock-aot.txt", "aot.in"])
def test_lock_names_no_place(name):
    text = (ROOT / "requirements" / name).read_text()
    assert not re.search(r"://|--(extra-)?index|--find-links|^-", text, flags=re.M)


@pytest.mark.parametrize("path", [*(f"scripts/{name}" for name in SCRIPTS), ".ci/run"])
def test_script_can_be_run_and_stops_at_the_first_failure(path):
    assert os.access(ROOT / path, os.X_OK)
    text = (ROOT / path).read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text


@pytest.mark.parametrize("command", sorted(set(re.findall(r"scripts/\w+", README))))
def test_readme_script_exists(command):
    assert (ROOT / command).is_file()


@pytest.mark.parametrize(
    "module", sorted(set(re.findall(r"python -m ([\w.]+)", README)))
)
def test_readme_module_can_be_run(module):
    assert importlib.util.find_spec(f"{module}.__main__")


def test_readme_flags_are_the_servers():
    flags = set(re.findall(r"^\| `(--[\w-]+)", README, flags=re.M))
    assert "--tree-budget" in flags
    done = subprocess.run(
        [sys.executable, "-m", "ddtree_jax.serve", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert flags <= set(re.findall(r"--[\w-]+", done.stdout))


def test_console_script_is_there():
    module, function = PROJECT["scripts"]["ddtree-convert"].split(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_changelog_has_the_version():
    released = re.findall(
        r"^## \[(\d[^]]*)\] - \d{4}-\d\d-\d\d$",
        (ROOT / "CHANGELOG.md").read_text(),
        flags=re.M,
    )
    assert released[0] == PROJECT["version"]


def test_contributing_fits_a_screen():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 50


# Comes with a package that pins its exact version.
SHIPPED_BY = {"pydantic_core": "pydantic", "jaxlib": "jax"}


def test_every_package_that_is_imported_is_declared():
    declared = [*PROJECT["dependencies"]]
    for extra in ("serve", "convert", "research", "train"):
        declared += EXTRAS[extra]
    names = {canonicalize_name(Requirement(entry).name) for entry in declared}
    distributions = importlib.metadata.packages_distributions()
    for path in PACKAGE_FILES:
        for module in imported_by((ROOT / path).read_text()):
            if module in sys.stdlib_module_names or module in ("ddtree_jax", "convert"):
                continue
            found = [SHIPPED_BY.get(module), *distributions.get(module, [])]
            assert names & {canonicalize_name(n) for n in found if n}, (path, module)


PACKAGE_FILES = sorted(
    path.relative_to(ROOT)
    for package in ("ddtree_jax", "convert")
    for path in (ROOT / package).rglob("*.py")
)
FORBIDDEN_IMPORTS = {"torch", "transformers", "pickle", "cloudpickle", "dill", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "__import__"}


def imported_by(source: str) -> set[str]:
    """Returns the top-level modules that `source` imports, wherever it does."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def forbidden_in(source: str) -> set[str]:
    """Returns what `source` imports or calls that no package code may."""
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return imported_by(source) & FORBIDDEN_IMPORTS | {
        f"{call}()" for call in calls & FORBIDDEN_CALLS
    }


@pytest.mark.parametrize("path", PACKAGE_FILES, ids=str)
def test_package_runs_no_foreign_code(path):
    assert forbidden_in((ROOT / path).read_text()) == set()


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch.nn as nn", {"torch"}),
        ("def f():\n  from transformers import AutoModel", {"transformers"}),
        ("import pickle", {"pickle"}),
        ("x = eval('1')", {"eval()"}),
        ("model.eval()", set()),
        ("import jax", set()),
    ],
)
def test_foreign_code_is_recognised(source, found):
    assert forbidden_in(source) == found
