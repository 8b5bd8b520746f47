"""Makes and checks manifest.json: what made the golden files, and their sums."""

import datetime
import hashlib
import importlib.metadata
import json
import platform
from pathlib import Path

from .checkpoint_files import write_json

NAME = "manifest.json"
_REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def golden_files(directory: Path) -> list[str]:
    """Returns the relative path of every file below, the manifest excepted."""
    files = (p.relative_to(directory) for p in directory.rglob("*") if p.is_file())
    return sorted(str(path) for path in files if str(path) != NAME)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _versions() -> dict[str, str]:
    """The installed version of each requirement; "+cpu" and the like dropped."""
    lines = _REQUIREMENTS.read_text().splitlines()
    names = [line.split("==")[0] for line in lines if line and line[0] != "#"]
    installed = {name: importlib.metadata.version(name) for name in names}
    return {name: version.split("+")[0] for name, version in installed.items()}


def write(directory: Path) -> None:
    """Writes the manifest of the files in `directory`."""
    manifest = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "versions": _versions(),
        "sha256": {n: _sha256(directory / n) for n in golden_files(directory)},
    }
    write_json(directory / NAME, manifest)


def problems(directory: Path) -> list[str]:
    """Returns what in `directory` is not as its manifest says."""
    path = directory / NAME
    if not path.is_file():
        return [f"{path}: missing"]
    manifest = json.loads(path.read_text())
    found = [
        f"{path}: versions: {name} is {version} here, "
        f"the files were made with {manifest['versions'].get(name)}"
        for name, version in _versions().items()
        if manifest["versions"].get(name) != version
    ]
    present, listed = set(golden_files(directory)), set(manifest["sha256"])
    found += [f"{directory / n}: not in the manifest" for n in present - listed]
    found += [f"{directory / n}: missing" for n in listed - present]
    found += [
        f"{directory / name}: its sha256 is not the manifest's"
        for name in sorted(present & listed)
        if _sha256(directory / name) != manifest["sha256"][name]
    ]
    return found
