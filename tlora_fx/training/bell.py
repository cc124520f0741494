"""A Unix socket by which two processes tell each other that the command log has something new.

No data passes, so nothing is lost with a connection: whoever connects again looks at the log. The
trainer listens. A client rings for new commands; the trainer rings the number of each command that
it has answered.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


class Bell:
    """The trainer's end.

    path   of the socket; one that a killed trainer has left is replaced
    """

    def __init__(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen()
        self._clients: list[socket.socket] = []
        self._lock, self._rung = threading.Lock(), threading.Event()
        threading.Thread(target=self._accept, name="bell", daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Wait until somebody rings; False where nobody did."""
        rung = self._rung.wait(seconds)
        self._rung.clear()
        return rung

    def ring(self, numbers: Iterable[int]) -> None:
        """Tell all clients that these commands have answers."""
        text = "".join(f"{number}\n" for number in numbers).encode()
        with self._lock:
            for client in list(self._clients):
                try:
                    client.sendall(text)
                except OSError:
                    self._drop(client)

    def close(self) -> None:
        """Stop listening."""
        self._listener.close()
        with self._lock:
            for client in list(self._clients):
                self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        if client in self._clients:
            self._clients.remove(client)
        client.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._clients.append(client)
            threading.Thread(target=self._hear, args=(client,), daemon=True).start()
            # It may have written commands before it could ring.
            self._rung.set()

    def _hear(self, client: socket.socket) -> None:
        with suppress(OSError):
            while client.recv(4096):
                self._rung.set()
        with self._lock:
            self._drop(client)
