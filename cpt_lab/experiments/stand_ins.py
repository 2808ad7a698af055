"""Grids on stand-in data: figures of the paper whose own data or scale is out of reach.  Needs no torch.

Each function returns the runs of one figure, or of one half of it. Its docstring names the figure, the number of runs
and the time on two CPU cores. ``STAND_INS`` lists them by the name that ``cpt run`` takes.

The data folder holds CIFAR-10 as JPEG copies (``cifar10-jpeg/cifar10_train_jpeg.npz`` and ``..._test_jpeg.npz``),
Facebook's page-page graph in OGB's layout (``facebook_ogb_layout/``), Cora (``planetoid/cora/``) and a subset of XNLI
(``xnli/``). Digits and characters are embedded.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from cpt_core.schedules.profiles import SUITE
from cpt_lab.experiments import designs
from cpt_lab.experiments.spec import RunSpec

CIFAR_COPIES = "cifar10-jpeg/"
FACEBOOK = "facebook_ogb_layout/"
CORA = "planetoid/cora/"

CIFAR_RESNET8 = {"dataset": CIFAR_COPIES, "model": "resnet8"}
FACEBOOK_GCN = {"dataset": FACEBOOK, "model": "gcn", "task": "graph"}
FACEBOOK_SAGE = {"dataset": FACEBOOK, "model": "sage", "task": "graph"}

# What the data of committed runs are called, which were data of the user's own to the runs.
STAND_IN_TITLES = {
    CIFAR_COPIES: "JPEG copies of CIFAR-10",
    FACEBOOK: "Facebook's page-page graph",
    CORA: "Cora",
    "voc2007-first16/": "the first 16 pictures of Pascal VOC 2007",
    "voc2007-subset320/": "320 pictures of Pascal VOC 2007",
}

# Arms that an unfinished figure needs most. A seed's other arms follow in the order of the paper's ten schedules.
FIRST_ARMS = ("static 8", "CR", "RR", "ER", "static 4")


def cifar_figure_3(scale: str = "background", **choices: Any) -> list[RunSpec]:
    """Return the runs of figure 3 at q_max 8 on JPEG copies of CIFAR-10: ten schedules and five static precisions.

    60 runs of ResNet-8 with four seeds, 17 minutes each on a core: 8.5 hours. The paper trains ResNet-74 for 164 epochs
    instead of 10.

    Paper: section 4.2, figure 3.
    """
    settings = {
        "q_max": (8,),
        "static_bits": (3, 4, 5, 6, 8),
        "seeds": (10, 11, 12, 13),
    }
    return _seed_by_seed(
        designs.quality_cost(scale, **{**CIFAR_RESNET8, **settings, **choices})
    )


def cifar_figure_3_q_max_6(scale: str = "background", **choices: Any) -> list[RunSpec]:
    """Return the runs of figure 3 at q_max 6 on JPEG copies of CIFAR-10: ten schedules and static 6.

    33 runs of ResNet-8 with three seeds, 17 minutes each on a core: 4.7 hours.

    Paper: section 4.2, figure 3.
    """
    settings = {"q_max": (6,), "static_bits": (6,), "seeds": (10, 11, 12)}
    return _seed_by_seed(
        designs.quality_cost(scale, **{**CIFAR_RESNET8, **settings, **choices})
    )


def cifar_table_1(scale: str = "background", **choices: Any) -> list[RunSpec]:
    """Return the runs of table 1 on JPEG copies of CIFAR-10: nine arms without our controls, as in the paper.

    36 runs of ResNet-8 with four seeds: 6.5 hours. Deficits last 5, 10, 25, 50 and 100 % of the normal training of 10
    epochs, which follows them; windows of half the training begin after 6, 12 and 25 % of it.

    Paper: section 5, table 1.
    Differs: the paper's normal training has 256,000 steps, and its shortest deficit is 6 % of it.
    """
    settings = {
        "deficit_starts": (244, 488, 975),
        "seeds": (10, 11, 12, 13),
        "controls": False,
    }
    return _seed_by_seed(
        designs.deficit_scan(scale, **{**CIFAR_RESNET8, **settings, **choices})
    )


def digits_q_max_6(scale: str = "demo", **choices: Any) -> list[RunSpec]:
    """Return the runs of the q_max 6 half of figure 3 on scikit-learn's digits.

    150 runs with ten seeds, 2 minutes.

    Paper: section 4.2, figure 3.
    """
    settings = {"dataset": "digits", "model": "mlp6", "q_max": (6,), "seeds": range(10)}
    return designs.quality_cost(scale, **{**settings, **choices})


def characters_q_max_6(scale: str = "demo", **choices: Any) -> list[RunSpec]:
    """Return the runs of the q_max 6 half of figure 7, left, on characters.

    120 runs with eight seeds, 3 minutes.

    Paper: section 4.4, figure 7.
    """
    settings = {"dataset": "pydoc", "model": "lstm", "q_max": (6,), "seeds": range(8)}
    return designs.quality_cost(scale, **{**settings, **choices})


def facebook_q_max_6(scale: str = "demo", **choices: Any) -> list[RunSpec]:
    """Return the runs of the q_max 6 half of figure 6 on Facebook's graph: a GCN with FP-Agg.

    88 runs with eight seeds, 6 minutes.

    Paper: section 4.3, figure 6.
    """
    settings = {"q_max": (6,), "static_bits": (6,), "seeds": range(8)}
    return designs.quality_cost(scale, **{**FACEBOOK_GCN, **settings, **choices})


def facebook_q_agg(scale: str = "demo", **choices: Any) -> list[RunSpec]:
    """Return the runs of the Q-Agg half of figure 6 on Facebook's graph: a GCN.

    88 runs with eight seeds, 10 minutes.

    Paper: section 4.3, figure 6.
    """
    return designs.q_agg(
        scale, **{**FACEBOOK_GCN, "static_bits": (8,), "seeds": range(8), **choices}
    )


def cora_q_agg(scale: str = "demo", **choices: Any) -> list[RunSpec]:
    """Return the runs of the Q-Agg half of figure 6 on Cora: a GCN.

    88 runs with eight seeds, 5 minutes.

    Paper: section 4.3, figure 6.
    """
    settings = {"dataset": CORA, "model": "gcn", "static_bits": (8,), "seeds": range(8)}
    return designs.q_agg(scale, **{**settings, **choices})


def facebook_sage(scale: str = "demo", **choices: Any) -> list[RunSpec]:
    """Return the runs of the half of figure 6 for OGBN-Products on Facebook's graph: FP-Agg and Q-Agg, GraphSAGE.

    66 runs with three seeds: ten schedules and static 8 with each aggregation.

    Paper: section 4.3, figure 6.
    """
    settings = {**FACEBOOK_SAGE, "static_bits": (8,), "seeds": range(3), **choices}
    return designs.quality_cost(scale, **settings) + designs.q_agg(scale, **settings)


def facebook_fanout(scale: str = "demo", **choices: Any) -> list[RunSpec]:
    """Return the runs of footnote 4 on Facebook's graph: 8 to 64 sampled neighbours, FP-Agg and Q-Agg, GraphSAGE.

    24 runs with three seeds.

    Paper: section 4.3.
    """
    return designs.fanout(scale, **{**FACEBOOK_SAGE, "seeds": range(3), **choices})


# A BERT of two layers that starts from random weights, and the subset of XNLI that has English training pairs.
XNLI_SUBSET: dict[str, Any] = {
    "language": "en",
    "test_languages": ("en", "es", "ur"),
    "steps": 618,
    "q_min": 5,
    "n_cycles": 2,
    "length": 64,
    "dropout": 0.1,
    "learning_rates": (5e-4, 1e-3),
    "train_pairs": None,
    "valid_pairs": None,
    "test_pairs": None,
}


def xnli_figure_7(scale: str = "demo", **choices: Any) -> list[RunSpec]:
    """Return the runs of figure 7, right, on a subset of XNLI: a BERT of two layers without pretraining.

    72 runs with three seeds and two learning rates: ten schedules and static 8, and static 6 with 6-bit gradients. Two
    minutes each on a core: 1.3 hours.

    Paper: section 4.4, figure 7.
    """
    settings = {"task": "entailment", "seeds": range(3), **XNLI_SUBSET, **choices}
    runs = designs.quality_cost(
        scale, "xnli", "bert_small", **{"static_bits": (8,), **settings}
    )
    if "static_bits" in choices or "q_max" in choices:
        return _seed_by_seed(runs)
    six = {**settings, "schedules": (), "static_bits": (6,), "q_max": (6,)}
    return _seed_by_seed(
        runs + designs.quality_cost(scale, "xnli", "bert_small", **six)
    )


def xnli_cycles(scale: str = "demo", **choices: Any) -> list[RunSpec]:
    """Return the runs that compare one and two cycles on a subset of XNLI.

    36 runs: three schedules with three seeds and two learning rates, 40 minutes.

    Paper: section 4.4.
    """
    settings = {
        "task": "entailment",
        "schedules": ("CR", "RR", "ER"),
        "seeds": range(3),
        **XNLI_SUBSET,
        **choices,
    }
    if "n_cycles" not in choices:
        del settings["n_cycles"]
    return designs.cycles(scale, "xnli", "bert_small", **settings)


def _seed_by_seed(specs: Sequence[RunSpec]) -> list[RunSpec]:
    """Return runs ordered by seed, so that an interrupted grid holds all arms of its first seeds."""
    arms = [*FIRST_ARMS, *SUITE]

    def rank(spec: RunSpec) -> tuple[int, int]:
        return spec.seed, arms.index(spec.arm) if spec.arm in arms else len(arms)

    return sorted(specs, key=rank)


class StandIn(NamedTuple):
    """A grid on stand-in data."""

    function: Callable[..., list[RunSpec]]
    artefact: str  # of the paper, such as "figure_3"
    scale: str
    design: str = (
        "quality_cost"  # the function of ``designs`` whose parameters it takes
    )


STAND_INS: dict[str, StandIn] = {
    "cifar10-jpeg/figure_3": StandIn(cifar_figure_3, "figure_3", "background"),
    "cifar10-jpeg/figure_3_q_max_6": StandIn(
        cifar_figure_3_q_max_6, "figure_3", "background"
    ),
    "cifar10-jpeg/table_1": StandIn(
        cifar_table_1, "table_1", "background", "deficit_scan"
    ),
    "digits/q_max_6": StandIn(digits_q_max_6, "figure_3", "demo"),
    "facebook/q_max_6": StandIn(facebook_q_max_6, "figure_6", "demo"),
    "facebook/q_agg": StandIn(facebook_q_agg, "figure_6", "demo"),
    "cora/q_agg": StandIn(cora_q_agg, "figure_6", "demo"),
    "facebook/sage": StandIn(facebook_sage, "figure_6", "demo"),
    "facebook/fanout": StandIn(facebook_fanout, "section_4.3", "demo"),
    "pydoc/q_max_6": StandIn(characters_q_max_6, "figure_7", "demo"),
    "xnli/figure_7": StandIn(xnli_figure_7, "figure_7", "demo"),
    "xnli/one_and_two_cycles": StandIn(xnli_cycles, "section_4.4", "demo"),
}
