"""Graph readers: archives, OGB's raw layout, Planetoid's pickles, reports and errors, downloads."""

import gzip
import io
import pickle
import shutil
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch
from dataset_layouts import (
    NO_SPLIT,
    describe_cases,
    graph_archive,
    graph_arrays,
    load_own,
    ogb_folder,
    own_recipe,
    planetoid,
    report_lines,
    split_sizes,
    table,
    write,
)
from helpers import refused, run_command

from cpt_lab import data
from cpt_lab.data import graph_readers
from cpt_lab.data.files import DataNotFoundError
from cpt_lab.data.graphs import load_graph, to_bidirected
from cpt_lab.experiments.registry import recipe

NODES = 60
ARRAYS = graph_arrays()
SPLITS = ("train", "valid", "test")


def load_archive(folder, settings=None, /, **changes):
    """Load a graph from an archive with changed arrays."""
    return load_own(folder, "graph", graph_archive(**changes), **settings or {})


@pytest.mark.parametrize("self_loops", [False, True])
def test_bidirected_matches_dense_matrix(self_loops):
    rng = np.random.default_rng(0)
    source, destination = rng.integers(0, 50, (2, 400)).astype(np.uint64)
    dense = np.zeros((60, 60), dtype=bool)  # ten nodes have no edge
    dense[source, destination] = dense[destination, source] = True
    np.fill_diagonal(dense, self_loops)
    graph = to_bidirected(source, destination, 60, self_loops)
    assert graph.indptr.tolist() == [0, *dense.sum(1).cumsum()]
    assert graph.indices.tolist() == np.nonzero(dense)[1].tolist()
    assert graph.indices.dtype == torch.int32


# --- archives -------------------------------------------------------------------------------------


def test_graph_reader_loads_npz_archive(data_folder):
    result = load_archive(data_folder, {"self_loops": True})
    assert result.title == "own graph (g)"
    assert torch.equal(result.features, torch.from_numpy(ARRAYS["features"]))
    assert torch.equal(result.labels, torch.from_numpy(ARRAYS["labels"]))
    assert (split_sizes(result), result.classes) == ([30, 10, 20], 3)
    assert result.graph.in_degrees.min() >= 1
    standardized = load_archive(data_folder, {"standardize": True}).features
    torch.testing.assert_close(standardized.mean(0), torch.zeros(4), atol=1e-6, rtol=0)
    torch.testing.assert_close(standardized.std(0, correction=0), torch.ones(4))


@pytest.mark.parametrize("name", ["edge_index", "edges"])
@pytest.mark.parametrize("count", [1, 3, 40])
def test_graph_reader_accepts_edge_layouts(name, count, data_folder):
    pairs = np.stack([np.arange(count), np.arange(count) + 5], axis=1)
    expected = to_bidirected(*pairs.T, NODES, False)
    for edges in (pairs, pairs.T):
        graph = load_archive(data_folder, **{"edge_index": None, name: edges}).graph
        assert torch.equal(graph.indptr, expected.indptr)
        assert torch.equal(graph.indices, expected.indices)


def sparse_features(repeated=False, **changes):
    """Return features in CSR form for ``graph_archive``, without values unless ``changes`` have them."""
    csr = {
        "feat_indptr": np.minimum(np.arange(61) * 3, 90),
        "feat_indices": np.array([0, 2, 2 if repeated else 3] * 30),
        "feat_shape": np.array([60, 4]),
    }
    return {"features": None, **csr, **changes}


def test_graph_reader_accepts_sparse_features(data_folder):
    """Accept sparse features and alternative names of arrays; count or add up entries that are repeated."""
    values = np.array([1.0, 2.0, 3.0] * 30)
    labels = {"labels": None, "node_labels": ARRAYS["labels"]}
    for arrays, row in (
        (sparse_features(), [1, 0, 1, 1]),
        (sparse_features(feat_data=values), [1, 0, 2, 3]),
        (sparse_features(repeated=True), [1, 0, 1, 0]),
        (sparse_features(repeated=True, feat_data=values), [1, 0, 5, 0]),
    ):
        result = load_archive(data_folder, **labels, **arrays)
        expected = torch.zeros(NODES, 4)
        expected[:30] = torch.tensor(row, dtype=torch.float32)
        assert torch.equal(result.features, expected)
        assert torch.equal(result.labels, torch.from_numpy(ARRAYS["labels"]))


def test_graph_reader_draws_missing_split(data_folder):
    labels = ARRAYS["labels"].copy()
    labels[7] = -1
    arrays = {"features": None, "labels": None, "x": ARRAYS["features"], "y": labels}
    result = load_archive(data_folder, **NO_SPLIT, **arrays)
    assert result.title == "own graph (g), nodes drawn 6 : 2 : 2"
    assert split_sizes(result) == [35, 12, 12]
    nodes = torch.cat([result.train, result.valid, result.test])
    assert sorted(nodes.tolist()) == [*range(7), *range(8, NODES)]


def test_graph_reader_accepts_integers_and_missing_labels(data_folder):
    labels, outside = ARRAYS["labels"].astype(float), ARRAYS["valid_idx"]
    labels[outside] = np.nan
    features = np.arange(NODES * 2).reshape(NODES, 2)
    result = load_archive(
        data_folder, features=features, labels=labels, valid_idx=np.empty(0, int)
    )
    assert result.features.dtype == torch.float32
    assert result.labels[outside].eq(-1).all()
    assert len(result.valid) == 0


def masks(form):
    """Return arrays that give the split as masks in one form, ten draws of which the first counts."""
    arrays = dict(NO_SPLIT)
    for part, name in zip(SPLITS, ("train", "val", "test"), strict=True):
        mask = np.isin(np.arange(NODES), ARRAYS[f"{part}_idx"])
        formed = form(np.stack([np.roll(mask, shift) for shift in range(10)]))
        arrays[f"{name}_mask" + "s" * (formed.ndim == 2)] = formed
    return arrays


@pytest.mark.parametrize(
    "form",
    [
        lambda masks: masks,
        lambda masks: masks.T,
        lambda masks: masks[0],
        lambda masks: masks[0].astype(float),
    ],
    ids=["(splits, N)", "(N, splits)", "(N,)", "ones and zeros"],
)
def test_graph_reader_accepts_mask_layouts(form, data_folder):
    result = load_archive(data_folder, **masks(form))
    for part in SPLITS:
        assert getattr(result, part).tolist() == sorted(ARRAYS[f"{part}_idx"])
    assert torch.equal(result.test_labels, result.labels[result.test])


def changed(name, index, value):
    """Return an array of the graph with one changed place."""
    array = ARRAYS[name].astype(np.result_type(ARRAYS[name], value))
    array[index] = value
    return {name: array}


def archive_cases():
    """Return graphs in archives, a sound one first, with the changes of their recipes."""
    train, test = ARRAYS["train_idx"], ARRAYS["test_idx"]
    features, labels = ARRAYS["features"], ARRAYS["labels"]
    loops = np.array([[0, 3, 9, 9, 7], [1, 3, 9, 9, 7]])
    one_way = np.array([np.arange(30), np.arange(30, 60)])
    constant = features.copy()
    constant[:, 1], constant[:, 2] = 0, 5
    objects = np.array([{"a": 1}], dtype=object)
    beyond = np.arange(NODES) < 4
    csr = sparse_features()["feat_indices"]
    cases = {
        "sound": {},
        "edge weights": {"edge_weight": np.ones(150)},
        "edge features": {"edge_attr": np.ones((150, 2))},
        "edge types": {"edge_type": np.ones(150, int)},
        "node types": {"node_type": np.ones(60, int)},
        "more edges": {"edge_index_b": np.ones((2, 3), int)},
        "positions": {"pos": np.ones((60, 2))},
        "unknown arrays": {"zeta": np.ones(3), "eta": np.ones(2)},
        "an array of objects": {"meta": objects},
        "features twice": {"x": np.ones((60, 2))},
        "masks besides": {"train_mask": np.ones(60, bool)},
        "self-loops": {"edge_index": loops},
        "edges twice": {"edge_index": np.array([[0, 0, 1, 0], [1, 1, 0, 2]])},
        "edges of one direction": {"edge_index": np.array([[0, 1, 0], [1, 0, 2]])},
        "bipartite": {"edge_index": one_way},
        "nodes without an edge": {"edge_index": one_way[:, :20]},
        "missing labels": {**NO_SPLIT, **changed("labels", train[:2], -1)},
        "NaN labels": {**NO_SPLIT, "labels": np.where(beyond, np.nan, labels)},
        "a gap in the labels": changed("labels", train[:2], 7),
        "labels of 255": changed("labels", train[:3], 255),
        "a label without training nodes": changed("labels", test[0], 3),
        "masks": masks(lambda masks: masks),
        "masks in columns": masks(lambda masks: masks.T),
        "masks of zeros and ones": masks(lambda masks: masks.T.astype(np.uint8)),
        "an empty split of floats": {"valid_idx": np.array([])},
        "splits of floats": {"train_idx": train.astype(float)},
        "a split in a column": {"train_idx": train[:, None]},
        "several splits": {"train_idx": np.stack([train[:5], train[5:10]])},
        "no split": NO_SPLIT,
        "nodes in no split": {"valid_idx": np.empty(0, int)},
        "doubles": {"features": features.astype(np.float64)},
        "halves": {"features": features.astype(np.float16)},
        "large numbers": {"features": (features * 2**30).astype(np.int64)},
        "constant features": {"features": constant},
        "copies of training nodes": changed("features", test[:3], features[train[0]]),
        "repeated sparse entries": sparse_features(repeated=True),
        "repeated sparse values": sparse_features(True, feat_data=np.ones(90)),
        "NaN": changed("features", (3, 1), np.nan),
        "features beyond float32": {"features": np.full((60, 3), 1e300)},
        "complex features": {"features": features * 1j},
        "complex sparse features": sparse_features(feat_data=np.ones(90) * 1j),
        "features of fewer nodes": {"features": np.zeros((NODES - 1, 4))},
        "a sparse index below zero": sparse_features(feat_indices=csr - 1),
        "rows of sparse features that fall": sparse_features(
            feat_indptr=np.minimum(np.arange(61) * 3, 90)[::-1]
        ),
        "columns by the milliard": sparse_features(feat_shape=np.array([60, 1 << 50])),
        "a label below -1": changed("labels", 2, -7),
        "labels of fractions": {"labels": np.linspace(0, 1, NODES)},
        "labels of objects": {"labels": objects},
        "a label of a million": changed("labels", 2, 10**6),
        "one label": {"labels": np.full(NODES, 3)},
        "one label to train on": {"labels": np.isin(np.arange(NODES), train) * 1},
        "no labels": {"labels": None},
        "an edge behind the nodes": changed("edge_index", (0, 0), NODES),
        "an edge below zero": changed("edge_index", (1, 9), -2),
        "edges of three": {"edge_index": np.zeros((3, 5), dtype=int)},
        "edges of fractions": {"edge_index": np.zeros((2, 5))},
        "a split behind the nodes": changed("train_idx", 0, 99),
        "a node twice in a split": {"train_idx": np.array([1, 1, 2])},
        "a node in two splits": {"test_idx": train[:3]},
        "no training nodes": {"train_idx": np.empty(0, int)},
        "a split of fractions": {"train_idx": np.array([0.5])},
        "a test node without a label": changed("labels", int(test[0]), -1),
        "nodes for training alone": {"valid_idx": None, "test_idx": None},
        "masks of fewer nodes": masks(lambda masks: masks[:, :5]),
        "masks of two readings": masks(lambda masks: np.tile(masks, (6, 1))),
    }
    files = {name: graph_archive(**changes) for name, changes in cases.items()}
    return {
        **files,
        "self-loops added": (files["sound"], {"self_loops": True}),
        "standardised": (files["sound"], {"standardize": True}),
    }


def ogb_cases():
    """Return graphs in OGB's raw layout, a sound one first."""
    files = ogb_folder()
    beside = (
        "raw/edge-feat.csv.gz",
        "raw/node_year.csv.gz",
        "raw/node_species.csv.gz",
        "mapping/labels.csv.gz",
        "processed/data.pt",
        "RELEASE_v1.txt",
    )
    changes = {
        "more files": dict.fromkeys(beside, b"x"),
        "two splits": {"split/other/test.csv.gz": b""},
        "a wrong number of edges": {"raw/num-edge-list.csv.gz": table([999])},
        "a split behind the nodes": {"split/time/test.csv.gz": table([NODES])},
        "edges of three": {"raw/edge.csv.gz": table([[0, 1, 2]] * 4)},
        "labels of fractions": {
            "raw/node-label.csv.gz": table(np.arange(60) / 4, "%.2f")
        },
        "features of letters": {"raw/node-feat.csv.gz": gzip.compress(b"a,b\n" * 60)},
    }
    cases = {"sound": files}
    cases |= {name: files | change for name, change in changes.items()}
    for name in ("raw/node-label.csv.gz", "split/time/test.csv.gz"):
        cases[f"without {name}"] = {k: v for k, v in files.items() if k != name}
    cases["several types"] = {
        "raw/triplet-type-list.csv.gz": b"",
        "raw/relations/a/edge.csv.gz": b"",
    }
    return cases


def test_graph_reader_loads_planetoid(data_folder):
    result = load_own(data_folder, "graph", planetoid())
    assert torch.equal(result.features, torch.arange(30.0).view(10, 3))
    assert result.labels.tolist() == [i % 3 for i in range(10)]
    assert result.test.tolist() == [7, 8, 9]
    assert result.graph.in_degrees.tolist() == [2] * 10


def test_graph_reader_keeps_undescribed_planetoid_nodes(data_folder):
    """Keep nodes that no file describes, as CiteSeer's test.index leaves out numbers."""
    files = {**planetoid(), "ind.tiny.test.index": b"8\n7\n11"}
    result = load_own(data_folder, "graph", files)
    assert (len(result.labels), result.test.tolist()) == (12, [7, 8, 11])
    assert result.labels[[9, 10]].tolist() == [-1, -1]
    assert result.features[[9, 10]].eq(0).all()


def damaged_matrix(**parts):
    """Return the pickle of the matrix ``allx`` with changed parts: a value, or a pair of a place and its value."""
    matrix = pickle.loads(planetoid()["ind.tiny.allx"], encoding="latin1")
    for name, value in parts.items():
        if name in ("indices", "indptr") and isinstance(value, tuple):
            place, number = value
            value = getattr(matrix, name).copy()
            value[place] = number
        matrix.__dict__[name] = value
    return matrix


def planetoid_cases():
    """Return Planetoid's files, sound ones first."""
    eye = np.eye(3, dtype=int)
    matrices = {
        "an index far right": damaged_matrix(indices=(0, 2_000_000_000)),
        "an index before the array": damaged_matrix(indices=(3, -2_000_000)),
        "an index of a row behind": damaged_matrix(indices=(0, 4)),
        "a row end too large": damaged_matrix(indptr=(-1, 2_000_000_000)),
        "row ends that fall": damaged_matrix(indptr=(2, 9)),
        "rows that begin late": damaged_matrix(indptr=(0, 1)),
        "fewer rows than the shape": damaged_matrix(_shape=(8, 3)),
        "columns by the milliard": damaged_matrix(_shape=(7, 1 << 40)),
        "a shape of floats": damaged_matrix(_shape=(7.0, 3)),
        "a shape below zero": damaged_matrix(_shape=(-7, 3)),
        "indices of objects": damaged_matrix(indices=np.array([0, "x"], dtype=object)),
        "indices of fractions": damaged_matrix(indices=np.full(20, 0.5)),
        "indices in a list": damaged_matrix(indices=[0] * 20),
        "values of another number": damaged_matrix(data=np.ones(3)),
        "an array for a matrix": np.ones((7, 3)),
    }
    parts = {name: ("allx", value) for name, value in matrices.items()} | {
        "a matrix for labels": ("ally", scipy.sparse.csr_matrix(np.eye(7, 3))),
        "several labels": ("ally", np.ones((7, 3), int)),
        "labels as numbers": ("y", np.arange(4)),
        "labels of other nodes": ("y", eye[[2, 2, 2, 2]]),
        "fewer rows of labels": ("ally", np.eye(7, 3, dtype=int)[:6]),
        "test rows that lack": ("ty", eye[:2]),
        "neighbours in text": ("graph", {0: "12"}),
        "neighbours named in text": ("graph", {0: ["1"]}),
        "nodes named in text": ("graph", {"0": [1]}),
        "a neighbour of zero length": ("graph", {0: [""]}),
        "fractions of nodes": ("graph", {0: [0.0]}),
        "neighbours beyond int64": ("graph", {0: [1 << 70]}),
        "neighbours that are none": ("graph", {0: [10]}),
        "neighbours below zero": ("graph", {0: [-1]}),
        "a list many times": ("graph", dict.fromkeys(range(10), [1] * 2_000)),
        "no table": ("graph", [[1]]),
    }
    indices = {
        "nodes that no file describes": b"8\n7\n11",
        "tested below zero": b"-7\n8\n9",
        "tested in training": b"0 8 9",
        "tested far away": b"7 8 1000000000000",
        "no tests": b" \n",
    }
    files = planetoid()
    cases = {"sound": files}
    for name, (part, value) in parts.items():
        cases[name] = {**files, f"ind.tiny.{part}": pickle.dumps(value, 2)}
    for name, index in indices.items():
        cases[name] = {**files, "ind.tiny.test.index": index}
    other = {name.replace("tiny", "other"): file for name, file in files.items()}
    cases["several graphs"] = files | other
    cases["one file"] = {"ind.x.graph": b""}
    return cases


@pytest.mark.slow
@pytest.mark.parametrize("cases", [archive_cases, ogb_cases, planetoid_cases])
def test_graph_reader_reports_unusual_content(cases, data_folder, golden):
    name = cases.__name__.removesuffix("_cases")
    golden(f"data/graph_{name}.txt", describe_cases(data_folder, "graph", cases()))


def test_graph_reader_names_missing_files(data_folder):
    for dataset, message in (
        ("no.npz", "no file"),
        ("no/folder/", "no file or folder"),
    ):
        config = own_recipe("graph", dataset)
        refused(message, load_graph, config, error=DataNotFoundError)
    (data_folder / "mine").mkdir()
    refused("holds no graph", load_graph, own_recipe("graph"))


# --- embedded and random graphs -------------------------------------------------------------------


# --- OGB itself -----------------------------------------------------------------------------------


@pytest.fixture
def arxiv(data_folder, monkeypatch):
    """Write a small data set in the layout of ogbn-arxiv, and adapt the official counts."""
    counts = (NODES, 150, 4, 40)
    monkeypatch.setitem(graph_readers.OFFICIAL_COUNTS, "ogbn-arxiv", counts)
    return write(data_folder / "ogbn_arxiv", ogb_folder())


ARXIV = recipe("paper", "ogbn-arxiv")


class Bomb:
    """Object whose unpickling creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


def test_graph_reader_loads_ogb_folder(arxiv, data_folder):
    """Load the raw files, and execute no pickle of the processed ones."""
    executed = data_folder / "executed"
    (arxiv / "processed").mkdir()
    for name in ("data_processed", "dgl_data_processed", "geometric_data_processed.pt"):
        torch.save(Bomb(executed), arxiv / "processed" / name)
    result = load_graph(ARXIV)
    assert not executed.exists()
    assert (result.title, result.classes, result.ogb) == (
        "OGBN-Arxiv",
        40,
        "ogbn-arxiv",
    )
    assert torch.equal(result.labels, torch.from_numpy(ARRAYS["labels"]))
    for part in SPLITS:
        assert getattr(result, part).tolist() == ARRAYS[f"{part}_idx"].tolist()
    expected = to_bidirected(*ARRAYS["edge_index"], NODES, self_loops=True)
    assert torch.equal(result.graph.indices, expected.indices)
    exact = load_archive(data_folder, {"standardize": True}).features
    # OGB's tables have six digits.
    torch.testing.assert_close(result.features, exact, atol=1e-5, rtol=0)
    settings = {"self_loops": True, "standardize": ARXIV.standardize}
    own_graph = load_graph(own_recipe("graph", str(arxiv), **settings))
    assert own_graph.title == "own graph (ogbn_arxiv)"
    assert own_graph.checksum == result.checksum


def test_graph_reader_rejects_unofficial_ogb(arxiv, monkeypatch):
    write(arxiv, {"raw/node-label.csv.gz": table(np.full(NODES, 40))})
    refused("labels must be below 40, got 40", load_graph, ARXIV)
    counts = (NODES, 151, 4, 40)
    monkeypatch.setitem(graph_readers.OFFICIAL_COUNTS, "ogbn-arxiv", counts)
    message = r"is not the official ogbn-arxiv: .* \[60, 150, 4\], not \[60, 151, 4\]"
    refused(message, load_graph, ARXIV)


def test_graph_reader_names_download_for_incomplete_ogb(arxiv, data_folder):
    other = write(data_folder / "ogbn_arxiv_dgl", ogb_folder())
    facts = "\n".join(report_lines(load_graph(ARXIV)))
    assert "the folder ogbn_arxiv/: ogbn_arxiv_dgl/ is read" in facts
    shutil.rmtree(other)
    (arxiv / "raw" / "edge.csv.gz").unlink()
    command = "python -m cpt_lab download ogbn-arxiv"
    refused(
        rf"lacks raw/edge\.csv\.gz; get it anew with: .*{command}", load_graph, ARXIV
    )


OFFLINE_EVALUATOR = """
import socket, builtins
def refuse(*a, **k): raise AssertionError('network or input')
socket.socket.connect = refuse; builtins.input = refuse
from cpt_lab.data.graph_readers import ogb_evaluator
ogb_evaluator('ogbn-arxiv')
import sys; assert sys.modules['outdated'] is None  # which asks for newer versions
"""


@pytest.mark.slow
def test_ogb_evaluator_is_silent_and_offline():
    """Run in a child process, because a loaded OGB does not ask again."""
    warnings = ("-W", "error::UserWarning:cpt_core")
    assert run_command(sys.executable, *warnings, "-c", OFFLINE_EVALUATOR) == ""


def test_ogb_evaluator_matches_accuracy():
    labels, predicted = np.random.default_rng(0).integers(0, 4, (2, 100, 1))
    evaluator = graph_readers.ogb_evaluator("ogbn-arxiv")
    result = evaluator.eval({"y_true": labels, "y_pred": predicted})
    assert result["acc"] == pytest.approx((labels == predicted).mean())


def zipped(folder, **more):
    """Return the archive of OGB's server: the folder under a different name."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as file:
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            file.write(path, Path("arxiv", path.relative_to(folder)))
        for name, text in more.items():
            file.writestr(name, text)
    return packed.getvalue()


def test_ogb_download_uses_https_and_safe_paths(arxiv, data_folder, monkeypatch):
    """Download over HTTPS, extract no path outside the folder, and reject a changed archive."""
    hostile = ("arxiv/processed/x.csv.gz", "arxiv/raw/../../../out.csv.gz")
    served = {"": zipped(arxiv, **dict.fromkeys(hostile, "x"))}
    addresses = []

    def fake_download(url, path):
        addresses.append(url)
        Path(path).write_bytes(served[""])

    monkeypatch.setattr(torch.hub, "download_url_to_file", fake_download)
    before = load_graph(ARXIV).checksum
    shutil.rmtree(arxiv)
    assert data.download("ogbn-arxiv") == arxiv
    assert addresses == ["https://snap.stanford.edu/ogb/data/nodeproppred/arxiv.zip"]
    assert load_graph(ARXIV).checksum == before
    assert not (arxiv / "processed").exists()
    names = sorted(path.name for path in data_folder.iterdir())
    assert names == ["ogbn_arxiv", "ogbn_arxiv.sha256"]
    data.download("ogbn-arxiv")  # the same archive again
    served[""] = zipped(arxiv)
    message = r"not that of the first download, in .*ogbn_arxiv\.sha256"
    refused(message, data.download, "ogbn-arxiv")
    (data_folder / "ogbn_arxiv.sha256").unlink()
    served[""] = served[""][:-40]
    message = r"archive\.zip cannot be read: File is not a zip file"
    refused(message, data.download, "ogbn-arxiv")
    assert load_graph(ARXIV).checksum == before
