"""What ``attach`` is given: read, or refused with the value, what is allowed and the remedy."""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import re
import stat
from collections.abc import Iterable
from typing import Any, Mapping

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flexcomm import _core

_SELECTIONS = ("decision", "star", "var", "auto")

#: Bytes of a Unix socket's path on Linux, without the one that ends it.
_MOST_PATH = 107

#: Characters of a value in an error.
_MOST_SHOWN = 80


def shown(value: object) -> str:
    """A value as an error names it, whatever it is."""
    text = " ".join(repr(value).split())
    short = text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."
    return short if isinstance(value, (str, int, float, type(None))) else f"{short} (a {type(value).__name__})"


def _refused(what: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{what} is {shown(value)}, allowed is {allowed}")


def strategy_of(what: str, named: Any) -> _core.Named:
    """Reads any of the forms that ``attach`` takes."""
    if isinstance(named, Mapping):
        return _core.parse_strategy(_core.parse_byteps({str(key): str(value) for key, value in named.items()}))
    if not isinstance(named, str):
        raise _refused(what, named, _FORMS + "; or BytePS's map of strings")
    if not named.strip():
        raise ValueError(f"{what} is {shown(named)}, which names no strategy: leave the argument out, or give one of {_FORMS}")
    try:
        return _core.parse_strategy(named.strip())
    except ValueError as refused:
        raise ValueError(f"{what} is {shown(named)}: {refused}") from None


_FORMS = (
    "'dense'; a compressor with its parameters, for example 'topk(k=0.01)+ef(vanilla)', and where you like its collective, for "
    "example 'topk(k=0.01)+ef(vanilla)/art-ring:star' or in short 'topk@0.01/art-ring:star'; flexcomm.torch.compressors() has "
    "all of them"
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What ``attach`` is given besides the model and what a trial puts back."""

    named: _core.Named
    #: Whether decisions are not followed.
    fixed: bool
    selection: str
    #: Compressors to decide among, in canonical form; none: the default ones.
    candidates: list[str] | None
    #: What is set for the job, as JSON; none: nothing. Ranks may differ in it: the controller takes the lowest one's.
    policy: str | None
    #: As this rank's script or environment names it; empty where they do not.
    job: str
    socket: str | None
    propagate: bool
    shadow_share: float
    seed: int


def read(
    *, strategy: Any, initial: Any, selection: Any, candidates: Any, policy: Any, job: Any, socket: Any, on_nonfinite: Any,
    scaler: Any, shadow_share: Any, seed: Any, register: Any,
) -> Settings:
    """Reads them. Ranges of numbers and names of jobs are the core's to check."""
    if not isinstance(selection, str) or selection not in _SELECTIONS:
        raise _refused("selection", selection, ", ".join(_SELECTIONS))
    job = os.environ.get("FLEXCOMM_JOB", "") if job is None or job == "" else job
    if not isinstance(job, str):
        raise _refused("job", job, "a text, the same on all ranks")
    if not isinstance(register, bool):
        raise _refused("register", register, "True, or False where you register session.hook yourself")
    # Read where it does not count, too: what is wrong is no less wrong beside `strategy`.
    first = strategy_of("initial", initial)
    return Settings(
        named=first if strategy is None else strategy_of("strategy", strategy),
        fixed=strategy is not None,
        selection=selection,
        candidates=_candidates(candidates),
        policy=_policy(policy),
        job=job,
        socket=_socket(socket),
        propagate=_propagates(on_nonfinite, scaler),
        shadow_share=_number("shadow_share", shadow_share),
        seed=_seed(seed),
    )


#: What torchrun's --rdzv-id is without one, and what launchers write for none.
_NO_ID = frozenset({"", "none", "null", "nil", "0"})
#: A pod of the training operator, PyTorchJob's and MPIJob's alike: the job's name, the pod's part in it, its number.
_POD = re.compile(r"(.+)-(?:master|worker|launcher)-[0-9]+")
#: Longest name of a job.
_MAX_JOB = 63


def default_job(env: Mapping[str, str]) -> str:
    """The job's name where the user gives none: what launched the job knows it by."""
    run = env.get("TORCHELASTIC_RUN_ID", "")
    if run.lower() not in _NO_ID and (name := _as_job(run)):
        return name
    if env.get("SLURM_JOB_ID", "") not in _NO_ID:
        return _as_job("slurm-" + env["SLURM_JOB_ID"])
    if "KUBERNETES_SERVICE_HOST" in env:
        host, index = env.get("HOSTNAME", ""), env.get("JOB_COMPLETION_INDEX")
        pod = _POD.fullmatch(host)
        # The pods of an indexed Job are called by its name and their index.
        indexed = host.removesuffix(f"-{index}") if index is not None else host
        for name in (env.get("JOB_NAME", ""), pod[1] if pod else "", indexed if indexed != host else ""):
            if name and (name := _as_job(name)):
                return name
    return "default"


def _as_job(text: str) -> str:
    """With what a name may not have replaced."""
    return re.sub("[^A-Za-z0-9._-]", "-", text).lstrip("._-")[:_MAX_JOB]


#: Compressors that a script may name; the controller takes no more.
_MOST_CANDIDATES = 16


def _candidates(given: Any) -> list[str] | None:
    if given is None:
        return None
    allowed = f"1 to {_MOST_CANDIDATES} compressors as texts, for example ['fp16', 'topk(k=*)+ef(vanilla)', 'terngrad']; None: the default ones"
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise _refused("candidates", given, allowed)
    texts = list(given)
    if not 1 <= len(texts) <= _MOST_CANDIDATES or not all(isinstance(text, str) for text in texts):
        raise _refused("candidates", texts, allowed)
    try:
        return sorted({_core.parse_candidate(text) for text in texts})
    except ValueError as refused:
        raise ValueError(f"candidates is {shown(texts)}: {refused}") from None


def _policy(given: Any) -> str | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise _refused("policy", given, "a dict with any of the keys of a job's policy, for example {'kinds': ['topk']}; None: no policy")
    try:
        return _core.parse_policy(json.dumps(dict(given), allow_nan=False))
    except (TypeError, ValueError) as refused:
        raise ValueError(f"policy is {shown(given)}: {refused}") from None


def _socket(given: Any) -> str | None:
    whose = "socket"
    if given is None or given == "":
        whose, given = "FLEXCOMM_SOCKET", os.environ.get("FLEXCOMM_SOCKET") or None
    path = os.fspath(given) if isinstance(given, os.PathLike) else given
    if path is None:
        return None
    if not isinstance(path, str) or "\0" in path:
        raise _refused(whose, given, "the path of the agent's Unix socket, agent.sock in its run_dir")
    length = len(os.fsencode(path))
    if length > _MOST_PATH:
        raise ValueError(
            f"{whose} is {path!r}, {length} bytes long, allowed are at most {_MOST_PATH} (the system's limit for Unix sockets); "
            "give the agent a shorter run_dir, or make a symbolic link to it"
        )
    _check_socket(whose, path)
    return path


def _check_socket(whose: str, path: str) -> None:
    """There may be none yet: the agent may start later. Something else there never becomes one."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        what = "a folder" if stat.S_ISDIR(mode) else "a file that is no socket"
        raise ValueError(
            f"{whose} is {path!r}, {what}, allowed is the path of the agent's Unix socket: agent.sock in its run_dir, for example "
            "/run/flexcomm/agent.sock"
        )


def loss(given: Any) -> float:
    """What a step's loss is reported as."""
    one = not torch.is_tensor(given) or given.numel() == 1
    try:
        if one and not isinstance(given, (str, bytes)):
            return float(given)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise _refused("loss", given, "a number, or a tensor of one value, for example the mean of a batch's")


def _propagates(on_nonfinite: Any, scaler: Any) -> bool:
    choices = {"raise": False, "propagate": True, "auto": scaler is not None}
    if not isinstance(on_nonfinite, str) or on_nonfinite not in choices:
        raise _refused("on_nonfinite", on_nonfinite, ", ".join(choices))
    return choices[on_nonfinite]


def _number(what: str, value: Any) -> float:
    try:
        return value if isinstance(value, float) else float(operator.index(value))
    except TypeError:
        raise _refused(what, value, "a number above 0, at most 1") from None


def _seed(value: Any) -> int:
    try:
        seed = operator.index(value)
    except TypeError:
        seed = -1
    if not 0 <= seed < 2**64:
        raise _refused("seed", value, "a whole number from 0 to 2^64 - 1, the same on all ranks")
    return seed


def several(what: str, given: Any, of: str) -> tuple[Any, ...]:
    """A list that the user gave."""
    if isinstance(given, Iterable) and not isinstance(given, (str, bytes, Mapping)):
        return tuple(given)
    raise ValueError(f"{what} is {shown(given)}, allowed is a list of {of}; write {what}=[...]")


def generators(given: Any) -> tuple[Any, ...]:
    """Private random generators."""
    found = several("generators", given, "torch.Generator")
    for one in found:
        if isinstance(one, type) or not (hasattr(one, "get_state") and hasattr(one, "set_state")):
            raise _refused("one of generators", one, "a torch.Generator")
    return found


def group_of(model: DistributedDataParallel) -> dist.ProcessGroup | None:
    """The model's process group; none is the default one."""
    own = model.process_group
    return None if own is dist.group.WORLD else own


def check_group(given: Any, own: dist.ProcessGroup | None) -> None:
    """The model's ranks must be the group's: else some would wait for others in vain."""
    allowed = "the process group that DistributedDataParallel was given, process_group=; or leave it out"
    if given is None:
        return
    if not isinstance(given, dist.ProcessGroup):
        raise _refused("group", given, allowed)
    # Older torch does not take none for the default group here.
    ranks, models = (dist.get_process_group_ranks(group or dist.group.WORLD) for group in (given, own))
    if ranks != models:
        raise ValueError(f"group has the ranks {ranks} and the model's has {models}, allowed is {allowed}")


def stepping(optimizer: Any) -> Any:
    """The optimizer whose hooks run: of a wrapper that has none of its own (Accelerate's) what it wraps."""
    while not hasattr(optimizer, "_optimizer_step_post_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def check_optimizer(optimizer: Any, model: torch.nn.Module) -> None:
    if optimizer is None:
        return
    inner = stepping(optimizer)
    for one in (optimizer, inner):
        if isinstance(one, type):
            raise ValueError(
                f"optimizer is the class {one.__name__}, allowed is an optimizer made of it: write "
                f"optimizer={one.__name__}(model.parameters(), ...), or leave it out"
            )
    tells = hasattr(inner, "_optimizer_step_post_hooks") or not isinstance(inner, torch.optim.Optimizer)
    if not (tells and hasattr(inner, "register_step_post_hook")):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__} that does not tell when it steps; give the torch.optim.Optimizer that "
            "steps the model, or a wrapper that has it as its attribute optimizer, or leave it out"
        )
    groups = getattr(inner, "param_groups", None)
    its = None if groups is None else {id(p) for group in groups for p in group["params"]}
    if its is not None and its.isdisjoint(id(p) for p in model.parameters()):
        raise ValueError(
            f"optimizer is a {type(optimizer).__name__} of {len(its)} parameters, none of which is the model's, so its steps are "
            "not the model's; make it of model.parameters() (again, where the model was replaced after it was made), or leave "
            "it out"
        )
