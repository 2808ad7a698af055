"""The answers of the predictions, kept apart from the notebooks: nobody reads them there before having chosen."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple


class Prediction(NamedTuple):
    """What came out, and why.

    Attributes:
        answer: the letter of the right option.
        because: a sentence or two.
    """

    answer: str
    because: str


PREDICTIONS = {
    "static 4": Prediction(
        "b",
        "Over 40 seeds CR is ahead by a tenth of a point, and costs a third more. Only 2 bits throughout are too few.",
    ),
    "cheapest profile": Prediction(
        "c", "REX stays near q_min for most of a cycle; the exponential spends its time near q_max."
    ),
    "falling bits": Prediction(
        "b",
        "Only what is multiplied is rounded; the parameters are kept in float32, and go on from where they were.",
    ),
    "zero": Prediction(
        "a",
        "By luck: the levels are -1, 0, 1, 2. In general 0 is no grid point unless it is the minimum, as after ReLU.",
    ),
    "two bits": Prediction(
        "c",
        "Almost all gradients are 0 or near it, and 0 is no level: they all move to the level beside it, so that the "
        "error is larger than they are. A few large values have taken the range.",
    ),
    "one bit more": Prediction(
        "b", "One bit more makes nearly twice as many steps of the same range: each of them is half as wide."
    ),
    "unit": Prediction(
        "b",
        "Only 10^13 gives 9.16, 7.04 and 5.59 (5.6 if rounded; the paper has 5.5) - and only with the REX constant 0.9 "
        "and two backward products.",
    ),
    "equal cost": Prediction(
        "c", "Static 5 costs 0.547 of static 8, the medium group 0.63; the interval of their difference holds 0."
    ),
    "operations": Prediction(
        "c", "The heads run at full width, 256 channels, on the finest map; the backbone has 64 to 128 there."
    ),
    "aggregation": Prediction(
        "c",
        "Of the GCN, the interval of Q-Agg minus FP-Agg at 8 bits holds 0 and leaves out half a point.",
    ),
    "six bits": Prediction("b", "About 2 % on Penn Treebank, with both seeds; 6 bits with 8-bit gradients lose 0.2 %."),
    "deficit": Prediction(
        "b", "The low steps did no harm that lasts, and taught nothing that lasts: the 32 steps were lost time."
    ),
    "one budget": Prediction(
        "c", "On the digits; the graph and the characters, printed below, do not agree on static bits."
    ),
    "phases": Prediction(
        "b", "Seconds change between 9 bits and 8, as int8 codes have 8 bits. Only the second schedule goes there."
    ),
}


def with_answers(cells: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the cells of a notebook, below each that reveals an answer a collapsed one that holds it.

    For pages: they have no kernel, so that nobody can choose there, and ``reveal`` tells nothing.
    """
    for cell in cells:
        yield cell
        if cell["cell_type"] == "code":
            for question in re.findall(r'reveal\(\s*"([^"]+)"', "".join(cell["source"])):
                answer, because = PREDICTIONS[question]
                said = f"<details><summary>Answer</summary>({answer}) {html.escape(because, quote=False)}</details>"
                name = re.sub(r"\W+", "-", f"answer {question}")
                yield {"cell_type": "markdown", "id": name, "metadata": {}, "source": said}
