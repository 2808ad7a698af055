"""Readers of graphs in files: archives, OGB's folders, Planetoid's files; and the graph over the embedded digits."""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph

from cpt_core.checks import library
from cpt_core.data.common import DataNotFoundError

log = logging.getLogger(__name__)

SPLITS = ("train", "valid", "test")


@dataclass
class RawGraph:
    """What a reader returns: arrays as the files hold them."""

    title: str
    edges: tuple[np.ndarray, np.ndarray]
    features: np.ndarray
    labels: np.ndarray
    split: dict[str, np.ndarray]
    symmetric: bool = False  # every edge is there in both directions, each once
    classes: int | None = None
    ogb: str | None = None


def read_digits() -> RawGraph:
    """Return the nearest-neighbour graph over scikit-learn's digits."""
    digits = load_digits()
    pixels, labels = digits.data.astype(np.float32) / 16, digits.target.astype(np.int64)
    source, destination = kneighbors_graph(pixels, n_neighbors=8).nonzero()
    order = np.random.default_rng(0).permutation(len(labels))
    by_class = [order[labels[order] == c] for c in range(10)]
    return RawGraph(
        title="scikit-learn digits, 8-nearest-neighbour graph, 5 labels per class",
        edges=(source, destination),
        features=pixels,
        labels=labels,
        split={
            "train": np.concatenate([c[:5] for c in by_class]),
            "valid": np.concatenate([c[5:25] for c in by_class]),
            "test": np.concatenate([c[25:] for c in by_class]),
        },
    )


NAMES = {
    "edges": ("edge_index", "edges"),
    "features": ("features", "node_features"),
    "labels": ("labels", "node_labels"),
    "train": ("train_idx", "train_masks", "train_mask"),
    "valid": ("valid_idx", "val_masks", "val_mask"),
    "test": ("test_idx", "test_masks", "test_mask"),
}


def read_archive(path: Path) -> RawGraph:
    """Read a graph from an ``.npz`` archive of the documented layout."""
    if not path.is_file():
        raise DataNotFoundError(f"there is no archive {path}")
    with np.load(path, allow_pickle=False) as z:
        arrays = {key: z[key] for key in z.files}
    found: dict[str, np.ndarray] = {}
    for what, names in NAMES.items():
        key = next((n for n in names if n in arrays), None)
        if key is not None:
            found[what] = arrays[key]
        elif what == "features" and {"feat_indptr", "feat_indices", "feat_shape"} <= arrays.keys():
            found[what] = _dense(path.name, *(arrays[f"feat_{part}"] for part in ("indptr", "indices", "shape")))
        else:
            raise ValueError(f"{path.name}: needs one of {', '.join(names)}; it has {', '.join(arrays)}")
    edges = found["edges"]
    if edges.ndim != 2 or 2 not in edges.shape or not np.issubdtype(edges.dtype, np.integer):
        raise ValueError(f"{path.name}: edges must be whole numbers (2, E) or (E, 2), got {edges.dtype} {edges.shape}")
    source, destination = edges if edges.shape[0] == 2 and "edge_index" in arrays else edges.T
    return RawGraph(
        title=f"own graph ({path.stem})",
        edges=(source, destination),
        features=found["features"],
        labels=found["labels"],
        split={part: _indices(path.name, part, found[part]) for part in SPLITS},
    )


def _dense(name: str, indptr: np.ndarray, indices: np.ndarray, shape: np.ndarray) -> np.ndarray:
    rows, columns = map(int, shape)
    if len(indptr) != rows + 1 or indptr[-1] != len(indices) or (len(indices) and indices.max() >= columns):
        raise ValueError(f"{name}: feat_indptr and feat_indices do not fit feat_shape {(rows, columns)}")
    features = np.zeros((rows, columns), dtype=np.float32)
    features[np.repeat(np.arange(rows), np.diff(indptr)), indices] = 1
    return features


def _indices(name: str, part: str, given: np.ndarray) -> np.ndarray:
    if given.dtype != bool:
        return given
    if given.ndim not in (1, 2):
        raise ValueError(f"{name}: masks of the {part} split must be (N,) or (splits, N), got {given.shape}")
    return np.flatnonzero(given if given.ndim == 1 else given[0])


def read_ogb_folder(path: Path) -> RawGraph:
    """A graph of one's own in OGB's raw layout, through OGB's reader."""
    raw = path / "raw"
    needed = [raw / f"{n}.csv.gz" for n in ("node-feat", "node-label", "num-node-list", "num-edge-list")]
    splits = sorted(p for p in (path / "split").glob("*") if p.is_dir())
    if len(splits) != 1:
        raise ValueError(f"{path} needs exactly one folder in split/, it has {len(splits)}")
    needed += [splits[0] / f"{part}.csv.gz" for part in SPLITS]
    missing = [p.relative_to(path).as_posix() for p in needed if not p.exists()]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    with quiet_ogb():
        reader = library("ogb.io.read_graph_raw", "graph")
        try:
            graph = reader.read_csv_graph_raw(str(raw), add_inverse_edge=False)[0]
        except (RuntimeError, IndexError, AssertionError) as error:
            raise ValueError(f"{path} cannot be read as an OGB graph: {type(error).__name__} {error}") from error
    source, destination = graph["edge_index"]
    announced, there = int(_csv(raw / "num-edge-list.csv.gz")[0]), len(_csv(raw / "edge.csv.gz")) // 2
    if announced != there:  # OGB would take the first of them
        raise ValueError(f"{path}: num-edge-list announces {announced} edges, edge.csv.gz has {there}")
    return RawGraph(
        title=f"own graph ({path.name})",
        edges=(source, destination),
        features=graph["node_feat"],
        labels=_csv(raw / "node-label.csv.gz"),
        split={part: _csv(splits[0] / f"{part}.csv.gz") for part in SPLITS},
    )


def _csv(path: Path) -> np.ndarray:
    try:
        return pd.read_csv(path, compression="gzip", header=None).to_numpy().reshape(-1)
    except pd.errors.EmptyDataError:
        return np.empty(0, dtype=np.int64)


class _PlanetoidUnpickler(pickle.Unpickler):
    """Planetoid's files are pickles of Python 2: what they need is unpickled, nothing else can run."""

    MOVED = {"__builtin__": "builtins", "numpy.core.multiarray": "numpy._core.multiarray"}  # noqa: RUF012
    ALLOWED = (
        "builtins.list collections.defaultdict numpy.ndarray numpy.dtype numpy._core.multiarray._reconstruct "
        "scipy.sparse.csr_matrix _codecs.encode"
    ).split()

    def find_class(self, module: str, name: str) -> Any:
        module = "scipy.sparse" if module.startswith("scipy.sparse.") else self.MOVED.get(module, module)
        if f"{module}.{name}" not in self.ALLOWED:
            raise ValueError(f"a Planetoid file needs no {module}.{name}: not unpickled")
        return super().find_class(module, name)


def read_planetoid(graph_file: Path) -> RawGraph:
    """Cora, CiteSeer or PubMed as Planetoid's files have them, with their standard split."""
    prefix = graph_file.name.removesuffix("graph")

    def part(name: str) -> Any:
        path = graph_file.with_name(prefix + name)
        if not path.exists():
            raise ValueError(f"{graph_file.parent} lacks {path.name}")
        with path.open("rb") as stream:
            return _PlanetoidUnpickler(stream, encoding="latin1").load()

    y, ally, ty = part("y"), part("ally"), part("ty")
    test = np.loadtxt(graph_file.with_name(prefix + "test.index"), dtype=np.int64)
    nodes = int(max(test.max() + 1, len(ally) + len(ty)))  # CiteSeer: some test numbers name no row
    features = np.zeros((nodes, part("allx").shape[1]), dtype=np.float32)
    one_hot = np.zeros((nodes, ally.shape[1]))
    features[: len(ally)], one_hot[: len(ally)] = part("allx").toarray(), ally
    features[test], one_hot[test] = part("tx").toarray(), ty
    neighbours = part("graph")
    source = np.concatenate([np.full(len(v), k) for k, v in neighbours.items()])
    destination = np.concatenate([np.asarray(v, dtype=np.int64) for v in neighbours.values()])
    labels = np.where(one_hot.any(1), one_hot.argmax(1), -1)
    return RawGraph(
        title=f"own graph ({prefix.split('.')[1]}, Planetoid split)",
        edges=(source, destination),
        features=features,
        labels=labels,
        split={
            "train": np.arange(len(y)),
            "valid": np.arange(len(y), min(len(y) + 500, len(ally))),
            "test": np.sort(test),
        },
    )


@contextlib.contextmanager
def quiet_ogb() -> Iterator[None]:
    """Import OGB without its question to the network for newer versions, and keep what it prints for the log."""
    sys.modules.setdefault("outdated", cast(Any, None))
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # it is read only
            yield
    finally:
        if printed.getvalue().strip():
            log.debug("ogb: %s", printed.getvalue())
