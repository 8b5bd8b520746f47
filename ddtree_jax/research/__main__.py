"""Owns the command line: `python -m ddtree_jax.research accept | slots | agree`.

Exit codes: 0 done, 1 bad input or a refused measurement, 2 wrong usage, 130 stopped.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ddtree_jax.errors import DDTreeError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    flags = _parser().parse_args(argv)
    if flags.devices is not None:
        # On CPU, as many virtual devices; other platforms are not affected.
        wanted = f"--xla_force_host_platform_device_count={flags.devices}"
        present = os.environ.get("XLA_FLAGS", "")
        if wanted.partition("=")[0] not in present:
            os.environ["XLA_FLAGS"] = f"{present} {wanted}".strip()
    # Orbax warns about what is as intended here, such as the absence of OCDBT.
    logging.getLogger("absl").setLevel(logging.ERROR)
    from ddtree_jax.research import commands

    try:
        getattr(commands, flags.command)(flags, argv)
    except DDTreeError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, got {text!r}")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise ValueError(text)
    return value


def _list_of[T](kind: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    def comma_separated_list(text: str) -> tuple[T, ...]:
        return tuple(kind(part) for part in text.split(","))

    return comma_separated_list


def _add_common(parser: argparse.ArgumentParser, *, max_tokens: int = 128) -> None:
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        required=True,
        metavar="DIR",
        help="checkpoint directory with a drafter in draft/",
    )
    add(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE|DIR",
        help='.jsonl of {"prompt_ids": […]}, or a directory of such files',
    )
    add(
        "--out",
        "--output",
        type=Path,
        required=True,
        metavar="RECORD.json",
        help="record to write; replaced if it exists",
    )
    add(
        "--devices",
        type=_whole,
        metavar="N",
        help="devices to shard over (default: all); on CPU, as many virtual ones",
    )
    add(
        "--max-tokens",
        type=_whole,
        default=max_tokens,
        metavar="N",
        help="tokens of each text (default: %(default)s)",
    )
    add(
        "--slots",
        type=_whole,
        default=8,
        metavar="N",
        help="prompts decoded at once; changes the time only (default: %(default)s)",
    )


def _add_drafting(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    add(
        "--feature-offset",
        type=int,
        choices=(-1, 0, 1),
        default=0,
        help="ablation: take the drafter's features this many layers later",
    )
    add(
        "--rope-amplitude",
        type=_number,
        metavar="X",
        help="factor on the drafter's rotary embedding (default: config.json's)",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ddtree_jax.research",
        description="Measures what drafting is worth (docs/research.md).",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    accept = commands.add_parser(
        "accept",
        help="acceptance length of tree shapes, budgets and temperatures",
        description="Measures acceptance_length: tokens emitted per decoding step, "
        "bonus token included, with 95 % confidence intervals over prompts.",
        allow_abbrev=False,
    )
    _add_common(accept)
    _add_drafting(accept)
    accept.add_argument(
        "--shapes",
        type=_list_of(str),
        default=("plain", "chain", "ddtree"),
        metavar="NAMES",
        help="of plain, chain, ddtree (default: all)",
    )
    accept.add_argument(
        "--budgets",
        type=_list_of(_whole),
        default=(8, 16, 32, 64),
        metavar="LIST",
        help="draft nodes of a ddtree, without the root (default: 8,16,32,64)",
    )
    accept.add_argument(
        "--temperatures",
        type=_list_of(_number),
        default=(0.0, 1.0),
        metavar="LIST",
        help="0 is greedy (default: 0,1)",
    )
    accept.add_argument(
        "--mask-slot-0",
        action="store_true",
        help="ablation: the drafter gets MASK in place of the known token",
    )
    accept.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="also draw the budget curve"
    )
    slots = commands.add_parser(
        "slots",
        help="the drafter's accuracy and loss at each drafted position",
        description="Measures the drafter along the target's own greedy text: accuracy "
        "at 1 and 8, cross-entropy in bits, and the target's entropy in bits.",
        allow_abbrev=False,
    )
    _add_common(slots)
    _add_drafting(slots)
    _add_agree(commands)
    return parser


def _add_agree(commands) -> None:
    agree = commands.add_parser(
        "agree",
        help="how far greedy text in bfloat16 agrees with the float32 reference",
        description="Decodes greedily in float32, plainly, and in bfloat16, plainly "
        "and with trees. Where texts first differ, measures the margin between both "
        "tokens in float32, in nats.",
        allow_abbrev=False,
    )
    _add_common(agree, max_tokens=64)
    agree.add_argument(
        "--budget",
        type=_whole,
        default=32,
        metavar="N",
        help="draft nodes of a tree, without the root (default: %(default)s)",
    )
    agree.add_argument(
        "--num-prompts",
        type=_whole,
        default=24,
        metavar="N",
        help="first prompts to decode, or all if there are fewer "
        "(default: %(default)s)",
    )


if __name__ == "__main__":
    sys.exit(main())
