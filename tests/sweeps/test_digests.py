"""Digests of rows: changed rows are detected, named and ignored, but never deleted."""

import itertools
import json
import re
import tempfile
import warnings
from pathlib import Path

import pytest
from helpers import quietly, refused, specs_of, stored_row
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cpt_lab.analysis import run_table
from cpt_lab.commands import app
from cpt_lab.experiments.spec import key_of
from cpt_lab.sweeps import row_format, stores
from cpt_lab.sweeps.row_format import Integrity, NotIntactWarning, integrity

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)
SPECS = quietly(specs_of, "CR", "RR", "LR")


def rows():
    return [stored_row(spec, 0.5) for spec in SPECS]


def written(store, *rows):
    store.write_bytes(
        b"".join(
            line if isinstance(line, bytes) else row_format.line_of(line)
            for line in rows
        )
    )
    return store


def plain(row):
    """Return the line of a row as written before lines had digests."""
    return json.dumps(row, sort_keys=True).encode() + b"\n"


def put(row, path, value):
    """Set a value deep inside a row."""
    *names, last = path
    for name in names:
        row = row[name]
    row[last] = value


EDITS = {  # where, what instead, and what is said of it where the digest was written anew
    "accuracy": (("metrics", 0, "value"), 0.999, None),
    "bitops": (("bitops", "paper"), 1.0, None),
    "cost": (("relative_cost",), 0.1, None),
    "time": (("seconds",), 0.1, None),
    "commit": (("provenance", "commit"), "1" * 40, None),
    "something new": (("remark",), "very good", None),
    "status": (("status",), "diverged", None),
    "a status of its own": (
        ("status",),
        "great",
        "status 'great' is none of ok, diverged, failed",
    ),
    "status of another type": (("status",), ["ok"], r"status is \[\"ok\"\], no str"),
    "learning rate": (
        ("spec", "recipe", "lr"),
        0.123,
        "key .* is not that of its spec, [0-9a-f]{16}",
    ),
    "seed": (("spec", "seed"), 7, "key .* is not that of its spec"),
    "true for one": (("spec", "seed"), False, "key .* is not that of its spec"),
    "foreign key": (("key",), SPECS[1].key, "key .* is not that of its spec"),
    "key of another type": (("key",), [1], r"key is \[1\], no str"),
    "metrics": (("metrics",), None, "metrics is null, no list"),
    "spec": (("spec",), "x", 'spec is "x", no dict'),
}


def forged(row, digest=None):
    """Return the line of a row with a valid or a given digest."""
    text = row_format.canonical(row)
    return (
        b'{"digest": "'
        + (digest or row_format.digest(text)).encode()
        + b'", '
        + text[1:]
        + b"\n"
    )


def certify(store):
    """Write the digests of rows into a separate file, as for rows older than digests in lines."""
    old = (json.loads(line) for line in store.read_bytes().splitlines())
    row_format.sidecar_path(store).write_text(
        "".join(f"{row_format.digest(row_format.canonical(row))}\n" for row in old)
    )


# what is seen by a digest, whatever was edited, and what also where the digest was written anew or left out
BY_DIGEST = itertools.cycle(["in the line", "in another's line", "beside the store"])
BY_CONTENT = itertools.cycle(["written anew", "none"])
CASES = [(name, next(BY_DIGEST)) for name in EDITS]
CASES += [(name, next(BY_CONTENT)) for name, (*_, reason) in EDITS.items() if reason]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_load_rows_ignores_and_names_edited_row(name, how, tmp_path):
    path, value, reason = EDITS[name]
    store, (first, second, third) = tmp_path / "rows.jsonl", rows()
    if how == "beside the store":
        certify(written(store, *map(plain, (first, second, third))))
    edited = json.loads(json.dumps(first))
    put(edited, path, value)
    old = row_format.digest(row_format.canonical(first))
    line = {
        "in the line": forged(edited, old),
        "in another's line": plain({"digest": old, **edited}),
        "written anew": forged(edited),
        "beside the store": plain(edited),
        "none": plain(edited),
    }[how]
    others = (
        (plain(second), plain(third)) if how == "beside the store" else (second, third)
    )
    before = written(store, others[0], line, others[1]).read_bytes()
    beside = r"its digest is not in rows\.sha256"
    said = (
        beside
        if how == "beside the store"
        else "it was changed after it was written: its digest is that of another"
    )
    with pytest.warns(
        NotIntactWarning,
        match=rf"do not count: .*rows\.jsonl, line 2: {reason or said}",
    ):
        assert stores.load_rows(store) == [second, third]
    assert stores.find_row(store, SPECS[0].key) is None
    with pytest.warns(NotIntactWarning):
        assert run_table.load(store).key.tolist() == [second["key"], third["key"]]
    assert str(integrity([store])).startswith("2 of 3 rows intact; does not count: ")
    assert (
        stores.append_row(store, first) == first
    )  # the run is done again, and what was there stays there
    assert store.read_bytes() == before + row_format.line_of(first)


@pytest.mark.parametrize(
    "dump",
    [
        lambda row: json.dumps(row),
        lambda row: json.dumps(row, indent=None, separators=(",", ":")),
        lambda row: json.dumps(row, ensure_ascii=False),
        lambda row: json.dumps(dict(reversed(row.items()))),
    ],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_digests_survive_rewriting_by_programs(dump, end, tmp_path):
    """Accept stores that were merged, sorted or reformatted."""
    odd = {
        **rows()[0],
        "title": '\u00fc \u2028 \\ " }{',
        "seconds": 1e-07,
        "steps": 10**16,
    }
    line = json.loads(row_format.line_of(odd))
    store = tmp_path / "rows.jsonl"
    store.write_bytes((dump(line) + end).encode())
    assert stores.load_rows(store) == [odd]
    assert integrity([store]) == Integrity(1)
    store.write_bytes((dump(odd) + end).encode())
    assert integrity([store]) == Integrity(1, bare=1)
    certify(store)
    assert integrity([store]) == Integrity(1)


TEXT = st.text(st.characters(), max_size=8)  # also halves of surrogate pairs
NUMBERS = (
    st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([1e-5, 1e16, 2**64, -0.0])
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
    ),
)


@given(
    st.dictionaries(TEXT, ANYTHING, max_size=4),
    st.dictionaries(TEXT, ANYTHING, max_size=3),
    st.booleans(),
)
@example(
    {}, {"file": ["\udcc3", "\u2028\x00\n", 2**64 - 1, -0.0, 5e-324, {"": None}]}, False
)  # a file's odd name
@settings(max_examples=50, deadline=None)
def test_row_of_any_content_round_trips(spec, more, old):
    row = {**more, "schema": 1, "key": key_of(spec), "spec": spec, "status": "ok"}
    row.pop("digest", None)
    assume(
        all(
            isinstance(row[name], kind)
            for name, kind in row_format.CHECKED_TYPES.items()
            if name in row
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "rows.jsonl"
        if old:
            certify(written(store, plain(row)))
        else:
            stores.append_row(store, row)
        assert integrity([store]) == Integrity(1)
        (read,) = stores.load_rows(store)
        assert json.dumps(read, sort_keys=True) == json.dumps(row, sort_keys=True)
        assert stores.find_row(store, row["key"]) is not None


def test_load_rows_reports_conflicting_results(tmp_path):
    store, (first, second, third) = tmp_path / "rows.jsonl", rows()
    failed = {**first, "status": "failed", "metrics": [], "error": "x"}
    later = {
        **first,
        "provenance": {**first["provenance"], "started": "2026-02-01"},
        "seconds": 2.0,
    }
    written(store, failed, first, second, later, third)
    assert stores.load_rows(store) == [
        later,
        second,
        third,
    ]  # the same numbers, and a failure before them
    other = json.loads(json.dumps(later))
    other["metrics"][0]["value"] = 0.9
    written(store, first, second, other)
    said = rf"rows\.jsonl, lines 1 and 3 have different results of run {first['key']}"
    with pytest.warns(NotIntactWarning, match=said):
        assert stores.load_rows(store) == [other, second]
    assert re.match(rf"3 of 3 rows intact; .*{said}", str(integrity([store])))


def test_integrity_reads_digests_of_old_rows(tmp_path):
    store, (first, second, third) = tmp_path / "rows.jsonl", rows()
    written(store, plain(first), second)
    # rows without a digest count, and the report mentions them
    assert stores.load_rows(store) == [first, second]
    assert str(integrity([store])) == "1 of 2 rows intact, 1 have no digest"
    (tmp_path / "rows.sha256").write_text(
        f"{row_format.digest(plain(first).strip())}\n"
    )
    assert str(integrity([store])) == "2 of 2 rows intact"
    stores.append_row(store, third)
    assert str(integrity([store, store])) == "6 of 6 rows intact"


@pytest.mark.slow
def test_verify_and_claims_report_intact_rows(tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path / "runs"))
    monkeypatch.setattr("cpt_lab.paths.results_dir", lambda: tmp_path)
    monkeypatch.setattr("cpt_lab.sweeps.verify.results_dir", lambda: tmp_path)
    monkeypatch.setattr("cpt_lab.sweeps.verify.run_again", lambda row: row)
    store, (first, second, _) = tmp_path / "rows.jsonl", rows()
    first["provenance"] = {**first["provenance"], "python": "x"}
    written(store, first, second, plain({**first, "status": "great"}))
    fault = f"{store}, line 3: status 'great' is none of ok, diverged, failed"
    said = f"2 of 3 rows intact; does not count: {fault}"
    for command in (["verify", str(store)], ["claims", "--evidence"]):
        with warnings.catch_warnings(record=True, action="always") as found:
            done = CliRunner().invoke(app, command)
        assert done.exit_code == (command[0] == "verify"), done.output
        assert fault in str([w.message for w in found])
        assert said in done.output


def test_append_row_rejects_invalid_row(tmp_path):
    (row, *_) = rows()
    for change, reason in (
        ({"key": "0" * 16}, "key 0+ is not that of its spec"),
        ({"status": "great"}, "status 'great'"),
    ):
        refused(
            f"this is no result row: {reason}",
            stores.append_row,
            tmp_path / "rows.jsonl",
            row | change,
        )
    assert not (tmp_path / "rows.jsonl").exists()
