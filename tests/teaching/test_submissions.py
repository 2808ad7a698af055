"""Submitted notebooks: results of exercises, and unreadable files, which are named while the rest is read."""

import itertools
import json
import os
from pathlib import Path

import pandas as pd
import pytest
from helpers import refused

from cpt_lessons import submissions
from cpt_lessons.notebooks import collected
from cpt_lessons.submissions import read_submissions


def check_cell(*printed, source="a"):
    outputs = [{"text": [f"{line}\n"]} for line in printed]
    return {"cell_type": "code", "source": source, "outputs": outputs}


CHECK = check_cell("exercise 1.1: correct", source=['exercises.check("1.1", x)'])
GOOD = json.dumps({"cells": [CHECK]})
NO_NOTEBOOK, NO_LIST, NO_TEXT = (
    "no notebook, which has a list of cells",
    "no list of outputs",
    "is no text",
)


def cells(*given: object) -> str:
    return json.dumps({"cells": [CHECK, *given]})


# what is handed in -> words of the reason
ODD = {
    "no cells": ("{}", NO_NOTEBOOK),
    "null": ("null", NO_NOTEBOOK),
    "a list": ("[1]", NO_NOTEBOOK),
    "a text": ('"cells"', NO_NOTEBOOK),
    "format 3": ('{"worksheets": [{"cells": []}]}', NO_NOTEBOOK),
    "cells are null": ('{"cells": null}', NO_NOTEBOOK),
    "cells are an object": ('{"cells": {"a": 1}}', NO_NOTEBOOK),
    "a cell is empty": (cells({}), "cell 2 has no source"),
    "a cell is a text": (cells("x"), "cell 2 has no source"),
    "a cell is a list": (cells([]), "cell 2 has no source"),
    "the source is a number": (cells({"source": 3}), NO_TEXT),
    "the source is null": (cells({"source": None}), NO_TEXT),
    "a line is null": (cells({"source": ["a", None]}), NO_TEXT),
    "outputs are null": (cells({"source": "a", "outputs": None}), NO_LIST),
    "outputs are an object": (
        cells({"source": "a", "outputs": {"text": "x"}}),
        NO_LIST,
    ),
    "an output is a text": (cells({"source": "a", "outputs": ["x"]}), NO_LIST),
    "a printed text is a number": (
        cells({"source": "a", "outputs": [{"text": 1}]}),
        "an output of cell 2 is no text",
    ),
    "a printed line is an object": (
        cells({"source": "a", "outputs": [{"text": [{}]}]}),
        "an output of cell 2",
    ),
    "not JSON": ("{", "Expecting property name"),
    "empty": ("", "it is empty"),
    "nested": ("[" * 100_000, "nested too deep"),
    "binary": (b"\x00\x89PNG\xff", "save it as UTF-8"),
    "Latin-1": (
        GOOD.replace("correct", "korrekt ü").encode("latin-1"),
        "save it as UTF-8",
    ),
    "UTF-16": (GOOD.encode("utf-16"), "save it as UTF-8"),
}


@pytest.fixture
def handed_in(tmp_path):
    """Provide two good notebooks and a function that adds a third."""

    def write(student: str, content: str | bytes, name: str = "03.ipynb") -> Path:
        path = tmp_path / "class" / student / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    write("anna", GOOD)
    write("ben", GOOD)
    return write


def check_others(found: submissions.Submissions) -> None:
    assert found.table.loc[["anna", "ben"], "1.1"].tolist() == ["correct", "correct"]


@pytest.mark.parametrize("kind", ODD)
def test_read_submissions_names_malformed_notebook(kind, handed_in, tmp_path):
    content, reason = ODD[kind]
    path = handed_in("zoe", content)
    found = read_submissions(tmp_path / "class")
    check_others(found)
    assert found.table.loc["zoe", "1.1"] == "cannot be read"
    (sentence,) = found.unreadable
    assert sentence.startswith(f"{path} cannot be read: ")
    assert reason in sentence
    with pytest.warns(UserWarning, match="03.ipynb cannot be read"):
        assert collected(tmp_path / "class").equals(found.table)


def test_collected_tabulates_submissions(tmp_path, command):
    """Tabulate the last result of every exercise, of students in folders and files."""
    right, wrong = "exercise 03.1: correct: yes", "exercise 03.2: not yet. 5 is wanted"
    unrun = [check_cell(source=f'exercises.check("03.{i}", answer)') for i in (1, 2)]
    handed_in = {
        "ada/03_images.ipynb": [check_cell(f"{right}\n{wrong}")],
        "ada/08.ipynb": [
            check_cell("exercise 08.1: not attempted yet", "exercise 08.1: correct")
        ],
        "ada/.ipynb_checkpoints/08.ipynb": [check_cell("exercise 08.1: not yet")],
        "bo.ipynb": [check_cell("exercise 03.1: not attempted yet")],
        "eve/empty.ipynb": [],
        "fay/03.ipynb": unrun,
    }
    for name, content in handed_in.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(json.dumps({"cells": content}))
    status, out, _ = command("collect", tmp_path, "--out", tmp_path / "table.csv")
    table = pd.read_csv(tmp_path / "table.csv", index_col="student")
    assert (status, "not attempted" in out) == (0, True)
    assert table.columns.tolist() == ["03.1", "03.2", "08.1"]
    assert table.T.to_dict("list") == {
        "ada": ["correct", "not yet", "correct"],
        "bo": ["not attempted", "not handed in", "not handed in"],
        "eve": ["not handed in"] * 3,
        "fay": ["not run", "not run", "not handed in"],
    }
    missing, message = tmp_path / "nobody", r"there is no folder .*nobody"
    refused(message, collected, missing, error=FileNotFoundError)
    message = r"no notebook below .* says anything of an exercise"
    refused(message, collected, tmp_path / "eve")


RESULTS = ("correct", "not yet", "not attempted", "not run")


def notebook_with(result: str) -> str:
    printed = () if result == "not run" else (f"exercise 1.1: {result}",)
    cell = check_cell(*printed, source='exercises.check("1.1", x)')
    return json.dumps({"cells": [cell]})


@pytest.mark.parametrize(("best", "other"), list(itertools.combinations(RESULTS, 2)))
def test_read_submissions_keeps_best_result_of_copies(best, other, handed_in, tmp_path):
    """Whatever the files are called, a copy with less takes nothing from a student."""
    for student, original, copy in (("ina", best, other), ("joe", other, best)):
        handed_in(student, notebook_with(original), "09.ipynb")
        handed_in(student, notebook_with(copy), "09-Copy1.ipynb")
    table = read_submissions(tmp_path / "class").table
    assert table.loc[["ina", "joe"], "1.1"].tolist() == [best, best]


@pytest.mark.parametrize(
    "text",
    [
        "debug 1exercise 1.1: correct\n",
        "no line end.exercise 1.1: correct\n",
        "50 %\rexercise 1.1: correct\n",
        "exercise 1.1: not yet. Hint: x\ndebug exercise 1.1: correct\n",
    ],
)
def test_read_submissions_finds_result_behind_printed_text(text, handed_in, tmp_path):
    source = 'print(x, end="")\nexercises.check("1.1", x)'
    cell = {"cell_type": "code", "source": source, "outputs": [{"text": text}]}
    handed_in("zoe", json.dumps({"cells": [cell]}))
    assert read_submissions(tmp_path / "class").table.loc["zoe", "1.1"] == "correct"


def test_read_submissions_names_special_files_and_links(handed_in, tmp_path):
    zoe = handed_in("zoe", GOOD).parent
    os.mkfifo(zoe / "a_pipe.ipynb")
    (zoe / "b_folder.ipynb").mkdir()
    (zoe / "c_loop.ipynb").symlink_to(zoe / "c_loop.ipynb")
    (zoe / "d_nothing.ipynb").symlink_to(tmp_path / "nowhere.ipynb")
    (zoe / "e_zeros.ipynb").symlink_to("/dev/zero")
    (zoe / "loop").symlink_to(zoe)
    (zoe / "elsewhere").symlink_to("/")
    found = read_submissions(tmp_path / "class")
    check_others(found)
    assert found.table.loc["zoe", "1.1"] == "correct"
    names = [sentence.split(" ")[0].rpartition("/")[2] for sentence in found.unreadable]
    others = [
        "a_pipe.ipynb",
        "b_folder.ipynb",
        "c_loop.ipynb",
        "d_nothing.ipynb",
        "e_zeros.ipynb",
    ]
    assert names == ["elsewhere", *others]
    assert "is a link to /, which is not followed" in found.unreadable[0]


def test_read_submissions_rejects_huge_notebook(handed_in, tmp_path):
    with handed_in("zoe", GOOD).open("ab") as file:
        file.truncate(20_000_000_000)  # it takes no space on the disk
    found = read_submissions(tmp_path / "class")
    check_others(found)
    assert "it has 20,000 MB, more than 100; clear its outputs" in found.unreadable[0]


def test_read_submissions_names_unreadable_folder(handed_in, tmp_path, monkeypatch):
    zoe = handed_in("zoe", GOOD).parent
    listed = os.scandir

    def scandir(path):
        if Path(path) == zoe:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    found = read_submissions(tmp_path / "class")
    check_others(found)
    assert found.unreadable == [f"{zoe} cannot be read: Permission denied"]


def test_read_submissions_accepts_output_of_common_tools(handed_in, tmp_path):
    """Read byte order marks, one-string sources, capital suffixes and lone surrogates."""
    handed_in("bom", b"\xef\xbb\xbf" + GOOD.encode())
    source = {
        "cell_type": "code",
        "source": "a",
        "outputs": [{"text": "\ud800 \nexercise 1.1: not yet"}],
    }
    handed_in(
        "half",
        json.dumps({"cells": [source, {"cell_type": "markdown", "source": "b"}]}),
    )
    handed_in("capitals", GOOD, "03.IPYNB")
    handed_in("mac", GOOD)
    handed_in("mac", b"\x00\x05\x16\x07", "._03.ipynb")
    handed_in("__MACOSX", b"\x00\x05\x16\x07", "._03.ipynb")
    (tmp_path / "class" / "without").mkdir()
    found = read_submissions(tmp_path / "class")
    check_others(found)
    correct = dict.fromkeys(("anna", "ben", "bom", "capitals", "mac"), "correct")
    assert found.table["1.1"].to_dict() == {**correct, "half": "not yet"}
    assert (found.unreadable, found.without_notebook) == ([], ["without"])


def test_collect_names_bad_notebooks_and_keeps_rest(handed_in, tmp_path, command):
    handed_in("=cmd|calc", GOOD)
    handed_in(os.fsdecode(b"z\xff\n\x1b[31m"), b"\xff")
    handed_in("yan", "[]")
    status, out, err = command(
        "collect", tmp_path / "class", "--out", tmp_path / "table.csv"
    )
    assert status == 1
    assert {"anna", "ben", "yan", "=cmd|calc", "z\\udcff\\n\\x1b[31m"} <= {
        line.split()[0] for line in out.splitlines()
    }
    assert [line.partition(" cannot be read: ")[0] for line in err.splitlines()] == [
        f"warning: {tmp_path}/class/yan/03.ipynb",
        f"warning: {tmp_path}/class/z\\udcff\\n\\x1b[31m/03.ipynb",
        "could not be read: 2, see the warnings above",
    ]
    table = pd.read_csv(tmp_path / "table.csv", index_col="student", dtype=str)
    assert table.loc[["'=cmd|calc", "anna"], "1.1"].tolist() == ["correct", "correct"]
