"""The communication hook: which collectives run for a bucket, in which order, the same on every rank."""

import weakref
from typing import Any, Callable

import torch
import torch.distributed as dist

from flexcomm._core import Core, FlexcommError, NotOnDeviceError, Transfer
from flexcomm.torch._bucket import BucketView, Future, GradBucket
from flexcomm.torch._clock import Mark
from flexcomm.torch._collectives import Collectives
from flexcomm.torch._control import Control
from flexcomm.torch._device import Device
from flexcomm.torch._exchange import Buffers, Exchange, Half, Pipeline, Rounds
from flexcomm.torch._failures import Failures
from flexcomm.torch._pass import NativePass, Pass
from flexcomm.torch._tuner import Tuner
from flexcomm.torch._unused import Unused

#: In which type dense buckets travel that do not in their own.
HALVES = {Transfer.Float16: torch.float16, Transfer.Bfloat16: torch.bfloat16}


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
        self.core = core
        self._tuner = tuner
        self._group = group
        # Not kept alive by this: DDP holds it.
        self._reducing = weakref.ref(dist.group.WORLD if group is None else group)
        self._options = dist.AllreduceOptions()
        self._share = 1.0 / dist.get_world_size(group)
        self._ids = ids
        self._began = began
        self._rates = rates
        self._fresh = fresh
        self._views: dict[int, BucketView] = {}
        self._layouts: dict[int, list[int]] = {}
        self.device = Device(core, group)
        self._collectives = Collectives(core, group, self.device, tuner)
        self._buffers = Buffers()
        failures = Failures(core, control, propagate=propagate, not_finite=not_finite)
        self._pass = Pass(self.device, failures, unused)
        self.native = NativePass(core, self.device, began)

    def __reduce__(self) -> Any:
        # With the model that it is registered on. A copy's reducer is made anew, without hooks.
        return detached_hook, ()

    def __call__(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What DDP calls for every bucket of a synchronised backward pass."""
        index, buffer = bucket.index(), bucket.buffer()
        if index == 0:
            # Of a pass that ended in an exception.
            self._pass.exchanges.clear()
            self._began()
        view = self._views.get(index)
        if view is None or view.buffer is not buffer:
            view = self._new_view(index, bucket, buffer)
        if not view.direct:
            return self._other(view, self._enter(view))
        transfer = self.core.enter(index, view.values, buffer.data_ptr())
        if transfer is not None or self._tuner is not None:
            return self._other(view, transfer)
        # What most steps are: dense, on the host. Every call counts here.
        exchange = view.in_place
        buffer.mul_(self._share)
        self.core.launched(view.bytes)
        exchange.work = self._sum_in_place(buffer)
        self._pass.exchanges.append(exchange)
        if view.last:
            exchange.future = None
            self._pass.end()
            return view.done
        future: torch.futures.Future[torch.Tensor] = Future([])
        exchange.future = future
        return future

    def _sum_in_place(self, buffer: torch.Tensor) -> dist.Work:
        """As `dist.all_reduce`, without what it looks at first, which is known of these buffers."""
        group = self._reducing()
        if group is None:
            return dist.all_reduce(buffer, group=self._group, async_op=True)
        return group.allreduce([buffer], self._options)

    def _other(self, view: BucketView, transfer: Transfer | None) -> torch.futures.Future[torch.Tensor]:
        """A bucket that may be other than dense and in place."""
        if view.on_device:
            self.device.watch(view.index, view.buffer)
        exchange = self._begin(view, transfer)
        exchange.future = future = view.future()
        self._pass.exchanges.append(exchange)
        if view.last:
            self._pass.end()
            if view.on_device:
                self.device.watched(view.buffer)
        return future

    def _enter(self, view: BucketView) -> Transfer | None:
        looks = view.on_device and self.core.watching()
        seen = self.device.host(view.buffer, view.index) if looks else view.buffer
        here = seen.data_ptr() if view.ours or looks else None
        takes = here is None and view.on_device and self.core.reports_energies()
        energy = float(torch.linalg.vector_norm(view.buffer, dtype=torch.float32)) ** 2 if takes else None
        return self.core.enter(view.index, view.values, here, view.on_device, energy)

    def _begin(self, view: BucketView, transfer: Transfer | None) -> Exchange:
        """Chooses the kind of a bucket's exchange, and launches its first collective."""
        mark = self.device.enter(view.buffer, transfer is not None)
        if transfer == Transfer.Rounds and view.on_device:
            return self._begin_on_device(view, mark)
        if transfer == Transfer.Rounds:
            return self._begin_on_host(view, mark)
        if transfer is not None:
            payload = self._buffers.exactly(view.index, "dense", view.values, HALVES[transfer], view.buffer.device)
            return Half(self._collectives, view, payload, mark)
        if not view.ours and not view.on_device:
            self._explain(view)
        return view.in_place.launch(self._collectives, mark)

    def _begin_on_host(self, view: BucketView, mark: Mark | None, copy: torch.Tensor | None = None) -> Exchange:
        here = view.buffer if copy is None else copy
        pipeline = Pipeline(self.core, view.index, view.buffer, self._rates(view.ids), source=here, mean=here)
        return Rounds(self._collectives, self._buffers, view, pipeline, mark)

    def _begin_on_device(self, view: BucketView, mark: Mark | None) -> Exchange:
        """By kernels there, else in a copy on the host."""
        try:
            there = self.device.begin(view.index, view.buffer, self._rates(view.ids))
            if there.first.outcome is not None:
                return self.device.gather(view, there, there.first.outcome, mark)
            return Rounds(self._collectives, self._buffers, view, there, mark)
        except NotOnDeviceError as why:
            strategy, device = self.core.tick(view.index).strategy, view.buffer.device.type
            self.device.warn_once(f"{strategy}: buckets on {device} are compressed on the host: {why}")
        return self._begin_on_host(view, mark, self.device.host(view.buffer, view.index))

    def _explain(self, view: BucketView) -> None:
        tick, buffer = self.core.tick(view.index), view.buffer
        if not tick.dense:
            self.core.warn_once(
                f"{tick.strategy} needs float32 gradients on the CPU; buckets of {buffer.dtype} on {buffer.device.type} "
                "are exchanged as they are, on all ranks"
            )

    def _new_view(self, index: int, bucket: GradBucket, buffer: torch.Tensor) -> BucketView:
        """A tensor that was not shown before: another bucket, or DDP has rebuilt its buckets."""
        if buffer.layout != torch.strided:
            # The same on all ranks: they hold the same model.
            raise FlexcommError(
                "failed to exchange a sparse gradient: flexcomm needs dense ones; "
                "make the model's Embedding layers with sparse=False"
            )
        view = BucketView(self.core, self.device, bucket, buffer)
        self._lay_out(index, view.ids)
        if not self._fresh:
            self._views = {i: known for i, known in self._views.items() if i < index}
            self._views[index] = view
        return view

    def _lay_out(self, index: int, ids: list[int]) -> None:
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
        self.core.layout(index, numbers)
