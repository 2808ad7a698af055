"""Processes that read data: they never ask for a GPU, start once, and what they read reaches one without waiting."""

import pickle
import subprocess
import sys
from itertools import islice
from typing import ClassVar

import torch
from helpers import smoke_spec
from phantom import CUDA, Phantom
from PIL import Image
from torch.utils.data import DataLoader

from cpt_lab.data import loading
from cpt_lab.data.detection import random_detection
from cpt_lab.data.detection_batches import _Ready
from cpt_lab.data.image_batches import FileBatches, _Test, evaluation_batches
from cpt_lab.tasks.graph import GraphTask, _Samples

CPU = torch.device("cpu")
FILES = [(Image.effect_noise((40, 50), 90).convert("RGB"), i) for i in range(3)]
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


def recipe():
    return smoke_spec("digits", batch=2, size=32).recipe


def files(device):
    return FileBatches(FILES, recipe(), 0, device, workers=0)


def test_workers_ask_for_no_gpu():
    """What they are sent, they load and read in a process that would notice."""
    pictures, graph = smoke_spec("digit-scenes").recipe, GraphTask(smoke_spec("digits-graph", model="sage"), CPU)
    sent = [
        (files(CPU).data, (0, 1)),
        (_Test(FILES, 32), 1),
        (_Ready(random_detection(pictures).train, [[0], [1]], pictures, 0), (0, 1)),
        (_Samples(graph.graph, graph.rows["train"], 8, [2, 2], 0), 3),
    ]
    worker = [sys.executable, "-c", WORKER]
    done = subprocess.run(worker, input=pickle.dumps(sent), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == "['tuple', 'tuple', 'Batch', 'tuple'] []\n"  # nor do they load what trains


class Loader(DataLoader):
    """A loader that pins what it is told to: torch's own pins nothing where there is no GPU."""

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


def test_images_from_disk_reach_a_gpu_without_waiting(monkeypatch):
    monkeypatch.setattr(loading, "DataLoader", Loader)
    monkeypatch.setattr(Loader, "started", 0)
    torch.manual_seed(0)
    wanted = list(islice(files(CPU).iterate(0), 5))  # two epochs and a half
    assert Loader.started == 1
    on_cpu = list(evaluation_batches(FILES, None, 32, CPU, 0))
    # the model's random numbers are left alone
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(0))
    with Phantom() as gpu:
        Loader.pinned = []
        found = [*islice(files(CUDA).iterate(0), 5), *evaluation_batches(FILES, None, 32, CUDA, 0)]
        assert not gpu.waits
        assert Loader.pinned == [True, True]  # a copy from other memory waits for the CPU
        for (x, y), (images, labels) in zip(found, wanted + on_cpu, strict=True):
            assert (x.device, y.device) == (CUDA, CUDA)
            assert torch.equal(x.cpu(), images)
            assert torch.equal(y.cpu(), labels)
