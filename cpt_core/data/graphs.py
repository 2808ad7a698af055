"""Graphs for node classification: OGB's, your own, and an embedded nearest-neighbour graph over digits.

Your own graph, as ``dataset`` (every edge is taken in both directions, whatever the file says, and counted once):

- an archive ``"my-graph.npz"`` with
  ``edge_index`` (2, E) or ``edges`` (E, 2);
  ``features`` or ``node_features`` (N, F), or, for sparse features of ones, ``feat_indptr``, ``feat_indices`` and
  ``feat_shape`` as in a CSR matrix;
  ``labels`` or ``node_labels`` (N,): 0, 1, ..., or -1 for nodes without a label;
  and a split: ``train_idx``, ``valid_idx``, ``test_idx`` with node numbers, or ``train_masks``, ``val_masks``,
  ``test_masks`` (N,) or (splits, N), of which the first is taken;
- a folder ``"my-graph/"`` in OGB's raw layout: ``raw/{edge,node-feat,node-label,num-node-list,num-edge-list}.csv.gz``
  and ``split/<name>/{train,valid,test}.csv.gz``;
- a folder with the files ``ind.<name>.*`` of Planetoid (Cora, CiteSeer, PubMed).

OGB's data sets are looked up in ``CPT_DATA_DIR``, then ``data/cache``, as ``ogbn_arxiv/`` and ``ogbn_products/``.

Shapes: N nodes, E edges, F features.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import pickle
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph
from torch import Tensor

from cpt_core.checks import library
from cpt_core.data.common import DataNotFoundError, generator_of, own_path
from cpt_core.experiments.graph import EXPERIMENT, GraphRecipe
from cpt_core.graphs.graph import Graph, dgl_module
from cpt_core.paths import data_dir

log = logging.getLogger(__name__)
SPLITS = ("train", "valid", "test")
PIECE = 1 << 24  # edges that are unpacked at a time


@dataclass(frozen=True)
class GraphData:
    """A graph with features, labels and a split.

    Attributes:
        title: what the numbers are measured on, as figures must call it.
        graph: the edges, in both directions, and self-loops if the recipe wants them.
        features: (N, F) float32.
        labels: (N,) int64; -1 where a node has none.
        classes: number of classes.
        train, valid, test: (n,) int64, numbers of the nodes; ``valid`` may be empty.
        checksum: of all of this.
        ogb: name for OGB's ``Evaluator``, or None.
    """

    title: str
    graph: Graph
    features: Tensor
    labels: Tensor
    classes: int
    train: Tensor
    valid: Tensor
    test: Tensor
    checksum: str
    ogb: str | None = None


@dataclass
class _Raw:
    """What a reader returns: arrays as the files hold them."""

    title: str
    edges: tuple[np.ndarray, np.ndarray]
    features: np.ndarray
    labels: np.ndarray
    split: dict[str, np.ndarray]
    symmetric: bool = False  # every edge is there in both directions, each once
    classes: int | None = None
    ogb: str | None = None


def load_graph(recipe: GraphRecipe) -> GraphData:
    """Load and check the data of a recipe.

    Raises:
        DataNotFoundError: when the files are not there; nothing is downloaded.
        ValueError: when the files do not have the documented layout, or their contents do not fit together.
    """
    raw = _read(recipe.dataset)
    features, labels, classes = _checked(recipe.dataset, raw)
    graph = bidirected(*raw.edges, len(labels), recipe.self_loops, raw.symmetric)
    raw.edges = (np.empty(0), np.empty(0))  # free them: on a large graph they are gigabytes
    if recipe.standardize:
        mean, std = features.mean(0), features.std(0, correction=0)
        features = (features - mean).div_(torch.where(std > 0, std, torch.ones_like(std)))
    digest = hashlib.sha256()
    for part in (graph.indptr, graph.indices, features, labels, *(raw.split[s] for s in SPLITS)):
        digest.update(cast(Any, np.ascontiguousarray(part)))
    train, valid, test = (torch.from_numpy(raw.split[s].astype(np.int64)) for s in SPLITS)
    checksum = digest.hexdigest()[:16]
    return GraphData(raw.title, graph, features, labels, classes, train, valid, test, checksum, raw.ogb)


def _read(dataset: str) -> _Raw:
    EXPERIMENT.check_dataset(dataset)
    if dataset == "digits-graph":
        return _digits()
    if dataset in EXPERIMENT.named:
        return _ogb(dataset)
    path = own_path(dataset)
    if path.suffix == ".npz":
        return _archive(path)
    if (path / "raw" / "edge.csv.gz").exists():
        return _ogb_folder(path)
    for folder in (path, path / "raw"):
        if found := sorted(folder.glob("ind.*.graph")):
            return _planetoid(found[0])
    if not path.exists():
        raise DataNotFoundError(f"there is no file or folder {path}")
    raise ValueError(f"{path} holds no graph: neither raw/edge.csv.gz (OGB's layout) nor ind.*.graph (Planetoid)")


def bidirected(
    source: np.ndarray, destination: np.ndarray, nodes: int, self_loops: bool, symmetric: bool = False
) -> Graph:
    """Return the graph with every edge in both directions, each once; self-loops of the input are dropped.

    Args:
        source, destination: (E,) node numbers, checked.
        nodes: N.
        self_loops: add one to every node.
        symmetric: the edges are bidirected already; saves memory on large graphs.
    """
    # one int64 key per edge, sorted by destination, then source: on 124 million edges this is what takes the memory
    both = 1 if symmetric else 2
    count = len(source)
    keys = np.empty(both * count + (nodes if self_loops else 0), dtype=np.int64)
    np.multiply(destination, nodes, out=keys[:count], dtype=np.int64, casting="unsafe")
    keys[:count] += source
    if not symmetric:
        np.multiply(source, nodes, out=keys[count : 2 * count], dtype=np.int64, casting="unsafe")
        keys[count : 2 * count] += destination
    given = keys[: both * count]
    loops: Any = source == destination
    given[np.concatenate([loops] * both)] = -1
    if self_loops:
        keys[both * count :] = np.arange(nodes, dtype=np.int64) * (nodes + 1)
    keys.sort()
    keep: Any = np.empty(len(keys), dtype=bool)
    keep[:1] = True
    np.not_equal(keys[1:], keys[:-1], out=keep[1:])
    np.logical_and(keep, keys >= 0, out=keep)
    keys = keys[keep]
    kind: Any = np.int32 if max(nodes, len(keys)) < 2**31 else np.int64
    indptr = np.zeros(nodes + 1, dtype=kind)
    indices = np.empty(len(keys), dtype=kind)
    for start in range(0, len(keys), PIECE):  # in pieces: no second array of int64
        part = keys[start : start + PIECE]
        indices[start : start + len(part)] = part % nodes
        indptr[1:] = indptr[1:] + np.bincount(part // nodes, minlength=nodes)
    np.cumsum(indptr, out=indptr)
    return Graph(torch.from_numpy(indptr), torch.from_numpy(indices))


def _checked(name: str, raw: _Raw) -> tuple[Tensor, Tensor, int]:
    """Check that arrays fit together; return features, labels and the number of classes."""
    labels = np.asarray(raw.labels).reshape(-1)
    if not np.issubdtype(labels.dtype, np.integer):
        wrong = ~np.isnan(labels) & (labels != np.floor(labels))
        if wrong.any():
            raise ValueError(f"{name}: labels must be whole numbers, node {int(wrong.argmax())} has {labels[wrong][0]}")
        labels = np.nan_to_num(labels, nan=-1)
    labels = labels.astype(np.int64)
    nodes = len(labels)
    if nodes == 0 or raw.features.ndim != 2 or len(raw.features) != nodes:
        raise ValueError(f"{name}: {nodes} labels need features of shape ({nodes}, F), got {raw.features.shape}")
    if not np.isfinite(raw.features).all():
        first = int(np.argmin(np.isfinite(raw.features).all(1)))
        count = int((~np.isfinite(raw.features)).sum())
        raise ValueError(f"{name}: {count} features are NaN or infinite, the first in node {first}")
    if labels.min() < -1:
        raise ValueError(f"{name}: labels must be 0, 1, ... or -1 for none, got {labels.min()}")
    classes = raw.classes or int(labels.max()) + 1
    if labels.max() >= classes:
        raise ValueError(f"{name}: labels must be below {classes}, got {labels.max()}")
    for ends in raw.edges:
        if len(ends) and (ends.min() < 0 or ends.max() >= nodes):
            bad = ends.min() if ends.min() < 0 else ends.max()
            raise ValueError(f"{name}: edges must name nodes 0..{nodes - 1}, got {bad}")
    used = np.full(nodes, "", dtype=object)
    for part in SPLITS:
        index = raw.split[part] = np.asarray(raw.split[part]).reshape(-1)
        if not np.issubdtype(index.dtype, np.integer) and len(index):
            raise ValueError(f"{name}: the {part} split must hold whole numbers, got {index.dtype}")
        if len(index) and (index.min() < 0 or index.max() >= nodes):
            bad = index.min() if index.min() < 0 else index.max()
            raise ValueError(f"{name}: the {part} split must name nodes 0..{nodes - 1}, got {bad}")
        index = index.astype(np.int64)
        if len(np.unique(index)) != len(index):
            raise ValueError(f"{name}: the {part} split names a node more than once")
        if (taken := used[index] != "").any():
            node = int(index[taken][0])
            raise ValueError(f"{name}: node {node} is in the splits {used[node]} and {part}")
        if (labels[index] < 0).any():
            raise ValueError(f"{name}: node {int(index[labels[index] < 0][0])} of the {part} split has no label")
        used[index] = part
    if not len(raw.split["train"]) or not len(raw.split["test"]):
        raise ValueError(f"{name}: the train and the test split need at least one node each")
    features = np.require(raw.features, dtype=np.float32, requirements=["C", "W"])
    return torch.from_numpy(features), torch.from_numpy(labels), classes


# --- readers --------------------------------------------------------------------------------------


def _digits() -> _Raw:
    digits = load_digits()
    pixels, labels = digits.data.astype(np.float32) / 16, digits.target.astype(np.int64)
    source, destination = kneighbors_graph(pixels, n_neighbors=8).nonzero()
    order = np.random.default_rng(0).permutation(len(labels))
    by_class = [order[labels[order] == c] for c in range(10)]
    return _Raw(
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


def _archive(path: Path) -> _Raw:
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
    return _Raw(
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


def _ogb_folder(path: Path) -> _Raw:
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
    with _quiet_ogb():
        reader = library("ogb.io.read_graph_raw", "graph")
        try:
            graph = reader.read_csv_graph_raw(str(raw), add_inverse_edge=False)[0]
        except (RuntimeError, IndexError, AssertionError) as error:
            raise ValueError(f"{path} cannot be read as an OGB graph: {type(error).__name__} {error}") from error
    source, destination = graph["edge_index"]
    announced, there = int(_csv(raw / "num-edge-list.csv.gz")[0]), len(_csv(raw / "edge.csv.gz")) // 2
    if announced != there:  # OGB would take the first of them
        raise ValueError(f"{path}: num-edge-list announces {announced} edges, edge.csv.gz has {there}")
    return _Raw(
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


def _planetoid(graph_file: Path) -> _Raw:
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
    return _Raw(
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


# --- OGB ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _quiet_ogb() -> Iterator[None]:
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


def _ogb_folder_of(name: str) -> Path:
    folder = data_dir() / name.replace("-", "_")
    return folder.with_name(f"{folder.name}_dgl") if folder.with_name(f"{folder.name}_dgl").exists() else folder


def _ogb(name: str) -> _Raw:
    """A data set of OGB through its own loader, with its official split."""
    folder = _ogb_folder_of(name)
    get = f"get it with: python -m cpt_core download {name}"
    if not (folder / "raw").is_dir() and not (folder / "processed").is_dir():
        raise DataNotFoundError(f"{name} is not in {folder.parent}; {get}")
    if not list(folder.glob("RELEASE_v*.txt")):  # OGB would ask whether to update, and wait for an answer
        raise DataNotFoundError(f"{folder} is incomplete (no RELEASE_v1.txt); remove it and {get}")
    (folder / "processed").mkdir(exist_ok=True)  # OGB saves into it without making it
    with _quiet_ogb():
        data = _ogb_dataset(name)
    split = {part: np.asarray(index) for part, index in data.get_idx_split().items()}
    graph, labels = data[0]
    if dgl_module() is not None:
        source, destination = (e.numpy() for e in graph.edges())
        features = graph.ndata["feat"].numpy()
    else:
        (source, destination), features = graph["edge_index"], graph["node_feat"]
    return _Raw(
        title=EXPERIMENT.named[name].title,
        edges=(source, destination),
        features=features,
        labels=np.asarray(labels),
        split=split,
        symmetric=name == "ogbn-products",  # OGB adds its reverse edges
        classes=int(data.num_classes),
        ogb=name,
    )


def _ogb_dataset(name: str) -> Any:
    """Make OGB's data set object: its DGL form where DGL is installed, else its plain form."""
    ogb = library("ogb.nodeproppred", "graph")
    if dgl_module() is not None:
        return ogb.DglNodePropPredDataset(name, root=str(data_dir()))
    dataset = library("ogb.nodeproppred.dataset", "graph")
    # OGB saves arrays with pickle; torch >= 2.6 reads them back only when told that the file is trusted
    trusting = SimpleNamespace(load=partial(torch.load, weights_only=False), save=torch.save)
    original, dataset.torch = dataset.torch, trusting
    try:
        return ogb.NodePropPredDataset(name, root=str(data_dir()))
    finally:
        dataset.torch = original


def download(name: str, language: str = "") -> Path:
    """Get one of OGB's data sets through OGB, which shows its progress; asks nothing. They have no language."""
    sys.modules.setdefault("outdated", cast(Any, None))
    kind = "dataset" if dgl_module() is None else "dataset_dgl"
    module = library(f"ogb.nodeproppred.{kind}", "graph")
    asked, module.decide_download = module.decide_download, lambda url: True  # the user has asked for it already
    try:
        _ogb_dataset(name)
    finally:
        module.decide_download = asked
    return _ogb_folder_of(name)


def evaluator(name: str) -> Any:
    """Return OGB's evaluator of a data set."""
    with _quiet_ogb():
        return library("ogb.nodeproppred", "graph").Evaluator(name)


# --- stand-ins ------------------------------------------------------------------------------------


def random_graph(recipe: GraphRecipe) -> GraphData:
    """Return a random graph in the shapes of a data set, to measure times and count operations without the data.

    A graph of one's own is loaded instead.
    """
    if recipe.dataset not in EXPERIMENT.named:
        return load_graph(recipe)
    sizes = EXPERIMENT.named[recipe.dataset].sizes
    nodes, edges, features, classes = (sizes[name] for name in ("nodes", "edges", "features", "classes"))
    random = generator_of(0)
    # squaring makes some nodes popular, as in real graphs
    source, destination = (torch.rand(2, edges, generator=random, dtype=torch.float64) ** 2 * nodes).long().numpy()
    graph = bidirected(source, destination, nodes, recipe.self_loops)
    order = torch.randperm(nodes, generator=random)
    return GraphData(
        title=f"a random graph for {recipe.dataset}",
        graph=graph,
        features=torch.randn(nodes, features, generator=random),
        labels=torch.randint(0, classes, (nodes,), generator=random),
        classes=classes,
        train=order[: nodes // 2],
        valid=order[:0],
        test=order[-max(1, nodes // 10) :],
        checksum="",
    )
