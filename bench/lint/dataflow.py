"""Dependence of notebook cells on a call, traced through the names that their statements assign."""

from __future__ import annotations

import ast
from typing import Any, NamedTuple


class Names(NamedTuple):
    """Names in a statement.

    Attributes:
        words: all names that are read, and attributes.
        variables: variables that are read.
        assigned: variables that are assigned.
    """

    words: set[str]
    variables: set[str]
    assigned: set[str]


def dependent_cells(notebook: Any, roots: set[str]) -> set[str]:
    """Return the ids of the cells whose last statement uses a root, or a name that was assigned from one."""
    dependent: set[str] = set()
    ids = set()
    for cell in notebook.cells:
        depends = False
        for statement in (
            ast.parse(cell.source).body if cell.cell_type == "code" else []
        ):
            names = names_in(statement)
            depends = bool(names.words & roots or names.variables & dependent)
            dependent = (
                dependent | names.assigned if depends else dependent - names.assigned
            )
        if depends:
            ids.add(cell.id)
    return ids


def names_in(statement: ast.stmt) -> Names:
    """Return the names that a statement reads and assigns; loop variables are neither."""
    nodes = list(ast.walk(statement))
    loops = [
        node.target for node in nodes if isinstance(node, ast.For | ast.comprehension)
    ]
    local = {
        name.id
        for target in loops
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }
    local |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    variables = [
        node for node in nodes if isinstance(node, ast.Name) and node.id not in local
    ]
    loaded = {node.id for node in variables if isinstance(node.ctx, ast.Load)}
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        loaded.add(statement.target.id)  # `x += 1` reads x, too
    assigned = {node.id for node in variables if isinstance(node.ctx, ast.Store)}
    assigned |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return Names(loaded | attributes, loaded, assigned)
