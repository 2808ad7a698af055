"""Data files: readers on damaged files, data of the wrong task, fingerprints and caching."""

import gzip
import io
import os
import pickle
import zipfile
import zlib
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from dataset_layouts import (
    annotated_picture,
    archive,
    boxes,
    class_folders,
    image_archives,
    image_folder,
    ogb_folder,
    pair_files,
    picture,
    planetoid,
    table,
    write,
)
from helpers import refused
from PIL import Image

from cpt_lab.data import loading
from cpt_lab.data.detection import load_detection
from cpt_lab.data.entailment import load_entailment
from cpt_lab.data.files import DataNotFoundError, check_data, fingerprint, task_for_data
from cpt_lab.data.graphs import load_graph
from cpt_lab.data.image_readers import to_rgb
from cpt_lab.data.images import load_images
from cpt_lab.data.loading import load_once
from cpt_lab.data.splits import as_int64_vector, split_sizes, title_with_sizes
from cpt_lab.data.text import SPLITS, load_text
from cpt_lab.experiments.registry import DATASETS, EXPERIMENTS, recipe
from cpt_lab.paths import cards_dir
from cpt_lab.tasks.base import read_all_data

LOAD = {
    "image": load_images,
    "detection": load_detection,
    "graph": load_graph,
    "language_model": load_text,
    "entailment": load_entailment,
}
pytestmark = pytest.mark.usefixtures("data_folder")
CHANGES = {
    "entailment": {"language": "en", "test_languages": ("en",)},
    "language_model": {"batch": 2},
}


def own(task, dataset, **changes):
    return replace(
        recipe("smoke", dataset, task=task), **{**CHANGES.get(task, {}), **changes}
    )


# --- one small data set of every layout -----------------------------------------------------------


GRAPH = {
    "edge_index": np.array([[0, 1, 2, 3], [1, 2, 3, 4]]),
    "features": np.eye(6, 3, dtype=np.float32),
    "labels": np.array([0, 1, 0, 1, 0, 1]),
    "train_idx": np.array([0, 1]),
    "valid_idx": np.array([2]),
    "test_idx": np.array([3, 4]),
}


def without_split():
    return {
        "x": GRAPH["features"],
        "y": GRAPH["labels"],
        "edge_index": GRAPH["edge_index"],
    }


def voc_folder():
    cats = (annotated_picture(i, (30, 40), [("cat", (2, 2, 20, 20))]) for i in "xy")
    return {**boxes(train="x", test="y"), **next(cats), **next(cats)}


LAYOUTS = {  # name -> task, its files
    "images in archives": ("image", image_archives),
    "packed images": ("image", lambda: image_archives(packed=True)),
    "folders of images": ("image", image_folder),
    "boxes": ("detection", voc_folder),
    "classes without a split": ("image", class_folders),
    "graph in an archive": ("graph", lambda: {"g.npz": archive(**GRAPH)}),
    "OGB's layout": ("graph", lambda: ogb_folder(GRAPH)),
    "Planetoid": ("graph", planetoid),
    "a graph without a split": ("graph", lambda: {"g.npz": archive(**without_split())}),
    "tiles without a split": (
        "image",
        lambda: {
            n.replace("png", "TIF"): picture(kind="TIFF", seed=i)
            for i, n in enumerate(class_folders())
        },
    ),
    "one text": ("language_model", lambda: {"novel.txt": b"one two three\n" * 30}),
    "text": (
        "language_model",
        lambda: {
            f"{part}.txt": b"one two three\n" * (9 - i) for i, part in enumerate(SPLITS)
        },
    ),
    **{
        f"pairs as {e}": ("entailment", partial(pair_files, e))
        for e in ("csv", "parquet", "jsonl", "tsv")
    },
}


def own_data(folder, files):
    """Write files, and return the name of the data set."""
    write(folder / "mine", files)
    return "mine/g.npz" if list(files) == ["g.npz"] else "mine/"


# --- damage ---------------------------------------------------------------------------------------


class Code:
    """Object whose unpickling fails the test."""

    def __reduce__(self):
        return (pytest.fail, ("code of a file ran",))


def empty_zip_member():
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        z.writestr("data.npy", "")
        z.writestr("labels.npy", "")
    return out.getvalue()


DAMAGE = {
    "empty": lambda whole: b"",
    "half": lambda whole: whole[: len(whole) // 2],
    "noise": lambda whole: np.random.default_rng(0).bytes(200),
    "zeros": lambda whole: bytes(300),
    "code": lambda whole: pickle.dumps(Code()),
    "zip": lambda whole: empty_zip_member(),
    "gzip of noise": lambda whole: gzip.compress(np.random.default_rng(1).bytes(200)),
}
HALVES_MAY_BE_WHOLE = (".txt", ".csv", ".tsv", ".jsonl")


def refusal(asked):
    """Return the error message of the loader, or None if the data load."""
    try:
        LOAD[asked.task](asked)
    except (ValueError, DataNotFoundError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_readers_name_damaged_files(layout, data_folder):
    """Name every damaged file and the reason in one short line."""
    task, make = LAYOUTS[layout]
    files = make()
    dataset = own_data(data_folder, files)
    LOAD[task](own(task, dataset))
    seen = set()
    for name in files:
        if (
            kind := name.replace("test", "").replace("y.", "x.").replace("/b/", "/a/")
        ) in seen or name[-5] in "123":
            continue  # one of a kind is enough
        seen.add(kind)
        path = data_folder / "mine" / name
        for damage, change in DAMAGE.items():
            path.write_bytes(change(files[name]))
            said = refusal(own(task, dataset))
            if said is None:
                assert (damage, path.suffix) in {
                    ("half", s) for s in HALVES_MAY_BE_WHOLE
                }, (name, damage)
            else:
                assert str(data_folder / "mine") in said or "mine/" in said, (
                    name,
                    damage,
                    said,
                )
                assert "\n" not in said, (name, damage, said)
                assert len(said) < 400, (name, damage, said)
        path.write_bytes(files[name])


def huge(shape, kind="|u1"):
    """Return an .npz file whose only member claims the size of ``shape``."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        out, {"descr": kind, "fortran_order": False, "shape": shape}
    )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as z:
        z.writestr("data.npy", out.getvalue())
        z.writestr("labels.npy", _npy(np.arange(3)))
    return packed.getvalue()


def _npy(array):
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def bomb():
    """Return an image of a few bytes whose header claims 40,000 x 40,000 pixels."""
    whole = picture((1, 1))
    header = b"IHDR" + (40_000).to_bytes(4) * 2 + whole[24:29]
    return whole[:12] + header + zlib.crc32(header).to_bytes(4) + whole[33:]


def graph(**changes):
    return {
        "g.npz": archive(
            **{k: v for k, v in {**GRAPH, **changes}.items() if v is not None}
        )
    }


def sparse(**changes):
    csr = {
        "feat_indptr": np.arange(7),
        "feat_indices": np.zeros(6, int),
        "feat_shape": np.array([6, 3]),
        **changes,
    }
    return graph(features=None, **csr)


def masks(form):
    """Return a graph whose first split is given as masks in one layout."""
    out = {}
    for name, part in (
        ("train", "train_idx"),
        ("val", "valid_idx"),
        ("test", "test_idx"),
    ):
        mask = np.zeros((3, 6), bool)
        mask[0, GRAPH[part]] = True
        out[f"{name}_mask" + "s" * (form(mask).ndim == 2)] = form(mask)
    return graph(train_idx=None, valid_idx=None, test_idx=None, **out)


def images(**changes):
    whole = {
        "data": np.zeros((12, 16, 16), np.uint8),
        "labels": np.arange(12) % 2,
        **changes,
    }
    return {
        "train.npz": archive(**whole),
        "test.npz": archive(**whole | {"data": whole["data"] + 1}),
    }


WHOLE = "labels must be whole numbers"


def changed(files, **contents):
    """Replace the content of files by the ends of their names."""
    ends = {end.replace("_", "."): content for end, content in contents.items()}
    return {
        name: next((c for e, c in ends.items() if name.endswith(e)), whole)
        for name, whole in files.items()
    }


@pytest.mark.parametrize(
    ("task", "files", "message"),
    [
        (
            "image",
            lambda: image_folder(val=("b", "c")),
            r"mine/val: class 'c' is unknown; those of train/ are a, b",
        ),
        (
            "image",
            lambda: {**image_folder(), "train/a/0.png": bomb()},
            r"train/a/0\.png cannot be read: DecompressionBombError",
        ),
        (
            "image",
            lambda: {"train.npz": huge((1 << 20,) * 3), "test.npz": b""},
            r"train\.npz cannot be read: .*(Memory|allocate|too big)",
        ),
        (
            "image",
            lambda: images(data=np.zeros((12, 8, 8, 4), np.uint8)),
            r"train\.npz: images must have 1 or 3 channels, .* got 4",
        ),
        (
            "image",
            lambda: {**images(), "test.npz": images(labels=np.full(12, 7))["test.npz"]},
            r"test\.npz: label 7 is unknown; train\.npz has 0\.\.1",
        ),
        (
            "image",
            lambda: {**images(), "test.npz": image_archives()["test.npz"]},
            "images have 1 and 3 channels",
        ),
        (
            "image",
            lambda: images(labels=np.linspace(0, 2.99, 12)),
            rf"train\.npz: {WHOLE}, number 1 is 0\.27",
        ),
        (
            "image",
            lambda: images(labels=np.arange(12) * 1j),
            rf"train\.npz: {WHOLE} .* got complex128",
        ),
        (
            "image",
            lambda: images(labels=np.zeros((12, 2), int)),
            rf"{WHOLE} of shape \(n,\), got int64 \(12, 2\)",
        ),
        (
            "detection",
            lambda: changed(
                voc_folder(), x_xml=b'<?xml version="1.0" encoding="klingon"?>'
            ),
            r"x\.xml cannot be read: LookupError",
        ),
        (
            "detection",
            lambda: changed(voc_folder(), x_jpg=bomb()),
            r"x\.jpg cannot be read: DecompressionBombError",
        ),
        (
            "graph",
            lambda: graph(features=np.full((6, 3), 1e300)),
            r"18 features are NaN or infinite, the first in node 0 \(as float32\)",
        ),
        (
            "graph",
            lambda: graph(features=np.eye(6, 3) * 1j),
            r"features must be real numbers, got complex128",
        ),
        (
            "graph",
            lambda: sparse(feat_indices=np.array([0, 1, 2, -1, 0, 0])),
            r"do not fit feat_shape \(6, 3\)",
        ),
        (
            "graph",
            lambda: sparse(feat_indptr=np.array([0, 4, 2, 3, 4, 5, 6])),
            r"do not fit feat_shape \(6, 3\)",
        ),
        (
            "graph",
            lambda: sparse(feat_shape=np.array([6, 1 << 50])),
            r"shape \(6, 1125899906842624\) would take",
        ),
        (
            "graph",
            lambda: masks(lambda m: m[:, :5]),
            r"masks of the train split must be .* N = 6, got \(3, 5\)",
        ),
        (
            "graph",
            lambda: masks(lambda m: np.tile(m, (2, 1))),
            r"\(6, 6\) could be either: keep one mask",
        ),
        (
            "graph",
            lambda: changed(ogb_folder(GRAPH), edge_csv_gz=table([[0, 1, 2]] * 4)),
            r"edge\.csv\.gz cannot be read: 2 columns expected, got 3",
        ),
        (
            "graph",
            lambda: changed(
                ogb_folder(GRAPH), label_csv_gz=table(np.arange(6) / 4, "%.2f")
            ),
            rf"node-label\.csv\.gz: {WHOLE}, number 1 is 0\.25",
        ),
        (
            "graph",
            lambda: changed(ogb_folder(GRAPH), feat_csv_gz=gzip.compress(b"a,b\n" * 6)),
            r"node-feat\.csv\.gz cannot be read: .*could not convert",
        ),
        (
            "graph",
            lambda: changed(planetoid(), test_index=b"-7\n8\n9"),
            r"test\.index names node -7",
        ),
    ],
)
def test_readers_reject_hostile_content(task, files, message, data_folder):
    dataset = own_data(data_folder, files())
    refused(message, LOAD[task], own(task, dataset))


# --- content that is read rightly -----------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [lambda m: m, lambda m: m.T, lambda m: m[0], lambda m: m[0].astype(float)],
    ids=["(splits, N)", "(N, splits)", "(N,)", "ones and zeros"],
)
def test_graph_reader_accepts_mask_layouts(form, data_folder):
    found = load_graph(own("graph", own_data(data_folder, masks(form))))
    assert [found.train.tolist(), found.valid.tolist(), found.test.tolist()] == [
        [0, 1],
        [2],
        [3, 4],
    ]
    assert found.test_labels.tolist() == found.labels[3:5].tolist()


@pytest.mark.parametrize("size", [16, 72])  # in memory and from disk
def test_image_reader_numbers_validation_classes_by_training(size, data_folder):
    dataset = own_data(data_folder, image_folder(("a", "b", "c"), ("b", "c")))
    found = load_images(
        own("image", dataset, size=size, valid_images=0, train_images=None)
    )
    labels = (
        found.test.labels.tolist() if size == 16 else [label for _, label in found.test]
    )
    assert labels == [1] * 4 + [2] * 4
    assert found.classes == 3


@pytest.mark.parametrize("size", [16, 72])
def test_read_whole_returns_majority_class_accuracy(size, data_folder):
    files = {
        name: file
        for name, file in image_folder().items()
        if name not in ("val/a/0.png", "val/a/1.png")
    }
    assert read_all_data(
        own("image", own_data(data_folder, files), size=size)
    ) == pytest.approx(4 / 6)


def test_image_reader_accepts_column_and_float_labels(data_folder):
    found = load_images(
        own(
            "image",
            own_data(data_folder, images(labels=(np.arange(12.0) % 2)[:, None])),
            size=16,
        )
    )
    assert found.test.labels.tolist() == [0, 1] * 6
    assert as_int64_vector("labels", np.array([1.0, np.nan]), missing=-1).tolist() == [
        1,
        -1,
    ]


def test_rgb_converts_image_modes(tmp_path):
    ramp = (np.arange(256, dtype=np.uint16) * 256 + 7).reshape(16, 16)
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    with Image.open(tmp_path / "deep.png") as deep:
        assert deep.mode.startswith("I;16")
        assert np.array_equal(np.asarray(to_rgb(deep))[..., 0], ramp >> 8)
    colours = Image.fromarray(
        np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    )
    for mode in ("RGBA", "CMYK"):
        assert np.array_equal(
            np.asarray(to_rgb(colours.convert(mode))), np.asarray(colours)
        ), mode
    few = colours.quantize(8)
    assert np.array_equal(np.asarray(to_rgb(few)), np.asarray(few.convert("RGB")))
    grey = np.asarray(to_rgb(colours.convert("L")))
    assert (grey == grey[..., :1]).all()
    dark = Image.fromarray(np.arange(256, dtype=np.uint16).reshape(16, 16))
    refused(
        "16 bits whose values end at 255 would be black; save it with 8", to_rgb, dark
    )
    refused(
        "8 or 16 bits expected, got PIL's mode F",
        to_rgb,
        Image.fromarray(np.ones((2, 2), np.float32)),
    )


# --- at a glance ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_task_of_data_follows_layout(layout, data_folder):
    right, make = LAYOUTS[layout]
    dataset = own_data(data_folder, make())
    assert task_for_data(dataset) == right
    assert (cards_dir() / EXPERIMENTS[right].card).is_file()
    check_data(own(right, dataset))
    for task in set(EXPERIMENTS) - {right}:
        refused(
            rf"mine.* is no data for this task \({task}\); it needs .*own-\w+\.md",
            check_data,
            own(task, dataset),
        )


VOC = "Pascal VOC's layout: Annotations/<id>.xml, JPEGImages"


@pytest.mark.parametrize(
    ("file", "way"),
    [
        ("a.JPG", "the images of every class a folder"),
        ("a.jpg a.xml", VOC),
        ("train/a.jpg train/a.xml valid/b.jpg valid/b.xml", VOC),
        ("JPEGImages/a.jpg Annotations/a.xml", "ImageSets/Main/train.txt"),
        ("cat/a.heic dog/b.HEIC", r"save them as \.jpg or \.png"),
        ("cat/a.GIF", r"save them as \.jpg or \.png"),
        ("cat/a.avif dog/b.avif", r"save them as \.jpg or \.png"),
        ("training/cat/a.jpg testing/cat/a.jpg", "call the folders train/ and test/"),
        (
            "data/train/cat/a.jpg data/val/cat/a.jpg",
            "the folder in which the folders of the classes, or train/, lie",
        ),
        ("MNIST/raw/train-images-idx3-ubyte.gz", r"train\.npz and test\.npz"),
        ("labels/train/a.txt", VOC),
        ("labels/a.txt images/a.jpg", VOC),
        ("train/labels/a.txt train/images/a.jpg", VOC),
        ("train.json train/a.jpg", VOC),
        ("annotations/instances_train2017.json train2017/a.jpg", VOC),
        ("train/_annotations.coco.json train/a.jpg valid/a.jpg", VOC),
        (
            "Train/cat/a.jpg Test/cat/a.jpg",
            "call the folders train/ and test/, in small letters",
        ),
        ("processed/data.pt", "PyTorch Geometric with numpy.savez"),
        ("train/data-0.arrow train/dataset_info.json", "Hugging Face's datasets"),
        (
            "snli_1.0_train.jsonl snli_1.0_test.jsonl",
            "sentence pairs train, validation and test, such as train.jsonl",
        ),
        ("wiki.train.tokens", "call the files of a text train, valid and test"),
        ("karate.gml", "numpy.savez"),
    ],
)
def test_task_of_data_rejects_unknown_layouts(file, way, data_folder):
    """Suggest the nearest layout in a short error message."""
    write(data_folder / "mine", dict.fromkeys(file.split(), b""))
    with pytest.raises(
        ValueError,
        match=rf"mine is not laid out as any task needs it; found [^;]+; .*{way}",
    ) as said:
        task_for_data("mine/")
    assert len(str(said.value)) < 300  # and not what every task needs
    refused(way, check_data, own("graph", "mine/"))


def test_task_of_data_names_misspelt_parts(data_folder):
    np.savez(data_folder / "mine.npz", x=np.ones((3, 2)), y=np.arange(3))
    refused(
        r"mine\.npz is not .*; found the array x, the array y\. .*edge_index",
        task_for_data,
        "mine.npz",
    )
    write(
        data_folder / "voc",
        {
            "JPEGImages/a.jpg": b"",
            "annotation/a.xml": b"",
            "ImageSets/Main/train.txt": b"a",
        },
    )
    refused(
        r"found ImageSets/, JPEGImages/, annotation/; boxes need Pascal VOC's layout: Ann",
        task_for_data,
        "voc/",
    )


def test_readers_name_all_wrong_files(data_folder):
    files = {
        n: b"" if n[:6] == "train/" and n[-5] in "12" else f
        for n, f in image_folder(counts=(12, 4)).items()
    }
    said = refusal(own("image", own_data(data_folder, files)))
    assert said.splitlines()[0] == "6 files are wrong:"  # of two classes 1, 2 and 11
    assert said.count("cannot be read: it is empty") == 6
    names = [str(i) for i in range(15)]
    refused(
        r"15 files are wrong:\n(.*\n){10}and 5 more",
        loading.read_each,
        lambda name: as_int64_vector(name, ["a"]),
        names,
    )


@pytest.mark.parametrize("task", EXPERIMENTS)
def test_check_data_rejects_missing_user_data(task):
    for dataset in ("nowhere/", "nowhere.npz", "nowhere.txt"):
        refused(
            r"there is no file or folder .*nowhere",
            check_data,
            own(task, dataset),
            error=DataNotFoundError,
        )


@pytest.mark.parametrize("dataset", DATASETS)
def test_check_data_suggests_download_command(dataset, data_folder):
    found = DATASETS[dataset]
    asked = recipe(
        next(
            scale
            for scale in ("smoke", "paper")
            if scale in found.recipes or found.like
        ),
        dataset,
    )
    if found.embedded:
        check_data(asked)
        assert fingerprint(asked) == ""
        return
    for look in (check_data, LOAD[asked.task]):
        refused(
            f"python -m cpt_lab download {dataset}",
            look,
            asked,
            error=DataNotFoundError,
        )
    (data_folder / found.folders[0]).mkdir(parents=True)
    check_data(asked)


# --- what is kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout", ["graph in an archive", "images in archives", "folders of images"]
)
def test_fingerprint_changes_with_files(layout, data_folder):
    task, make = LAYOUTS[layout]
    files = make()
    asked = own(task, own_data(data_folder, files))
    before = fingerprint(asked)
    assert before == fingerprint(asked) != ""
    path = data_folder / "mine" / list(files)[-1]
    content, stat = path.read_bytes(), path.stat()
    path.write_bytes(bytes(len(content)))
    assert (path.stat().st_size, fingerprint(asked) == before) == (stat.st_size, False)
    for content_now, same in ((content + b"x", False), (content, True)):
        path.write_bytes(content_now)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert (fingerprint(asked) == before) == same
    path.unlink()
    assert fingerprint(asked) != before


def test_fingerprint_follows_links(data_folder):
    asked = own("image", own_data(data_folder, image_folder()))
    folder = data_folder / "mine" / "train" / "a"
    folder.rename(data_folder / "elsewhere")
    folder.symlink_to(data_folder / "elsewhere")
    before = fingerprint(asked)
    (data_folder / "elsewhere" / "0.png").unlink()
    assert fingerprint(asked) != before


def test_load_once_reloads_after_changes(data_folder, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(loading, "_last", {})
    task, make = LAYOUTS["text"]
    files = make()
    words = own(task, own_data(data_folder, files))
    fields = ("unit", "batch")
    first = load_once(load_text, words, *fields)
    assert load_once(load_text, replace(words, steps=words.steps + 1), *fields) is first
    assert len(
        load_once(load_text, replace(words, unit="characters"), *fields).train
    ) > len(first.train)
    assert load_once(load_text, words, *fields) is not first  # the last alone is kept
    (data_folder / "mine" / "train.txt").write_bytes(b"quite another one\n" * 9)
    assert "another" in load_once(load_text, words, *fields).vocabulary
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    own_data(elsewhere, {**files, "train.txt": b"one quite like it\n" * 9})
    for name in files:  # as a copy that keeps the times
        stat = (data_folder / "mine" / name).stat()
        os.utime(elsewhere / "mine" / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    before = fingerprint(words)
    monkeypatch.setenv("CPT_DATA_DIR", str(elsewhere))
    assert fingerprint(words) == before
    assert "like" in load_once(load_text, words, *fields).vocabulary


# --- sizes of splits ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "there", "sizes"),
    [
        ((500, 100), 600, (500, 100)),
        ((500, 100), 360, (324, 36)),
        ((500, 10), 360, (350, 10)),
        ((500, 0), 360, (360, 0)),
        ((None, 5), 12, (None, 5)),
        ((None, 5_000), 600, (None, 60)),
        ((10, 10), 3, (2, 1)),
        ((350, 100), 400, (350, 40)),
    ],
)
def test_split_sizes_shrink_for_small_data(wanted, there, sizes):
    asked = own("image", "mine/", train_images=wanted[0], valid_images=wanted[1])
    assert split_sizes(asked, there) == sizes
    used, held = sizes
    rest = range(there - held)[:used]
    assert (title_with_sizes("mine", asked, rest, range(held)) == "mine") == (
        sizes == wanted
    )
    if sum(filter(None, wanted)) > there:
        refused(
            rf"images wanted, there are {there}",
            split_sizes,
            replace(asked, dataset="cifar10"),
            there,
        )


@pytest.mark.parametrize("size", [16, 72])
def test_image_reader_uses_small_folder_whole(size, data_folder):
    found = load_images(own("image", own_data(data_folder, image_folder()), size=size))
    assert (len(found.train), len(found.valid), len(found.test)) == (7, 1, 8)
    assert found.title.endswith("7 training and 1 validation images")
    assert "mine" in found.title
