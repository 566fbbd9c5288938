"""Live trials leave no trace; shadow gains are near live gains."""

import torch
from common import FOLDER, Lines, ddp, everywhere, network, parameters_hash, ranks, same
from fake_agent import FakeAgent, trial

import flexcomm.torch

CANDIDATES = ["none/dense-ring", "topk(k=0.1)+ef(vanilla)/allgather", "topk(k=0.01)+ef(vanilla)/art-ring:star", "topk(k=0.05)+ef(vanilla)/art-ring:var", "lwtopk(k=0.1)+ef(vanilla)/allgather"]


#: Exchanges of several kinds, and halves.
PIPELINES = [
    "powersgd(rank=1)+ef(vanilla)/dense-ring", "fp16/dense-ring", "qsgd(s=7,norm=max)+ef(vanilla)/allgather",
    "topk(k=0.1)+ef(vanilla)/allgather", "powersgd(rank=2)+ef(vanilla)/dense-ring",
]


class Net(torch.nn.Module):
    """With buffers that move (batch norm) and random numbers (dropout)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = torch.nn.Linear(20, 60)
        self.norm = torch.nn.BatchNorm1d(60)
        self.second = torch.nn.Linear(60, 2)

    def forward(self, x):
        return self.second(torch.nn.functional.dropout(self.norm(self.first(x)).relu(), 0.2, self.training))


class Noisy(torch.utils.data.Dataset):
    """Images with augmentation from the global generator."""

    def __init__(self, rank):
        generator = torch.Generator().manual_seed(rank)
        self.x = torch.randn(320, 20, generator=generator)
        self.y = (self.x[:, :5].sum(1) > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + 0.1 * torch.randn(20), self.y[i]


def train(rank, name, strategy, trials, with_step, scaled, evaluated=False, leaves=None, candidates=CANDIDATES):
    """200 steps in ten epochs of twenty; trials are ordered after steps 30, 79 and 150. `evaluated`: rank 0 validates in the
    loop's body, so the network has no buffers that would be broadcast. `leaves`: the loop is left after so many steps; below
    0, in the third iteration of the first trial."""
    agent = FakeAgent(FOLDER, f"{name}{rank}").start()
    model = ddp(network() if evaluated else Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=20) if scaled else None
    session = flexcomm.torch.attach(
        model, optimizer, scheduler=scheduler, scaler=scaler, strategy=strategy, socket=str(agent.path)
    )
    agent.wait_for("hello")
    torch.manual_seed(100 + rank)
    loader = torch.utils.data.DataLoader(Noisy(rank), batch_size=16, shuffle=True)
    done, hashes, in_trial, hooked = 0, [], 0, []
    orders = {30: candidates, 79: candidates[1:3], 150: candidates[:2]} if trials else {}

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        scheduler.step()

    left = None
    while done < 200:
        for batch in session.batches(loader, train_step=step if with_step else None):
            step(batch)
            if evaluated and rank == 0:
                with torch.no_grad():
                    model(batch[0])
                # An average of weights whose author forgot no_grad.
                model(batch[0])
            if session.in_trial:
                in_trial += 1
                if in_trial == 3 and leaves == -1:
                    left = done
                    break
                continue
            done += 1
            hooked.append(len(model._comm_hooks))
            momenta = [s["momentum_buffer"].sum().item() for s in optimizer.state.values()]
            hashes.append((parameters_hash(model.module), sum(momenta), optimizer.param_groups[0]["lr"], session.step))
            if done in orders and rank == 0:
                agent.publish(trial=trial(done, orders[done]))
            if done == leaves:
                break
    session.close()
    agent.wait_for("bye")
    # Reports that come again have what shadows found since, and nothing else is another.
    live = {}
    ran = lambda t: [{k: v for k, v in o.items() if not k.startswith("shadow_")} for o in t["outcomes"]]  # noqa: E731
    for t in agent.of_kind("trial"):
        assert ran(live.setdefault(t["id"], t)) == ran(t), t
    reports = [(t["id"], [o["iterations"] for o in t["outcomes"]], [o["gain"] for o in t["outcomes"]]) for t in live.values()]
    sane = all(o["sync_us"] > 0 and 0 < o["gain"] <= 1 and (o["energy"] > 0 or o["gain"] == 1) for t in live.values() for o in t["outcomes"])
    return {"hashes": hashes, "reports": reports, "in_trial": in_trial, "sane": sane, "hooked": hooked, "left": left, "equal": same([p.sum().item() for p in model.parameters()].__str__())}


def gains(rank, share):
    """A larger network: live gains of one trial, and shadow gains on the real gradients of as many steps."""
    candidates = [f"{compressor}(k={c})+ef(vanilla)/allgather" for compressor in ("topk", "lwtopk", "mstopk") for c in (0.1, 0.01, 0.001)]
    agent = FakeAgent(FOLDER, f"g{rank}").start()
    torch.manual_seed(0)
    model = ddp(torch.nn.Sequential(torch.nn.Linear(20, 800), torch.nn.ReLU(), torch.nn.Linear(800, 800), torch.nn.ReLU(), torch.nn.Linear(800, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session = flexcomm.torch.attach(model, optimizer, strategy="topk(k=0.01)+ef(vanilla)/allgather", socket=str(agent.path), shadow_share=share)
    agent.wait_for("hello")
    torch.manual_seed(rank)
    x = torch.randn(4000, 20)
    data = torch.utils.data.TensorDataset(x, (x[:, :5].sum(1) > 0).long())
    loader = torch.utils.data.DataLoader(data, batch_size=32)
    done, shadow = 0, {}
    for _ in range(2):
        for a, b in session.batches(loader):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(a), b).backward()
            optimizer.step()
            if not session.in_trial:
                done += 1
                if done == 10 and rank == 0:
                    agent.publish(trial=trial(1, candidates, 10))
                steps = {one.steps for one in session._core.shadow_gains()}
                # Shadows see the same ten batches from the same residuals as the candidates did.
                if steps == {10} and not shadow:
                    shadow = session.shadow_gains()
    session.close()
    agent.wait_for("bye")
    # Shadows complete the report later.
    report, *later = agent.of_kind("trial")
    assert later and all(t["id"] == 1 and t["outcomes"][0]["shadow_gain"] > 0 for t in later), later
    return {"candidates": candidates, "live": [o["gain"] for o in report["outcomes"]], "shadow": [shadow.get(c) for c in candidates]}


with ranks() as (rank, world, seen):
    lines = Lines()
    for name, strategy, with_step, scaled in [
        ("loop", "mstopk(k=0.05)+ef(vanilla)/allgather", False, False),
        ("step", "topk(k=0.05)+ef(vanilla)/art-ring:var", True, True),
    ]:
        seen[name] = [train(rank, f"{name}{i}", strategy, trials, with_step, scaled) for i, trials in enumerate((True, False))]
    for name, with_step in (("pipeline", False), ("pipeline step", True)):
        fixed = "powersgd(rank=2)+ef(vanilla)/dense-ring"
        seen[name] = [
            train(rank, f"{name[:1]}{name[-1:]}{i}", fixed, trials, with_step, False, candidates=PIPELINES) for i, trials in enumerate((True, False))
        ]
    seen["evaluated"] = [train(rank, f"eval{i}", None, trials, False, False, True) for i, trials in enumerate((True, False))]
    first = train(rank, "left1", "mstopk(k=0.05)+ef(vanilla)/allgather", True, False, False, leaves=-1)
    seen["left"] = [first, train(rank, "left0", "mstopk(k=0.05)+ef(vanilla)/allgather", False, False, False, leaves=first["left"])]
    seen["lines"] = lines.take()
    seen["gains"] = gains(rank, float(__import__("os").environ.get("SHARE", "0.25")))
