"""Dates of the claims' rules in ``data/paper/claims.csv``: ``python -m bench.date_claim_rules`` renews them.

A rule is what is measured, by which function, how it is tested, and the code of the verdicts, with all functions,
methods and constants of ``cpt_lab.analysis`` that they call on; a fingerprint tells whether it is what it was. Lines
whose rule has not changed keep their dates; others get a new one, so that nobody can take rows for a test of a rule
that was made with them at hand. Commit the file together with the change; ``git log -S FINGERPRINT`` then names the
commit.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cache
from typing import Any

import pandas as pd

from cpt_lab.analysis import claims
from cpt_lab.analysis.claim_measures import MEASURES
from cpt_lab.analysis.effects import Claim
from cpt_lab.analysis.run_table import table, tuned
from cpt_lab.analysis.spreadsheets import write_csv
from cpt_lab.paths import paper_dir

ANALYSIS = "cpt_lab.analysis"
CODE: tuple[Callable[..., Any], ...] = (
    claims.judge_claims,
    claims.judge,
    claims.combined,
    claims.Entry.verdicts,
    claims.runs_for_claim,
    table,
    tuned,
)
HOME = "cpt_core.analysis"  # what this folder was called when the first rules were dated: a new name is no new rule
LINE = ("measure", "a", "b", "tasks", "only", "test", "margin", "grids")


def fingerprint(claim: Claim) -> str:
    """Return eight hexadecimal digits that identify the rule of a claim.

    Comments, docstrings and layout of the code do not change them.
    """
    line = [getattr(claim, name) for name in LINE]
    code = collect_code([*CODE, MEASURES[claim.measure]])
    return hashlib.sha256(
        json.dumps([line, sorted(code.items())]).encode()
    ).hexdigest()[:8]


def collect_code(functions: Iterable[Callable[..., Any]]) -> dict[str, Any]:
    """Return the code of functions, and of what they use of the analysis, by name: functions, methods, constants."""
    pending, code_by_name = (
        [inspect.unwrap(function) for function in functions],
        dict[str, Any](),
    )
    while pending:
        function = pending.pop()
        module = HOME + function.__module__.removeprefix(ANALYSIS)
        name = f"{module}.{function.__qualname__}"
        if name in code_by_name:
            continue
        code_by_name[name] = code_words(function)
        for node in _syntax_nodes(function):
            pending += _find_methods(node, function)
            value = _resolve_name(node, function)
            if inspect.isfunction(value):
                if value.__module__.startswith(ANALYSIS):
                    pending.append(value)
            elif isinstance(value, re.Pattern):
                code_by_name[f"{module}.{ast.unparse(node)}"] = repr(value.pattern)
            elif isinstance(value, (str, int, float, tuple)) or _is_plain_table(value):
                code_by_name[f"{module}.{ast.unparse(node)}"] = repr(value)
    return code_by_name


@cache
def _syntax_nodes(function: Callable[..., Any]) -> list[ast.AST]:
    """Return the syntax nodes of a function."""
    return list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))))


def _resolve_name(node: ast.AST, function: Callable[..., Any]) -> Any:
    """Return the value of a global name, or of a module's attribute, that a function uses; None for other nodes.

    Decorated functions are unwrapped.
    """
    name = node.value if isinstance(node, ast.Attribute) else node
    if not isinstance(name, ast.Name) or name.id in function.__code__.co_varnames:
        return None
    value = function.__globals__.get(name.id)
    if isinstance(node, ast.Attribute):
        value = getattr(value, node.attr, None) if inspect.ismodule(value) else None
    return inspect.unwrap(value) if callable(value) else value


def _find_methods(node: ast.AST, function: Callable[..., Any]) -> list[Any]:
    """Return the methods of an attribute's name, of all classes of the analysis that a function's module has."""
    if not isinstance(node, ast.Attribute):
        return []
    methods = []
    for value in function.__globals__.values():
        if inspect.isclass(value) and value.__module__.startswith(ANALYSIS):
            member = vars(value).get(node.attr)
            for name in ("fget", "func", "__func__"):  # of properties and class methods
                member = getattr(member, name, member)
            method = inspect.unwrap(member) if callable(member) else None
            if inspect.isfunction(method):
                methods.append(method)
    return methods


def _is_plain_table(value: Any) -> bool:
    """Return whether a value is a dict of strings and numbers."""
    return isinstance(value, dict) and all(
        isinstance(entry, (str, int, float)) for entry in value.values()
    )


@cache
def code_words(function: Callable[..., Any]) -> list[list[str]]:
    """Return the syntax nodes of a function without docstrings, in a form that every Python version shares."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            node.body = node.body[1:]
    return [
        [
            type(node).__name__,
            *(
                repr(v)
                for _, v in ast.iter_fields(node)
                if isinstance(v, (str, int, float))
            ),
        ]
        for node in ast.walk(tree)
    ]


def update_date(claim: Claim, timestamp: str) -> Claim:
    """Return a claim with its current fingerprint, dated ``timestamp`` (ISO 8601, UTC) if that changed."""
    current = fingerprint(claim)
    return (
        claim
        if current == claim.rule
        else replace(claim, since=timestamp, rule=current)
    )


def update_fingerprint(claim: Claim) -> Claim:
    """Return a claim with the fingerprint of its rule and an unchanged date: for renames that change no verdict."""
    return replace(claim, rule=fingerprint(claim))


def main(arguments: Sequence[str] = ()) -> None:
    """Rewrite the file and print the changed lines; with ``--keep-dates`` the fingerprints alone are updated.

    Keep the dates only after a refactoring with equal verdicts and effects before and after.
    """
    timestamp = datetime.now(UTC).isoformat(timespec="seconds")
    keep_dates = "--keep-dates" in arguments
    old_claims = claims.claims()
    new_claims = []
    for claim in old_claims:
        new_claims.append(
            update_fingerprint(claim) if keep_dates else update_date(claim, timestamp)
        )
    lines = pd.DataFrame(map(asdict, new_claims))
    lines["margin"] = [
        f"{margin:g}" if margin or test in ("more", "no_worse", "equal") else ""
        for margin, test in zip(lines["margin"], lines["test"], strict=True)
    ]
    write_csv(lines, paper_dir() / "claims.csv")
    changed = [b.id for a, b in zip(old_claims, new_claims, strict=True) if a != b]
    names = ", ".join(changed) or "none has changed"
    action = "have a new fingerprint" if keep_dates else f"dated {timestamp}"
    print(f"{len(changed)} of {len(new_claims)} rules {action}: {names}")


if __name__ == "__main__":
    main(sys.argv[1:])
