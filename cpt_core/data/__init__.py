"""Data sets: ``images``, ``detection``, ``graphs``, ``text``, ``entailment``, each with the layouts it reads.

Downloads happen when asked for. Data is looked up in ``CPT_DATA_DIR``, then in ``data/cache``.
"""

from __future__ import annotations

from pathlib import Path

CHECKPOINT = "bert-base-multilingual-cased"
BACKBONE = "resnet18"  # its ImageNet weights
DOWNLOADS = (
    "cifar10", "cifar100", "imagenet", "voc2007", "voc2012", BACKBONE, "ogbn-arxiv", "ogbn-products", "ptb", "xnli",
    CHECKPOINT,
)  # fmt: skip


def download(dataset: str, language: str = "de") -> Path:
    """Download a data set through its own library, with progress and checksums, and return where it is.

    Args:
        dataset: one of ``DOWNLOADS``, among them pretrained models.
        language: of XNLI's text.

    Raises:
        ValueError: for a data set that cannot be downloaded.
    """
    if dataset not in DOWNLOADS:
        raise ValueError(f"{dataset!r} cannot be downloaded; choose from {', '.join(DOWNLOADS)}")
    if dataset.startswith("ogbn"):
        from cpt_core.data import graphs

        return graphs.download(dataset)
    if dataset == BACKBONE or dataset.startswith("voc"):
        from cpt_core.data import detection

        return detection.download(dataset)
    if dataset == "ptb":
        from cpt_core.data import text

        return text.download()
    if dataset in ("xnli", CHECKPOINT):
        from cpt_core.data import entailment

        return entailment.download(dataset, language)
    from cpt_core.data import images

    return images.download(dataset)
