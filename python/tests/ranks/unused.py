"""Parameters that some or all ranks leave out of a step: their residual is neither lost nor out of step."""

import copy

import torch
import torch.distributed as dist
from common import FOLDER, ddp, everywhere, parameters_hash, ranks, same
from fake_agent import FakeAgent, decision, trial

import flexcomm.torch

GATHER, STAR, VAR = "topk(k=0.1)+ef(vanilla)/allgather", "topk(k=0.1)+ef(vanilla)/art-ring:star", "topk(k=0.1)+ef(vanilla)/art-ring:var"
TEXT = "topk(k=0.1)+ef(vanilla)"
STRATEGIES = ["dense", GATHER, STAR, VAR, TEXT, "powersgd(rank=1)+ef(vanilla)"]
LENGTH = 24


class Branches(torch.nn.Module):
    """Of two branches one is used. Its gradient depends on the batch alone, so that sums of gradients can be compared."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = torch.nn.ModuleList([torch.nn.Linear(30, 20), torch.nn.Linear(30, 20)])
        # Rows in the order of columns, as some layers lay them out.
        self.branches[1].weight = torch.nn.Parameter(self.branches[1].weight.detach().t().contiguous().t())

    def forward(self, x, which):
        return self.branches[which](x)


def together(step, rank):
    """All ranks leave out the same branch, another one in every step."""
    return step % 2


def apart(step, rank):
    return (step + rank) % 2


def never(step, rank):
    """Rank 0 never uses the second branch, and in every second step no rank does."""
    return 0 if rank == 0 else step % 2


def loss_of(model, which, step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, weights = torch.randn(4, 30, generator=generator), torch.randn(4, 20, generator=generator)
    return (model(x, which) * weights).sum()


class Run:
    def __init__(self, name, rank, use, *, steered=False, to_none=True, model_options=None, **options):
        self.rank, self.use, self.to_none, self.steps = rank, use, to_none, 0
        # Small buckets: of some of them a rank has a residual of nothing but zeros.
        self.model = ddp(Branches(), find_unused_parameters=True, bucket_cap_mb=0.001, **(model_options or {}))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.agent = FakeAgent(FOLDER, f"{name}{rank}").start() if steered else None
        socket = str(self.agent.path) if steered else None
        self.session = flexcomm.torch.attach(self.model, self.optimizer, socket=socket, **options)
        if steered:
            self.agent.wait_for("hello")
        self.reference = copy.deepcopy(self.model.module)
        self.first = [p.detach().clone() for p in self.model.module.parameters()]
        self.total = [torch.zeros_like(p) for p in self.first]
        self.equal, self.untouched = True, True

    def step(self, which):
        self.optimizer.zero_grad(set_to_none=self.to_none)
        loss_of(self.model, which, self.steps, self.rank).backward()
        self.optimizer.step()

    def train(self, steps, until=None):
        for _ in range(steps):
            which = self.use(self.steps, self.rank)
            self.step(which)
            self.count(which)
            if until is not None and all(everywhere(until())):
                return

    def count(self, which):
        """A step that trained."""
        loss = loss_of(self.reference, which, self.steps, self.rank)
        self.steps += 1
        for total, gradient in zip(self.total, torch.autograd.grad(loss, list(self.reference.parameters()), allow_unused=True)):
            gradient = (torch.zeros_like(total) if gradient is None else gradient).contiguous()
            dist.all_reduce(gradient)
            total += gradient / dist.get_world_size()
        self.equal &= same(parameters_hash(self.model.module))

    def end(self):
        """How far what was applied and the residual are from the sum of all gradients, over that sum."""
        self.session._end_step(within_loop=False)
        residual = self.session.state_dict(consolidate=True)["held_back"]
        away = 0.0
        for (name, now), first, total in zip(self.model.module.named_parameters(), self.first, self.total):
            rest = residual[name].view(now.size()) if name in residual else torch.zeros_like(now)
            away = max(away, float((first - now.detach() + rest - total).norm() / total.norm()))
        return {"away": away, "equal": self.equal, "holds": sorted(n for n, values in residual.items() if values.any()), "strategy": self.session.strategy}


def conserved(rank, use, strategy, **options):
    run = Run("c", rank, use, strategy=strategy, **options)
    run.train(LENGTH)
    return run.end()


def decided(rank, name, use, initial):
    """All of the residual is applied once the ranks are dense."""
    run = Run(name, rank, use, steered=True, initial=initial)
    run.train(10)
    run.agent.publish(decision=decision(1, "none/dense-ring"))
    run.train(200, until=lambda: run.session.version == 1)
    run.train(4)
    return run.end()


def tried(rank, name, use, strategy):
    """A trial's candidates run dense and otherwise, and leave no trace."""
    run = Run(name, rank, use, steered=True, strategy=strategy)
    batches = list(range(60))
    steps = []
    for _ in run.session.batches(batches):
        which = use(run.steps, rank)
        run.step(which)
        if run.session.in_trial:
            steps.append(run.steps)
            continue
        run.count(which)
        if run.steps == 10 and rank == 0:
            run.agent.publish(trial=trial(1, ["none/dense-ring", STAR, "none/dense-ring", GATHER]))
    return run.end() | {"tried": len(steps), "steps": run.steps}


def loaded(rank, use):
    """States are loaded again and again, and what they hold goes out dense."""
    run = Run("l", rank, use, strategy=GATHER)
    run.train(10)
    run.session._end_step(within_loop=False)
    state = run.session.state_dict()
    dense = Run("d", rank, use, strategy="dense")
    out = []
    for _ in range(2):
        dense.session.load_state_dict(state)
        dense.train(6)
        out.append(dense.end())
    residual = run.session.state_dict(consolidate=True)["held_back"]
    # It was applied twice.
    for name, total in zip([n for n, _ in dense.model.module.named_parameters()], dense.total):
        total += 2 * residual[name].view(total.size()) if name in residual else 0
    return dense.end() | {"equal": out[0]["equal"] and out[1]["equal"]}


def left_alone(rank):
    """A branch that no rank ever uses has no gradient, and the optimizer's weight decay leaves it alone."""
    model = ddp(Branches(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5)
    flexcomm.torch.attach(model, optimizer, strategy=GATHER)
    before = parameters_hash(model.module.branches[1])
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, 0, step, rank).backward()
        optimizer.step()
    return parameters_hash(model.module.branches[1]) == before


with ranks() as (rank, world, seen):
    for use in (together, apart, never):
        for strategy in STRATEGIES:
            seen[f"{use.__name__} {strategy}"] = conserved(rank, use, strategy)
    for view in (False, True):
        for to_none in (False, True):
            options = {"gradient_as_bucket_view": view}
            seen[f"view {view} none {to_none}"] = conserved(rank, together, GATHER, to_none=to_none, model_options=options)
    for number, (use, initial) in enumerate((use, initial) for use in (together, never) for initial in (GATHER, STAR, TEXT)):
        seen[f"decided {use.__name__} {initial}"] = decided(rank, f"a{number}", use, initial)
    for number, (use, strategy) in enumerate((use, strategy) for use in (together, never) for strategy in (GATHER, "dense")):
        seen[f"tried {use.__name__} {strategy}"] = tried(rank, f"t{number}", use, strategy)
    seen["loaded never"] = loaded(rank, never)
    seen["left alone"] = left_alone(rank)
