"""Lightning: torchrun --nproc-per-node 2 lightning_run.py (lightning 2.6)."""

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy

import flexcomm.torch


class Steered(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(20, 100), torch.nn.ReLU(), torch.nn.Linear(100, 2))

    def on_train_start(self) -> None:
        # DDPStrategy(ddp_comm_hook=...) registers hooks on CUDA only, so flexcomm attaches to the wrapped model.
        trainer = self.trainer
        self.session = flexcomm.torch.attach(
            trainer.strategy.model, trainer.optimizers[0], strategy="topk(k=0.1)+ef(vanilla)/allgather"
        )

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        (x,) = batch
        return torch.nn.functional.cross_entropy(self.network(x), (x[:, 0] > 0).long())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


data = torch.utils.data.TensorDataset(torch.randn(640, 20))
module = Steered()
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"), max_steps=20, logger=False,
    enable_checkpointing=False,
)
trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=16))
print(f"rank {trainer.global_rank}: {module.session.step} steps with {module.session.strategy}")
