"""Small data sets of one's own in the layouts that are documented: their files, by name."""

import gzip
import io
import json
import pickle
import zlib
from collections import defaultdict

import numpy as np
import pandas as pd
import scipy.sparse
from PIL import Image


def write(folder, files):
    """Write files into a folder; return it."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def picture(size=(12, 10), kind="PNG", seed=0, mode="RGB"):
    """Return an image of noise with a height and width."""
    out, pixels = (
        io.BytesIO(),
        np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8),
    )
    Image.fromarray(pixels).convert(mode).save(out, kind)
    return out.getvalue()


def archive(**arrays):
    """Return an .npz archive."""
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def table(values, form="%d"):
    """Return a table in OGB's format."""
    out = io.StringIO()
    np.savetxt(out, np.asarray(values), fmt=form, delimiter=",")
    return gzip.compress(
        out.getvalue().encode(), mtime=0
    )  # the name of a test is made of it


def image_archives(packed=False, test_part="test", seed=0):
    """Twelve images to train on and six to test on, of three classes, 8 x 8, in colour; packed: as JPEG files."""
    files, rng = {}, np.random.default_rng(seed)
    for part, count in (("train", 12), (test_part, 6)):
        images = rng.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
        if packed:
            jpegs = [picture((8, 8), "JPEG", 100 * count + i) for i in range(count)]
            offsets = np.cumsum([0, *map(len, jpegs)])
            content = {
                "jpeg": np.frombuffer(b"".join(jpegs), np.uint8),
                "offsets": offsets,
            }
        else:
            content = {"data": images}
        files[f"{part}.npz"] = archive(**content, labels=np.arange(count) % 3)
    return files


def image_folder(
    train=("a", "b"), val=("a", "b"), counts=(4, 4), size=(12, 10), kind="PNG"
):
    """Folders of classes; the first picture of each is grey."""
    return {
        f"{part}/{name}/{i}.{kind.lower()}": picture(
            size, kind, 100 * len(part) + 10 * c + i, "RGB" if i else "L"
        )
        for part, names, count in (("train", train, counts[0]), ("val", val, counts[1]))
        for c, name in enumerate(names)
        for i in range(count)
    }


def class_folders(count=5):
    """Folders of two classes, without a split."""
    return {
        name.removeprefix("train/"): file
        for name, file in image_folder(val=(), counts=(count, 0)).items()
    }


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


def ogb_folder(graph):
    """Return the raw layout of OGB's node data sets."""
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
    }
    parts["graph"] = defaultdict(list, {i: [(i + 1) % 10] for i in range(10)})
    files = {
        f"ind.tiny.{name}": pickle.dumps(value, protocol=2)
        for name, value in parts.items()
    }
    return {**files, "ind.tiny.test.index": "\n".join(map(str, test)).encode()}


PAIRS = {"train": 6, "validation": 3, "test": 4}  # how many


def pair_rows(split, language="en"):
    """Sentence pairs of a split."""
    rows = {
        "premise": [
            f'"{language} {split} premise {i}' for i in range(PAIRS[split])
        ],  # a quote that is never closed
        "hypothesis": [f"{split} hypothesis {i}, NA" for i in range(PAIRS[split])],
        "label": [i % 3 for i in range(PAIRS[split])],
    }
    return pd.DataFrame(rows)


def tsv(rows):
    """Return a table in XNLI's format, without quotes."""
    lines = [
        "\t".join(rows.columns),
        *("\t".join(map(str, row)) for row in rows.to_numpy()),
    ]
    return ("\n".join(lines) + "\n").encode()


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


def pair_files(ending, valid="validation", change=lambda split, rows: rows):
    """Flat files of sentence pairs; ``change`` takes the name of a split and its rows."""
    names = {"train": "train", "validation": valid, "test": "test"}
    return {
        f"{names[s]}.{ending}": PAIR_FORMS[ending](change(s, pair_rows(s)))
        for s in PAIRS
    }


def boxes(**lists):
    """Return lists of ids, such as ``train=["a", "b"]``."""
    return {
        f"ImageSets/Main/{part}.txt": "".join(f"{i}\n" for i in ids).encode()
        for part, ids in lists.items()
    }


def annotated_picture(name, size=(60, 90), objects=(), mode="RGB"):
    """Return an image and its annotation; objects are (class, box, extra tags)."""
    tags = ("xmin", "ymin", "xmax", "ymax")
    object_tags = "".join(
        f"<object><name>{kind}</name>{''.join(more)}"
        f"<bndbox>{''.join(f'<{t}>{v}</{t}>' for t, v in zip(tags, box, strict=True))}</bndbox></object>"
        for kind, box, *more in objects
    )
    height, width = size
    xml = f"<annotation><size><width>{width}</width><height>{height}</height></size>{object_tags}</annotation>"
    return {
        f"JPEGImages/{name}.jpg": picture(
            size, "JPEG", zlib.crc32(name.encode()), mode
        ),
        f"Annotations/{name}.xml": f'<?xml version="1.0" encoding="utf-8"?>{xml}'.encode(),
    }
