"""Appending to stores: each append checks for its row, reads only new bytes, and keeps rows of other writers."""

import errno
import os
import pickle
import tempfile
import time
import warnings
from pathlib import Path

import pytest
from helpers import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from cpt_extras import files
from cpt_lab.experiments.spec import key_of
from cpt_lab.sweeps import row_index, stores
from cpt_lab.sweeps.row_format import NotIntactWarning, line_of
from cpt_lab.sweeps.stores import StoreError


def named(name):
    return key_of({"name": name})


def row(name, value=1, status="ok"):
    return {
        "schema": 1,
        "key": named(name),
        "value": value,
        "status": status,
        "spec": {"name": name},
    }


def names_in(store):
    return [one["spec"]["name"] for one in stores.load_rows(store)]


# --- writers that the lock does not exclude ------------------------------------------------------


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([line_of(row("other"))], ["first", "other", "mine"]),
        (
            [line_of(row("other")), line_of(row("third"))],
            ["first", "other", "third", "mine"],
        ),
        ([line_of(row("other", "x" * 20_000))], ["first", "other", "mine"]),
    ],
    ids=["a row", "two rows", "a long row"],
)
def test_append_row_keeps_rows_of_concurrent_writers(
    others, expected, tmp_path, monkeypatch
):
    store, look = tmp_path / "rows.jsonl", stores.look_up
    stores.append_row(store, row("first"))

    def look_before_the_others(path, key):
        found = look(path, key)
        with open(path, "ab") as other:
            other.writelines(others)
        others.clear()
        return found

    monkeypatch.setattr(stores, "look_up", look_before_the_others)
    assert stores.append_row(store, row("mine")) == row("mine")
    assert names_in(store) == expected


def test_append_row_waits_for_partly_written_row(tmp_path, monkeypatch):
    """Wait for the end of a row that follows a complete one."""
    store, look, line = tmp_path / "rows.jsonl", stores.look_up, line_of(row("other"))
    parts = [line + line_of(row("third"))[:-20], line_of(row("third"))[-20:]]

    def look_between(path, key):
        found = look(path, key)
        with open(path, "ab") as other:
            other.write(parts.pop(0) if parts else b"")
        return found

    monkeypatch.setattr(stores, "look_up", look_between)
    stores.append_row(store, row("mine"))
    assert names_in(store) == ["other", "third", "mine"]


def test_append_row_keeps_row_being_written(tmp_path, monkeypatch):
    """Wait while the first half of a row is at the end of the file."""
    store, line = tmp_path / "rows.jsonl", line_of(row("other"))
    stores.append_row(store, row("first"))
    parts = [line[60:], line[:60]]

    def write_on(_=0):
        with open(store, "ab") as other:
            other.write(parts.pop() if parts else b"")

    write_on()

    monkeypatch.setattr(stores.time, "sleep", write_on)
    stores.append_row(store, row("mine"))
    assert names_in(store) == ["first", "other", "mine"]


@pytest.mark.parametrize("times", [1, 3, 99])
def test_append_row_rewrites_row_that_was_truncated(times, tmp_path, monkeypatch):
    store, write, cut = tmp_path / "rows.jsonl", stores._write_line, []
    stores.append_row(store, row("first"))

    def write_and_lose(path, end, *rest):
        start = write(path, end, *rest)
        if len(cut) < times:
            cut.append(True)
            with open(
                path, "r+b"
            ) as other:  # which had seen the end before our row came
                other.truncate(end)
                other.seek(end)
                other.write(line_of(row(f"other {len(cut)}")))
        return start

    monkeypatch.setattr(stores, "_write_line", write_and_lose)
    if times == 99:
        refused(
            "locks of this file system exclude nobody; .*CPT_RUNS_DIR",
            stores.append_row,
            store,
            row("mine"),
            error=StoreError,
        )
        assert len(cut) == stores.MAX_TRIES
        return
    stores.append_row(store, row("mine"))
    assert names_in(store) == [
        "first",
        *(f"other {i + 1}" for i in range(times)),
        "mine",
    ]


def test_append_row_failing_keeps_concurrent_rows(tmp_path, monkeypatch):
    """Fail after half a row, when a second writer has appended."""
    store = tmp_path / "rows.jsonl"
    stores.append_row(store, row("first"))

    def half(file, text):
        os.write(file.fileno(), text[: len(text) // 2])
        with open(store, "ab") as other:
            other.write(line_of(row("other")))
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(stores, "_write_all", half)
    refused(
        "Input/output error", stores.append_row, store, row("mine"), error=StoreError
    )
    monkeypatch.undo()
    assert names_in(store) == ["first", "other"]
    stores.append_row(store, row("mine"))
    assert names_in(store) == ["first", "other", "mine"]


# --- what the system says ------------------------------------------------------------------------


class Parts:
    """File with short writes, as operating systems may make them."""

    def __init__(self, file, most, at_last=None):
        self.file, self.most, self.at_last = file, most, at_last

    def write(self, text):
        if self.at_last is not None and not self.most:
            raise OSError(self.at_last, os.strerror(self.at_last))
        count = self.file.write(text[: self.most])
        if self.at_last is not None:
            self.most = 0
        return count

    def __getattr__(self, name):
        return getattr(self.file, name)


def test_append_row_continues_short_writes(tmp_path):
    with open(tmp_path / "file", "a+b", buffering=0) as file:
        stores._write_all(Parts(file, 7), b"a row of some length\n")
        assert (tmp_path / "file").read_bytes() == b"a row of some length\n"
        refused(
            "took a part of a row, and then nothing",
            stores._write_all,
            Parts(file, 0),
            b"x",
            error=OSError,
        )
        for number in (errno.EIO, errno.EDQUOT, errno.EFBIG):
            said = os.strerror(number)
            refused(
                said,
                stores._write_all,
                Parts(file, 7, number),
                b"a longer row\n",
                error=OSError,
            )


@pytest.mark.parametrize("number", sorted(files.FSYNC_UNSUPPORTED))
def test_append_row_warns_once_without_fsync(number, tmp_path, monkeypatch):
    def refuse(_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    monkeypatch.setattr(files, "_warned", False)
    with pytest.warns(
        UserWarning,
        match=f"does not say when the disk has.*{os.strerror(number)}.*power cut",
    ) as said:
        stores.append_row(tmp_path / "rows.jsonl", row("a"))
    assert len(said) == 1
    with warnings.catch_warnings(action="error"):
        stores.append_row(tmp_path / "rows.jsonl", row("b"))
        files.write_text(tmp_path / "text", "also other files")
    assert names_in(tmp_path / "rows.jsonl") == ["a", "b"]


def test_append_row_fails_if_fsync_fails(tmp_path, monkeypatch):
    def refuse(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    stores.append_row(tmp_path / "rows.jsonl", row("a"))
    monkeypatch.setattr(os, "fsync", refuse)
    refused(
        "Input/output error",
        stores.append_row,
        tmp_path / "rows.jsonl",
        row("b"),
        error=StoreError,
    )
    assert names_in(tmp_path / "rows.jsonl") == ["a"]


# --- links ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["a link", "a link to a link", "a relative link", "a link to no file yet"]
)
def test_store_link_shares_locks_curves_and_checkpoints(kind, tmp_path):
    store, link = tmp_path / "there" / "rows.jsonl", tmp_path / "here" / "image.jsonl"
    store.parent.mkdir()
    link.parent.mkdir()
    if kind != "a link to no file yet":
        stores.append_row(store, row("a"))
    if kind == "a link to a link":
        (tmp_path / "between").symlink_to(store)
        link.symlink_to(tmp_path / "between")
    else:
        link.symlink_to("../there/rows.jsonl" if kind == "a relative link" else store)
    stores.check_writable(link)
    for what in ("curves", "checkpoints", "locks", "logs"):
        assert stores.place(link, what, "0" * 16) == stores.place(store, what, "0" * 16)
    for first, second in ((store, link), (link, store)):
        with (
            stores.claim(first, named("b")) as mine,
            stores.claim(second, named("b")) as too,
        ):
            assert (mine, too) == (True, False)
    stores.append_row(link, row("b"))
    assert stores.find_row(store, named("b")) == row("b")
    assert link.is_symlink()
    assert sorted(path.name for path in link.parent.iterdir()) == ["image.jsonl"]


def test_store_with_hard_links_warns(tmp_path):
    store = tmp_path / "rows.jsonl"
    stores.append_row(store, row("a"))
    with warnings.catch_warnings(action="error"):
        stores.check_writable(store)
    os.link(store, tmp_path / "other.jsonl")
    with pytest.warns(
        UserWarning, match=r"rows\.jsonl has 2 names \(hard links\): .*use one name"
    ):
        stores.check_writable(store)


# --- the index -----------------------------------------------------------------------------------

CHANGES = st.lists(
    st.tuples(
        st.sampled_from(
            ["append", "other", "torn", "replace", "shorten", "swap", "edit"]
        ),
        st.sampled_from("abc"),
        st.integers(1, 3),
    ),
    max_size=12,
)


def change(store, kind, name, value):
    """Change a store as this program, a different program or an editor does."""
    lines = store.read_bytes().splitlines(keepends=True) if store.exists() else []
    lines = [line for line in lines if line.endswith(b"\n")]
    if kind == "append":
        stores.append_row(store, row(name, value))
    elif kind == "other":
        store.write_bytes(b"".join([*lines, line_of(row(name, value, "failed"))]))
    elif kind == "torn":
        store.write_bytes(b"".join([*lines, line_of(row(name, value))[: value * 10]]))
        stores.append_row(store, row(name, value))
    elif kind == "replace":
        store.with_name("new").write_bytes(b"".join(reversed(lines)))
        os.replace(store.with_name("new"), store)
    elif kind == "shorten":
        store.write_bytes(b"".join(lines[: value - 1]))
    elif kind == "swap":
        store.write_bytes(b"".join(lines[1:] + lines[:1]))
    else:
        store.write_bytes(
            b"".join(
                [
                    line_of(row(name, value)) if i == 0 else line
                    for i, line in enumerate(lines)
                ]
            )
        )


@given(CHANGES)
@settings(max_examples=100, deadline=None)
def test_find_row_equals_load_rows_after_changes(changes):
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(action="ignore", category=NotIntactWarning),
    ):
        store = Path(folder) / "rows.jsonl"
        for one in changes:
            change(store, *one)
            expected = {one["key"]: one for one in stores.load_rows(store)}
            for name in "abc":
                assert stores.find_row(store, named(name)) == expected.get(
                    named(name)
                ), one


def test_find_row_notices_rows_edited_in_place(tmp_path):
    """Notice swapped lines of equal length far before the end of the file."""
    store = tmp_path / "rows.jsonl"
    stores.append_row(store, row("a"))
    stores.append_row(store, row("b"))
    stores.append_row(store, row("long", "x" * 2 * row_index.END_BYTES))
    assert stores.find_row(store, named("b")) == row("b")
    first, second, rest = store.read_bytes().split(b"\n", 2)
    with open(store, "r+b") as file:
        file.write(
            second + b"\n" + first + b"\n" + rest + line_of(row("c"))
        )  # so that the file has grown, too
    assert stores.find_row(store, named("a")) == row("a")
    assert stores.find_row(store, named("b")) == row("b")
    assert stores.append_row(store, row("b", 2)) == row("b")


def test_find_row_rereads_rewritten_longer_file(tmp_path):
    store = tmp_path / "rows.jsonl"
    stores.append_row(store, row("a"))
    assert stores.find_row(store, named("a")) == row("a")
    store.write_bytes(
        b"".join(line_of(row(name, "x" * 50)) for name in ("b", "a", "c"))
    )
    for name in ("b", "c", "a"):
        assert stores.find_row(store, named(name)) == row(name, "x" * 50)


def test_append_row_reads_only_new_bytes(tmp_path, monkeypatch):
    store, read, add = tmp_path / "rows.jsonl", [], row_index.StoreIndex._add
    monkeypatch.setattr(
        row_index.StoreIndex,
        "_add",
        lambda index, line: read.append(line) or add(index, line),
    )
    for i in range(50):
        stores.append_row(store, row(str(i)))
    assert len(read) == 49  # every row once, the last one not yet


def test_index_part_spares_second_process_full_read(tmp_path, monkeypatch):
    store, read, add = tmp_path / "rows.jsonl", [], row_index.StoreIndex._add
    for i in range(50):
        stores.append_row(store, row(str(i)))
    part = pickle.loads(
        pickle.dumps(row_index.index_part(store, [named("3"), named("new")]))
    )
    assert len(pickle.dumps(part)) < 6000
    monkeypatch.setattr(
        row_index, "_indexes", {}
    )  # as in a process that has just begun
    row_index.remember(store, part)
    monkeypatch.setattr(
        row_index.StoreIndex,
        "_add",
        lambda index, line: read.append(line) or add(index, line),
    )
    assert stores.find_row(store, named("3")) == row("3")
    assert stores.append_row(store, row("new")) == row("new")
    assert read == []
    assert stores.find_row(store, named("7")) == row("7"), (
        "what it does not know of is looked for in the whole file"
    )
    assert len(read) == 51
    assert row_index.index_part(tmp_path / "none.jsonl", ["a"]) is None


def test_append_row_time_is_linear(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)

    def seconds(count):
        store = tmp_path / f"{count}.jsonl"
        begun = time.process_time()
        for i in range(count):
            stores.append_row(store, row(str(i), "x" * 2000))
        return time.process_time() - begun

    assert (
        seconds(1200) / seconds(300) < 8
    )  # 4 in proportion; 14 when each reads the whole file
