"""Owns the command line: `python -m bench tree-build | tree-mla | int4 | …`.

Exit codes: 0 done, 1 bad input or worse than the threshold, 2 wrong usage.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ddtree_jax.errors import ConfigError, DDTreeError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    flags = _parser().parse_args(argv)
    logging.getLogger("absl").setLevel(logging.ERROR)
    try:
        return flags.run(flags, argv)
    except DDTreeError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _tree_build(flags: argparse.Namespace, argv: Sequence[str]) -> int:
    from bench import record, tree_build
    from ddtree_jax.research.record import write_record

    rows = tree_build.measure()
    _print(rows)
    path = flags.out or record.results_path("tree_build")
    write_record(path, record.bench_record("tree_build", rows, argv))
    print(f"{path} written")
    return 0


def _tree_mla(flags: argparse.Namespace, argv: Sequence[str]) -> int:
    from bench import tree_mla_command

    tree_mla_command.run(flags.cases, flags.output, argv)
    return 0


def _int4(flags: argparse.Namespace, argv: Sequence[str]) -> int:
    from bench import int4_command

    int4_command.run(flags.cases, flags.output, argv)
    return 0


def _tune_tree_mla(flags: argparse.Namespace, argv: Sequence[str]) -> int:
    from bench import tree_mla_tuning

    tree_mla_tuning.run(flags.cases, flags.output, argv)
    return 0


def _step(flags: argparse.Namespace, argv: Sequence[str]) -> int:
    if flags.devices is not None:
        # On CPU, as many virtual devices; other platforms are not affected.
        extra = f"--xla_force_host_platform_device_count={flags.devices}"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {extra}".strip()
    from contextlib import nullcontext

    from bench import record, step
    from ddtree_jax.research.record import write_record

    given = nullcontext(flags.model) if flags.model else step.random_model()
    with given as model:
        rows = step.measure(
            model,
            devices=flags.devices,
            dtype=flags.dtype,
            batch=flags.batch,
            context=flags.context,
            budgets=flags.budgets,
            repeats=flags.repeats,
        )
    _print(rows)
    if flags.out:
        write_record(flags.out, record.bench_record("step", rows, argv))
        print(f"{flags.out} written")
    return 0


def _convert(flags: argparse.Namespace, argv: Sequence[str]) -> int:
    import tempfile

    from bench import convert, record
    from ddtree_jax.research.record import write_record

    with tempfile.TemporaryDirectory(dir=flags.scratch) as scratch:
        rows = convert.measure(
            Path(scratch), experts=flags.experts, repeats=flags.repeats
        )
    for row in rows:
        figures = "  ".join(f"{k} {v}" for k, v in row.items() if k != "case")
        print(*row["case"].values(), figures, sep="  ")
    path = flags.out or record.results_path("convert")
    write_record(path, record.bench_record("convert", rows, argv))
    print(f"{path} written")
    return 0


def _print(rows: list[dict]) -> None:
    for row in rows:
        case = "  ".join(f"{name} {value}" for name, value in row["case"].items())
        print(f"{case}  {row['us']:.0f} us [{row['p10']:.0f}, {row['p90']:.0f}]")


def _prompts(flags: argparse.Namespace, _: Sequence[str]) -> int:
    from bench.prompts import write_prompts

    count = write_prompts(
        flags.model, flags.text, flags.out, tokens=flags.tokens, count=flags.count
    )
    print(f"{flags.out}: {count} prompts of {flags.tokens} tokens")
    return 0


def _compare(flags: argparse.Namespace, _: Sequence[str]) -> int:
    from bench.compare import compare
    from bench.record import read_record

    lines, good = compare(
        read_record(flags.old), read_record(flags.new), threshold=flags.threshold
    )
    print("\n".join(lines))
    return 0 if good else 1


def _tables(flags: argparse.Namespace, _: Sequence[str]) -> int:
    from bench.tables import README, updated

    text = README.read_text(encoding="utf-8")
    new = updated(text)
    if flags.check and new != text:
        raise ConfigError("README.md differs from bench/results: run bench tables")
    README.write_text(new, encoding="utf-8")
    return 0


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, got {text!r}")
    return int(text)


def _patterns(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _budgets(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"expected numbers like 0,8,32, got {text!r}")
    return tuple(map(int, parts))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench", description="Times parts of ddtree_jax (docs/research.md)."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run, about: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=about, description=about)
        made.set_defaults(run=run)
        return made

    tree_build = command(
        "tree-build", _tree_build, "time the tree builder, in microseconds"
    )
    tree_build.add_argument(
        "--out", type=Path, metavar="FILE", help="record (default: in bench/results)"
    )
    _add_kernel(
        command(
            "tree-mla",
            _tree_mla,
            "time tree-MLA attention beside XLA, in microseconds; needs a Hopper GPU",
        ),
        pattern="kimi-heads8-*-context5632-*",
    )
    _add_kernel(
        command(
            "tune-tree-mla",
            _tune_tree_mla,
            "time tree-MLA attention by each kernel, and with all cases write the "
            "table of which takes a call; needs a Hopper GPU",
        ),
        pattern="kimi-heads64-*",
    )
    _add_kernel(
        command(
            "int4",
            _int4,
            "time INT4 products beside XLA, in microseconds; needs a Hopper GPU",
        ),
        pattern="kimi-tp8-*",
    )
    step = command("step", _step, "time the whole step, in microseconds")
    _add_step_flags(step)
    convert = command("convert", _convert, "time conversions beside cp, and restoring")
    convert.add_argument(
        "--experts",
        type=_whole,
        default=288,
        help="of the source, 25 MB each; the default makes 8.4 GB, and three times "
        "that is needed in all",
    )
    convert.add_argument(
        "--repeats", type=_whole, default=5, help="default: %(default)s"
    )
    convert.add_argument(
        "--scratch", type=Path, metavar="DIR", help="where to write (default: /tmp)"
    )
    convert.add_argument(
        "--out", type=Path, metavar="FILE", help="record (default: in bench/results)"
    )
    prompts = command("prompts", _prompts, "cut texts into prompts of token ids")
    prompts.add_argument("--model", type=Path, required=True, metavar="DIR")
    prompts.add_argument("--text", type=Path, required=True, nargs="+", metavar="FILE")
    prompts.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    prompts.add_argument(
        "--tokens", type=_whole, default=64, help="of each (default: %(default)s)"
    )
    prompts.add_argument(
        "--count", type=_whole, default=100, help="at most (default: %(default)s)"
    )
    compare = command("compare", _compare, "compare two records; exit 1 if worse")
    compare.add_argument("old", type=Path, metavar="A.json")
    compare.add_argument("new", type=Path, metavar="B.json")
    compare.add_argument(
        "--threshold",
        type=float,
        default=0.1,
        help="tolerated loss, as a share (default: %(default)s)",
    )
    tables = command("tables", _tables, "make README's tables anew from bench/results")
    tables.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 if they differ"
    )
    return parser


def _add_kernel(made: argparse.ArgumentParser, *, pattern: str) -> None:
    made.add_argument(
        "--cases",
        type=_patterns,
        default=(),
        metavar="LIST",
        help=f"names, or patterns like {pattern} (default: all)",
    )
    made.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="record (default: in bench/results)",
    )


def _add_step_flags(step: argparse.ArgumentParser) -> None:
    add = step.add_argument
    add("--model", type=Path, metavar="DIR", help="default: a small random one")
    add("--devices", type=_whole, metavar="N", help="default: all")
    add("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    add("--batch", type=_whole, default=8, help="requests (default: %(default)s)")
    add("--context", type=_whole, default=256, help="tokens (default: %(default)s)")
    add(
        "--budgets",
        type=_budgets,
        default=(0, 8, 32),
        metavar="LIST",
        help="draft nodes without the root; 0 is plain decoding (default: 0,8,32)",
    )
    add("--repeats", type=_whole, default=20, help="default: %(default)s")
    add("--out", type=Path, metavar="FILE", help="record (default: print only)")


if __name__ == "__main__":
    sys.exit(main())
