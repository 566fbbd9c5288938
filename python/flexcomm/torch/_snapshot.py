"""A copy in memory of everything that training depends on, and what of it cannot be copied."""

from __future__ import annotations

import collections
import copy
import dataclasses
import enum
import functools
import gc
import random
import sys
import types
from typing import Any, Callable, Iterable, Iterator

import torch
from torch.nn.parallel import DistributedDataParallel

from flexcomm._core import FlexcommError
from flexcomm.torch._arguments import shown
from flexcomm.torch._device import Cuda
from flexcomm.torch._storage import Copy, SnapshotStorage

#: What never changes, or is code: nothing of it needs a copy.
_FIXED = (
    type(None), bool, int, float, complex, str, bytes, range, type, enum.Enum, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType, types.MethodType, functools.partial, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.jit.ScriptFunction,
)  # fmt: skip

#: Of any module: not the script's.
_MODULES_OWN = frozenset(torch.nn.Module().__dict__) | {"_compiled_call_impl"}

#: Of any optimizer: copied in another way, or code.
_OPTIMIZERS_OWN = {"state", "param_groups", "defaults"}


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a snapshot copies."""

    model: Callable[[], DistributedDataParallel | None]
    optimizer: torch.optim.Optimizer | None
    scheduler: Any
    scaler: Any
    extra: tuple[Any, ...]
    generators: tuple[torch.Generator, ...]

    def __post_init__(self) -> None:
        for name, part in [("scheduler", self.scheduler), ("scaler", self.scaler), *(("extra", e) for e in self.extra)]:
            has = hasattr(part, "state_dict") and hasattr(part, "load_state_dict")
            if part is not None and (isinstance(part, type) or not has):
                raise ValueError(
                    f"{name} is {shown(part)}, allowed is an object with state_dict and load_state_dict, else a trial could not "
                    "put it back; give one that has both, or leave it out"
                )

    def missing(self) -> list[str]:
        """What was not given, and a trial would not put back if the script has it."""
        given = {"optimizer": self.optimizer, "scheduler": self.scheduler, "scaler": self.scaler}
        return [name for name, part in given.items() if part is None]


def _state_of(generator: Any) -> tuple[Any, Callable[[Any], object]] | None:
    """The state of a random generator and how it is set; none: it is not one."""
    if isinstance(generator, torch.Generator):
        return generator.get_state(), generator.set_state
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return generator.getstate(), generator.setstate
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(generator, numpy.random.Generator):
        bits = generator.bit_generator
        return copy.deepcopy(bits.state), lambda state: setattr(bits, "state", copy.deepcopy(state))
    if numpy is not None and isinstance(generator, numpy.random.RandomState):
        return generator.get_state(), generator.set_state
    return None


def _same(a: Any, b: Any) -> bool:
    """Whether two states of one generator are the same."""
    if torch.is_tensor(a):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(getattr(a == b, "all", lambda: a == b)())


class Random:
    """The state of the process's random generators, and of private ones."""

    def __init__(self, generators: tuple[torch.Generator, ...]) -> None:
        self._cpu = torch.get_rng_state()
        # A context is not made on every GPU only to look at generators that were never used.
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = numpy.random.get_state() if numpy is not None else None
        self._own = [(g, g.get_state()) for g in generators]

    def restore(self) -> None:
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        for generator, state in self._own:
            generator.set_state(state)

    def same(self, other: "Random") -> bool:
        """Whether all that both know of stand at the same place."""
        own = [(state, state_then) for (_, state), (_, state_then) in zip(self._own, other._own)]
        late = [(self._cuda, other._cuda), (self._numpy, other._numpy)]
        pairs = [(self._cpu, other._cpu), (self._python, other._python), *own]
        return all(_same(a, b) for a, b in [*pairs, *((a, b) for a, b in late if a is not None and b is not None)])


class Memory:
    """Remembers values and puts them back where they were: the same objects, with the contents that they had.

    Everything is visited once, however many refer to it. What refers to an object goes on doing so.
    """

    def __init__(self, storage: SnapshotStorage) -> None:
        self._storage = storage
        #: Tensors on GPUs, whose copies the storage keeps once all of them are known.
        self.on_gpus: list[torch.Tensor] = []
        self._copies: list[Copy] = []
        # Values are kept, so that no other takes their number.
        self._seen: dict[int, Any] = {}
        self._back: list[Callable[[], object]] = []
        #: What could not be copied, by where it was.
        self.opaque: dict[str, Any] = {}
        #: Modules that were found, which are the caller's to copy.
        self.modules: list[tuple[str, torch.nn.Module]] = []

    def copy(self) -> None:
        """Copies the tensors on GPUs."""
        self._copies = self._storage.keep(self.on_gpus)

    def restore(self) -> None:
        for back in self._back:
            back()

    def _first(self, value: Any) -> bool:
        new = id(value) not in self._seen
        self._seen[id(value)] = value
        return new

    def visit(self, value: Any, name: str, inside: bool = False) -> None:
        """Remembers a value with all that it holds. `inside`: also the attributes of objects of unknown kinds."""
        if isinstance(value, _FIXED) or not self._first(value):
            return
        generator = _state_of(value)
        if torch.is_tensor(value):
            self._tensor(value)
        elif isinstance(value, torch.nn.Module):
            self.modules.append((name, value))
        elif isinstance(value, (dict, list, set, collections.deque, tuple, frozenset, bytearray)):
            self._container(value, name, inside)
        elif generator is not None:
            state, back = generator
            self._back.append(lambda: back(state))
        elif type(value).__module__ == "numpy" and hasattr(value, "flags"):
            self._array(value)
        elif inside and hasattr(value, "__dict__"):
            self._container(vars(value), name, inside)
        else:
            self.opaque[name] = value

    def _tensor(self, tensor: torch.Tensor) -> None:
        overlaps = any(stride == 0 and size > 1 for stride, size in zip(_strides(tensor), tensor.shape))
        if tensor.grad_fn is not None or tensor.is_inference() or overlaps:
            # Part of a graph, or nothing that can be written to: who wants another value takes another tensor.
            return
        if self._storage.takes(tensor):
            number = len(self.on_gpus)
            self.on_gpus.append(tensor)
            self._back.append(lambda: self._copies[number].restore())
            return
        saved = tensor.detach().clone()

        def back() -> None:
            if tensor.shape == saved.shape:
                tensor.detach().copy_(saved)
            else:
                tensor.data = saved.clone()

        self._back.append(back)

    def _array(self, array: Any) -> None:
        saved = array.copy()

        def back() -> None:
            if array.flags.writeable:
                array[...] = saved

        self._back.append(back)

    def _container(self, value: Any, name: str, inside: bool) -> None:
        then: Any = dict(value) if isinstance(value, dict) else list(value)

        def back() -> None:
            if isinstance(value, (list, bytearray)):
                value[:] = then
            elif isinstance(value, (set, collections.deque)):
                value.clear()
                (value.update if isinstance(value, set) else value.extend)(then)
            elif isinstance(value, dict) and _other(value, then):
                value.clear()
                value.update(then)

        self._back.append(back)
        for key, item in then.items() if isinstance(value, dict) else enumerate(then):
            self.visit(item, f"{name}[{key!r}]" if isinstance(key, (str, int)) else name, inside)

    def attributes(self, owner: Any, name: str, own: Iterable[str]) -> None:
        """Remembers an object's attributes, but for those that its base class has."""
        attributes = vars(owner)
        saved = {key: value for key, value in attributes.items() if key not in own}

        def back() -> None:
            for key in [key for key in attributes if key not in own and key not in saved]:
                del attributes[key]
            attributes.update(saved)

        self._back.append(back)
        for key, value in saved.items():
            self.visit(value, f"{name}.{key}" if name else key)


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    return tensor.stride() if tensor.layout == torch.strided else ()


def _other(now: dict[Any, Any], then: dict[Any, Any]) -> bool:
    """Whether a dictionary has other entries, or another order."""
    return len(now) != len(then) or any(k is not l or now[k] is not then[l] for k, l in zip(now, then))


class Snapshot:
    """A copy of everything that training depends on. ``restore`` writes into the tensors that there were, whose addresses
    stay, and puts them back where others have taken their place: DDP's buckets and fused optimizers hold them.

    ``source`` is what batches come from. It goes on from where it is: a trial's batches are kept for training. ``storage`` has
    the copies of tensors on GPUs; only to ``look`` at them makes none, and nothing to restore.
    """

    def __init__(self, parts: Parts, source: Any = None, storage: SnapshotStorage | None = None, look: bool = False) -> None:
        model = parts.model()
        if model is None:
            raise FlexcommError("failed to take a snapshot: the model is gone")
        self._parts = parts
        self._memory = Memory(storage or SnapshotStorage(Cuda()))
        self._modules: dict[int, torch.nn.Module] = {}
        self._optimizers: dict[int, Any] = {}
        self._schedulers: set[int] = set()
        self._extra_states: list[tuple[torch.nn.Module, Any]] = []
        self._states: list[tuple[Any, Any]] = []
        self._grads: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        self._training: list[tuple[torch.nn.Module, bool]] = []
        #: What it could not copy, for people.
        self.missed: list[str] = []
        #: What gives the batches, though it is in `extra`: not put back.
        self.replayed: list[str] = []
        with torch.no_grad():
            self._copy_module("", model)
            if parts.optimizer is not None:
                self._copy_optimizer(parts.optimizer)
            self._copy_states(source)
            while self._memory.modules:
                self._copy_module(*self._memory.modules.pop())
            #: Tensors on GPUs.
            self.on_gpus = self._memory.on_gpus
            if not look:
                self._memory.copy()
        self._random = Random(parts.generators)

    def _copy_states(self, source: Any) -> None:
        behind = {id(o) for o in reachable(source)}
        given = (self._parts.scheduler, self._parts.scaler, *self._parts.extra)
        for part in (*given, *self._forgotten(given)):
            if part is None:
                continue
            if isinstance(part, torch.nn.Module):
                self._copy_module(type(part).__name__, part)
            elif isinstance(part, torch.optim.Optimizer):
                self._copy_optimizer(part)
            elif isinstance(part, torch.utils.data.DataLoader) or (id(part) in behind and _gives(part)):
                self.replayed.append(type(part).__name__)
            else:
                self._states.append((part, copy.deepcopy(part.state_dict())))

    def _forgotten(self, given: tuple[Any, ...]) -> list[Any]:
        """Schedulers of the optimizers that are put back, which were not given: stepped in a trial they would train on with other
        learning rates. Looks at all of the interpreter's objects, which takes less than a trial's step."""
        known = {id(o) for part in given for o in reachable(part)}
        schedulers = _living(torch.optim.lr_scheduler.LRScheduler)
        ours = [o for o in schedulers if id(getattr(o, "optimizer", None)) in self._optimizers and id(o) not in known]
        self._schedulers = {id(o) for o in ours}
        return ours

    def _copy_module(self, name: str, model: torch.nn.Module) -> None:
        # What DDP has beside its module is not training's, and a trial may be what registers the hook.
        top = model.module if isinstance(model, DistributedDataParallel) else model
        self._training += [(m, m.training) for m in model.modules()]
        for path, module in top.named_modules(prefix=name):
            if self._modules.get(id(module)) is module:
                continue
            self._modules[id(module)] = module
            self._copy_extra_state(module, path)
            if isinstance(module, torch.jit.ScriptModule):
                for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                    self._memory.visit(tensor, path)
                continue
            self._memory.visit(module._parameters, path)
            self._memory.visit(module._buffers, path)
            self._memory.attributes(module, path, _MODULES_OWN)
        self._modules[id(model)] = model
        self.missed += [f"{key} ({type(value).__name__})" for key, value in self._memory.opaque.items()]
        self._memory.opaque.clear()
        for parameter in top.parameters():
            self._grads.append((parameter, parameter.grad))
            self._memory.visit(parameter.grad, "grad")

    def _copy_extra_state(self, module: torch.nn.Module, path: str) -> None:
        base, kind = torch.nn.Module, type(module)
        gets, sets = (getattr(kind, f"{do}_extra_state") is not getattr(base, f"{do}_extra_state") for do in ("get", "set"))
        if gets and sets:
            self._extra_states.append((module, copy.deepcopy(module.get_extra_state())))
        elif gets:
            self.missed.append(f"the extra state of {path} ({kind.__name__}), which has no set_extra_state")

    def _copy_optimizer(self, optimizer: Any) -> None:
        inner = reachable(optimizer, lambda o: isinstance(o, torch.optim.Optimizer))
        for one in [o for o in inner if o is optimizer or isinstance(o, torch.optim.Optimizer)]:
            self._optimizers[id(one)] = one
            name = type(one).__name__
            self._memory.visit(one.param_groups, name)
            self._memory.visit(one.state, name, inside=True)
            hooks = {key for key in vars(one) if key.startswith("_optimizer_")}
            self._memory.attributes(one, name, _OPTIMIZERS_OWN | hooks)
        # Of an optimizer's attributes most are code's; another optimizer among them has been copied.
        missed = [(key, v) for key, v in self._memory.opaque.items() if hasattr(v, "state_dict") and id(v) not in self._optimizers]
        self.missed += [f"{key} ({type(value).__name__})" for key, value in missed]
        self._memory.opaque.clear()

    def strangers(self) -> list[str]:
        """What the process has that looks like training's and was not given, as far as it can be seen. Looks at all of
        the interpreter's objects: for once in a while."""
        given = [o for o in reachable(self._parts.scheduler) if isinstance(o, torch.optim.lr_scheduler.LRScheduler)]
        given += [o for part in (self._parts.scaler, *self._parts.extra) for o in reachable(part)]
        known = {*map(id, given), *self._modules, *self._optimizers, *self._schedulers}
        if any(id(o) not in known for o in _living(*_KINDS)):
            # It may not be referenced any more and wait for the collector.
            gc.collect()
        found = [o for o in _living(*_KINDS) if id(o) not in known]
        return sorted({f"{next(_KINDS[k] for k in _KINDS if issubclass(type(o), k))} {type(o).__name__}" for o in found})

    @torch.no_grad()
    def restore(self) -> None:
        """Puts everything back, bit for bit; may be called again."""
        for parameter, grad in self._grads:
            parameter.grad = grad
        for module, training in self._training:
            module.training = training
        for module, state in self._extra_states:
            module.set_extra_state(copy.deepcopy(state))
        for part, state in self._states:
            part.load_state_dict(copy.deepcopy(state))
        # After the scheduler, which may write learning rates into the optimizer's groups.
        self._memory.restore()
        self._random.restore()


#: What trains, or is trained.
_KINDS = {
    torch.optim.Optimizer: "optimizer",
    torch.optim.lr_scheduler.LRScheduler: "scheduler",
    torch.amp.GradScaler: "scaler",
    torch.optim.swa_utils.AveragedModel: "average",
    DistributedDataParallel: "model",
}


def _living(*kinds: type) -> list[Any]:
    """The process's objects of these classes and of classes derived from them. They are found by what refers to the classes, which
    writes to no object: a process that was forked shares its objects' memory, and a walk that counts references would copy it all."""
    classes: set[type] = set()
    left = list(kinds)
    while left:
        if (kind := left.pop()) not in classes:
            classes.add(kind)
            left += kind.__subclasses__()
    return [o for o in gc.get_referrers(*classes) if type(o) in classes]


def _gives(part: Any) -> bool:
    """Whether batches can come from it."""
    return any(hasattr(part, name) for name in ("__iter__", "__next__", "__getitem__"))


def reachable(root: Any, through: Callable[[Any], bool] | None = None, most: int = 2000) -> Iterator[Any]:
    """An object and what it holds in attributes, containers, and the variables of generators: at most so many. Not through
    tensors, modules and code; with `through` only attributes of objects for which it says so."""
    seen: dict[int, Any] = {}
    left = collections.deque([root])
    while left and len(seen) < most:
        value = left.popleft()
        if id(value) in seen or torch.is_tensor(value) or isinstance(value, (*_FIXED, torch.nn.Module)) and value is not root:
            continue
        seen[id(value)] = value
        yield value
        left.extend(_held(value, value is root or through is None or through(value)))


def _held(value: Any, attributes: bool) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(value.values())[:100]
    if isinstance(value, (list, tuple, set, collections.deque)):
        return list(value)[:100]
    if not attributes:
        return ()
    if isinstance(value, types.GeneratorType):
        return () if value.gi_frame is None else list(value.gi_frame.f_locals.values())
    if type(value).__module__ in ("builtins", "itertools"):
        # enumerate, zip, islice and the like.
        return gc.get_referents(value) if hasattr(value, "__next__") else ()
    return list(getattr(value, "__dict__", {}).values())
