"""``book.reading_length``, and the number of lines of the method in notebook 00."""

from notebook_files import FOLDER, read

from book.reading_length import MAX_WORDS, Count, count, sentences


def test_method_of_notebook_00_has_25_lines():
    """Limit the method, from the first check to the first prediction, to 25 lines without this package."""
    cells = {c.id: c.source for c in read(FOLDER / "00_start_here.ipynb").cells}
    method = f"{cells['00-30']}\n{cells['00-34']}"
    assert len([line for line in method.splitlines() if line.strip()]) <= 25
    assert not {"cpt", "exercises", "pictures", "schedules", "P"} & set(
        method.replace(".", " ").split()
    )


def test_reading_length_counts_words_and_sentences():
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
