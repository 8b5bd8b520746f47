"""Owns what the commands do: load, measure with a progress bar, print, write."""

import argparse
import os
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from ddtree_jax.errors import ConfigError
from ddtree_jax.research import acceptance, agreement, draft_slots
from ddtree_jax.research.decode import Decoder
from ddtree_jax.research.models import Models, load_models
from ddtree_jax.research.plot import plot_budgets
from ddtree_jax.research.prompts import Prompts, read_prompts
from ddtree_jax.research.record import make_record, write_record
from ddtree_jax.research.shapes import shapes_to_compare
from ddtree_jax.research.statistics import DEGENERATE_BELOW

_PROGRAM = "ddtree_jax.research"


def accept(flags: argparse.Namespace, argv: Sequence[str]) -> None:
    """Measures acceptance lengths; see `acceptance.measure`."""
    begin = time.monotonic()
    decoder, prompts = _set_up(flags)
    horizon = decoder.models.draft_config.draft_horizon
    shapes = shapes_to_compare(flags.shapes, flags.budgets, horizon)
    print(acceptance.DEFINITION)
    total = len(shapes) * len(flags.temperatures) * len(prompts.ids)
    with _progress() as progress:
        task = progress.add_task("decoding", total=total)
        rows = acceptance.measure(
            decoder,
            prompts.ids,
            shapes=shapes,
            temperatures=flags.temperatures,
            max_tokens=flags.max_tokens,
            case=_case(flags, prompts),
            mask_slot_0=flags.mask_slot_0,
            on_row=_print_acceptance,
            on_answer=lambda: progress.advance(task),
        )
    record = make_record("acceptance", rows, program=_PROGRAM, argv=argv)
    record["definition"] = acceptance.DEFINITION
    _finish(record, flags, prompts, begin)
    if flags.plot is not None:
        plot_budgets(flags.plot, rows, f"{flags.model.name}, {prompts.name}")


def slots(flags: argparse.Namespace, argv: Sequence[str]) -> None:
    """Measures the drafter position by position; see `draft_slots`."""
    begin = time.monotonic()
    decoder, prompts = _set_up(flags)
    print(draft_slots.DEFINITION)
    with _progress() as progress:
        task = progress.add_task("drafting", total=len(prompts.ids))
        rows = draft_slots.measure_slots(
            decoder,
            prompts.ids,
            max_tokens=flags.max_tokens,
            case=_case(flags, prompts),
            on_answer=lambda: progress.advance(task),
        )
    for row in rows:
        print(
            f"slot {row['case']['slot']}  accuracy@1 {row['accuracy_at_1']:.3f}  "
            f"@8 {row['accuracy_at_8']:.3f}  "
            f"cross-entropy {row['cross_entropy_bits']:.2f} bits  "
            f"(target's entropy {row['target_entropy_bits']:.2f})  "
            f"survival {row['survival']:.3f}"
        )
    record = make_record("draft_slots", rows, program=_PROGRAM, argv=argv)
    record["definition"] = draft_slots.DEFINITION
    _finish(record, flags, prompts, begin)


def agree(flags: argparse.Namespace, argv: Sequence[str]) -> None:
    """Measures how far bfloat16 agrees with float32; see `agreement.measure`."""
    begin = time.monotonic()
    _check_writable(flags)
    exact = load_models(flags.model, devices=flags.devices, dtype="float32")
    rounded = load_models(flags.model, devices=flags.devices, dtype="bfloat16")
    prompts = read_prompts(flags.prompts, vocab_size=exact.config.vocab_size)
    prompts = prompts._replace(ids=prompts.ids[: flags.num_prompts])
    print(agreement.DEFINITION)
    with _progress() as progress:
        task = progress.add_task("comparing", total=4 * len(prompts.ids))
        rows, margins = agreement.measure(
            _decoder(exact, prompts, flags),
            _decoder(rounded, prompts, flags),
            prompts.ids,
            budget=flags.budget,
            max_tokens=flags.max_tokens,
            case=_source(flags, prompts),
            on_answer=lambda: progress.advance(task),
        )
    for row in rows:
        _print_agreement(row)
    loops = margins["distinct_4grams"] < DEGENERATE_BELOW
    print(
        f"float32 margins of {margins['tokens']} tokens: p1 {margins['p1']:.3g}, "
        f"p5 {margins['p5']:.3g}, median {margins['median']:.3g} nats; "
        f"near-ties {margins['near_ties']:.1%} (bound {margins['bound_median']:.3g}); "
        f"distinct 4-grams {margins['distinct_4grams']:.2f}"
        f"{' DEGENERATE TEXT' if loops else ''}"
    )
    record = make_record("agreement", rows, program=_PROGRAM, argv=argv)
    record["definition"] = agreement.DEFINITION
    record["float32_margins"] = margins
    _finish(record, flags, prompts, begin)


def _check_writable(flags: argparse.Namespace) -> None:
    # Known now, not after the measurement.
    for path in filter(None, (flags.out, getattr(flags, "plot", None))):
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise ConfigError(f"{path} cannot be written; expected a file's name")


def _set_up(flags: argparse.Namespace) -> tuple[Decoder, Prompts]:
    _check_writable(flags)
    models = load_models(
        flags.model,
        devices=flags.devices,
        dtype=flags.dtype,
        rope_amplitude=flags.rope_amplitude,
        feature_offset=flags.feature_offset,
    )
    prompts = read_prompts(flags.prompts, vocab_size=models.config.vocab_size)
    return _decoder(models, prompts, flags), prompts


def _decoder(models: Models, prompts: Prompts, flags: argparse.Namespace) -> Decoder:
    # The last step may lead past max_tokens by what it drafted.
    longest = max(map(len, prompts.ids))
    max_rows = longest + flags.max_tokens + models.draft_config.draft_block_size
    count = min(flags.slots, len(prompts.ids))
    return Decoder(models, slots=count, max_rows=max_rows)


def _case(flags: argparse.Namespace, prompts: Prompts) -> dict[str, Any]:
    """Returns what all rows have in common; ablations only where there are any."""
    ablations = {
        "feature_offset": flags.feature_offset or None,
        "mask_slot_0": getattr(flags, "mask_slot_0", False) or None,
        "rope_amplitude": flags.rope_amplitude,
    }
    named = {name: value for name, value in ablations.items() if value is not None}
    return {**_source(flags, prompts), **named}


def _source(flags: argparse.Namespace, prompts: Prompts) -> dict[str, Any]:
    return {"model": flags.model.resolve().name, "prompts": prompts.name}


def _print_acceptance(row: dict[str, Any]) -> None:
    case = row["case"]
    loops = row["distinct_4grams"] < DEGENERATE_BELOW
    print(
        f"T {case['temperature']:g}  {case['shape']:<6} {case['budget']:>3}  "
        f"acceptance_length {row['acceptance_length']:.3f} "
        f"[{row['ci_low']:.3f}, {row['ci_high']:.3f}]  "
        f"distinct 4-grams {row['distinct_4grams']:.2f}"
        f"{' DEGENERATE TEXT' if loops else ''}  steps {row['steps']}  "
        f"diverged {row['diverged']:.0%}",
        flush=True,
    )


def _print_agreement(row: dict[str, Any]) -> None:
    case = row["case"]
    margins = "no margins"
    if row["margin_max"] is not None:
        margins = (
            f"margins median {row['margin_median']:.3g}, max {row['margin_max']:.3g} "
            f"nats, {row['beyond_near_ties']} beyond near-ties"
        )
    print(
        f"{case['tested']} {case['budget']} against {case['reference']}: "
        f"{len(row['differences'])} of {row['texts']} texts differ, "
        f"{row['per_1000_tokens']:.2f} per 1000 tokens of {row['tokens']}; {margins}"
    )


def _finish(record, flags: argparse.Namespace, prompts: Prompts, begin: float) -> None:
    seconds = time.monotonic() - begin
    dtype = {"dtype": flags.dtype} if "dtype" in flags else {}
    record["settings"] = {
        **dtype,
        "devices": flags.devices,
        "max_tokens": flags.max_tokens,
        "num_prompts": len(prompts.ids),
        "prompts_sha256": prompts.sha256,
        "seconds": round(seconds, 1),
    }
    write_record(flags.out, record)
    print(f"{flags.out} written; {seconds:.0f} s in all")


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
