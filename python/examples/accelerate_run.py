"""Accelerate: torchrun --nproc-per-node 2 accelerate_run.py (accelerate 1.15)."""

import torch
from accelerate import Accelerator

import flexcomm.torch

accelerator = Accelerator(cpu=True)
model = torch.nn.Sequential(torch.nn.Linear(20, 100), torch.nn.ReLU(), torch.nn.Linear(100, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
# Accelerate's own comm hook stays NO, which is its default; the optimizer is the one inside its wrapper.
session = flexcomm.torch.attach(model, optimizer.optimizer, strategy="topk(k=0.1)+ef(vanilla)/allgather")
for step in range(20):
    x = torch.randn(16, 20)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), (x[:, 0] > 0).long())
    accelerator.backward(loss)
    optimizer.step()
accelerator.print(f"{session.step} steps with {session.strategy}, loss {loss.item():.3f}")
accelerator.end_training()
