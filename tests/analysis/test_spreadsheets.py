"""CSV files that spreadsheets do not evaluate and that programs read back exactly."""

import ast
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from cpt_lab.analysis.spreadsheets import FORMULA_STARTS, without_formula, write_csv
from cpt_lab.paths import paper_dir

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("start", FORMULA_STARTS)
def test_write_csv_escapes_formulas(start, tmp_path):
    text = f"{start}cmd|' /C calc'!A0"
    frame = pd.DataFrame(
        {text: [text, "static 8"], "seed": [0, 1]},
        index=pd.Index([text, "ben"], name="x"),
    )
    write_csv(frame, tmp_path / "table.csv", index_label="student")
    read = pd.read_csv(tmp_path / "table.csv")
    assert read.columns.tolist() == ["student", f"'{text}", "seed"]
    assert read.student.tolist() == [f"'{text}", "ben"]
    assert read.iloc[:, 1].tolist() == [f"'{text}", "static 8"]


@pytest.mark.parametrize(
    "cell",
    [
        "-0.5",
        "+3",
        "-1e-5",
        "-inf",
        -0.5,
        -3,
        np.float64(-1.0),
        None,
        True,
        "",
        "a=b",
        "3-4",
    ],
)
def test_without_formula_keeps_numbers_and_texts(cell):
    assert without_formula(cell) is cell


def test_write_csv_keeps_numbers_exact(tmp_path):
    frame = pd.DataFrame(
        {
            "loss": [-0.1, 1e-300, np.nan],
            "steps": pd.array([-1, 2, None], dtype="Int64"),
            "ok": True,
        }
    )
    write_csv(frame, tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == frame.to_csv(index=False)
    assert pd.read_csv(tmp_path / "a.csv").loss.equals(frame.loss)


@pytest.mark.parametrize("separator", [";", "\t", "; "])
def test_write_csv_quotes_foreign_separators(separator, tmp_path):
    text = f"ada{separator}=1+1"
    write_csv(pd.DataFrame({"student": [text]}), tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_bytes().splitlines()[1] == f'"{text}"'.encode()
    assert pd.read_csv(tmp_path / "a.csv").student.tolist() == [text]


def test_write_csv_escapes_lone_surrogates(tmp_path):
    write_csv(pd.DataFrame({"student": ["a\udcff"]}, dtype=object), tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == "student\na\\udcff\n"


def test_write_csv_roundtrips_claims_table(tmp_path):
    claims = paper_dir() / "claims.csv"
    write_csv(
        pd.read_csv(claims, dtype=str, keep_default_na=False), tmp_path / "claims.csv"
    )
    assert (tmp_path / "claims.csv").read_bytes() == claims.read_bytes()


def test_write_csv_is_only_csv_writer():
    """Require all packages and tools to write tables with `write_csv`."""
    places = set()
    for package in (
        "cpt_core",
        "cpt_extras",
        "cpt_lab",
        "cpt_lessons",
        "bench",
        "book",
        "browser",
        "examples",
    ):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Attribute) and node.attr in (
                    "to_csv",
                    "to_excel",
                    "writer",
                    "DictWriter",
                ):
                    places.add(str(path.relative_to(ROOT)))
    assert places == {"cpt_lab/analysis/spreadsheets.py"}
