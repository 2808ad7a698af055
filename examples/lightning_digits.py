"""A module of Lightning learns digits; the callback drives its precision. ``--devices 2`` trains in two processes.

It needs the extras `lab,lightning`.
"""

import argparse

import lightning.pytorch as lightning
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import cpt_core as cpt
from cpt_extras.integrations.lightning import PrecisionCallback


class Digits(lightning.LightningModule):
    """As a module of anybody: nothing in it knows of precision."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)
        )

    def training_step(self, batch, index):
        """Return the loss."""
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch, index):
        """Log the accuracy."""
        self.log(
            "accuracy",
            (self.layers(batch[0]).argmax(1) == batch[1]).float().mean(),
            sync_dist=True,
        )

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.003)


def main(devices=1, steps=200, folder="out"):
    """Train, and return what the validation at 8 bits says."""
    x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
    x = x.float() / 16
    train, test = TensorDataset(x[:1200], y[:1200]), TensorDataset(x[1200:], y[1200:])
    lightning.seed_everything(0)
    module = Digits()
    cpt.quantize_(module)
    schedule = cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=steps, n_cycles=4)
    trainer = lightning.Trainer(
        max_steps=steps,
        devices=devices,
        accelerator="cpu",
        strategy="ddp" if devices > 1 else "auto",
        logger=False,
        default_root_dir=folder,
        enable_progress_bar=False,
        callbacks=[PrecisionCallback(schedule)],
    )
    test_batches = DataLoader(test, 597)
    trainer.fit(module, DataLoader(train, 50, shuffle=True), test_batches)
    return trainer.validate(module, test_batches)[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    print(main(parser.parse_args().devices))
