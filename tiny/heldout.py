"""Writes the Python files of the held-out packages, to be measured on.

    python -m tiny.heldout DIR

They are those installed here; the versions that were held out of training are in
tiny/data/packages.json.
"""

import argparse
from pathlib import Path

from tiny.sources import packages, texts

_SHORTEST = 3000  # characters; shorter files are mostly imports


def write_heldout(directory: Path) -> int:
    """Writes the files into `directory`, made if needed; returns how many."""
    directory.mkdir(parents=True, exist_ok=True)
    count = 0
    for package in packages():
        if package.split != "heldout":
            continue
        for name, text in texts(package):
            path = Path(name)
            if path.suffix == ".py" and len(text) > _SHORTEST:
                flat = f"{package.name}-{count:03d}-{path.name}"
                (directory / flat).write_text(text, encoding="utf-8")
                count += 1
    return count


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m tiny.heldout", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="to write into")
    directory = parser.parse_args().directory
    print(f"{write_heldout(directory)} files in {directory}")


if __name__ == "__main__":
    main()
