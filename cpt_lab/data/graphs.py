"""Graphs for node classification: OGB's, an embedded one over digits, and your own (``data/cards/own-graphs.md``).

Every edge is taken in both directions, whatever a file says, and counted once.

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
    """A graph with features, labels and a split."""

    title: str  # what the numbers are measured on, as figures must call it
    graph: (
        Graph  # the edges, in both directions, and self-loops if the recipe wants them
    )
    features: Tensor  # (N, F) float32
    labels: Tensor  # (N,) int64; -1 where a node has none
    classes: int
    # train, valid, test: (n,) int64, numbers of the nodes; ``valid`` may be empty
    train: Tensor
    valid: Tensor
    test: Tensor
    checksum: str  # of all of this
    ogb: str | None = None  # name for OGB's ``Evaluator``, or None
    report: DataReport = field(
        default_factory=empty_report
    )  # what was read, left out and changed

    @property
    def test_labels(self) -> Tensor:
        """The labels of the test data."""
        return self.labels[self.test]


@one_thread()  # neighbours at equal distance, and the last bits of sums, depend on the number of threads
def load_graph(recipe: GraphRecipe) -> GraphData:
    """Load and check the data of a recipe.

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


# what graphs of several types have, in OGB's layout
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
    if dataset in EXPERIMENT.named:
        return read_ogb(recipe, report)
    path = own_path(dataset)
    if path.suffix == ".npz":
        return read_archive(path, report)
    if (path / "raw" / "edge.csv.gz").exists():
        return read_ogb_folder(path, f"own graph ({path.name})", report)
    for folder in (path, path / "raw"):
        if found := sorted(folder.glob("ind.*.graph")):
            if len(found) > 1:
                names = ", ".join(file.name for file in found)
                raise ValueError(
                    f"{folder} holds several graphs: {names}; give the files of each a folder of its own"
                )
            return read_planetoid(found[0], report)
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
    """Return the graph with every edge in both directions, each once; self-loops of the input are dropped.

    Args:
        source: (E,) numbers of N nodes, checked; ``destination`` the other ends.
        destination: see ``source``.
        nodes: N.
        self_loops: add an edge from every node to itself.
        report: gets what was dropped, merged and added.
    """
    apart = source != destination
    ends = destination[apart], source[apart]
    directed = sparse.coo_matrix(
        (np.ones(len(ends[0]), bool), ends), shape=(nodes, nodes)
    ).tocsr()
    both = directed + directed.T
    if report is not None:
        counts = {"apart": len(ends[0]), "merged": directed.nnz, "both": both.nnz}
        report_edges(report, source, destination, **counts)
        if alone := int((np.diff(both.indptr) == 0).sum()):
            report.add("read", f"{pluralize(alone, 'node')} without an edge")
    if self_loops and report is not None:
        report.add("changed", "a self-loop added to every node")
    if self_loops:
        both = both + sparse.identity(nodes, bool, "csr")
    return Graph(torch.from_numpy(both.indptr), torch.from_numpy(both.indices))


def _check_graph(name: str, raw: RawGraph) -> tuple[Tensor, Tensor, int]:
    """Check that arrays fit together; return features, labels and the number of classes."""
    labels = as_int64_vector(f"{name}: labels", raw.labels)
    nodes = len(labels)
    if nodes == 0 or raw.features.ndim != 2 or len(raw.features) != nodes:
        raise ValueError(
            f"{name}: {nodes} labels need features of shape ({nodes}, F), got {raw.features.shape}"
        )
    if raw.features.dtype.kind not in "iufb":
        raise ValueError(
            f"{name}: features must be real numbers, got {raw.features.dtype}"
        )
    with np.errstate(over="ignore"):  # what is infinite as float32 is found below
        features = np.require(raw.features, dtype=np.float32, requirements=["C", "W"])
    if not (finite := np.isfinite(features)).all():
        first, count = int(np.argmin(finite.all(1))), int((~finite).sum())
        raise ValueError(
            f"{name}: {count} features are NaN or infinite, the first in node {first} (as float32)"
        )
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
        _check_nodes(f"{name}: edges", ends, nodes)
    used = np.full(nodes, "", dtype=object)
    for part in SPLITS:
        raw.split[part] = np.asarray(raw.split[part]).reshape(-1)
        index = as_int64_vector(f"{name}: the {part} split", raw.split[part])
        _check_nodes(f"{name}: the {part} split", index, nodes)
        if len(np.unique(index)) != len(index):
            raise ValueError(f"{name}: the {part} split names a node more than once")
        if (taken := used[index] != "").any():
            node = int(index[taken][0])
            raise ValueError(
                f"{name}: node {node} is in the splits {used[node]} and {part}"
            )
        if (labels[index] < 0).any():
            raise ValueError(
                f"{name}: node {int(index[labels[index] < 0][0])} of the {part} split has no label"
            )
        used[index] = part
    if not len(raw.split["train"]) or not len(raw.split["test"]):
        raise ValueError(
            f"{name}: the train and the test split need at least one node with a label each"
        )
    known = labels[labels >= 0]  # also those of nodes that are tested alone
    classes = raw.classes or class_count(f"{name}: nodes", known)
    class_count(f"{name}: nodes to train on", labels[raw.split["train"]])
    return torch.from_numpy(features), torch.from_numpy(labels), classes


def _check_nodes(what: str, numbers: np.ndarray, nodes: int) -> None:
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= nodes):
        bad = numbers.min() if numbers.min() < 0 else numbers.max()
        raise ValueError(f"{what} must name nodes 0..{nodes - 1}, got {bad}")


def random_graph(recipe: GraphRecipe) -> GraphData:
    """Return a random graph in the shapes of a data set, to measure times and count operations without the data.

    A graph of one's own is loaded instead.
    """
    if recipe.dataset not in EXPERIMENT.named:
        return load_graph(recipe)
    sizes = EXPERIMENT.named[recipe.dataset].sizes
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
