"""Fashion-MNIST on several ranks: torchrun --nproc-per-node 4 fashion_mnist.py"""

import gzip
import os
import pathlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import flexcomm.torch

# Debian's package dataset-fashion-mnist.
FOLDER = pathlib.Path(os.environ.get("FASHION_MNIST", "/usr/share/datasets/fashion-mnist"))
EPOCHS = int(os.environ.get("EPOCHS", "3"))


def idx(name: str, offset: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(gzip.open(FOLDER / f"{name}.gz").read()), dtype=torch.uint8, offset=offset)


def images(kind: str) -> torch.utils.data.TensorDataset:
    pixels = idx(f"{kind}-images-idx3-ubyte", 16).reshape(-1, 1, 28, 28).float() / 255 - 0.3
    return torch.utils.data.TensorDataset(pixels, idx(f"{kind}-labels-idx1-ubyte", 8).long())


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(800, 128), nn.ReLU(), nn.Linear(128, 10),
    )
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    session = flexcomm.torch.attach(model, optimizer, scheduler=scheduler, strategy=os.environ.get("STRATEGY"))
    training, held_out = images("train"), images("t10k")
    sampler = torch.utils.data.DistributedSampler(training)
    loader = torch.utils.data.DataLoader(training, batch_size=64, sampler=sampler)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for pixels, labels in session.batches(loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(pixels), labels)
            loss.backward()
            optimizer.step()
        scheduler.step()
        if dist.get_rank() == 0:
            network.eval()
            with torch.no_grad():
                right = (network(held_out.tensors[0]).argmax(1) == held_out.tensors[1]).float().mean().item()
            print(f"epoch {epoch + 1}: loss {loss.item():.3f}, accuracy {right:.1%}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
