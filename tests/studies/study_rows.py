"""Rows of a study, made up so that the answer is known."""

import json
import math

from tests.helpers import row_of


def row_at(spec, quality, own=None, status="ok"):
    """A row of some quality at 8 bits, and at its own: points above 50 %, or percent below a perplexity of 10."""
    text = spec.recipe.task == "language_model"

    def value(quality):
        return 10 * math.exp(-quality / 100) if text else 0.5 + quality / 100

    made = row_of(spec, value(quality), "perplexity" if text else "accuracy", status)
    at_own = value(quality if own is None else own)
    made["metrics"] += [
        {**m, "precision": "current", "value": at_own} for m in made["metrics"]
    ]
    return made


def rates(study, qualities):
    """Lines of the rows by which the settings of a study are chosen; ``qualities(spec)`` are those of ``row_at``."""
    lines = []
    for spec in (spec for case in study.cases for spec in study.rates(case)):
        made = row_at(spec, *qualities(spec))
        for m in made["metrics"]:
            loss = (
                {"name": "loss", "value": math.log(m["value"])}
                if m["name"] == "perplexity"
                else {}
            )
            m |= {**loss, "split": "valid"}
        lines.append(json.dumps({**made, "schema": 1}) + "\n")
    return lines
