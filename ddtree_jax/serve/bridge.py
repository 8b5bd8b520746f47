"""Owns the way from the engine's thread to the event loop, and cancellation.

Does not know about HTTP or JSON.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from functools import partial

from ddtree_jax.engine import Delta, Engine, Request
from ddtree_jax.errors import EngineError


class Generation:
    """The engine requests behind one HTTP request, as one stream of deltas.

    Must be closed. Closing cancels what still runs, so that a client that went
    away frees its slots; after a complete run it does nothing.

    Attributes:
      prompt_tokens: Tokens of all prompts together.
      completion_tokens: Tokens generated so far, all prompts together.
      finish_reasons: Per prompt, why it ended; None while it runs.
    """

    def __init__(self, engine: Engine, requests: Sequence[Request]):
        """Submits all requests, or none if the engine refuses one."""
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
        self._running: dict[int, str] = {}
        self.prompt_tokens = sum(len(r.prompt_ids) for r in requests)
        self.completion_tokens = 0
        self.finish_reasons: list[str | None] = [None] * len(requests)
        try:
            for index, request in enumerate(requests):
                engine.submit(request, partial(self._receive, index))
                self._running[index] = request.request_id
        except BaseException:
            self.close()
            raise

    def _receive(self, index: int, delta: Delta) -> None:
        # Runs on the engine's thread. The loop is closed only when the server is
        # gone, and then nobody waits for the delta.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, delta))

    async def deltas(
        self, *, idle_s: float | None = None
    ) -> AsyncGenerator[tuple[int, Delta] | None]:
        """Yields (prompt index, delta) as they come, until every prompt has ended.

        Args:
          idle_s: Yields None whenever nothing came for that long.

        Raises:
          EngineError: The engine reported a fault for one of the requests.
        """
        while self._running:
            try:
                async with asyncio.timeout(idle_s):
                    index, delta = await self._queue.get()
            except TimeoutError:
                yield None
                continue
            self.completion_tokens += len(delta.token_ids)
            if delta.finish_reason is not None:
                del self._running[index]
                self.finish_reasons[index] = delta.finish_reason
            if delta.finish_reason == "error":
                raise EngineError(delta.error or "the engine gave no reason")
            yield index, delta

    def close(self) -> None:
        """Cancels the requests that still run."""
        for request_id in self._running.values():
            self._engine.cancel(request_id)
        self._running.clear()
