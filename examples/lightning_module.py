"""A LightningModule with adaptive truncation: what `truncated_bptt_steps` was before Lightning 2.0.

Needs `pip install 'adaptive-tbptt[lightning]'`. Run it with
`python examples/lightning_module.py [--epochs N]`.
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import adaptive_tbptt as at
from adaptive_tbptt.integrations.lightning import TBPTTModule


class DelayedSum(TBPTTModule):
    """A GRU; the target is the sum of its inputs 3 and 8 steps ago."""

    def __init__(self, hidden: int = 32, delta: float = 0.1) -> None:
        super().__init__(
            clip=at.loop.Clip(1.0)
        )  # carry=False where batches do not continue each other
        self.save_hyperparameters()
        self.gru = nn.GRU(1, hidden)
        self.readout = nn.Linear(hidden, 1)
        controller = at.BiasTolerance(delta=delta, k_max=50, lags=60)
        self.tbptt = at.AdaptiveTBPTT(self, nn.MSELoss(), controller)

    def forward(self, inputs: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Run over time; `None` is the initial state."""
        features, state = self.gru(inputs, state)
        return self.readout(features), state

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Lightning asks for it; the rate of SGD is multiplied by sqrt(K) during a step."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def on_train_epoch_end(self) -> None:
        """Show how K follows what the model has learnt."""
        super().on_train_epoch_end()
        loss = self.trainer.callback_metrics["train_loss"].item()
        print(f"epoch {self.current_epoch + 1:2d}  loss {loss:.4f}  K {self.tbptt.k}", flush=True)


def consecutive_chunks(
    steps: int = 2000, rows: int = 32, chunk: int = 100
) -> DataLoader[tuple[Tensor, ...]]:
    """Batches `(inputs, targets)` of `chunk` steps, time first, each continuing the one before."""
    inputs = torch.randn(steps, rows, 1)
    targets = torch.roll(inputs, 3, dims=0) + torch.roll(inputs, 8, dims=0)
    data = TensorDataset(inputs.view(-1, chunk, rows, 1), targets.view(-1, chunk, rows, 1))
    return DataLoader(data, batch_size=None, shuffle=False)


def main() -> None:
    """Train with Lightning's own Trainer; `fit(..., ckpt_path=...)` resumes as usual."""
    parser = argparse.ArgumentParser(description="A LightningModule with adaptive truncation.")
    parser.add_argument("--epochs", type=int, default=15)
    options = parser.parse_args()

    L.seed_everything(0)
    trainer = L.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = DelayedSum()
    trainer.fit(module, consecutive_chunks())
    for estimate in module.tbptt.history[-1:]:
        print(estimate.message)


if __name__ == "__main__":
    main()
