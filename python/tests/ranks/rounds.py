"""When the collectives of methods of several rounds are launched and waited for."""

import torch
from common import batch, ddp, network, parameters_hash, ranks, same

import flexcomm.torch
from flexcomm.torch._exchange import Rounds

STRATEGIES = {
    "one round": "topk(k=0.05)+ef(vanilla)/allgather",
    "powersgd": "powersgd(rank=2)+ef(vanilla)",
    "star": "topk(k=0.05)+ef(vanilla)/art-ring:star",
    "var": "topk(k=0.05)+ef(vanilla)/art-ring:var",
    "sizes": "qsgd(s=64,coding=gamma)+ef(vanilla)",
}
STEPS, WATCHED = 8, 6


def logged(log):
    """Logs what exchanges launch and wait for."""
    launch, wait = Rounds._launch, Rounds.wait

    def launches(exchange, current):
        log.append(("launch", exchange._index, exchange._number))
        launch(exchange, current)

    def waits(exchange):
        if exchange.work is not None:
            log.append(("wait", exchange._index, exchange._number))
        wait(exchange)

    Rounds._launch, Rounds.wait = launches, waits


def train(rank, strategy, log):
    model = ddp(network((20, 48, 48, 48, 2)), bucket_cap_mb=0.006)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    session = flexcomm.torch.attach(model, optimizer, strategy=strategy, register=False)

    def hook(state, bucket) -> torch.futures.Future[torch.Tensor]:
        index = bucket.index()
        future = session.hook(state, bucket)
        log.append(("return", index, 0))
        return future

    model.register_comm_hook(None, hook)
    for step in range(STEPS):
        x, y = batch(step, rank)
        optimizer.zero_grad()
        log.clear()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if step == WATCHED:
            seen = list(log)
    return {"log": seen, "equal": same(parameters_hash(model)), "alike": same(str(seen))}


with ranks() as (rank, world, seen):
    log = []
    logged(log)
    for name, strategy in STRATEGIES.items():
        seen[name] = train(rank, strategy, log)
