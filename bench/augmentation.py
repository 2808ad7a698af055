"""Throughput of batched crop and flip relative to per-image PIL transforms: ``python -m bench.augmentation``.

Both make normalised float32 batches of 128 random 32 x 32 images, interleaved in one process on one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torchvision.transforms import v2

from cpt_lab.data.image_batches import array_batches
from cpt_lab.data.image_readers import ArrayImages
from cpt_lab.data.images import CIFAR_MEAN, CIFAR_STD, ImageData
from cpt_lab.experiments.recipes import recipe


def main() -> None:
    """Print images per second of both, and the ratio of their medians."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images = torch.randint(0, 256, (5_000, 3, 32, 32), dtype=torch.uint8)
    split = ArrayImages(images, torch.zeros(len(images), dtype=torch.int64))
    data = ImageData("random", 10, 3, CIFAR_MEAN, CIFAR_STD, split, split, split, "")
    batched = array_batches(split, data, recipe("paper", "cifar10"), 0, torch.device("cpu"), 0)
    pil = [v2.functional.to_pil_image(i) for i in images[:512]]
    transform = v2.Compose(
        [
            v2.RandomCrop(32, padding=4),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(CIFAR_MEAN, CIFAR_STD),
        ]
    )
    variants: dict[str, Callable[[], object]] = {
        "per-image PIL": lambda: torch.stack([transform(i) for i in pil[:128]]),
        "batched": lambda: next(batched),
    }
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    for step in range(21):
        for name, make in variants.items():
            start = time.perf_counter()
            make()
            if step:  # the first round warms up
                speeds[name].append(128 / (time.perf_counter() - start))
    medians = {name: statistics.median(v) for name, v in speeds.items()}
    ratio = medians["batched"] / medians["per-image PIL"]
    print(
        f"crop, flip, normalise: batched {ratio:5.1f}x per-image PIL   "
        + ", ".join(f"{name} {v:,.0f} images/s" for name, v in medians.items())
    )


if __name__ == "__main__":
    main()
