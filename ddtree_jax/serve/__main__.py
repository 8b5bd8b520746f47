"""Runs the server: flags -> EngineConfig -> Engine -> HTTP."""

import argparse
import hashlib
import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from socket import socket
from typing import NoReturn

from ddtree_jax.engine import Engine, EngineConfig
from ddtree_jax.errors import DDTreeError
from ddtree_jax.serve.app import Served
from ddtree_jax.serve.server import DRAIN_S, Server, listen

PROGRAM = "python -m ddtree_jax.serve"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Ends with one line instead of a usage text."""
        self.exit(2, f"{PROGRAM}: error: {message} (--help lists the flags)\n")


def _whole(least: int, most: int = 2**31 - 1) -> Callable[[str], int]:
    def whole_number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {least} to {most}, got {text!r}"
            )
        return value

    return whole_number


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


# Engine flag -> (type, metavar, what it sets). Defaults are EngineConfig's; where that
# is None, the text says what the engine then does.
_ENGINE_FLAGS: dict[str, tuple[Callable[[str], object], str, str]] = {
    "model": (Path, "DIR", "checkpoint directory that `python -m convert` wrote"),
    "draft": (Path, "DIR", "the drafter's checkpoint (default: the model's draft/)"),
    "devices": (_whole(1), "N", "devices to shard over (default: all)"),
    "slots": (_whole(1), "N", "requests that run at once; others wait"),
    "tree_budget": (
        _whole(0),
        "N",
        "draft nodes in a tree, the root not counted; 0 is plain decoding",
    ),
    "page_size": (_whole(1), "N", "tokens in a cache page"),
    "max_context_len": (
        _whole(1),
        "N",
        "most tokens of a request with its prompt (default: the model's)",
    ),
    "num_pages": (
        _whole(1),
        "N",
        "cache pages in all (default: enough for every slot)",
    ),
    "prefill_chunk": (_whole(1), "N", "prompt tokens processed in one step"),
    "dtype": (str, "TYPE", "bfloat16 or float32: of activations and caches"),
    "latent_norm_eps": (
        _positive,
        "X",
        "epsilon of the norms inside attention (default: config.json's)",
    ),
    "rope_amplitude": (
        _positive,
        "X",
        "factor on the drafter's rotary embedding (default: config.json's)",
    ),
}


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM,
        description="Serves a converted checkpoint through an OpenAI-compatible API.",
        epilog=f"SIGTERM or SIGINT stops accepting and gives running requests "
        f"{DRAIN_S} seconds to end; a second one ends the process at once.",
        allow_abbrev=False,
    )
    for field in fields(EngineConfig):
        kind, metavar, meaning = _ENGINE_FLAGS[field.name]
        required = field.default is MISSING
        is_stated = required or field.default is None
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=kind,
            metavar=metavar,
            required=required,
            default=None if required else field.default,
            choices=("bfloat16", "float32") if field.name == "dtype" else None,
            help=meaning if is_stated else f"{meaning} (default: {field.default})",
        )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen on (default: %(default)s, this machine only)",
    )
    parser.add_argument(
        "--port",
        type=_whole(0, 65535),
        default=8000,
        metavar="N",
        help="port to listen on; 0 takes a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--model-name",
        metavar="NAME",
        help="name that requests use (default: the checkpoint's)",
    )
    return parser


def _fingerprint(config: EngineConfig) -> str:
    return "fp_" + hashlib.sha256(repr(config).encode()).hexdigest()[:12]


def run(flags: argparse.Namespace) -> None:
    """Serves until a signal ends it.

    Raises:
      DDTreeError: The flags or the checkpoint cannot be served.
    """
    config = EngineConfig(
        **{f.name: getattr(flags, f.name) for f in fields(EngineConfig)}
    )
    # Before the model: a taken port must not cost minutes of loading.
    with listen(flags.host, flags.port) as bound:
        _serve(config, flags, bound)


def _serve(config: EngineConfig, flags: argparse.Namespace, bound: socket) -> None:
    engine = Engine.load(config)
    served = Served(
        engine=engine,
        model_name=flags.model_name or engine.model_name,
        fingerprint=_fingerprint(config),
    )
    host, port = bound.getsockname()[:2]
    ready = (
        f"ddtree_jax is ready: http://{f'[{host}]' if ':' in host else host}:{port}/v1 "
        f"model={served.model_name} devices={config.devices or 'all'} "
        f"slots={config.slots} tree_budget={config.tree_budget}"
    )
    Server(served, on_ready=partial(print, ready, flush=True)).run(sockets=[bound])


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 after an orderly stop."""
    flags = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        run(flags)
    except DDTreeError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
