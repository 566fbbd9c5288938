"""An agent as a trainer sees it: a Unix socket that speaks JSON lines. Written from the documents of
`wire/src/trainer.rs`, so that the other side is checked by something else."""

from __future__ import annotations

import fcntl
import json
import pathlib
import socket
import struct
import termios
import threading
import time
from typing import Any

from flexcomm import _core


def decision(version: int, text: str) -> dict[str, Any]:
    try:
        digest = _core.digest(text)
    except ValueError:
        digest = 0
    return {
        "version": version, "parent": max(version - 1, 0), "strategy": text, "digest": digest,
        "decided_at_us": 1, "reason": "a test",
    }


def trial(number: int, candidates: list[str], iterations: int = 4, budget_ms: int = 60_000) -> dict[str, Any]:
    return {
        "id": number, "candidates": candidates, "iterations": iterations,
        "budget_ms": budget_ms,
    }


def unread(connection: socket.socket) -> int:
    """Bytes that the other end has not read yet."""
    return struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))[0]


class FakeAgent:
    def __init__(self, folder: pathlib.Path, name: str, job: str = "default", refuse: str | None = None, takes_buckets: bool = True) -> None:
        self.path = folder / f"{name}.sock"
        self.takes_buckets = takes_buckets
        self.job = job
        self.refuse = refuse
        self.received: list[dict[str, Any]] = []
        self._connections: list[socket.socket] = []
        self._listener: socket.socket | None = None
        #: The newest orders, for trainers that come later, and who was welcomed; both under the lock.
        self._orders = b""
        self._welcomed: list[socket.socket] = []
        self._lock = threading.Lock()

    def start(self) -> "FakeAgent":
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(16)
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        return self

    def kill(self) -> None:
        """As SIGKILL: connections break."""
        if self._listener is not None:
            self._listener.close()
        self.path.unlink(missing_ok=True)
        with self._lock:
            self._welcomed.clear()
        for connection in self._connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._connections.clear()

    def publish(self, *, decision: dict[str, Any] | None = None, trial: dict[str, Any] | None = None, raw: bytes | None = None) -> None:
        orders = {"kind": "orders", "job": self.job} | ({"decision": decision} if decision else {}) | ({"trial": trial} if trial else {})
        with self._lock:
            self._orders = (raw if raw is not None else json.dumps(orders).encode()) + b"\n"
            for connection in self._welcomed:
                try:
                    connection.sendall(self._orders)
                    # A trainer's next step sees it, once its thread has read it.
                    end = time.monotonic() + 1.0
                    while unread(connection) > 0 and time.monotonic() < end:
                        time.sleep(0.001)
                except OSError:
                    pass

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [m for m in self.received if m["kind"] == kind]

    def wait_for(self, kind: str, count: int = 1, timeout: float = 20.0) -> bool:
        end = time.monotonic() + timeout
        while len(self.of_kind(kind)) < count and time.monotonic() < end:
            time.sleep(0.01)
        return len(self.of_kind(kind)) >= count

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            lines = connection.makefile("r")
            self.received.append(json.loads(lines.readline()))
            if self.refuse is not None:
                connection.sendall(json.dumps({"kind": "refused", "reason": self.refuse}).encode() + b"\n")
                connection.close()
                return
            answer = {"kind": "welcome", "protocol": _core.PROTOCOL, "node": "n1"}
            if self.takes_buckets:
                answer["takes_buckets"] = True
            with self._lock:
                connection.sendall(json.dumps(answer).encode() + b"\n" + self._orders)
                self._welcomed.append(connection)
            for line in lines:
                self.received.append(json.loads(line))
        except (OSError, ValueError):
            pass
