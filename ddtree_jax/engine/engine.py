"""Owns the engine: one thread that admits, prefills, steps and delivers.

Does not know about HTTP or JSON. Callers hand in a callback; it runs on the
engine's thread and must not block.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable

import numpy as np

from ddtree_jax.config import EngineConfig
from ddtree_jax.engine.chat import ChatTemplate
from ddtree_jax.engine.loading import Loaded, load_runner
from ddtree_jax.engine.output import OutputAssembler
from ddtree_jax.engine.request import Completion, Delta, Request, join
from ddtree_jax.engine.scheduler import Scheduler, Sequence
from ddtree_jax.engine.tokenizer import load_tokenizer
from ddtree_jax.errors import EngineError, RequestError
from ddtree_jax.hf_config import read_stop_token_ids
from ddtree_jax.spec import StepStatus

_log = logging.getLogger(__name__)


class Engine:
    """Continues prompts, several at once.

    Attributes:
      model_name: Name of the checkpoint directory.
      max_context_len: Most tokens of a request, prompt and answer.
    """

    def __init__(self, config: EngineConfig, loaded: Loaded):
        self.config = config
        self.model_name = config.model.resolve().name
        self.max_context_len = loaded.max_context_len
        self.tokenizer = load_tokenizer(config.model)
        self.chat_template = ChatTemplate.load(config.model, tokenizer=self.tokenizer)
        self._runner = loaded.runner
        self._vocab_size = loaded.vocab_size
        self._stop_token_ids = read_stop_token_ids(config.model)
        self._scheduler = Scheduler(
            slots=config.slots,
            num_pages=loaded.runner.num_pages,
            page_size=config.page_size,
        )
        self._wake = threading.Condition()
        # Guarded by _wake; the thread alone touches the scheduler and the runner.
        self._arrivals: list[Sequence] = []
        self._cancelled: set[str] = set()
        self._known: set[str] = set()
        self._closing = False
        self._failed: str | None = None
        self._steps = 0
        self._last_step_time = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @classmethod
    def load(cls, config: EngineConfig) -> "Engine":
        """Returns an engine whose programs are compiled; call `start` next.

        Raises:
          ConfigError: The options contradict the checkpoint or the devices.
          CheckpointError: The checkpoint is unusable.
        """
        return cls(config, load_runner(config))

    def start(self) -> None:
        """Starts the engine's thread."""
        self._thread.start()

    def close(self) -> None:
        """Stops the thread; requests that still run end with an error."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, request: Request, on_delta: Callable[[Delta], None]) -> None:
        """Queues a request; `on_delta` gets its deltas on the engine's thread.

        Raises:
          RequestError: The request cannot be honoured; `param` names the field.
          EngineError: The engine has stopped.
        """
        self._check(request)
        sequence = Sequence(request, on_delta, self._assembler(request))
        with self._wake:
            if self._failed or self._closing:
                raise EngineError(self._failed or "the engine is closing")
            if request.request_id in self._known:
                raise RequestError(
                    f"request_id {request.request_id!r} is in use", param="request_id"
                )
            self._known.add(request.request_id)
            self._arrivals.append(sequence)
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        """Ends a request without further deltas; unknown ids are ignored."""
        with self._wake:
            if request_id in self._known:
                self._cancelled.add(request_id)
                self._wake.notify()

    def generate(self, request: Request) -> Completion:
        """Returns the whole answer; blocks until it is complete."""
        deltas: list[Delta] = []
        done = threading.Event()

        def on_delta(delta: Delta) -> None:
            deltas.append(delta)
            if delta.finish_reason is not None:
                done.set()

        self.submit(request, on_delta)
        done.wait()
        return join(deltas)

    def status(self) -> dict[str, object]:
        """Returns counts of the moment and the heartbeat, without waiting."""
        return {
            "running": self._scheduler.num_running,
            "waiting": self._scheduler.num_waiting + len(self._arrivals),
            "slots": self.config.slots,
            "free_pages": self._scheduler.pages.num_free,
            "total_pages": self._scheduler.pages.num_pages,
            "steps": self._steps,
            "last_step_time": self._last_step_time,
            "failed": self._failed,
        }

    def _check(self, request: Request) -> None:
        """Raises RequestError when the request can never run."""
        prompt = request.prompt_ids
        if not prompt:
            raise RequestError("the prompt is empty; expected 1 token", param="prompt")
        for param, ids in (
            ("prompt", prompt),
            ("stop_token_ids", request.stop_token_ids),
        ):
            wrong = next((i for i in ids if not 0 <= i < self._vocab_size), None)
            if wrong is not None:
                raise RequestError(
                    f"{param}: token id {wrong} is outside the vocabulary "
                    f"0 .. {self._vocab_size - 1}",
                    param=param,
                )
        total = len(prompt) + request.max_tokens
        if total > self.max_context_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and max_tokens is "
                f"{request.max_tokens}, together {total}; at most "
                f"{self.max_context_len} fit",
                param="prompt" if len(prompt) >= self.max_context_len else "max_tokens",
            )
        needed = self._scheduler.pages_needed(total - 1)
        if needed > self._scheduler.pages.num_pages:
            raise RequestError(
                f"the request needs {needed} pages and the cache has "
                f"{self._scheduler.pages.num_pages}",
                param="max_tokens",
            )

    def _assembler(self, request: Request) -> OutputAssembler:
        return OutputAssembler(
            self.tokenizer,
            max_tokens=request.max_tokens,
            stop=request.stop,
            stop_token_ids=request.stop_token_ids,
            eos_token_ids=self._stop_token_ids,
            ignore_eos=request.ignore_eos,
            skip_special_tokens=request.skip_special_tokens,
        )

    # Below: the engine's thread only.

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._admit()
                self._prefill()
                self._decode()
        except Exception as error:
            _log.exception("the engine's thread failed")
            self._stop(f"the engine failed: {error}")
        else:
            self._stop("the engine was closed")

    def _stop(self, reason: str) -> None:
        """Ends every request with an error, and refuses new ones."""
        with self._wake:
            self._failed = reason
            left = [*self._scheduler.everyone(), *self._arrivals]
            self._arrivals.clear()
        for sequence in left:
            self._send(sequence, Delta(finish_reason="error", error=reason))

    def _wait_for_work(self) -> bool:
        """Takes arrivals and cancellations in; False when the engine closes."""
        with self._wake:
            while not (
                self._closing
                or self._arrivals
                or self._cancelled
                or self._scheduler.num_running
                or self._scheduler.num_waiting
            ):
                self._scheduler.pages.check()
                self._wake.wait()
            arrivals, self._arrivals = self._arrivals, []
            cancelled, self._cancelled = self._cancelled, set()
            self._known -= cancelled
            closing = self._closing
        for sequence in arrivals:
            self._scheduler.enqueue(sequence)
        for request_id in cancelled:
            slot = self._scheduler.remove(request_id)
            if slot is not None:
                self._runner.release(slot)
        return not closing

    def _admit(self) -> None:
        for slot, sequence in self._scheduler.admit():
            sampling = sequence.request.sampling
            seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
            # All 64 bits count, though the device keeps 32.
            mixed = np.random.SeedSequence(seed % 2**64).generate_state(1)[0]
            self._runner.assign(
                slot,
                pages=sequence.pages,
                max_rows=sequence.max_rows,
                tree_budget=self.config.tree_budget,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                seed=int(mixed),
            )

    def _prefill(self) -> None:
        """Commits one chunk of one prompt, so that decoding slots go on meanwhile."""
        found = self._scheduler.prefilling()
        if found is None:
            return
        slot, sequence = found
        prompt = sequence.request.prompt_ids
        chunk = prompt[sequence.num_prefilled :][: self.config.prefill_chunk]
        is_last = sequence.num_prefilled + len(chunk) == len(prompt)
        result = self._runner.prefill(slot, list(chunk), is_last=is_last)
        self._beat()
        sequence.num_prefilled += len(chunk)
        if result.status[0] != StepStatus.OK:
            self._fault(slot, sequence, StepStatus(int(result.status[0])))
        elif is_last:
            self._deliver(slot, sequence, result.tokens[0, :1].tolist(), ())

    def _decode(self) -> None:
        """Runs one step of all decoding slots and delivers what it yields."""
        decoding = self._scheduler.decoding()
        if not decoding:
            return
        result = self._runner.step()
        self._beat()
        for slot, sequence in decoding:
            status = StepStatus(int(result.status[slot]))
            if status != StepStatus.OK:
                self._fault(slot, sequence, status)
                continue
            count = int(result.num_tokens[slot])
            tokens = result.tokens[slot, :count].tolist()
            self._deliver(slot, sequence, tokens, (count - 1,))

    def _beat(self) -> None:
        self._steps += 1
        self._last_step_time = time.monotonic()

    def _deliver(
        self,
        slot: int,
        sequence: Sequence,
        tokens: list[int],
        accepted: tuple[int, ...],
    ) -> None:
        output = sequence.assembler.feed(tokens)
        # The slot is free before the client can know that its answer is complete.
        if output.finish_reason is not None:
            self._retire(slot, sequence)
        self._send(
            sequence,
            Delta(
                token_ids=output.token_ids,
                text=output.text,
                finish_reason=output.finish_reason,
                num_accepted=accepted,
            ),
        )

    def _fault(self, slot: int, sequence: Sequence, status: StepStatus) -> None:
        self._retire(slot, sequence)
        reason = f"the model step reported {status.name} for this request"
        self._send(sequence, Delta(finish_reason="error", error=reason))

    def _retire(self, slot: int, sequence: Sequence) -> None:
        self._scheduler.release(slot)
        self._runner.release(slot)
        with self._wake:
            self._known.discard(sequence.request.request_id)
            self._cancelled.discard(sequence.request.request_id)

    def _send(self, sequence: Sequence, delta: Delta) -> None:
        try:
            sequence.on_delta(delta)
        except Exception:
            # The caller's fault must not end the others' answers.
            _log.exception("callback of %s failed", sequence.request.request_id)
            self.cancel(sequence.request.request_id)
