"""Reading of stores: which row counts, broken and torn lines, digests of rows, and the index of a file."""

import itertools
import json
import os
import pickle
import re
import tempfile
from pathlib import Path

import pytest
from helpers import named_row, quietly, refused, specs_of, stored_row, write_rows
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from cpt_core.numerics import NUMERICS
from cpt_lab.analysis import run_table
from cpt_lab.experiments.spec import RunSpec, key_of
from cpt_lab.numerics import numerics_of
from cpt_lab.paths import results_dir
from cpt_lab.sweeps import row_format, row_index, stores
from cpt_lab.sweeps.row_format import (
    Integrity,
    LineChecker,
    NotIntactWarning,
    canonical,
    digest,
    integrity,
    line_of,
    sidecar_path,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)
A, B = key_of({"name": "a"}), key_of({"name": "b"})
LINE = line_of(named_row("b", "a \\ b"))
ignoring_faults = pytest.mark.filterwarnings(
    "ignore::cpt_lab.sweeps.row_format.NotIntactWarning"
)


@pytest.fixture
def store(tmp_path):
    return tmp_path / "rows.jsonl"


# --- which row counts -----------------------------------------------------------------------------


def row_of_tree(started, dirty=False, status="ok", value=1, **fields):
    provenance = {"started": started, "commit": "0" * 40, "dirty": dirty}
    return named_row("a", value, status, provenance=provenance, **fields)


# Each row counts before the next: finished, then of these numerics, then clean, then late. A tree without a commit is
# not clean.
RANKED = [
    row_of_tree("2026-11-20", dirty=True, numerics=NUMERICS),
    row_of_tree("2026-11-22T10"),
    row_of_tree("2026-11-21T10", status="diverged"),
    row_of_tree("2026-11-21T09"),
    row_of_tree("2026-11-23T10", dirty=True),
    row_of_tree("2026-11-23T09", dirty=None),
    row_of_tree("2026-11-24T10", status="failed"),
    row_of_tree("2026-11-24T09", status="failed"),
    row_of_tree("2026-11-25T10", dirty=True, status="failed"),
    named_row("a", status="failed"),
]


@pytest.mark.filterwarnings("ignore:rows are in doubt")
@pytest.mark.parametrize(("first", "second"), list(itertools.combinations(RANKED, 2)))
def test_newest_is_independent_of_order(first, second, store):
    assert (
        stores.newest([first, second]) == stores.newest([second, first]) == {A: first}
    )
    write_rows(store, first, second)
    assert stores.load_rows(store) == [first]
    assert stores.find_row(store, A) == first


def test_newest_breaks_ties_by_content():
    one = row_of_tree("2026-11-22", value=1, store="z")
    other = row_of_tree("2026-11-22", value=2, store="a")
    assert stores.newest([one, other]) == stores.newest([other, one]) == {A: other}


# --- torn and broken lines ------------------------------------------------------------------------


@pytest.mark.slow
@given(
    st.sampled_from([LINE, b'{"schema": 1, "k']), st.integers(0, 200), st.integers(0, 3)
)
@settings(max_examples=30)
def test_store_truncated_last_line_is_removed(line, cut, zeros):
    """Also remove zeros that a power cut may leave at the end of a file."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "rows.jsonl"
        torn = line[: min(cut, len(line) - 2)] + bytes(zeros)
        store.write_bytes(line_of(named_row("a")) + torn)
        assert stores.load_rows(store) == [named_row("a")]
        stores.append_row(store, named_row("c"))
        assert stores.load_rows(store) == [named_row("a"), named_row("c")]


@pytest.mark.parametrize("after", [b"", b"\0\0", b" ", b"\r"])
def test_store_accepts_row_without_line_end(after, store):
    """Read rows after an editor or a merge removed the final newline."""
    first, last = named_row("a"), named_row("b", "a \\ b")
    store.write_bytes(line_of(first) + LINE.rstrip() + after)
    assert stores.find_row(store, B) == last
    assert stores.load_rows(store) == [first, last]
    assert stores.append_row(store, named_row("b")) == last
    stores.append_row(store, named_row("c"))
    assert stores.load_rows(store) == [first, last, named_row("c")]


NO_ROW = "no row and no beginning of one"
BROKEN = [
    (b"nonsense\n", "line 1 is no JSON: 'nonsense'"),
    (b"\n", "line 1 is no JSON"),
    (b"\xff\xfe\n", "line 1 is no JSON"),
    (b"[" * 100_000 + b"\n", "line 1 is no JSON"),
    (b'{"schema": 1, "key": "a", "x": NaN}\n', "line 1 is no JSON"),
    (b'{"schema": 1, "k\n{"schema": 1}\n', "line 1 is no JSON"),
    (b'{"schema": 99, "key": "a"}\n', "line 1: schema 99 is not 1"),
    (b'{"schema": true, "key": "a"}\n', "line 1: schema True is not 1"),
    (b"[1, 2]\n", "line 1: schema None is not 1"),
    (b"{}", "line 1: schema None is not 1"),
    (b'{"schema": 1, "key": "a"}\n', "line 1 has no spec, status"),
    (b'{"a": 1}\r{"a": 2}\r', f"{NO_ROW}: a line of a store is one row, ended by a"),
    ('{"a": "\u00fc'.encode(), NO_ROW),
    (b"{my notes", NO_ROW),
]


@pytest.mark.parametrize(("content", "message"), BROKEN)
def test_load_rows_names_broken_lines(content, message, store):
    store.write_bytes(content)
    refused(rf"rows\.jsonl.*{message}", stores.load_rows, store)
    assert store.read_bytes() == content


PIECES = [
    *(line_of(named_row(name)).rstrip() for name in "ab"),
    *(LINE[:30], LINE[30:], b"\r", b"\n", b"\r\n", b"\0", b" ", b"{", b'{"', b"{}"),
    *(b"my notes", b"[1]", "\u00fc".encode(), b"\xff\xfe"),
]


@pytest.mark.slow
@ignoring_faults
@given(st.lists(st.sampled_from(PIECES), max_size=8), st.sampled_from("abc"))
@example([LINE.rstrip(), b"\r", LINE.rstrip(), b"\r"], "c")
@example([LINE.rstrip(), LINE.rstrip()], "c")
@example([LINE[:30], line_of(named_row("b")).rstrip()], "c")
@settings(max_examples=200)
def test_append_row_removes_only_truncated_row(pieces, name):
    """Either add no row, or change nothing but a truncated row at the end."""
    before, row = b"".join(pieces), named_row(name, 2)
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "rows.jsonl"
        store.write_bytes(before)
        try:
            counting_row = stores.append_row(store, row)
        except ValueError:
            counting_row = None
        after = store.read_bytes()
    if counting_row != row:
        assert after == before
        return
    assert after.endswith(line_of(row))
    rest = after.removesuffix(line_of(row))
    rest = rest if before.startswith(rest) else rest.removesuffix(b"\n")
    assert before.startswith(rest)
    lost = before.removeprefix(rest).strip(b"\0\n")
    assert not lost or lost.startswith(b"{")
    assert not [one for one in "ab" if line_of(named_row(one)).rstrip() in lost]


# --- digests --------------------------------------------------------------------------------------

SPECS = quietly(specs_of, "CR", "RR", "LR")


def new_rows():
    return [stored_row(spec, 0.5) for spec in SPECS]


def plain(row):
    """Return the line of a row as written before lines had digests."""
    return json.dumps(row, sort_keys=True).encode() + b"\n"


def line_with(digest, row):
    return b'{"digest": "' + digest.encode() + b'", ' + canonical(row)[1:] + b"\n"


def certify(store):
    """Write the digests of plain lines into the file beside the store."""
    rows = map(json.loads, store.read_bytes().splitlines())
    digests = [digest(canonical(row)) for row in rows]
    sidecar_path(store).write_text("\n".join(digests))


# Edited field, its new value, and the fault that is found without a digest.
EDITS = {
    "accuracy": (("metrics", 0, "value"), 0.999, None),
    "commit": (("provenance", "commit"), "1" * 40, None),
    "a new field": (("remark",), "very good", None),
    "status": (("status",), "great", "status 'great' is none of ok, diverged, failed"),
    "type of status": (("status",), ["ok"], r"status is \[\"ok\"\], no str"),
    "recipe": (
        ("spec", "recipe", "lr"),
        0.123,
        "key .* is not that of its spec, [0-9a-f]{16}",
    ),
    "seed": (("spec", "seed"), 7, "key .* is not that of its spec"),
    "false for zero": (("spec", "seed"), False, "key .* is not that of its spec"),
    "key": (("key",), SPECS[1].key, "key .* is not that of its spec"),
    "type of key": (("key",), [1], r"key is \[1\], no str"),
    "type of metrics": (("metrics",), None, "metrics is null, no list"),
    "type of spec": (("spec",), "x", 'spec is "x", no dict'),
}
CHANGED = "it was changed after it was written: its digest is that of another"
# Line of an edited row from the row and its old digest, and the fault that a digest gives.
DIGESTS = {
    "digest in the line": (line_with, CHANGED),
    "digest in a line of another program": (
        lambda old, row: plain({"digest": old, **row}),
        CHANGED,
    ),
    "digest beside the store": (
        lambda old, row: plain(row),
        r"its digest is not in rows\.sha256",
    ),
    "new digest": (lambda old, row: line_with(digest(canonical(row)), row), None),
    "no digest": (lambda old, row: plain(row), None),
}
CASES = [
    *itertools.product(["accuracy", "commit", "status"], list(DIGESTS)[:3]),
    *itertools.product(["a new field"], list(DIGESTS)[:3]),
    *((edit, "new digest") for edit in list(EDITS)[3::2]),
    *((edit, "no digest") for edit in list(EDITS)[4::2]),
]


@pytest.mark.parametrize(("edit", "where"), CASES)
def test_load_rows_names_edited_row(edit, where, store):
    """Name, ignore and never delete an edited row, so that its run is done again."""
    path, value, fault = EDITS[edit]
    edited_line, digest_fault = DIGESTS[where]
    first, second, third = new_rows()
    edited = json.loads(json.dumps(first))
    *names, last = path
    field = edited
    for name in names:
        field = field[name]
    field[last] = value

    line = plain if where == "digest beside the store" else line_of
    if line is plain:
        store.write_bytes(b"".join(map(plain, (first, second, third))))
        certify(store)
    changed = edited_line(digest(canonical(first)), edited)
    before = line(second) + changed + line(third)
    store.write_bytes(before)

    message = rf"do not count: .*rows\.jsonl, line 2: {fault or digest_fault}"
    with pytest.warns(NotIntactWarning, match=message):
        assert stores.load_rows(store) == [second, third]
    assert stores.find_row(store, SPECS[0].key) is None
    with pytest.warns(NotIntactWarning):
        assert run_table.load(store).key.tolist() == [second["key"], third["key"]]
    assert str(integrity([store])).startswith("2 of 3 rows intact; does not count: ")
    assert stores.append_row(store, first) == first
    assert store.read_bytes() == before + line_of(first)


@pytest.mark.parametrize(
    "options",
    [{}, {"separators": (",", ":")}, {"ensure_ascii": False}, {"reverse": True}],
)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_digests_survive_rewriting_by_programs(options, end, store):
    """Accept stores that were merged, sorted or reformatted."""
    odd_text = '\u00fc \u2028 \\ " }{'
    odd = new_rows()[0] | {"title": odd_text, "seconds": 1e-07, "steps": 10**16}
    options = dict(options)
    reverse = options.pop("reverse", False)

    def rewrite(row):
        row = dict(reversed(row.items())) if reverse else row
        store.write_bytes((json.dumps(row, **options) + end).encode())

    rewrite(json.loads(line_of(odd)))
    assert stores.load_rows(store) == [odd]
    assert integrity([store]) == Integrity(1)
    rewrite(odd)
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
ODD = {"file": ["\udcc3", "\u2028\x00\n", 2**64 - 1, -0.0, 5e-324, {"": None}]}


@pytest.mark.slow
@given(
    st.dictionaries(TEXT, ANYTHING, max_size=4),
    st.dictionaries(TEXT, ANYTHING, max_size=3),
    st.booleans(),
)
@example({}, ODD, False)
@settings(max_examples=50)
def test_row_of_any_content_round_trips(spec, fields, is_old):
    row = {**fields, "schema": 1, "key": key_of(spec), "spec": spec, "status": "ok"}
    row.pop("digest", None)
    types = row_format.CHECKED_TYPES.items()
    assume(all(isinstance(row[name], kind) for name, kind in types if name in row))
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "rows.jsonl"
        if is_old:
            store.write_bytes(plain(row))
            certify(store)
        else:
            stores.append_row(store, row)
        assert integrity([store]) == Integrity(1)
        (read,) = stores.load_rows(store)
        assert json.dumps(read, sort_keys=True) == json.dumps(row, sort_keys=True)
        assert stores.find_row(store, row["key"]) is not None


def test_load_rows_of_keys_skips_other_lines(store):
    first, second, third = new_rows()
    spaced = json.dumps(second, separators=(" , ", " : ")).encode() + b"\n"
    store.write_bytes(line_of(first) + b"nonsense\n" + spaced + line_of(third))
    keys = {first["key"], second["key"]}
    assert stores.load_rows(store, keys) == [first, second]
    assert stores.load_rows(store, {third["key"]}) == [third]
    assert stores.load_rows(store, set()) == []
    # The key of another run inside of a row does not make it a row of that run.
    third["note"] = {"key": first["key"]}
    store.write_bytes(line_of(third))
    assert stores.load_rows(store, keys) == []
    # Rows that are read are checked.
    store.write_bytes(line_of(first).replace(b'"value": 0.5', b'"value": 0.6'))
    with pytest.warns(NotIntactWarning, match="it was changed after it was written"):
        assert stores.load_rows(store, keys) == []


def test_integrity_reports_conflicting_results(store):
    first, second, third = new_rows()
    failed = first | {"status": "failed", "metrics": [], "error": "x"}
    provenance = first["provenance"] | {"started": "2026-02-01"}
    later = first | {"provenance": provenance, "seconds": 2.0}
    # The same numbers twice, and a failure before them.
    store.write_bytes(b"".join(map(line_of, (failed, first, second, later, third))))
    assert stores.load_rows(store) == [later, second, third]

    other = json.loads(json.dumps(later))
    other["metrics"][0]["value"] = 0.9
    store.write_bytes(b"".join(map(line_of, (first, second, other))))
    doubt = rf"rows\.jsonl, lines 1 and 3 have different results of run {first['key']}"
    with pytest.warns(NotIntactWarning, match=doubt):
        assert stores.load_rows(store) == [other, second]
    assert re.match(rf"3 of 3 rows intact; .*{doubt}", str(integrity([store])))

    # Results of different numerics are no conflict.
    other["numerics"] = NUMERICS - 1
    store.write_bytes(line_of(first) + line_of(other))
    assert integrity([store]).doubts == ()


def test_integrity_reads_digests_of_old_rows(store):
    first, second, third = new_rows()
    store.write_bytes(plain(first) + line_of(second))
    assert stores.load_rows(store) == [first, second]  # a row without a digest counts
    assert str(integrity([store])) == "1 of 2 rows intact, 1 have no digest"
    sidecar_path(store).write_text(digest(canonical(first)))
    assert str(integrity([store])) == "2 of 2 rows intact"
    stores.append_row(store, third)
    assert str(integrity([store, store])) == "6 of 6 rows intact"


@pytest.mark.filterwarnings("always:rows do not count")
def test_commands_name_changed_rows(store, command, monkeypatch):
    first, second, third = new_rows()
    store.write_bytes(
        line_of(second) + line_of(third) + plain(first | {"status": "great"})
    )
    fault = f"{store}, line 3: status 'great' is none of ok, diverged, failed"
    monkeypatch.setattr("cpt_lab.sweeps.verify.verify", lambda sample: [])
    status, out, error = command("verify", store)
    assert status == 1
    assert f"2 of 3 rows intact; does not count: {fault}" in out
    assert fault in error


def test_append_row_rejects_invalid_row(store):
    row = new_rows()[0]
    faults = {
        "key": ("0" * 16, "key 0+ is not that of its spec"),
        "status": ("great", "status 'great'"),
    }
    for name, (value, reason) in faults.items():
        message = f"this is no result row: {reason}"
        refused(message, stores.append_row, store, row | {name: value})
    assert not store.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted(results_dir().glob("*.jsonl")), ids=lambda p: p.stem
)
def test_committed_rows_are_intact_and_reproducible(path):
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows
    old_rows = [row for row in rows if "digest" not in row]
    digests = {digest(canonical(row)) for row in old_rows}
    assert LineChecker(path).sidecar_digests == digests  # and none is gone
    for row in rows:
        row.pop("digest", None)  # which is no part of what it certifies
    by_plain_parser = list(stores.newest(rows).values())
    assert repr(stores.load_rows(path)) == repr(by_plain_parser)
    for row in rows:
        assert RunSpec.from_dict(row["spec"]).key == key_of(row["spec"]) == row["key"]
        assert row["status"] in ("ok", "diverged")
        assert numerics_of(row) == NUMERICS
        assert repr(stores.settled(row)) == repr(row)
        numbers = [row.get(n, []) for n in ("metrics", "evaluations", "loss", "bitops")]
        assert row["status"] == "diverged" or "null" not in json.dumps(numbers), row[
            "key"
        ]
        provenance = row["provenance"]
        assert provenance["dirty"] is False, row["key"]
        assert provenance["commit"], row["key"]
        assert provenance["machine"], row["key"]


# --- the index ------------------------------------------------------------------------------------


def change(store, kind, name, value):
    """Change a store as this program, a different program or an editor does."""
    lines = store.read_bytes().splitlines(keepends=True) if store.exists() else []
    lines = [line for line in lines if line.endswith(b"\n")]
    line = line_of(named_row(name, value))
    changed = {
        "append": lines,
        "other": [*lines, line_of(named_row(name, value, "failed"))],
        "torn": [*lines, line[: value * 10]],
        "replace": lines[::-1],
        "shorten": lines[: value - 1],
        "swap": lines[1:] + lines[:1],
        "edit": [line, *lines[1:]] if lines else [],
    }
    if kind != "append":
        target = store.with_name("new") if kind == "replace" else store
        target.write_bytes(b"".join(changed[kind]))
        os.replace(target, store)
    if kind in ("append", "torn"):
        stores.append_row(store, named_row(name, value))


CHANGES = st.tuples(
    st.sampled_from("append other torn replace shorten swap edit".split()),
    st.sampled_from("abc"),
    st.integers(1, 3),
)


@pytest.mark.slow
@ignoring_faults
@given(st.lists(CHANGES, max_size=12))
@settings(max_examples=60)
def test_find_row_equals_load_rows_after_changes(changes):
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "rows.jsonl"
        for one in changes:
            change(store, *one)
            rows = {row["key"]: row for row in stores.load_rows(store)}
            for name in "abc":
                key = key_of({"name": name})
                assert stores.find_row(store, key) == rows.get(key), one


def test_find_row_notices_rows_edited_in_place(store):
    """Notice swapped lines of equal length far before the end of the file."""
    for row in (
        named_row("a"),
        named_row("b"),
        named_row("long", "x" * 2 * row_index.END_BYTES),
    ):
        stores.append_row(store, row)
    assert stores.find_row(store, B) == named_row("b")
    first, second, rest = store.read_bytes().split(b"\n", 2)
    with open(store, "r+b") as file:  # which also grows
        file.write(b"\n".join((second, first, rest)) + line_of(named_row("c")))
    assert stores.find_row(store, A) == named_row("a")
    assert stores.find_row(store, B) == named_row("b")
    assert stores.append_row(store, named_row("b", 2)) == named_row("b")


def test_find_row_rereads_rewritten_longer_file(store):
    stores.append_row(store, named_row("a"))
    assert stores.find_row(store, A) == named_row("a")
    rows = [named_row(name, "x" * 50) for name in "bac"]
    store.write_bytes(b"".join(map(line_of, rows)))
    for row in rows:
        assert stores.find_row(store, row["key"]) == row


@pytest.fixture
def read_lines(monkeypatch):
    """Return the list of lines that indexes read."""
    lines, add = [], row_index.StoreIndex._add

    def note(index, line):
        lines.append(line)
        return add(index, line)

    monkeypatch.setattr(row_index.StoreIndex, "_add", note)
    return lines


def test_append_row_reads_only_new_bytes(store, read_lines):
    for i in range(50):
        stores.append_row(store, named_row(str(i)))
    assert len(read_lines) == 49  # every row once, the last one not yet


def test_index_part_spares_second_process_full_read(store, read_lines, monkeypatch):
    for i in range(50):
        stores.append_row(store, named_row(str(i)))
    third, new, seventh = (named_row(name) for name in ("3", "new", "7"))
    part = pickle.dumps(row_index.index_part(store, [third["key"], new["key"]]))
    assert len(part) < 6000
    monkeypatch.setattr(
        row_index, "_indexes", {}
    )  # as in a process that has just begun
    row_index.remember(store, pickle.loads(part))
    read_lines.clear()
    assert stores.find_row(store, third["key"]) == third
    assert stores.append_row(store, new) == new
    assert read_lines == []
    assert stores.find_row(store, seventh["key"]) == seventh  # in the whole file
    assert len(read_lines) == 51
    assert row_index.index_part(store.with_name("none.jsonl"), ["a"]) is None
