"""Readers of graphs in files: archives, OGB's folders, Planetoid's files; and the graph over the embedded digits.

OGB's own loader keeps a pickle in ``processed/``, which runs code when it is loaded; it is neither made nor read here.
"""

import contextlib
import hashlib
import io
import logging
import pickle
import re
import shutil
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from cpt_extras.optional_libraries import library
from cpt_lab.data.common import SPLITS, whole_numbers
from cpt_lab.data.files import not_here, reading, sources
from cpt_lab.experiments.graph import EXPERIMENT, GraphRecipe
from cpt_lab.paths import data_dir

log = logging.getLogger(__name__)
URL = "https://snap.stanford.edu/ogb/data/nodeproppred/{}.zip"
# nodes, edges (each once), features and classes, as OGB states them
OFFICIAL = {"ogbn-arxiv": (169_343, 1_166_243, 128, 40), "ogbn-products": (2_449_029, 61_859_140, 100, 47)}


@dataclass
class RawGraph:
    """What a reader returns: arrays as the files hold them."""

    title: str
    edges: tuple[np.ndarray, np.ndarray]
    features: np.ndarray
    labels: np.ndarray
    split: dict[str, np.ndarray]
    classes: int | None = None
    ogb: str | None = None


def read_digits() -> RawGraph:
    """Return the nearest-neighbour graph over scikit-learn's digits."""
    from sklearn.datasets import load_digits  # here, as they take a second
    from sklearn.neighbors import kneighbors_graph

    digits = load_digits()
    pixels, labels = digits.data.astype(np.float32) / 16, digits.target.astype(np.int64)
    source, destination = kneighbors_graph(pixels, n_neighbors=8).nonzero()
    order = np.random.default_rng(0).permutation(len(labels))
    by_class = [order[labels[order] == c] for c in range(10)]
    parts = {"train": slice(5), "valid": slice(5, 25), "test": slice(25, None)}
    split = {name: np.concatenate([c[part] for c in by_class]) for name, part in parts.items()}
    title = "scikit-learn digits, 8-nearest-neighbour graph, 5 labels per class"
    return RawGraph(title, (source, destination), pixels, labels, split)


NAMES = {
    "edges": ("edge_index", "edges"),
    "features": ("features", "node_features", "x"),
    "labels": ("labels", "node_labels", "y"),
    "train": ("train_idx", "train_masks", "train_mask"),
    "valid": ("valid_idx", "val_masks", "val_mask"),
    "test": ("test_idx", "test_masks", "test_mask"),
}


def read_archive(path: Path) -> RawGraph:
    """Read a graph from an ``.npz`` archive of the documented layout."""
    with reading(path), path.open("rb") as file, np.load(file, allow_pickle=False) as z:
        arrays = {key: z[key] for key in z.files}
        found: dict[str, np.ndarray] = {}
        for what, names in NAMES.items():
            key = next((n for n in names if n in arrays), None)
            if key is not None:
                found[what] = arrays[key]
            elif what == "features" and {"feat_indptr", "feat_indices", "feat_shape"} <= arrays.keys():
                csr = (arrays[f"feat_{part}"] for part in ("indptr", "indices", "shape"))
                found[what] = _dense(path, arrays.get("feat_data"), *csr)
            elif what not in SPLITS:
                raise ValueError(f"{path}: needs one of {', '.join(names)}; it has {', '.join(arrays)}")
        labels = whole_numbers(f"{path}: labels", found["labels"], missing=-1)
    edges, pyg = found["edges"], "edge_index" in arrays
    if edges.ndim != 2 or 2 not in edges.shape or not np.issubdtype(edges.dtype, np.integer):
        raise ValueError(f"{path}: edges must be whole numbers (2, E) or (E, 2), got {edges.dtype} {edges.shape}")
    # of two edges, which could be read either way, an edge_index has the sources first, and edges has edges
    source, destination = edges if edges.shape[0] == 2 and (pyg or edges.shape[1] != 2) else edges.T
    title, there = f"own graph ({path.stem})", [part for part in SPLITS if part in found]
    if not there:
        order = np.random.default_rng(0).permutation(np.flatnonzero(labels >= 0))
        found |= zip(SPLITS, np.split(order, [len(order) * 6 // 10, len(order) * 8 // 10]), strict=True)
        title += ", nodes drawn 6 : 2 : 2"
    elif len(there) < len(SPLITS):
        raise ValueError(f"{path}: has nodes for {' and '.join(there)}; it needs {', '.join(SPLITS)}, or none of them")
    split = {part: _indices(path, part, found[part], len(labels)) for part in SPLITS}
    return RawGraph(title, (source, destination), found["features"], labels, split)


def _dense(path: Path, data: np.ndarray | None, *csr: np.ndarray) -> np.ndarray:
    """Return a matrix that is given in CSR form; without its values, ``data``, they are ones."""
    names = ("feat_indptr", "feat_indices", "feat_shape")
    ends, places, size = (whole_numbers(f"{path}: {n}", part) for n, part in zip(names, csr, strict=True))
    fits = len(size) == 2 and len(ends) == size[0] + 1 and ends[0] == 0 and ends[-1] == len(places)
    fits = fits and (data is None or data.shape == places.shape)
    if not fits or (np.diff(ends) < 0).any() or ((places < 0) | (places >= size[1])).any():
        raise ValueError(f"{path}: feat_indptr and feat_indices do not fit feat_shape {tuple(size.tolist())}")
    features = np.zeros(size, dtype=np.float32)
    features[np.repeat(np.arange(size[0]), np.diff(ends)), places] = 1 if data is None else data
    return features


def _indices(path: Path, part: str, given: np.ndarray, nodes: int) -> np.ndarray:
    """Return the node numbers of a split; of several masks, (splits, N) or PyG's (N, splits), the first is taken."""
    if given.dtype != bool:
        as_mask = given.shape == (nodes,) and nodes > 2 and np.isin(given, (0, 1)).all()  # else nodes are named twice
        return np.flatnonzero(given) if as_mask else given
    wanted = f"{path}: masks of the {part} split must be (N,), (splits, N) or (N, splits) with N = {nodes}"
    if given.ndim not in (1, 2) or nodes not in given.shape:
        raise ValueError(f"{wanted}, got {given.shape}")
    if given.shape == (nodes, nodes):
        raise ValueError(f"{wanted}; {given.shape} could be either: keep one mask, (N,)")
    return np.flatnonzero(given if given.ndim == 1 else given[0] if given.shape[1] == nodes else given[:, 0])


def read_ogb_folder(path: Path, title: str) -> RawGraph:
    """Read a graph in OGB's raw layout, from its text alone."""
    splits = sorted(p for p in (path / "split").glob("*") if p.is_dir())
    if len(splits) != 1:
        raise ValueError(f"{path} needs exactly one folder in split/, it has {len(splits)}")
    parts = ("edge", "node-feat", "node-label", "num-node-list", "num-edge-list")
    files = {part: path / "raw" / f"{part}.csv.gz" for part in parts}
    files |= {part: splits[0] / f"{part}.csv.gz" for part in SPLITS}
    if missing := [p.relative_to(path).as_posix() for p in files.values() if not p.exists()]:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    edges, features = _csv(files["edge"], np.int64, 2), _csv(files["node-feat"], np.float32)
    for name, there in (("edge", edges), ("node", features)):
        announced = _csv(files[f"num-{name}-list"], np.int64, 1).ravel().tolist()
        if announced != [len(there)]:
            file = {"edge": "edge", "node": "node-feat"}[name]
            raise ValueError(f"{path}: num-{name}-list announces {announced} {name}s, {file}.csv.gz has {len(there)}")
    labels = whole_numbers(f"{files['node-label']}: labels", _csv(files["node-label"], None, 1), missing=-1)
    split = {part: _csv(files[part], np.int64, 1).ravel() for part in SPLITS}
    return RawGraph(title, (edges[:, 0], edges[:, 1]), features, labels, split)


def _csv(path: Path, kind: type | None, columns: int | None = None) -> np.ndarray:
    """Return a table of numbers without a header, (lines, columns), in one type or (None) as it is written."""
    import pandas as pd  # here, as it takes half a second

    with reading(path):
        if path.stat().st_size == 0:  # a table without lines is some bytes of gzip
            raise ValueError("the file is empty")
        try:
            table = pd.read_csv(path, compression="gzip", header=None, dtype=kind).to_numpy()
        except pd.errors.EmptyDataError:
            return np.empty((0, columns or 1), dtype=kind or np.int64)
        if columns and table.shape[1] != columns:
            raise ValueError(f"{columns} columns expected, got {table.shape[1]}")
        return table


def read_ogb(recipe: GraphRecipe) -> RawGraph:
    """Return a data set of OGB with its official split; ValueError where its counts are not the official ones."""
    name = recipe.dataset
    found = [folder for folder in sources(recipe) if (folder / "raw").is_dir()]
    if not found:
        raise not_here(name)
    graph = read_ogb_folder(found[-1], EXPERIMENT.named[name].title)
    *official, graph.classes = OFFICIAL[name]
    counts = [len(graph.labels), len(graph.edges[0]), graph.features.shape[1]]
    if counts != official:
        raise ValueError(f"{found[-1]} is not the official {name}: nodes, edges, features {counts}, not {official}")
    evaluator(name)  # without its library this ends here, not at the first evaluation
    graph.ogb = name
    return graph


def download(name: str, language: str = "") -> Path:
    """Get the raw files of one of OGB's data sets over https, with progress. They have no language.

    OGB publishes no checksum. That of the first download is kept beside the data, as ``<folder>.sha256``, and later
    downloads must have it; what is read is checked against the official counts.

    Raises:
        ValueError: when the archive is not the one that was downloaded first, or is damaged.
        ImportError: without the libraries of the extra ``graph``.
    """
    evaluator(name)  # without its library there would be no use for the data
    folder = data_dir() / EXPERIMENT.named[name].folders[0]
    folder.parent.mkdir(parents=True, exist_ok=True)
    kept = folder.with_name(f"{folder.name}.sha256")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}-") as temporary:
        archive = Path(temporary, "archive.zip")
        torch.hub.download_url_to_file(URL.format(name.removeprefix("ogbn-")), str(archive))
        with archive.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if kept.exists() and kept.read_text(encoding="utf-8").strip() != digest:
            raise ValueError(
                f"the archive of {name} has the SHA-256 {digest}, not that of the first download, in {kept}; remove "
                "that file if OGB has made a new release"
            )
        unpacked = _unpack(archive, Path(temporary, "unpacked"))
        kept.write_text(f"{digest}\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        unpacked.rename(folder)
    return folder


def _unpack(archive: Path, folder: Path) -> Path:
    """Unpack the raw files and the split of an archive, nothing else, below a folder; return the one that has them."""
    with reading(archive), zipfile.ZipFile(archive) as z:
        z.extractall(folder, [name for name in z.namelist() if re.fullmatch(r"[^/]+/(raw|split)/.+\.csv\.gz", name)])
    if (edges := next(folder.glob("*/raw/edge.csv.gz"), None)) is None:
        raise ValueError(f"{archive} holds no raw/edge.csv.gz")
    return edges.parent.parent


def evaluator(name: str) -> Any:
    """Return OGB's evaluator of a data set, without a question to the network; what OGB prints goes to the log."""
    sys.modules.setdefault("outdated", cast(Any, None))  # would ask for newer versions
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            return library("ogb.nodeproppred", "graph").Evaluator(name)
    finally:
        if printed.getvalue().strip():
            log.debug("ogb: %s", printed.getvalue())


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
    folder, prefix = graph_file.parent, graph_file.name.removesuffix("graph")

    def part(name: str) -> Any:
        path = folder / f"{prefix}{name}"
        with reading(path), path.open("rb") as stream:
            return _PlanetoidUnpickler(stream, encoding="latin1").load()

    for name in ("y", "tx", "ty", "allx", "ally", "test.index"):
        if not (folder / f"{prefix}{name}").exists():
            raise ValueError(f"{folder} lacks {prefix}{name}")
    with reading(folder):
        y, ally, ty = part("y"), part("ally"), part("ty")
        test = np.loadtxt(folder / f"{prefix}test.index", dtype=np.int64, ndmin=1)
        if test.min() < 0:
            raise ValueError(f"{folder}: {prefix}test.index names node {test.min()}")
        nodes = int(max(test.max() + 1, len(ally) + len(ty)))  # CiteSeer: some test numbers name no row
        features = np.zeros((nodes, part("allx").shape[1]), dtype=np.float32)
        one_hot = np.zeros((nodes, ally.shape[1]))
        features[: len(ally)], one_hot[: len(ally)] = part("allx").toarray(), ally
        features[test], one_hot[test] = part("tx").toarray(), ty
        neighbours = part("graph")
        source = np.concatenate([np.full(len(v), k) for k, v in neighbours.items()])
        destination = np.concatenate([np.asarray(v, dtype=np.int64) for v in neighbours.values()])
        labels = np.where(one_hot.any(1), one_hot.argmax(1), -1)
    valid = np.arange(len(y), min(len(y) + 500, len(ally)))
    split = {"train": np.arange(len(y)), "valid": valid, "test": np.sort(test)}
    title = f"own graph ({prefix.split('.')[1]}, Planetoid split)"
    return RawGraph(title, (source, destination), features, labels, split)
