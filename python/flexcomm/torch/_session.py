"""``attach``: from a DDP model to a session that follows decisions."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import gc
import logging
import secrets
import time
import weakref
from typing import Any, Callable, Generator, Generic, Iterable, Iterator, Mapping, Sequence, Sized, TypeVar, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flexcomm import _core, _repeats
from flexcomm._core import Core, FlexcommError
from flexcomm.torch import _arguments, _checks, _state, _trials, _tuner, _wrapper
from flexcomm.torch._control import Control
from flexcomm.torch._ddp import in_backward
from flexcomm.torch._device import Cuda, no_memory
from flexcomm.torch._hook import Hook
from flexcomm.torch._rates import Rates
from flexcomm.torch._storage import SnapshotStorage
from flexcomm.torch._unused import Unused

logger = logging.getLogger("flexcomm")

#: What torch.distributed runs here. Gloo's allreduce is a ring and its broadcast a tree, without a choice; NCCL
#: chooses by itself. Tree strategies would not be what their name says, so they are not offered.
_COLLECTIVES = ["dense-ring", "allgather", "art-ring"]

#: Offered too where NCCL moves the gradients and every rank has flexcomm's tuner plugin, which tells it ring or tree for each
#: allreduce (`_tuner.py`). "art-tree" is not: nothing is known of it under NCCL.
_TREE = "dense-tree"

#: Sessions with an agent, by job and socket.
_CONNECTED: weakref.WeakValueDictionary[tuple[str, str], Session] = weakref.WeakValueDictionary()

#: Sessions that are not closed, by model.
_ATTACHED: weakref.WeakKeyDictionary[DistributedDataParallel, weakref.ref[Session]] = weakref.WeakKeyDictionary()

_Batch = TypeVar("_Batch")

SWITCHED, TRIAL_STARTS, CANDIDATE, TRIAL_ENDS, TRIAL_LEFT = 1, 2, 3, 4, 5


def attach(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    extra: Sequence[Any] = (),
    generators: Sequence[torch.Generator] = (),
    strategy: str | Mapping[str, str] | None = None,
    initial: str | Mapping[str, str] = "dense",
    selection: str = "decision",
    group: dist.ProcessGroup | None = None,
    job: str | None = None,
    socket: str | None = None,
    on_nonfinite: str = "auto",
    shadow_share: float = 0.25,
    seed: int = 0,
    register: bool = True,
) -> "Session":
    """Registers flexcomm's communication hook on ``model`` and connects to this node's agent.

    Call it on every rank with the same settings, after the model is wrapped and before the first backward pass; it
    compares model and settings over the ranks and raises the same error on all of them when they differ.

    Parameters
    ----------
    model:
        The wrapped model.
    optimizer, scheduler, scaler, extra, generators:
        What a live trial must put back besides the model: ``extra`` are objects with ``state_dict`` and
        ``load_state_dict`` (an average of weights, a second optimizer), ``generators`` private random generators. Data
        loaders do not belong there, stateful ones neither: batches that a trial has seen are kept for training, and a
        loader that was put back would give some twice or not at all. The optimizer also tells flexcomm when a step ends.
    strategy:
        Holds one strategy for the whole run instead of following decisions: ``"dense"``; any compressor of
        :func:`compressors` with its parameters, memory and momentum, for example ``"fp16"``, ``"qsgd(s=16)"`` or
        ``"topk(k=0.01)+ef(vanilla)+nesterov(mu=0.9)"``, and where you like its collective behind it, for example
        ``"topk(k=0.01)+ef(vanilla)/art-ring:star"``; or BytePS's map of strings. Error feedback is only where ``ef(...)``
        says so; ``"topk@0.01/allgather"`` is short for ``"topk(k=0.01)+ef(vanilla)/allgather"``.
    initial:
        What runs before the first decision, written as ``strategy``.
    selection:
        Who leads AR-Topk: ``"decision"``, ``"star"`` (turns), ``"var"`` (most energy) or ``"auto"`` (by measured
        skew and staleness).
    group:
        The process group of the model, if it is not the default one.
    job:
        The job's name; otherwise ``FLEXCOMM_JOB``, or the id that torchrun, Slurm or Kubernetes gave the job of rank 0, or
        ``"default"``. Models of one process at one agent need a name each.
    socket:
        The agent's Unix socket; otherwise ``FLEXCOMM_SOCKET``. Without either the run is not steered.
    on_nonfinite:
        What a NaN or infinite gradient does when compressing: ``"raise"`` :class:`NotFiniteError` on all ranks, after
        which training may go on; ``"propagate"`` NaN to all ranks as dense DDP does, ``"auto"``: propagate when ``scaler``
        is given. That bucket's residual stays as it was. Where a rank has run out of batches under
        ``model.join()``, ``"raise"`` warns on all ranks instead, and the gradients of that pass are zeros.
    shadow_share:
        Share of the coordinates that shadow trials look at, in (0, 1].
    seed:
        Of MSTopk and of shadow trials.
    register:
        False: the caller registers ``session.hook`` itself. See also :class:`flexcomm.torch.CommHook`.
    """
    _repeats.begin()
    if not isinstance(model, DistributedDataParallel):
        _checks.refuse_model(model, group)

    def settings() -> _arguments.Settings:
        return _arguments.read(
            strategy=strategy, initial=initial, selection=selection, job=job, socket=socket, on_nonfinite=on_nonfinite,
            scaler=scaler, shadow_share=shadow_share, seed=seed, register=register,
        )

    def parts() -> _trials.Parts:
        _arguments.check_optimizer(optimizer, model)
        objects = _arguments.several("extra", extra, "objects with state_dict and load_state_dict")
        return _trials.Parts(
            weakref.ref(model), optimizer, scheduler, scaler, objects, _arguments.generators(generators)
        )

    return Session(model, settings, parts, group=group, register=register)


def _check_alone(job: str, socket: str | None) -> None:
    """An agent tells its trainers apart by job and rank."""
    if socket is None or (job, socket) not in _CONNECTED:
        return
    # One whose model is gone may wait for the collector.
    gc.collect()
    if (job, socket) in _CONNECTED:
        raise FlexcommError(
            f"this process has a model in job {job!r} at the agent {socket} already, and decisions and trials of one would "
            "be taken for the other's. Give each model a job of its own, attach(job=...), the same on all ranks; or "
            "close() the other model's session first"
        )


def _check_unattached(model: DistributedDataParallel) -> None:
    """Two sessions would both count the steps, and each register the hook for itself. One that has its hook on the model is
    seen by that."""
    if model not in _ATTACHED:
        return
    # One that nobody has any more may wait for the collector.
    gc.collect()
    session = _ATTACHED[model]() if model in _ATTACHED else None
    if session is not None and (session._native or session._wrapped):
        raise FlexcommError(
            "the model has a session already, which counts its steps; go on with what the first attach returned, or close() "
            "that session first"
        )


def compressors() -> dict[str, str]:
    """Every compressor that ``attach`` takes as ``strategy``: by name, what it does and which parameters it has."""
    out = {}
    for name, about, parameters, _ in _core.compressors():
        lines = [f"{key}: {what} ({allowed})" for key, allowed, what in parameters]
        out[name] = "\n    ".join([about, *lines])
    return out


@dataclasses.dataclass(frozen=True)
class Costs:
    """One step on one rank."""

    #: Seconds of forward, backward and update.
    compute: float
    #: Seconds of compressing and decompressing.
    compress: float
    #: Seconds in which at least one of this rank's collectives was under way.
    sync: float
    #: Seconds of the whole step.
    step: float
    #: Bytes that this rank sent, by the ring's count.
    sent: int
    #: Share of the gradient's energy that was sent, above 0 to 1; 1 when dense.
    gain: float


def _nccl_moves(group: dist.ProcessGroup | None, named: list[tuple[str, torch.nn.Parameter]]) -> bool:
    """Whether the gradients' allreduces are NCCL's. The same on all ranks: their models are."""
    return "nccl" in dist.get_backend_config(group) and all(p.device.type == "cuda" for _, p in named)


def _find_tuner(
    group: dist.ProcessGroup | None, named: list[tuple[str, torch.nn.Parameter]]
) -> "_tuner.Tuner | None":
    """NCCL's tuner plugin, where every rank has it and NCCL listens to it."""
    if not named or not _nccl_moves(group, named):
        return None
    one = torch.ones(1, device=named[0][1].device)

    def gather(mine: bool) -> list[bool]:
        answers: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(answers, mine, group=group)
        return answers

    return _tuner.agree(lambda: dist.all_reduce(one, group=group), gather)


class Batches(Generic[_Batch]):
    """What :meth:`Session.batches` returns. Open from its first batch until it is at its end, closed or forgotten."""

    def __init__(self, batches: Generator[_Batch, None, None], loader: Iterable[_Batch]) -> None:
        self._batches = batches
        self._loader = loader

    def __iter__(self) -> Iterator[_Batch]:
        return self

    def __next__(self) -> _Batch:
        return next(self._batches)

    def __len__(self) -> int:
        """The loader's; a ``TypeError`` where it has none."""
        return len(cast(Sized, self._loader))

    def close(self) -> None:
        """Ends the loop before its end; a trial that is open ends with it."""
        self._batches.close()


class Session:
    """What ``attach`` returns: one rank's side of one model's training."""

    def __init__(
        self,
        model: DistributedDataParallel,
        read: Callable[[], _arguments.Settings],
        make_parts: Callable[[], _trials.Parts],
        *,
        group: dist.ProcessGroup | None,
        register: bool,
    ) -> None:
        models = _arguments.group_of(model)
        self._world, self._rank = dist.get_world_size(models), dist.get_rank(models)
        self._named = [(n, p) for n, p in model.module.named_parameters() if p.requires_grad]

        def settings() -> _arguments.Settings:
            _arguments.check_group(group, models)
            _check_unattached(model)
            _checks.check_layers(model)
            _checks.check_values(self._named)
            return read()

        given = _checks.everywhere(settings, models)
        given = dataclasses.replace(given, job=_checks.job_name(given.job, models))

        def own() -> tuple[Core, _trials.Parts]:
            """What settings may be refused for."""
            named = given.named
            core = Core(
                given.job, self._rank, self._world, [(p.numel(), _columns(p)) for _, p in self._named],
                strategy=named.strategy, first_step=0, selection=given.selection, seed=given.seed,
                shadow_share=given.shadow_share, spec=named.spec,
            )
            _check_alone(given.job, given.socket)
            return core, make_parts()

        self._core, parts = _checks.everywhere(own, models)
        group = self._group = models if group is None else group
        named, socket = given.named, given.socket
        self._parts = parts
        fits = _wrapper.fits(model)
        same = {
            "the flexcomm version": f"{_core.VERSION} (protocol {_core.PROTOCOL})",
            "the model": _checks.fingerprint(self._named),
            "the strategy": f"{named.strategy}{', compressed' if named.spec else ''}, {'held' if given.fixed else 'followed'}",
            "the selection": given.selection,
            "on_nonfinite": given.propagate,
            "the seed": given.seed,
            "a communication hook on the model": bool(model._comm_hooks),
            "whether DDP's process group can be wrapped": fits,
        }
        # Any rank might make the id of the run; rank 0's counts.
        everyone = _checks.compare({"same": same, "socket": socket is not None, "run": secrets.token_hex(8)}, group)
        self._core.set_run(everyone[0]["run"])
        steered = everyone[0]["socket"]
        self._core.steer(steered)
        self._control = _checks.everywhere(lambda: Control(self._core, group, everyone[0]["run"]), group)
        self._core.behave(not given.fixed, False)
        self._fixed = named.strategy if given.fixed else None
        tuner = _find_tuner(group, self._named)
        self._loss: float | None = None
        self._looping = False
        self._trial: _trials.Trial | None = None
        self._closed = False
        #: Whether the warnings about states that are saved, or loaded, in a trial were logged.
        self._warned_of_saving = self._warned_of_loading = False
        #: Memory for its copies of what lies on GPUs, and whether there was none for the plan of the step under way.
        self._storage = SnapshotStorage(Cuda())
        self._lacks_room = False
        #: Whether the log names what trials do not put back.
        self._warned_of_trials = False
        self._rates = Rates(parts.optimizer)
        self._in_step = False
        #: Whether a gradient of the step under way was not finite, and whether the warning was logged that a pass had no optimizer's step.
        self._refused = self._warned_of_unused = False
        #: Whether the step under way is one in which this rank gives zeros.
        self._idle = False
        hook = Hook(
            self._core, group, {id(p): i for i, (_, p) in enumerate(self._named)},
            control=self._control, propagate=given.propagate, began=self._begin,
            not_finite=self._not_finite, rates=self._rates.of, tuner=tuner, fresh=getattr(model, "lazy_bucket_allocation", False),
            unused=Unused(model) if model.find_unused_parameters else None,
        )
        # The model owns the hook, the hook owns the session, the session owns neither: a cycle through DDP's C++ side
        # would keep the process group's threads alive into the interpreter's end, which aborts there.
        self._hook: Callable[[], Hook | None] = lambda: hook
        # Dense without an agent is native DDP, with the very collectives that the hook would run, and without the hook's
        # pass over the gradient. So each rank may register the hook whenever it needs it.
        alone = register and named.dense and parts.optimizer is not None
        self._native = alone and not steered and socket is None
        # With an agent DDP is native too, in a process-group wrapper, until something else is decided.
        self._wrapped = alone and not self._native and tuner is None and fits
        registers = register and not self._native and not self._wrapped

        def ready() -> bool:
            """All that may fail without having changed the model: where it does on any rank, the model is as before on all."""
            if registers:
                _checks.check_hook(model)
            self._connect(given, steered, _COLLECTIVES + ([_TREE] if tuner is not None else []))
            return True

        try:
            _checks.everywhere(ready, group)
            if self._wrapped:
                _wrapper.place(model, hook, self._end_between)
                self._hook = weakref.ref(hook)
            elif registers:
                self._register_hook()
        except BaseException:
            # The agent forgets this trainer, and the job's name is free.
            self._core.close()
            raise
        self._known(given, steered)

    def _connect(self, given: _arguments.Settings, steered: bool, collectives: list[str]) -> None:
        if given.socket is not None:
            self._core.connect(given.socket, f"torch-{dist.get_backend(self._group)}", collectives)

    def _known(self, given: _arguments.Settings, steered: bool) -> None:
        """Tells who must know of an attached session."""
        model = self._parts.model()
        if model is not None:
            _ATTACHED[model] = weakref.ref(self)
        if given.socket is not None:
            _CONNECTED[given.job, given.socket] = self
            atexit.register(_close, weakref.ref(self))
        elif self._rank == 0:
            what = f"holding {self._fixed}" if self._fixed else "training dense"
            if not self._fixed and not given.named.dense:
                what = f"staying with {given.named.strategy}"
            logger.warning(
                "no agent: neither the argument socket nor FLEXCOMM_SOCKET names one; %s, nothing is steered", what
            )
        elif steered:
            logger.info("no agent on this rank: it follows rank 0, and reports nothing")
        spec = given.named.spec
        if self._rank == 0 and spec is not None and _core.drops(spec):
            logger.warning(
                "%s loses what a step does not send, which costs accuracy: add error feedback, as in %r",
                spec, f"{spec}+ef(vanilla)",
            )
        if "gloo" in dist.get_backend(self._group):
            _let_go_at_exit()
        if self._parts.optimizer is not None:
            _on_step(self._parts.optimizer, self)

    def _register_hook(self) -> None:
        """Registers the hook, between two steps."""
        model, hook = self._parts.model(), self.hook
        if model is None:
            raise FlexcommError("failed to register the hook: the model is gone")
        _checks.check_hook(model)
        model.register_comm_hook(None, hook)
        _wrapper.remove(model)
        self._native = self._wrapped = False
        self._hook = weakref.ref(hook)

    def _check_registrable(self) -> None:
        """Refuses what needs the hook where it cannot be registered, before anything is changed."""
        model = self._parts.model()
        if model is not None and (self._native or self._wrapped):
            _checks.check_hook(model)

    @property
    def hook(self) -> Hook:
        """The communication hook, to register it oneself."""
        hook = self._hook()
        if hook is None:
            raise FlexcommError("failed to find the hook: the model that it was registered on is gone")
        return hook

    def __repr__(self) -> str:
        agent = "closed" if self._closed else f"agent {'connected' if self.connected else 'not connected'}"
        trial = ", in a live trial" if self.in_trial else ""
        return f"<flexcomm session of rank {self._rank} of {self._world}: step {self.step}, {self.strategy}{trial}, {agent}>"

    # Steps

    def _begin(self) -> None:
        """On the first bucket of a synchronised backward pass."""
        if self._in_step and self._looping:
            # On all ranks: they run the same loop, and so does what follows for a trial, which replays whole batches.
            raise FlexcommError(
                "failed to begin a step: this is the second synchronised backward pass in one batch of batches(), whose "
                "trials could not tell which pass to replay from. Put no_sync() around the forward and backward of all "
                "but the batch's last pass, add the losses up before one backward(), or iterate over the loader itself. After "
                "a break out of the loop the iterator of batches() is open as long as anything refers to it: close() it, or "
                "del the name, before training outside of the loop"
            )
        if self._in_step:
            # The step before was not ended: no optimizer was given, or it was skipped.
            self._look_at_unused()
            self._end_step(within_loop=False)
        self._control.begin()
        self._in_step = True
        self._rates.begin()
        # No backward pass: of a rank that has run out of batches, under `join()`.
        self._idle = not in_backward()

    def _look_at_unused(self) -> None:
        """Warns once that the pass before had no optimizer's step, where that is neither known nor reported to the script otherwise."""
        expected = self._parts.optimizer is None or self._parts.scaler is not None or self._refused
        if expected or self._idle or self._warned_of_unused or self._rank != 0 or "+ef(" not in self._core.state()[2]:
            return
        self._warned_of_unused = True
        logger.warning(
            "a synchronised backward pass was not followed by a step of the optimizer that attach was given. The residual "
            "of its gradients goes out with the next ones, also where the script throws them away: put no_sync() around "
            "forward and backward of passes whose gradients of this model are not used (a GAN's discriminator while the "
            "generator learns), and of all but the last of those that add up"
        )

    def _stepped(self) -> None:
        """After the optimizer's step."""
        if self._native and not self._in_step:
            # No hook saw its first bucket.
            self._begin()
        if not self._looping:
            self._end_step(within_loop=False)

    def _end_step(self, within_loop: bool) -> int:
        if not self._in_step:
            return 0
        self._in_step = self._refused = False
        loss, self._loss = self._loss, None
        answers = self._control.end()
        hook = self._hook()
        change = self._core.finish(loss, None if hook is None else hook.clock.end(), answers)
        if hook is not None:
            hook.clock.poll()
        if self._wrapped and self._core.wants_hook() and not in_backward():
            self._register_hook()
        self._make_room(change)
        for level, text in _core.take_log():
            logger.log(level, "%s", text)
        if change in (TRIAL_STARTS, CANDIDATE, TRIAL_ENDS, TRIAL_LEFT) and not within_loop:
            # Only reached when the loop was left in the middle of a trial, or in the very step before one.
            self._leave_trial(change)
        return change

    def _make_room(self, change: int) -> None:
        """Between the step that announced a trial and the one in which the ranks answer whether they can run it: takes memory for a
        snapshot of what lies on GPUs. Where a rank has none, no rank goes into the trial."""
        if change != TRIAL_STARTS:
            self._storage.release()
        if self._lacks_room:
            self._lacks_room = False
            self._core.behave(self._fixed is None, self._looping)
        model = self._parts.model()
        if not self._looping or self._trial is not None or model is None or not self._core.trial_asked():
            return
        if not any(map(self._storage.has_gpu, model.parameters())):
            return
        try:
            why = self._storage.reserve(_trials.Snapshot(self._parts, None, self._storage, look=True).on_gpus)
        except RuntimeError as error:
            if not no_memory(error):
                raise
            # Of what is in `extra`, which makes its own copies.
            why = f"there is no memory for copies of state dictionaries: {str(error).splitlines()[0]}; take a smaller batch"
        if why:
            self._lacks_room = True
            self._core.lacks_room(why)

    def _end_between(self) -> None:
        # The loop over `batches()` ends its steps itself: it must see that a trial starts.
        if not self._looping:
            self._end_step(within_loop=False)

    def _leave_trial(self, change: int) -> None:
        if change == TRIAL_STARTS:
            self._trial = _trials.Trial(self._parts, self._core, self._storage)
        elif change == TRIAL_LEFT:
            # A loop that cannot replay batches: this step ran a candidate, but it trained, on all ranks.
            self._trial = None
        elif self._trial is not None:
            self._trial.restore()
            if change == TRIAL_ENDS:
                self._trial = None

    def _not_finite(self) -> bool:
        """Answers whether what a gradient with NaN does will be undone."""
        self._core.diverged()
        self._refused = True
        return self.in_trial

    def report_loss(self, loss: float | torch.Tensor) -> None:
        """Passes this step's loss, a number or a tensor of one value, on to the agent; call it before the step ends."""
        self._loss = _arguments.loss(loss)
        if self._loss != self._loss or self._loss in (float("inf"), float("-inf")):
            self._core.diverged()

    # Trials

    @property
    def in_trial(self) -> bool:
        """Whether the step under way is a trial's and will be undone: keep it out of averages and logs."""
        return self._trial is not None and self._looping

    def batches(
        self, loader: Iterable[_Batch], train_step: Callable[[_Batch], Any] | None = None
    ) -> Batches[_Batch]:
        """Iterates over ``loader`` and runs live trials between its batches.

        A trial replays the batches that come next, then puts everything back, and training goes through the same
        batches as if nothing had happened. Use it on every rank. The body of the loop runs during trials too
        (``in_trial`` tells); with ``train_step``, which does forward, backward and optimizer step for a batch, trials
        run it unseen by the loop's body. The body must call it as well. Trials get copies of the batches.

        ``len()`` of it is the loader's: batches that train. Those of trials come on top, where there is no ``train_step``.
        """
        return Batches(self._batches(loader, train_step), loader)

    def _batches(self, loader: Iterable[_Batch], train_step: Callable[[_Batch], Any] | None) -> Generator[_Batch, None, None]:
        # Of a pass before the loop: its batches begin with steps of their own.
        self._end_step(within_loop=False)
        self._core.behave(self._fixed is None, True)
        self._looping = True
        # A plan may come with the loop's first step.
        self._make_room(0)
        try:
            yield from _trials.replay(self, self._parts, self._core, loader, train_step)
        finally:
            self._end_step(within_loop=False)
            self._looping = False
            self._storage.release()
            # What comes next may be another loop: no trial begins in it, and one that is open ends, on all ranks alike.
            self._core.behave(self._fixed is None, False)

    def shadow(self, strategies: Sequence[str]) -> None:
        """Begins shadow trials: gains of these strategies on this rank's gradients, without touching training."""
        self._refuse_closed("begin shadow trials")
        watched = [_arguments.strategy_of("a shadow", s) for s in _arguments.several("strategies", strategies, "strategies")]
        wrong = next((w.strategy for w in watched if w.dense or "/art-" in w.strategy), None)
        if wrong is not None:
            raise ValueError(
                f"{wrong!r} has no shadow: dense loses nothing, and what AR-Topk keeps depends on other ranks; give its compressor "
                "by allgather, for example 'topk@0.01/allgather'"
            )
        self._check_registrable()
        self._core.shadow([w.strategy for w in watched])
        if self._native or self._wrapped:
            self._register_hook()

    def shadow_gains(self) -> dict[str, float]:
        """Gain (share of the gradient's energy that would be sent, 0 to 1) of every shadow so far."""
        return {strategy: gain for strategy, gain, steps in self._core.shadow_gains() if steps}

    # State

    @property
    def step(self) -> int:
        """Synchronised backward passes so far; trials do not count. Where DDP runs by itself (dense without an agent) the
        optimizer's steps.

        The counter to go by in a loop over :meth:`batches`: ``enumerate`` counts the batches of trials too."""
        return self._core.state()[0]

    @property
    def costs(self) -> "Costs | None":
        """What the newest step cost on this rank whose times are known, whatever strategy ran; none before the first, and
        while DDP runs by itself (dense without an agent). Of steps that a GPU did the times are known a step or two
        late."""
        found = None if self._native else self._core.costs()
        return None if found is None else Costs(*found)

    @property
    def snapshot_bytes(self) -> tuple[int, int]:
        """Bytes that the newest live trial's snapshot of tensors on GPUs took while the trial ran: of the GPUs' memory, and of
        the host's. A run's peak is training's own and these."""
        return self._storage.taken

    @property
    def version(self) -> int:
        """Version of the decision in force; 0 before the first."""
        return self._core.state()[1]

    @property
    def strategy(self) -> str:
        """The strategy in force, canonical text, which `attach` takes too: dense is ``none/dense-ring``, or ``-tree``."""
        return self._core.state()[2]

    @property
    def connected(self) -> bool:
        """Whether this rank's agent is there."""
        return self._core.state()[4]

    def __reduce__(self) -> Any:
        raise FlexcommError(
            "failed to copy or pickle a session: it belongs to this process and its model; save session.state_dict(), attach "
            "to the other model, and load it there"
        )

    def state_dict(self, consolidate: bool = False) -> dict[str, Any]:
        """This rank's residuals, by parameter name; under a strategy that a compressor spec names also the state of its
        memory, momentum and codecs, and the step.

        Rank-local: save one per rank. With ``consolidate`` the mean over ranks, the same on every rank, which may be
        loaded on any number of ranks. Call that on all ranks: it waits for them, and a warning says so after ten seconds.

        Save where :attr:`in_trial` is False. In a live trial it is the candidate's, as are the model's and the optimizer's at that
        time: they belong together and can be resumed from, nothing is lost; but training did not take those steps, and a
        candidate may be one that diverges. No error, which would end the job, but a warning says so once.
        """
        if self.in_trial and not self._warned_of_saving:
            self._warned_of_saving = True
            logger.warning(
                "state_dict() in a live trial: this state, the model's and the optimizer's are those of the trial's candidate, which "
                "training does not go on from. Save checkpoints where session.in_trial is False, at every so many of session.step"
            )
        return _state.save(self._core, self._named, (self._rank, self._world, self._group), consolidate)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` saved.

        The same number of ranks: each rank its own. Another number: only a consolidated one, so that the gradient
        that is still to be applied stays the same; anything else is refused.

        Load where :attr:`in_trial` is False. In a live trial the state is only checked, and a warning says so once: what
        the script loads then (the model's and the optimizer's state too) is put back when the candidate ends.
        """
        self._refuse_closed("load a state")
        if self.in_trial:
            _state.check(self._named, (self._rank, self._world), state)
            if not self._warned_of_loading:
                self._warned_of_loading = True
                logger.warning(
                    "load_state_dict() in a live trial has loaded nothing: the trial puts back all that the script loads in it, the "
                    "model's and the optimizer's state too. Load where session.in_trial is False"
                )
            return
        self._check_registrable()
        _state.load(self._core, self._named, (self._rank, self._world), state)
        if self._native or self._wrapped:
            # The residual goes out with the next gradients.
            self._register_hook()

    def close(self) -> None:
        """Hands the last reports to the agent; steps whose times are not known yet are left out. Training may go on;
        nothing is reported any more. :meth:`shadow` and :meth:`load_state_dict` are refused from now on; the model may be
        attached again where DDP has no hook yet."""
        self._closed = True
        model = self._parts.model()
        known = None if model is None else _ATTACHED.get(model)
        if model is not None and known is not None and known() is self:
            del _ATTACHED[model]
        hook = self._hook()
        if hook is not None:
            hook.clock.poll()
        self._control.close()
        self._core.close()
        for key in [key for key, session in _CONNECTED.items() if session is self]:
            del _CONNECTED[key]

    def _refuse_closed(self, what: str) -> None:
        if self._closed:
            raise FlexcommError(f"failed to {what}: the session is closed; do so before close(), or attach to the model anew")


#: How long a process waits at its exit, seconds.
_LETTING_GO = 0.05


@functools.cache
def _let_go_at_exit() -> None:
    """Waits once at exit. Gloo's threads let go of a collective's tensors a moment after it is done; of a tensor that Python knows, while
    the interpreter ends, that aborts the process with "terminate called without an active exception". DDP alone can end so too, but
    seldom; with a hook in Python more tensors are of that kind.
    """
    atexit.register(time.sleep, _LETTING_GO)


def _close(session: "weakref.ref[Session]") -> None:
    living = session()
    if living is not None:
        living.close()


def _on_step(optimizer: torch.optim.Optimizer, session: Session) -> None:
    ref = weakref.ref(session)

    def stepped(*_: Any) -> None:
        living = ref()
        if living is not None:
            living._stepped()

    _arguments.stepping(optimizer).register_step_post_hook(stepped)


def _columns(parameter: torch.nn.Parameter) -> int:
    """Values per row of a parameter as a matrix, as PowerSGD has it: one row per output; 1 for vectors."""
    if parameter.dim() < 2 or parameter.numel() == 0:
        return 1
    return parameter.numel() // parameter.shape[0]
