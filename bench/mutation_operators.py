"""Generator of small wrong changes of Python lines, for ``bench.mutants --changed``.

It swaps ``<`` and ``<=``, ``+`` and ``-``, ``and`` and ``or``, ``max`` and ``min``, negates a condition, adds 1 to a
number, leaves out an argument or a call, or returns nothing. Annotations, decorators, patterns and raised errors stay.

>>> for change in changes("def least(a, b):\\n    return a < b and max(a, 1)\\n", {2}):
...     print(change.description)
line 2: `return a < b and max(a, 1)` becomes `return`
line 2: `a < b and max(a, 1)` becomes `a < b or max(a, 1)`
line 2: `a < b` becomes `a <= b`
line 2: `max(a, 1)` becomes `min(a, 1)`
line 2: `1` becomes `2`
"""

from __future__ import annotations

import ast
import copy
import re
import subprocess
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

from bench import PACKAGES

SWAPPED_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
SWAPPED_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
}
SWAPPED_CALLS = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "floor": "ceil",
    "ceil": "floor",
}
SKIPPED_FIELDS = {
    "annotation",
    "returns",
    "decorator_list",
    "pattern",
}  # fields of nodes


class Change(NamedTuple):
    """One wrong change of a source file.

    Attributes:
        description: line number, old and new code, in one line.
        before: the changed lines, with as many lines around them as make the text unique in the file.
        after: text that replaces it.
    """

    description: str
    before: str
    after: str


def changed_lines(
    ref: str, root: Path, folders: Sequence[str] = PACKAGES
) -> dict[str, set[int]]:
    """Return the numbers of the lines below ``folders`` that a commit does not have, by Python file.

    Uncommitted changes of the working tree and untracked files count.

    Raises:
        ValueError: if ``ref`` names no commit.
    """
    lines_by_file: dict[str, set[int]] = {}
    options = (
        "--unified=0",
        "--no-renames",
        "--no-ext-diff",
        "--no-color",
        "--dst-prefix=b/",
    )
    for line in git(root, "diff", *options, ref, "--", *folders).splitlines():
        if header := re.match(r"\+\+\+ b/(.*\.py)$", line):
            lines = lines_by_file.setdefault(header[1], set())
        elif line.startswith("+++ "):  # another file, or one that is gone
            lines = set()
        elif hunk := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            lines.update(range(int(hunk[1]), int(hunk[1]) + int(hunk[2] or 1)))
    for name in git(
        root,
        "ls-files",
        "--others",
        "--exclude-standard",
        "--",
        *(f"{f}/*.py" for f in folders),
    ).splitlines():
        lines_by_file[name] = set(
            range(1, (root / name).read_text(encoding="utf-8").count("\n") + 2)
        )
    return {name: lines for name, lines in lines_by_file.items() if lines}


def git(root: Path, *words: str) -> str:
    """Return what git prints in a folder.

    Raises:
        ValueError: if it fails.
    """
    process = subprocess.run(["git", *words], cwd=root, text=True, capture_output=True)
    if process.returncode:
        raise ValueError(f"git {' '.join(words)}: {process.stderr.strip()}")
    return process.stdout


def changes(source: str, lines: Collection[int]) -> list[Change]:
    """Return the wrong changes of some lines of a source, outer nodes first."""
    mutations = (
        pair for node in _nodes(ast.parse(source)) for pair in _mutations(node)
    )
    return [
        _change(source, old, new)
        for old, new in mutations
        if not lines_of(old).isdisjoint(lines)
    ]


def lines_of(node: ast.expr | ast.stmt) -> set[int]:
    """Return the numbers of the lines that a node is on."""
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, (ast.Raise, ast.JoinedStr)):
        return
    yield node
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in SKIPPED_FIELDS:
                yield from _nodes(child)


def _mutations(
    node: ast.AST,
) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr | ast.stmt]]:
    """Yield pairs of a node, or of a part of it, and a wrong replacement."""
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                yield (
                    node,
                    _replace_fields(
                        node,
                        ops=[*ops[:i], SWAPPED_COMPARISONS[type(op)](), *ops[i + 1 :]],
                    ),
                )
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in SWAPPED_OPERATORS:
            yield node, _replace_fields(node, op=SWAPPED_OPERATORS[type(op)]())
        case ast.BoolOp(op=op):
            yield (
                node,
                _replace_fields(
                    node, op=ast.Or() if isinstance(op, ast.And) else ast.And()
                ),
            )
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield node, operand
        case ast.Constant(value=bool(value)):
            yield node, ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield node, ast.Constant(value + 1)
        case ast.Call(func=func, keywords=keywords):
            match func:
                case ast.Name(id=name) if name in SWAPPED_CALLS:
                    yield (
                        node,
                        _replace_fields(node, func=ast.Name(SWAPPED_CALLS[name])),
                    )
                case ast.Attribute(attr=name) if name in SWAPPED_CALLS:
                    yield (
                        node,
                        _replace_fields(
                            node, func=_replace_fields(func, attr=SWAPPED_CALLS[name])
                        ),
                    )
            for i, keyword in enumerate(keywords):
                if keyword.arg is not None:
                    yield (
                        node,
                        _replace_fields(
                            node, keywords=keywords[:i] + keywords[i + 1 :]
                        ),
                    )
        case ast.Return(value=ast.expr() as value) if not (
            isinstance(value, ast.Constant) and value.value is None
        ):
            yield node, ast.Return()
        case ast.Expr(value=ast.Call()):
            yield node, ast.Pass()
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield from _negations(test)
        case ast.comprehension(ifs=tests):
            for test in tests:
                yield from _negations(test)


def _negations(test: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield a condition and its negation, unless another rule changes the condition."""
    if not isinstance(test, (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant)):
        yield test, ast.UnaryOp(ast.Not(), test)


def _replace_fields(node: Any, **fields: Any) -> Any:
    """Return a copy of a node with some fields replaced."""
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


def _change(source: str, old: ast.expr | ast.stmt, new: ast.expr | ast.stmt) -> Change:
    lines = source.encode().splitlines(keepends=True)  # columns count bytes
    first, last = old.lineno - 1, old.end_lineno or old.lineno
    text = ast.unparse(new)
    if isinstance(new, ast.expr) and not isinstance(
        new, (ast.Constant, ast.Name, ast.Attribute, ast.Subscript, ast.Call)
    ):
        text = f"({text})"  # whatever stands around it
    changed = (
        lines[first][: old.col_offset]
        + text.encode()
        + lines[last - 1][old.end_col_offset :]
    )
    start, stop = first, last
    while source.find(before := b"".join(lines[start:stop]).decode()) != source.rfind(
        before
    ):
        start, stop = (start - 1, stop) if start else (0, stop + 1)
    after = b"".join([*lines[start:first], changed, *lines[last:stop]]).decode()
    old_text, new_text = (
        shorten(ast.unparse(node), 80, placeholder=" ...") for node in (old, new)
    )
    return Change(
        f"line {old.lineno}: `{old_text}` becomes `{new_text}`", before, after
    )
