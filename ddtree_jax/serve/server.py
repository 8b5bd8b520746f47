"""Owns the socket, the signals and the ready line. Does not know the routes.

The first SIGTERM or SIGINT stops accepting and lets running requests end, up to a
limit; the second ends the process at once.
"""

import os
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from ddtree_jax.errors import ConfigError
from ddtree_jax.serve.app import Served, create_app

DRAIN_S = 30
KEEP_ALIVE_S = 30
MAX_HEADER_BYTES = 64 * 2**10


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket bound to the address, not yet accepting.

    Raises:
      ConfigError: The address cannot be had.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((host, port))
        except OSError:
            bound.close()
            raise
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there: {reason}"
        ) from None
    return bound


class Server(uvicorn.Server):
    """A uvicorn server with this project's way to start and to stop."""

    def __init__(
        self,
        served: Served,
        *,
        drain_s: int = DRAIN_S,
        on_ready: Callable[[], None] | None = None,
    ):
        config = uvicorn.Config(
            create_app(served),
            http="h11",  # the only one that bounds the size of a header
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=drain_s,
        )
        super().__init__(config)
        self._served = served
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts accepting, then says so."""
        await super().startup(sockets=sockets)
        if self.started and self._on_ready is not None:
            self._on_ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins to stop, or ends the process if it was stopping already."""
        if self.should_exit:
            os._exit(128 + sig)
        self._served.stopping = True
        self.should_exit = True
