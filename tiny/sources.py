"""Owns which texts the small model may see: installed, permissive, not held out.

A distribution counts when its metadata names permissive licences only. Copies of
other projects inside it, tests and generated tables are left out.
"""

import dataclasses
import email.message
import importlib.metadata
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

# Measured on, never trained on; what resembles them is dropped from training.
HELD_OUT = frozenset({"click", "httpx", "jinja2", "rich"})

# SPDX names, and what older metadata write for them.
_LICENCE = r"( licen[cs]e)?"
PERMISSIVE = "|".join(
    (
        r"mit(-cmu|-0)?" + _LICENCE,
        r"the mit licen[cs]e|mit licen[cs]e \(mit\)",
        r"(new |modified |simplified |[23]-clause )?bsd([- ][23][- ]clause)?"
        + _LICENCE,
        r"(the )?apache([- ]software)?([ -]licen[cs]e)?,?( version)?[ -]?(2(\.0)?)?"
        + _LICENCE,
        r"apache-2\.0 with llvm-exception",
        r"isc( licen[cs]e \(iscl\))?",
        r"psf(-2\.0)?|python-2\.0(\.1)?|python software foundation licen[cs]e",
        r"hpnd|historical permission notice and disclaimer \(hpnd\)",
        r"0bsd|zlib|unlicense|cc0-1\.0|bsl-1\.0",
    )
)
_SUFFIXES = (".py", ".md", ".rst")
# Long and dull, but good for prompts that the target has not learnt by heart.
_TESTS = {"test", "tests", "testing", "idle_test"}
# Copies of other projects, mostly.
_LEFT_OUT = {
    *("idlelib", "turtledemo", "lib2to3"),
    *("vendor", "_vendor", "vendored", "_vendored", "third_party", "extern"),
    *("externals", "_externals", "site-packages", "dist-packages", "ensurepip"),
    *("pydoc_data", "_vendored_packages", "bundled"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Package:
    """A distribution, or the standard library, whose texts are used.

    Attributes:
      licence: As its metadata give it.
      licence_files: Where its text lies, as the distribution names it.
      paths: Files to train on, in order.
      tests: Files to prompt with.
      description: The metadata's long text, often a README; may be empty.
    """

    name: str
    version: str
    licence: str
    licence_files: tuple[str, ...]
    paths: tuple[Path, ...]
    tests: tuple[Path, ...]
    description: str

    @property
    def split(self) -> Literal["train", "heldout"]:
        """Which half of the data this is."""
        return "heldout" if self.name in HELD_OUT else "train"


def packages() -> list[Package]:
    """Returns what is installed here and permissive, by name."""
    found = {"python": _standard_library()}
    for distribution in importlib.metadata.distributions():
        package = _package(distribution)
        if package is not None and package.paths:
            found.setdefault(package.name, package)
    return [found[name] for name in sorted(found)]


def _standard_library() -> Package:
    root = Path(sysconfig.get_paths()["stdlib"])
    paths, tests = _sorted_files(root.rglob("*.py"), root)
    return Package(
        name="python",
        version=".".join(map(str, sys.version_info[:3])),
        licence="PSF-2.0",
        licence_files=("LICENSE.txt",),
        paths=paths,
        tests=tests,
        description="",
    )


def _package(distribution: importlib.metadata.Distribution) -> Package | None:
    metadata = distribution.metadata
    assert isinstance(metadata, email.message.Message)
    licence = licence_of(metadata)
    if licence is None or "Name" not in metadata:
        return None
    name = re.sub(r"[-_.]+", "-", metadata["Name"]).lower()
    files = distribution.files or []
    root = Path(str(distribution.locate_file("")))
    paths, tests = _sorted_files(
        (Path(str(distribution.locate_file(file))) for file in files), root
    )
    texts = [str(f) for f in files if re.search(r"(?i)licen[cs]e|copying", f.name)]
    body = metadata.get_payload()
    return Package(
        name=name,
        version=distribution.version,
        licence=licence,
        licence_files=tuple(t for t in texts if not t.endswith(".py")),
        paths=paths,
        tests=tests,
        description=body if isinstance(body, str) else "",
    )


def _sorted_files(
    paths: Iterable[Path], root: Path
) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Returns the files of a distribution to train on, and its tests."""
    kept, tests = [], []
    for path in sorted(paths):
        if path.suffix not in _SUFFIXES or not path.is_relative_to(root):
            continue
        parts = _parts(path, root)
        if not _LEFT_OUT.intersection(parts) and path.is_file():
            (tests if _TESTS.intersection(parts) else kept).append(path)
    return tuple(kept), tuple(tests)


def _parts(path: Path, root: Path) -> tuple[str, ...]:
    return path.relative_to(root).parts


def licence_of(metadata: email.message.Message) -> str | None:
    """Returns the licence that metadata name, None unless each is permissive."""
    if expression := metadata.get("License-Expression"):
        return expression if _permissive_expression(expression) else None
    classifiers = [
        value.rpartition(" :: ")[2]
        for value in metadata.get_all("Classifier", [])
        if value.startswith("License :: ")
        and value not in ("License :: OSI Approved", "License :: DFSG approved")
    ]
    field = metadata.get("License", "").partition("\n")[0]
    names = classifiers or ([field] if field else [])
    if names and all(map(_permissive_expression, names)):
        return " AND ".join(names)
    return None


def _permissive_expression(expression: str) -> bool:
    """Whether every operand of AND, and one operand of each OR, is permissive."""
    if re.fullmatch(PERMISSIVE, expression.strip(), re.I):
        return True
    # Names like "BSD License" have no operators; brackets do not nest here.
    return all(
        any(
            re.fullmatch(PERMISSIVE, name.strip(" ()"), re.I)
            for name in re.split(r"\s+OR\s+", operand)
        )
        for operand in re.split(r"\s+AND\s+", expression)
    )


def texts(package: Package) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of each usable file of a package, and its description."""
    if text := usable(package.description):
        yield f"{package.name}/METADATA", text
    for path in package.paths:
        if text := read(path):
            yield str(path), text


def read(path: Path) -> str:
    """Returns a file's cleaned text, empty if it is not usable."""
    if not 100 <= path.stat().st_size <= 600_000 or path.stem.endswith("_pb2"):
        return ""
    try:
        return usable(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        return ""


def usable(text: str) -> str:
    """Returns the text without its licence header, empty if it is no prose or code."""
    text = _without_header(text.replace("\r\n", "\n").expandtabs(4)).strip("\n")
    lines = text.split("\n")
    digits = sum(map(str.isdigit, text))
    odd = sum(not character.isascii() for character in text)
    long = sum(len(line) for line in lines if len(line) > 200)
    whole = len(text)
    # Tables, encoded data and minified code teach nothing about programs.
    if whole < 100 or digits > 0.15 * whole or odd > 0.1 * whole or long > 0.1 * whole:
        return ""
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _without_header(text: str) -> str:
    """Returns a text without the first comment, if that is about licences."""
    header = re.match(r"(?:[ ]*#[^\n]*\n|[ ]*\n)+", text)
    if header and re.search(r"(?i)licen[cs]e|copyright|coding[:=]|#!", header[0]):
        return text[header.end() :]
    return text
