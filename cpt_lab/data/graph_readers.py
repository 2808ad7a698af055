"""Readers of graph files: archives, OGB's folders, Planetoid's files; and the graph over the embedded digits.

Each returns a ``RawGraph`` of arrays as the files hold them, which ``graphs`` checks. OGB's own loader writes a pickle
to ``processed/``, which runs code when it is loaded; that folder is neither written nor read here.
"""

import contextlib
import hashlib
import io
import logging
import math
import re
import shutil
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from cpt_extras.optional_libraries import import_optional
from cpt_lab.data.files import data_paths, explain_read_errors, missing_data_error
from cpt_lab.data.graph_facts import report_arrays, report_repeated_entries
from cpt_lab.data.inert_pickle import load_inert, to_array, to_csr_parts
from cpt_lab.data.report import DataReport, empty_report, pluralize
from cpt_lab.data.splits import SPLITS, as_int64_vector
from cpt_lab.data.unread_files import is_below_hidden, report_unread
from cpt_lab.experiments.graph import EXPERIMENT, GraphRecipe
from cpt_lab.paths import command, data_dir

log = logging.getLogger(__name__)
OGB_URL = "https://snap.stanford.edu/ogb/data/nodeproppred/{}.zip"


class OgbCounts(NamedTuple):
    """Numbers of nodes, edges (each counted once), features and classes of a data set, as OGB states them."""

    nodes: int
    edges: int
    features: int
    classes: int


OFFICIAL_COUNTS = {
    "ogbn-arxiv": OgbCounts(169_343, 1_166_243, 128, 40),
    "ogbn-products": OgbCounts(2_449_029, 61_859_140, 100, 47),
}


@dataclass
class RawGraph:
    """Arrays of a graph as the files hold them, not checked.

    Attributes:
        title: name of the data in figures and rows.
        edges: source nodes and destination nodes.
        features: features of every node.
        labels: label of every node.
        split: nodes of "train", "valid" and "test".
        classes: number of classes; None takes it from the labels.
        ogb: name for OGB's ``Evaluator``, or None.
    """

    title: str
    edges: tuple[np.ndarray, np.ndarray]
    features: np.ndarray
    labels: np.ndarray
    split: dict[str, np.ndarray]
    classes: int | None = None
    ogb: str | None = None


def read_digits(report: DataReport) -> RawGraph:
    """Return the nearest-neighbour graph over scikit-learn's digits."""
    from sklearn.datasets import load_digits  # here, as they take a second
    from sklearn.neighbors import kneighbors_graph

    digits = load_digits()
    pixels, labels = digits.data.astype(np.float32) / 16, digits.target.astype(np.int64)
    source, destination = kneighbors_graph(pixels, n_neighbors=8).nonzero()
    order = np.random.default_rng(0).permutation(len(labels))
    by_class = [order[labels[order] == c] for c in range(10)]
    parts = {"train": slice(5), "valid": slice(5, 25), "test": slice(25, None)}
    split = {
        name: np.concatenate([c[part] for c in by_class])
        for name, part in parts.items()
    }
    report.add(
        "read",
        "scikit-learn's digits, an edge from every image to its 8 nearest neighbours",
    )
    report.add("changed", "pixels divided by 16")
    report.add(
        "split",
        "of every class 5 images are trained on, 20 validate, the rest tests, drawn with seed 0",
    )
    title = "scikit-learn digits, 8-nearest-neighbour graph, 5 labels per class"
    return RawGraph(title, (source, destination), pixels, labels, split)


ARRAY_NAMES = {
    "edges": ("edge_index", "edges"),
    "features": ("features", "node_features", "x"),
    "labels": ("labels", "node_labels", "y"),
    "train": ("train_idx", "train_masks", "train_mask"),
    "valid": ("valid_idx", "val_masks", "val_mask"),
    "test": ("test_idx", "test_masks", "test_mask"),
}


CSR_NAMES = ("feat_indptr", "feat_indices", "feat_shape")
MAX_MATRIX_VALUES = 2**32  # of a dense matrix: 17 GB as float32


def read_archive(path: Path, report: DataReport | None = None) -> RawGraph:
    """Read a graph from an ``.npz`` archive of the documented layout; report arrays that are not used."""
    report = empty_report() if report is None else report
    with (
        explain_read_errors(path),
        path.open("rb") as file,
        np.load(file, allow_pickle=False) as archive,
    ):
        arrays = _arrays(path, archive, report)
        parts = _select_arrays(path, arrays, report)
        labels = _labels(f"{path}: labels", parts["labels"], report)
    edges = _edge_ends(path, parts["edges"], "edge_index" in arrays, report)

    title = f"own graph ({path.stem})"
    splits = [part for part in SPLITS if part in parts]
    if not splits:
        order = np.random.default_rng(0).permutation(np.flatnonzero(labels >= 0))
        ends = [len(order) * 6 // 10, len(order) * 8 // 10]
        parts |= zip(SPLITS, np.split(order, ends), strict=True)
        title += ", nodes drawn 6 : 2 : 2"
        report.add(
            "split",
            "the file has no split: nodes with a label were drawn 6 : 2 : 2, with seed 0",
        )
    elif len(splits) < len(SPLITS):
        raise ValueError(
            f"{path}: has nodes for {' and '.join(splits)}; it needs {', '.join(SPLITS)}, or none of them"
        )
    split = {
        part: _indices(path, part, parts[part], len(labels), report) for part in SPLITS
    }
    return RawGraph(title, edges, parts["features"], labels, split)


def _select_arrays(
    path: Path, arrays: dict[str, np.ndarray], report: DataReport
) -> dict[str, np.ndarray]:
    """Return the arrays of a graph by the keys of ``ARRAY_NAMES``; report all others.

    Raises:
        ValueError: without edges, features or labels.
    """
    parts: dict[str, np.ndarray] = {}
    used: list[str] = []
    replacements: dict[str, str] = {}
    for part, names in ARRAY_NAMES.items():
        used_name = next((name for name in names if name in arrays), None)
        if used_name is not None:
            parts[part] = arrays[used_name]
            used.append(used_name)
            replacements |= dict.fromkeys(
                (name for name in names if name != used_name), used_name
            )
        elif part == "features" and set(CSR_NAMES) <= arrays.keys():
            used += [name for name in (*CSR_NAMES, "feat_data") if name in arrays]
            csr = [arrays[name] for name in CSR_NAMES]
            parts[part] = dense_matrix(
                path, CSR_NAMES, arrays.get("feat_data"), *csr, report=report
            )
        elif part not in SPLITS:
            raise ValueError(
                f"{path}: needs one of {', '.join(names)}; it has {', '.join(arrays)}"
            )
    report_arrays(report, arrays, used, replacements)
    return parts


def _arrays(path: Path, archive: Any, report: DataReport) -> dict[str, np.ndarray]:
    """Return the numeric arrays of an archive by name; report arrays of Python objects, which need a pickle."""
    arrays = {}
    for name in archive.files:
        try:
            arrays[name] = archive[name]
        except ValueError as error:
            if "allow_pickle" not in str(error):
                raise
            if any(name in names for names in ARRAY_NAMES.values()):
                raise ValueError(
                    f"{path}: the array {name} holds Python objects; save it as numbers"
                ) from error
            report.add("left out", f"the array {name}: it holds Python objects")
    return arrays


def _edge_ends(
    path: Path, edges: np.ndarray, pyg: bool, report: DataReport
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sources and destinations of edges given as (2, E) or (E, 2)."""
    if (
        edges.ndim != 2
        or 2 not in edges.shape
        or not np.issubdtype(edges.dtype, np.integer)
    ):
        raise ValueError(
            f"{path}: edges must be whole numbers (2, E) or (E, 2), got {edges.dtype} {edges.shape}"
        )
    # of two edges, which could be read either way, an edge_index has the sources first, and edges has edges
    sources_first = edges.shape[0] == 2 and (pyg or edges.shape[1] != 2)
    if edges.shape == (2, 2):
        report.add(
            "read",
            f"edges of shape (2, 2): {'the sources first' if sources_first else 'a row is an edge'}",
        )
    source, destination = edges if sources_first else edges.T
    return source, destination


def _labels(where: str, labels: np.ndarray, report: DataReport) -> np.ndarray:
    """Return labels as whole numbers, -1 for NaN; report the number of NaN."""
    num_missing = int(np.isnan(labels).sum()) if labels.dtype.kind == "f" else 0
    if num_missing:
        report.add(
            "changed", f"{pluralize(num_missing, 'label')} NaN: nodes without a label"
        )
    return as_int64_vector(where, labels, missing=-1)


def dense_matrix(
    path: Path,
    names: tuple[str, str, str],
    data: np.ndarray | None,
    *csr: Any,
    report: DataReport,
) -> np.ndarray:
    """Return a CSR matrix as a dense one in float32.

    Args:
        path: path of the file, for errors.
        names: names of the row ends, the columns and the shape, for errors.
        data: the values; None for ones.
        *csr: row ends, columns and shape: checked here, as numpy and scipy trust them.
        report: gets a fact if entries are given more than once.
    """
    row_ends, columns, shape = (
        as_int64_vector(f"{path}: {name}", part)
        for name, part in zip(names, csr, strict=True)
    )
    fits = (
        len(shape) == 2
        and (shape >= 0).all()
        and len(row_ends) == shape[0] + 1
        and row_ends[0] == 0
        and row_ends[-1] == len(columns)
        and (data is None or data.shape == columns.shape)
        and (np.diff(row_ends) >= 0).all()
        and (columns >= 0).all()
        and (columns < shape[1]).all()
    )
    if not fits:
        raise ValueError(
            f"{path}: {names[0]} and {names[1]} do not fit {names[2]} {tuple(shape.tolist())}"
        )
    if data is not None and data.dtype.kind not in "iufb":
        raise ValueError(f"{path}: features must be real numbers, got {data.dtype}")

    features = _zero_matrix(path, tuple(shape.tolist()))
    cells = np.repeat(np.arange(shape[0]), np.diff(row_ends)) * shape[1] + columns
    num_repeated = len(cells) - len(np.unique(cells))
    if num_repeated:
        report_repeated_entries(
            report, names[:2], num_repeated, is_summed=data is not None
        )
    if num_repeated and data is not None:
        np.add.at(features.reshape(-1), cells, data)  # as scipy adds them
    else:
        features.reshape(-1)[cells] = 1 if data is None else data
    return features


def _zero_matrix(path: Path, shape: tuple[int, int]) -> np.ndarray:
    """Return a matrix of zeros in float32; ValueError where it would be too large."""
    if math.prod(shape) > MAX_MATRIX_VALUES:
        raise ValueError(
            f"{path}: features of shape {shape} would take {math.prod(shape) * 4 / 1e9:,.0f} GB"
        )
    return np.zeros(shape, dtype=np.float32)


def _indices(
    path: Path, part: str, nodes_or_mask: np.ndarray, nodes: int, report: DataReport
) -> np.ndarray:
    """Return the node numbers of a split, from numbers or from a mask.

    Of several masks, (splits, N) or PyG's (N, splits), the first is used.
    """
    array = nodes_or_mask
    if array.dtype != bool:
        # N zeros and ones, once or in several masks, are a mask: as numbers, they would name nodes twice.
        is_mask = nodes > 2 and nodes in array.shape and np.isin(array, (0, 1)).all()
        if not is_mask:
            return array
        array = array.astype(bool)

    rule = f"{path}: masks of the {part} split must be (N,), (splits, N) or (N, splits) with N = {nodes}"
    if array.ndim not in (1, 2) or nodes not in array.shape:
        raise ValueError(f"{rule}, got {array.shape}")
    if array.shape == (nodes, nodes):
        raise ValueError(f"{rule}; {array.shape} could be either: keep one mask, (N,)")
    if array.ndim == 1:
        return np.flatnonzero(array)
    masks = array if array.shape[1] == nodes else array.T
    if len(masks) > 1:
        report.add(
            "left out",
            f"{pluralize(len(masks) - 1, 'mask')} of the {part} split: the first of {len(masks)} is used",
        )
    return np.flatnonzero(masks[0])


OGB_UNREAD_REASONS = (
    ("raw/edge-feat.csv.gz", "features of edges play no part"),
    ("raw/edge_reltype.csv.gz", "edges are of one type here"),
    ("raw/edge-*.csv.gz", "edges have ends alone here"),
    ("raw/node_year.csv.gz", "times of nodes play no part"),
    ("raw/*.csv.gz", "no feature, label or edge that is read"),
    ("mapping/*", "names of nodes and classes"),
    ("processed/*", "made by OGB's own loader"),
)


def read_ogb_folder(
    path: Path, title: str, report: DataReport | None = None
) -> RawGraph:
    """Read a graph in OGB's raw layout, from its text alone."""
    report = empty_report() if report is None else report
    splits = sorted(
        p
        for p in (path / "split").glob("*")
        if p.is_dir() and not is_below_hidden(p.relative_to(path))
    )
    if len(splits) != 1:
        raise ValueError(
            f"{path} needs exactly one folder in split/, it has {len(splits)}"
        )
    parts = ("edge", "node-feat", "node-label", "num-node-list", "num-edge-list")
    files = {part: path / "raw" / f"{part}.csv.gz" for part in parts}
    files |= {part: splits[0] / f"{part}.csv.gz" for part in SPLITS}
    if missing := [
        p.relative_to(path).as_posix() for p in files.values() if not p.exists()
    ]:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    edges, features = (
        _csv(files["edge"], np.int64, 2),
        _csv(files["node-feat"], np.float32),
    )
    for name, rows in (("edge", edges), ("node", features)):
        announced = _csv(files[f"num-{name}-list"], np.int64, 1).ravel().tolist()
        if announced != [len(rows)]:
            file = {"edge": "edge", "node": "node-feat"}[name]
            raise ValueError(
                f"{path}: num-{name}-list announces {announced} {name}s, {file}.csv.gz has {len(rows)}"
            )
    labels = _labels(
        f"{files['node-label']}: labels", _csv(files["node-label"], None, 1), report
    )
    split = {part: _csv(files[part], np.int64, 1).ravel() for part in SPLITS}
    report.add(
        "read",
        f"OGB's raw layout: edges {edges.shape}, features {features.shape}, labels {labels.shape}",
    )
    report.add("split", f"that of split/{splits[0].name}")
    report_unread(report, path, list(files.values()), "not read", OGB_UNREAD_REASONS)
    return RawGraph(title, (edges[:, 0], edges[:, 1]), features, labels, split)


def _csv(path: Path, kind: type | None, columns: int | None = None) -> np.ndarray:
    """Return a table of numbers without a header, (lines, columns).

    Args:
        path: a gzip-compressed file.
        kind: type of the numbers; None takes it from the file.
        columns: required number of columns; None allows any.
    """
    import pandas as pd  # here, as it takes half a second

    with explain_read_errors(path):
        if path.stat().st_size == 0:  # a table without lines is some bytes of gzip
            raise ValueError("the file is empty")
        try:
            table = pd.read_csv(
                path, compression="gzip", header=None, dtype=kind
            ).to_numpy()
        except pd.errors.EmptyDataError:
            return np.empty((0, columns or 1), dtype=kind or np.int64)
        if columns and table.shape[1] != columns:
            raise ValueError(f"{columns} columns expected, got {table.shape[1]}")
        return table


def read_ogb(recipe: GraphRecipe, report: DataReport | None = None) -> RawGraph:
    """Return a data set of OGB with its official split; ValueError if its counts are not the official ones."""
    report = empty_report() if report is None else report
    name = recipe.dataset
    folders = [folder for folder in data_paths(recipe) if (folder / "raw").is_dir()]
    if not folders:
        raise missing_data_error(name)
    *unused_folders, folder = folders
    try:
        graph = read_ogb_folder(folder, EXPERIMENT.named_datasets[name].title, report)
    except ValueError as error:
        raise ValueError(
            f"{error}; get it anew with: {command(f'download {name}')}"
        ) from error
    for unused in unused_folders:
        report.add("left out", f"the folder {unused.name}/: {folder.name}/ is read")

    *official, graph.classes = OFFICIAL_COUNTS[name]
    counts = [len(graph.labels), len(graph.edges[0]), graph.features.shape[1]]
    if counts != official:
        raise ValueError(
            f"{folder} is not the official {name}: nodes, edges, features {counts}, not {official}"
        )
    ogb_evaluator(
        name
    )  # raises now, not at the first evaluation, if its library is missing
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
    ogb_evaluator(name)  # without its library there would be no use for the data
    folder = data_dir() / EXPERIMENT.named_datasets[name].folders[0]
    folder.parent.mkdir(parents=True, exist_ok=True)
    checksum_file = folder.with_name(f"{folder.name}.sha256")
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f"{folder.name}-"
    ) as temporary:
        archive = Path(temporary, "archive.zip")
        torch.hub.download_url_to_file(
            OGB_URL.format(name.removeprefix("ogbn-")), str(archive)
        )
        with archive.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        if (
            checksum_file.exists()
            and checksum_file.read_text(encoding="utf-8").strip() != digest
        ):
            raise ValueError(
                f"the archive of {name} has the SHA-256 {digest}, not that of the first download, in {checksum_file}; "
                "remove "
                "that file if OGB has made a new release"
            )
        unpacked = _unpack(archive, Path(temporary, "unpacked"))
        checksum_file.write_text(f"{digest}\n", encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        unpacked.rename(folder)
    return folder


def _unpack(archive: Path, folder: Path) -> Path:
    """Unpack only the raw files and the split of an archive; return the folder that has them."""
    with explain_read_errors(archive), zipfile.ZipFile(archive) as z:
        z.extractall(
            folder,
            [
                name
                for name in z.namelist()
                if re.fullmatch(r"[^/]+/(raw|split)/.+\.csv\.gz", name)
            ],
        )
    if (edges := next(folder.glob("*/raw/edge.csv.gz"), None)) is None:
        raise ValueError(f"{archive} holds no raw/edge.csv.gz")
    return edges.parent.parent


def ogb_evaluator(name: str) -> Any:
    """Return OGB's evaluator of a data set without network access; output that OGB prints is logged."""
    sys.modules.setdefault("outdated", cast(Any, None))  # would ask for newer versions
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            return import_optional("ogb.nodeproppred", "graph").Evaluator(name)
    finally:
        if printed.getvalue().strip():
            log.debug("ogb: %s", printed.getvalue())


PLANETOID_PARTS = ("y", "tx", "ty", "allx", "ally", "test.index")


def read_planetoid(graph_file: Path, report: DataReport | None = None) -> RawGraph:
    """Read Cora, CiteSeer or PubMed from Planetoid's files, with their standard split.

    The files are pickles: nothing that they name is run, and their arrays are checked; see ``inert_pickle``.
    """
    report = empty_report() if report is None else report
    folder, prefix = graph_file.parent, graph_file.name.removesuffix("graph")
    files = {name: folder / f"{prefix}{name}" for name in (*PLANETOID_PARTS, "graph")}
    for path in files.values():
        if not path.exists():
            raise ValueError(f"{folder} lacks {path.name}")
    y, ally, ty = (_one_hot(files[name]) for name in ("y", "ally", "ty"))
    allx, tx = (_sparse(files[name], report) for name in ("allx", "tx"))
    test = _test_nodes(files["test.index"])
    _check_planetoid(
        folder, prefix, {"y": y, "ally": ally, "ty": ty, "allx": allx, "tx": tx}, test
    )
    nodes = int(
        max(test.max() + 1, len(ally) + len(ty))
    )  # CiteSeer: some test numbers name no row
    features = _zero_matrix(folder, (nodes, allx.shape[1]))
    one_hot = np.zeros((nodes, ally.shape[1]))
    features[: len(ally)], one_hot[: len(ally)] = allx, ally
    features[test], one_hot[test] = tx, ty
    if gap := nodes - len(ally) - len(test):
        report.add(
            "values",
            f"{pluralize(gap, 'node')} that no file describes: all features 0, no label",
        )
    source, destination = _neighbour_edges(files["graph"])
    labels = np.where(one_hot.any(1), one_hot.argmax(1), -1)
    valid = np.arange(len(y), min(len(y) + 500, len(ally)))
    split = {"train": np.arange(len(y)), "valid": valid, "test": np.sort(test)}
    report.add(
        "read",
        f"Planetoid's files {prefix}*: features {features.shape}, labels {one_hot.shape}",
    )
    report.add(
        "split",
        f"Planetoid's: the {len(y):,} nodes of {prefix}y, the next {len(valid):,}, those of test.index",
    )
    first_rows = ((f"{prefix}x", f"its rows are the first of {prefix}allx"),)
    report_unread(report, folder, list(files.values()), "not read", first_rows)
    title = f"own graph ({prefix.split('.')[1]}, Planetoid split)"
    return RawGraph(title, (source, destination), features, labels, split)


def _one_hot(path: Path) -> np.ndarray:
    """Return labels (rows, classes) of zeros with at most one 1 in every row."""
    with explain_read_errors(path):
        labels = to_array(load_inert(path.read_bytes()))
        is_one_hot = (
            labels.ndim == 2
            and np.isin(labels, (0, 1)).all()
            and (labels.sum(1) <= 1).all()
        )
        if not is_one_hot:
            raise ValueError(
                f"labels must be rows of zeros with a one at most, got shape {labels.shape}"
            )
    return labels


def _sparse(path: Path, report: DataReport) -> np.ndarray:
    with explain_read_errors(path):
        csr = to_csr_parts(load_inert(path.read_bytes()))
        names = ("indptr", "indices", "shape")
        return dense_matrix(
            path,
            names,
            csr.data,
            csr.indptr,
            csr.indices,
            np.array(csr.shape),
            report=report,
        )


def _test_nodes(path: Path) -> np.ndarray:
    with explain_read_errors(path):
        numbers = np.array(path.read_text(encoding="utf-8").split()).astype(np.int64)
    if len(numbers) == 0:
        raise ValueError(f"{path} names no node")
    if numbers.min() < 0:
        raise ValueError(f"{path.parent}: {path.name} names node {numbers.min()}")
    return numbers


def _check_planetoid(
    folder: Path, prefix: str, parts: dict[str, np.ndarray], test: np.ndarray
) -> None:
    """Check that Planetoid's files fit together: rows, columns and the nodes that are tested."""
    shapes = {name: part.shape for name, part in parts.items()}
    rows = {name: shape[0] for name, shape in shapes.items()}
    fits = (
        rows["allx"] == rows["ally"]
        and rows["tx"] == rows["ty"] == len(test)
        and rows["y"] <= rows["ally"]
    )
    fits = (
        fits
        and len({shapes[name][1] for name in ("y", "ally", "ty")}) == 1
        and shapes["allx"][1] == shapes["tx"][1]
    )
    if not fits or not np.array_equal(parts["y"], parts["ally"][: rows["y"]]):
        sizes = ", ".join(f"{prefix}{name} {shape}" for name, shape in shapes.items())
        raise ValueError(
            f"{folder}: the files do not fit together: {sizes}, {prefix}test.index ({len(test)},)"
        )
    if test.min() < rows["ally"]:
        raise ValueError(
            f"{folder}: {prefix}test.index names node {test.min()}, which is a row of {prefix}allx"
        )
    if test.max() >= 2 * (rows["ally"] + len(test)):
        raise ValueError(
            f"{folder}: {prefix}test.index names node {test.max()}, the files describe {rows['ally'] + len(test)} nodes"
        )


def _neighbour_edges(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the sources and destinations of the edges in a table of lists of neighbours."""
    with explain_read_errors(path):
        content = path.read_bytes()
        table = load_inert(content)
        if not isinstance(table, dict) or not all(
            isinstance(v, list) for v in table.values()
        ):
            raise ValueError("a table of lists of neighbours expected")
        if sum(map(len, table.values())) > len(content):
            raise ValueError("it names more neighbours than it has bytes")
        numbers = [*table, *(n for v in table.values() for n in v)]
        if other_types := {type(n).__name__ for n in numbers} - {"int"}:
            raise ValueError(f"nodes must be whole numbers, got {min(other_types)}")
        source = np.repeat(
            np.array([*table], dtype=np.int64), [len(v) for v in table.values()]
        )
        return source, np.array(numbers[len(table) :], dtype=np.int64)
