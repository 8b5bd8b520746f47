"""A deterministic stand-in for the engine, and servers around it.

The double has the engine's interface and a thread of its own, and no model: what a
request gets depends on its prompt alone. The HTTP tests use it because they are about
HTTP; `test_end_to_end.py` runs the real engine.

    python -m tests.serve.support DRAIN_S [STEP_S]     serves a double in a process
"""

import contextlib
import socket
import sys
import threading
import time
from dataclasses import dataclass, field

from ddtree_jax.engine import Delta, Request
from ddtree_jax.errors import EngineError, RequestError
from ddtree_jax.serve.app import Served
from ddtree_jax.serve.server import Server, listen

MODEL = "double"
VOCAB_SIZE = 256
MAX_CONTEXT_LEN = 512
FAULT_PROMPT = "fault"  # its generation ends with an error after two deltas
CRASH_PROMPT = "crash"  # tokenising it raises what nobody expects
MARKUP = "<|im_end|>"


class ByteTokenizer:
    """One token per UTF-8 byte."""

    vocab_size = VOCAB_SIZE

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        assert not allow_special, "user text must not become special tokens"
        if text == CRASH_PROMPT:
            raise ZeroDivisionError("the tokenizer double was asked to crash")
        return list(text.encode())


class LineTemplate:
    """Renders each message as one line."""

    def encode(self, messages, *, tools, kwargs, add_generation_prompt=True):
        assert tools is None and add_generation_prompt
        for name in kwargs:
            if name != "thinking":
                raise RequestError(
                    f"chat_template_kwargs.{name} is not an option of this template",
                    param="chat_template_kwargs",
                )
        lines = []
        for index, message in enumerate(messages):
            role, content = message.get("role"), message.get("content")
            if role not in ("system", "user", "assistant") or not isinstance(
                content, str
            ):
                raise RequestError(
                    f"messages.{index}: expected a role and text", param="messages"
                )
            lines.append(f"{role}:{content}\n")
        return list("".join(lines).encode())


def script(request: Request) -> list[Delta]:
    """Returns all deltas of `request`: its prompt, upper case, over and over.

    Deltas have 1, 2 or 3 tokens; every fourth has tokens but no text, as when a
    character is not complete yet.
    """
    prompt = bytes(request.prompt_ids)
    if prompt == FAULT_PROMPT.encode():
        deltas = [Delta(token_ids=(1,), text="x", finish_reason=None)] * 2
        fault = Delta(
            token_ids=(), text="", finish_reason="error", error="non-finite logits"
        )
        return [*deltas, fault]
    text = prompt.decode("latin-1").upper()
    ids = [ord(text[i % len(text)]) % 256 for i in range(request.max_tokens)]
    deltas, position, withheld = [], 0, ""
    while position < len(ids):
        run = ids[position : position + 1 + len(deltas) % 3]
        position += len(run)
        said = withheld + bytes(run).decode("latin-1")
        is_last = position == len(ids)
        withheld, said = (
            (said, "") if len(deltas) % 4 == 3 and not is_last else ("", said)
        )
        reason = "length" if is_last else None
        deltas.append(Delta(token_ids=tuple(run), text=said, finish_reason=reason))
    for stop in request.stop:
        if stop in text:
            deltas[-1] = Delta(
                token_ids=deltas[-1].token_ids, text="", finish_reason="stop"
            )
    return deltas


@dataclass
class _Slot:
    request: Request
    on_delta: object
    left: list[Delta]


@dataclass
class EngineDouble:
    """Emits one delta of every running request per step, on its own thread."""

    step_s: float = 0.0
    slots: int = 4
    model_name: str = MODEL
    max_context_len: int = MAX_CONTEXT_LEN
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    chat_template: LineTemplate | None = field(default_factory=LineTemplate)

    def __post_init__(self):
        self.lock = threading.Lock()
        self.gate = threading.Event()  # cleared: the engine stands still
        self.gate.set()
        self.running: dict[str, _Slot] = {}
        self.waiting: list[_Slot] = []
        self.submitted: list[Request] = []
        self.cancelled: list[str] = []
        self.most_running = 0
        self.failed: str | None = None
        self.steps = 0
        self.closed = threading.Event()
        self.status_calls = 0
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def close(self) -> None:
        self.closed.set()
        self.gate.set()
        self.thread.join()

    def submit(self, request: Request, on_delta) -> None:
        if self.failed:
            raise EngineError(self.failed)
        if not request.prompt_ids:
            raise RequestError("the prompt is empty", param="prompt")
        if max(request.prompt_ids) >= VOCAB_SIZE:
            raise RequestError("a token id is out of range", param="prompt")
        if len(request.prompt_ids) + request.max_tokens > self.max_context_len:
            raise RequestError(
                f"{len(request.prompt_ids)} prompt tokens and max_tokens "
                f"{request.max_tokens} exceed {self.max_context_len}",
                param="prompt"
                if len(request.prompt_ids) >= self.max_context_len
                else "max_tokens",
            )
        with self.lock:
            assert request.request_id not in self.running
            self.submitted.append(request)
            self.waiting.append(_Slot(request, on_delta, script(request)))

    def cancel(self, request_id: str) -> None:
        with self.lock:
            self.cancelled.append(request_id)
            self.running.pop(request_id, None)
            self.waiting = [
                s for s in self.waiting if s.request.request_id != request_id
            ]

    def status(self) -> dict:
        self.status_calls += 1
        return {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "slots": self.slots,
            "free_pages": 1,
            "total_pages": 1,
            "steps": self.steps,
            "last_step_time": time.monotonic(),
            "failed": self.failed,
        }

    def busy(self) -> int:
        with self.lock:
            return len(self.running) + len(self.waiting)

    def _run(self) -> None:
        while not self.closed.is_set():
            self.gate.wait()
            self._step()
            time.sleep(self.step_s if self.running else 0.001)

    def _step(self) -> None:
        with self.lock:
            self.steps += 1
            while self.waiting and len(self.running) < self.slots:
                slot = self.waiting.pop(0)
                self.running[slot.request.request_id] = slot
            self.most_running = max(self.most_running, len(self.running))
            for request_id, slot in list(self.running.items()):
                delta = slot.left.pop(0)
                if delta.finish_reason is not None:
                    del self.running[request_id]
                slot.on_delta(delta)


class LiveServer:
    """A real server on a loopback socket, run by a thread of this process."""

    def __init__(self, engine: EngineDouble):
        self.engine = engine
        self.socket: socket.socket = listen("127.0.0.1", 0)
        self.address = self.socket.getsockname()[:2]
        self.url = "http://{}:{}".format(*self.address)
        self.served = Served(engine=engine, model_name=MODEL, fingerprint="fp_test")
        self._ready = threading.Event()
        self._server = Server(self.served, drain_s=2, on_ready=self._ready.set)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self.socket]}, daemon=True
        )

    def __enter__(self) -> "LiveServer":
        self._thread.start()
        assert self._ready.wait(10), "the server did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive(), "the server did not stop"


def until(condition, *, timeout_s: float = 5.0) -> bool:
    """Waits for `condition()`; returns whether it came true in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.005)
    return False


if __name__ == "__main__":
    step_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.01
    bound = listen("127.0.0.1", 0)
    double = EngineDouble(step_s=step_s)
    with contextlib.suppress(KeyboardInterrupt):
        Server(
            Served(engine=double, model_name=MODEL, fingerprint="fp_test"),
            drain_s=int(sys.argv[1]),
            on_ready=lambda: print(bound.getsockname()[1], flush=True),
        ).run(sockets=[bound])
    print("closed" if double.closed.is_set() else "left open", flush=True)
