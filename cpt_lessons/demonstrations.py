"""Small worlds to look into: demonstrations that notebooks print."""

from typing import Any

import torch
from sklearn.datasets import load_digits

BATCH = 32
TRAINED = 40 * BATCH  # digits; the others are held out


def tiny_problem(seed: int = 0) -> tuple[Any, list[tuple[Any, Any]], Any, Any]:
    """Return an ordinary training set-up on the digits: model, list of 40 batches, loss function, optimizer."""
    model, images, labels, order = _tiny(seed)
    loader = [(images[i], labels[i]) for i in order[:TRAINED].split(BATCH)]
    return (
        model,
        loader,
        torch.nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    )


def held_out(seed: int = 0) -> tuple[Any, Any]:
    """Return the digits in no batch of ``tiny_problem(seed)``: images (N, 1, 8, 8) and labels (N,)."""
    with torch.random.fork_rng(devices=[]):
        _, images, labels, order = _tiny(seed)
    return images[order[TRAINED:]], labels[order[TRAINED:]]


def _tiny(seed: int) -> tuple[Any, Any, Any, Any]:
    """Return a small network, all digits and their labels, and an order of them, which the seed decides."""
    torch.manual_seed(seed)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(128, 10),
    )
    return (
        model,
        images,
        torch.tensor(digits.target),
        torch.randperm(len(digits.target)),
    )


def rounded_tensors(
    model: Any, layer: Any, batch: tuple[Any, Any], loss: Any
) -> dict[str, Any]:
    """Return what a step rounds in a layer, before it is rounded: weights, inputs, gradients of the output."""
    tensors = {"weights": layer.weight.detach()}
    inputs, labels = batch
    with (
        layer.register_forward_pre_hook(
            lambda module, given: tensors.update(inputs=given[0].detach())
        ),
        layer.register_full_backward_pre_hook(
            lambda module, given: tensors.update(gradients=given[0].detach())
        ),
    ):
        loss(model(inputs), labels).backward()
    model.zero_grad()
    return tensors
