"""When the rule of a claim was changed last: a fingerprint of every rule, and its date in ``data/paper/claims.csv``.

A rule is what is measured, by which function, how it is tested, and the code of the verdicts. A line whose rule is not
what it was needs a new date (``python -m bench.rules``), so that nobody can take rows for a test of a rule that was
made with them at hand. Dates need no git where the package is installed; with it, ``git log -S FINGERPRINT`` names the
commit.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import textwrap
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cpt_core.analysis import claims, statistics
from cpt_core.analysis.effects import Claim, arm_minus, minus, named_arm, quality_of
from cpt_core.analysis.measures import MEASURES

CODE = (
    claims.verdict,
    claims.said,
    claims.holm,
    claims.combined,
    statistics.paired,
    statistics.interval,
    named_arm,
    minus,
    arm_minus,
    quality_of,
    claims.meant,
)
LINE = ("measure", "a", "b", "tasks", "only", "test", "margin", "grids")


def fingerprint(claim: Claim) -> str:
    """Return eight hexadecimal digits that change with the rule of a claim; not with comments, docstrings or layout."""
    line = [getattr(claim, name) for name in LINE]
    code = [words_of(function) for function in (*CODE, MEASURES[claim.measure])]
    return hashlib.sha256(json.dumps([line, code]).encode()).hexdigest()[:8]


def words_of(function: Callable[..., Any]) -> list[list[str]]:
    """Return what a function is made of, the same on every Python: without comments and docstrings."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    return [
        [type(node).__name__, *(repr(v) for _, v in ast.iter_fields(node) if isinstance(v, (str, int, float)))]
        for node in ast.walk(tree)
    ]


def renewed(claim: Claim, now: str) -> Claim:
    """Return a claim with the fingerprint of its rule; dated ``now`` (ISO 8601, UTC) if that is not the one it had."""
    found = fingerprint(claim)
    return claim if found == claim.rule else replace(claim, since=now, rule=found)
