"""Small data sets in the documented layouts: files by name, and how readers describe them."""

import gzip
import io
import json
import pickle
import random
import shutil
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse
from PIL import Image

from cpt_lab.data.detection import load_detection
from cpt_lab.data.entailment import load_entailment
from cpt_lab.data.graphs import load_graph
from cpt_lab.data.images import load_images
from cpt_lab.data.text import load_text
from cpt_lab.experiments.registry import recipe

LOAD = {
    "image": load_images,
    "detection": load_detection,
    "graph": load_graph,
    "language_model": load_text,
    "entailment": load_entailment,
}
WHOLE_TEXT = dict.fromkeys(
    ("vocabulary", "train_tokens", "valid_tokens", "test_tokens")
)
SETTINGS = {
    "image": {"batch": 4, "train_images": None, "test_images": None, "valid_images": 2},
    "detection": {"max_size": 96},
    "graph": {"standardize": False, "self_loops": False},
    "language_model": {"batch": 2, **WHOLE_TEXT},
    "entailment": {"language": "en", "test_languages": ("en",)},
}


def own_recipe(task, dataset="mine/", **changes):
    """Return a small recipe of a task for a data set of the user."""
    settings = {**SETTINGS[task], **changes}
    return replace(recipe("smoke", "mine/", task=task), dataset=dataset, **settings)


def write(folder, files):
    """Write files into a folder; return it. A name that ends in a slash makes an empty folder."""
    for name, content in files.items():
        path = folder / name
        parent = path if name.endswith("/") else path.parent
        parent.mkdir(parents=True, exist_ok=True)
        if path != parent:
            path.write_bytes(content)
    return folder


def write_own(folder, files):
    """Write files into the folder ``mine``; return the name of the data set."""
    write(folder / "mine", files)
    return "mine/g.npz" if list(files) == ["g.npz"] else "mine/"


def load_own(folder, task, files, **changes):
    """Write files and load them as a data set of the user."""
    return LOAD[task](own_recipe(task, write_own(folder, files), **changes))


def split_sizes(data):
    """Return the number of samples of every split of loaded data."""
    tests = data.test.values() if isinstance(data.test, dict) else [data.test]
    return [len(part) for part in (data.train, data.valid, *tests)]


def report_lines(data):
    """Return the facts of loaded data, a line each."""
    return [f"{topic}: {text}" for topic, text in data.report.facts]


def describe(data):
    """Return title, sizes and facts of loaded data, a line each."""
    return [
        f"title: {data.title}",
        f"samples: {split_sizes(data)}",
        *report_lines(data),
    ]


def describe_cases(folder, task, cases, **changes):
    """Return what a reader reports of data sets, and its errors, as text.

    A case has files, or a pair of files and changes of the recipe. Every data set after the first is described by the
    lines that the first one has not.
    """
    usual_lines, blocks = [], []
    for name, case in cases.items():
        files, settings = case if isinstance(case, tuple) else (case, {})
        shutil.rmtree(folder / "mine", ignore_errors=True)
        try:
            lines = describe(load_own(folder, task, files, **{**changes, **settings}))
            assert str(folder) not in "".join(lines), name
        except (ValueError, OSError) as error:
            message = str(error).replace(str(folder), "DATA")
            lines = [f"{type(error).__name__}: {message}"]
        new_lines = [line for line in lines if line not in usual_lines]
        usual_lines = usual_lines or lines
        blocks.append("\n".join([f"[{name}]", *new_lines, ""]))
    return "\n".join(blocks)


# --- images ---------------------------------------------------------------------------------------


def noise(size=(12, 10), seed=0, mode="RGB"):
    """Return an image of noise with a height and width."""
    pixels = np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(image, kind="PNG", orientation=None, **options):
    """Return an image as the bytes of a file, with an EXIF orientation."""
    if orientation is not None:
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = orientation
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def picture(size=(12, 10), kind="PNG", seed=0, mode="RGB"):
    """Return the file of an image of noise."""
    return encoded(noise(size, seed, mode), kind)


KINDS = {".jpg": "JPEG", ".jfif": "JPEG", ".jpe": "JPEG", ".tif": "TIFF"}


def pictures(*names, size=(20, 24)):
    """Return different images of noise by name, of the kind that the name says."""
    kinds = [PurePath(name).suffix.lower() for name in names]
    return {
        name: picture(
            size, KINDS.get(kind, kind[1:].upper()), zlib.crc32(name.encode())
        )
        for name, kind in zip(names, kinds, strict=True)
    }


def grey_picture(high, seed=0, kind="PNG", dtype=np.uint16, size=(20, 24)):
    """Return a grey image with values from 0 to a limit, of 16 bits by default."""
    values = np.linspace(0, high, size[0] * size[1])
    shuffled = np.random.default_rng(seed).permutation(values).reshape(size)
    return encoded(Image.fromarray(shuffled.astype(dtype)), kind)


def archive(**arrays):
    """Return an .npz archive."""
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def packed_images(*files, **arrays):
    """Return an archive of encoded images, of two classes unless ``labels`` says more."""
    content = {
        "jpeg": np.frombuffer(b"".join(files), np.uint8),
        "offsets": np.cumsum([0, *map(len, files)]),
        "labels": np.arange(len(files)) % 2,
    }
    return archive(**{**content, **arrays})


def image_archives(packed=False, test_part="test", seed=0):
    """Twelve images to train on and six to test on, of three classes, 8 x 8, in colour; packed: as JPEG files."""
    files, rng = {}, np.random.default_rng(seed)
    for part, count in (("train", 12), (test_part, 6)):
        labels = np.arange(count) % 3
        images = rng.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
        if packed:
            jpegs = [picture((8, 8), "JPEG", 100 * count + i) for i in range(count)]
            files[f"{part}.npz"] = packed_images(*jpegs, labels=labels)
        else:
            files[f"{part}.npz"] = archive(data=images, labels=labels)
    return files


def image_folder(train=("a", "b"), val=("a", "b"), counts=(4, 4), kind="PNG"):
    """Return folders of classes in train/ and val/; the first picture of each is grey."""
    files = {}
    for part, names, count in (("train", train, counts[0]), ("val", val, counts[1])):
        for path in (f"{part}/{name}/{i}" for name in names for i in range(count)):
            mode = "L" if path.endswith("/0") else "RGB"
            content = picture((12, 10), kind, zlib.crc32(path.encode()), mode)
            files[f"{path}.{kind.lower()}"] = content
    return files


def class_folders(count=5):
    """Return folders of two classes, without a split."""
    files = image_folder(val=(), counts=(count, 0))
    return {name.removeprefix("train/"): file for name, file in files.items()}


# --- boxes ----------------------------------------------------------------------------------------

BOX = (2, 2, 20, 20)


def boxes(**lists):
    """Return lists of ids, such as ``train=["a", "b"]``."""
    return {
        f"ImageSets/Main/{part}.txt": "".join(f"{i}\n" for i in ids).encode()
        for part, ids in lists.items()
    }


def voc_object(name="cat", box=BOX, more=""):
    """Return an object of an annotation as XML text."""
    corners = zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
    sides = "".join(f"<{corner}>{value}</{corner}>" for corner, value in corners)
    return f"<object><name>{name}</name>{more}<bndbox>{sides}</bndbox></object>"


def annotation(*objects, size=(30, 40), more=""):
    """Return an annotation file with the given objects."""
    sides = f"<size><width>{size[1]}</width><height>{size[0]}</height></size>"
    return f"<annotation>{more}{sides}{''.join(objects)}</annotation>".encode()


def annotated_picture(name, *objects, size=(30, 40), ending=".jpg", mode="RGB"):
    """Return an image and its annotation."""
    seed, kind = (
        zlib.crc32(name.encode()),
        KINDS.get(ending.lower(), ending[1:].upper()),
    )
    return {
        f"JPEGImages/{name}{ending}": picture(size, kind, seed, mode),
        f"Annotations/{name}.xml": annotation(*objects, size=size),
    }


def voc_folder(ids="abcdef", train="abcd", test="ef", ending=".jpg"):
    """Return images with one object each, in Pascal VOC's layout."""
    files = boxes(train=train, test=test)
    for name in ids:
        files |= annotated_picture(name, voc_object(), ending=ending)
    return files


# --- graphs ---------------------------------------------------------------------------------------

NO_SPLIT = dict.fromkeys(("train_idx", "valid_idx", "test_idx"))


def graph_arrays(nodes=60, edges=150):
    """Return a graph with features, labels of three classes and a split."""
    rng = np.random.default_rng(0)
    order = rng.permutation(nodes)
    return {
        "edge_index": rng.integers(0, nodes, (2, edges)),
        "features": rng.standard_normal((nodes, 4), dtype=np.float32),
        "labels": rng.integers(0, 3, nodes),
        "train_idx": order[: nodes // 2],
        "valid_idx": order[nodes // 2 : nodes * 2 // 3],
        "test_idx": order[nodes * 2 // 3 :],
    }


def graph_archive(**changes):
    """Return a graph in an archive; arrays that are None are left out."""
    arrays = {**graph_arrays(), **changes}
    return {"g.npz": archive(**{k: v for k, v in arrays.items() if v is not None})}


def table(values, form="%d"):
    """Return a table in OGB's format."""
    out = io.StringIO()
    np.savetxt(out, np.asarray(values), fmt=form, delimiter=",")
    return gzip.compress(out.getvalue().encode(), mtime=0)


def ogb_folder(graph=None):
    """Return the raw layout of OGB's node data sets."""
    graph = graph or graph_arrays()
    raw = {
        "edge": table(graph["edge_index"].T),
        "node-feat": table(graph["features"], "%.6f"),
        "node-label": table(graph["labels"]),
        "num-node-list": table([len(graph["labels"])]),
        "num-edge-list": table([len(graph["edge_index"][0])]),
    }
    split = {
        f"split/time/{part}.csv.gz": table(graph[f"{part}_idx"])
        for part in ("train", "valid", "test")
    }
    return {**{f"raw/{name}.csv.gz": content for name, content in raw.items()}, **split}


def planetoid(test=(7, 9, 8)):
    """Planetoid's files: pickles of Python 2, of scipy matrices, arrays and a dict of lists."""
    one_hot = np.eye(3, dtype=np.int32)[np.arange(10) % 3]
    x = scipy.sparse.csr_matrix(np.arange(30, dtype=np.float32).reshape(10, 3))
    parts = {
        "y": one_hot[:4],
        "allx": x[:7],
        "ally": one_hot[:7],
        "tx": x[list(test)],
        "ty": one_hot[list(test)],
        "graph": defaultdict(list, {i: [(i + 1) % 10] for i in range(10)}),
    }
    files = {
        f"ind.tiny.{name}": pickle.dumps(value, protocol=2)
        for name, value in parts.items()
    }
    return {**files, "ind.tiny.test.index": "\n".join(map(str, test)).encode()}


# --- text -----------------------------------------------------------------------------------------

WORDS = "the cat sat on a mat and saw dogs run far away home".split()
LINE_COUNTS = {"train": 60, "valid": 20, "test": 20}


def sentences(split):
    """Return different lines of eight words."""
    draw = random.Random(split)
    return [" ".join(draw.choices(WORDS, k=8)) for _ in range(LINE_COUNTS[split])]


def texts(form="{}\n", splits=tuple(LINE_COUNTS), encoding="utf-8"):
    """Return three texts, with the form of a line in the named splits."""
    files = {}
    for split in LINE_COUNTS:
        line_form = form if split in splits else "{}\n"
        text = "".join(map(line_form.format, sentences(split)))
        files[f"{split}.txt"] = text.encode(encoding)
    return files


# --- sentence pairs -------------------------------------------------------------------------------

PAIR_COUNTS = {"train": 6, "validation": 3, "test": 4}


def pair_rows(split, language="en"):
    """Return the sentence pairs of a split; their premises begin with a quote that is never closed."""
    count = range(PAIR_COUNTS[split])
    rows = {
        "premise": [f'"{language} {split} premise {i}' for i in count],
        "hypothesis": [f"{split} hypothesis {i}, NA" for i in count],
        "label": [i % 3 for i in count],
    }
    return pd.DataFrame(rows)


def tsv(rows):
    """Return a table in XNLI's format, without quotes."""
    cells = [rows.columns, *rows.to_numpy()]
    return "".join("\t".join(map(str, row)) + "\n" for row in cells).encode()


def parquet(rows):
    """Return a table in the format of the Hugging Face hub."""
    out = io.BytesIO()
    rows.to_parquet(out)
    return out.getvalue()


PAIR_FORMS = {
    "parquet": parquet,
    "jsonl": lambda rows: rows.to_json(orient="records", lines=True).encode(),
    "json": lambda rows: json.dumps(rows.to_dict(orient="records")).encode(),
    "csv": lambda rows: rows.to_csv(index=False).encode(),
    "tsv": tsv,
}


def pair_files(ending="jsonl", valid="validation", change=lambda split, rows: rows):
    """Return flat files of sentence pairs; ``change`` takes the name of a split and its rows."""
    names = {"train": "train", "validation": valid, "test": "test"}
    return {
        f"{names[split]}.{ending}": PAIR_FORMS[ending](change(split, pair_rows(split)))
        for split in PAIR_COUNTS
    }


# --- all layouts ----------------------------------------------------------------------------------


class Layout(NamedTuple):
    """A documented layout.

    Attributes:
        task: task that reads it.
        files: returns the files of a small data set by name.
        folders: folders in which a stray file may lie.
    """

    task: str
    files: Callable
    folders: tuple[str, ...] = ("",)


LAYOUTS = {
    "image archives": Layout("image", image_archives),
    "packed images": Layout("image", partial(image_archives, packed=True)),
    "split folders": Layout(
        "image", image_folder, ("", "train/", "train/a/", "val/b/more/")
    ),
    "class folders": Layout("image", class_folders, ("", "a/", "a/more/")),
    "tiles": Layout(
        "image", lambda: pictures(*(f"{c}/{i}.TIF" for c in "ab" for i in range(5)))
    ),
    "boxes": Layout(
        "detection",
        voc_folder,
        ("", "JPEGImages/", "Annotations/", "ImageSets/Main/"),
    ),
    "graph archive": Layout("graph", graph_archive),
    "graph without a split": Layout("graph", partial(graph_archive, **NO_SPLIT)),
    "OGB folder": Layout("graph", ogb_folder, ("", "raw/", "split/time/")),
    "Planetoid": Layout("graph", planetoid),
    "texts": Layout("language_model", texts),
    "one text": Layout("language_model", lambda: {"novel.txt": texts()["train.txt"]}),
    "pairs": Layout("entailment", pair_files),
    "pairs as csv": Layout("entailment", partial(pair_files, "csv")),
    "pairs as tsv": Layout("entailment", partial(pair_files, "tsv")),
    "pairs as parquet": Layout("entailment", partial(pair_files, "parquet")),
}
