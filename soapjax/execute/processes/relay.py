"""Between JAX's client and JAX's service: a port of this process that passes everything on to rank 0, both ways.

JAX aborts a process by SIGABRT within 15 ms of the end of its connection to the service (jaxlib 0.10, and nothing public or
private turns it off: the callback for it cannot be called from Python). So the connection ends here: where rank 0 has gone, the
client's side stays open and silent, and the watch (watch.py) has the time to say which rank it was. Where nobody says anything,
JAX's own heartbeat ends the process later.
"""

from __future__ import annotations

import contextlib
import socket
import threading

CONNECT_S = 10.0


class Relay:
    """Listens on the loopback from now on, in threads, until this process ends."""

    def __init__(self, host: str, port: int):
        self._target = host, port
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=16)
        self._has_connected = False
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, name="soapjax-relay", daemon=True).start()

    def _accept(self) -> None:
        kept = []  # connections that nobody answers any more
        while True:
            here = self._listener.accept()[0]
            try:
                there = socket.create_connection(self._target, timeout=CONNECT_S)
            except OSError:
                if self._has_connected:
                    kept.append(here)
                else:
                    here.close()  # JAX tries again until its own time is up
                continue
            there.settimeout(None)
            self._has_connected = True
            for s in (here, there):
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=_pump, args=(here, there), kwargs={"closes": True}, daemon=True).start()
            threading.Thread(target=_pump, args=(there, here), kwargs={"closes": False}, daemon=True).start()


def _pump(source: socket.socket, target: socket.socket, *, closes: bool) -> None:
    """Passes on what comes; at the end closes the target where it is rank 0's, and leaves it open where it is the client's."""
    with contextlib.suppress(OSError):
        while data := source.recv(2**18):
            target.sendall(data)
    if closes:
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)
        target.close()
