"""An agent as a trainer sees it: a Unix socket that speaks JSON lines, and a page in shared memory. Written from the
documents of `page/src/layout.rs` and `wire/src/trainer.rs`, so that the other side is checked by something else."""

from __future__ import annotations

import json
import mmap
import os
import pathlib
import socket
import struct
import threading
import time
from typing import Any

from flexcomm import _core

CAPACITY = 16 * 1024
HEADER_WORDS, COUNTER, LENGTH, HEARTBEAT = 24, 8, 9, 16


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


class FakeAgent:
    def __init__(self, folder: pathlib.Path, name: str, job: str = "default", refuse: str | None = None) -> None:
        self.path = folder / f"{name}.sock"
        self.page_path = folder / f"{name}.page"
        self.job = job
        self.refuse = refuse
        self.heard: list[dict[str, Any]] = []
        self._connections: list[socket.socket] = []
        self._listener: socket.socket | None = None
        self._map: mmap.mmap | None = None
        self._alive = False

    def start(self) -> "FakeAgent":
        if not self.page_path.exists():
            words = [0] * (HEADER_WORDS + CAPACITY // 8)
            words[0], words[1], words[2] = struct.unpack("<Q", b"FLXPAGE\0")[0], 1, CAPACITY
            self.page_path.write_bytes(struct.pack(f"={len(words)}Q", *words))
        with open(self.page_path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self.path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(16)
        self._alive = True
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def kill(self) -> None:
        """As SIGKILL: connections break, the page stays as it is."""
        self._alive = False
        if self._listener is not None:
            self._listener.close()
        self.path.unlink(missing_ok=True)
        for connection in self._connections:
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self._connections.clear()

    def publish(self, *, decision: dict[str, Any] | None = None, trial: dict[str, Any] | None = None, raw: bytes | None = None) -> None:
        orders = {"job": self.job} | ({"decision": decision} if decision else {}) | ({"trial": trial} if trial else {})
        payload = raw if raw is not None else json.dumps(orders).encode()
        counter = self._get(COUNTER)
        odd = (counter + 1) | 1
        self._set(COUNTER, odd)
        self._set(LENGTH, len(payload))
        start = HEADER_WORDS * 8
        self._map[start : start + len(payload)] = payload
        self._set(COUNTER, odd + 1)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [m for m in self.heard if m["kind"] == kind]

    def wait_for(self, kind: str, count: int = 1, timeout: float = 20.0) -> bool:
        end = time.monotonic() + timeout
        while len(self.of_kind(kind)) < count and time.monotonic() < end:
            time.sleep(0.01)
        return len(self.of_kind(kind)) >= count

    def _get(self, word: int) -> int:
        return struct.unpack_from("=Q", self._map, word * 8)[0]

    def _set(self, word: int, value: int) -> None:
        struct.pack_into("=Q", self._map, word * 8, value)

    def _beat(self) -> None:
        while self._alive:
            self._set(HEARTBEAT, int(time.time() * 1e6))
            time.sleep(0.2)

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
            self.heard.append(json.loads(lines.readline()))
            answer = {"kind": "welcome", "protocol": _core.PROTOCOL, "node": "n1", "page": str(self.page_path)}
            if self.refuse is not None:
                answer = {"kind": "refused", "reason": self.refuse}
            connection.sendall(json.dumps(answer).encode() + b"\n")
            if self.refuse is not None:
                connection.close()
                return
            for line in lines:
                self.heard.append(json.loads(line))
        except (OSError, ValueError):
            pass
