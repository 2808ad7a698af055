"""Graphs for node classification: OGB's, one over embedded digits, and the user's own (``data/cards/own-graphs.md``).

``load_graph`` loads and checks the data of a recipe. Every edge is taken in both directions, even if a file has one
direction alone, and counted once.

Shapes: N nodes, E edges, F features.
"""

import hashlib
import logging
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from scipy import sparse
from torch import Tensor

from cpt_core.graphs.graph import Graph
from cpt_lab.data.files import DataNotFoundError, own_path
from cpt_lab.data.graph_facts import (
    report_edges,
    report_features,
    report_labels,
    report_same_features,
    report_split,
)
from cpt_lab.data.graph_readers import (
    RawGraph,
    read_archive,
    read_digits,
    read_ogb,
    read_ogb_folder,
    read_planetoid,
)
from cpt_lab.data.loading import one_thread
from cpt_lab.data.random_streams import seeded_generator
from cpt_lab.data.report import DataReport, empty_report, pluralize
from cpt_lab.data.splits import SPLITS, as_int64_vector, class_count
from cpt_lab.experiments.graph import EXPERIMENT, GraphRecipe

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphData:
    """A graph with features, labels and a split.

    Attributes:
        title: name of the data in figures and rows.
        graph: edges in both directions, with self-loops if the recipe asks for them.
        features: (N, F) float32.
        labels: (N,) int64; -1 for nodes without a label.
        classes: number of classes.
        train: nodes to train on, (n,) int64.
        valid: nodes of the validation split, (n,) int64; may be empty.
        test: nodes to test on, (n,) int64.
        checksum: checksum of graph, features, labels and splits.
        ogb: name for OGB's ``Evaluator``, or None.
        report: what was read, left out and changed.
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
    report: DataReport = field(default_factory=empty_report)

    @property
    def test_labels(self) -> Tensor:
        """Labels of the test data."""
        return self.labels[self.test]


@one_thread()  # neighbours at equal distance, and the last bits of sums, depend on the number of threads
def load_graph(recipe: GraphRecipe) -> GraphData:
    """Load and check the graph of a recipe.

    Raises:
        DataNotFoundError: when the files are not there; nothing is downloaded.
        ValueError: when the files do not have the documented layout, or their contents do not fit together.
    """
    report = DataReport(recipe.dataset)
    raw = _read_raw(recipe, report)
    features, labels, classes = _check_graph(recipe.dataset, raw)
    report.add("read", pluralize(len(labels), "node"))
    report_features(report, raw.features, features.numpy())
    report_split(report, labels.numpy(), raw.split)
    report_labels(report, labels.numpy(), raw.split, classes)
    report_same_features(report, features.numpy(), raw.split)
    graph = to_bidirected(*raw.edges, len(labels), recipe.self_loops, report)
    raw.edges = (
        np.empty(0),
        np.empty(0),
    )  # free them: on a large graph they are gigabytes
    if recipe.standardize:
        mean, std = features.mean(0), features.std(0, correction=0)
        features = (features - mean).div_(
            torch.where(std > 0, std, torch.ones_like(std))
        )
        report.add(
            "changed",
            "every feature shifted and scaled to mean 0 and variance 1 over all nodes",
        )
    report.log_notices(log)
    digest = hashlib.sha256()
    for part in (
        graph.indptr,
        graph.indices,
        features,
        labels,
        *(raw.split[s] for s in SPLITS),
    ):
        digest.update(cast(Any, np.ascontiguousarray(part)))
    train, valid, test = (
        torch.from_numpy(raw.split[s].astype(np.int64)) for s in SPLITS
    )
    checksum = digest.hexdigest()[:16]
    return GraphData(
        raw.title,
        graph,
        features,
        labels,
        classes,
        train,
        valid,
        test,
        checksum,
        raw.ogb,
        report,
    )


# Files of OGB's layout that only graphs with several types of nodes or edges have.
HETEROGENEOUS_FILES = (
    "raw/triplet-type-list.csv.gz",
    "raw/nodetype-has-label.csv.gz",
    "raw/relations",
    "raw/num-node-dict.csv.gz",
)


def _read_raw(recipe: GraphRecipe, report: DataReport) -> RawGraph:
    dataset = recipe.dataset
    EXPERIMENT.check_dataset(dataset)
    if dataset == "digits-graph":
        return read_digits(report)
    if dataset in EXPERIMENT.named_datasets:
        return read_ogb(recipe, report)
    path = own_path(dataset)
    if path.suffix == ".npz":
        return read_archive(path, report)
    if (path / "raw" / "edge.csv.gz").exists():
        return read_ogb_folder(path, f"own graph ({path.name})", report)
    for folder in (path, path / "raw"):
        if graph_files := sorted(folder.glob("ind.*.graph")):
            if len(graph_files) > 1:
                names = ", ".join(file.name for file in graph_files)
                raise ValueError(
                    f"{folder} holds several graphs: {names}; give the files of each a folder of its own"
                )
            return read_planetoid(graph_files[0], report)
    if not path.exists():
        raise DataNotFoundError(f"there is no file or folder {path}")
    if typed := next(
        (name for name in HETEROGENEOUS_FILES if (path / name).exists()), None
    ):
        raise ValueError(
            f"{path} holds a graph of several types of nodes or edges ({typed}); only one type is read"
        )
    raise ValueError(
        f"{path} holds no graph: neither raw/edge.csv.gz (OGB's layout) nor ind.*.graph (Planetoid)"
    )


def to_bidirected(
    source: np.ndarray,
    destination: np.ndarray,
    nodes: int,
    self_loops: bool,
    report: DataReport | None = None,
) -> Graph:
    """Return the graph with every edge in both directions, each once, and without self-loops of the input.

    Args:
        source: (E,) source nodes, checked.
        destination: (E,) destination nodes.
        nodes: number of nodes.
        self_loops: add an edge from every node to itself.
        report: gets facts about edges that were dropped, merged and added.
    """
    is_edge = source != destination
    ends = destination[is_edge], source[is_edge]
    edge_values = np.ones(len(ends[0]), bool)
    directed = sparse.coo_matrix((edge_values, ends), shape=(nodes, nodes)).tocsr()
    bidirected = directed + directed.T
    if report is not None:
        report_edges(
            report,
            source,
            destination,
            num_without_loops=len(ends[0]),
            num_different=directed.nnz,
            num_bidirected=bidirected.nnz,
        )
        num_isolated = int((np.diff(bidirected.indptr) == 0).sum())
        if num_isolated:
            report.add("read", f"{pluralize(num_isolated, 'node')} without an edge")
    if self_loops:
        if report is not None:
            report.add("changed", "a self-loop added to every node")
        bidirected = bidirected + sparse.identity(nodes, bool, "csr")
    return Graph(
        torch.from_numpy(bidirected.indptr), torch.from_numpy(bidirected.indices)
    )


def _check_graph(name: str, raw: RawGraph) -> tuple[Tensor, Tensor, int]:
    """Check that arrays fit together; return features, labels and the number of classes."""
    labels = as_int64_vector(f"{name}: labels", raw.labels)
    features = _check_features(name, raw.features, len(labels))
    if labels.min() < -1:
        raise ValueError(
            f"{name}: labels must be 0, 1, ... or -1 for none, got {labels.min()}"
        )
    if raw.classes and labels.max() >= raw.classes:
        raise ValueError(
            f"{name}: labels must be below {raw.classes}, got {labels.max()}"
        )
    for ends in raw.edges:
        if ends.dtype.kind not in "iu" or len(ends) != len(raw.edges[0]):
            raise ValueError(
                f"{name}: every edge needs two whole numbers, got {ends.dtype} {ends.shape}"
            )
        _check_nodes(f"{name}: edges", ends, len(labels))
    _check_split(name, raw, labels)

    known_labels = labels[
        labels >= 0
    ]  # including labels of nodes that are only tested on
    classes = raw.classes or class_count(f"{name}: nodes", known_labels)
    class_count(f"{name}: nodes to train on", labels[raw.split["train"]])
    return torch.from_numpy(features), torch.from_numpy(labels), classes


def _check_features(name: str, features: np.ndarray, nodes: int) -> np.ndarray:
    """Return features as float32; ValueError for another shape or type, and for values that are not finite."""
    if nodes == 0 or features.ndim != 2 or len(features) != nodes:
        raise ValueError(
            f"{name}: {nodes} labels need features of shape ({nodes}, F), got {features.shape}"
        )
    if features.dtype.kind not in "iufb":
        raise ValueError(f"{name}: features must be real numbers, got {features.dtype}")
    with np.errstate(over="ignore"):  # values that overflow float32 are refused below
        features = np.require(features, dtype=np.float32, requirements=["C", "W"])
    is_finite = np.isfinite(features)
    if not is_finite.all():
        first, count = int(np.argmin(is_finite.all(1))), int((~is_finite).sum())
        raise ValueError(
            f"{name}: {count} features are NaN or infinite, the first in node {first} (as float32)"
        )
    return features


def _check_split(name: str, raw: RawGraph, labels: np.ndarray) -> None:
    """Check that every split names different labelled nodes, and that training and test split are not empty."""
    split_of_node = np.full(len(labels), "", dtype=object)
    for part in SPLITS:
        index = as_int64_vector(f"{name}: the {part} split", raw.split[part])
        raw.split[part] = index
        _check_nodes(f"{name}: the {part} split", index, len(labels))
        if len(np.unique(index)) != len(index):
            raise ValueError(f"{name}: the {part} split names a node more than once")
        is_used = split_of_node[index] != ""
        if is_used.any():
            node = int(index[is_used][0])
            raise ValueError(
                f"{name}: node {node} is in the splits {split_of_node[node]} and {part}"
            )
        is_unlabelled = labels[index] < 0
        if is_unlabelled.any():
            raise ValueError(
                f"{name}: node {int(index[is_unlabelled][0])} of the {part} split has no label"
            )
        split_of_node[index] = part
    if not len(raw.split["train"]) or not len(raw.split["test"]):
        raise ValueError(
            f"{name}: the train and the test split need at least one node with a label each"
        )


def _check_nodes(where: str, numbers: np.ndarray, nodes: int) -> None:
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= nodes):
        bad = numbers.min() if numbers.min() < 0 else numbers.max()
        raise ValueError(f"{where} must name nodes 0..{nodes - 1}, got {bad}")


def random_graph(recipe: GraphRecipe) -> GraphData:
    """Return a random graph in the shapes of a data set, to measure times and count operations without the data.

    The user's own graph is loaded instead.
    """
    if recipe.dataset not in EXPERIMENT.named_datasets:
        return load_graph(recipe)
    sizes = EXPERIMENT.named_datasets[recipe.dataset].sizes
    nodes, edges, features, classes = (
        sizes[name] for name in ("nodes", "edges", "features", "classes")
    )
    random = seeded_generator(0)
    # squaring makes some nodes popular, as in real graphs
    source, destination = (
        (torch.rand(2, edges, generator=random, dtype=torch.float64) ** 2 * nodes)
        .long()
        .numpy()
    )
    graph = to_bidirected(source, destination, nodes, recipe.self_loops)
    order = torch.randperm(nodes, generator=random)
    x = torch.randn(nodes, features, generator=random)
    labels = torch.randint(0, classes, (nodes,), generator=random)
    train, valid, test = order[: nodes // 2], order[:0], order[-max(1, nodes // 10) :]
    return GraphData(
        f"a random graph for {recipe.dataset}",
        graph,
        x,
        labels,
        classes,
        train,
        valid,
        test,
        "",
    )
