"""Generator of ``docs/parameters.md``, the page of the notebooks' parameters: ``python -m book.parameters``.

Every notebook declares its parameters in the cell that papermill reads, one a line: ``q_max: list = [8]  # a comment``.
The page has a table per notebook with name, type, default and comment.
"""

from __future__ import annotations

import ast
import json
import tokenize
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from cpt_extras.files import write_text
from cpt_lessons.notebooks import notebooks

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "parameters.md"

HEAD = """\
# Parameters of the notebooks

What each notebook can be run with. papermill takes them as `-p NAME VALUE`, a list as text, or from a file:

```sh
papermill notebooks/03_image_classification.ipynb out.ipynb -p scale demo -p schedules "[CR, RR]" -p static_bits "[]"
papermill notebooks/03_image_classification.ipynb out.ipynb -f notebooks/sweeps/03_cifar10_resnet74.yaml
papermill --help-notebook notebooks/03_image_classification.ipynb
```

`cpt run`, `cpt plan` and `cpt rows` take the same names as options, such as `--schedules CR RR --static-bits none`.
[Sweeps](sweeps.md) says more. A notebook refuses a name or a value that it does not know, before it trains anything.
`None` takes the value of the recipe, or of the scale.
"""


class Parameter(NamedTuple):
    """A parameter as a notebook declares it."""

    name: str
    type: str
    default: str
    comment: str


def declared_parameters(source: str) -> list[Parameter]:
    """Return the parameters that a cell declares, in order.

    Args:
        source: assignments of literals, with or without a type, each with a comment behind it or without.

    >>> declared_parameters("q_max: list = [8]  # [6, 8] for both halves")
    [Parameter(name='q_max', type='list', default='[8]', comment='[6, 8] for both halves')]
    """
    comments: dict[int, str] = {}
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# ")
    parameters = []
    statements: list[Any] = ast.parse(source).body
    for node in statements:
        if isinstance(node, ast.AnnAssign):
            name, type_name = ast.unparse(node.target), ast.unparse(node.annotation)
        else:
            name, type_name = (
                ast.unparse(node.targets[0]),
                _type_name(ast.literal_eval(node.value)),
            )
        default = ast.get_source_segment(source, node.value) or ""
        parameters.append(
            Parameter(name, type_name, default, comments.get(node.end_lineno, ""))
        )
    return parameters


def _type_name(value: Any) -> str:
    return "" if value is None else type(value).__name__


def notebook_parameters(path: Path) -> tuple[str, list[Parameter]]:
    """Return the title of a notebook and its parameters."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    title = "".join(cells[0]["source"]).splitlines()[0].lstrip("# ")
    tagged = [
        cell for cell in cells if "parameters" in cell["metadata"].get("tags", ())
    ]
    return title, [
        parameter
        for cell in tagged
        for parameter in declared_parameters("".join(cell["source"]))
    ]


def page(paths: list[Path]) -> str:
    """Return the page in Markdown: a table per notebook, then the notebooks whose only parameter is the scale."""
    parts, scale_only = [HEAD], []
    for path in paths:
        title, parameters = notebook_parameters(path)
        link = f"[{title}](../notebooks/{path.name})"
        if [parameter.name for parameter in parameters] == ["scale"]:
            scale_only.append(link)
        elif parameters:
            lines = [
                f"## {link}",
                "",
                "| name | type | default | comment |",
                "|---|---|---|---|",
            ]
            parts.append("\n".join([*lines, *map(_line, parameters), ""]))
    if scale_only:
        lines = [
            "## Notebooks with a scale alone",
            "",
            *(f"- {link}" for link in scale_only),
            "",
        ]
        parts.append("\n".join(lines))
    return "\n".join(parts)


def _line(parameter: Parameter) -> str:
    comment = parameter.comment.replace("|", "\\|")
    return (
        f"| `{parameter.name}` | {parameter.type} | `{parameter.default}` | {comment} |"
    )


def main() -> None:
    """Write the page."""
    write_text(PAGE, page(notebooks()))
    print(f"{PAGE.relative_to(ROOT)} written")


if __name__ == "__main__":
    main()
