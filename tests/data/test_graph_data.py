"""Loaders of graphs: every layout that is documented, and what happens when its content is wrong."""

import gzip
import io
import pickle
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse
import torch

from cpt_core import data
from cpt_core.data import graphs, ogb
from cpt_core.data.common import DataNotFoundError
from cpt_core.data.graphs import bidirected, load_graph, random_graph
from cpt_core.experiments.recipes import recipe
from cpt_core.graphs import graph as graph_module

NODES = 60


def own(dataset, **changes):
    return replace(recipe("smoke", str(dataset), "gcn", task="graph"), **changes)


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    order = rng.permutation(NODES)
    return {
        "edge_index": rng.integers(0, NODES, (2, 150)),
        "features": rng.standard_normal((NODES, 4), dtype=np.float32),
        "labels": rng.integers(0, 3, NODES),
        "train_idx": order[:30],
        "valid_idx": order[30:40],
        "test_idx": order[40:],
    }


def write_npz(folder, **changes):
    content = {k: v for k, v in {**arrays(), **changes}.items() if v is not None}
    np.savez(folder / "g.npz", **content)
    return folder / "g.npz"


def write_csv(path, values, form="%d"):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    np.savetxt(text, np.asarray(values), fmt=form, delimiter=",")
    path.write_bytes(gzip.compress(text.getvalue().encode()))


def write_ogb(folder, split="time", **changes):
    """The raw layout of OGB's node data sets."""
    a = {**arrays(), **changes}
    raw = folder / "raw"
    write_csv(raw / "edge.csv.gz", a["edge_index"].T)
    write_csv(raw / "node-feat.csv.gz", a["features"], "%.6f")
    write_csv(raw / "node-label.csv.gz", a["labels"])
    write_csv(raw / "node_year.csv.gz", 2000 + np.arange(NODES))
    write_csv(raw / "num-node-list.csv.gz", [NODES])
    write_csv(raw / "num-edge-list.csv.gz", [len(a["edge_index"][0])])
    for part in ("train", "valid", "test"):
        write_csv(folder / "split" / split / f"{part}.csv.gz", a[f"{part}_idx"])
    (folder / "RELEASE_v1.txt").write_text("")
    return folder


# --- edges ----------------------------------------------------------------------------------------


def test_edges_go_both_ways_once_and_self_loops_are_a_choice():
    source, destination = np.array([0, 1, 0, 2, 2]), np.array([1, 0, 1, 2, 3])  # a duplicate and a self-loop
    for self_loops in (False, True):
        graph = bidirected(source, destination, 5, self_loops)
        dense = graph.matrix().to_dense()
        expected = torch.zeros(5, 5)
        for a, b in ((0, 1), (1, 0), (2, 3), (3, 2)):
            expected[a, b] = 1
        assert torch.equal(dense, expected + self_loops * torch.eye(5))
        assert graph.indices.dtype == torch.int32


def test_large_edge_lists_are_read_in_pieces(monkeypatch):
    rng = np.random.default_rng(0)
    source, destination = rng.integers(0, 50, (2, 400))
    whole = bidirected(source, destination, 50, True)
    monkeypatch.setattr(graphs, "PIECE", 64)
    both = bidirected(source, destination, 50, True)
    assert torch.equal(whole.indptr, both.indptr)
    assert torch.equal(whole.indices, both.indices)
    rows = torch.repeat_interleave(torch.arange(50), both.indptr.diff().long())
    again = bidirected(both.indices.numpy(), rows.numpy(), 50, True, symmetric=True)
    assert torch.equal(both.indptr, again.indptr)
    assert torch.equal(both.indices, again.indices)


# --- layouts --------------------------------------------------------------------------------------


def test_an_archive(tmp_path):
    a = arrays()
    found = load_graph(own(write_npz(tmp_path), self_loops=True, standardize=False))
    assert found.title == "own graph (g)"
    assert torch.equal(found.features, torch.from_numpy(a["features"]))
    assert torch.equal(found.labels, torch.from_numpy(a["labels"]))
    assert [len(found.train), len(found.valid), len(found.test)] == [30, 10, 20]
    assert found.classes == 3
    assert found.graph.in_degrees.min() >= 1
    standardized = load_graph(own(tmp_path / "g.npz", standardize=True)).features
    torch.testing.assert_close(standardized.mean(0), torch.zeros(4), atol=1e-6, rtol=0)
    torch.testing.assert_close(standardized.std(0, correction=0), torch.ones(4))


def test_other_names_of_an_archive(tmp_path):
    a = arrays()
    masks = {f"{n}_masks": np.zeros((2, NODES), dtype=bool) for n in ("train", "val", "test")}
    for n, k in (("train", "train_idx"), ("val", "valid_idx"), ("test", "test_idx")):
        masks[f"{n}_masks"][0, a[k]] = True
    sparse = scipy.sparse.csr_matrix((a["features"] > 0).astype(np.float32))
    np.savez(
        tmp_path / "other.npz",
        edges=a["edge_index"].T,
        node_labels=a["labels"],
        feat_indptr=sparse.indptr,
        feat_indices=sparse.indices,
        feat_shape=np.array(sparse.shape),
        **masks,
    )
    found, plain = load_graph(own(tmp_path / "other.npz", standardize=False)), load_graph(own(write_npz(tmp_path)))
    assert torch.equal(found.graph.indices, plain.graph.indices)
    assert torch.equal(found.features, torch.from_numpy((a["features"] > 0).astype(np.float32)))
    assert torch.equal(found.test, plain.test.sort().values)


def test_a_folder_in_ogb_layout(tmp_path):
    found, plain = load_graph(own(write_ogb(tmp_path / "mine"))), load_graph(own(write_npz(tmp_path)))
    assert found.title == "own graph (mine)"
    assert torch.equal(found.graph.indices, plain.graph.indices)
    torch.testing.assert_close(found.features, plain.features, atol=1e-5, rtol=0)
    assert torch.equal(found.valid, plain.valid)


def write_planetoid(folder, test=(7, 9, 8)):
    """ind.* files as Planetoid has them: Python 2 pickles of scipy matrices, arrays and a dict of lists."""
    folder.mkdir()
    one_hot = np.eye(3, dtype=np.int32)[np.arange(10) % 3]
    x = scipy.sparse.csr_matrix(np.arange(30, dtype=np.float32).reshape(10, 3))
    neighbours = defaultdict(list, {i: [(i + 1) % 10] for i in range(10)})
    parts = {"x": x[:4], "y": one_hot[:4], "allx": x[:7], "ally": one_hot[:7], "graph": neighbours}
    parts |= {"tx": x[list(test)], "ty": one_hot[list(test)]}
    for name, value in parts.items():
        (folder / f"ind.tiny.{name}").write_bytes(pickle.dumps(value, protocol=2))
    (folder / "ind.tiny.test.index").write_text("\n".join(map(str, test)))
    return folder


def test_planetoid(tmp_path):
    found = load_graph(own(write_planetoid(tmp_path / "p"), standardize=False, self_loops=False))
    assert torch.equal(found.features, torch.arange(30.0).view(10, 3))  # test rows are back in their order
    assert found.labels.tolist() == [i % 3 for i in range(10)]
    assert found.test.tolist() == [7, 8, 9]
    assert found.graph.in_degrees.tolist() == [2] * 10


def test_a_planetoid_file_runs_no_code(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (print, ("executed",))

    folder = write_planetoid(tmp_path / "p")
    (folder / "ind.tiny.ally").write_bytes(pickle.dumps(Bomb(), protocol=2))
    with pytest.raises(ValueError, match=r"needs no (builtins|__builtin__)\.print: not unpickled"):
        load_graph(own(folder))


def test_embedded_digits():
    found = load_graph(recipe("smoke", "digits-graph"))
    assert len(found.train) == 50
    assert torch.bincount(found.labels[found.train]).tolist() == [5] * 10
    assert len(found.labels) == 1797
    assert "digits" in found.title
    assert "nearest-neighbour" in found.title


def test_stand_ins_have_the_shapes_of_the_data():
    found = random_graph(recipe("paper", "ogbn-arxiv"))
    assert found.features.shape == (169_343, 128)
    assert "random" in found.title


# --- OGB itself -----------------------------------------------------------------------------------


@pytest.fixture(params=["with DGL", "without DGL"])
def arxiv(request, tmp_path, monkeypatch):
    """A small data set in the real layout of ogbn-arxiv, to be read by OGB's own loader."""
    monkeypatch.setenv("CPT_DATA_DIR", str(tmp_path))
    if request.param == "without DGL":
        for module in (graph_module, ogb):
            monkeypatch.setattr(module, "dgl_module", lambda: None)

    def no_input(*args):
        raise AssertionError("OGB waits for an answer")

    monkeypatch.setattr("builtins.input", no_input)
    return write_ogb(tmp_path / "ogbn_arxiv")


def test_ogb_first_and_second_load(arxiv):
    r = recipe("paper", "ogbn-arxiv")
    first, second = load_graph(r), load_graph(r)
    assert list((arxiv / "processed").iterdir())  # the second load reads what the first one wrote
    assert first.checksum == second.checksum
    assert first.title == "OGBN-Arxiv"
    assert first.classes == 40
    a = arrays()
    assert torch.equal(first.labels, torch.from_numpy(a["labels"]))
    assert torch.equal(first.test, torch.from_numpy(a["test_idx"]))
    expected = bidirected(*a["edge_index"], NODES, self_loops=True)
    assert torch.equal(first.graph.indices, expected.indices)
    torch.testing.assert_close(first.features.mean(0), torch.zeros(4), atol=1e-6, rtol=0)


def test_ogb_says_nothing_and_asks_no_network(arxiv, capfd):
    code = (
        "import socket, builtins\n"
        "def refuse(*a, **k): raise AssertionError('network or input')\n"
        "socket.socket.connect = refuse; builtins.input = refuse\n"
        "from cpt_core.data.graphs import load_graph; from cpt_core.experiments.recipes import recipe\n"
        "load_graph(recipe('paper', 'ogbn-arxiv'))\n"
        "import sys; assert sys.modules['outdated'] is None  # what would ask for newer versions"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:cpt_core", "-c", code], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_evaluator_of_ogb_agrees_with_ours():
    rng = np.random.default_rng(0)
    labels, predicted = rng.integers(0, 4, (2, 100))
    found = ogb.evaluator("ogbn-arxiv").eval({"y_true": labels[:, None], "y_pred": predicted[:, None]})
    assert found["acc"] == pytest.approx((labels == predicted).mean())


@pytest.mark.parametrize("dataset", ["ogbn-arxiv", "ogbn-products"])
def test_missing_ogb_data_names_the_command(tmp_path, monkeypatch, dataset):
    monkeypatch.setenv("CPT_DATA_DIR", str(tmp_path))
    with pytest.raises(DataNotFoundError, match=f"python -m cpt_core download {dataset}"):
        load_graph(recipe("paper", dataset))


def test_an_ogb_folder_without_its_release_is_incomplete(arxiv):
    (arxiv / "RELEASE_v1.txt").unlink()
    with pytest.raises(DataNotFoundError, match="incomplete"):
        load_graph(recipe("paper", "ogbn-arxiv"))


def test_download_goes_through_ogb_and_asks_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_DATA_DIR", str(tmp_path))
    import ogb.nodeproppred.dataset_dgl as theirs

    urls = []

    def fetch(url, folder):
        urls.append(url)
        raise OSError("no network in tests")

    monkeypatch.setattr(theirs, "download_url", fetch)
    with pytest.raises(OSError, match="no network in tests"):
        data.download("ogbn-products")  # 1.4 GB: OGB would ask first
    assert urls == ["http://snap.stanford.edu/ogb/data/nodeproppred/products.zip"]


# --- bad content ----------------------------------------------------------------------------------


def changed(name, index, value):
    array = arrays()[name].copy()
    array[index] = value
    return {name: array}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (changed("features", (3, 1), np.nan), "1 features are NaN or infinite, the first in node 3"),
        (changed("features", (5, 0), np.inf), "1 features are NaN or infinite, the first in node 5"),
        ({"features": np.zeros((NODES - 1, 4))}, r"60 labels need features of shape \(60, F\), got \(59, 4\)"),
        (changed("labels", 2, -7), "labels must be 0, 1, ... or -1 for none, got -7"),
        ({"labels": np.linspace(0, 1, NODES)}, "labels must be whole numbers, node 1 has 0.0169"),
        (changed("edge_index", (0, 0), NODES), r"edges must name nodes 0\.\.59, got 60"),
        (changed("edge_index", (1, 9), -2), r"edges must name nodes 0\.\.59, got -2"),
        ({"edge_index": np.zeros((3, 5), dtype=int)}, r"\(2, E\) or \(E, 2\), got int64 \(3, 5\)"),
        ({"edge_index": np.zeros((2, 5))}, r"whole numbers \(2, E\) or \(E, 2\), got float64"),
        (changed("train_idx", 0, 99), r"the train split must name nodes 0\.\.59, got 99"),
        ({"train_idx": np.array([1, 1, 2])}, "the train split names a node more than once"),
        ({"test_idx": arrays()["train_idx"][:3]}, r"node \d+ is in the splits train and test"),
        ({"train_idx": np.empty(0, dtype=int)}, "the train and the test split need at least one node each"),
        ({"train_idx": np.array([0.5])}, "the train split must hold whole numbers, got float64"),
        (changed("labels", int(arrays()["test_idx"][0]), -1), r"node \d+ of the test split has no label"),
        ({"labels": None}, "g.npz: needs one of labels, node_labels; it has edge_index, features, train_idx"),
    ],
)
def test_wrong_content_of_an_archive(tmp_path, changes, message):
    path = write_npz(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load_graph(own(path))


def test_labels_beyond_the_official_classes(arxiv):
    write_csv(arxiv / "raw" / "node-label.csv.gz", np.full(NODES, 40))
    with pytest.raises(ValueError, match="labels must be below 40, got 40"):
        load_graph(recipe("paper", "ogbn-arxiv"))


def test_integer_features_and_missing_labels_are_welcome(tmp_path):
    labels = arrays()["labels"].astype(float)
    outside = [n for n in range(NODES) if n not in np.concatenate([arrays()[f"{p}_idx"] for p in ("train", "test")])]
    labels[outside] = np.nan
    path = write_npz(
        tmp_path, features=np.arange(NODES * 2).reshape(NODES, 2), labels=labels, valid_idx=np.empty(0, int)
    )
    found = load_graph(own(path, standardize=False))
    assert found.features.dtype == torch.float32
    assert found.labels[outside].eq(-1).all()
    assert len(found.valid) == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "raw" / "node-label.csv.gz").unlink(), "lacks raw/node-label.csv.gz"),
        (lambda f: (f / "split" / "time" / "test.csv.gz").unlink(), "lacks split/time/test.csv.gz"),
        (lambda f: (f / "split" / "other").mkdir(), r"exactly one folder in split/, it has 2"),
        (
            lambda f: write_csv(f / "raw" / "num-edge-list.csv.gz", [999]),
            "announces 999 edges, edge.csv.gz has 150",
        ),
        (
            lambda f: write_csv(f / "split" / "time" / "test.csv.gz", [NODES]),
            r"the test split must name nodes 0\.\.59, got 60",
        ),
    ],
)
def test_wrong_folders(tmp_path, damage, message):
    folder = write_ogb(tmp_path / "mine")
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load_graph(own(folder))


def test_what_is_not_there(tmp_path):
    for dataset, message in ((tmp_path / "no.npz", "no archive"), (tmp_path / "no" / "folder", "no file or folder")):
        with pytest.raises(DataNotFoundError, match=message):
            load_graph(own(dataset))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no graph"):
        load_graph(own(tmp_path / "empty"))
    (tmp_path / "ind").mkdir()
    (tmp_path / "ind" / "ind.x.graph").write_bytes(b"")
    with pytest.raises(ValueError, match=r"lacks ind\.x\.y"):
        load_graph(own(tmp_path / "ind"))
