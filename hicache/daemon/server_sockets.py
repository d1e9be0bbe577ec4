"""The clients' socket, and its authentication."""

from __future__ import annotations

import zmq

from hicache.config import Config
from hicache.daemon.curve_auth import CurveAuth
from hicache.daemon.socket_lock import listen


class ServerSockets:
    """`router` listens at the configured endpoint. Raises OSError where it cannot. With CURVE keys
    `curve_auths` holds the objects that answer ZeroMQ's ZAP requests."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.curve_auths: list[CurveAuth] = []
        self.router = self._open()

    def new_curve_auth(self, context: zmq.Context[zmq.Socket[bytes]]) -> CurveAuth | None:
        """The authentication of a context's sockets; None without CURVE keys. Create it before a
        socket of the context listens: else a client could connect unchecked."""
        config = self._config.socket
        if config.curve_secret_key_file and config.curve_allowed_clients_dir:
            auth = CurveAuth(
                context, config.curve_secret_key_file, config.curve_allowed_clients_dir
            )
            self.curve_auths.append(auth)
            return auth
        return None

    def _open(self) -> zmq.Socket[bytes]:
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.setsockopt(zmq.MAXMSGSIZE, self._config.limits.max_message_bytes)
        router.setsockopt(zmq.SNDHWM, self._config.socket.hwm)
        router.setsockopt(zmq.RCVHWM, self._config.socket.hwm)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        auth = self.new_curve_auth(self._context)
        if auth is not None:
            auth.guard(router)
        listen(router, self._config.socket.endpoint)
        return router

    def close(self) -> None:
        """Close the sockets; unsent messages are lost."""
        self._context.destroy(linger=0)
