"""Page of the notebooks' parameters, and its generator."""

import json

from book import parameters
from cpt_lessons.notebooks import notebooks


def test_parameters_page_is_up_to_date():
    assert parameters.PAGE.read_text() == parameters.page(notebooks()), (
        "run: python -m book.parameters"
    )


def test_declared_reads_types_defaults_and_comments():
    source = 'a: list = ["x", 1]  # one | two # three\nb = None\nc = True\nd: dict = {\n    "#": 1,\n}  # last\n'
    assert [
        tuple(parameter) for parameter in parameters.declared_parameters(source)
    ] == [
        ("a", "list", '["x", 1]', "one | two # three"),
        ("b", "", "None", ""),
        ("c", "bool", "True", ""),
        ("d", "dict", '{\n    "#": 1,\n}', "last"),
    ]


def test_parameters_page_lists_scale_only_notebooks_separately(tmp_path):
    def write(name, source):
        cells = [
            {
                "cell_type": "markdown",
                "metadata": {},
                "source": [f"# {name}\n", "text"],
            },
            {
                "cell_type": "code",
                "metadata": {"tags": ["parameters"]},
                "source": [source],
            },
        ]
        path = tmp_path / f"{name}.ipynb"
        path.write_text(json.dumps({"cells": cells}))
        return path

    paths = [
        write("first", 'scale = "smoke"'),
        write("second", "q_max: list = [8]  # a | b"),
    ]
    page = parameters.page(paths).removeprefix(parameters.HEAD)
    assert "## [second](../notebooks/second.ipynb)" in page
    assert "| `q_max` | list | `[8]` | a \\| b |" in page
    assert page.rstrip().endswith("- [first](../notebooks/first.ipynb)")
