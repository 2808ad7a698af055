"""Data sets: ``images``, ``graphs``, ``text``, each with the layouts it reads; nothing is downloaded unless asked for.

Data is looked up in ``CPT_DATA_DIR``, then in ``data/cache``.
"""

from __future__ import annotations

from pathlib import Path

DOWNLOADS = ("cifar10", "cifar100", "imagenet", "ogbn-arxiv", "ogbn-products", "ptb")


def download(dataset: str) -> Path:
    """Download a data set through its own library, with progress and checksums, and return where it is.

    Raises:
        ValueError: for a data set that cannot be downloaded.
    """
    if dataset not in DOWNLOADS:
        raise ValueError(f"{dataset!r} cannot be downloaded; choose from {', '.join(DOWNLOADS)}")
    if dataset.startswith("ogbn"):
        from cpt_core.data import graphs

        return graphs.download(dataset)
    if dataset == "ptb":
        from cpt_core.data import text

        return text.download()
    from cpt_core.data import images

    return images.download(dataset)
