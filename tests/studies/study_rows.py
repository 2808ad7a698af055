"""Synthetic rows of a study with a known answer."""

import json
import math

from tests.helpers import row_of


def row_at(spec, quality, own_quality=None, status="ok"):
    """Return a row of a quality at 8 bits and at its own bits: points above 50 %, or percent below perplexity 10."""
    text = spec.recipe.task == "language_model"

    def value(quality):
        return 10 * math.exp(-quality / 100) if text else 0.5 + quality / 100

    row = row_of(spec, value(quality), "perplexity" if text else "accuracy", status)
    own_value = value(quality if own_quality is None else own_quality)
    row["metrics"] += [
        {**m, "precision": "current", "value": own_value} for m in row["metrics"]
    ]
    return row


def rate_lines(study, qualities):
    """Lines of the rows by which the settings of a study are chosen; ``qualities(spec)`` are those of ``row_at``."""
    lines = []
    for spec in (spec for case in study.cases for spec in study.rates(case)):
        row = row_at(spec, *qualities(spec))
        for m in row["metrics"]:
            loss = (
                {"name": "loss", "value": math.log(m["value"])}
                if m["name"] == "perplexity"
                else {}
            )
            m |= {**loss, "split": "valid"}
        lines.append(json.dumps({**row, "schema": 1}) + "\n")
    return lines
