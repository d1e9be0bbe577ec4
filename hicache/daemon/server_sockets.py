"""The clients' socket, and who may connect to it."""

from __future__ import annotations

import zmq

from hicache.config import Config
from hicache.daemon.curve_auth import Doorkeeper
from hicache.daemon.socket_lock import listen


class ServerSockets:
    """`router` listens where the configuration says. Raises OSError where it cannot. With CURVE
    keys `doorkeepers` holds those that have to answer ZeroMQ whether a key is allowed."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.doorkeepers: list[Doorkeeper] = []
        self.router = self._open()

    def new_doorkeeper(self, context: zmq.Context[zmq.Socket[bytes]]) -> Doorkeeper | None:
        """With CURVE keys only. It must be there before a socket of the context listens, or a
        client could connect unchecked."""
        config = self._config.socket
        if config.curve_secret_key_file and config.curve_allowed_clients_dir:
            keeper = Doorkeeper(
                context, config.curve_secret_key_file, config.curve_allowed_clients_dir
            )
            self.doorkeepers.append(keeper)
            return keeper
        return None

    def _open(self) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.setsockopt(zmq.MAXMSGSIZE, self._config.limits.max_message_bytes)
        router.setsockopt(zmq.SNDHWM, self._config.socket.hwm)
        router.setsockopt(zmq.RCVHWM, self._config.socket.hwm)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        keeper = self.new_doorkeeper(self._context)
        if keeper is not None:
            keeper.guard(router)
        listen(router, self._config.socket.endpoint)
        return router

    def close(self) -> None:
        """What has not been sent is lost."""
        self._context.destroy(linger=0)
