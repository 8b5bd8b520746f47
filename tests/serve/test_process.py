"""The process: flags, one-line failures, signals."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path

import httpx
import pytest

from ddtree_jax.engine import Engine, EngineConfig
from ddtree_jax.errors import CheckpointError
from ddtree_jax.serve import __main__ as program
from ddtree_jax.serve import server
from tests.serve.support import MODEL, EngineDouble, until

ROOT = Path(__file__).parents[2]


def refused(capsys, *flags: str) -> str:
    """Returns the one line that refuses `flags`."""
    try:
        status = program.main(flags)
    except SystemExit as error:
        status = error.code
    captured = capsys.readouterr()
    assert status not in (0, None)
    assert captured.out == ""
    assert captured.err.endswith("\n") and captured.err.count("\n") == 1
    assert captured.err.startswith("python -m ddtree_jax.serve: error: ")
    return captured.err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "the following arguments are required: --model"),
        (["--model", "x", "--slot", "3"], "unrecognized arguments: --slot 3"),
        (["--model", "x", "--slots", "0"], "--slots: expected a whole number from 1 "),
        (["--model", "x", "--slots", "two"], "got 'two'"),
        (["--model", "x", "--tree-budget", "-1"], "--tree-budget: expected a whole"),
        (["--model", "x", "--dtype", "int4"], "--dtype: invalid choice: 'int4'"),
        (["--model", "x", "--latent-norm-eps", "0"], "expected a number above 0"),
        (["--model", "x", "--rope-amplitude", "nan"], "expected a number above 0"),
        (["--model", "x", "--port", "65536"], "--port: expected a whole number"),
    ],
)
def test_bad_flags(capsys, flags, message):
    assert message in refused(capsys, *flags)


def test_missing_checkpoint(capsys, tmp_path):
    where = str(tmp_path / "nowhere")
    assert where in refused(capsys, "--model", where, "--port", "0")


def test_taken_port_is_told_before_loading(capsys, monkeypatch):
    monkeypatch.setattr(Engine, "load", lambda _: pytest.fail("the model was loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refused(capsys, "--model", "x", "--port", port)
    assert f"--port {port}: cannot listen there: Address already in use" in line


def test_flags_become_the_engines_config(monkeypatch, capsys):
    loaded = []

    def load(config):
        loaded.append(config)
        raise CheckpointError("enough seen")

    monkeypatch.setattr(Engine, "load", load)
    given = {
        "model": "a",
        "draft": "b",
        "devices": 8,
        "slots": 3,
        "tree_budget": 0,
        "page_size": 16,
        "max_context_len": 99,
        "num_pages": 44,
        "prefill_chunk": 5,
        "dtype": "float32",
        "latent_norm_eps": 1e-5,
        "rope_amplitude": 1.5,
    }
    flags = [f"--{n.replace('_', '-')}={value}" for n, value in given.items()]
    refused(capsys, *flags, "--port=0")
    refused(capsys, "--model=a", "--port=0")
    paths = {"model": Path("a"), "draft": Path("b")}
    assert loaded == [EngineConfig(**given | paths), EngineConfig(model=Path("a"))]


def test_help_states_every_flag_and_default(capsys):
    with pytest.raises(SystemExit):
        program.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for field in fields(EngineConfig):
        assert f"--{field.name.replace('_', '-')} " in text
        if field.default not in (None, MISSING):
            assert f"(default: {field.default})" in text
    assert text.count("(default: ") == len(fields(EngineConfig)) - 1 + 3


def test_serves_and_says_so(monkeypatch, capsys):
    engine = EngineDouble()
    monkeypatch.setattr(Engine, "load", lambda _: engine)
    made = []
    monkeypatch.setattr(
        program,
        "Server",
        lambda *a, **k: made.append(server.Server(*a, **k)) or made[0],
    )
    flags = ["--model=x", "--port=0", "--model-name=named", "--tree-budget=7"]
    flags += ["--devices=8", "--slots=4"]
    thread = threading.Thread(target=program.main, args=(flags,))
    thread.start()
    assert until(lambda: made and made[0].started)
    [line] = capsys.readouterr().out.splitlines()
    assert line.startswith("ddtree_jax is ready: ")
    url, *facts = line.split()[3:]
    assert facts == [
        "model=named",
        "devices=8",
        "slots=4",
        "tree_budget=7",
    ]
    assert url.startswith("http://127.0.0.1:") and url.endswith("/v1")
    body = {"model": "named", "prompt": "a", "max_tokens": 2}
    reply = httpx.post(url + "/completions", json=body).json()
    assert reply["choices"][0]["text"] == "AA"
    assert reply["system_fingerprint"].startswith("fp_")
    made[0].should_exit = True
    thread.join(10)
    assert not thread.is_alive()


def test_listens_on_this_machine_only_by_default():
    flags = program._parser().parse_args(["--model", "x"])
    assert (flags.host, flags.port) == ("127.0.0.1", 8000)


@contextmanager
def double_process(*, drain_s: int, step_s: float = 0.02):
    """Runs `tests.serve.support` and yields (process, url)."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.serve.support", str(drain_s), str(step_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ,
    )
    try:
        port = process.stdout.readline().strip()
        assert port, process.stderr.read()
        yield process, f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@contextmanager
def running_stream(url: str, max_tokens: int):
    """Yields the lines of a stream that has begun."""
    body = {"model": MODEL, "prompt": "a", "max_tokens": max_tokens, "stream": True}
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=20) as reply:
        lines = reply.iter_lines()
        next(lines)
        yield lines


def test_first_signal_drains():
    with (
        double_process(drain_s=20) as (process, url),
        running_stream(url, 60) as lines,
    ):
        process.send_signal(signal.SIGINT)

        def is_closed() -> bool:
            try:
                httpx.get(url + "/health")
            except httpx.TransportError:
                return True
            return False

        assert until(is_closed), "still accepting"
        text = ""
        for line in lines:
            if line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                last = line
        assert '"finish_reason":"length"' in last and len(text) == 59
        assert process.wait(10) == 0
        assert process.stdout.read() == "closed\n"
        assert "Traceback" not in process.stderr.read()


def test_drain_has_a_limit():
    with (
        double_process(drain_s=1, step_s=0.2) as (process, url),
        running_stream(url, 400),
    ):
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 0
        assert process.stdout.read() == "closed\n"


def test_second_signal_ends_at_once():
    with (
        double_process(drain_s=60, step_s=0.2) as (process, url),
        running_stream(url, 400),
    ):
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(2) == 128 + signal.SIGTERM
