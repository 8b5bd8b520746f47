"""The stages' command line; docs/tiny.md tells in which order to run them."""

import argparse
import shutil
import time
from pathlib import Path

from tiny import corpus
from tiny.train import pace

MODEL = Path(__file__).parents[1] / "model"


def _corpus(arguments: argparse.Namespace) -> None:
    corpus.build(
        arguments.model,
        arguments.out,
        processes=arguments.processes,
        max_bytes=arguments.max_bytes,
    )
    print((arguments.out / "manifest.json").read_text())


def _target(arguments: argparse.Namespace) -> None:
    import jax.numpy as jnp

    from ddtree_jax.hf_config import read_model_config
    from tiny.train.target import initial_state, restore, train_target
    from tiny.train.target_model import choose_attention

    c = read_model_config(arguments.model)
    state, step, elapsed = restore(arguments.out, initial_state(c, seed=0))
    plan = pace.Pace(
        minutes=arguments.minutes,
        steps=arguments.steps,
        elapsed=elapsed,
        began=pace.STARTED,
    )
    done = train_target(
        c,
        corpus.load(arguments.data),
        arguments.out,
        pace=plan,
        state=state,
        first_step=step,
        batch=arguments.batch,
        length=arguments.length,
        attention=choose_attention(c),
        dtype=jnp.bfloat16,
        limit=elapsed + 60 * arguments.limit,
    )
    print("the plan is done" if done else "not done: run the same command again")


def _quantise(arguments: argparse.Namespace) -> None:
    import jax.numpy as jnp

    from ddtree_jax.hf_config import read_model_config
    from tiny.train.rounding import quantise_target
    from tiny.train.target import initial_state, restore
    from tiny.train.target_model import choose_attention

    c = read_model_config(arguments.model)
    state, step, _ = restore(arguments.target, initial_state(c, seed=0))
    if step == 0:
        raise SystemExit(f"error: {arguments.target} holds no trained target")
    quantise_target(
        c,
        state.params,
        corpus.load(arguments.data),
        arguments.out,
        length=arguments.length,
        attention=choose_attention(c),
        dtype=jnp.bfloat16,
    )
    for name in ("manifest.json", "packages.json"):
        shutil.copyfile(arguments.data / name, arguments.out / name)
    shutil.copyfile(arguments.target / "log.jsonl", arguments.out / "target.jsonl")


def _draft(arguments: argparse.Namespace) -> None:
    import jax.numpy as jnp

    from ddtree_jax.hf_config import read_draft_config, read_model_config
    from tiny.train import draft, rounding
    from tiny.train.target import restore
    from tiny.train.target_model import choose_attention
    from tiny.train.texts import load_texts
    from tiny.train.weights import load_pieces

    c = read_model_config(arguments.model)
    d = read_draft_config(arguments.model / "draft")
    stored = load_pieces(arguments.target, rounding.NAME)
    target = rounding.usable(stored, jnp.bfloat16)
    state, step, elapsed = restore(arguments.out, draft.initial_draft(d, seed=1))
    plan = pace.Pace(
        minutes=arguments.minutes,
        steps=arguments.steps,
        elapsed=elapsed,
        began=pace.STARTED,
    )
    texts = load_texts(
        c,
        target,
        corpus.load(arguments.data),
        arguments.out,
        length=arguments.length,
        seconds=60 * arguments.writing,
        batch=arguments.writers,
    )
    done = draft.train_draft(
        c,
        d,
        target,
        texts.pop("train"),
        texts,
        arguments.out,
        pace=plan,
        state=state,
        first_step=step,
        batch=arguments.batch,
        blocks=arguments.blocks,
        attention=choose_attention(c),
        dtype=jnp.bfloat16,
        limit=elapsed + 60 * arguments.limit,
    )
    print("the plan is done" if done else "not done: run the same command again")


def _export(arguments: argparse.Namespace) -> None:
    from ddtree_jax.hf_config import read_draft_config
    from tiny.train import draft

    draft.export(
        read_draft_config(arguments.model / "draft"), arguments.draft, arguments.out
    )


def main() -> None:
    """Runs one stage."""
    parser = argparse.ArgumentParser(prog="python -m tiny.train")
    stages = parser.add_subparsers(required=True, metavar="STAGE")

    def stage(name: str, run, text: str) -> argparse.ArgumentParser:
        added = stages.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        added.add_argument("--out", type=Path, required=True, metavar="DIR")
        added.add_argument("--model", type=Path, default=MODEL, metavar="DIR")
        return added

    added = stage("corpus", _corpus, "Collects and tokenises what is installed.")
    added.add_argument("--processes", type=int, default=16, metavar="N")
    added.add_argument("--max-bytes", type=int, metavar="N", help="of a package")

    added = stage("target", _target, "Trains the target.")
    _add_training(added, batch=64, length=1024)

    added = stage("quantise", _quantise, "Rounds the target's experts to INT4.")
    added.add_argument("--data", type=Path, required=True, metavar="DIR")
    added.add_argument("--target", type=Path, required=True, metavar="DIR")
    added.add_argument("--length", type=int, default=1024, metavar="N")

    added = stage("draft", _draft, "Trains the drafter on the quantised target.")
    added.add_argument("--target", type=Path, required=True, metavar="DIR")
    _add_training(added, batch=96, length=640)
    added.add_argument(
        "--writing",
        type=float,
        default=1.5,
        metavar="MIN",
        help="in which the target writes (%(default)s)",
    )
    added.add_argument("--writers", type=int, default=2048, metavar="N")
    added.add_argument("--blocks", type=int, default=64, metavar="N")

    added = stage("export", _export, "Writes the drafter as it is shipped.")
    added.add_argument("--draft", type=Path, required=True, metavar="DIR")

    arguments = parser.parse_args()
    began = time.monotonic()
    arguments.run(arguments)
    print(f"{time.monotonic() - began:.1f} s")


def _add_training(parser: argparse.ArgumentParser, *, batch: int, length: int) -> None:
    parser.add_argument("--data", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="of the whole stage (%(default)s)"
    )
    parser.add_argument("--steps", type=int, help="in place of --minutes")
    parser.add_argument(
        "--limit", type=float, default=1e6, metavar="MIN", help="of this command"
    )
    parser.add_argument("--batch", type=int, default=batch, metavar="N")
    parser.add_argument("--length", type=int, default=length, metavar="N")


if __name__ == "__main__":
    main()
