"""Synthetic runs of studies with known qualities, and answers as text for golden files."""

import json
import math

import numpy as np

from cpt_lab.analysis.rendering import terminal
from cpt_lab.analysis.run_table import table
from tests.helpers import row_of


def is_text(spec):
    return spec.recipe.task == "language_model"


def value_of(spec, quality):
    """Return an accuracy, points above 50 %, or a perplexity, percent below 10."""
    return 10 * math.exp(-quality / 100) if is_text(spec) else 0.5 + quality / 100


def row_at(spec, quality, own_quality=None):
    """Return a row of a quality at 8 bits, and of one at the bits of its last step."""
    name = "perplexity" if is_text(spec) else "accuracy"
    row = row_of(spec, value_of(spec, quality), name)
    own_quality = quality if own_quality is None else own_quality
    at_own = {"precision": "current", "value": value_of(spec, own_quality)}
    row["metrics"].append({**row["metrics"][0], **at_own})
    return row


def runs_with(specs, runs, quality, own_gain=None, lost=None):
    """Return runs with the qualities of ``row_at``, functions of a spec.

    Args:
        specs: specs of the runs, in order.
        runs: table of any rows of these specs.
        quality: points or percent at 8 bits.
        own_gain: what the bits of the last step add; None for nothing.
        lost: status of a lost run, or "" for one that ended well; None for no lost runs.
    """
    top = [quality(spec) for spec in specs]
    own = [
        q + (own_gain(s) if own_gain else 0) for q, s in zip(top, specs, strict=True)
    ]
    text = np.array([is_text(spec) for spec in specs])
    columns = {}
    for suffix, qualities in (("", top), ("_current", own)):
        values = np.array([*map(value_of, specs, qualities)])
        columns[f"accuracy{suffix}"] = np.where(text, np.nan, values)
        columns[f"perplexity{suffix}"] = np.where(text, values, np.nan)
    if lost:
        columns["status"] = [lost(spec) or "ok" for spec in specs]
    return runs.assign(**columns)


def runs_of(specs):
    """Return the table of runs of one quality."""
    return table(row_at(spec, 0.0) for spec in specs)


def noise_of(spec):
    """Return normal noise of a run, equal in every call, of standard deviation 1."""
    return np.random.default_rng([spec.seed, *spec.key.encode()]).normal()


def rate_lines(study, qualities):
    """Return the rows by which a study selects its settings; ``qualities(spec)`` are those of ``row_at``."""
    lines = []
    for spec in (spec for case in study.cases for spec in study.rates(case)):
        row = row_at(spec, *qualities(spec))
        for m in row["metrics"]:
            m["split"] = "valid"
            if m["name"] == "perplexity":
                m |= {"name": "loss", "value": math.log(m["value"])}
        lines.append(json.dumps({**row, "schema": 1}) + "\n")
    return lines


def answers_text(answers):
    """Return the outcomes, p-values and effects of the questions that have an answer."""
    lines = []
    for a in answers:
        if not a.primary:
            continue
        lines.append(f"{a.question}: {a.outcome}")
        lines.append(f"  p {a.p:.2g}, corrected {a.adjusted:.2g}, {a.num_lost} lost")
        lines += [f"  {effect}" for effect in a.primary]
        lines += [f"    {effect}" for effect in a.secondary]
        lines += [f"  at {rule}: {outcome}" for rule, outcome in a.by_rule]
    return "".join(f"{line}\n" for line in lines)


def titled(texts):
    return "".join(f"=== {title}\n{text}\n" for title, text in texts.items())


def sections_text(sections):
    """Return titles, notes and tables of sections, with the texts of their figures."""
    parts = []
    for section in sections:
        parts += [f"--- {section.title}", *section.notes]
        if section.figure:
            parts.append(f"figure: {section.figure.get_suptitle()}")
            parts += [t.get_text() for ax in section.figure.axes for t in ax.texts]
        if section.table is not None:
            parts.append(terminal(section.table))
    return "\n".join(parts) + "\n"
