import functools
import hashlib
import http.server
import itertools
import json
import pickle
import re
import shutil
import tarfile
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
import torchvision
from helpers import refused
from layouts import archive, class_folders, image_archives, image_folder, write
from PIL import Image

from cpt_lab import data
from cpt_lab.data.common import class_count
from cpt_lab.data.files import DataNotFoundError, check_data
from cpt_lab.data.image_batches import array_batches, evaluation_batches, file_batches
from cpt_lab.data.image_readers import ArrayImages
from cpt_lab.data.images import load_images
from cpt_lab.experiments.recipes import recipe
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.paths import results_dir

CPU = torch.device("cpu")


def small(dataset, **changes):
    base = replace(recipe("demo", "cifar10"), dataset=dataset, batch=4, train_images=None, valid_images=2)
    return replace(base, **{"test_images": None, **changes})


@pytest.mark.parametrize("store", ["image_digits", "deficit_digits"])
def test_digits_are_split_as_they_were_for_the_committed_rows(store):
    row = json.loads((results_dir() / f"{store}.jsonl").read_text().splitlines()[0])
    images = load_images(RunSpec.from_dict(row["spec"]).recipe)
    assert (images.checksum, images.classes) == (row["data_checksum"], 10)
    x, y = next(evaluation_batches(images.test, images, 8, CPU, 0))
    assert (x.min(), x.max(), y.dtype) == (0, pytest.approx(1.0), torch.int64)


# --- batches --------------------------------------------------------------------------------------


def batches_of(images, seed=0, start=0, **changes):
    r = small("x/", size=6, **{"crop": 2, "flip": True, **changes})
    labels = torch.arange(len(images))
    holder = data.images.ImageData("t", 10, 1, (0.0,), (1 / 255,), None, None, None, "")
    return array_batches(ArrayImages(images, labels), holder, r, seed, CPU, start)


def test_an_epoch_holds_every_image_once_and_the_last_batch_is_small():
    images = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).expand(10, 1, 6, 6)
    batches = list(itertools.islice(batches_of(images), 6))
    for x, labels in batches:  # whatever the crop, there is some of the image in the middle
        assert torch.equal(x[:, 0, 3, 3], labels.float())
    numbers = [labels for _, labels in batches]
    epochs = [torch.cat(numbers[:3]).tolist(), torch.cat(numbers[3:]).tolist()]
    assert [sorted(e) for e in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    assert len(numbers[2]) == 2


def test_every_offset_is_as_likely_as_the_others_and_so_is_a_mirror():
    image = torch.randint(0, 256, (1, 6, 6), dtype=torch.uint8)
    x, _ = next(batches_of(image.expand(2500, 1, 6, 6), batch=2500))
    padded = torch.nn.functional.pad(image, (2, 2, 2, 2))
    windows = [padded[:, dy : dy + 6, dx : dx + 6] for dy in range(5) for dx in range(5)]
    places = [(w.flip(-1) if flip else w).float().numpy().tobytes() for w in windows for flip in (False, True)]
    assert len(set(places)) == 50
    counts = torch.tensor([places.index(found.numpy().tobytes()) for found in x]).bincount(minlength=50).view(25, 2)
    assert 60 < counts.sum(1).min() <= counts.sum(1).max() < 150  # of 100
    assert abs(float(counts.sum(0)[1]) / 2500 - 0.5) < 0.04  # four standard deviations


# --- CIFAR in its real layout ---------------------------------------------------------------------


def write_cifar10(folder, monkeypatch):
    """Write CIFAR-10's pickles with few images, and tell torchvision their checksums instead of the official ones."""
    base = folder / "cifar-10-batches-py"
    base.mkdir()
    rng = np.random.default_rng(0)

    def part(name, content):
        raw = pickle.dumps(content)
        (base / name).write_bytes(raw)
        return [name, hashlib.md5(raw).hexdigest()]

    def images(n):
        return {"data": rng.integers(0, 256, (n, 3072), dtype=np.uint8), "labels": [i % 10 for i in range(n)]}

    kind = torchvision.datasets.CIFAR10
    monkeypatch.setattr(kind, "train_list", [part(f"data_batch_{i}", images(10)) for i in range(1, 6)])
    monkeypatch.setattr(kind, "test_list", [part("test_batch", images(10))])
    meta = part("batches.meta", {"label_names": [f"class {i}" for i in range(10)]})
    monkeypatch.setattr(kind, "meta", {"filename": meta[0], "key": "label_names", "md5": meta[1]})


def test_cifar_through_torchvision(data_folder, monkeypatch):
    write_cifar10(data_folder, monkeypatch)
    images = load_images(small("cifar10", size=32, valid_images=5))
    assert [len(s) for s in (images.train, images.valid, images.test)] == [45, 5, 10]
    assert images.title == "CIFAR-10"
    original = torchvision.datasets.CIFAR10(data_folder, train=False).data[3]
    assert torch.equal(images.test.images[3], torch.from_numpy(original).permute(2, 0, 1))
    x, _ = next(evaluation_batches(images.test, images, 32, CPU, 0))
    for channel, (mean, std) in enumerate(((0.4914, 0.2023), (0.4822, 0.1994), (0.4465, 0.2010))):
        wanted = (torch.from_numpy(original[..., channel]) / 255 - mean) / std
        assert torch.allclose(x[3, channel], wanted, atol=1e-5)
    shrunk = load_images(small("cifar10", size=16))
    assert shrunk.test.images.shape[-2:] == (16, 16)
    assert shrunk.title == "CIFAR-10, 16 x 16"
    assert shrunk.checksum != images.checksum


def test_damaged_cifar_is_refused(data_folder, monkeypatch):
    write_cifar10(data_folder, monkeypatch)
    (data_folder / "cifar-10-batches-py" / "test_batch").write_bytes(b"damaged")
    refused("or is damaged", load_images, small("cifar10", size=32), error=DataNotFoundError)


# --- own images -----------------------------------------------------------------------------------


def image_files(folder, size=20):
    write(folder, image_folder(("cat", "dog"), ("cat", "dog"), (6, 3), (size, size + 4), "JPEG"))


@pytest.mark.parametrize("packed", [True, False])
def test_archives(packed, data_folder):
    folder = write(data_folder / "mine", image_archives(packed, held="val"))
    by_folder = load_images(small("mine/", size=8))
    by_name = load_images(small("mine/train.npz,mine/val.npz", size=8))
    assert by_folder.checksum == by_name.checksum
    assert by_folder.title == "own images (mine)"
    assert (by_folder.classes, by_folder.channels, len(by_folder.test)) == (3, 3, 6)
    if not packed:
        with np.load(folder / "val.npz") as z:
            assert torch.equal(by_folder.test.images, torch.from_numpy(z["data"]).permute(0, 3, 1, 2))


def test_a_folder_with_train_and_test_is_read(data_folder):
    image_files(data_folder / "pets")
    images = load_images(small("pets/", size=16))
    assert (images.train.images.shape, images.classes) == ((10, 3, 16, 16), 2)
    for before, after in (("val", "valid"), ("valid", "test")):
        (data_folder / "pets" / before).rename(data_folder / "pets" / after)
        check_data(small("pets/", size=16))
        assert torch.equal(load_images(small("pets/", size=16)).test.images, images.test.images)


@pytest.mark.parametrize("size", [16, 80])  # in memory, and from disk
@pytest.mark.parametrize("place", ["pets/", "pets/train/"])
def test_of_classes_without_a_split_every_fifth_picture_is_tested_on(size, place, data_folder):
    write(data_folder / place, class_folders(10))
    data = load_images(small("pets/", size=size))
    assert "own images (pets), a fifth drawn to test on" in data.title
    assert (len(data.train) + len(data.valid), len(data.test)) == (16, 4)
    labels = data.test.labels if size == 16 else torch.tensor([data.test[i][1] for i in range(4)])
    assert labels.bincount().tolist() == [2, 2]
    if size == 16:
        pixels = [*data.train.images, *data.valid.images, *data.test.images]
        assert len({image.numpy().tobytes() for image in pixels}) == 20
    assert load_images(small("pets/", size=size)).checksum == data.checksum


@pytest.mark.parametrize("size", [16, 80])  # in memory, and from disk
def test_some_of_the_test_images_of_folders_are_of_all_classes(size, data_folder):
    names = [f"kind{i}" for i in range(4)]
    write(data_folder / "pets", image_folder(names, names, (4, 16)))
    some = load_images(small("pets/", size=size, test_images=20)).test
    labels = some.labels if size == 16 else torch.tensor([some[i][1] for i in range(20)])
    assert len(some) == 20
    assert labels.bincount(minlength=4).min() >= 2


def test_some_of_the_test_images_in_mixed_order_are_the_first(data_folder):
    write(data_folder / "mine", image_archives())
    whole, some = (load_images(small("mine/", size=8, test_images=n)).test for n in (None, 4))
    assert torch.equal(some.images, whole.images[:4])


def test_what_a_mac_puts_beside_a_picture_is_none(data_folder):
    image_files(data_folder / "pets")
    before = load_images(small("pets/", size=16)).checksum
    write(data_folder / "pets", {f"train/{name}/._0.png": b"\0" for name in ("cat", "dog")})
    write(data_folder / "pets", {"train/.DS_Store": b"\0", "train/notes.txt": b"cats"})
    assert load_images(small("pets/", size=16)).checksum == before


def test_classes_too_small_to_draw_from_and_a_split_without_train(data_folder):
    write(data_folder / "pets", class_folders(4))
    refused(r"pets: no class has the five pictures of which one is tested on", load_images, small("pets/", size=16))
    (data_folder / "pets/a").rename(data_folder / "pets/val")
    with pytest.raises(DataNotFoundError, match=r"pets has val/ and no train/; it needs train/<class>/"):
        load_images(small("pets/", size=16))


def test_a_broken_picture_on_disk_is_found_before_training(data_folder):
    image_files(data_folder / "pets", size=80)
    path = next((data_folder / "pets/val").glob("*/*"))
    path.write_bytes(path.read_bytes()[:200])
    refused(re.escape(f"{path} cannot be read"), load_images, small("pets/", size=80))


def test_image_folder_from_disk_resumes(data_folder):
    image_files(data_folder / "pets", size=80)
    r = small("pets/", size=72, crop="resized", flip=True)
    images = load_images(r)
    assert (len(images.train), len(images.valid), len(images.test)) == (10, 2, 6)
    straight = file_batches(images.train, r, 0, CPU, 0, 0)
    batches = [next(straight) for _ in range(7)]
    assert [len(y) for _, y in batches[:3]] == [4, 4, 2]
    x, y = next(file_batches(images.train, r, 0, CPU, 0, 5))
    assert torch.equal(x, batches[5][0])
    assert torch.equal(y, batches[5][1])
    second, _ = next(file_batches(images.train, r, 0, CPU, 0, 5, share=lambda keys: keys[1:]))
    assert torch.equal(second, x[1:])  # a process reads no more than its part
    worker_x, _ = next(file_batches(images.train, r, 0, CPU, 1, 5))
    assert torch.equal(worker_x, x)
    x, y = next(evaluation_batches(images.test, images, 72, CPU, 0))
    assert x.shape == (6, 3, 72, 72)
    assert sorted(images.train.indices + images.valid.indices) == list(range(12))
    assert images.valid.indices not in ([0, 1], [10, 11])  # files come class by class: a part at an end is one class
    red = Image.new("RGB", (80, 80), (255, 0, 0))
    (pixel,) = next(evaluation_batches([(red, 0)], images, 72, CPU, 0))[0][..., 36, 36]
    wanted = [(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225]
    assert pixel.tolist() == pytest.approx(wanted, rel=1e-5)


def test_imagenet_in_its_real_layout(data_folder):
    root = data_folder / "imagenet"
    image_files(root, size=80)
    for split in ("train", "val"):
        for kind, wnid in (("cat", "n01"), ("dog", "n02")):
            (root / split / kind).rename(root / split / wnid)
    torch.save(({"n01": ("cat",), "n02": ("dog",)}, ["n01"]), root / "meta.bin")
    images = load_images(small("imagenet", size=72, crop="resized"))
    assert (images.title, images.classes, len(images.test)) == ("ImageNet", 2, 6)


def npz(count=4, grey=0, **changes):
    data = np.full((count, 8, 8), grey, np.uint8)
    return archive(**{"data": data, "labels": np.arange(count), **changes})


def two(*labels):
    return {f"{name}.npz": npz(len(labels), grey, labels=np.array(labels)) for grey, name in enumerate("ab")}


@pytest.mark.parametrize(
    ("dataset", "files", "error", "message"),
    [
        ("nowhere/", {}, DataNotFoundError, "there is no folder"),
        ("a.npz,b.npz", {}, DataNotFoundError, "there is no file .*a.npz"),
        ("a.npz,b.npz,c.npz", {}, ValueError, "two archives expected"),
        ("two/", {f"two/{n}.npz": npz() for n in ("x_train", "y_train", "t_test")}, ValueError,
         "archives there: t_test.npz, x_train.npz, y_train.npz"),
        ("a.npz,a.npz", {"a.npz": archive(images=np.zeros(3))}, ValueError, "needs labels and either"),
        ("a.npz,a.npz", {"a.npz": npz(data=np.zeros((4, 8, 8)))}, ValueError, "must be uint8"),
        ("a.npz,a.npz", {"a.npz": npz(labels=np.arange(2))}, ValueError, "2 labels"),
        ("a.npz,a.npz", {"a.npz": npz(2, labels=np.array([-1, 0]))}, ValueError, r"labels must be 0, 1"),
        ("mnist", {}, ValueError, "unknown dataset 'mnist'"),
        ("a.npz,b.npz", two(0, 1, 10**6), ValueError, "training images: label 1000000 of 3; classes"),
        ("a.npz,b.npz", two(1, 2, 3), ValueError, "training images: labels are 1 to 3; classes must"),
        ("a.npz,b.npz", two(2, 2, 2), ValueError, "all 3 labels are 2; there is nothing to learn"),
        ("a.npz,a.npz", {"a.npz": npz()}, ValueError, "the 4 test images are the training images"),
    ],
)  # fmt: skip
def test_bad_data_is_named(dataset, files, error, message, data_folder):
    write(data_folder, files)
    refused(message, load_images, small(dataset, size=8), error=error)


@pytest.mark.parametrize("size", [16, 80])  # in memory, and read from disk
def test_folders_of_one_class_and_folders_that_are_the_same(size, data_folder):
    image_files(data_folder / "pets")
    for split in ("train", "val"):
        shutil.copytree(data_folder / "pets" / split / "cat", data_folder / "one" / split / "cat")
        shutil.copytree(data_folder / "pets" / "train", data_folder / "same" / split)
    refused("the only class is 'cat'; there is nothing to learn from one class", load_images, small("one/", size=size))
    refused("the 12 test images are the training images", load_images, small("same/", size=size))
    (data_folder / "pets/val/dog/.ipynb_checkpoints").mkdir()
    (data_folder / "pets/val/.ipynb_checkpoints").mkdir()
    images = load_images(small("pets/", size=size))
    assert (images.classes, images.title.partition(",")[0]) == (2, "own images (pets)")
    shutil.copytree(data_folder / "pets/val", data_folder / "pets/test")
    assert ", tested on val/" in load_images(small("pets/", size=size)).title
    (data_folder / "pets/train/empty").mkdir()
    refused(r"pets/train/empty is the folder of a class, and has no picture", load_images, small("pets/", size=size))


def test_labels_may_be_many_where_samples_are_too():
    assert class_count("x", np.arange(20_000)) == 20_000
    assert class_count("x", np.array([0, 9_999])) == 10_000
    refused("x: label 20000 of 20000", class_count, "x", np.arange(1, 20_001))


def test_a_download_goes_through_torchvision_or_says_what_there_is(data_folder, tmp_path_factory, monkeypatch):
    """The archive comes from a server on the loopback; transport, checksum and unpacking are torchvision's."""
    source = tmp_path_factory.mktemp("server")
    write_cifar10(source, monkeypatch)
    archive = source / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(source / "cifar-10-batches-py", "cifar-10-batches-py")
    handler = functools.partial(_Quiet, directory=str(source))
    kind = torchvision.datasets.CIFAR10
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(kind, "url", f"http://127.0.0.1:{server.server_port}/{archive.name}")
        monkeypatch.setattr(kind, "tgz_md5", "0" * 32)
        refused("not found or corrupted", data.download, "cifar10", error=DataNotFoundError)
        monkeypatch.setattr(kind, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
        data.download("cifar10")
        server.shutdown()
    assert len(load_images(small("cifar10", size=32)).test) == 10
    refused("'mnist' cannot be downloaded; choose from cifar10, .*, ogbn-arxiv", data.download, "mnist")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass
