"""The data sets of the Open Graph Benchmark: their raw files, read as text, and OGB's evaluator.

OGB's own loader keeps a pickle in ``processed/``, which runs code when it is loaded; it is neither made nor read here.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch

from cpt_core.checks import library
from cpt_lab.data.files import not_here, reading, sources
from cpt_lab.data.graph_readers import RawGraph, read_ogb_folder
from cpt_lab.experiments.graph import EXPERIMENT, GraphRecipe
from cpt_lab.paths import data_dir

log = logging.getLogger(__name__)

URL = "https://snap.stanford.edu/ogb/data/nodeproppred/{}.zip"
# nodes, edges (each once), features and classes, as OGB states them
OFFICIAL = {"ogbn-arxiv": (169_343, 1_166_243, 128, 40), "ogbn-products": (2_449_029, 61_859_140, 100, 47)}


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
    """Return OGB's evaluator of a data set."""
    with _quiet():
        return library("ogb.nodeproppred", "graph").Evaluator(name)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Import OGB without its question to the network for newer versions, and keep what it prints for the log."""
    sys.modules.setdefault("outdated", cast(Any, None))
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            yield
    finally:
        if printed.getvalue().strip():
            log.debug("ogb: %s", printed.getvalue())
