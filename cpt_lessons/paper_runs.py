"""The runs of the paper's figures from the parameters of a notebook: one function per figure.

A notebook with sweeps declares its parameters in one cell, typed and with a comment each. The names mean the same in
``papermill``, YAML files, ``cpt run``, ``cpt plan`` and ``cpt_lab.experiments.designs``:

    scale: str = "smoke"  # smoke | demo | background | paper
    dataset: str = "digits"  # digits | cifar10 | ... | a folder/
    model: str = ""  # "" takes the first model of the data set
    preset: str = "ours"  # ours | authors
    schedules: list = ["LR", "LT", "CR", "CT", "RR", "RTV", "RTH", "ER", "ETV", "ETH"]
    static_bits: list = None  # [] for none; None takes the usual ones of the scale
    q_max: list = [8]  # [6, 8] gives both halves of the figure
    q_min: int = None  # None takes the recipe's value, here and below
    q_grad: int = None
    n_cycles: int = None
    steps: int = None
    learning_rate: float = None
    seeds: list = None
    workers: int = 2
    device: str = "auto"

and checks them with ``P = check_parameters("image", scale=scale, dataset=dataset, ...)``. Notebook 05 has
``aggregations: list = ["fp", "quantized"]``, 06 has ``pairs: str = ""`` for sentence pairs. Notebook 07 has, instead of
``schedules``, ``static_bits``, ``q_min`` and ``n_cycles``:

    deficit_bits: int = None  # bits in a deficit
    deficit_lengths: list = None  # steps of deficits at the start; 0 is no deficit, [] trains none of these
    deficit_starts: list = None  # first steps of windows of low precision, [] for none
    deficit_window: int = None  # steps of every window
    decay: list = ["recipe"]  # of the learning rate: recipe | constant | step | cosine; several make several sets
    controls: bool = True  # also train controls of the same length, which the paper lacks

>>> from cpt_lessons.parameters import check_parameters
>>> P = check_parameters("image", dataset="digits", schedules=["CR", "RR"], static_bits=[], q_max=[8], seeds=[0, 1])
>>> len(figure_3(P))
4
"""

from collections.abc import Sequence
from typing import Any

from cpt_lab.experiments import designs
from cpt_lab.experiments.spec import RunSpec
from cpt_lessons.exercises import warnings_as_text
from cpt_lessons.parameters import Parameters

_FIGURE_PARAMETERS = (
    "schedules",
    "static_bits",
    "q_max",
    "q_min",
    "q_grad",
    "n_cycles",
    "steps",
    "learning_rate",
    "seeds",
    "preset",
)
_STATIC_PARAMETERS = ("q_max", "q_grad", "steps", "learning_rate", "seeds", "preset")
_DEFICIT_PARAMETERS = (
    "deficit_bits",
    "deficit_lengths",
    "deficit_starts",
    "deficit_window",
    "decay",
    "controls",
    "q_max",
    "q_grad",
    "steps",
    "learning_rate",
    "seeds",
    "preset",
)

# Static precisions that are usual where a run takes minutes, or where a second task is trained beside the first.
_DETECTION_BITS = {"smoke": (8,), "demo": (4, 8)}
_PAIRS_BITS = {"smoke": (8,), "demo": (3, 5, 8)}


def figure_3(P: Parameters) -> list[RunSpec]:
    """Return the runs of figure 3: image classification, every schedule and static precision with every seed.

    Paper: section 4.2.
    """
    return _figure(P, "image", P.dataset, _model(P))


def figure_4(P: Parameters) -> list[RunSpec]:
    """Return the runs of figure 4: object detection. At smoke scale static 8 is trained, at demo scale static 4 and 8.

    Paper: section 4.2.
    """
    from cpt_lessons.detection import pretrained_or_scratch  # needs torch

    start = pretrained_or_scratch(P.scale)
    return _figure(
        P, "detection", P.dataset, _model(P), _DETECTION_BITS.get(P.scale), **start
    )


def figure_5(P: Parameters) -> list[RunSpec]:
    """Return the runs of figure 5: float32 and quantised aggregation at static q_max.

    There are none with ``static_bits=[]``, or with one of the ``aggregations`` alone.

    Paper: section 4.3.
    """
    parameters = _set_parameters(P, "static_bits", "aggregations")
    kinds = parameters.get("aggregations", ["fp", "quantized"])
    if parameters.get("static_bits") == [] or len(set(kinds)) == 1:
        return []
    with warnings_as_text(P.scale):
        return designs.aggregation(
            P.scale, P.dataset, _model(P), **_set_parameters(P, *_STATIC_PARAMETERS)
        )


def figure_6(P: Parameters) -> list[RunSpec]:
    """Return the runs of figure 6: node classification, with the aggregations of ``aggregations``, both if not given.

    Paper: section 4.3.
    """
    specs = []
    for kind in _set_parameters(P, "aggregations").get(
        "aggregations", ("fp", "quantized")
    ):
        specs += _figure(P, "graph", P.dataset, _model(P), aggregation=kind)
    return specs


def figure_7(P: Parameters) -> list[RunSpec]:
    """Return the runs of figure 7: a language model on ``dataset``, and a classifier of sentence pairs on ``pairs``.

    Either may be "". ``model`` is the one of the text, or of the pairs when they are alone.

    Raises:
        ValueError: for a learning rate or steps for both, which need different ones.

    Paper: section 4.4.
    """
    pairs = vars(P).get("pairs", "")
    if P.dataset and pairs:
        for name in ("learning_rate", "steps"):
            if name in _set_parameters(P, name):
                raise ValueError(
                    f"{name}: expected None for a text and sentence pairs together, which need different values; "
                    f"got {vars(P)[name]!r}; pairs='' or dataset='' leaves one of them out"
                )
    specs = []
    if P.dataset:
        specs += _figure(P, "language_model", P.dataset, _model(P))
    if pairs:
        specs += _figure(
            P,
            "entailment",
            pairs,
            None if P.dataset else _model(P),
            _PAIRS_BITS.get(P.scale),
        )
    return specs


def section_5(P: Parameters) -> list[RunSpec]:
    """Return the runs of figure 8 and table 1: deficits at the start, windows, and their controls, for every decay.

    Paper: section 5.
    """
    return designs.deficit_scan(
        P.scale,
        P.dataset,
        _model(P),
        task=P.task,
        **_set_parameters(P, *_DEFICIT_PARAMETERS),
    )


def _figure(
    P: Parameters,
    task: str,
    dataset: str,
    model: str | None,
    usual_bits: Sequence[int] | None = None,
    **fields: Any,
) -> list[RunSpec]:
    """Return the runs of quality against cost.

    Args:
        P: the parameters of the notebook.
        task: of the runs.
        dataset: of the runs.
        model: None takes the first of the data set.
        usual_bits: static precisions that are trained beside q_max without ``static_bits``; None takes the usual ones.
        fields: of the recipe.
    """
    choices = _set_parameters(P, *_FIGURE_PARAMETERS)
    if usual_bits is not None and "static_bits" not in choices:
        tops = choices.get("q_max", (8,))
        choices["static_bits"] = sorted(
            {*tops, *(bits for bits in usual_bits if bits < max(tops))}
        )
    with warnings_as_text(P.scale):
        return designs.quality_cost(
            P.scale, dataset, model, task=task, **choices, **fields
        )


def _model(P: Parameters) -> str | None:
    return vars(P).get("model") or None


def _set_parameters(P: Parameters, *names: str) -> dict[str, Any]:
    """Return the parameters that are not None."""
    return {name: vars(P)[name] for name in names if vars(P).get(name) is not None}
