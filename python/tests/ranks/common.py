"""What the scripts share."""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import logging
import os
import pathlib
import sys
from typing import Any, Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))

FOLDER = pathlib.Path(sys.argv[1])


class Lines(logging.Handler):
    """flexcomm's log lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("flexcomm").addHandler(self)
        logging.getLogger("flexcomm").setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def take(self) -> list[str]:
        lines, self.lines = self.lines, []
        return lines


def network(sizes: tuple[int, ...] = (20, 120, 120, 2), seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    layers: list[torch.nn.Module] = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [torch.nn.Linear(a, b), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def ddp(model: torch.nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, **({"bucket_cap_mb": 0.03} | options))


def batch(step: int, rank: int, size: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """A task that a network can learn, other data on every rank and step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, 20, generator=generator)
    return x, (x[:, :5].sum(1) > 0).long()


def parameters_hash(model: torch.nn.Module) -> str:
    bits = b"".join(p.detach().numpy().tobytes() for p in (*model.parameters(), *model.buffers()))
    return hashlib.sha256(bits).hexdigest()[:16]


def everywhere(value: Any, group: Any = None) -> list[Any]:
    """Every rank's value."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def same(value: Any, group: Any = None) -> bool:
    return len(set(everywhere(value, group))) == 1


class Short:
    """A core that is given a value too few of every gradient, as if the codec could not take it."""

    def __init__(self, core: Any) -> None:
        self._core = core

    def __getattr__(self, name: str) -> Any:
        return getattr(self._core, name)

    def begin_exchange(self, index: int, gradient: torch.Tensor, *others: Any) -> Any:
        return self._core.begin_exchange(index, gradient[:-1], *others)


@contextlib.contextmanager
def ranks() -> Iterator[tuple[int, int, dict[str, Any]]]:
    """This rank, their number, and a place for what it sees."""
    dist.init_process_group("gloo")
    seen: dict[str, Any] = {}
    rank = dist.get_rank()
    # A hang leaves traces of where every rank was.
    faulthandler.dump_traceback_later(200, exit=True)
    yield rank, dist.get_world_size(), seen
    (FOLDER / f"rank{rank:02}.json").write_text(json.dumps(seen))
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # What has been seen is written. An interpreter that ends while Gloo's threads let go of tensors may abort, with
    # and without flexcomm; that is not what is tested here.
    os._exit(0)
