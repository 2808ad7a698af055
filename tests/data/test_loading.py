"""Batches that other processes read: how many read, through which memory, and that their values are what they were."""

import itertools
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from cpt_lab.data import detection_batches, image_batches, loading
from cpt_lab.data.image_batches import EVALUATION_BATCH, FileBatches, evaluation_batches
from cpt_lab.data.images import IMAGENET_MEAN, IMAGENET_STD, load_images
from cpt_lab.data.loading import readers
from cpt_lab.data.pictures import annotated_picture
from cpt_lab.experiments.detection import DetectionRecipe
from cpt_lab.experiments.image import ImageRecipe
from cpt_lab.experiments.spec import run_spec
from cpt_lab.sweeps.sweep import run_grid
from cpt_lab.training.session import task_of

CPU = torch.device("cpu")
MB = 10**6
IMAGES = ImageRecipe(
    task="image", dataset="pets/", model="resnet8_w8", quantized="cifar", steps=4, batch=4, lr=0.1, q_min=3, n_cycles=1,
    size=72, crop="resized", flip=True, valid_images=2,
)  # fmt: skip
PICTURES = DetectionRecipe(
    task="detection", dataset="x/", model="retinanet", quantized="all", steps=4, batch=2, lr=1e-3, q_min=5, size=40,
    max_size=70, flip=True,
)  # fmt: skip


@pytest.fixture
def pets(tmp_path, monkeypatch):
    """Images of their own sizes, one file for every class and number."""
    monkeypatch.setenv("CPT_DATA_DIR", str(tmp_path))
    rng = np.random.default_rng(0)
    for split, count in (("train", 5), ("val", 3)):
        for kind in ("cat", "dog"):
            (tmp_path / "pets" / split / kind).mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (80 + i, 90, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "pets" / split / kind / f"{i}.png")
    return load_images(IMAGES)


# cores, megabytes of /dev/shm (None: no such folder), megabytes of a batch -> processes, or what is said
READERS = {
    "as many as cores": (6, 64, 1, 6, None),
    "no limit": (6, None, 1000, 6, None),
    "no more than are of use": (200, None, 1, loading.MOST, None),
    "just room for all": (4, 64, 8, 4, None),
    "room for some": (4, 63, 8, 3, "has 63 MB for this run, and each of 4 processes that read needs 16 MB; start the "
                      "container with --ipc=host, or --shm-size=65m: as it is only 3 of them read"),
    "room for none": (4, 64, 38, OSError, r"has 64 MB for this run, .* needs 76 MB; .* --shm-size=305m$"),
}  # fmt: skip


@pytest.mark.parametrize("case", READERS)
def test_readers_are_as_many_as_cores_and_shared_memory_allow(case, monkeypatch):
    cores, room, batch, wanted, said = READERS[case]
    monkeypatch.setattr(loading, "usable_cores", lambda: cores)
    monkeypatch.setattr(loading, "shared_memory", lambda: None if room is None else room * MB)
    if wanted is OSError:
        with pytest.raises(OSError, match=said):
            readers(batch * MB)
    elif said:
        with pytest.warns(UserWarning, match=said):
            assert readers(batch * MB) == wanted
    else:
        assert readers(batch * MB) == wanted


def test_too_little_shared_memory_is_noticed_before_anything_runs(pets, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "shared_memory", lambda: 64 * MB)
    spec = run_spec(IMAGES, "static 8", q_max=8, seed=0, scale="smoke")
    assert task_of(spec)(spec, CPU).workers == loading.usable_cores()
    monkeypatch.setattr(loading, "shared_memory", lambda: 2 * MB)
    with pytest.raises(OSError, match="/dev/shm has 2 MB"):
        run_grid([spec], tmp_path / "rows.jsonl", workers=0)
    assert not (tmp_path / "rows.jsonl").exists()


NORMALIZED = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)])


def test_images_are_read_as_bytes_and_normalised_as_torchvision_does(pets, device):
    batches = FileBatches(pets.train, IMAGES, 0, device, workers=0)
    found, seen = list(itertools.islice(batches.iterate(0), 5)), []
    for keys in itertools.islice(batches._keys(0), 5):
        read = [batches.data[key] for key in keys]
        assert {(image.dtype, image.shape) for image, _ in read} == {(torch.uint8, (3, 72, 72))}
        seen.append((torch.stack([NORMALIZED(image) for image, _ in read]), torch.tensor([label for _, label in read])))
    tests = image_batches._Test(pets.test, 72)
    found += evaluation_batches(pets.test, pets, 72, device, 0)
    seen.append((torch.stack([NORMALIZED(image) for image, _ in tests]), torch.tensor([label for _, label in tests])))
    assert len(found) == len(seen) == 6
    for (images, labels), (wanted, numbers) in zip(found, seen, strict=True):
        assert images.device.type == labels.device.type == device.type
        assert torch.equal(labels.cpu(), numbers)
        if device.type == "cpu":
            assert torch.equal(images, wanted)
        torch.testing.assert_close(images.cpu(), wanted)


def test_pictures_are_read_as_bytes_and_normalised_without_their_padding(device):
    generator = torch.Generator().manual_seed(0)
    sizes = ((50, 60), (60, 50), (40, 70))
    pictures = tuple(
        annotated_picture(torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator), size,
                          [[0, 0, 9, 9]], [1], [False])
        for size in sizes
    )  # fmt: skip
    groups = detection_batches.aspect_groups(pictures, PICTURES.batch)
    data = detection_batches._Ready(pictures, groups, PICTURES, None)
    found = list(detection_batches.evaluation_batches(pictures, PICTURES, 0, device))
    assert len(found) == len(groups) == 2
    for batch, group in zip(found, range(2), strict=True):
        read = data[0, group]
        assert read.images.dtype == torch.uint8
        wanted = torch.zeros(read.images.shape)
        for place, image, (h, w) in zip(wanted, read.images, read.sizes, strict=True):
            place[:, :h, :w] = v2.functional.normalize(image[:, :h, :w].float() / 255, IMAGENET_MEAN, IMAGENET_STD)
        if device.type == "cpu":
            assert torch.equal(batch.images, wanted)
        torch.testing.assert_close(batch.images.cpu(), wanted)
        assert {t.device.type for target in batch.targets for t in target.values()} == {device.type}


def test_no_batch_is_larger_than_the_shared_memory_was_asked_for(pets):
    sampled = itertools.islice(FileBatches(pets.train, IMAGES, 0, CPU, 0)._keys(0), 3)
    assert image_batches.bytes_read(IMAGES) == 3 * 72 * 72 * (max(map(len, sampled)) + EVALUATION_BATCH)
    shapes = [(s, math.floor(70 / 40 * s)) for s in (40, 80)]
    pictures = [annotated_picture(torch.zeros(3, *s, dtype=torch.uint8), s, [], [], []) for s in shapes]
    turned = [annotated_picture(p.picture.mT.contiguous(), p.size[::-1], [], [], []) for p in pictures]
    data = detection_batches._Ready(pictures + turned, [[0, 2], [1, 3]], PICTURES, None)
    assert max(data[0, group].images.numel() for group in (0, 1)) * 2 == detection_batches.bytes_read(PICTURES)


def test_one_loader_reads_all_epochs_and_takes_none_of_torchs_random_numbers(pets, monkeypatch):
    made = []
    monkeypatch.setattr(image_batches, "loader", lambda *a, **k: made.append(a) or loading.loader(*a, **k))
    before = torch.get_rng_state()
    batches = FileBatches(pets.train, IMAGES, 0, CPU, workers=1)
    assert batches.steps_per_epoch == 2
    assert len(list(itertools.islice(batches.iterate(1), 6))) == 6
    assert len(made) == 1
    list(evaluation_batches(pets.test, pets, 72, CPU, 1))
    assert torch.equal(before, torch.get_rng_state())
