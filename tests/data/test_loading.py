"""Data-loading processes: their number, shared memory and results, and no use of a GPU."""

import itertools
import pickle
import subprocess
import sys
from typing import ClassVar

import pytest
import torch
from dataset_layouts import pictures, write
from fake_gpu import CUDA, Phantom
from helpers import refused, smoke_spec
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
    dataset="mine/",
    batch=4,
    size=72,
    crop="resized",
    flip=True,
    valid_images=2,
).recipe
SCENES = smoke_spec("digit-scenes", batch=2, size=40, max_size=70, flip=True).recipe


@pytest.fixture
def images(data_folder):
    """Load ten images to train on and six to test on, which are read from disk."""
    names = [f"{kind}/{i}.png" for kind in "ab" for i in range(5)]
    train = pictures(*(f"train/{name}" for name in names), size=(80, 90))
    test = pictures(*(f"val/{name}" for name in names[:3] + names[5:8]), size=(81, 90))
    write(data_folder / "mine", train | test)
    return load_images(IMAGES)


# --- number of processes --------------------------------------------------------------------------


def limit_machine(monkeypatch, cores, shared_megabytes):
    memory = None if shared_megabytes is None else shared_megabytes * MB
    monkeypatch.setattr(loading, "usable_cores", lambda: cores)
    monkeypatch.setattr(loading, "shared_memory", lambda: memory)


@pytest.mark.parametrize(
    ("cores", "shared_megabytes", "batch_megabytes", "readers"),
    [
        (6, 64, 1, 6),
        (6, None, 1000, 6),  # no folder of shared memory
        (200, None, 1, loading.MAX_READERS),
        (4, 64, 8, 4),  # just room for all
    ],
)
def test_readers_follow_cores_and_shared_memory(
    cores, shared_megabytes, batch_megabytes, readers, monkeypatch
):
    limit_machine(monkeypatch, cores, shared_megabytes)
    assert reader_count(batch_megabytes * MB) == readers


def test_readers_are_fewer_in_small_shared_memory(monkeypatch):
    limit_machine(monkeypatch, 4, 63)
    message = (
        "has 63 MB for this run, and each of 4 processes that read needs 16 MB; start the "
        "container with --ipc=host, or --shm-size=65m: as it is only 3 of them read"
    )
    with pytest.warns(UserWarning, match=message):
        assert reader_count(8 * MB) == 3
    limit_machine(monkeypatch, 4, 64)
    message = r"has 64 MB for this run, .* needs 76 MB; .* --shm-size=305m$"
    refused(message, reader_count, 38 * MB, error=OSError)


def test_run_grid_rejects_small_shared_memory(images, tmp_path, monkeypatch):
    """Report too little shared memory before any run starts."""
    limit_machine(monkeypatch, 3, 64)
    spec = run_spec(IMAGES, "static 8", q_max=8, seed=0, scale="smoke")
    assert load_task_class(spec)(spec, CPU).workers == 3
    limit_machine(monkeypatch, 3, 2)
    rows = tmp_path / "rows.jsonl"
    message = "/dev/shm has 2 MB"
    refused(message, run_grid, [spec], rows, workers=0, error=OSError)
    assert not rows.exists()


def test_batch_bytes_bounds_image_batches(images):
    keys = batch_keys(len(images.train), IMAGES.batch, 0, 0)
    largest = max(map(len, itertools.islice(keys, 3)))
    count = largest + EVALUATION_IMAGES
    assert image_batches.batch_bytes(IMAGES) == 3 * 72 * 72 * count


def test_batch_bytes_bounds_detection_batches():
    """Compare with the batches of the two shapes that need most."""
    sides = ((40, 70), (70, 40), (80, 140), (140, 80))
    scenes = [
        annotate_image(torch.zeros(3, *size, dtype=torch.uint8), size, [], [], [])
        for size in sides
    ]
    data = _ImageGroups(scenes, SCENES, None)
    data.groups = [[0, 1], [2, 3]]
    largest = max(data[0, group].images.numel() for group in (0, 1))
    assert detection_batches.batch_bytes(SCENES) == 2 * largest


# --- normalised batches ---------------------------------------------------------------------------

NORMALIZED = v2.Compose(
    [v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
)


def assert_same_pixels(result, expected, device):
    """Assert that pixels are equal bit for bit on the CPU, and nearly on a GPU."""
    assert result.device.type == device.type
    if device.type == "cpu":
        assert torch.equal(result, expected)
    torch.testing.assert_close(result.cpu(), expected)


def test_image_batches_normalise_like_torchvision(images, device):
    data = training_files(images.train, IMAGES, 0)
    keys = batch_keys(len(images.train), IMAGES.batch, 0, 0)
    read = [[data[key] for key in batch] for batch in itertools.islice(keys, 5)]
    stored = {(image.dtype, image.shape) for batch in read for image, _ in batch}
    assert stored == {(torch.uint8, (3, 72, 72))}
    evaluated = v2.Compose([v2.Resize(82), v2.CenterCrop(72), v2.PILToTensor()])
    read.append([(evaluated(image), label) for image, label in images.test])

    batches = file_batches(images.train, IMAGES, 0, device, 0, 0)
    result = list(itertools.islice(batches, 5))
    result += evaluation_batches(images.test, images, 72, device, 0)
    for (pixels, labels), samples in zip(result, read, strict=True):
        expected = torch.stack([NORMALIZED(image) for image, _ in samples])
        assert_same_pixels(pixels, expected, device)
        assert labels.device.type == device.type
        assert labels.tolist() == [label for _, label in samples]


def test_detection_batches_normalise_without_padding(device):
    generator = torch.Generator().manual_seed(0)
    scenes = []
    for size in ((50, 60), (60, 50), (40, 70)):
        shape = (3, *size)
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scenes.append(annotate_image(pixels, size, [[0, 0, 9, 9]], [1], [False]))
    data = _ImageGroups(scenes, SCENES, None)
    result = list(detection_batches.evaluation_batches(scenes, SCENES, 0, device))
    assert (
        len(result) == len(detection_batches.aspect_groups(scenes, SCENES.batch)) == 2
    )
    for group, batch in enumerate(result):
        read = data[0, group]
        assert read.images.dtype == torch.uint8
        expected = torch.zeros(read.images.shape)
        for place, image, (h, w) in zip(expected, read.images, read.sizes, strict=True):
            pixels = image[:, :h, :w].float() / 255
            normalized = v2.functional.normalize(pixels, IMAGENET_MEAN, IMAGENET_STD)
            place[:, :h, :w] = normalized
        assert_same_pixels(batch.images, expected, device)
        tensors = [t for target in batch.targets for t in target.values()]
        assert {t.device.type for t in tensors} == {device.type}


# --- GPU ------------------------------------------------------------------------------------------

FILES = [
    (v2.functional.to_pil_image(torch.full((3, 40, 50), 9 * i, dtype=torch.uint8)), i)
    for i in range(3)
]
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


@pytest.mark.slow
def test_data_workers_avoid_gpu():
    """Load what workers receive in a process that notices any use of a GPU, and any import of training code."""
    scenes = smoke_spec("digit-scenes").recipe
    graph = GraphTask(smoke_spec("digits-graph", model="sage"), CPU)
    sampled = _SampledBatches(graph.graph, graph.rows["train"], [2, 2], 0)
    sent = [
        (training_files(FILES, RECIPE, 0), (0, 1)),
        (_ImageGroups(random_detection(scenes).train, scenes, 0), (0, 0)),
        (sampled, (3, [(0, 5), (0, 1)])),
    ]
    worker = [sys.executable, "-c", WORKER]
    content = pickle.dumps(sent)
    done = subprocess.run(worker, input=content, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == "['tuple', 'Batch', 'tuple'] []\n"


class PinningLoader(DataLoader):
    """Data loader that pins memory on request, also without a GPU, and records requests."""

    pinned: ClassVar[list[bool]]

    def __init__(self, *args, pin_memory, **options):
        super().__init__(*args, **options)
        self.pins = pin_memory
        self.pinned.append(pin_memory)

    def __iter__(self):
        for batch in super().__iter__():
            yield tuple(part.pin_memory() if self.pins else part for part in batch)


def test_image_batches_copy_to_gpu_asynchronously(monkeypatch):
    monkeypatch.setattr(loading, "DataLoader", PinningLoader)
    monkeypatch.setattr(PinningLoader, "pinned", [], raising=False)

    def batches(device):
        """Return two and a half epochs of training, and an evaluation."""
        train = file_batches(FILES, RECIPE, 0, device, 0, 0)
        test = evaluation_batches(FILES, None, 32, device, 0)
        return [*itertools.islice(train, 5), *test]

    torch.manual_seed(0)
    expected = batches(CPU)
    assert PinningLoader.pinned == [False, False]  # one loader for all epochs
    # The random numbers of the model are left alone.
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(0))
    with Phantom() as gpu:
        result = batches(CUDA)
        assert not gpu.waits
        # Copies from other than pinned memory would wait for the CPU.
        assert PinningLoader.pinned[2:] == [True, True]
        for batch, wanted_batch in zip(result, expected, strict=True):
            for part, wanted_part in zip(batch, wanted_batch, strict=True):
                assert part.device == CUDA
                assert torch.equal(part.cpu(), wanted_part)
