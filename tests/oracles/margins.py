"""Refuses results that hang on what float32 arithmetic in another order can change."""

from .probes import Trace

_MIN_TOKEN_MARGIN = 1e-3
_MIN_ROUTER_MARGIN = 2e-5


def check(condition: bool, message: str) -> None:
    """Ends the program with `message` unless the condition holds."""
    if not condition:
        raise SystemExit(f"oracles: {message}; choose another seed or prompt")


def check_experts(what: str, t: Trace) -> None:
    """Ends the program if a choice of experts in `t` is a close one."""
    margin = t.router_margin.min().item()
    check(
        margin > _MIN_ROUTER_MARGIN,
        f"{what}: a choice of experts hangs on {margin:.1e}, "
        f"want > {_MIN_ROUTER_MARGIN}",
    )


def check_tokens(what: str, margins: list[float]) -> None:
    """Ends the program if one of the greedy tokens is a close one."""
    check(
        min(margins) > _MIN_TOKEN_MARGIN,
        f"{what}: a token leads by {min(margins):.1e}, want > {_MIN_TOKEN_MARGIN}",
    )
