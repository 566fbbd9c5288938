"""A controller and an agent, each as users run it."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any, Callable

import pytest

BINARY = os.environ.get("FLEXCOMM_BINARY", str(pathlib.Path(__file__).parents[2] / "target" / "debug" / "flexcomm"))


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def until(what: Callable[[], Any], limit: float = 30.0) -> None:
    end = time.monotonic() + limit
    while not what():
        assert time.monotonic() < end, "what was waited for did not come"
        time.sleep(0.05)


class Daemons:
    """With what the test ends, they end."""

    def __init__(self, folder: pathlib.Path) -> None:
        if not pathlib.Path(BINARY).exists():
            pytest.skip(f"{BINARY} is not built: cargo build -p flexcomm-cli, or name it in FLEXCOMM_BINARY")
        self.folder, self.agent_socket, self.log = folder, folder / "run" / "agent.sock", folder / "daemons.log"
        self._api, self._echo, self._throughput = free_ports(3)
        self.url, self._token = f"http://127.0.0.1:{self._api}", folder / "token"
        self._token.write_text("telemetry-0123456789abcdef")
        self._token.chmod(0o600)
        self._running: list[subprocess.Popen] = []

    def controller(self, config: str = "") -> subprocess.Popen:
        """Started, and it answers."""
        written = self.folder / "controller.toml"
        written.write_text(config)
        started = self._start(
            "controller", "--config", written, "--listen", f"127.0.0.1:{self._api}", "--db", self.folder / "c.db",
            "--token-file", self._token,
        )
        until(self._up)
        return started

    def agent(self) -> subprocess.Popen:
        """Started, and trainers can reach it."""
        self.agent_socket.unlink(missing_ok=True)
        started = self._start(
            "agent", "--node", "n1", "--controller", self.url, "--token-file", self._token, "--listen", "127.0.0.1",
            "--advertise", "127.0.0.1", "--echo-port", self._echo, "--throughput-port", self._throughput,
            "--run-dir", self.folder / "run", "--state-dir", self.folder / "state",
        )
        until(self.agent_socket.exists)
        return started

    def policy(self, job: str, policy: dict[str, Any] | None) -> bool:
        """Sets a job's policy, or with None removes it; answers whether the controller knows the job."""
        request = urllib.request.Request(
            f"{self.url}/api/v1/jobs/{job}/policy", None if policy is None else json.dumps(policy).encode(),
            {"Authorization": f"Bearer {self._token.read_text()}", "Content-Type": "application/json"},
            method="DELETE" if policy is None else "PUT",
        )
        try:
            urllib.request.urlopen(request, timeout=10).close()
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return False
        return True

    def end(self) -> None:
        for daemon in reversed(self._running):
            if daemon.poll() is None:
                daemon.send_signal(signal.SIGTERM)
                daemon.wait(20)

    def _start(self, *command: Any) -> subprocess.Popen:
        with self.log.open("ab") as log:
            self._running.append(subprocess.Popen([BINARY, *map(str, command)], stdout=log, stderr=log))
        return self._running[-1]

    def _up(self) -> bool:
        try:
            return urllib.request.urlopen(f"{self.url}/healthz", timeout=1).status == 200
        except OSError:
            return False
