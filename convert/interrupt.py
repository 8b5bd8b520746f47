"""Owns Ctrl-C, so that none is lost.

Python raises KeyboardInterrupt wherever the main thread is, which may be inside a
library that drops exceptions. It is noted too, and whoever works in a loop asks.
"""

import signal
import threading

_interrupted = threading.Event()


def watch() -> None:
    """Notes interrupts from now on; main thread only."""
    _interrupted.clear()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _note)


def has_come() -> bool:
    """Returns whether an interrupt has come, however long ago."""
    return _interrupted.is_set()


def check() -> None:
    """Raises KeyboardInterrupt if an interrupt has come."""
    if has_come():
        raise KeyboardInterrupt


def _note(number, frame) -> None:
    _interrupted.set()
    signal.default_int_handler(number, frame)
