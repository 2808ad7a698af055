import functools
import hashlib
import http.server
import io
import itertools
import json
import os
import pickle
import re
import shutil
import struct
import tarfile
import threading
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
import torchvision
from dataset_layouts import archive, class_folders, image_archives, image_folder, write
from helpers import refused
from PIL import Image, ImageOps

from cpt_lab import data
from cpt_lab.data.files import DataNotFoundError, check_data
from cpt_lab.data.folder_contents import duplicate_files, identical_files
from cpt_lab.data.image_batches import array_batches, evaluation_batches, file_batches
from cpt_lab.data.image_decoding import inspect_image_file, open_rgb
from cpt_lab.data.image_readers import ArrayImages
from cpt_lab.data.images import load_images
from cpt_lab.data.splits import class_count
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.paths import results_dir

CPU = torch.device("cpu")


def small(dataset, **changes):
    base = replace(
        recipe("demo", "cifar10"),
        dataset=dataset,
        batch=4,
        train_images=None,
        valid_images=2,
    )
    return replace(base, **{"test_images": None, **changes})


@pytest.mark.parametrize("store", ["image_digits", "deficit_digits"])
def test_digits_split_matches_committed_rows(store):
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


def test_image_batches_cover_each_epoch_once():
    images = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).expand(10, 1, 6, 6)
    batches = list(itertools.islice(batches_of(images), 6))
    for (
        x,
        labels,
    ) in batches:  # whatever the crop, there is some of the image in the middle
        assert torch.equal(x[:, 0, 3, 3], labels.float())
    numbers = [labels for _, labels in batches]
    epochs = [torch.cat(numbers[:3]).tolist(), torch.cat(numbers[3:]).tolist()]
    assert [sorted(e) for e in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    assert len(numbers[2]) == 2


def test_image_batches_crop_and_mirror_uniformly():
    image = torch.randint(0, 256, (1, 6, 6), dtype=torch.uint8)
    x, _ = next(batches_of(image.expand(2500, 1, 6, 6), batch=2500))
    padded = torch.nn.functional.pad(image, (2, 2, 2, 2))
    windows = [
        padded[:, dy : dy + 6, dx : dx + 6] for dy in range(5) for dx in range(5)
    ]
    places = [
        (w.flip(-1) if flip else w).float().numpy().tobytes()
        for w in windows
        for flip in (False, True)
    ]
    assert len(set(places)) == 50
    counts = (
        torch.tensor([places.index(found.numpy().tobytes()) for found in x])
        .bincount(minlength=50)
        .view(25, 2)
    )
    assert 60 < counts.sum(1).min() <= counts.sum(1).max() < 150  # of 100
    assert abs(float(counts.sum(0)[1]) / 2500 - 0.5) < 0.04  # four standard deviations


# --- CIFAR in its real layout ---------------------------------------------------------------------


def write_cifar10(folder, monkeypatch):
    """Write pickles of CIFAR-10 with few images, and replace torchvision's official checksums."""
    base = folder / "cifar-10-batches-py"
    base.mkdir()
    rng = np.random.default_rng(0)

    def part(name, content):
        raw = pickle.dumps(content)
        (base / name).write_bytes(raw)
        return [name, hashlib.md5(raw).hexdigest()]

    def images(n):
        return {
            "data": rng.integers(0, 256, (n, 3072), dtype=np.uint8),
            "labels": [i % 10 for i in range(n)],
        }

    kind = torchvision.datasets.CIFAR10
    monkeypatch.setattr(
        kind, "train_list", [part(f"data_batch_{i}", images(10)) for i in range(1, 6)]
    )
    monkeypatch.setattr(kind, "test_list", [part("test_batch", images(10))])
    meta = part("batches.meta", {"label_names": [f"class {i}" for i in range(10)]})
    monkeypatch.setattr(
        kind, "meta", {"filename": meta[0], "key": "label_names", "md5": meta[1]}
    )


def test_image_reader_loads_cifar10(data_folder, monkeypatch):
    write_cifar10(data_folder, monkeypatch)
    images = load_images(small("cifar10", size=32, valid_images=5))
    assert [len(s) for s in (images.train, images.valid, images.test)] == [45, 5, 10]
    assert images.title == "CIFAR-10"
    original = torchvision.datasets.CIFAR10(data_folder, train=False).data[3]
    assert torch.equal(
        images.test.images[3], torch.from_numpy(original).permute(2, 0, 1)
    )
    x, _ = next(evaluation_batches(images.test, images, 32, CPU, 0))
    for channel, (mean, std) in enumerate(
        ((0.4914, 0.2023), (0.4822, 0.1994), (0.4465, 0.2010))
    ):
        wanted = (torch.from_numpy(original[..., channel]) / 255 - mean) / std
        assert torch.allclose(x[3, channel], wanted, atol=1e-5)
    shrunk = load_images(small("cifar10", size=16))
    assert shrunk.test.images.shape[-2:] == (16, 16)
    assert shrunk.title == "CIFAR-10, 16 x 16"
    assert shrunk.checksum != images.checksum


def test_image_reader_rejects_damaged_cifar10(data_folder, monkeypatch):
    write_cifar10(data_folder, monkeypatch)
    (data_folder / "cifar-10-batches-py" / "test_batch").write_bytes(b"damaged")
    refused(
        "or is damaged", load_images, small("cifar10", size=32), error=DataNotFoundError
    )


# --- own images -----------------------------------------------------------------------------------


def image_files(folder, size=20):
    write(
        folder,
        image_folder(("cat", "dog"), ("cat", "dog"), (6, 3), (size, size + 4), "JPEG"),
    )


@pytest.mark.parametrize("packed", [True, False])
def test_image_reader_loads_archives(packed, data_folder):
    folder = write(data_folder / "mine", image_archives(packed, test_part="val"))
    by_folder = load_images(small("mine/", size=8))
    by_name = load_images(small("mine/train.npz,mine/val.npz", size=8))
    assert by_folder.checksum == by_name.checksum
    assert by_folder.title == "own images (mine)"
    assert (by_folder.classes, by_folder.channels, len(by_folder.test)) == (3, 3, 6)
    if not packed:
        with np.load(folder / "val.npz") as z:
            assert torch.equal(
                by_folder.test.images, torch.from_numpy(z["data"]).permute(0, 3, 1, 2)
            )


def test_image_reader_loads_train_test_folders(data_folder):
    image_files(data_folder / "pets")
    images = load_images(small("pets/", size=16))
    assert (images.train.images.shape, images.classes) == ((10, 3, 16, 16), 2)
    for before, after in (("val", "valid"), ("valid", "test")):
        (data_folder / "pets" / before).rename(data_folder / "pets" / after)
        check_data(small("pets/", size=16))
        assert torch.equal(
            load_images(small("pets/", size=16)).test.images, images.test.images
        )


@pytest.mark.parametrize("size", [16, 80])  # in memory, and from disk
@pytest.mark.parametrize("place", ["pets/", "pets/train/"])
def test_image_reader_holds_out_every_fifth(size, place, data_folder):
    """Hold out every fifth image of each class if there is no split."""
    write(data_folder / place, class_folders(10))
    data = load_images(small("pets/", size=size))
    assert "own images (pets), a fifth drawn to test on" in data.title
    assert (len(data.train) + len(data.valid), len(data.test)) == (16, 4)
    labels = (
        data.test.labels
        if size == 16
        else torch.tensor([data.test[i][1] for i in range(4)])
    )
    assert labels.bincount().tolist() == [2, 2]
    if size == 16:
        pixels = [*data.train.images, *data.valid.images, *data.test.images]
        assert len({image.numpy().tobytes() for image in pixels}) == 20
    assert load_images(small("pets/", size=size)).checksum == data.checksum


@pytest.mark.parametrize("size", [16, 80])  # in memory, and from disk
def test_image_test_subset_covers_all_classes(size, data_folder):
    names = [f"kind{i}" for i in range(4)]
    write(data_folder / "pets", image_folder(names, names, (4, 16)))
    some = load_images(small("pets/", size=size, test_images=20)).test
    labels = (
        some.labels if size == 16 else torch.tensor([some[i][1] for i in range(20)])
    )
    assert len(some) == 20
    assert labels.bincount(minlength=4).min() >= 2


def test_image_test_subset_keeps_file_order(data_folder):
    write(data_folder / "mine", image_archives())
    whole, some = (
        load_images(small("mine/", size=8, test_images=n)).test for n in (None, 4)
    )
    assert torch.equal(some.images, whole.images[:4])


def test_image_reader_ignores_macos_files(data_folder):
    image_files(data_folder / "pets")
    before = load_images(small("pets/", size=16)).checksum
    write(
        data_folder / "pets",
        {f"train/{name}/._0.png": b"\0" for name in ("cat", "dog")},
    )
    write(data_folder / "pets", {"train/.DS_Store": b"\0", "train/notes.txt": b"cats"})
    assert load_images(small("pets/", size=16)).checksum == before


def test_image_reader_rejects_small_classes(data_folder):
    """Reject classes too small to draw a test part from, and a split without training data."""
    write(data_folder / "pets", class_folders(4))
    refused(
        r"pets: no class has the five images of which one is tested on",
        load_images,
        small("pets/", size=16),
    )
    (data_folder / "pets/a").rename(data_folder / "pets/val")
    with pytest.raises(
        DataNotFoundError, match=r"pets has val/ and no train/; it needs train/<class>/"
    ):
        load_images(small("pets/", size=16))


def test_image_reader_rejects_broken_file_early(data_folder):
    """Find a broken image before training starts."""
    image_files(data_folder / "pets", size=80)
    path = next((data_folder / "pets/val").glob("*/*"))
    path.write_bytes(path.read_bytes()[:200])
    refused(re.escape(f"{path} cannot be read"), load_images, small("pets/", size=80))


def test_image_folder_batches_resume_exactly(data_folder):
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
    second, _ = next(
        file_batches(images.train, r, 0, CPU, 0, 5, share=lambda keys: keys[1:])
    )
    assert torch.equal(second, x[1:])  # a process reads no more than its part
    worker_x, _ = next(file_batches(images.train, r, 0, CPU, 1, 5))
    assert torch.equal(worker_x, x)
    x, y = next(evaluation_batches(images.test, images, 72, CPU, 0))
    assert x.shape == (6, 3, 72, 72)
    assert sorted(images.train.indices + images.valid.indices) == list(range(12))
    assert images.valid.indices not in (
        [0, 1],
        [10, 11],
    )  # files come class by class: a part at an end is one class
    red = Image.new("RGB", (80, 80), (255, 0, 0))
    (pixel,) = next(evaluation_batches([(red, 0)], images, 72, CPU, 0))[0][..., 36, 36]
    wanted = [(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225]
    assert pixel.tolist() == pytest.approx(wanted, rel=1e-5)


def test_image_reader_loads_imagenet_layout(data_folder):
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
    return {
        f"{name}.npz": npz(len(labels), grey, labels=np.array(labels))
        for grey, name in enumerate("ab")
    }


@pytest.mark.parametrize(
    ("dataset", "files", "error", "message"),
    [
        ("nowhere/", {}, DataNotFoundError, "there is no folder"),
        ("a.npz,b.npz", {}, DataNotFoundError, "there is no file .*a.npz"),
        ("a.npz,b.npz,c.npz", {}, ValueError, "two archives expected"),
        (
            "two/",
            {f"two/{n}.npz": npz() for n in ("x_train", "y_train", "t_test")},
            ValueError,
            "archives there: t_test.npz, x_train.npz, y_train.npz",
        ),
        (
            "a.npz,a.npz",
            {"a.npz": archive(images=np.zeros(3))},
            ValueError,
            "needs labels and either",
        ),
        (
            "a.npz,a.npz",
            {"a.npz": npz(data=np.zeros((4, 8, 8)))},
            ValueError,
            "must be uint8",
        ),
        ("a.npz,a.npz", {"a.npz": npz(labels=np.arange(2))}, ValueError, "2 labels"),
        (
            "a.npz,a.npz",
            {"a.npz": npz(2, labels=np.array([-1, 0]))},
            ValueError,
            r"labels must be 0, 1",
        ),
        ("mnist", {}, ValueError, "unknown dataset 'mnist'"),
        (
            "a.npz,b.npz",
            two(0, 1, 10**6),
            ValueError,
            "training images: label 1000000 of 3; classes",
        ),
        (
            "a.npz,b.npz",
            two(1, 2, 3),
            ValueError,
            "training images: labels are 1 to 3; classes must",
        ),
        (
            "a.npz,b.npz",
            two(2, 2, 2),
            ValueError,
            "all 3 labels are 2; there is nothing to learn",
        ),
        (
            "a.npz,a.npz",
            {"a.npz": npz()},
            ValueError,
            "the 4 test images are the training images",
        ),
    ],
)
def test_image_reader_names_invalid_data(dataset, files, error, message, data_folder):
    write(data_folder, files)
    refused(message, load_images, small(dataset, size=8), error=error)


@pytest.mark.parametrize("size", [16, 80])  # in memory, and read from disk
def test_image_reader_rejects_single_or_equal_folders(size, data_folder):
    """Reject folders of one class, and a training folder equal to the test folder."""
    image_files(data_folder / "pets")
    for split in ("train", "val"):
        shutil.copytree(
            data_folder / "pets" / split / "cat", data_folder / "one" / split / "cat"
        )
        shutil.copytree(data_folder / "pets" / "train", data_folder / "same" / split)
    refused(
        "the only class is 'cat'; there is nothing to learn from one class",
        load_images,
        small("one/", size=size),
    )
    refused(
        "the 12 test images are the training images",
        load_images,
        small("same/", size=size),
    )
    (data_folder / "pets/val/dog/.ipynb_checkpoints").mkdir()
    (data_folder / "pets/val/.ipynb_checkpoints").mkdir()
    images = load_images(small("pets/", size=size))
    assert (images.classes, images.title.partition(",")[0]) == (2, "own images (pets)")
    shutil.copytree(data_folder / "pets/val", data_folder / "pets/test")
    assert ", tested on val/" in load_images(small("pets/", size=size)).title
    (data_folder / "pets/train/empty").mkdir()
    refused(
        r"pets/train/empty is the folder of a class, and has no image",
        load_images,
        small("pets/", size=size),
    )


# --- what the report says, and what is refused ----------------------------------------------------


def saved(image, kind="PNG", **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def noise(seed, size=(20, 24)):
    return Image.fromarray(
        np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    )


def pets(seed=0, kind="PNG", make=None):
    """Return twelve images of two classes."""
    names = [f"{name}/{i}.{kind.lower()}" for name in ("cat", "dog") for i in range(6)]
    make = make or (lambda seed: saved(noise(seed), kind))
    return {name: make(seed + number) for number, name in enumerate(names)}


def split_pets():
    return {
        f"{part}/{name}": file
        for part, seed in (("train", 0), ("val", 50))
        for name, file in pets(seed).items()
    }


def deep(high, kind="PNG", dtype=np.uint16):
    """Return a factory of 16-bit grey images with values up to a limit."""

    def make(seed):
        values = (
            np.random.default_rng(seed)
            .permutation(np.linspace(0, high, 480))
            .reshape(20, 24)
        )
        return saved(Image.fromarray(values.astype(dtype)), kind)

    return make


def deep_colours(high):
    """Return a factory of PNG files with 16 bits per channel, which Pillow cannot write."""

    def chunk(name, content):
        return (
            struct.pack(">I", len(content))
            + name
            + content
            + struct.pack(">I", zlib.crc32(name + content))
        )

    def make(seed):
        values = np.random.default_rng(seed).integers(0, high, (20, 24, 3))
        values[0, 0] = high
        rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
        header = struct.pack(">IIBBBBB", 24, 20, 16, 2, 0, 0, 0)
        parts = (
            chunk(b"IHDR", header),
            chunk(b"IDAT", zlib.compress(rows)),
            chunk(b"IEND", b""),
        )
        return b"\x89PNG\r\n\x1a\n" + b"".join(parts)

    return make


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def pages(kind):
    return saved(noise(70), kind, save_all=True, append_images=[noise(71)])


def loosely(*names):
    """Return image files of these names."""
    return {name: saved(noise(200 + i)) for i, name in enumerate(names)}


FACTS = {  # what is there -> its files, what the report must say
    "other kinds": (
        lambda: (
            pets()
            | dict.fromkeys(
                ["cat/a.heic", "dog/b.HEIC", "dog/c.gif", "d.avif", "cat/notes.docx"],
                b"x",
            )
        ),
        [
            "left out: 2 files .heic: images of this kind are not read; save them as .jpg or .png (cat/a.heic, dog/b",
            "left out: 1 file .gif",
            "left out: 1 file .avif",
            "left out: 1 file .docx: no images (cat/notes.docx)",
        ],
    ),
    "jpeg by another name": (
        lambda: (
            pets()
            | {
                "cat/a.jfif": saved(noise(80), "JPEG"),
                "dog/b.JPE": saved(noise(81), "JPEG"),
            }
        ),
        ["read: 14 images: formats PNG 12, JPEG 2"],
    ),
    "hidden": (
        lambda: (
            pets()
            | loosely(
                "cat/.a.png",
                "cat/__x/1.png",
                "cat/deep/@eaDir/2.png",
                ".git/3.png",
                "lost+found/4.png",
            )
        ),
        [
            "left out: 5 files .png: hidden files and folders are not read (.git/3.png, cat/.a.png, cat/__x/1.png, ...)"
        ],
    ),
    "in folders of a class": (
        lambda: (
            pets() | loosely("cat/kittens/1.png", "cat/kittens/2.png", "dog/old/3.png")
        ),
        [
            "changed: 3 images in folders inside of class folders belong to that class (cat/kittens 2, dog/old 1)"
        ],
    ),
    "beside the splits": (
        lambda: (
            split_pets()
            | loosely("test/cat/1.png", "extra/2.png", "3.png", "train/4.png")
            | {"old.npz": b"x"}
        ),
        [
            "left out: 1 file .png: val/ is tested on (test/cat/1.png)",
            "left out: 1 file .png: only train/ and a folder to test on are read (extra/2.png)",
            "left out: 1 file .png: images outside of the folders of the classes are not read (3.png)",
            "left out: 1 file .png: images outside of the folders of the classes are not read (train/4.png)",
            "left out: 1 file .npz",
        ],
    ),
    "names that differ in case": (
        lambda: pets() | loosely(*(f"Cat/{i}.png" for i in range(5))),
        ["classes: Cat and cat differ in spelling alone, and are 2 classes"],
    ),
    "names that differ in composed letters": (
        lambda: (
            pets()
            | loosely(
                *(f"\u00e9/{i}.png" for i in range(5)),
                *(f"e\u0301/{i}0.png" for i in range(5)),
            )
        ),
        ["differ in spelling alone, and are 2 classes"],
    ),
    "12 bits": (
        lambda: pets(make=deep(4095)),
        [
            "changed: 12 grey images of 16 bits, values up to 4,095: read as 12 bits, scaled to 8"
        ],
    ),
    "10 bits in TIFF": (
        lambda: pets(kind="TIFF", make=deep(1000, "TIFF")),
        ["values up to 1,000: read as 10 bits"],
    ),
    "16 bits beside 8": (
        lambda: pets() | {"cat/deep.png": deep(65535)(90)},
        ["changed: 1 grey image of 16 bits", "read as 16 bits"],
    ),
    "16 bits per channel": (
        lambda: pets() | {"cat/deep.png": deep_colours(60000)(90)},
        [
            "changed: 1 image with 16 bits per channel: the upper 8 are read (cat/deep.png)"
        ],
    ),
    "modes": (
        lambda: (
            pets()
            | {
                f"cat/{mode}.tif": saved(noise(90).convert(mode), "TIFF")
                for mode in ("L", "1", "CMYK", "LA")
            }
        ),
        [
            "modes RGB 12",
            "of PIL's mode L: grey became three equal channels (cat/L.tif)",
            "of PIL's mode 1: 1 bit",
            "of PIL's mode CMYK: colours became",
            "1 image with transparency (LA 1): it is left out",
        ],
    ),
    "a palette with transparency": (
        lambda: pets() | {"cat/p.png": saved(noise(90).convert("P"), transparency=0)},
        ["of PIL's mode P: a palette became its colours", "with transparency (P 1)"],
    ),
    "a colour profile": (
        lambda: pets() | {"cat/p.jpg": saved(noise(90), "JPEG", icc_profile=b"x")},
        ["read: 1 image with a colour profile, which is not applied (cat/p.jpg)"],
    ),
    "pages": (
        lambda: (
            pets()
            | {
                "cat/a.tif": pages("TIFF"),
                "cat/b.png": pages("PNG"),
                "dog/c.webp": pages("WEBP"),
            }
        ),
        [
            "changed: 3 images of several frames or pages: the first alone is read (cat/a.tif, cat/b.png, dog/c.webp)"
        ],
    ),
    "orientation": (
        lambda: (
            pets()
            | {
                f"cat/{k}.jpg": saved(noise(90 + k), "JPEG", exif=turned(k))
                for k in (3, 6, 8)
            }
        ),
        [
            "changed: EXIF orientation applied to 3 images, as viewers do",
            "cat/3.jpg, cat/6.jpg, cat/8.jpg",
        ],
    ),
    "an image of one value": (
        lambda: {
            **pets(),
            **pets(
                make=lambda seed: saved(Image.new("RGB", (24, 20), (seed, seed, seed)))
            ),
        },
        ["of one value throughout"],
    ),
    "copies": (
        lambda: (
            pets()
            | {
                name.replace("/", "/copy of "): file
                for name, file in list(pets().items())[:3]
            }
        ),
        [
            "changed: copies of other files, byte for byte: 3; each is in the split of its original"
        ],
    ),
    "classes without a test image": (
        lambda: {
            name: file for name, file in split_pets().items() if "val/cat" not in name
        },
        ["classes: test has no image of 1 class: cat"],
    ),
}


def loaded(folder, size, files, **changes):
    write(folder / "pets", files)
    return load_images(small("pets/", size=size, **changes))


def facts_of(found):
    return "\n".join(f"{topic}: {text}" for topic, text in found.report.facts)


@pytest.mark.parametrize("size", [16, 80])  # in memory, and from disk
@pytest.mark.parametrize("case", FACTS)
def test_image_reader_reports_skipped_and_changed_files(case, size, data_folder):
    files, words = FACTS[case]
    found = loaded(data_folder, size, files())
    facts = facts_of(found)
    assert [word for word in words if word not in facts] == [], facts
    assert str(data_folder) not in facts
    again = load_images(small("pets/", size=size))
    assert (again.report.digest, again.checksum) == (
        found.report.digest,
        found.checksum,
    )


ERRORS = {  # what is there -> its files, what the error must say
    "a class of other kinds": (
        lambda: pets() | {f"bird/{i}.heic": b"x" for i in range(3)},
        r"pets/bird is the folder of a class, .* \(found: 3 files \.heic\); save images as \.jpg or \.png",
    ),
    "images of val/ without classes": (
        lambda: (
            {n: f for n, f in split_pets().items() if "train" in n}
            | loosely("val/1.png", "val/2.png")
        ),
        r"pets/val has no folder of a class in it; 2 images lie directly in it .* val/<class>/",
    ),
    "Tiny ImageNet": (
        lambda: (
            {n: f for n, f in split_pets().items() if "train" in n}
            | loosely("val/images/1.png")
            | {"val/val_annotations.txt": b"1.png cat"}
        ),
        r"class 'images' is unknown; .* folder of their own, val/<class>/ \(val_annotations.txt may say which\)",
    ),
    "a class in another spelling": (
        lambda: {
            name.replace("val/cat", "val/Cat"): file
            for name, file in split_pets().items()
        },
        r"class 'Cat' is unknown; .*'cat' differs in spelling alone: give both folders one name",
    ),
    "splits in capitals": (
        lambda: {
            n.replace("val/", "Val/").replace("train", "Train"): f
            for n, f in split_pets().items()
        },
        r"pets has Train/ and Val/; call the folders train/ and val/",
    ),
    "a split by another name": (
        lambda: {
            name.replace("val/", "dev/"): file for name, file in split_pets().items()
        },
        r"pets has train/ and dev/; call the second one val/",
    ),
    "12 bits beside 8": (
        lambda: pets() | {"cat/deep.png": deep(4095)(90)},
        r"1 grey image of 16 bits whose values end at 4,095 \(cat/deep.png\) stand beside 12 of 8 bits .*save all",
    ),
    "8 bits in 16": (
        lambda: pets(make=deep(255)),
        "12 images of 16 bits whose values end at 255 would be",
    ),
    "32 bits": (
        lambda: pets() | {"cat/f.tif": deep(1e6, "TIFF", np.int32)(0)},
        r"cat/f\.tif cannot be .*PIL's mode I",
    ),
    "floats": (
        lambda: pets() | {"cat/f.tif": deep(1, "TIFF", np.float32)(0)},
        r"cat/f\.tif cannot be .*PIL's mode F",
    ),
    "12 bits per channel": (
        lambda: pets(make=deep_colours(4000)),
        r"12 colour images of 16 bits per channel, whose values end below 4,096 of 65,535, would be dark",
    ),
    "a copy in another class of the test": (
        lambda: split_pets() | {"val/dog/new.png": split_pets()["train/cat/0.png"]},
        r"pets/val: 1 of 13 test images are copies of training images \(val/dog/new.png is train/cat/0.png\).*take",
    ),
    "one class": (
        lambda: {n: f for n, f in pets().items() if "cat" in n},
        "the only class is 'cat'",
    ),
}


@pytest.mark.parametrize("size", [16, 80])
@pytest.mark.parametrize("case", ERRORS)
def test_image_reader_rejects_ambiguous_images(case, size, data_folder):
    files, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        loaded(data_folder, size, files())


def test_image_reader_scales_depth_by_dataset(data_folder):
    """Scale 12-bit images by the largest value of the data set, so that dark images stay dark."""
    files = pets(make=deep(4095)) | {"cat/0.png": deep(500)(0)}
    found = loaded(data_folder, 80, files)
    (index,) = (
        i
        for i, (path, _) in enumerate(found.train.dataset.samples)
        if path.endswith("cat/0.png")
    )
    assert np.asarray(found.train.dataset[index][0]).max() == 500 >> 4
    assert (
        np.asarray(open_rgb(data_folder / "pets/cat/0.png")).max() == 500 >> 1
    )  # alone


@pytest.mark.parametrize("orientation", range(2, 9))
@pytest.mark.parametrize(
    ("kind", "ending"),
    [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"), ("TIFF", "tif")],
)
def test_open_rgb_applies_exif_orientation(orientation, kind, ending, tmp_path):
    image = Image.new("RGB", (48, 32))
    image.paste((255, 255, 255), (0, 0, 16, 16))
    path = tmp_path / f"a.{ending}"
    path.write_bytes(saved(image, kind, exif=turned(orientation)))
    with Image.open(path) as stored:
        wanted = ImageOps.exif_transpose(stored).convert("RGB")
    found = open_rgb(path)
    assert found.size == wanted.size
    assert np.array_equal(np.asarray(found), np.asarray(wanted))
    assert inspect_image_file(path).shown_size == (found.height, found.width)
    if kind != "TIFF":  # which PIL turns in any case
        assert open_rgb(path, turn=False).size == image.size


def test_open_rgb_ignores_broken_exif(tmp_path):
    (tmp_path / "a.png").write_bytes(saved(noise(0), exif=b"Exif\0\0II*\0garbage"))
    assert np.array_equal(
        np.asarray(open_rgb(tmp_path / "a.png")), np.asarray(noise(0))
    )
    assert inspect_image_file(tmp_path / "a.png").has_damaged_exif


def test_image_reader_skips_circular_links_and_pipes(
    data_folder,
):
    """Skip circular links and pipes, and reject links to missing files."""
    folder = write(data_folder / "pets", pets()) / "cat"
    (folder / "around").symlink_to(data_folder / "pets")
    (folder / "itself.png").symlink_to(folder / "itself.png")
    os.mkfifo(folder / "pipe.png")
    facts = facts_of(load_images(small("pets/", size=16)))
    assert "links that lead back to a folder around them (cat/around)" in facts
    assert "cat/itself.png" in facts
    assert "neither files nor folders (cat/pipe.png)" in facts
    (folder / "gone.png").symlink_to(folder / "nowhere.png")
    with pytest.raises(DataNotFoundError, match=r"there is no file .*cat/gone\.png"):
        load_images(small("pets/", size=16))


def archives(copied, rows=20, **more):
    """Return archives whose test images contain ``copied`` training images."""
    rng = np.random.default_rng(0)
    train, new = (
        rng.integers(0, 256, (rows, 8, 8, 3), dtype=np.uint8) for _ in range(2)
    )
    test = np.concatenate([train[:copied], new[copied:]])
    labels = np.arange(rows) % 2
    return {
        "train.npz": archive(data=train, labels=labels, **more),
        "test.npz": archive(data=test, labels=labels),
    }


def test_image_archives_reject_many_copies(data_folder):
    """Count a few copies between the splits, and reject more."""
    facts = facts_of(loaded(data_folder, 8, archives(2)))
    assert (
        "overlap: 2 of 20 test images have the pixels of a training or validation image at 8 x 8"
        in facts
    )
    write(data_folder / "pets", archives(3))
    message = (
        r"3 of 20 test images are copies of training images \(test image 0 is training"
    )
    refused(message, load_images, small("pets/", size=8))
    write(data_folder / "pets", archives(20))
    refused(
        "the 20 test images are the training images",
        load_images,
        small("pets/", size=8),
    )


def test_image_archives_report_arrays_and_labels(data_folder):
    files = archives(0, class_names=np.array(["a", "b"]), meta=np.zeros(3)) | {
        "more.npz": b"x",
        "sub/a.txt": b"",
    }
    with np.load(io.BytesIO(files["test.npz"])) as whole:
        files["test.npz"] = archive(
            data=whole["data"], labels=whole["labels"].astype(float)[:, None]
        )
    facts = facts_of(loaded(data_folder, 8, files))
    for word in (
        "left out: 2 arrays of train.npz: class_names, meta",
        "changed: labels of test.npz, float64 of shape (20, 1)",
        "left out: 1 file .npz: only train.npz and test.npz are read (more.npz)",
        "sub/a.txt",
        "read: train.npz: 20 images, 8 x 8 pixels, 3 channels",
        "classes: test: 20 images of 2 classes: class 0: 10",
    ):
        assert word in facts, facts


def test_image_archives_of_equal_name_stay_separate(data_folder):
    def packed(*seeds):
        pictures = [deep(4095 if seed else 1000)(seed) for seed in seeds]
        raw, offsets = (
            np.frombuffer(b"".join(pictures), np.uint8),
            np.cumsum([0, *map(len, pictures)]),
        )
        return archive(jpeg=raw, offsets=offsets, labels=np.arange(len(seeds)) % 2)

    write(data_folder, {"a/x.npz": packed(1, 2, 3, 4), "b/x.npz": packed(0, 5)})
    found = load_images(small("a/x.npz,b/x.npz", size=20, valid_images=0))
    assert "read: a/x.npz: 4 images" in facts_of(found)
    assert "6 grey images of 16 bits, values up to 4,095: read as 12 bits" in facts_of(
        found
    )
    assert found.test.images[0].max() <= 1000 >> 4  # the scale of both archives


@pytest.mark.parametrize("size", [20, 80])
def test_image_reader_counts_validation_copies(size, data_folder):
    files = split_pets()
    files |= {f"train/cat/copy{i}.png": files["train/cat/0.png"] for i in range(20)}
    found = loaded(data_folder, size, files, valid_images=10)
    overlaps = [text for topic, text in found.report.facts if topic == "overlap"]
    assert len(overlaps) == 1
    assert re.match(
        r"\d of 10 validation images (have the pixels of a|are copies of) training image",
        overlaps[0],
    )


def test_repeated_files_compares_whole_content(tmp_path):
    contents = {
        "a": b"x" * 900,
        "b": b"x" * 900,
        "other end": b"x" * 899 + b"y",
        "other start": b"y" + b"x" * 899,
        "other middle": b"x" * 450 + b"y" + b"x" * 449,
        "longer": b"x" * 901,
        "c": b"x" * 900,
    }
    paths = {
        name: str(write(tmp_path, {name: content}) / name)
        for name, content in contents.items()
    }
    missing = str(tmp_path / "missing")
    others = [paths[name] for name in contents if name != "a"]
    found = identical_files([paths["a"], missing], [*others, missing])
    assert found == {paths["b"]: paths["a"], paths["c"]: paths["a"]}
    assert duplicate_files([*paths.values(), missing]) == found
    assert duplicate_files(others) == {paths["c"]: paths["b"]}


def test_image_archives_orient_and_scale_packed_images(data_folder):
    def packed(pictures):
        offsets = np.cumsum([0, *map(len, pictures)])
        raw = np.frombuffer(b"".join(pictures), np.uint8)
        return archive(jpeg=raw, offsets=offsets, labels=np.arange(len(pictures)) % 2)

    upright = [saved(noise(seed, (24, 20)), "JPEG") for seed in range(4)]
    lying = saved(noise(9), "JPEG", exif=turned(6))
    files = {
        "train.npz": packed([*upright, lying]),
        "test.npz": packed([saved(noise(7, (24, 20)))]),
    }
    facts = facts_of(loaded(data_folder, 24, files, valid_images=0))
    assert (
        "EXIF orientation applied to 1 image, as viewers do (orientation 6: 1; train.npz im"
        in facts
    )
    grey = {
        "train.npz": [deep(1023)(i) for i in range(4)],
        "test.npz": [deep(1023)(9 + i) for i in range(4)],
    }
    files = {name: packed(pictures) for name, pictures in grey.items()}
    found = loaded(data_folder, 20, files, valid_images=0)
    assert "8 grey images of 16 bits, values up to 1,023: read as 10 bits" in facts_of(
        found
    )
    assert found.train.images.max() > 250


def test_image_reader_logs_notices_once(data_folder, caplog):
    with caplog.at_level("INFO", logger="cpt_lab.data.images"):
        found = loaded(data_folder, 16, pets() | {"cat/a.heic": b"x"})
    logged = [record.getMessage() for record in caplog.records]
    assert logged == [f"pets/: {topic}: {text}" for topic, text in found.report.notices]
    assert any("1 file .heic" in line for line in logged)


def test_class_count_allows_many_classes():
    assert class_count("x", np.arange(20_000)) == 20_000
    assert class_count("x", np.array([0, 9_999])) == 10_000
    refused("x: label 20000 of 20000", class_count, "x", np.arange(1, 20_001))


def test_cifar10_download_uses_torchvision(data_folder, tmp_path_factory, monkeypatch):
    """Download from a loopback server with torchvision's transport, checksum and unpacking."""
    source = tmp_path_factory.mktemp("server")
    write_cifar10(source, monkeypatch)
    archive = source / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(source / "cifar-10-batches-py", "cifar-10-batches-py")
    handler = functools.partial(_Quiet, directory=str(source))
    kind = torchvision.datasets.CIFAR10
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(
            kind, "url", f"http://127.0.0.1:{server.server_port}/{archive.name}"
        )
        monkeypatch.setattr(kind, "tgz_md5", "0" * 32)
        refused(
            "not found or corrupted", data.download, "cifar10", error=DataNotFoundError
        )
        monkeypatch.setattr(
            kind, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest()
        )
        data.download("cifar10")
        server.shutdown()
    assert len(load_images(small("cifar10", size=32)).test) == 10
    refused(
        "'mnist' cannot be downloaded; choose from cifar10, .*, ogbn-arxiv",
        data.download,
        "mnist",
    )


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass
