"""Owns the command line: `python -m convert hf | sglang | export | verify | …`.

Exit codes: 0 done, 1 bad input, a failed write or checkpoints that differ, 2 wrong
usage, 130 interrupted.
"""

import argparse
import io
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ddtree_jax.errors import DDTreeError


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    flags = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names in a JSON file may hold what is no character.
            stream.reconfigure(errors="backslashreplace")
    # Orbax warns about what is as intended here, such as the absence of OCDBT, and
    # asks JAX for its processes, which would take hold of a GPU.
    logging.getLogger("absl").setLevel(logging.ERROR)
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        return flags.run(flags)
    except DDTreeError as error:
        return _fail(str(error))
    except KeyboardInterrupt as error:
        print(f"interrupted; {str(error) or 'nothing was written'}", file=sys.stderr)
        return 130
    except OSError as error:
        return _fail(f"{error.filename or 'file'}: {error.strerror or error}")


def _fail(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return 1


def _misused(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)
    return 2


def _hf(flags: argparse.Namespace) -> int:
    from convert.hf_source import open_hf

    return _to_ours(
        flags, open_hf(flags.source, quantise_experts=flags.quantise_experts)
    )


def _sglang(flags: argparse.Namespace) -> int:
    from convert.sglang.source import open_sglang

    return _to_ours(flags, open_sglang(flags.source))


def _to_ours(flags: argparse.Namespace, source) -> int:
    from convert import interrupt
    from convert.detect import open_checkpoint
    from convert.dry_run import report_to_ours
    from convert.ours_target import convert_to_ours

    interrupt.watch()
    draft = open_checkpoint(flags.draft) if flags.draft else None
    if flags.dry_run:
        report_to_ours(source, flags.destination, draft=draft)
    else:
        convert_to_ours(source, flags.destination, draft=draft)
    return 0


def _export(flags: argparse.Namespace) -> int:
    from convert import interrupt
    from convert.detect import open_checkpoint, open_draft
    from convert.dry_run import report_to_hf, report_to_sglang
    from convert.hf_target import convert_to_hf
    from convert.sglang.target import convert_to_sglang

    given = {
        name: value
        for name in ("tp", "ep", "layout")
        if (value := getattr(flags, name)) is not None
    }
    if flags.to != "sglang" and given:
        return _misused(f"--{next(iter(given))} goes with --to sglang")
    if flags.to == "sglang" and "tp" not in given:
        return _misused("--to sglang needs --tp, the number of ranks")
    interrupt.watch()
    source = open_checkpoint(flags.source, quantise_experts=flags.quantise_experts)
    draft = open_draft(flags.source)
    place, part_bytes = flags.destination, flags.part_bytes
    if flags.to == "sglang":
        run = report_to_sglang if flags.dry_run else convert_to_sglang
    else:
        run = report_to_hf if flags.dry_run else convert_to_hf
    run(source, place, draft=draft, part_bytes=part_bytes, **given)
    return 0


def _verify(flags: argparse.Namespace) -> int:
    from convert import interrupt
    from convert.verify import verify

    interrupt.watch()
    same = verify(flags.first, flags.second, quantise_experts=flags.quantise_experts)
    return 0 if same else 1


def _inspect(flags: argparse.Namespace) -> int:
    from convert.inspect import describe

    lines = describe(flags.path, quantise_experts=flags.quantise_experts)
    print("\n".join(lines))
    return 0


def _doctor(flags: argparse.Namespace) -> int:
    from convert.doctor import examine

    wrong = False
    for finding in examine(flags.path):
        print(finding, flush=True)
        wrong |= finding.verdict == "wrong"
    return int(wrong)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="convert",
        description="Makes, checks and describes checkpoints (docs/checkpoint.md).",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    hf = commands.add_parser(
        "hf",
        help="convert a Hugging Face checkpoint",
        description="Converts a Hugging Face checkpoint of Kimi K2 (INT4 experts as "
        "Kimi's own or in GPTQ's form, which are carried bit for bit; FP8 in blocks; "
        "bfloat16), or of a DFlash drafter. Needs free space for "
        "the size of SRC, in bytes, and less than 1 GB of memory.",
    )
    _add_directories(hf)
    _add_draft(hf)
    _add_dry_run(hf)
    _add_quantise(hf, "routed experts that are")
    hf.set_defaults(run=_hf)
    sglang = commands.add_parser(
        "sglang",
        help="convert an SGLang sharded_state or presharded checkpoint",
        description="Converts what SGLang saved with --load-format sharded_state or "
        "presharded, of any number of ranks, in Marlin, raw or Triton layout.",
    )
    _add_directories(sglang)
    _add_draft(sglang)
    _add_dry_run(sglang)
    sglang.set_defaults(run=_sglang)
    export = commands.add_parser(
        "export",
        help="write a checkpoint of any format in another one",
        description="Writes any checkpoint that this program reads in the format of "
        "--to. The format of SRC is recognised.",
    )
    _add_directories(export)
    export.add_argument(
        "--to", required=True, choices=("hf", "sglang"), help="format of DST"
    )
    export.add_argument(
        "--tp",
        type=_positive,
        metavar="N",
        help="ranks of an SGLang checkpoint, as in its --tp-size",
    )
    export.add_argument(
        "--ep",
        type=_positive,
        metavar="N",
        help="groups of ranks that divide the experts, as in SGLang's --ep-size (1)",
    )
    export.add_argument(
        "--layout",
        choices=("marlin", "raw", "triton"),
        help="of an SGLang checkpoint's experts, which the GPU decides: marlin (the "
        "default; Hopper, Ada), triton (B200, ROCm) or raw (as before it packs them)",
    )
    export.add_argument(
        "--part-bytes",
        type=_positive,
        default=5_000_000_000,
        metavar="N",
        help="bytes of tensors in a file, at most (5e9); a larger tensor stands alone",
    )
    _add_dry_run(export)
    _add_quantise(export, "routed experts that are")
    export.set_defaults(run=_export)
    verify = commands.add_parser(
        "verify",
        help="compare two checkpoints of any formats, tensor by tensor",
        description="Compares by BLAKE3 every tensor of the two, under its Hugging "
        "Face name. Exit code 1 if they differ.",
    )
    verify.add_argument("first", type=Path, metavar="A", help="a directory")
    verify.add_argument("second", type=Path, metavar="B", help="another")
    _add_quantise(verify, "routed experts of A that are")
    verify.set_defaults(run=_verify)
    inspect = commands.add_parser(
        "inspect", help="say what a checkpoint is, and whether it is complete"
    )
    inspect.add_argument("path", type=Path, metavar="PATH", help="its directory")
    _add_quantise(inspect, "routed experts that are")
    inspect.set_defaults(run=_inspect)
    doctor = commands.add_parser(
        "doctor",
        help="say what is wrong with a checkpoint, or odd, or was not checked",
        description="Examines a checkpoint of any format: config.json against the "
        "published one, tokenizer files, weights against their index and headers, "
        "totals, and how well the model predicts a bundled text, if it fits into "
        "memory three times. Exit code 1 if a line begins with `wrong`.",
    )
    doctor.add_argument(
        "path", type=Path, metavar="PATH", help="config.json or its directory"
    )
    doctor.set_defaults(run=_doctor)
    return parser


def _add_directories(command: argparse.ArgumentParser) -> None:
    command.add_argument("source", type=Path, metavar="SRC", help="directory to read")
    command.add_argument(
        "destination",
        type=Path,
        metavar="DST",
        help="directory to make; it must not exist, and appears only when complete",
    )


def _add_draft(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--draft",
        type=Path,
        metavar="DRAFT_SRC",
        help="a drafter's directory, converted into DST/draft",
    )


def _add_dry_run(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="write nothing; read headers only, check them, and print what would be "
        "written, what would be lost, and the bytes of the weights a device or rank",
    )


def _add_quantise(command: argparse.ArgumentParser, what: str) -> None:
    command.add_argument(
        "--quantise-experts",
        action="store_true",
        help=f"make INT4 of {what} FP8 or bfloat16; without this flag they are refused",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a number ≥ 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
