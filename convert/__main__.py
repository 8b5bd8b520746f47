"""Owns the command line: `python -m convert hf | inspect | doctor`.

Exit codes: 0 done, 1 bad input or a failed write, 2 wrong usage, 130 interrupted.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ddtree_jax.errors import DDTreeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    flags = _parser().parse_args(arguments)
    # Orbax warns about what is as intended here, such as the absence of OCDBT.
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        return flags.run(flags)
    except DDTreeError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    except OSError as error:
        return _fail(f"{error.filename or 'file'}: {error.strerror or error}")


def _fail(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 1


def _hf(flags: argparse.Namespace) -> int:
    # Orbax asks JAX for its processes, which would take hold of a GPU.
    os.environ["JAX_PLATFORMS"] = "cpu"
    from convert import interrupt
    from convert.hf import convert_hf

    interrupt.watch()
    convert_hf(flags.source, flags.destination, draft=flags.draft)
    return 0


def _inspect(flags: argparse.Namespace) -> int:
    from convert.inspect import describe

    print("\n".join(describe(flags.path)))
    return 0


def _doctor(flags: argparse.Namespace) -> int:
    from ddtree_jax.hf_config import config_deviations

    lines = config_deviations(flags.path)
    print("\n".join(lines or ["as published"]))
    return int(any(line.startswith("refused") for line in lines))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convert",
        description="Makes and describes ddtree_jax checkpoints (docs/checkpoint.md).",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    hf = commands.add_parser(
        "hf",
        help="convert a Hugging Face checkpoint",
        description="Converts a Hugging Face checkpoint of Kimi K2 with INT4 experts, "
        "or of a DFlash drafter. INT4 is carried bit for bit. Needs free space for "
        "the size of SRC, in bytes, and less than 2 GB of memory.",
    )
    hf.add_argument("source", type=Path, metavar="SRC", help="directory to read")
    hf.add_argument(
        "destination",
        type=Path,
        metavar="DST",
        help="directory to make; it must not exist, and appears only when complete",
    )
    hf.add_argument(
        "--draft",
        type=Path,
        metavar="DRAFT_SRC",
        help="a drafter's directory, converted into DST/draft",
    )
    hf.set_defaults(run=_hf)
    inspect = commands.add_parser(
        "inspect", help="say what a checkpoint is, and whether it is complete"
    )
    inspect.add_argument("path", type=Path, metavar="PATH", help="its directory")
    inspect.set_defaults(run=_inspect)
    doctor = commands.add_parser(
        "doctor", help="say how a config.json differs from the published one"
    )
    doctor.add_argument(
        "path", type=Path, metavar="PATH", help="config.json or its directory"
    )
    doctor.set_defaults(run=_doctor)
    return parser


if __name__ == "__main__":
    sys.exit(main())
