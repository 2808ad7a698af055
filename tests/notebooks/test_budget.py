"""How much there is to read may only fall: ``python -m book.words`` counts, and these are the ceilings."""

import json

from flow import FOLDER, read

from book.words import LONG, Count, count, sentences

# Words, long sentences, colons, lines of code, lines of plumbing. Lower them when a notebook has become shorter.
CEILINGS = {
    "00": (1122, 0, 3, 80, 18),
    "01": (899, 0, 6, 48, 12),
    "02": (949, 0, 3, 56, 13),
    "03": (939, 0, 2, 63, 17),
    "04": (842, 0, 0, 55, 13),
    "05": (849, 0, 0, 60, 15),
    "06": (815, 0, 0, 60, 15),
    "07": (861, 0, 5, 52, 13),
    "08": (947, 0, 0, 52, 13),
    "09": (736, 0, 1, 48, 12),
    "10": (697, 0, 5, 43, 17),
    "11": (603, 0, 2, 36, 13),
    "12": (770, 0, 2, 52, 19),
}


def test_a_notebook_does_not_grow(path):
    found = count(json.loads(path.read_text(encoding="utf-8")))
    over = [name for name, n, most in zip(Count._fields, found, CEILINGS[path.name[:2]], strict=True) if n > most]
    assert over == [], found
    assert path.name[:2] != "00" or found.share <= 0.25  # mostly plain torch


def test_the_course_is_read_in_an_evening():
    """Its ten notebooks; nobody has to read the appendices."""
    words, _, _, lines, _ = map(sum, zip(*(most for number, most in CEILINGS.items() if number < "10"), strict=True))
    assert words <= 9000
    assert lines <= 600


def test_the_method_has_25_lines_in_which_nothing_is_ours():
    """The cells between the first check and the first prediction, and the quantiser: what the title promises."""
    cells = {c.id: c.source for c in read(FOLDER / "00_start_here.ipynb").cells}
    method = f"{cells['00-30']}\n{cells['00-34']}"
    assert len([line for line in method.splitlines() if line.strip()]) <= 25
    assert not {"cpt", "exercises", "pictures", "schedules", "P"} & set(method.replace(".", " ").split())


def test_what_is_counted():
    code = (
        "import math\nfrom cpt_lessons.parameters import start\n\nP = start()\n# a comment\n"
        "x = (\n    P.scale\n)\nprint(math.pi)"
    )
    text = f"# A heading: not prose\n\nOne claim: and another. Two $a: b$ things:\n\n- {'word ' * (LONG + 1)}end."
    cells = [
        {"cell_type": "code", "id": "install", "source": "import os"},
        {"cell_type": "code", "id": "a", "source": code},
        {"cell_type": "markdown", "id": "b", "source": text.splitlines(keepends=True)},
    ]
    found = count({"cells": cells})
    assert found == Count(words=len(text.split()), long=1, colons=1, lines=7, plumbing=4)
    assert found.share == 4 / 7
    parts = ["One.", "Two of 0.5 points.", "Is it *three*?", "Yes"]
    assert sentences(" ".join(parts)) == parts
