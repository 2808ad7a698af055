"""The answers of the predictions, kept apart from the notebooks: nobody reads them there before having chosen."""

import html
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# what came out, the letter of an option, and why
PREDICTIONS: dict[str, tuple[str, str]] = {
    "static 4": (
        "b",
        "Over 40 seeds CR is ahead by a tenth of a point, and costs a third more. Only 2 bits throughout are too few.",
    ),
    "cheapest profile": (
        "a",
        "REX stays near q_min for most of a cycle; the exponential spends its time near q_max.",
    ),
    "backward share": (
        "c",
        "One product of 3 by 3 bits costs 9, two of 3 by 8 bits cost 48: 48 of 57 is 84 %.",
    ),
    "two bits": (
        "a",
        "Almost all gradients are 0 or near it, and 0 is no level: they all move to the level beside it, so that the "
        "error is larger than they are. A few large values have taken the range.",
    ),
    "equal cost": (
        "b",
        "Over ten seeds the difference is 0.00 points in the mean, with an interval from -1.74 to 1.74 points.",
    ),
    "ten seeds": (
        "b",
        "The mean is now -0.36 points, with an interval from -1.44 to 0.73. The first five seeds were lucky ones.",
    ),
    "second seed": (
        "b",
        "It was -1.2 points. What a detector reaches depends on its seed, and one difference says little.",
    ),
    "aggregation": (
        "c",
        "Of the GCN, the interval of Q-Agg minus FP-Agg at 8 bits holds 0 and leaves out half a point.",
    ),
    "perplexity": (
        "a",
        "The loss of RR is 0.1 nats higher, and the interval of three seeds leaves out 0.",
    ),
    "deficit": (
        "b",
        "The low steps did no harm that lasts, and taught nothing that lasts: the 32 steps were lost time.",
    ),
    "steps at 2 bits": (
        "c",
        "A step at 8 bits costs more than three steps at 3 bits; most of the others have to pay for it.",
    ),
    "phases": (
        "b",
        "Seconds change between 9 bits and 8, as int8 codes have 8 bits. Only the second schedule goes there.",
    ),
}


def with_answers(cells: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the cells of a notebook, below each that reveals an answer a collapsed one that holds it.

    For pages: they have no kernel, so that nobody can choose there, and ``reveal`` tells nothing.
    """
    for cell in cells:
        yield cell
        if cell["cell_type"] == "code":
            for question in re.findall(
                r'reveal\(\s*"([^"]+)"', "".join(cell["source"])
            ):
                answer, because = PREDICTIONS[question]
                details = f"<details><summary>Answer</summary>({answer}) {html.escape(because, quote=False)}</details>"
                name = re.sub(r"\W+", "-", f"answer {question}")
                yield {
                    "cell_type": "markdown",
                    "id": name,
                    "metadata": {},
                    "source": details,
                }
