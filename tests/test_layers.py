"""The import contracts hold, and each of them can be broken."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def lint_imports(directory: Path) -> str:
    command = [
        Path(sys.executable).with_name("lint-imports"),
        "--no-logo",
        "--no-cache",
    ]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def sources(tmp_path) -> Path:
    """A copy of what the contracts are about."""
    for package in ("ddtree_jax", "convert"):
        shutil.copytree(
            ROOT / package,
            tmp_path / package,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_contracts_hold(sources):
    out = lint_imports(sources)
    assert " 0 broken" in out, out


@pytest.mark.parametrize(
    ("module", "imported", "contract"),
    [
        ("ddtree_jax/quant.py", "ddtree_jax.pallas", "imports point downwards"),
        ("ddtree_jax/config.py", "ddtree_jax.hf_config", "imports point downwards"),
        ("ddtree_jax/model/params.py", "ddtree_jax.spec", "imports point downwards"),
        (
            "ddtree_jax/serve/__init__.py",
            "jax",
            "the HTTP package sees the engine and the errors only",
        ),
        (
            "ddtree_jax/serve/__init__.py",
            "ddtree_jax.spec",
            "the HTTP package sees the engine and the errors only",
        ),
        (
            "ddtree_jax/pallas/__init__.py",
            "ddtree_jax.mesh",
            "kernels know local shapes, not the mesh",
        ),
        (
            "convert/__init__.py",
            "ddtree_jax.engine",
            "the converter stays offline",
        ),
        ("convert/__init__.py", "huggingface_hub", "the converter stays offline"),
        (
            "ddtree_jax/engine/__init__.py",
            "convert",
            "the engine does not import the converter",
        ),
        ("ddtree_jax/mesh.py", "tiny", "nobody imports tests, bench, tiny"),
        ("convert/__init__.py", "torch", "no torch, no transformers at run time"),
    ],
)
def test_a_broken_contract_is_named(sources, module, imported, contract):
    path = sources / module
    path.write_text(path.read_text() + f"\nimport {imported}\n")
    out = lint_imports(sources)
    assert f"{contract} BROKEN" in out
    importer = module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert f"{importer} -> {imported} (l." in " ".join(out.split())


def test_a_module_without_a_layer_is_named(sources):
    (sources / "ddtree_jax" / "stray.py").write_text("")
    out = lint_imports(sources)
    assert "imports point downwards BROKEN" in out
    assert "ddtree_jax.stray" in out
