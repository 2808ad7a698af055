"""Graph readers: every documented layout, and the errors for invalid content."""

import io
import pickle
import shutil
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch
from dataset_layouts import archive, graph_arrays, ogb_folder, planetoid, table, write
from helpers import run_command

from cpt_lab import data
from cpt_lab.data import graph_readers
from cpt_lab.data.files import DataNotFoundError
from cpt_lab.data.graphs import load_graph, random_graph, to_bidirected
from cpt_lab.experiments.registry import recipe

NODES = 60


def own(dataset, **changes):
    return replace(recipe("smoke", str(dataset), "gcn", task="graph"), **changes)


def refused(asked, message, error=ValueError):
    with pytest.raises(error, match=message):
        load_graph(asked)


def arrays():
    return graph_arrays(NODES)


def write_npz(folder, **changes):
    content = {k: v for k, v in {**arrays(), **changes}.items() if v is not None}
    return write(folder, {"g.npz": archive(**content)}) / "g.npz"


@pytest.mark.parametrize("self_loops", [False, True])
def test_bidirected_matches_dense_matrix(self_loops):
    source, destination = (
        np.random.default_rng(0).integers(0, 50, (2, 400)).astype(np.uint64)
    )  # of any kind
    dense = np.zeros((60, 60), dtype=bool)  # ten nodes have no edge
    dense[source, destination] = dense[destination, source] = True
    np.fill_diagonal(dense, self_loops)
    graph = to_bidirected(source, destination, 60, self_loops)
    assert graph.indptr.tolist() == [0, *dense.sum(1).cumsum()]
    assert graph.indices.tolist() == np.nonzero(dense)[1].tolist()
    assert graph.indices.dtype == torch.int32


# --- layouts --------------------------------------------------------------------------------------


def test_graph_reader_loads_npz_archive(tmp_path):
    a = arrays()
    found = load_graph(own(write_npz(tmp_path), self_loops=True, standardize=False))
    assert found.title == "own graph (g)"
    assert torch.equal(found.features, torch.from_numpy(a["features"]))
    assert torch.equal(found.labels, torch.from_numpy(a["labels"]))
    assert [len(found.train), len(found.valid), len(found.test), found.classes] == [
        30,
        10,
        20,
        3,
    ]
    assert found.graph.in_degrees.min() >= 1
    standardized = load_graph(own(tmp_path / "g.npz", standardize=True)).features
    torch.testing.assert_close(standardized.mean(0), torch.zeros(4), atol=1e-6, rtol=0)
    torch.testing.assert_close(standardized.std(0, correction=0), torch.ones(4))


def test_graph_reader_accepts_sparse_features(tmp_path):
    """Accept sparse features and alternative names of arrays."""
    a = arrays()
    sparse = scipy.sparse.csr_matrix((a["features"] > 0).astype(np.float32))
    csr = {
        "feat_indptr": sparse.indptr,
        "feat_indices": sparse.indices,
        "feat_shape": np.array(sparse.shape),
    }
    path = write_npz(
        tmp_path, features=None, labels=None, node_labels=a["labels"], **csr
    )
    found = load_graph(own(path, standardize=False))
    assert torch.equal(found.features, torch.from_numpy(sparse.toarray()))
    assert torch.equal(found.labels, torch.from_numpy(a["labels"]))
    path = write_npz(
        tmp_path,
        features=None,
        labels=None,
        node_labels=a["labels"],
        feat_data=3 * sparse.data,
        **csr,
    )
    assert torch.equal(
        load_graph(own(path, standardize=False)).features, 3 * found.features
    )


def test_graph_reader_draws_missing_split(tmp_path):
    a = arrays()
    a["labels"][7] = -1
    given = {
        "features": None,
        "labels": None,
        **dict.fromkeys(("train_idx", "valid_idx", "test_idx")),
    }
    path = write_npz(tmp_path, **given, x=a["features"], y=a["labels"])
    data = load_graph(own(path))
    assert data.title == "own graph (g), nodes drawn 6 : 2 : 2"
    assert [len(part) for part in (data.train, data.valid, data.test)] == [35, 12, 12]
    assert sorted(
        [*data.train.tolist(), *data.valid.tolist(), *data.test.tolist()]
    ) == [*range(7), *range(8, NODES)]
    write_npz(tmp_path, valid_idx=None, test_idx=None)
    refused(
        own(path),
        "g.npz: has nodes for train; it needs train, valid, test, or none of them",
    )


def test_graph_reader_loads_planetoid(tmp_path):
    found = load_graph(
        own(write(tmp_path / "p", planetoid()), standardize=False, self_loops=False)
    )
    assert torch.equal(
        found.features, torch.arange(30.0).view(10, 3)
    )  # test rows are back in their order
    assert found.labels.tolist() == [i % 3 for i in range(10)]
    assert found.test.tolist() == [7, 8, 9]
    assert found.graph.in_degrees.tolist() == [2] * 10


def test_graph_reader_loads_embedded_digits():
    found = load_graph(recipe("smoke", "digits-graph"))
    assert torch.bincount(found.labels[found.train]).tolist() == [5] * 10
    assert (len(found.labels), found.title[:47]) == (
        1797,
        "scikit-learn digits, 8-nearest-neighbour graph,",
    )


def test_random_graph_has_dataset_shapes():
    found = random_graph(recipe("paper", "ogbn-arxiv"))
    assert found.features.shape == (169_343, 128)
    assert "random" in found.title


# --- OGB itself -----------------------------------------------------------------------------------


@pytest.fixture
def arxiv(data_folder, monkeypatch):
    """Write a small data set in the layout of ogbn-arxiv, and adapt the official counts."""
    monkeypatch.setitem(
        graph_readers.OFFICIAL_COUNTS, "ogbn-arxiv", (NODES, 150, 4, 40)
    )
    return write(data_folder / "ogbn_arxiv", ogb_folder(arrays()))


class Bomb:
    """Object whose unpickling creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_graph_reader_loads_ogb_folder(arxiv, tmp_path):
    """Load the raw files, and execute no pickle of the processed ones."""
    for name in (
        "data_processed",
        "dgl_data_processed",
        "geometric_data_processed.pt",
    ):  # what OGB would load
        (arxiv / "processed").mkdir(exist_ok=True)
        torch.save(Bomb(tmp_path / "executed"), arxiv / "processed" / name)
    found = load_graph(recipe("paper", "ogbn-arxiv"))
    assert not (tmp_path / "executed").exists()
    assert (found.title, found.classes, found.ogb) == ("OGBN-Arxiv", 40, "ogbn-arxiv")
    a = arrays()
    assert torch.equal(found.labels, torch.from_numpy(a["labels"]))
    assert [part.tolist() for part in (found.train, found.valid, found.test)] == [
        a[f"{part}_idx"].tolist() for part in ("train", "valid", "test")
    ]
    expected = to_bidirected(*a["edge_index"], NODES, self_loops=True)
    assert torch.equal(found.graph.indices, expected.indices)
    as_archive = load_graph(own(write_npz(tmp_path), standardize=True)).features
    torch.testing.assert_close(
        found.features, as_archive, atol=1e-5, rtol=0
    )  # which is written with six digits
    own_graph = load_graph(own(arxiv, self_loops=True))
    assert (own_graph.title, own_graph.checksum) == (
        "own graph (ogbn_arxiv)",
        found.checksum,
    )


def test_graph_reader_rejects_unofficial_ogb(arxiv, monkeypatch):
    asked = recipe("paper", "ogbn-arxiv")
    write(arxiv, {"raw/node-label.csv.gz": table(np.full(NODES, 40))})
    refused(asked, "labels must be below 40, got 40")
    monkeypatch.setitem(
        graph_readers.OFFICIAL_COUNTS, "ogbn-arxiv", (NODES, 151, 4, 40)
    )
    refused(
        asked, r"is not the official ogbn-arxiv: .* \[60, 150, 4\], not \[60, 151, 4\]"
    )


@pytest.mark.slow
def test_ogb_evaluator_is_silent_and_offline():
    code = (
        "import socket, builtins\n"
        "def refuse(*a, **k): raise AssertionError('network or input')\n"
        "socket.socket.connect = refuse; builtins.input = refuse\n"
        "from cpt_lab.data.graph_readers import ogb_evaluator\n"
        "ogb_evaluator('ogbn-arxiv')\n"
        "import sys; assert sys.modules['outdated'] is None  # what would ask for newer versions"
    )
    assert (
        run_command(sys.executable, "-W", "error::UserWarning:cpt_core", "-c", code)
        == ""
    )


def test_ogb_evaluator_matches_accuracy():
    rng = np.random.default_rng(0)
    labels, predicted = rng.integers(0, 4, (2, 100))
    found = graph_readers.ogb_evaluator("ogbn-arxiv").eval(
        {"y_true": labels[:, None], "y_pred": predicted[:, None]}
    )
    assert found["acc"] == pytest.approx((labels == predicted).mean())


def zipped(folder, **more):
    """Return the archive of OGB's server: the folder under a different name."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as z:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            z.write(path, Path("arxiv", path.relative_to(folder)))
        for name, text in more.items():
            z.writestr(name, text)
    return packed.getvalue()


def test_ogb_download_uses_https_and_safe_paths(arxiv, tmp_path, monkeypatch):
    """Download over HTTPS, extract no path outside the folder, and reject a changed archive."""
    served = {
        "": zipped(
            arxiv,
            **{"arxiv/processed/x.csv.gz": "x", "arxiv/raw/../../../out.csv.gz": "x"},
        )
    }
    asked = []
    monkeypatch.setattr(
        torch.hub,
        "download_url_to_file",
        lambda url, to: (asked.append(url), Path(to).write_bytes(served[""])),
    )
    before = load_graph(recipe("paper", "ogbn-arxiv")).checksum
    shutil.rmtree(arxiv)
    assert data.download("ogbn-arxiv") == arxiv
    assert asked == ["https://snap.stanford.edu/ogb/data/nodeproppred/arxiv.zip"]
    assert load_graph(recipe("paper", "ogbn-arxiv")).checksum == before
    assert not (arxiv / "processed").exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "ogbn_arxiv",
        "ogbn_arxiv.sha256",
    ]
    data.download("ogbn-arxiv")  # the same archive again
    served[""] = zipped(arxiv)  # another one
    with pytest.raises(
        ValueError, match=r"not that of the first download, in .*ogbn_arxiv\.sha256"
    ):
        data.download("ogbn-arxiv")
    (tmp_path / "ogbn_arxiv.sha256").unlink()
    served[""] = served[""][:-40]
    with pytest.raises(
        ValueError, match=r"archive\.zip cannot be read: File is not a zip file"
    ):
        data.download("ogbn-arxiv")
    assert load_graph(recipe("paper", "ogbn-arxiv")).checksum == before


# --- bad content ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["edge_index", "edges"])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_graph_reader_accepts_edge_layouts(name, count, tmp_path):
    pairs = np.stack([np.arange(count), np.arange(count) + 5], axis=1)
    expected = to_bidirected(
        *pairs.T, NODES, recipe("smoke", "digits-graph").self_loops
    )
    for edges in (pairs, pairs.T):
        graph = load_graph(
            own(write_npz(tmp_path, **{"edge_index": None, name: edges}))
        ).graph
        assert torch.equal(graph.indptr, expected.indptr)
        assert torch.equal(graph.indices, expected.indices)


def changed(name, index, value):
    array = arrays()[name].copy()
    array[index] = value
    return {name: array}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            changed("features", (3, 1), np.nan),
            "1 features are NaN or infinite, the first in node 3",
        ),
        (
            {"features": np.zeros((NODES - 1, 4))},
            r"60 labels need features of shape \(60, F\), got \(59, 4\)",
        ),
        (changed("labels", 2, -7), "labels must be 0, 1, ... or -1 for none, got -7"),
        (
            {"labels": np.linspace(0, 1, NODES)},
            r"labels must be whole numbers, number 1 is 0\.0169",
        ),
        (
            changed("edge_index", (0, 0), NODES),
            r"edges must name nodes 0\.\.59, got 60",
        ),
        (changed("edge_index", (1, 9), -2), r"edges must name nodes 0\.\.59, got -2"),
        (
            {"edge_index": np.zeros((3, 5), dtype=int)},
            r"\(2, E\) or \(E, 2\), got int64 \(3, 5\)",
        ),
        (
            {"edge_index": np.zeros((2, 5))},
            r"whole numbers \(2, E\) or \(E, 2\), got float64",
        ),
        (
            changed("train_idx", 0, 99),
            r"the train split must name nodes 0\.\.59, got 99",
        ),
        (
            {"train_idx": np.array([1, 1, 2])},
            "the train split names a node more than once",
        ),
        (
            {"test_idx": arrays()["train_idx"][:3]},
            r"node \d+ is in the splits train and test",
        ),
        (
            {"train_idx": np.empty(0, int)},
            "the train and the test split need at least one node with a label each",
        ),
        (
            {"train_idx": np.array([0.5])},
            "the train split must be whole numbers, number 0 is 0.5",
        ),
        (
            changed("labels", int(arrays()["test_idx"][0]), -1),
            r"node \d+ of the test split has no label",
        ),
        (
            changed("labels", 2, 10**6),
            "nodes: label 1000000 of 60; classes must be numbered 0, 1, 2",
        ),
        (
            {"labels": np.full(NODES, 3)},
            "all 60 labels are 3; there is nothing to learn from one class",
        ),
        (
            {"labels": np.isin(np.arange(NODES), arrays()["train_idx"]) * 1},
            "nodes to train on: all 30 labels are 1",
        ),
        (
            {"labels": None},
            "g.npz: needs one of labels, node_labels, y; it has edge_index, features, train_idx",
        ),
    ],
)
def test_graph_reader_rejects_invalid_arrays(tmp_path, changes, message):
    refused(own(write_npz(tmp_path, **changes)), message)


def test_graph_reader_accepts_integers_and_missing_labels(tmp_path):
    labels, outside = arrays()["labels"].astype(float), arrays()["valid_idx"]
    labels[outside] = np.nan
    features = np.arange(NODES * 2).reshape(NODES, 2)
    path = write_npz(
        tmp_path, features=features, labels=labels, valid_idx=np.empty(0, int)
    )
    found = load_graph(own(path, standardize=False))
    assert found.features.dtype == torch.float32
    assert found.labels[outside].eq(-1).all()
    assert len(found.valid) == 0


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("raw/node-label.csv.gz", None, "lacks raw/node-label.csv.gz"),
        ("split/time/test.csv.gz", None, "lacks split/time/test.csv.gz"),
        ("split/other/test.csv.gz", b"", r"exactly one folder in split/, it has 2"),
        (
            "raw/num-edge-list.csv.gz",
            table([999]),
            r"announces \[999\] edges, edge\.csv\.gz has 150",
        ),
        (
            "split/time/test.csv.gz",
            table([NODES]),
            r"the test split must name nodes 0\.\.59, got 60",
        ),
    ],
)
def test_graph_reader_rejects_invalid_ogb_folders(tmp_path, file, content, message):
    files = {**ogb_folder(arrays()), file: content}
    write(
        tmp_path / "mine",
        {name: held for name, held in files.items() if held is not None},
    )
    refused(own(tmp_path / "mine"), message)


def test_graph_reader_rejects_missing_files(tmp_path):
    for dataset, message in (
        (tmp_path / "no.npz", "no file"),
        (tmp_path / "no" / "folder", "no file or folder"),
    ):
        refused(own(dataset), message, DataNotFoundError)
    refused(own(tmp_path), "holds no graph")
    refused(own(write(tmp_path, {"ind.x.graph": b""})), r"lacks ind\.x\.y")


# --- Planetoid's pickles --------------------------------------------------------------------------


def reached(name, value):
    """Return Planetoid files with one replaced; a callable ``value`` receives its content."""
    files = planetoid()
    key = f"ind.tiny.{name}"
    if callable(value):
        value = value(pickle.loads(files[key], encoding="latin1"))
    return {**files, key: value if isinstance(value, bytes) else pickle.dumps(value, 2)}


def damaged_matrix(part, place, value):
    def damage(matrix):
        array = getattr(matrix, part).copy()
        array[place] = value
        setattr(matrix, part, array)
        return matrix

    return damage


def replaced(part, value):
    def replace_part(matrix):
        matrix.__dict__[part] = value
        return matrix

    return replace_part


DO_NOT_FIT = r"ind\.tiny\.allx: indptr and indices do not fit shape"
WRONG_PICKLES = {
    "index far right": (
        "allx",
        damaged_matrix("indices", 0, 2_000_000_000),
        DO_NOT_FIT,
    ),
    "index before the array": (
        "allx",
        damaged_matrix("indices", 3, -2_000_000),
        DO_NOT_FIT,
    ),
    "index of a row behind": ("allx", damaged_matrix("indices", 0, 4), DO_NOT_FIT),
    "row end too large": (
        "allx",
        damaged_matrix("indptr", -1, 2_000_000_000),
        DO_NOT_FIT,
    ),
    "row ends that fall": ("allx", damaged_matrix("indptr", 2, 9), DO_NOT_FIT),
    "rows that begin late": ("allx", damaged_matrix("indptr", 0, 1), DO_NOT_FIT),
    "fewer rows than shape": ("allx", replaced("_shape", (8, 3)), DO_NOT_FIT),
    "columns by the milliard": (
        "allx",
        replaced("_shape", (7, 1 << 40)),
        r"shape \(7, 1099511627776\) would take",
    ),
    "a shape of floats": (
        "allx",
        replaced("_shape", (7.0, 3)),
        "a shape that is no table",
    ),
    "a shape below zero": (
        "allx",
        replaced("_shape", (-7, 3)),
        "a shape that is no table",
    ),
    "indices of objects": (
        "allx",
        replaced("indices", np.array([0, "x"], dtype=object)),
        "holds no numbers, but 'O8'",
    ),
    "indices of fractions": (
        "allx",
        replaced("indices", np.full(20, 0.5)),
        "indices must be whole numbers",
    ),
    "indices in a list": (
        "allx",
        replaced("indices", [0] * 20),
        "an array expected, got list",
    ),
    "values of another number": ("allx", replaced("data", np.ones(3)), DO_NOT_FIT),
    "an array for a matrix": (
        "allx",
        np.ones((7, 3)),
        r"ind\.tiny\.allx cannot be read: a sparse matrix expected",
    ),
    "a matrix for labels": (
        "ally",
        scipy.sparse.csr_matrix(np.eye(7, 3)),
        "an array expected, got csr",
    ),
    "several labels": (
        "ally",
        np.ones((7, 3), int),
        "rows of zeros with a one at most",
    ),
    "labels as numbers": (
        "y",
        np.arange(4),
        r"ind\.tiny\.y cannot be read: labels must be rows",
    ),
    "labels of other nodes": (
        "y",
        np.eye(3, dtype=int)[[2, 2, 2, 2]],
        "the files do not fit together",
    ),
    "fewer rows of labels": (
        "ally",
        np.eye(7, 3, dtype=int)[:6],
        "the files do not fit together",
    ),
    "test rows that lack": (
        "ty",
        np.eye(3, dtype=int)[:2],
        "the files do not fit together",
    ),
    "neighbours in text": (
        "graph",
        {0: "12"},
        "a table of lists of neighbours expected",
    ),
    "neighbours named in text": (
        "graph",
        {0: ["1"]},
        "nodes must be whole numbers, got str",
    ),
    "nodes named in text": (
        "graph",
        {"0": [1]},
        "nodes must be whole numbers, got str",
    ),
    "a neighbour of zero length": (
        "graph",
        {0: [""]},
        "nodes must be whole numbers, got str",
    ),
    "fractions of nodes": (
        "graph",
        {0: [0.0]},
        "nodes must be whole numbers, got float",
    ),
    "neighbours beyond int64": (
        "graph",
        {0: [1 << 70]},
        "ind.tiny.graph cannot be read: OverflowError",
    ),
    "neighbours that are none": ("graph", {0: [10]}, r"must name nodes 0\.\.9, got 10"),
    "neighbours below zero": ("graph", {0: [-1]}, r"must name nodes 0\.\.9, got -1"),
    "a list many times": (
        "graph",
        dict.fromkeys(range(10), [1] * 2_000),
        "more neighbours than it has bytes",
    ),
    "no table": ("graph", [[1]], "a table of lists of neighbours expected"),
    "tested in training": (
        "test.index",
        b"0 8 9",
        "names node 0, which is a row of ind.tiny.allx",
    ),
    "tested far away": (
        "test.index",
        b"7 8 1000000000000",
        "names node 1000000000000, the files describe 10 nodes",
    ),
    "words for tests": (
        "test.index",
        b"7 8 nine",
        "test.index cannot be read: invalid literal",
    ),
    "no tests": ("test.index", b" \n", "test.index names no node"),
}


@pytest.mark.parametrize("case", WRONG_PICKLES)
def test_graph_reader_rejects_invalid_planetoid_files(case, tmp_path):
    name, value, message = WRONG_PICKLES[case]
    refused(own(write(tmp_path / "p", reached(name, value))), message)


def test_graph_reader_reports_undescribed_planetoid_nodes(tmp_path):
    """Report nodes that no file describes, as CiteSeer's test.index leaves out numbers."""
    folder = write(tmp_path / "p", {**planetoid(), "ind.tiny.test.index": b"8\n7\n11"})
    found = load_graph(own(folder, standardize=False))
    assert (len(found.labels), found.test.tolist()) == (12, [7, 8, 11])
    assert found.labels[[9, 10]].tolist() == [-1, -1]
    assert found.features[[9, 10]].eq(0).all()
    assert "2 nodes that no file describes: all features 0, no label" in str(
        found.report
    )


def test_graph_reader_rejects_several_planetoid_graphs(tmp_path):
    files = planetoid()
    both = {
        **files,
        **{name.replace("tiny", "other"): content for name, content in files.items()},
    }
    refused(
        own(write(tmp_path / "p", both)),
        r"several graphs: ind\.other\.graph, ind\.tiny\.graph; give the files of",
    )


# --- facts of the report ----------------------------------------------------------------------------


def told(path, **changes):
    """Load a graph, and return the facts by topic and the data."""
    data = load_graph(
        own(path, **{"standardize": False, "self_loops": False, **changes})
    )
    return "\n".join(f"{topic}: {text}" for topic, text in data.report.facts), data


def with_labels(values):
    """Return labels with some training labels replaced by ``values``."""
    labels = arrays()["labels"].copy()
    labels[arrays()["train_idx"][: len(values)]] = values
    return {"labels": labels}


def with_features(change):
    return {"features": change(arrays()["features"].copy())}


def same_as_training(features):
    features[arrays()["test_idx"][:3]] = features[arrays()["train_idx"][0]]
    return features


def in_part(features):
    features[:, 1], features[:, 2] = 0, 5
    return features


def tenth_of(mask):
    return np.stack([np.roll(mask, shift) for shift in range(10)])


def with_masks(form):
    masks = {
        part: np.isin(np.arange(NODES), arrays()[f"{part}_idx"])
        for part in ("train", "valid", "test")
    }
    names = {"train": "train_masks", "valid": "val_masks", "test": "test_masks"}
    return {
        **{f"{part}_idx": None for part in masks},
        **{names[part]: form(mask) for part, mask in masks.items()},
    }


LOOPS = np.array([[0, 3, 9, 9, 7], [1, 3, 9, 9, 7]])
ONE_WAY = np.array([np.arange(30), np.arange(30, 60)])
FACTS = {  # arrays, what the recipe changes, facts
    "edge weights": (
        {"edge_weight": np.ones(150)},
        {},
        ["the array edge_weight (150,) float64: edges have no we"],
    ),
    "edge features": (
        {"edge_attr": np.ones((150, 2))},
        {},
        ["the array edge_attr (150, 2) float64: edges have no f"],
    ),
    "edge types": (
        {"edge_type": np.ones(150, int)},
        {},
        ["array edge_type (150,) int64: edges are of one type here"],
    ),
    "node types": (
        {"node_type": np.ones(60, int)},
        {},
        ["the array node_type (60,) int64: nodes are of one type"],
    ),
    "more edges": (
        {"edge_index_b": np.ones((2, 3), int)},
        {},
        ["edge_index_b (2, 3) int64: one array of edges"],
    ),
    "positions": (
        {"pos": np.ones((60, 2))},
        {},
        ["the array pos (60, 2) float64: positions are no features"],
    ),
    "unknown arrays": (
        {"zeta": np.ones(3), "eta": np.ones(2)},
        {},
        ["array zeta (3,)", "array eta (2,) float64: not"],
    ),
    "features twice": (
        {"x": np.ones((60, 2))},
        {},
        ["the array x (60, 2) float64: features is read in its"],
    ),
    "masks besides": (
        {"train_mask": np.ones(60, bool)},
        {},
        ["the array train_mask (60,) bool: train_idx is read"],
    ),
    "self-loops": (
        {"edge_index": LOOPS},
        {},
        ["changed: 4 self-loops of the file dropped"],
    ),
    "edges twice": (
        {"edge_index": np.array([[0, 0, 1, 0], [1, 1, 0, 2]])},
        {},
        ["changed: 1 edge given more than"],
    ),
    "one way": (
        {"edge_index": np.array([[0, 1, 0], [1, 0, 2]])},
        {},
        ["changed: 1 of 3 edges taken in the other"],
    ),
    "bipartite": (
        {"edge_index": ONE_WAY},
        {},
        ["changed: every edge leads from one group of nodes to another (a bip"],
    ),
    "alone": ({"edge_index": ONE_WAY[:, :20]}, {}, ["read: 20 nodes without an edge"]),
    "loops added": (
        {},
        {"self_loops": True},
        ["changed: a self-loop added to every node"],
    ),
    "standardised": (
        {},
        {"standardize": True},
        ["changed: every feature shifted and scaled to mean 0"],
    ),
    "missing labels": (
        with_features(lambda x: x)
        | {"train_idx": None, "valid_idx": None, "test_idx": None}
        | with_labels([-1, -1]),
        {},
        ["classes: 2 nodes without a label"],
    ),
    "NaN labels": (
        {
            "train_idx": None,
            "valid_idx": None,
            "test_idx": None,
            "labels": np.where(np.arange(60) < 4, np.nan, arrays()["labels"]),
        },
        {},
        [
            "changed: 4 labels NaN: nodes without a label",
            "classes: 4 nodes without a label",
        ],
    ),
    "a gap": (
        with_labels([7, 7]),
        {},
        [
            "no node has the classes 3, 4, 5, 6: the model has outputs for 8 classes",
            "markers: 2 nodes of class 7, after a gap; if 7 stands for nodes without",
        ],
    ),
    "255": (
        with_labels([255] * 3),
        {},
        ["3 nodes of class 255, after a gap; if 255 stands for nodes without a l"],
    ),
    "untrained": (
        {
            "labels": np.where(
                np.arange(60) == arrays()["test_idx"][0], 3, arrays()["labels"]
            )
        },
        {},
        ["classes: no training node has the label 3"],
    ),
    "masks": (
        with_masks(tenth_of),
        {},
        ["left out: 9 masks of the train split: the first of 10 is used"],
    ),
    "masks in columns": (
        with_masks(lambda mask: tenth_of(mask).T),
        {},
        ["9 masks of the test split: the first of 10"],
    ),
    "no split": (
        {"train_idx": None, "valid_idx": None, "test_idx": None},
        {},
        ["nodes with a label were drawn 6 : 2"],
    ),
    "in no split": (
        {"valid_idx": np.empty(0, int)},
        {},
        ["split: 10 nodes with a label in none of them"],
    ),
    "doubles": (
        with_features(np.float64),
        {},
        ["changed: features converted from float64 to float32"],
    ),
    "halves": (
        with_features(np.float16),
        {},
        ["changed: features converted from float16 to float32"],
    ),
    "large numbers": (
        with_features(lambda x: (x * 2**30).astype(np.int64)),
        {},
        ["numbers above 16,777,216 lose"],
    ),
    "constants": (
        with_features(in_part),
        {},
        ["values: 2 features equal in all nodes, 1 of them 0"],
    ),
    "copies": (
        with_features(same_as_training),
        {},
        ["overlap: 3 of 20 test nodes have the same features as a train"],
    ),
}


@pytest.mark.parametrize("case", FACTS)
def test_graph_reader_reports_skipped_and_changed_data(case, tmp_path, caplog):
    changes, asked, wanted = FACTS[case]
    plain, _ = told(write_npz(tmp_path))
    assert not any(words in plain for words in wanted)
    path = write_npz(tmp_path, **changes)
    with caplog.at_level("INFO"):
        facts, data = told(path, **asked)
    assert not [words for words in wanted if words not in facts], facts
    for topic, text in data.report.notices:
        assert f"{path}: {topic}: {text}" in caplog.messages
    assert told(path, **asked)[1].report.digest == data.report.digest
    assert str(tmp_path) not in facts


def test_graph_reader_never_unpickles_object_arrays(tmp_path):
    objects = np.array([{"a": 1}], dtype=object)
    assert (
        "left out: the array meta: it holds Python objects"
        in told(write_npz(tmp_path, meta=objects))[0]
    )
    refused(
        own(write_npz(tmp_path, labels=objects)),
        "the array labels holds Python objects; save it as numbers",
    )


def test_graph_reader_reports_duplicate_sparse_entries(tmp_path):
    csr = {
        "feat_indptr": np.minimum(np.arange(61) * 3, 90),
        "feat_indices": np.array([0, 2, 2] * 30),
        "feat_shape": np.array([60, 4]),
    }
    facts, data = told(write_npz(tmp_path, features=None, **csr))
    assert (
        "changed: 30 entries given more than once in feat_indptr and feat_indices, counted once"
        in facts
    )
    assert data.features[0].tolist() == [1, 0, 1, 0]
    facts, data = told(
        write_npz(
            tmp_path, features=None, feat_data=np.array([1.0, 2.0, 3.0] * 30), **csr
        )
    )
    assert "given more than once in feat_indptr and feat_indices, added up" in facts
    assert data.features[0].tolist() == [1, 0, 5, 0]  # as scipy has it
    refused(
        own(write_npz(tmp_path, features=None, feat_data=np.ones(90) * 1j, **csr)),
        "real numbers, got complex128",
    )


def test_graph_reader_reports_ignored_ogb_files(tmp_path):
    more = (
        "raw/edge-feat.csv.gz",
        "raw/node_year.csv.gz",
        "raw/node_species.csv.gz",
        "mapping/labels.csv.gz",
        "processed/data.pt",
        "RELEASE_v1.txt",
    )
    facts, _ = told(
        write(tmp_path / "mine", {**ogb_folder(arrays()), **dict.fromkeys(more, b"x")})
    )
    for name in more:
        assert f"({name})" in facts
    assert (
        "left out: 1 file .gz: features of edges play no part (raw/edge-feat.csv.gz)"
        in facts
    )
    assert "split: that of split/time" in facts


def test_graph_reader_rejects_heterogeneous_ogb(tmp_path):
    write(
        tmp_path / "mag",
        {"raw/triplet-type-list.csv.gz": b"", "raw/relations/a/edge.csv.gz": b""},
    )
    refused(
        own(tmp_path / "mag"),
        r"several types of nodes or edges \(raw/triplet-type-list.*\); only one type is read",
    )


def test_graph_reader_names_download_for_incomplete_ogb(arxiv, tmp_path):
    asked = recipe("paper", "ogbn-arxiv")
    write(tmp_path / "ogbn_arxiv_dgl", ogb_folder(arrays()))
    assert "the folder ogbn_arxiv/: ogbn_arxiv_dgl/ is read" in str(
        load_graph(asked).report
    )
    shutil.rmtree(tmp_path / "ogbn_arxiv_dgl")
    (arxiv / "raw" / "edge.csv.gz").unlink()
    refused(
        asked,
        r"lacks raw/edge\.csv\.gz; get it anew with: .*python -m cpt_lab download ogbn-arxiv",
    )
