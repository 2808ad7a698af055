"""The data sets of the Open Graph Benchmark through its own library, without its questions and look-ups."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from cpt_core.checks import library
from cpt_core.data.common import DataNotFoundError
from cpt_core.data.graph_readers import RawGraph, quiet_ogb
from cpt_core.experiments.graph import EXPERIMENT
from cpt_core.graphs.graph import dgl_module
from cpt_core.paths import command, data_dir


def _ogb_folder_of(name: str) -> Path:
    folder = data_dir() / name.replace("-", "_")
    return folder.with_name(f"{folder.name}_dgl") if folder.with_name(f"{folder.name}_dgl").exists() else folder


def read_ogb(name: str) -> RawGraph:
    """A data set of OGB through its own loader, with its official split."""
    folder = _ogb_folder_of(name)
    get = f"get it with: {command(f'download {name}')}"
    if not (folder / "raw").is_dir() and not (folder / "processed").is_dir():
        raise DataNotFoundError(f"{name} is not in {folder.parent}; {get}")
    if not list(folder.glob("RELEASE_v*.txt")):  # OGB would ask whether to update, and wait for an answer
        raise DataNotFoundError(f"{folder} is incomplete (no RELEASE_v1.txt); remove it and {get}")
    (folder / "processed").mkdir(exist_ok=True)  # OGB saves into it without making it
    with quiet_ogb():
        data = _ogb_dataset(name)
    split = {part: np.asarray(index) for part, index in data.get_idx_split().items()}
    graph, labels = data[0]
    if dgl_module() is not None:
        source, destination = (e.numpy() for e in graph.edges())
        features = graph.ndata["feat"].numpy()
    else:
        (source, destination), features = graph["edge_index"], graph["node_feat"]
    return RawGraph(
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
    with quiet_ogb():
        return library("ogb.nodeproppred", "graph").Evaluator(name)
