"""Data-loading processes: their number, shared memory and results, and no use of a GPU."""

import itertools
import math
import pickle
import subprocess
import sys
from typing import ClassVar

import pytest
import torch
from dataset_layouts import picture, write
from fake_gpu import CUDA, Phantom
from helpers import refused, smoke_spec
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from cpt_lab.data import detection_batches, image_batches, loading
from cpt_lab.data.detection import annotate_image, random_detection
from cpt_lab.data.detection_batches import _ImageGroups
from cpt_lab.data.image_batches import (
    EVALUATION_IMAGES,
    evaluation_batches,
    file_batches,
    training_files,
)
from cpt_lab.data.images import IMAGENET_MEAN, IMAGENET_STD, load_images
from cpt_lab.data.loading import reader_count
from cpt_lab.data.random_streams import batch_keys
from cpt_lab.experiments.spec import run_spec
from cpt_lab.sweeps.sweep import run_grid
from cpt_lab.tasks.base import load_task_class
from cpt_lab.tasks.graph import GraphTask, _SampledBatches

CPU = torch.device("cpu")
MB = 10**6
IMAGES = smoke_spec(
    "digits",
    dataset="pets/",
    batch=4,
    size=72,
    crop="resized",
    flip=True,
    valid_images=2,
).recipe
PICTURES = smoke_spec("digit-scenes", batch=2, size=40, max_size=70, flip=True).recipe


@pytest.fixture
def pets(data_folder):
    """Load images of distinct sizes, one file per class and number."""
    places = [
        f"{split}/{kind}/{i}.png"
        for split, n in (("train", 5), ("val", 3))
        for kind in "ab"
        for i in range(n)
    ]
    write(
        data_folder / "pets",
        {name: picture((80 + i, 90), seed=i) for i, name in enumerate(places)},
    )
    return load_images(IMAGES)


# cores, megabytes of /dev/shm (None: no such folder), megabytes of a batch -> processes, or what is said
READERS = {
    "as many as cores": (6, 64, 1, 6, None),
    "no limit": (6, None, 1000, 6, None),
    "no more than are of use": (200, None, 1, loading.MAX_READERS, None),
    "just room for all": (4, 64, 8, 4, None),
    "room for some": (
        4,
        63,
        8,
        3,
        "has 63 MB for this run, and each of 4 processes that read needs 16 MB; start the "
        "container with --ipc=host, or --shm-size=65m: as it is only 3 of them read",
    ),
    "room for none": (
        4,
        64,
        38,
        OSError,
        r"has 64 MB for this run, .* needs 76 MB; .* --shm-size=305m$",
    ),
}


@pytest.mark.parametrize("case", READERS)
def test_readers_follow_cores_and_shared_memory(case, monkeypatch):
    cores, room, batch, wanted, said = READERS[case]
    monkeypatch.setattr(loading, "usable_cores", lambda: cores)
    monkeypatch.setattr(
        loading, "shared_memory", lambda: None if room is None else room * MB
    )
    if wanted is OSError:
        refused(said, reader_count, batch * MB, error=OSError)
    elif said:
        with pytest.warns(UserWarning, match=said):
            assert reader_count(batch * MB) == wanted
    else:
        assert reader_count(batch * MB) == wanted


def test_run_grid_rejects_small_shared_memory(pets, tmp_path, monkeypatch):
    """Report too little shared memory before any run starts."""
    monkeypatch.setattr(loading, "shared_memory", lambda: 64 * MB)
    spec = run_spec(IMAGES, "static 8", q_max=8, seed=0, scale="smoke")
    assert load_task_class(spec)(spec, CPU).workers == loading.usable_cores()
    monkeypatch.setattr(loading, "shared_memory", lambda: 2 * MB)
    refused(
        "/dev/shm has 2 MB",
        run_grid,
        [spec],
        tmp_path / "rows.jsonl",
        workers=0,
        error=OSError,
    )
    assert not (tmp_path / "rows.jsonl").exists()


NORMALIZED = v2.Compose(
    [v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
)


def test_image_batches_normalise_like_torchvision(pets, device):
    batches, data = (
        file_batches(pets.train, IMAGES, 0, device, 0, 0),
        training_files(pets.train, IMAGES, 0),
    )
    found, seen = list(itertools.islice(batches, 5)), []
    for keys in itertools.islice(batch_keys(len(pets.train), IMAGES.batch, 0, 0), 5):
        read = [data[key] for key in keys]
        assert {(image.dtype, image.shape) for image, _ in read} == {
            (torch.uint8, (3, 72, 72))
        }
        seen.append(
            (
                torch.stack([NORMALIZED(image) for image, _ in read]),
                torch.tensor([label for _, label in read]),
            )
        )
    evaluated = v2.Compose([v2.Resize(82), v2.CenterCrop(72), v2.PILToTensor()])
    tests = [(evaluated(image), label) for image, label in pets.test]
    found += evaluation_batches(pets.test, pets, 72, device, 0)
    seen.append(
        (
            torch.stack([NORMALIZED(image) for image, _ in tests]),
            torch.tensor([label for _, label in tests]),
        )
    )
    assert len(found) == len(seen) == 6
    for (images, labels), (wanted, numbers) in zip(found, seen, strict=True):
        assert images.device.type == labels.device.type == device.type
        assert torch.equal(labels.cpu(), numbers)
        if device.type == "cpu":
            assert torch.equal(images, wanted)
        torch.testing.assert_close(images.cpu(), wanted)


def test_detection_batches_normalise_without_padding(device):
    generator = torch.Generator().manual_seed(0)
    sizes = ((50, 60), (60, 50), (40, 70))
    pictures = tuple(
        annotate_image(
            torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator),
            size,
            [[0, 0, 9, 9]],
            [1],
            [False],
        )
        for size in sizes
    )
    groups = detection_batches.aspect_groups(pictures, PICTURES.batch)
    data = _ImageGroups(pictures, PICTURES, None)
    found = list(detection_batches.evaluation_batches(pictures, PICTURES, 0, device))
    assert len(found) == len(groups) == 2
    for batch, group in zip(found, range(2), strict=True):
        read = data[0, group]
        assert read.images.dtype == torch.uint8
        wanted = torch.zeros(read.images.shape)
        for place, image, (h, w) in zip(wanted, read.images, read.sizes, strict=True):
            place[:, :h, :w] = v2.functional.normalize(
                image[:, :h, :w].float() / 255, IMAGENET_MEAN, IMAGENET_STD
            )
        if device.type == "cpu":
            assert torch.equal(batch.images, wanted)
        torch.testing.assert_close(batch.images.cpu(), wanted)
        assert {t.device.type for target in batch.targets for t in target.values()} == {
            device.type
        }


def test_bytes_read_bounds_batch_size(pets):
    sampled = itertools.islice(batch_keys(len(pets.train), IMAGES.batch, 0, 0), 3)
    assert image_batches.batch_bytes(IMAGES) == 3 * 72 * 72 * (
        max(map(len, sampled)) + EVALUATION_IMAGES
    )
    shapes = [(s, math.floor(70 / 40 * s)) for s in (40, 80)]
    pictures = [
        annotate_image(torch.zeros(3, *s, dtype=torch.uint8), s, [], [], [])
        for s in shapes
    ]
    turned = [
        annotate_image(p.image.mT.contiguous(), p.size[::-1], [], [], [])
        for p in pictures
    ]
    data = _ImageGroups(pictures + turned, PICTURES, None)
    data.groups = [[0, 2], [1, 3]]  # of shapes that need most
    assert max(
        data[0, group].images.numel() for group in (0, 1)
    ) * 2 == detection_batches.batch_bytes(PICTURES)


FILES = [(Image.effect_noise((40, 50), 90).convert("RGB"), i) for i in range(3)]
RECIPE = smoke_spec("digits", batch=2, size=32).recipe
WORKER = """
import pickle, sys, torch
def touched(*args, **kwargs):
    raise AssertionError("a worker has asked for CUDA")
torch.cuda._lazy_init = torch.Tensor.pin_memory = touched
for name in ("_cuda_init", "_cuda_getDeviceCount", "_cuda_getCurrentRawStream"):
    setattr(torch._C, name, touched)
given = pickle.load(sys.stdin.buffer)
print([type(data[key]).__name__ for data, key in given], [n for n in sys.modules if n.startswith("cpt_lab.training")])
"""


def files(device):
    return file_batches(FILES, RECIPE, 0, device, 0, 0)


@pytest.mark.slow
def test_data_workers_avoid_gpu():
    """Load what workers receive in a process that notices any use of a GPU."""
    pictures, graph = (
        smoke_spec("digit-scenes").recipe,
        GraphTask(smoke_spec("digits-graph", model="sage"), CPU),
    )
    sent = [
        (training_files(FILES, RECIPE, 0), (0, 1)),
        (_ImageGroups(random_detection(pictures).train, pictures, 0), (0, 0)),
        (
            _SampledBatches(graph.graph, graph.rows["train"], [2, 2], 0),
            (3, [(0, 5), (0, 1)]),
        ),
    ]
    worker = [sys.executable, "-c", WORKER]
    done = subprocess.run(
        worker, input=pickle.dumps(sent), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    assert (
        done.stdout.decode() == "['tuple', 'Batch', 'tuple'] []\n"
    )  # nor do they load what trains


class Loader(DataLoader):
    """Data loader that pins memory on request, also without a GPU."""

    started = 0
    pinned: ClassVar = []

    def __init__(self, *args, pin_memory, **options):
        super().__init__(*args, **options)
        self.pins = pin_memory
        Loader.started += 1
        Loader.pinned.append(pin_memory)

    def __iter__(self):
        for batch in super().__iter__():
            yield tuple(part.pin_memory() if self.pins else part for part in batch)


def test_image_batches_copy_to_gpu_asynchronously(monkeypatch):
    monkeypatch.setattr(loading, "DataLoader", Loader)
    monkeypatch.setattr(Loader, "started", 0)
    torch.manual_seed(0)
    wanted = list(itertools.islice(files(CPU), 5))  # two epochs and a half
    assert Loader.started == 1
    on_cpu = list(evaluation_batches(FILES, None, 32, CPU, 0))
    # the model's random numbers are left alone
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(0))
    with Phantom() as gpu:
        Loader.pinned = []
        found = [
            *itertools.islice(files(CUDA), 5),
            *evaluation_batches(FILES, None, 32, CUDA, 0),
        ]
        assert not gpu.waits
        assert Loader.pinned == [
            True,
            True,
        ]  # a copy from other memory waits for the CPU
        for (x, y), (images, labels) in zip(found, wanted + on_cpu, strict=True):
            assert (x.device, y.device) == (CUDA, CUDA)
            assert torch.equal(x.cpu(), images)
            assert torch.equal(y.cpu(), labels)
