"""Runs scripts under torchrun. Starting it takes seconds, so each script goes through all its settings in one start and
writes what it saw as JSON, one file per rank."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys

import pytest

from flexcomm import _repeats

RANKS = pathlib.Path(__file__).parent / "ranks"


class Outcome:
    def __init__(self, code: int, text: str, folder: pathlib.Path) -> None:
        self.code = code
        self.text = text
        self.folder = folder

    def ranks(self) -> list[dict]:
        """What each rank wrote, in rank order."""
        return [json.loads(p.read_text()) for p in sorted(self.folder.glob("rank*.json"))]


def environment() -> dict[str, str]:
    full = {k: v for k, v in os.environ.items() if not k.startswith("FLEXCOMM_")}
    # Scripts of other folders find common.py.
    return full | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(RANKS)}


def torchrun(script: str | pathlib.Path, folder: pathlib.Path, ranks: int = 4, timeout: float = 240, **env: str) -> Outcome:
    """A script of ``ranks/`` by its name, another one by its path."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks),
        "--master-addr", "127.0.0.1", "--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
        # Else it leaves a folder per start beside the system's temporary files.
        "--log-dir", str(folder / "torchrun"),
        str(RANKS / script), str(folder),
    ]
    # A hang is a failure, not a wait: the limit is far above what the script needs.
    done = subprocess.run(command, env=environment() | env, capture_output=True, text=True, timeout=timeout)
    return Outcome(done.returncode, done.stdout + done.stderr, folder)


def without_torchrun(script: str, folder: pathlib.Path, *arguments: str, ranks: int = 4) -> tuple[list[int], list[dict]]:
    """As ``torchrun``, which would end all ranks with the first that fails. Exit codes, and what ranks wrote."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    base = environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, str(RANKS / script), str(folder), *arguments]
    started = [subprocess.Popen(command, env=base | {"RANK": str(rank)}) for rank in range(ranks)]
    try:
        codes = [process.wait(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    return codes, Outcome(0, "", folder).ranks()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    # Short: a Unix socket's path has at most 107 characters.
    return tmp_path_factory.mktemp("r")


@pytest.fixture(autouse=True)
def fresh_log() -> None:
    """A cause that one test has logged counts as new in the next."""
    _repeats.begin()
