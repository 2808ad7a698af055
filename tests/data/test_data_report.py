"""Data reports: every file or value that a reader skips, converts or mixes is a fact or an error."""

import io
import random
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from dataset_layouts import (
    annotated_picture,
    archive,
    boxes,
    ogb_folder,
    picture,
    planetoid,
    write,
)
from PIL import Image

from cpt_lab.data.detection import load_detection
from cpt_lab.data.entailment import load_entailment
from cpt_lab.data.files import DataNotFoundError
from cpt_lab.data.graphs import load_graph
from cpt_lab.data.images import load_images
from cpt_lab.data.report import NOTICES, TOPICS, DataReport, list_counts, list_first
from cpt_lab.data.text import load_text
from cpt_lab.experiments.registry import recipe
from cpt_lab.tasks.base import load_data

LOAD = {
    "image": load_images,
    "detection": load_detection,
    "graph": load_graph,
    "language_model": load_text,
    "entailment": load_entailment,
}
CHANGES = {
    "image": {"size": 12, "valid_images": 0},
    "detection": {"valid_images": 0},
    "language_model": {"batch": 2},
    "entailment": {"language": "en", "test_languages": ("en",)},
}
BOX = [("cat", (2, 2, 20, 20))]


# --- one sound data set per layout ----------------------------------------------------------------
def class_folders(count=6):
    """Return distinct images of two classes."""
    names = [f"{kind}/{i}.png" for kind in ("cat", "dog") for i in range(count)]
    return {name: picture((12, 12), "PNG", seed) for seed, name in enumerate(names)}


def split_folders():
    """Return distinct images of two classes in train/ and val/."""
    names = [
        f"{part}/{kind}/{i}.png"
        for part in ("train", "val")
        for kind in ("cat", "dog")
        for i in range(4)
    ]
    return {name: picture((12, 12), "PNG", seed) for seed, name in enumerate(names)}


def image_archives(**more):
    """Return archives of distinct training and test images."""
    rng = np.random.default_rng(0)
    parts = {"train": 12, "test": 6}
    return {
        f"{part}.npz": archive(
            data=rng.integers(0, 256, (count, 12, 12, 3), dtype=np.uint8),
            labels=np.arange(count) % 3,
            **more,
        )
        for part, count in parts.items()
    }


def annotated_pictures():
    """Return six images with a box each, four for training and two for testing."""
    files = boxes(train="abcd", test="ef")
    for i, name in enumerate("abcdef"):
        files |= annotated_picture(name, (30, 40), BOX)
        files[f"JPEGImages/{name}.jpg"] = picture((30, 40), "JPEG", i)
    return files


def graph_arrays(**more):
    """Return a graph of twelve nodes with a split."""
    edges = np.array([np.arange(11), np.arange(1, 12)])
    split = {
        "train_idx": np.arange(6),
        "valid_idx": np.arange(6, 8),
        "test_idx": np.arange(8, 12),
    }
    features = np.random.default_rng(0).random((12, 3), dtype=np.float32)
    return {
        "edge_index": edges,
        "features": features,
        "labels": np.arange(12) % 3,
        **split,
        **more,
    }


def lines(seed, count):
    """Return lines of eight words."""
    words = "the cat sat on a mat and saw dogs run far away home".split()
    draw = random.Random(seed)
    return [" ".join(draw.choices(words, k=8)) for _ in range(count)]


def texts(ending="\n"):
    """Return distinct lines for training, validation and test."""
    sizes = {"train": 60, "valid": 20, "test": 20}
    return {
        f"{part}.txt": "".join(line + ending for line in lines(seed, count)).encode()
        for seed, (part, count) in enumerate(sizes.items())
    }


def pair_frame(split, count):
    """Return different sentence pairs."""
    return pd.DataFrame(
        {
            "premise": [f"{split} premise {i}" for i in range(count)],
            "hypothesis": [f"{split} hypothesis {i}" for i in range(count)],
            "label": [i % 3 for i in range(count)],
        }
    )


def pairs(change=lambda split, frame: frame):
    """Return sentence pairs as .jsonl files, changed per split."""
    sizes = {"train": 12, "validation": 6, "test": 6}
    frames = {
        split: change(split, pair_frame(split, count)) for split, count in sizes.items()
    }
    return {
        f"{split}.jsonl": frame.to_json(orient="records", lines=True).encode()
        for split, frame in frames.items()
    }


LAYOUTS = {  # name -> task, files, folders in which a stray file may lie
    "class folders": ("image", class_folders, ("", "cat/", "cat/more/")),
    "split folders": (
        "image",
        split_folders,
        ("", "train/", "val/", "train/cat/", "val/dog/more/"),
    ),
    "image archives": ("image", image_archives, ("",)),
    "boxes": (
        "detection",
        annotated_pictures,
        ("", "JPEGImages/", "Annotations/", "ImageSets/Main/"),
    ),
    "OGB folder": (
        "graph",
        lambda: ogb_folder(graph_arrays_for_ogb()),
        ("", "raw/", "split/time/"),
    ),
    "Planetoid": ("graph", planetoid, ("",)),
    "texts": ("language_model", texts, ("",)),
    "pairs": ("entailment", pairs, ("",)),
}


def graph_arrays_for_ogb():
    return graph_arrays()


@pytest.fixture
def told(data_folder):
    """Return the notices or the error of a reader as text, and the data if they load."""

    def load(task, files, dataset="mine/", **changes):
        write(data_folder / "mine", files)
        asked = replace(
            recipe("smoke", dataset, task=task), **{**CHANGES.get(task, {}), **changes}
        )
        try:
            found = LOAD[task](asked)
        except (ValueError, DataNotFoundError) as error:
            return str(error), None
        return "\n".join(
            f"{topic}: {text}" for topic, text in found.report.facts
        ), found

    return load


def assert_named(text, *words):
    """Assert that a text holds all words."""
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not named in:\n{text}"


def sizes_of(found):
    """Return the number of samples in each split of loaded data."""
    test = found.test
    tests = list(test.values()) if isinstance(test, dict) else [test]
    return [len(part) for part in (found.train, found.valid, *tests)]


# --- sound data -----------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS)
def test_data_report_lists_split_sizes(layout, told):
    """Report the split sizes and no skipped file for sound data."""
    task, files, _ = LAYOUTS[layout]
    text, found = told(task, files())
    assert found is not None, text
    assert "left out" not in [
        fact.topic for fact in found.report.facts if "file" in fact.text
    ]
    topics = {fact.topic for fact in found.report.facts}
    assert {"read", "split"} <= topics <= set(TOPICS)


@pytest.mark.parametrize(
    "dataset", ["digits", "digits-graph", "digit-scenes", "templates", "pydoc"]
)
def test_data_report_digest_is_reproducible(dataset):
    asked = recipe("smoke", dataset)
    first, second = (LOAD[asked.task](asked).report for _ in range(2))
    assert first.facts
    assert first.digest == second.digest
    assert load_data(asked).report.digest == first.digest


# --- files that are not read ----------------------------------------------------------------------
STRAY = [
    "photo.heic",
    "scan.dcm",
    "moving.gif",
    "notes.docx",
    "old.zip",
    "README",
    "table.xlsx",
    "x.pt",
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", STRAY)
def test_data_report_names_stray_files(layout, name, told):
    task, files, folders = LAYOUTS[layout]
    stray = {
        f"{folder}{i}-{name}": b"no data of this task"
        for i, folder in enumerate(folders)
    }
    text, _ = told(task, files() | stray)
    missing = [path for path in stray if path.rpartition("/")[2] not in text]
    assert not missing or f"{len(stray)} files" in text, (
        f"{missing} of {sorted(stray)} not named in:\n{text}"
    )


HIDDEN = [
    ".ipynb_checkpoints",
    "@eaDir",
    ".thumbnails",
    "__MACOSX",
    ".git",
    ".Trash-1000",
    ".AppleDouble",
]


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_readers_skip_and_count_hidden_folders(layout, hidden, told, data_folder):
    task, files, folders = LAYOUTS[layout]
    sound = files()
    _, before = told(task, sound)
    assert before is not None
    copies = {}
    for folder in folders:
        for path, content in sound.items():
            above, _, name = path.rpartition("/")
            if f"{above}/" == folder or (not above and not folder):
                copies[f"{folder}{hidden}/copy-{name}"] = content
        copies.setdefault(f"{folder}{hidden}/copy.png", picture((12, 12), "PNG", 99))
    text, after = told(task, sound | copies)
    assert after is not None, text
    assert (sizes_of(after), after.checksum) == (sizes_of(before), before.checksum)
    assert_named(text, "hidden")


@pytest.mark.parametrize("name", ["._1.jpg", ".DS_Store", "Thumbs.db", "desktop.ini"])
def test_data_report_counts_system_files(name, told):
    text, found = told(
        "image", class_folders() | {f"cat/{name}": picture((12, 12), "JPEG", 1)}
    )
    assert sizes_of(found) == [10, 0, 2]
    assert_named(text, "left out")
    assert "hidden" in text or name in text, text


# --- pixels ---------------------------------------------------------------------------------------
def saved(image, kind="PNG", **more):
    out = io.BytesIO()
    image.save(out, kind, **more)
    return out.getvalue()


@pytest.mark.parametrize("bits", [9, 10, 12, 13, 14, 16])
@pytest.mark.parametrize(("kind", "ending"), [("PNG", "png"), ("TIFF", "tif")])
def test_image_reader_scales_deep_grey_images(bits, kind, ending, told):
    """Keep the levels of grey images of 9 to 16 bits, and report the depth."""
    files = {}
    for seed, name in enumerate(
        f"{c}/{i}.{ending}" for c in ("cat", "dog") for i in range(6)
    ):
        values = (
            np.random.default_rng(seed)
            .permutation(np.linspace(0, 2**bits - 1, 144))
            .reshape(12, 12)
        )
        files[name] = saved(Image.fromarray(values.astype(np.uint16)), kind)
    text, found = told("image", files)
    assert found is not None, text
    assert (found.train.images.min(), found.train.images.max()) == (0, 255)
    assert len(found.train.images[0].unique()) > 100
    assert f"{bits} bits" in text, text


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "CMYK", "1"])
def test_data_report_names_converted_modes(mode, told):
    kind, ending = ("JPEG", "jpg") if mode == "CMYK" else ("PNG", "png")
    images = (
        Image.open(io.BytesIO(picture((12, 12), "PNG", seed))).convert(mode)
        for seed in range(4)
    )
    text, found = told(
        "image",
        class_folders()
        | {f"cat/c{i}.{ending}": saved(x, kind) for i, x in enumerate(images)},
    )
    assert found is not None, text
    changed = [fact.text for fact in found.report.facts if fact.topic == "changed"]
    assert any(mode in fact and "4" in fact for fact in changed), text


@pytest.mark.parametrize("orientation", [2, 3, 4, 5, 6, 7, 8])
def test_image_reader_applies_exif_orientation(orientation, told):
    exif = Image.Exif()
    exif[0x0112] = orientation
    shown = np.zeros((12, 12, 3), np.uint8)
    shown[:4, :6] = 255  # in the upper left corner, as a viewer shows it
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[
        orientation
    ]  # of PIL's transpositions
    turned = Image.fromarray(shown).transpose(Image.Transpose(undo))
    files = class_folders() | {
        f"cat/turned{i}.png": saved(turned, exif=exif) for i in range(6)
    }
    text, found = told("image", files)
    assert found is not None, text
    everything = np.concatenate([found.train.images.numpy(), found.test.images.numpy()])
    white = [
        image
        for image in everything
        if (image == 255).mean() > 0.1 and (image == 0).mean() > 0.5
    ]
    assert len(white) in (
        5,
        6,
    )  # copies of training images do not stand in the test part
    assert all((image[:, :4, :6] == 255).all() for image in white)
    assert_named(text, "orientation", "6")


@pytest.mark.parametrize("orientation", [2, 3, 4, 5, 6, 7, 8])
def test_voc_reader_aligns_boxes_with_orientation(orientation, told):
    exif = Image.Exif()
    exif[0x0112] = orientation
    shown = np.zeros((30, 40, 3), np.uint8)
    shown[1:20, 1:20] = 255  # inside the box of ``BOX``
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[orientation]
    files = annotated_pictures()
    turned = saved(
        Image.fromarray(shown).transpose(Image.Transpose(undo)),
        "JPEG",
        exif=exif,
        quality=95,
    )
    files["JPEGImages/a.jpg"] = turned
    text, found = told("detection", files)
    assert found is not None, text
    insides = []
    for sample in found.train:
        x1, y1, x2, y2 = map(int, sample.boxes[0])
        insides.append(sample.read()[:, y1:y2, x1:x2].float().mean().item())
    assert max(insides) > 240
    assert "orientation" in text, text


# --- arrays and columns that are not used ---------------------------------------------------------
UNUSED = [
    "edge_weight",
    "edge_attr",
    "edge_type",
    "node_type",
    "node_year",
    "anything",
    "mean",
]


@pytest.mark.parametrize("name", UNUSED)
def test_data_report_names_unused_arrays(name, told):
    text, _ = told(
        "graph",
        {"g.npz": archive(**graph_arrays(**{name: np.arange(11)}))},
        "mine/g.npz",
    )
    assert name in text, text
    text, _ = told("image", image_archives(**{name: np.arange(12)}))
    assert name in text, text


@pytest.mark.parametrize("name", ["genre", "language_of_origin", "id", "explanation_1"])
def test_data_report_names_unused_columns(name, told):
    text, found = told(
        "entailment", pairs(lambda split, frame: frame.assign(**{name: "x"}))
    )
    assert found is not None, text
    assert name in text, text


def test_data_report_counts_merged_edges(told):
    """Report merged edges and self-loops of a graph."""
    arrays = graph_arrays()
    edges = np.concatenate(
        [arrays["edge_index"], arrays["edge_index"][::-1], [[3, 4], [3, 4]]], axis=1
    )
    text, found = told(
        "graph", {"g.npz": archive(**{**arrays, "edge_index": edges})}, "mine/g.npz"
    )
    assert found is not None, text
    assert_named(text, "self-loop", "both directions")


# --- markers --------------------------------------------------------------------------------------
@pytest.mark.parametrize("marker", ["<eos>", "</s>", "<EOS>", "<|endoftext|>", "[SEP]"])
def test_text_reader_merges_end_markers(marker, told):
    """Merge markers at line ends with the end of sentence that the reader adds."""
    text, found = told("language_model", texts(f" {marker}\n"))
    assert found is not None, text
    ends = found.train == found.start
    assert not (ends[1:] & ends[:-1]).any()
    assert_named(text, marker, "marker")
    if marker == "<eos>":
        _, plain = told("language_model", texts())
        assert found.train.tolist() == plain.train.tolist()


# --- overlap --------------------------------------------------------------------------------------
OVERLAPS = {
    "test images are training images": (
        "image",
        lambda: {
            **{n: c for n, c in split_folders().items() if n.startswith("train/")},
            **{
                n.replace("train/", "val/"): c
                for n, c in split_folders().items()
                if n.startswith("train/")
            },
        },
    ),
    "one test image is a training image": (
        "image",
        lambda: (
            split_folders()
            | {"val/cat/other-name.png": split_folders()["train/cat/1.png"]}
        ),
    ),
    "a training image stands in another class of the test": (
        "image",
        lambda: (
            split_folders()
            | {"val/dog/other-name.png": split_folders()["train/cat/1.png"]}
        ),
    ),
    "archives": (
        "image",
        lambda: {
            "train.npz": image_archives()["train.npz"],
            "test.npz": image_archives()["train.npz"],
        },
    ),
    "an image is in both lists": (
        "detection",
        lambda: annotated_pictures() | boxes(train="abcd", test="def"),
    ),
    "a copy under another name": (
        "detection",
        lambda: (
            annotated_pictures()
            | {"JPEGImages/e.jpg": annotated_pictures()["JPEGImages/a.jpg"]}
        ),
    ),
    "test text": (
        "language_model",
        lambda: texts() | {"test.txt": texts()["train.txt"]},
    ),
    "valid text": (
        "language_model",
        lambda: texts() | {"valid.txt": texts()["train.txt"]},
    ),
    "test text is the valid text": (
        "language_model",
        lambda: texts() | {"test.txt": texts()["valid.txt"]},
    ),
    "part of the training text": (
        "language_model",
        lambda: (
            texts()
            | {"test.txt": b"\n".join(texts()["train.txt"].splitlines()[5:30]) + b"\n"}
        ),
    ),
    "test pairs": (
        "entailment",
        lambda: pairs() | {"test.jsonl": pairs()["train.jsonl"]},
    ),
    "valid pairs": (
        "entailment",
        lambda: pairs() | {"validation.jsonl": pairs()["train.jsonl"]},
    ),
    "one pair": (
        "entailment",
        lambda: (
            pairs()
            | {
                "test.jsonl": pairs()["test.jsonl"]
                + b"\n"
                + pairs()["train.jsonl"].splitlines()[0]
            }
        ),
    ),
    "a node in two splits": (
        "graph",
        lambda: {"g.npz": archive(**graph_arrays(test_idx=np.arange(5, 12)))},
    ),
}


@pytest.mark.parametrize("case", OVERLAPS)
def test_readers_reject_overlapping_splits(case, told):
    task, files = OVERLAPS[case]
    text, found = told(task, files(), "mine/g.npz" if task == "graph" else "mine/")
    assert found is None, f"loaded:\n{text}"
    assert "train" in text or "valid" in text, text


def test_data_report_counts_equal_pixels_across_splits(told):
    pixels = Image.open(io.BytesIO(split_folders()["train/cat/1.png"]))
    text, found = told(
        "image", split_folders() | {"val/cat/again.bmp": saved(pixels, "BMP")}
    )
    assert found is not None, text
    overlap = [fact.text for fact in found.report.facts if fact.topic == "overlap"]
    assert any("1 " in fact for fact in overlap), text


def test_image_reader_keeps_copies_in_one_split(told):
    files = class_folders(10)
    files |= {
        path.replace(".png", " copy.png"): content for path, content in files.items()
    }
    text, found = told("image", files)
    assert found is not None, text
    train = {image.numpy().tobytes() for image in found.train.images}
    assert not train & {image.numpy().tobytes() for image in found.test.images}
    assert "cop" in text, text


# --- wrong types ----------------------------------------------------------------------------------
@pytest.mark.parametrize("value", [{"fr": "un"}, ["a", "b"], 7, 2.5, None, True])
@pytest.mark.parametrize("column", ["premise", "hypothesis"])
def test_entailment_reader_rejects_non_text_pairs(column, value, told):
    files = pairs(lambda split, frame: frame.assign(**{column: [value] * len(frame)}))
    text, found = told("entailment", files)
    assert found is None, text
    assert column in text, text


def test_data_report_counts_unlabelled_pairs(told):
    files = pairs(lambda split, frame: frame.assign(label=[-1, *frame.label[1:]]))
    text, found = told("entailment", files)
    assert sizes_of(found) == [11, 5, 5]
    assert_named(text, "left out", "label")


# --- the report itself ----------------------------------------------------------------------------
def test_data_report_rejects_unknown_topics():
    with pytest.raises(ValueError, match="topic: expected one of read, left out"):
        DataReport("x").add("rubbish", "text")


def test_data_report_roundtrips_with_digest():
    """Restore a stored report, and change its digest with every added fact."""
    report = DataReport("x/", [("split", "9 training samples"), ("read", "ten files")])
    report.leave_out(
        "images of this kind are not read", [f"{i}.HEIC" for i in range(100)]
    )
    again = DataReport.from_dict(report.to_dict())
    assert (str(again), again.digest) == (str(report), report.digest)
    assert [fact.topic for fact in report.facts] == ["read", "left out", "split"]
    assert [fact.topic for fact in report.notices] == ["left out"]
    assert (
        "100 files .heic: images of this kind are not read (0.HEIC, 1.HEIC, 10.HEIC, ...)"
        in str(report)
    )
    again.add("changed", "something")
    assert again.digest != report.digest


def test_data_report_escapes_control_characters():
    report = DataReport("x/")
    report.leave_out("not read", ["\x1b[31mred\n.heic", "bad\udc80.heic"])
    text = str(report)
    assert "\x1b" not in text
    assert_named(text, "\\x1b[31mred\\n.heic", "\\udc80")


def test_list_some_truncates_long_lists():
    assert list_first(["a", "b"]) == "a, b"
    assert list_counts({str(i): 100 - i for i in range(20)}).endswith(
        "and 8 more from 81 up"
    )
    assert set(NOTICES) < set(TOPICS)
