"""Rebuilds tests/golden/ and compares it with what is committed.

scripts/oracles             rebuild in a temporary directory and compare
scripts/oracles --update    rewrite tests/golden/ and its manifest
"""

import argparse
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from transformers.utils import logging

from . import (
    compare,
    golden_bundled,
    golden_chat,
    golden_dflash,
    golden_formats,
    golden_greedy,
    golden_int4,
    golden_rope,
    golden_sampling,
    golden_target,
    make_tiny_draft,
    make_tiny_target,
    manifest,
)

GOLDEN = Path("tests/golden")  # scripts/oracles starts at the repository root


def build(directory: Path) -> None:
    """Writes every golden file but the manifest into `directory`."""
    target, draft = directory / "tiny_k26", directory / "tiny_draft"
    make_tiny_target.build(target)
    make_tiny_draft.build(draft)
    golden_int4.build(directory)
    golden_formats.build(directory)
    golden_rope.build(directory)
    golden_target.build(directory, target)
    golden_greedy.build(directory, target)
    golden_chat.build(directory, target)
    golden_dflash.build(directory, target, draft)
    golden_sampling.build(directory, target)
    golden_bundled.build(directory)


def update(rebuilt: Path) -> None:
    """Puts the rebuilt files and their manifest in the committed ones' place."""
    manifest.write(rebuilt)
    shutil.rmtree(GOLDEN, ignore_errors=True)
    shutil.copytree(rebuilt, GOLDEN)


def check(rebuilt: Path) -> list[str]:
    """Returns one line per fault of the committed files."""
    found = manifest.problems(GOLDEN)
    ours, theirs = manifest.golden_files(GOLDEN), manifest.golden_files(rebuilt)
    found += [
        f"{GOLDEN / name}: is not made by any oracle"
        for name in ours
        if name not in theirs
    ]
    for name in theirs:
        if name in ours:
            found += compare.differences(GOLDEN / name, rebuilt / name)
        else:
            found.append(f"{GOLDEN / name}: missing")
    return found


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="scripts/oracles", description=__doc__)
    parser.add_argument("--update", action="store_true", help="rewrite tests/golden/")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # sums in one order, and the models are tiny
    with tempfile.TemporaryDirectory() as temporary:
        rebuilt = Path(temporary) / "golden"
        rebuilt.mkdir()
        build(rebuilt)
        if arguments.update:
            update(rebuilt)
            return 0
        faults = check(rebuilt)
    for fault in dict.fromkeys(faults):
        print(f"oracles: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
