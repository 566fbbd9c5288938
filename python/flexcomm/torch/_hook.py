"""The communication hook: which collectives run for a bucket, in which order, the same on every rank."""

import functools
import itertools
import logging
import time
import weakref
from typing import TYPE_CHECKING, Any, Callable

import torch
import torch.distributed as dist

from flexcomm._core import Core, FlexcommError, How, Round
from flexcomm.torch import _device
from flexcomm.torch._clock import Clock, Mark
from flexcomm.torch._control import Control
from flexcomm.torch._tuner import Tuner
from flexcomm.torch._unused import Exchanged, Unused

if TYPE_CHECKING:
    # torch.distributed has it only where torch was built with it, which its type hints tell as a perhaps.
    from torch._C._distributed_c10d import GradBucket as GradBucket
else:
    GradBucket = dist.GradBucket

#: What torch's own collectives give back too; `torch.futures.Future` is Python around it, and takes twice as long.
_Future: Any = torch._C.Future

logger = logging.getLogger("flexcomm")

#: In which type dense buckets travel, as the core answers it; none = their own.
HALVES = (None, torch.float16, torch.bfloat16)

#: Element types of rounds that sum.
SUMS = {How.SumF32: torch.float32, How.SumF16: torch.float16, How.SumBf16: torch.bfloat16}

#: Element types that travel compressed from the host, see :data:`_device.TYPES` for CUDA's; buckets of others are exchanged
#: as they are.
COMPRESSIBLE = (torch.float32,)

#: :meth:`Core.fault`'s codes for this rank's part in the pass.
_FAILED, _NOT_FINITE_HERE = 1, 2

#: Of a rank's status in a pass that was refused: that number, flags, and the reason, cut where it is longer.
_FAULT_BYTES = 512

#: Flags of a rank in a pass that was refused: its gradient stays not finite, since no trial undoes it; it has run out of batches.
_STAYS, _IDLE = 1, 2


_NOT_FINITE = (
    "failed to exchange gradients: %s has NaN or infinite values, and so have all ranks' gradients now. Leave out the "
    "optimizer's step and call zero_grad() to go on with the next batch; lower the learning rate, clip gradients, or attach "
    "with on_nonfinite='propagate' when a GradScaler handles them"
)


_BROKEN = (
    "failed to exchange gradients: parameters of the model have NaN or infinite values already, since an optimizer's step before "
    "this one, and so has every gradient from now on. Go back to the last good checkpoint, and lower the learning rate or clip "
    "gradients from there on; steps before compression begins, and dense ones, are not looked at"
)


_LEFT_OUT = (
    "some rank's gradient has NaN or infinite values, and %d of the ranks have run out of batches under join(): an error would "
    "take those out of it, and the others would wait for them. All gradients of this pass are zeros instead, on all ranks"
)


class NotFiniteError(FlexcommError):
    """A gradient has NaN or infinite values. Raised on every rank at the same step, out of ``backward()``, after which all
    ranks' gradients are NaN where it was: a script that catches it leaves out the optimizer's step, and may go on.

    Not raised under ``ddp_model.join()`` once a rank has run out of batches: then the gradients are zeros on all ranks, and a
    warning says so."""


def _after_ddp(then: Callable[[], None]) -> None:
    """Calls it when DDP has ended its pass, inside ``backward()``."""
    engine = torch.autograd.Variable._execution_engine
    # DDP queues the end of its pass after the hook's return: before what is queued by what was queued here.
    engine.queue_callback(lambda: engine.queue_callback(then))


def _raise_after_ddp(error: Exception) -> None:
    """Raises it out of ``backward()``. Raised by the hook itself it would end DDP's pass halfway, and the next one would
    fail."""

    def throw() -> None:
        raise error

    _after_ddp(throw)


def in_backward() -> bool:
    """Not so of a rank that has run out of batches, under ``join()``."""
    return bool(torch._C._current_graph_task_id() >= 0)


class _DetachedHook:
    """In copies of a model, pickled ones too, in place of the hook."""

    def __call__(self, *_: Any) -> Any:
        raise FlexcommError("failed to exchange a bucket: this hook is a copy; attach to the model that was copied")


def detached_hook() -> _DetachedHook:
    return _DetachedHook()


# As models have it that earlier releases pickled.
nobodys = detached_hook


def is_detached(hook: object) -> bool:
    return isinstance(hook, _DetachedHook)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


class _BucketView:
    """A bucket as DDP shows it, and what stays true of it for as long as DDP shows the very same tensor: asking torch for that
    again in every step would cost more than all else that a dense bucket needs."""

    __slots__ = ("buffer", "values", "bytes", "on_device", "ours", "on_host", "direct", "last", "done", "parameters")

    def __init__(self, bucket: GradBucket, buffer: torch.Tensor, device: "_device.Device") -> None:
        self.buffer = buffer
        self.parameters = bucket.parameters()
        self.values = buffer.numel()
        self.bytes = self.values * buffer.element_size()
        self.on_device = device.takes(buffer)
        self.on_host = buffer.device.type == "cpu"
        self.ours = (
            self.on_host and not self.on_device and buffer.dtype in COMPRESSIBLE and buffer.is_contiguous()
        )
        #: Whether it can go by the shortest way while the ranks are dense, see :meth:`Hook.__call__`.
        self.direct = self.ours and not device.on_gpu(buffer)
        self.last = bucket.is_last()
        #: What DDP is given for the last bucket, exchanged in place and waited for: the same in every step.
        self.done = _future(buffer)
        if self.last:
            self.done.set_result(buffer)


def _future(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = _Future([] if buffer.device.type == "cpu" else [buffer.device])
    return future


class Hook:
    """A DDP communication hook that follows flexcomm's decisions.

    ``flexcomm.torch.attach`` makes and registers one; with ``register=False`` the caller registers it:
    ``ddp_model.register_comm_hook(None, session.hook)``. :class:`flexcomm.torch.CommHook` makes one by itself.

    Parameters
    ----------
    core:
        This rank's core.
    group:
        Process group whose ranks exchange gradients; none is the default group.
    ids:
        Number of every parameter, by ``id(parameter)``.
    control:
        The ranks' control group.
    propagate:
        Whether a gradient that is not finite becomes NaN on all ranks (as GradScaler expects); otherwise
        :class:`NotFiniteError` is raised on all ranks.
    rates:
        Learning rates of the step under way, for memories that rescale their residual when these change: the first
        group's, and those of the parameters with these ids where the optimizer has several groups.
    tuner:
        NCCL's tuner plugin, where every rank has it: allreduces then take the shape that the ranks agreed on.
    fresh:
        Whether DDP allocates its buckets anew in every step and wants their memory back after it.
    unused:
        Where DDP looks for parameters that no rank uses.
    """

    def __init__(
        self,
        core: Core,
        group: dist.ProcessGroup | None,
        ids: dict[int, int],
        *,
        control: Control,
        propagate: bool,
        began: Callable[[], None],
        not_finite: Callable[[], bool],
        rates: Callable[[list[int]], list[float]],
        tuner: Tuner | None = None,
        fresh: bool = False,
        unused: Unused | None = None,
    ) -> None:
        # DDP looks for these on the hook; an instance has none.
        self.__name__ = self.__qualname__ = "flexcomm_hook"
        self.core = self._core = core
        self.tuner = tuner
        self._group = group
        self._world = dist.get_world_size(group)
        self._rank = dist.get_rank(group)
        self._ids = ids
        # Element type in which dense buckets of the step travel; none = their own.
        self._half: torch.dtype | None = None
        self._control = control
        self._propagate = propagate
        self._began = began
        self._not_finite = not_finite
        self._rates = rates
        self._tuner = tuner
        # A collective, and what comes after it; where that is nothing, the tensor that has the result.
        self._pending: list[tuple[_device.Launched | None, Callable[[], torch.Tensor] | torch.Tensor]] = []
        # Collectives of buckets that native DDP exchanges, with what their times are taken by.
        self._native_works: list[tuple[dist.Work, Mark | None]] = []
        # None where DDP was given one that is done.
        self._futures: list[Any] = []
        # Whether a bucket of the pass was refused, by all ranks.
        self._refused = False
        self._share = 1.0 / self._world
        self._fresh = fresh
        self._unused = unused
        # Buckets of the pass that a memory takes part in, where DDP may throw some of their results away.
        self._remembered: list[tuple[int, _BucketView]] = []
        self._views: dict[int, _BucketView] = {}
        self._options = dist.AllreduceOptions()
        # Not kept alive by this: DDP holds it.
        self._reducing = weakref.ref(dist.group.WORLD if group is None else group)
        self._layouts: dict[int, list[int]] = {}
        self._device = _device.Device(core, group)
        # Events of the bucket under way, and of all buckets of the pass; none of buckets that the host's clock can tell.
        self._mark: Mark | None = None
        self._marks: list[Mark | None] = []
        # Where the host's tensors must go to travel: by the backends, and of the bucket under way.
        self._wire = self._via = _device.wire(group)
        self._buffers: dict[tuple[int, str], torch.Tensor] = {}

    def __reduce__(self) -> Any:
        # With the model that it is registered on. A copy's reducer is made anew, without hooks.
        return detached_hook, ()

    def __call__(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What DDP calls for every bucket of a synchronised backward pass."""
        index, buffer = bucket.index(), bucket.buffer()
        if index == 0:
            if self._pending:
                self._forget()
            self._began()
        view = self._views.get(index)
        if view is None or view.buffer is not buffer:
            view = self._new_view(index, bucket, buffer)
        if not view.direct:
            return self._other(index, view, None)
        plan = self._core.enter(index, buffer.data_ptr(), view.values, False)
        if plan[0] or plan[1] or self._tuner is not None:
            return self._other(index, view, plan)
        # What most steps are: dense, on the host. Every call counts here.
        buffer.mul_(self._share)
        self._core.launched(view.bytes, False)
        self._pending.append((self._sum_in_place(buffer), buffer))
        self._marks.append(None)
        if view.last:
            self._futures.append(None)
            self._arrive()
            return view.done
        future: torch.futures.Future[torch.Tensor] = _Future([])
        self._futures.append(future)
        return future

    def _sum_in_place(self, buffer: torch.Tensor) -> dist.Work:
        """As `dist.all_reduce`, without what it looks at first, which is known of these buffers."""
        group = self._reducing()
        if group is None:
            return dist.all_reduce(buffer, group=self._group, async_op=True)
        return group.allreduce([buffer], self._options)

    def _new_view(self, index: int, bucket: GradBucket, buffer: torch.Tensor) -> _BucketView:
        """A tensor that was not shown before: another bucket, or DDP has rebuilt its buckets."""
        if buffer.layout != torch.strided:
            # The same on all ranks: they hold the same model.
            raise FlexcommError(
                "failed to exchange a sparse gradient: flexcomm needs dense ones; "
                "make the model's Embedding layers with sparse=False"
            )
        self._know(index, bucket)
        view = _BucketView(bucket, buffer, self._device)
        if not self._fresh:
            self._views = {i: known for i, known in self._views.items() if i < index}
            self._views[index] = view
        return view

    def _other(
        self, index: int, view: _BucketView, plan: tuple[bool, int] | None
    ) -> torch.futures.Future[torch.Tensor]:
        """A bucket that is not dense and in place; `plan` is the core's, if it was asked already."""
        buffer, on_device = view.buffer, view.on_device
        if plan is None:
            look = self._device.host(buffer, index) if on_device and self._core.watching() else buffer
            address = look.data_ptr() if view.ours or look is not buffer else 0
            plan = self._core.enter(index, address, view.values, on_device)
        if on_device:
            self._device.watch(index, buffer)
        exchanged, half = plan
        self._half = HALVES[half]
        self._mark = self._marked(exchanged, buffer)
        self._via = self._device.wire(buffer, self._wire)
        if not exchanged:
            if not view.ours and not on_device:
                self._explain(buffer)
            self._dense(index, buffer)
        elif on_device:
            self._exchange_on_device(index, buffer)
        else:
            self._exchange(index, buffer)
        if exchanged and self._unused is not None:
            self._remembered.append((len(self._futures), view))
        self._device.under_way(self._mark, self._pending[-1][0])
        self._marks.append(self._mark)
        future = _future(buffer)
        self._futures.append(future)
        if view.last:
            self._arrive()
            if on_device:
                self._device.watched(buffer)
        return future

    @property
    def clock(self) -> Clock:
        """Of what runs on a GPU."""
        return self._device.clock

    def _forget(self) -> None:
        """What a pass that ended in an exception has left over."""
        self._pending.clear()
        self._native_works.clear()
        self._futures.clear()
        self._marks.clear()
        self._remembered.clear()
        self._refused = False

    def _marked(self, exchanged: bool, buffer: torch.Tensor) -> Mark | None:
        """Events of a bucket on a GPU."""
        if not self._device.on_gpu(buffer):
            return None
        return self._device.clock.enter(buffer, exchanged or self._half is not None)

    def _exchange_on_device(self, index: int, buffer: torch.Tensor) -> None:
        """A compressed bucket on a GPU: by kernels there, else in a copy on the host."""
        why, there = self._device.begin(index, buffer, self._rates(self._layouts[index]))
        if there is not None and there.stays:
            why, work, judged = self._device.gather(there, self._mark)
            if judged is not None:
                self._pending.append((work, judged))
                return
            there = None
        if there is not None:
            self._exchange(index, buffer, there)
            return
        if why:
            self._device.warn_once(buffer, self._core.tick()[1], why)
        self._exchange(index, self._device.host(buffer, index))
        launched, then = self._pending.pop()
        self._pending.append((launched, lambda: buffer.copy_(self._landed(then))))

    def native(
        self, index: int, buffer: torch.Tensor, last: bool, all_reduce: Callable[[torch.Tensor], dist.Work]
    ) -> dist.Work:
        """A bucket that native DDP exchanges, divided by the number of ranks already.

        Sends what the hook would send in a dense step: ranks with and without the hook go together.
        """
        if index == 0:
            self._forget()
            self._began()
        self._mark = self._device.clock.enter(buffer, False) if self._device.on_gpu(buffer) else None
        self._core.pass_by(index, buffer.numel(), buffer.element_size())
        if self._mark is not None:
            self._device.clock.launch(self._mark)
        work = all_reduce(buffer)
        if self._mark is not None:
            self._device.under_way(self._mark, work)
        self._native_works.append((work, self._mark))
        if last:
            self._arrive_native()
        return work

    def _arrive_native(self) -> None:
        """Waits for all buckets of this pass."""
        works, self._native_works = self._native_works, []
        for work, mark in works:
            work.wait()
            if mark is not None:
                self._device.clock.arrived(mark)
        self._core.landed(len(works))
        if self._mark is not None:
            self._device.clock.done(self._mark, True)

    def _landed(self, then: Callable[[], torch.Tensor] | torch.Tensor) -> torch.Tensor:
        """A collective has ended: its result, see :attr:`_pending`."""
        if callable(then):
            return then()
        self._core.landed()
        return then

    def _arrive(self) -> None:
        """Waits for all buckets of this pass, in order, and hands their results to DDP.

        Here rather than in callbacks of the collectives: those run on the backend's threads, which cannot take the
        interpreter lock any more when the script ends (the process aborts then), and lose the type of an exception.
        Collectives of earlier buckets still run while backward computes later ones.
        """
        pending, self._pending = self._pending, []
        futures, self._futures = self._futures, []
        marks, self._marks = self._marks, []
        remembered, self._remembered = self._remembered, []
        failed: Exception | None = None
        results: list[Any] = []
        values: list[torch.Tensor] = []
        for at, (work, then) in enumerate(pending):
            mark = marks[at]
            try:
                if work is not None:
                    work.wait()
                if mark is not None:
                    self._device.clock.arrived(mark)
                results.append(self._landed(then))
                if mark is not None:
                    self._device.clock.done(mark, mark is marks[-1])
            except Exception as error:
                results.append(error)
        self._device.waits()
        for at, result in enumerate(results):
            future = futures[at]
            try:
                if isinstance(result, Exception):
                    raise result
                value = self._judged(*result()) if callable(result) else result
                values.append(value)
                if future is not None:
                    future.set_result(value)
            except Exception as error:
                # The other buckets end too: their residuals must be restored, and none is left under way.
                failed = failed or error
        refused, self._refused = self._refused, False
        if refused:
            # Also where this rank alone has failed: the others ask why, and would wait for it.
            self._ask_why(values, failed is None)
        if failed is not None:
            raise failed
        if self._unused is not None and remembered and not refused and in_backward():
            exchanged: list[Exchanged] = [(view.parameters, values[at]) for at, view in remembered]
            _after_ddp(functools.partial(self._unused.give, exchanged))

    def _ask_why(self, gradients: list[torch.Tensor], raises: bool) -> None:
        """What comes of a pass that was refused, after all its buckets have arrived: the same on all ranks, which all refused it.
        Without `raises` no error for gradients that are not finite, since another one comes."""
        # A trial's candidate may diverge: that is reported, and everything is put back.
        undone = self._not_finite()
        code, why = self._core.fault()
        flags = (0 if undone else _STAYS) | (0 if in_backward() else _IDLE)
        faults = self._control.gather((bytes([code, flags]) + why.encode())[:_FAULT_BYTES].ljust(_FAULT_BYTES, b"\0"))
        for rank, fault in enumerate(faults):
            if fault[0] == _FAILED:
                reason = fault[2:].rstrip(b"\0").decode(errors="ignore")
                raise FlexcommError(f"failed to exchange gradients: rank {rank} could not do its part: {reason}")
        if self._propagate or not any(fault[1] & _STAYS for fault in faults):
            return
        idle = sum(bool(fault[1] & _IDLE) for fault in faults)
        if not idle:
            if raises:
                ranks = [str(rank) for rank, fault in enumerate(faults) if fault[0] == _NOT_FINITE_HERE]
                whose = f"the gradient of rank {', '.join(ranks)}" if ranks else "the sum of the ranks' gradients"
                _raise_after_ddp(NotFiniteError(_BROKEN if self._is_broken() else _NOT_FINITE % whose))
            return
        logger.warning(_LEFT_OUT, idle)
        for gradient in gradients:
            gradient.zero_()

    def _is_broken(self) -> bool:
        """Whether no gradient can be finite any more, on any rank: they hold the same parameters."""
        parameters = (p.detach() for view in self._views.values() for p in view.parameters)
        return not all(bool(p.isfinite().all()) for p in parameters)

    def _explain(self, buffer: torch.Tensor) -> None:
        strategy = self._core.tick()[1]
        if not strategy.startswith("none/") and self._half is None:
            self._core.warn_once(
                f"{strategy} needs float32 gradients on the CPU; buckets of {buffer.dtype} on {buffer.device.type} "
                "are exchanged as they are, on all ranks"
            )

    def _know(self, index: int, bucket: GradBucket) -> None:
        ids = [id(p) for p in bucket.parameters()]
        if self._layouts.get(index) == ids:
            return
        try:
            numbers = [self._ids[i] for i in ids]
        except KeyError:
            raise FlexcommError(
                "failed to exchange a bucket: it has parameters that the model did not have when flexcomm was "
                "attached; attach after the model is complete"
            ) from None
        # Later buckets are laid out anew in the core too.
        self._layouts = {i: known for i, known in self._layouts.items() if i < index}
        self._layouts[index] = ids
        self._core.layout(index, numbers)

    def _buffer(self, index: int, what: str, size: int, dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
        """A buffer that is kept from step to step."""
        known = self._buffers.get((index, what))
        if known is None or known.numel() != size or known.dtype != dtype or known.device.type != str(device):
            known = torch.empty(size, dtype=dtype, device=device)
            self._buffers[index, what] = known
        return known

    def _sum(self, payload: torch.Tensor, then: Callable[[], torch.Tensor] | torch.Tensor) -> None:
        self._core.launched(payload.numel() * payload.element_size(), False)
        self._pending.append((self._all_reduce(payload), then))

    def _all_reduce(self, payload: torch.Tensor) -> _device.Launched:
        there = self._there(payload)
        self._device.clock.launch(self._mark)
        work = self._reduce(there)
        return work if there is payload else _device.Carried(work, payload, there)

    def _reduce(self, tensor: torch.Tensor) -> dist.Work:
        """Launches its allreduce, in the shape that the ranks agreed on."""
        if self._tuner is None:
            return _device.under(dist.all_reduce(tensor, group=self._group, async_op=True))
        agreed, strategy, step = self._core.tick()
        with self._tuner.around(strategy if agreed else None, step):
            return _device.under(dist.all_reduce(tensor, group=self._group, async_op=True))

    def _all_gather(self, arrived: torch.Tensor, sent: torch.Tensor) -> _device.Launched:
        there = self._there(arrived)
        self._device.clock.launch(self._mark)
        work = _device.under(dist.all_gather_into_tensor(there, self._there(sent), group=self._group, async_op=True))
        return work if there is arrived else _device.Carried(work, arrived, there)

    def _broadcast(self, tensor: torch.Tensor, root: int) -> _device.Launched:
        there = self._there(tensor)
        source = _global_rank(self._group, root)
        work = _device.under(dist.broadcast(there, src=source, group=self._group, async_op=True))
        return work if there is tensor else _device.Carried(work, tensor, there)

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        """What can travel: a copy where the bucket's backend takes no tensors of the host."""
        return tensor if self._via is None or tensor.device.type != "cpu" else tensor.to(self._via, copy=True)

    def _dense(self, index: int, buffer: torch.Tensor) -> None:
        half = self._half
        if half is None:
            # In place, without any copy. Multiplied first, as DDP does it: the same bits, and half the time of dividing.
            buffer.mul_(self._share)
            self._sum(buffer, buffer)
            return
        began = time.perf_counter()
        payload = self._buffer(index, "dense", buffer.numel(), half, buffer.device.type)
        payload.copy_(buffer).div_(self._world)
        self._core.worked(time.perf_counter() - began, True)

        def arrived() -> torch.Tensor:
            self._core.landed()
            began = time.perf_counter()
            buffer.copy_(payload)
            self._core.worked(time.perf_counter() - began, False)
            return buffer

        self._sum(payload, arrived)

    def _exchange(self, index: int, buffer: torch.Tensor, there: _device.Exchange | None = None) -> None:
        """A compressed bucket: one collective per round, of which only the last runs beside backward. With `there` the bucket
        lies on a device and has been compressed there."""
        n = buffer.numel()
        if there is None:
            current = self._core.begin_exchange(index, _span(buffer), self._rates(self._layouts[index]))
        else:
            current = there.first
        if not current.last:
            # Several collectives in turn, each waited for: the host's clock is right.
            self._device.clock.forget(self._mark)
            self._mark = None
        work, arrived = self._round(index, n, current, 0)
        for number in itertools.count(1):
            if current.last:
                break
            if work is not None:
                work.wait()
            if there is None:
                current = self._core.next_round(index, n, _bytes(arrived))
            else:
                current = there.next(_bytes(arrived))
            work, arrived = self._round(index, n, current, number)

        def finished() -> torch.Tensor:
            if there is None:
                self._judge(self._core.finish_exchange(index, _bytes(arrived), _span(buffer)))
            else:
                self._judge(there.finish(_bytes(arrived)))
            return buffer

        self._pending.append((work, finished))

    def _round(
        self, index: int, n: int, current: Round, number: int
    ) -> tuple[_device.Launched | None, torch.Tensor]:
        """Launches a round of a bucket of n values: the collective, and where what it brings will be."""
        if current.how == How.Refused:
            return None, torch.empty(0, dtype=torch.uint8)
        dtype = SUMS.get(current.how, torch.uint8)
        sent = self._sized(index, f"round {number}", current.elements, dtype)
        self._core.write_round(index, n, _bytes(sent))
        if current.how == How.Broadcast:
            return self._broadcast(sent, current.root), sent
        if current.how in SUMS:
            return self._all_reduce(sent), sent
        if current.elements == 0:
            return None, sent
        arrived = self._sized(index, f"round {number} of all", current.elements * self._world, dtype)
        return self._all_gather(arrived, sent), arrived

    def _sized(self, index: int, what: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        """As :meth:`_buffer`, for sizes that change from step to step: room is only ever added."""
        known = self._buffers.get((index, what))
        room = 0 if known is None or known.dtype != dtype else known.numel()
        if room < size:
            # An eighth more, so that slowly growing messages do not ask every step.
            room = size + size // 8
        return self._buffer(index, what, room, dtype)[:size]

    def _judged(self, finite: bool, buffer: torch.Tensor) -> torch.Tensor:
        self._judge(finite)
        return buffer

    def _judge(self, good: bool) -> None:
        self._refused |= not good


@functools.lru_cache(maxsize=1024)
def _global_rank(group: dist.ProcessGroup | None, rank: int) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
