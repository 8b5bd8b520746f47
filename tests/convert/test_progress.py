"""Progress says how much is done, how fast, how long it takes yet, and where it is."""

import concurrent.futures
import io
import re
import time

import pytest

from convert import progress
from convert.progress import make_reporter


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_lines(capsys, clock):
    reporter = make_reporter("converting", 10 * 10**9)
    reporter.at("model-00002.safetensors")
    reporter.advance(10**9)
    assert capsys.readouterr().err == ""
    clock.now += 10
    reporter.advance(10**9)
    assert capsys.readouterr().err == (
        "converting  2.00 / 10.00 GB  0.20 GB/s  40 s left  model-00002.safetensors\n"
    )
    clock.now += 9
    reporter.advance(10**9)
    assert capsys.readouterr().err == ""
    clock.now += 1
    reporter.close()
    assert "3.00 / 10.00 GB  0.15 GB/s  47 s left" in capsys.readouterr().err


def test_what_an_earlier_run_did_is_no_speed(capsys, clock):
    reporter = make_reporter("converting", 100 * 10**9)
    reporter.skip(90 * 10**9)
    clock.now += 10
    reporter.advance(10**9)
    expected = "converting  1.00 / 10.00 GB  0.10 GB/s  90 s left\n"
    assert capsys.readouterr().err == expected


def test_bar(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    reporter = make_reporter("comparing", 3_000_000)
    reporter.skip(1_000_000)
    reporter.at("moe.router")
    reporter.advance(500_000)
    reporter.close()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert "comparing" in text and "0.5/2.0 MB" in text and "moe.router" in text


class SlowBytes(int):
    """Lets other threads run between the reading of a sum and its writing."""

    def __radd__(self, other: int) -> int:
        time.sleep(0.01)
        return other + int(self)


def test_no_byte_is_lost_between_threads(capsys):
    reporter = make_reporter("converting", 8 * 10**9)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(reporter.advance, [SlowBytes(10**9)] * 8))
    reporter.close()
    assert "8.00 / 8.00 GB" in capsys.readouterr().err
