"""What ``attach`` returns."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import time
import weakref
from typing import Any, Callable, Iterable, Sequence, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from flexcomm import _core
from flexcomm._core import FlexcommError, Next
from flexcomm.torch import _arguments, _checks, _registry
from flexcomm.torch._agree import Agreed
from flexcomm.torch._ddp import in_backward
from flexcomm.torch._hook import Hook
from flexcomm.torch._rates import Rates
from flexcomm.torch._registration import Registration, Way, way_of
from flexcomm.torch._state import Checkpoints
from flexcomm.torch._trials import Batches, Trials
from flexcomm.torch._unused import Unused

logger = logging.getLogger("flexcomm")

#: What torch.distributed runs here. Gloo's allreduce is a ring and its broadcast a tree, without a choice; NCCL
#: chooses by itself. Tree strategies would not be what their name says, so they are not offered.
_COLLECTIVES = ["dense-ring", "allgather", "art-ring"]

#: Offered too where NCCL moves the gradients and every rank has flexcomm's tuner plugin, which tells it ring or tree for each
#: allreduce (`_tuner.py`). "art-tree" is not: nothing is known of it under NCCL.
_TREE = "dense-tree"

_Batch = TypeVar("_Batch")


@dataclasses.dataclass(frozen=True)
class Costs:
    """One step on one rank."""

    #: Seconds of forward, backward and update.
    compute: float
    #: Seconds of compressing and decompressing.
    compress: float
    #: Seconds in which this rank had nothing to do but wait for its collectives.
    sync: float
    #: Seconds of the whole step.
    step: float
    #: Bytes that this rank sent, by the ring's count.
    sent: int
    #: Share of the gradient's energy that was sent, above 0 to 1; 1 when dense.
    gain: float


class Session:
    """What ``attach`` returns: one rank's side of one model's training."""

    def __init__(self, model: DistributedDataParallel, agreed: Agreed, register: bool) -> None:
        self._agreed = agreed
        self._core, self._control, self._parts = agreed.core, agreed.control, agreed.parts
        self._rank, self._world = dist.get_rank(agreed.group), dist.get_world_size(agreed.group)
        self._closed = False
        self._loss: float | None = None
        self._in_step = False
        #: Whether a gradient of the step under way was not finite, and whether the warning was logged that a pass had no optimizer's step.
        self._refused = self._warned_of_unused = False
        #: Whether the step under way is one in which this rank gives zeros.
        self._idle = False
        self._rates = Rates(agreed.parts.optimizer)
        self._trials = Trials(agreed.core, agreed.parts)
        self._checkpoints = Checkpoints(agreed.core, agreed.named, agreed.group)
        self._registration = Registration(agreed.parts.model, self._make_hook(model), way_of(agreed, register))
        self._place(model)
        self._announce()
        _registry.add(self, model, agreed.settings.job, agreed.settings.socket)
        if agreed.settings.socket is not None:
            atexit.register(_close, weakref.ref(self))
        if "gloo" in dist.get_backend(agreed.group):
            _let_go_at_exit()
        if agreed.parts.optimizer is not None:
            _on_step(agreed.parts.optimizer, self)

    def _make_hook(self, model: DistributedDataParallel) -> Hook:
        agreed = self._agreed
        return Hook(
            agreed.core, agreed.group, {id(p): i for i, (_, p) in enumerate(agreed.named)},
            control=agreed.control, propagate=agreed.settings.propagate, began=self._begin,
            not_finite=self._not_finite, rates=self._rates.of, tuner=agreed.tuner,
            fresh=getattr(model, "lazy_bucket_allocation", False),
            unused=Unused(model) if model.find_unused_parameters else None,
        )

    def _place(self, model: DistributedDataParallel) -> None:
        """Connects to the agent and changes the model, on all ranks or on none."""

        def ready() -> bool:
            """All that may fail without having changed the model: where it does on any rank, the model is as before on all."""
            if self._registration.way is Way.HOOK:
                _checks.check_hook(model)
            self._connect()
            return True

        try:
            _checks.everywhere(ready, self._agreed.group)
            self._registration.place(self._end_between)
        except BaseException:
            # The agent forgets this trainer, and the job's name is free.
            self._core.close()
            raise

    def _connect(self) -> None:
        agreed = self._agreed
        if agreed.settings.socket is not None:
            collectives = _COLLECTIVES + ([_TREE] if agreed.tuner is not None else [])
            backend = f"torch-{dist.get_backend(agreed.group)}"
            # A controller that decides goes by what rank 0 has measured.
            measures = self._rank == 0 and not agreed.settings.fixed
            ordinal = self.hook.device.ordinal(p for _, p in agreed.named) if measures else None
            candidates, policy, momentum = agreed.settings.candidates, agreed.settings.policy, self._rates.momentum()
            parameter = next((p for _, p in agreed.named), None)
            machine = torch.cuda.get_device_name(parameter.device) if parameter is not None and parameter.is_cuda else None
            self._core.connect(agreed.settings.socket, backend, collectives, candidates, ordinal, momentum, policy, machine)

    def _announce(self) -> None:
        """Logs what is not as it might be expected."""
        settings, named = self._agreed.settings, self._agreed.settings.named
        if settings.socket is None and self._rank == 0:
            what = f"holding {named.strategy}" if settings.fixed else "training dense"
            if not settings.fixed and not named.dense:
                what = f"staying with {named.strategy}"
            logger.warning(
                "no agent: neither the argument socket nor FLEXCOMM_SOCKET names one; %s, no decisions arrive", what
            )
        elif settings.socket is None and self._agreed.has_agent:
            logger.info("no agent on this rank: it follows rank 0, and reports nothing")
        if self._rank == 0 and named.drops:
            logger.warning(
                "%s loses what a step does not send, which costs accuracy: add error feedback, as in %r",
                named.spec, f"{named.spec}+ef(vanilla)",
            )

    @property
    def hook(self) -> Hook:
        """The communication hook, to register it oneself."""
        hook = self._registration.hook()
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
        if self._in_step and self._trials.looping:
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
        if expected or self._idle or self._warned_of_unused or self._rank != 0 or not self._core.state().error_feedback:
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
        if self._registration.way is Way.NATIVE and not self._in_step:
            # No hook saw its first bucket.
            self._begin()
        self._end_between()

    def _end_step(self, within_loop: bool) -> Next:
        if not self._in_step:
            return Next.Train
        self._in_step = self._refused = False
        loss, self._loss = self._loss, None
        answers = self._control.end()
        hook = self._registration.hook()
        change = self._core.finish(loss, None if hook is None else hook.device.clock.end(), answers)
        if hook is not None:
            hook.device.clock.poll()
        if self._registration.way is Way.WRAPPED and self._core.wants_hook() and not in_backward():
            self._registration.register()
        self._trials.reserve(change)
        for level, text in _core.take_log():
            logger.log(int(level), "%s", text)
        if not within_loop:
            self._trials.leave(change)
        return change

    def _end_between(self) -> None:
        # The loop over `batches()` ends its steps itself: it must see that a trial starts.
        if not self._trials.looping:
            self._end_step(within_loop=False)

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
        return self._trials.under_way

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
        return Batches(self._trials.batches(loader, train_step, self._end_step), loader)

    def shadow(self, strategies: Sequence[str]) -> None:
        """Begins shadow trials: gains of these strategies on this rank's gradients, without touching training."""
        self._refuse_closed("begin shadow trials")
        watched = [_arguments.strategy_of("a shadow", s) for s in _arguments.several("strategies", strategies, "strategies")]
        self._registration.check()
        self._core.shadow([w.strategy for w in watched])
        self._registration.register_once()

    def shadow_gains(self) -> dict[str, float]:
        """Gain (share of the gradient's energy that would be sent, 0 to 1) of every shadow so far."""
        return {one.strategy: one.gain for one in self._core.shadow_gains() if one.steps}

    # State

    @property
    def step(self) -> int:
        """Synchronised backward passes so far; trials do not count. Where DDP runs by itself (dense without an agent) the
        optimizer's steps.

        The counter to go by in a loop over :meth:`batches`: ``enumerate`` counts the batches of trials too."""
        return self._core.state().step

    @property
    def costs(self) -> "Costs | None":
        """What the newest step cost on this rank whose times are known, whatever strategy ran; none before the first, and
        while DDP runs by itself (dense without an agent). Of steps that a GPU did the times are known a step or two
        late."""
        found = None if self._registration.way is Way.NATIVE else self._core.costs()
        return None if found is None else Costs(**found)

    @property
    def snapshot_bytes(self) -> tuple[int, int]:
        """Bytes that the newest live trial's snapshot of tensors on GPUs took while the trial ran: of the GPUs' memory, and of
        the host's. A run's peak is training's own and these."""
        return self._trials.storage.taken

    @property
    def version(self) -> int:
        """Version of the decision in force; 0 before the first."""
        return self._core.state().version

    @property
    def strategy(self) -> str:
        """The strategy in force, canonical text, which `attach` takes too: dense is ``none/dense-ring``, or ``-tree``. Where buckets
        run different ones: all of them in the buckets' order, as in ``2x none/dense-ring | topk(k=0.01)+ef(vanilla)/allgather``; the
        last one is also for all buckets behind."""
        return self._core.state().strategy

    @property
    def connected(self) -> bool:
        """Whether this rank's agent is there."""
        return self._core.state().connected

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
        return self._checkpoints.save(consolidate, self.in_trial)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads what :meth:`state_dict` saved.

        The same number of ranks: each rank its own. Another number: only a consolidated one, so that the gradient
        that is still to be applied stays the same; anything else is refused.

        Load where :attr:`in_trial` is False. In a live trial the state is only checked, and a warning says so once: what
        the script loads then (the model's and the optimizer's state too) is put back when the candidate ends.
        """
        self._refuse_closed("load a state")
        if self.in_trial:
            self._checkpoints.check_in_trial(state)
            return
        self._registration.check()
        self._checkpoints.load(state)
        # The residual goes out with the next gradients.
        self._registration.register_once()

    def close(self) -> None:
        """Hands the last reports to the agent; steps whose times are not known yet are left out. Training may go on;
        nothing is reported any more. :meth:`shadow` and :meth:`load_state_dict` are refused from now on; the model may be
        attached again where DDP has no hook yet."""
        self._closed = True
        # First: whatever fails below, the model may be attached again.
        _registry.remove(self, self._parts.model())
        hook = self._registration.hook()
        if hook is not None:
            hook.device.clock.poll()
        self._control.close()
        self._core.close()

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
