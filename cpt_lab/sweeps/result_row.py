"""Result row: the typed record of one training run, as every store holds it.

``ResultRow`` lists the fields with their types and units. Rules that other modules need are marks on the fields:
``row_format`` checks the types of ``CHECKED`` fields and reports two rows of one run that differ in an ``OUTCOME``
field; ``verify`` runs a spec again and compares ``EXACT`` fields without a tolerance. Without torch.

Not every row has every field: a failed run ends before it has metrics, and earlier releases wrote fewer fields. A
field is never renamed or given another meaning, so that old rows load.

A new field that tables show as a column also goes into ``COLUMN_TYPES`` and ``_outcome`` of ``analysis.run_table``;
into ``UNUSED_COLUMNS`` of ``analysis.claims``, if no claim reads it; and into ``OF_THE_PROCESS`` of
``tests/sweeps/test_sweep.py``, if it differs between two runs of one spec.

>>> fields_marked(EXACT)[:3]
('key', 'status', 'relative_cost')
"""

from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypedDict,
    get_args,
    get_origin,
    get_type_hints,
)

CHECKED = "checked"  # a row whose field has another JSON type is refused
OUTCOME = "outcome"  # two finished rows of one run contradict each other if they differ in this field
EXACT = "exact"  # a rerun has to give an equal value on any machine

Status = Literal["ok", "diverged", "failed"]


class MetricValue(TypedDict):
    """One evaluated number of a run."""

    name: str  # such as "accuracy" (a share of 1), "perplexity" or "loss" (nats)
    split: str  # "valid" or "test"
    when: str  # "final", "best_valid" or "best_test": the step that the number is taken from
    precision: str  # "q_max", or "current": the bits of that step
    step: int  # number of training steps before the evaluation
    bits: int  # forward bits during the evaluation
    value: float | None  # None where the number was not finite


class ResultRow(TypedDict, total=False):
    """Spec, result and provenance of one training run."""

    # identity
    digest: str  # first 32 hex digits of the row's SHA-256; only in files
    schema: int  # version of this list of fields
    key: Annotated[str, CHECKED, EXACT]  # hash of the spec
    numerics: Annotated[int, CHECKED]  # version of the package's arithmetic
    spec: Annotated[dict[str, Any], CHECKED]  # a RunSpec as a dict
    title: str  # model and data set, for tables and figures

    # outcome
    status: Annotated[Status, CHECKED, OUTCOME, EXACT]
    error: Annotated[
        str, CHECKED
    ]  # traceback or reason; only of runs that did not end well
    relative_cost: Annotated[
        float, EXACT
    ]  # BitOps relative to static training at q_max
    noise_exposure: Annotated[float | None, EXACT]  # None for ladders other than affine
    share_at_q_min: Annotated[float, EXACT]  # share of the steps, from 0 to 1
    data_checksum: Annotated[
        str, OUTCOME, EXACT
    ]  # of the tensors that the run trained on
    data_report: str  # digest of the data report stored beside the rows
    steps: Annotated[int, OUTCOME, EXACT]  # training steps that ran
    bitops: Annotated[
        dict[str, float], CHECKED, OUTCOME, EXACT
    ]  # by convention: "paper", "per_op"
    metrics: Annotated[list[MetricValue], CHECKED, OUTCOME]
    loss: Annotated[
        list[float], CHECKED, OUTCOME
    ]  # mean training loss of up to 20 equal parts of the run
    evaluations: Annotated[
        list[dict[str, Any]], CHECKED, OUTCOME
    ]  # up to 20, evenly spaced, with the last

    # execution
    seconds: float  # training time, without the loading of data
    device: str  # "cpu", or the name of the GPU
    # bytes: reserved by torch on a GPU; on a CPU the peak of the process (ru_maxrss, never reset between runs)
    peak_memory: int
    captured: dict[
        str, Any
    ]  # CUDA only: steps replayed from a CUDA graph, and why not all of them
    provenance: Annotated[
        dict[str, Any], CHECKED
    ]  # commit, start, machine, kernels, versions

    store: str  # file that the row was loaded from; only in tables, never in a file


_HINTS = get_type_hints(ResultRow, include_extras=True)
STATUSES: tuple[Status, ...] = get_args(Status)


def fields_marked(mark: str) -> tuple[str, ...]:
    """Return the names of the fields with a mark, in the order of ``ResultRow``."""
    return tuple(
        name
        for name, hint in _HINTS.items()
        if mark in getattr(hint, "__metadata__", ())
    )


def value_type(name: str) -> type:
    """Return the type of a field without what it contains: ``dict``, ``list``, ``str``, ``int`` or ``float``."""
    hint = _HINTS[name]
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]

    if get_origin(hint) is Literal:
        return str

    if get_origin(hint) is UnionType:  # such as float | None
        hint = get_args(hint)[0]

    return get_origin(hint) or hint


def column_types(*names: str) -> dict[str, str]:
    """Return the pandas dtypes of fields, for tables with a column of the same name."""
    dtypes = {str: "string", int: "Int64", float: "float64"}
    return {name: dtypes[value_type(name)] for name in names}


OUTCOME_FIELDS = fields_marked(OUTCOME)
EXACT_FIELDS = fields_marked(EXACT)
CHECKED_TYPES = {name: value_type(name) for name in fields_marked(CHECKED)}
