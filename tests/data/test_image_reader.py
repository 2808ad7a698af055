"""Image readers: archives, class folders, CIFAR-10, ImageNet, conversion of pixels, and batches."""

import functools
import hashlib
import http.server
import io
import itertools
import json
import os
import pickle
import struct
import tarfile
import threading
import zlib

import numpy as np
import pytest
import torch
import torchvision
from dataset_layouts import (
    archive,
    class_folders,
    describe_cases,
    encoded,
    grey_picture,
    image_archives,
    image_folder,
    load_own,
    noise,
    own_recipe,
    packed_images,
    pictures,
    report_lines,
    split_sizes,
    write,
)
from helpers import refused, smoke_spec
from PIL import Image, ImageOps

from cpt_lab import data
from cpt_lab.data.files import DataNotFoundError, check_data, task_for_data
from cpt_lab.data.folder_contents import duplicate_files, identical_files
from cpt_lab.data.image_batches import (
    array_batches,
    evaluation_batches,
    file_batches,
    make_normalizer,
)
from cpt_lab.data.image_decoding import inspect_image_file, open_rgb
from cpt_lab.data.image_readers import ArrayImages, to_rgb
from cpt_lab.data.images import ImageData, load_images
from cpt_lab.data.random_streams import batch_keys
from cpt_lab.data.splits import class_count
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.paths import results_dir
from cpt_lab.tasks.base import load_task_class, read_all_data

CPU = torch.device("cpu")
IN_MEMORY, ON_DISK = 20, 80  # sizes of images, of which the larger are read from disk
both_places = pytest.mark.parametrize(
    "size", [IN_MEMORY, ON_DISK], ids=["in memory", "on disk"]
)
small = functools.partial(own_recipe, "image")


def labels_of(split):
    """Return the labels of images in memory or on disk."""
    if isinstance(split, ArrayImages):
        return split.labels.tolist()
    return [label for _, label in split]


# --- files and their report -----------------------------------------------------------------------


def pets(*parts, count=6, ending="png"):
    """Return different images of cats and dogs, in folders of splits if there are any."""
    folders = [f"{part}/{name}" for part in parts for name in ("cat", "dog")]
    folders = folders or ["cat", "dog"]
    return pictures(
        *(f"{place}/{i}.{ending}" for place in folders for i in range(count))
    )


def grey_pets(high, **options):
    return {
        name: grey_picture(high, seed, **options) for seed, name in enumerate(pets())
    }


def deep_colours(high, seed=0):
    """Return a PNG file with 16 bits per channel, which Pillow cannot write."""

    def chunk(name, content):
        checksum = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + checksum

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


def renamed(files, old, new):
    return {name.replace(old, new): file for name, file in files.items()}


def selected(files, word):
    return {name: file for name, file in files.items() if word in name}


def class_folder_cases():
    """Return class folders without a split, sound ones first."""
    files, other = pets(), noise((20, 24), 90)
    pages = {"save_all": True, "append_images": [noise((20, 24), 91)]}
    modes = {
        f"cat/{mode}.tif": encoded(other.convert(mode), "TIFF")
        for mode in ("L", "1", "CMYK", "LA", "RGBA")
    }
    turned = {
        f"cat/{k}.jpg": encoded(noise((20, 24), k), "JPEG", orientation=k)
        for k in (3, 6, 8)
    }
    inverted = io.BytesIO()
    Image.open(io.BytesIO(grey_picture(4095))).save(inverted, "TIFF", tiffinfo={262: 0})
    inverted = inverted.getvalue()
    plain_grey = {
        name: encoded(Image.new("RGB", (24, 20), (seed, seed, seed)))
        for seed, name in enumerate(files)
    }
    other_kinds = ("cat/a.heic", "dog/b.HEIC", "dog/c.gif", "d.avif", "cat/notes.docx")
    hidden = (".a.png", "__x/1.png", "deep/@eaDir/2.png", "__MACOSX/3.png")
    hidden = [*(f"cat/{name}" for name in hidden), ".git/3.png", "lost+found/4.png"]
    composed = [f"\u00e9/{i}.png" for i in range(5)]
    decomposed = [f"e\u0301/{i}0.png" for i in range(5)]
    return {
        "sound": files,
        "other kinds": files | dict.fromkeys(other_kinds, b"x"),
        "jpeg by another name": files | pictures("cat/a.jfif", "dog/b.JPE"),
        "hidden": files | pictures(*hidden),
        "files of systems": files
        | dict.fromkeys(("cat/._1.jpg", "cat/.DS_Store", "Thumbs.db"), b"x"),
        "in folders of a class": files
        | pictures("cat/kittens/1.png", "cat/kittens/2.png", "dog/old/3.png"),
        "names that differ in case": files
        | pictures(*(f"Cat/{i}.png" for i in range(5))),
        "names that differ in composed letters": files
        | pictures(*composed, *decomposed),
        "12 bits": grey_pets(4095),
        "10 bits in TIFF": renamed(grey_pets(1000, kind="TIFF"), "png", "tiff"),
        "16 bits beside 8": files | {"cat/deep.png": grey_picture(65535)},
        "16 bits per channel": files | {"cat/deep.png": deep_colours(60000)},
        "modes": files | modes,
        "a palette with transparency": files
        | {"cat/p.png": encoded(other.convert("P"), transparency=0)},
        "a colour profile": files
        | {"cat/p.jpg": encoded(other, "JPEG", icc_profile=b"x")},
        "pages": files
        | {
            f"cat/a.{kind.lower()}": encoded(other, kind, **pages)
            for kind in ("TIFF", "PNG", "WEBP")
        },
        "orientation": files | turned,
        "images of one value": plain_grey,
        "copies": files | renamed(selected(files, "cat"), "/", "/copy of "),
        "a class of other kinds": files | {f"bird/{i}.heic": b"x" for i in range(3)},
        "12 bits beside 8": files | {"cat/deep.png": grey_picture(4095)},
        "8 bits in 16": grey_pets(255),
        "12 bits and a brighter image": grey_pets(4095)
        | {"cat/bright.png": grey_picture(65535)},
        "16 bits with white as 0": files | {"cat/inverted.tif": inverted},
        "32 bits": files | {"cat/f.tif": grey_picture(1e6, 0, "TIFF", np.int32)},
        "floats": files | {"cat/f.tif": grey_picture(1, 0, "TIFF", np.float32)},
        "12 bits per channel": {
            name: deep_colours(4000, seed) for seed, name in enumerate(files)
        },
        "one class": selected(files, "cat"),
        "four images per class": pets(count=4),
    }


def split_folder_cases():
    """Return class folders in train/ and val/, sound ones first."""
    files = pets("train", "val")
    train = selected(files, "train")
    beside = ("test/cat/1.png", "extra/2.png", "3.png", "train/4.png")
    return {
        "sound": files,
        "tested on valid": renamed(files, "val/", "valid/"),
        "tested on test": renamed(files, "val/", "test/"),
        "beside the splits": files | pictures(*beside) | {"old.npz": b"x"},
        "folders of notebooks": files
        | pictures("val/dog/.ipynb_checkpoints/1.png", "val/.ipynb_checkpoints/2.png"),
        "empty folders": files | {"more/": b"", "train/.ipynb_checkpoints/": b""},
        "classes without a test image": train | selected(files, "val/dog"),
        "images of val without classes": train | pictures("val/1.png", "val/2.png"),
        "Tiny ImageNet": train
        | pictures("val/images/1.png")
        | {"val/val_annotations.txt": b"1.png cat"},
        "a class in another spelling": renamed(files, "val/cat", "val/Cat"),
        "an unknown class": renamed(files, "val/cat", "val/cow"),
        "splits in capitals": {name.capitalize(): file for name, file in files.items()},
        "a split by another name": renamed(files, "val/", "dev/"),
        "no training images": selected(files, "val"),
        "a class without an image": files | {"train/empty/notes.txt": b"cats"},
        "an empty class": files | {"train/empty/": b""},
        "one class": selected(files, "cat"),
        "tested on training images": train | renamed(train, "train", "val"),
        "a copy in another class of the test": files
        | {"val/dog/new.png": files["train/cat/0.png"]},
        "the pixels of most training images": files
        | {
            name.replace("train", "val").replace("png", "bmp"): encoded(
                open_png(file), "BMP"
            )
            for name, file in train.items()
        },
        "the pixels of a training image": files
        | {"val/cat/again.bmp": encoded(open_png(files["train/cat/1.png"]), "BMP")},
    }


def open_png(file):
    return Image.open(io.BytesIO(file))


@both_places
@pytest.mark.parametrize("cases", [class_folder_cases, split_folder_cases])
def test_image_folders_report_unusual_files(cases, size, data_folder, golden):
    text = describe_cases(data_folder, "image", cases(), size=size)
    name = cases.__name__.removesuffix("_cases")
    golden(f"data/{name}_{'memory' if size == IN_MEMORY else 'disk'}.txt", text)


def archives(count=20, copied=0, **changes):
    """Return a training and a test archive, of which the test images begin with copies of training images."""
    rng = np.random.default_rng(0)
    train, test = rng.integers(0, 256, (2, count, 8, 8, 3), dtype=np.uint8)
    test[:copied] = train[:copied]
    arrays = {"labels": np.arange(count) % 2, **changes}
    return {
        "train.npz": archive(**{"data": train, **arrays}),
        "test.npz": archive(**{"data": test, **arrays}),
    }


def archive_cases():
    """Return archives of images, sound ones first."""
    whole = archives()
    count = 20
    more = {"class_names": np.array(["a", "b"]), "meta": np.zeros(3)}
    column = np.arange(count) % 2.0
    lying = encoded(noise((8, 8), 9), "JPEG", orientation=6)
    upright = [encoded(noise((8, 8), seed), "JPEG") for seed in range(8)]
    tenbit = [grey_picture(1023, seed, size=(8, 8)) for seed in range(8)]
    three = {"train.npz": whole["train.npz"], "y_train.npz": whole["train.npz"]}
    unknown = archives(labels=np.full(count, 7))["test.npz"]
    return {
        "sound": whole,
        "two of 20 copied": archives(copied=2),
        "three of 20 copied": archives(copied=3),
        "all copied": archives(copied=count),
        "more arrays": archives(**more),
        "labels in a column of floats": archives(labels=column[:, None]),
        "more files": whole | {"more.npz": b"x", "sub/a.txt": b""},
        "a packed image on its side": {
            "train.npz": packed_images(*upright[:6], lying),
            "test.npz": packed_images(*upright[6:]),
        },
        "packed images of 10 bits": {
            "train.npz": packed_images(*tenbit[:6]),
            "test.npz": packed_images(*tenbit[6:]),
        },
        "packed images that end late": {
            "train.npz": packed_images(b"x", b"y", offsets=np.arange(2)),
            "test.npz": packed_images(*upright),
        },
        "two training archives": three,
        "no labels": {**whole, "train.npz": archive(images=np.zeros(3))},
        "floats": archives(data=np.zeros((count, 8, 8))),
        "four channels": archives(data=np.zeros((count, 8, 8, 4), np.uint8)),
        "one and three channels": {
            **whole,
            "train.npz": archives(data=np.zeros((count, 8, 8), np.uint8))["train.npz"],
        },
        "fewer labels": archives(labels=np.arange(2)),
        "a label below zero": archives(labels=np.arange(count) - 1),
        "an unknown label": {**whole, "test.npz": unknown},
        "an unknown label between known ones": {
            "train.npz": archives(labels=np.arange(count) % 2 * 2)["train.npz"],
            "test.npz": whole["test.npz"],
        },
        "labels of 255": archives(labels=np.where(np.arange(count) < 3, 255, column)),
        "a damaged packed image": {
            "train.npz": packed_images(*upright[:3], upright[3][:-40], upright[4]),
            "test.npz": packed_images(*upright[5:]),
        },
        "packed images of two sizes": {
            "train.npz": packed_images(*upright[:3], encoded(noise((9, 8), 1), "JPEG")),
            "test.npz": packed_images(*upright[5:]),
        },
        "fractions as labels": archives(labels=np.linspace(0, 2.99, count)),
        "complex labels": archives(labels=np.arange(count) * 1j),
        "a table of labels": archives(labels=np.zeros((count, 2), int)),
        "a label of a million": archives(labels=np.arange(count) // 19 * 10**6),
        "labels from 1": archives(labels=np.arange(count) % 2 + 1),
        "one label": archives(labels=np.full(count, 2)),
    }


def test_image_archives_report_unusual_arrays(data_folder, golden):
    text = describe_cases(data_folder, "image", archive_cases(), size=8)
    golden("data/image_archives.txt", text)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ("nowhere/", "there is no folder"),
        ("a.npz,b.npz", "there is no file .*a.npz"),
        ("a.npz,b.npz,c.npz", "two archives expected"),
        ("mnist", "unknown dataset 'mnist'"),
    ],
)
def test_image_reader_names_missing_data(dataset, message, data_folder):
    refused(message, load_images, small(dataset), error=(ValueError, DataNotFoundError))


def test_image_reader_skips_circular_links_and_pipes(data_folder):
    folder = write(data_folder / "mine", pets()) / "cat"
    (folder / "around").symlink_to(data_folder / "mine")
    (folder / "itself.png").symlink_to(folder / "itself.png")
    os.mkfifo(folder / "pipe.png")
    facts = "\n".join(report_lines(load_images(small())))
    assert "links that lead back to a folder around them (cat/around)" in facts
    assert "cat/itself.png" in facts
    assert "neither files nor folders (cat/pipe.png)" in facts
    (folder / "gone.png").symlink_to(folder / "nowhere.png")
    with pytest.raises(DataNotFoundError, match=r"there is no file .*cat/gone\.png"):
        load_images(small())


def test_image_reader_rejects_broken_file_early(data_folder):
    """Find a broken image before training starts."""
    files = pets("train", "val")
    files["val/dog/0.png"] = files["val/dog/0.png"][:200]
    with pytest.raises(ValueError, match=r"mine/val/dog/0\.png cannot be read"):
        load_own(data_folder, "image", files, size=ON_DISK)


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
    write(tmp_path, contents)
    paths = {name: str(tmp_path / name) for name in contents}
    missing = str(tmp_path / "missing")
    others = [paths[name] for name in contents if name != "a"]
    result = identical_files([paths["a"], missing], [*others, missing])
    assert result == {paths["b"]: paths["a"], paths["c"]: paths["a"]}
    assert duplicate_files([*paths.values(), missing]) == result
    assert duplicate_files(others) == {paths["c"]: paths["b"]}


def test_class_count_allows_many_classes():
    assert class_count("x", np.arange(20_000)) == 20_000
    assert class_count("x", np.array([0, 9_999])) == 10_000
    refused("x: label 20000 of 20000", class_count, "x", np.arange(1, 20_001))


# --- splits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["image_digits", "deficit_digits"])
def test_digits_split_matches_committed_rows(store):
    row = json.loads((results_dir() / f"{store}.jsonl").read_text().splitlines()[0])
    images = load_images(RunSpec.from_dict(row["spec"]).recipe)
    assert (images.checksum, images.classes) == (row["data_checksum"], 10)
    x, y = next(evaluation_batches(images.test, images, 8, CPU, 0))
    assert (x.min(), x.max(), y.dtype) == (0, pytest.approx(1.0), torch.int64)


@both_places
@pytest.mark.parametrize("place", ["", "train/"])
def test_image_reader_holds_out_every_fifth(size, place, data_folder):
    """Hold out every fifth image of each class if there is no split."""
    files = {place + name: file for name, file in class_folders(10).items()}
    result = load_own(data_folder, "image", files, size=size)
    assert "own images (mine), a fifth drawn to test on" in result.title
    assert split_sizes(result) == [14, 2, 4]
    assert sorted(labels_of(result.test)) == [0, 0, 1, 1]
    if size == IN_MEMORY:
        pixels = [*result.train.images, *result.valid.images, *result.test.images]
        assert len({image.numpy().tobytes() for image in pixels}) == 20


@both_places
def test_image_test_subset_covers_all_classes(size, data_folder):
    names = [f"kind{i}" for i in range(4)]
    files = image_folder(names, names, (4, 16))
    some = load_own(data_folder, "image", files, size=size, test_images=20).test
    counts = np.bincount(labels_of(some), minlength=4)
    assert (counts.sum(), counts.min() >= 2) == (20, True)


def test_image_test_subset_keeps_file_order(data_folder):
    write(data_folder / "mine", image_archives())
    whole, some = (
        load_images(small(size=8, test_images=count)).test for count in (None, 4)
    )
    assert torch.equal(some.images, whole.images[:4])


@both_places
def test_image_reader_keeps_copies_in_one_split(size, data_folder):
    files = pets(count=10)
    files |= renamed(files, "/", "/copy of ")
    result = load_own(data_folder, "image", files, size=size, valid_images=0)
    contents = [
        {np.asarray(image).tobytes() for image in images_of(split)}
        for split in (result.train, result.test)
    ]
    assert not contents[0] & contents[1]
    assert len(contents[1]) > 0


def images_of(split):
    """Return the images of a split in memory or on disk."""
    if isinstance(split, ArrayImages):
        return split.images
    return [image for image, _ in split]


@both_places
def test_read_whole_returns_majority_class_accuracy(size, data_folder):
    files = image_folder()
    del files["val/a/0.png"], files["val/a/1.png"]
    write(data_folder / "mine", files)
    assert read_all_data(small(size=size)) == pytest.approx(4 / 6)


# --- layouts --------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False])
def test_image_reader_loads_archives(packed, data_folder):
    files = image_archives(packed, test_part="val")
    by_folder = load_own(data_folder, "image", files, size=8)
    by_name = load_images(small("mine/train.npz,mine/val.npz", size=8))
    assert by_folder.checksum == by_name.checksum
    assert by_folder.title == "own images (mine)"
    assert (by_folder.classes, by_folder.channels, len(by_folder.test)) == (3, 3, 6)
    if not packed:
        with np.load(io.BytesIO(files["val.npz"])) as stored:
            pixels = torch.from_numpy(stored["data"]).permute(0, 3, 1, 2)
        assert torch.equal(by_folder.test.images, pixels)


def test_image_archives_of_equal_name_stay_separate(data_folder):
    bright = [grey_picture(4095, seed) for seed in range(1, 6)]
    dark = grey_picture(1000)
    files = {
        "a/x.npz": packed_images(*bright[:4]),
        "b/x.npz": packed_images(dark, bright[4]),
    }
    write(data_folder, files)
    result = load_images(small("a/x.npz,b/x.npz", size=20, valid_images=0))
    facts = report_lines(result)
    assert "read: a/x.npz: 4 images, 24 x 20 pixels, 3 channels" in facts
    assert result.test.images[0].max() <= 1000 >> 4  # the scale of both archives


@pytest.fixture
def cifar10(data_folder, monkeypatch):
    """Write CIFAR-10 with few images, and replace torchvision's official checksums; return its folder."""
    base = data_folder / "cifar-10-batches-py"
    base.mkdir()
    rng = np.random.default_rng(0)

    def part(name, content=None):
        images = rng.integers(0, 256, (10, 3072), dtype=np.uint8)
        raw = pickle.dumps(content or {"data": images, "labels": list(range(10))})
        (base / name).write_bytes(raw)
        return [name, hashlib.md5(raw).hexdigest()]

    kind = torchvision.datasets.CIFAR10
    names = [f"data_batch_{i}" for i in range(1, 6)]
    monkeypatch.setattr(kind, "train_list", [part(name) for name in names])
    monkeypatch.setattr(kind, "test_list", [part("test_batch")])
    classes = [f"class {i}" for i in range(10)]
    name, digest = part("batches.meta", {"label_names": classes})
    meta = {"filename": name, "key": "label_names", "md5": digest}
    monkeypatch.setattr(kind, "meta", meta)
    return data_folder


def test_image_reader_loads_cifar10(cifar10):
    images = load_images(small("cifar10", size=32, valid_images=5))
    assert split_sizes(images) == [45, 5, 10]
    assert images.title == "CIFAR-10"
    original = torch.from_numpy(torchvision.datasets.CIFAR10(cifar10, train=False).data)
    pixels = original[3].permute(2, 0, 1)
    assert torch.equal(images.test.images[3], pixels)
    x, _ = next(evaluation_batches(images.test, images, 32, CPU, 0))
    mean, std = (
        torch.tensor(values).view(3, 1, 1)
        for values in ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    )
    torch.testing.assert_close(x[3], (pixels / 255 - mean) / std, atol=1e-5, rtol=0)
    shrunk = load_images(small("cifar10", size=16))
    assert shrunk.test.images.shape[-2:] == (16, 16)
    assert shrunk.title == "CIFAR-10, 16 x 16"
    assert shrunk.checksum != images.checksum
    (cifar10 / "cifar-10-batches-py/test_batch").write_bytes(b"damaged")
    config = small("cifar10", size=32)
    refused("or is damaged", load_images, config, error=DataNotFoundError)


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_cifar10_download_uses_torchvision(cifar10, tmp_path_factory, monkeypatch):
    """Download from a loopback server with torchvision's transport, checksum and unpacking."""
    served = tmp_path_factory.mktemp("server") / "cifar-10-python.tar.gz"
    name = "cifar-10-batches-py"
    (cifar10 / name).rename(served.parent / name)
    with tarfile.open(served, "w:gz") as tar:
        tar.add(served.parent / name, name)
    handler = functools.partial(QuietHandler, directory=str(served.parent))
    kind = torchvision.datasets.CIFAR10
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/{served.name}"
        monkeypatch.setattr(kind, "url", url)
        monkeypatch.setattr(kind, "tgz_md5", "0" * 32)
        message = "not found or corrupted"
        refused(message, data.download, "cifar10", error=DataNotFoundError)
        digest = hashlib.md5(served.read_bytes()).hexdigest()
        monkeypatch.setattr(kind, "tgz_md5", digest)
        data.download("cifar10")
        server.shutdown()
    assert len(load_images(small("cifar10", size=32)).test) == 10
    message = "'mnist' cannot be downloaded; choose from cifar10, .*, ogbn-arxiv"
    refused(message, data.download, "mnist")


def test_image_reader_loads_imagenet_layout(data_folder):
    files = renamed(renamed(pets("train", "val"), "cat", "n01"), "dog", "n02")
    root = write(data_folder / "imagenet", files)
    torch.save(({"n01": ("cat",), "n02": ("dog",)}, ["n01"]), root / "meta.bin")
    images = load_images(small("imagenet", size=72, crop="resized"))
    assert (images.title, images.classes, len(images.test)) == ("ImageNet", 2, 12)


def moved(files, old, new):
    """Return files of which one has another name."""
    return {new if name == old else name: file for name, file in files.items()}


def test_checksum_on_disk_follows_files(data_folder, tmp_path):
    """Change the checksum with content, classes and the split, but not with the place of the data."""
    files = pets("train", "val")
    sets = {
        "equal": files,
        "content": files | {"train/cat/1.png": encoded(noise((24, 20), 99))},
        "test content": files | {"val/dog/1.png": encoded(noise((24, 20), 99))},
        "file": moved(files, "train/cat/1.png", "train/cat/x.png"),
        "class": renamed(files, "/dog/", "/fox/"),
        "split": moved(files, "val/dog/0.png", "train/dog/9.png"),
    }
    checksums = {}
    for kind, content in sets.items():
        write(data_folder / kind / "mine", content)
        config = small(f"{data_folder / kind / 'mine'}/", size=ON_DISK, crop=0)
        checksums[kind] = load_images(config).checksum
    original = load_own(data_folder, "image", files, size=ON_DISK).checksum
    assert checksums.pop("equal") == original
    assert len({original, *checksums.values()}) == 1 + len(checksums)


@pytest.mark.parametrize("name", ["Fotos, 2024/", "a,b/c,d/"])
@both_places
def test_image_folder_names_may_hold_commas(name, size, data_folder):
    write(data_folder / name, pets())
    config = small(name, size=size)
    assert task_for_data(name) == "image"
    check_data(config)
    assert split_sizes(load_images(config)) == [8, 2, 2]


def test_image_archive_names_may_hold_commas(data_folder):
    write(data_folder / "Fotos, 2024", image_archives())
    name = "Fotos, 2024/train.npz,Fotos, 2024/test.npz"
    assert task_for_data(name) == "image"
    config = small(name, size=8)
    check_data(config)
    assert (
        load_images(config).checksum
        == load_images(small("Fotos, 2024/", size=8)).checksum
    )


# --- pixels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("orientation", range(2, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_open_rgb_applies_exif_orientation(orientation, kind, tmp_path):
    image = Image.new("RGB", (48, 32))
    image.paste((255, 255, 255), (0, 0, 16, 16))
    path = tmp_path / "a.png"
    path.write_bytes(encoded(image, kind, orientation))
    with Image.open(path) as stored:
        expected = ImageOps.exif_transpose(stored).convert("RGB")
    result = open_rgb(path)
    assert result.size == expected.size
    assert np.array_equal(np.asarray(result), np.asarray(expected))
    assert inspect_image_file(path).shown_size == (result.height, result.width)
    if kind != "TIFF":  # which PIL turns in any case
        assert open_rgb(path, turn=False).size == image.size


def test_image_reader_turns_images_upright(data_folder):
    """Turn every orientation of an image that has white pixels in a corner."""
    shown = np.zeros((16, 16, 3), np.uint8)
    shown[:4, :6] = 255
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # by PIL's transpositions
    files = pets("train", "val")
    for orientation, transposition in undo.items():
        stored = Image.fromarray(shown).transpose(Image.Transpose(transposition))
        name = f"train/cat/turned{orientation}.png"
        files[name] = encoded(stored, "PNG", orientation)
    result = load_own(data_folder, "image", files, valid_images=0)
    upright = (result.train.images == torch.from_numpy(shown).permute(2, 0, 1)).all(3)
    assert upright.all(2).all(1).sum() == 7


def test_open_rgb_ignores_broken_exif(tmp_path):
    path, image = tmp_path / "a.png", noise((20, 24))
    path.write_bytes(encoded(image, exif=b"Exif\0\0II*\0garbage"))
    assert np.array_equal(np.asarray(open_rgb(path)), np.asarray(image))
    assert inspect_image_file(path).has_damaged_exif


@pytest.mark.parametrize("bits", [9, 10, 12, 13, 14, 16])
@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_image_reader_scales_deep_grey_images(bits, kind, data_folder):
    """Map the largest value of grey images of 9 to 16 bits to 255, and report the depth."""
    files = grey_pets(2**bits - 1, kind=kind, size=(16, 16))
    result = load_own(data_folder, "image", files)
    assert (result.train.images.min(), result.train.images.max()) == (0, 255)
    assert len(result.train.images[0].unique()) > 100
    assert f"{bits} bits" in "\n".join(report_lines(result))


def test_image_reader_scales_depth_by_dataset(data_folder):
    """Scale 12-bit images by the largest value of the data set, so that dark images stay dark."""
    files = grey_pets(4095) | {"cat/0.png": grey_picture(500)}
    result = load_own(data_folder, "image", files, size=ON_DISK)
    paths = [path for path, _ in result.train.dataset.samples]
    (index,) = (i for i, path in enumerate(paths) if path.endswith("cat/0.png"))
    assert np.asarray(result.train.dataset[index][0]).max() == 500 >> 4
    alone = open_rgb(data_folder / "mine/cat/0.png")
    assert np.asarray(alone).max() == 500 >> 1


def test_rgb_converts_image_modes():
    ramp = (np.arange(256, dtype=np.uint16) * 256 + 7).reshape(16, 16)
    deep = open_png(encoded(Image.fromarray(ramp)))
    assert deep.mode.startswith("I;16")
    assert np.array_equal(np.asarray(to_rgb(deep))[..., 0], ramp >> 8)
    colours = noise((8, 8))
    for mode in ("RGBA", "CMYK"):
        converted = to_rgb(colours.convert(mode))
        assert np.array_equal(np.asarray(converted), np.asarray(colours)), mode
    few = colours.quantize(8)
    assert np.array_equal(np.asarray(to_rgb(few)), np.asarray(few.convert("RGB")))
    grey = np.asarray(to_rgb(colours.convert("L")))
    assert (grey == grey[..., :1]).all()


# --- batches --------------------------------------------------------------------------------------


def batches_of(images, **changes):
    config = small(size=6, **{"crop": 2, "flip": True, **changes})
    holder = ImageData("t", 10, 1, (0.0,), (1 / 255,), None, None, None, "")
    split = ArrayImages(images, torch.arange(len(images)))
    return array_batches(split, holder, config, 0, CPU, 0)


def test_image_batches_cover_each_epoch_once():
    images = torch.arange(10, dtype=torch.uint8).view(10, 1, 1, 1).expand(10, 1, 6, 6)
    batches = list(itertools.islice(batches_of(images), 6))
    for x, labels in batches:  # every crop has pixels of its image in the middle
        assert torch.equal(x[:, 0, 3, 3], labels.float())
    numbers = [labels for _, labels in batches]
    epochs = [torch.cat(numbers[:3]).tolist(), torch.cat(numbers[3:]).tolist()]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    assert len(numbers[2]) == 2


def test_image_batches_crop_and_mirror_uniformly():
    image = torch.randint(0, 256, (1, 6, 6), dtype=torch.uint8)
    x, _ = next(batches_of(image.expand(2500, 1, 6, 6), batch=2500))
    padded = torch.nn.functional.pad(image, (2, 2, 2, 2)).float()
    crops = [padded[:, y : y + 6, x : x + 6] for y in range(5) for x in range(5)]
    places = [
        view.numpy().tobytes() for crop in crops for view in (crop, crop.flip(-1))
    ]
    assert len(set(places)) == 50
    numbers = torch.tensor([places.index(crop.numpy().tobytes()) for crop in x])
    counts = numbers.bincount(minlength=50).view(25, 2)
    assert 60 < counts.sum(1).min() <= counts.sum(1).max() < 150  # of 100
    assert abs(float(counts.sum(0)[1]) / 2500 - 0.5) < 0.04  # four standard deviations


def test_image_folder_batches_resume_exactly(data_folder):
    files = pictures(*pets("train", ending="jpg"), size=(80, 84))
    files |= pictures(*pets("val", count=3, ending="jpg"), size=(80, 84))
    write(data_folder / "mine", files)
    config = small(size=72, crop="resized", flip=True)
    images = load_images(config)
    assert split_sizes(images) == [10, 2, 6]
    straight = list(
        itertools.islice(file_batches(images.train, config, 0, CPU, 0, 0), 6)
    )
    assert [len(y) for _, y in straight[:3]] == [4, 4, 2]
    x, y = straight[5]
    for workers in (0, 1):
        resumed, labels = next(file_batches(images.train, config, 0, CPU, workers, 5))
        assert torch.equal(resumed, x)
        assert torch.equal(labels, y)
    shared = file_batches(
        images.train, config, 0, CPU, 0, 5, share=lambda keys: keys[1:]
    )
    assert torch.equal(next(shared)[0], x[1:])  # a process reads no more than its part
    evaluated, _ = next(evaluation_batches(images.test, images, 72, CPU, 0))
    assert evaluated.shape == (6, 3, 72, 72)
    assert sorted(images.train.indices + images.valid.indices) == list(range(12))
    # Files come class by class: held-out images at an end would be of one class.
    assert images.valid.indices not in ([0, 1], [10, 11])


@pytest.mark.parametrize("pad", [0, 1, 3])
def test_image_folder_batches_crop_by_padding(pad, data_folder):
    """Crop images from disk as those in memory: any window of the padded centre, which images to test on show."""
    images = load_own(data_folder, "image", pets(), size=72, crop=pad)
    evaluated = next(evaluation_batches(images.train, images, 72, CPU, 0))[0]
    black = make_normalizer(CPU)(torch.zeros(1, 3, 1, 1))
    padded = black.repeat(len(evaluated), 1, 72 + 2 * pad, 72 + 2 * pad)
    padded[:, :, pad : pad + 72, pad : pad + 72] = evaluated
    windows = padded.unfold(2, 72, 1).unfold(3, 72, 1)
    config = small(size=72, crop=pad, flip=False, batch=len(evaluated))
    numbers = torch.tensor([index for _, index in next(batch_keys(8, 8, 0, 0))])
    x, labels = next(file_batches(images.train, config, 0, CPU, 0, 0))
    places = set()
    for crop, image in zip(x, windows[numbers], strict=True):
        matches = (image == crop[:, None, None]).flatten(3).all(3).all(0)
        (place,) = matches.nonzero().tolist()
        places.add(tuple(place))
    assert len(places) == 1 if pad == 0 else len(places) > 1
    assert labels.tolist() == [labels_of(images.train)[i] for i in numbers]


@pytest.mark.parametrize(
    ("crop", "words"),
    [
        (0, "82 pixels on the short side and cropped to the 72 x 72 in the middle"),
        (3, "in the middle; training images are then padded with 3 black pixels and"),
        ("resized", "in the middle to test on; of training images a part drawn at"),
    ],
)
def test_image_report_names_crop_on_disk(crop, words, data_folder):
    write(data_folder / "mine", pets())
    for value in (4, crop):  # the report of another crop is cached
        spec = smoke_spec("digits", dataset="mine/", size=72, crop=value)
        data = load_task_class(spec)(spec, CPU).data
    (line,) = (line for line in report_lines(data) if "in the middle" in line)
    assert words in line


@pytest.mark.parametrize(
    ("size", "crop"),
    [(64, "resized"), (20, "resized"), (72, -1), (20, -1), (72, "centre"), (20, "2")],
)
def test_image_reader_rejects_crops_of_other_sizes(size, crop, data_folder):
    write(data_folder / "mine", pets())
    message = (
        "crop: expected a number of pixels from 0 on, or 'resized' at a size above 64; "
        f"got {crop!r} at size {size}"
    )
    refused(message, load_images, small(size=size, crop=crop))


def test_image_batches_normalise_like_imagenet():
    red = Image.new("RGB", (80, 80), (255, 0, 0))
    images, _ = next(evaluation_batches([(red, 0)], None, 72, CPU, 0))
    expected = [(1 - 0.485) / 0.229, -0.456 / 0.224, -0.406 / 0.225]
    assert images[0, :, 36, 36].tolist() == pytest.approx(expected, rel=1e-5)
