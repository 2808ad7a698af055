"""Tests of ``book.reading_length``, which counts what there is to read, and of the method's lines in notebook 00."""

from notebook_dataflow import FOLDER, read

from book.reading_length import MAX_WORDS, Count, count, sentences


def test_the_method_has_25_lines_in_which_nothing_is_ours():
    """The cells between the first check and the first prediction, and the quantiser: what the title promises."""
    cells = {c.id: c.source for c in read(FOLDER / "00_start_here.ipynb").cells}
    method = f"{cells['00-30']}\n{cells['00-34']}"
    assert len([line for line in method.splitlines() if line.strip()]) <= 25
    assert not {"cpt", "exercises", "pictures", "schedules", "P"} & set(
        method.replace(".", " ").split()
    )


def test_what_is_counted():
    code = (
        "import math\nfrom cpt_lessons.parameters import start\n\nP = start()\n# a comment\n"
        "x = (\n    P.scale\n)\nprint(math.pi)"
    )
    text = f"# A heading: not prose\n\nOne claim: and another. Two $a: b$ things:\n\n- {'word ' * (MAX_WORDS + 1)}end."
    cells = [
        {"cell_type": "code", "id": "install", "source": "import os"},
        {"cell_type": "code", "id": "a", "source": code},
        {"cell_type": "markdown", "id": "b", "source": text.splitlines(keepends=True)},
    ]
    found = count({"cells": cells})
    assert found == Count(
        words=len(text.split()), long=1, colons=1, lines=7, plumbing=4
    )
    assert found.share == 4 / 7
    parts = ["One.", "Two of 0.5 points.", "Is it *three*?", "Yes"]
    assert sentences(" ".join(parts)) == parts
