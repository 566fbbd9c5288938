"""CommHook on its own: registered as front ends do, before flexcomm has seen the model."""

import copy

import torch
import torch.distributed as dist
from common import FOLDER, Lines, batch, ddp, everywhere, network, parameters_hash, ranks, same
from fake_agent import FakeAgent, decision

import flexcomm.torch
from flexcomm.torch import CommHook

GATHER = "topk(k=0.1)+ef(vanilla)/allgather"


def train(rank, model, optimizer, steps=20, until=None):
    equal = True
    for step in range(steps):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        equal &= same(parameters_hash(model))
        if until is not None and all(everywhere(until())):
            break
    return equal


def attached(rank):
    model = ddp(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = flexcomm.torch.attach(model, optimizer, strategy=GATHER)
    return {"equal": train(rank, model, optimizer), "hash": parameters_hash(model), "step": session.step}


def around(hook):
    """As Lightning's `ddp_comm_wrapper`: DDP is given another hook, which calls ours."""

    def wrapper(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(state, bucket)

    return wrapper


def alone(rank, wrapped=False, with_optimizer=False):
    """The hook is there before the model. Another model runs before it, and beside it."""
    hook = CommHook(strategy=GATHER)
    other, model = ddp(network(seed=9)), ddp(network())
    other(batch(0, rank)[0]).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if with_optimizer:
        hook = CommHook(optimizer, strategy=GATHER)
    try:
        early = hook.session
    except flexcomm.FlexcommError as error:
        early = str(error)
    model.register_comm_hook(state=None, hook=around(hook) if wrapped else hook)
    equal = train(rank, model, optimizer)
    watching = len(torch.nn.modules.module._global_forward_pre_hooks)
    return {
        "equal": equal, "hash": parameters_hash(model), "early": early, "residual": len(hook.session.state_dict()["held_back"]),
        # Without the optimizer the last step is still under way.
        "step": hook.session.step + (not with_optimizer), "strategy": hook.session.strategy, "watching": watching,
    }


def steered(rank):
    agent = FakeAgent(FOLDER, f"alone{rank}").start()
    hook = CommHook(socket=str(agent.path))
    model = ddp(network())
    model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    equal = train(rank, model, optimizer, 1)
    agent.wait_for("hello")
    agent.publish(decision=decision(1, GATHER))
    equal &= train(rank, model, optimizer, 200, lambda: hook.session.version == 1)
    equal &= train(rank, model, optimizer, 5)
    out = {"equal": equal, "version": hook.session.version, "strategy": hook.session.strategy}
    hook.session.close()
    return out


def refusals(rank):
    def text(run):
        try:
            run()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def late():
        model = ddp(network())
        loss = model(batch(0, rank)[0]).sum()
        model.register_comm_hook(None, CommHook(strategy=GATHER))
        loss.backward()

    def of_one_rank():
        model = ddp(network())
        model.register_comm_hook(None, CommHook(strategy=GATHER, selection="best" if rank else "star"))
        model(batch(0, rank)[0]).sum().backward()

    def of_a_copy():
        copy.deepcopy(CommHook())(None, None)

    return {
        "unknown": text(lambda: CommHook(stratagem=GATHER)), "register": text(lambda: CommHook(register=True)),
        "late": text(late), "one rank": text(of_one_rank), "copy": text(of_a_copy),
    }


with ranks() as (rank, world, seen):
    lines = Lines()
    seen["attached"] = attached(rank)
    seen["alone"] = alone(rank)
    seen["wrapped"] = alone(rank, wrapped=True)
    seen["optimizer"] = alone(rank, with_optimizer=True)
    seen["steered"] = steered(rank)
    seen["refusals"] = refusals(rank)
