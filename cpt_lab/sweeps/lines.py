"""The lines of a store, read: all of them, those of one run, and those that came since somebody looked.  No torch."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from cpt_core.checks import write_text
from cpt_lab.sweeps.digests import BARE, BEGIN, Judge, beside, canonical, digest

SCHEMA_VERSION = 1
BLOCK = 2**20  # bytes that are looked through at a time
TAIL = 4096  # bytes by which a file is known again: longer than the part that rows of one grid share
RESULT = ("status", "metrics", "bitops", "steps", "loss", "evaluations", "data_checksum")  # what a run gives
TORN = re.compile(
    rb'\{("\w*("(:( [ -~]*)?)?)?)?\0*|\0+'
)  # the beginning of a line of ours, as a dying writer leaves it
Row = dict[str, Any]


@dataclass(frozen=True)
class Mark:
    """How far somebody has read a store: ``end`` bytes, whole lines. ``tail`` is a digest of the last of them.

    As long as those are in their place, nothing before has changed, and only what came after need be read.
    """

    end: int = 0
    tail: bytes = hashlib.sha256().digest()


START = Mark()


class NotIntactWarning(UserWarning):
    """Lines of a store do not count: they are not as they were written."""


@dataclass(frozen=True)
class Integrity:
    """What the lines of stores are worth; print it: "41 of 41 rows intact".

    Attributes:
        rows: how many there are.
        bare: how many of them have no digest: they count, but nobody can tell whether they were changed.
        faults: file, line and reason of those that were, or that are no rows of ours. They do not count.
        doubts: lines that are intact, but give other results than another line of the same run.
    """

    rows: int = 0
    bare: int = 0
    faults: tuple[str, ...] = ()
    doubts: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return the counts, then what is wrong."""
        bare = f", {self.bare} have no digest (`certify` writes them)" if self.bare else ""
        said = f"{self.rows - self.bare - len(self.faults)} of {self.rows} rows intact{bare}"
        return "; ".join([said, *(f"does not count: {fault}" for fault in self.faults), *self.doubts])


def load_rows(store: Path) -> list[Row]:
    """Return the newest row of every key, in the order the keys first appeared; a torn last line is left out.

    Warns:
        NotIntactWarning: about rows that were changed after they were written. They are left out: their runs count as
            not run. And about two results of one run that differ; which one counts is said by ``newest``.

    Raises:
        ValueError: for a broken line anywhere else, or a row of another schema version.
    """
    rows, found = _read_all(store)
    for what, reasons in (("do not count", found.faults), ("are in doubt", found.doubts)):
        if reasons:
            more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
            warnings.warn(f"rows {what}: {'; '.join(reasons[:3])}{more}", NotIntactWarning, stacklevel=2)
    return list(newest(rows).values())


def integrity(stores: Iterable[Path]) -> Integrity:
    """Return what the rows of some stores are worth, all together."""
    found = [_read_all(store)[1] for store in stores]
    return Integrity(
        sum(one.rows for one in found),
        sum(one.bare for one in found),
        sum((one.faults for one in found), ()),
        sum((one.doubts for one in found), ()),
    )


def certify(store: Path) -> int:
    """Write the digests of the rows that have none into a file beside a store and return how many these are.

    The store stays as it is. From then on a row without a digest that is not among these does not count.

    Raises:
        ValueError: where a row is not intact.
    """
    found = _read_all(store)[1]
    if found.faults:
        raise ValueError(f"nothing is certified: {'; '.join(found.faults)}")
    rows = [row for line in _lines(store) if "digest" not in (row := json.loads(line))]
    write_text(beside(store), "".join(f"{digest(canonical(row))}\n" for row in rows))
    return len(rows)


def _read_all(store: Path) -> tuple[list[Row], Integrity]:
    """Return the rows of a store that count, several of one key if there are, and what all its lines are worth."""
    judge, rows, faults, bare = Judge(store), [], [], 0
    results: dict[str, tuple[int, Row]] = {}
    doubts: list[str] = []
    number = 0
    with _collector_off():
        for number, line in enumerate(_lines(store), 1):
            row, fault = _judged(store, number, line, judge)
            if fault and fault != BARE:
                faults.append(f"{store}, line {number}: {fault}")
                continue
            bare += fault == BARE
            rows.append(row)
            if row["status"] != "failed":
                first, other = results.setdefault(row["key"], (number, row))
                if other is not row and any(other.get(name) != row.get(name) for name in RESULT):
                    doubts.append(f"{store}, lines {first} and {number} have different results of run {row['key']}")
    return rows, Integrity(number, bare, tuple(faults), tuple(doubts))


def _lines(store: Path) -> list[bytes]:
    """Return the lines of a store, the last one also if it has no end but is whole."""
    if not Path(store).exists():
        return []
    *lines, tail = Path(store).read_bytes().split(b"\n")
    last = unended(store, tail)
    return [*lines, last] if last else lines


def newest(rows: Iterable[Row]) -> dict[str, Row]:
    """Return the row of every key that counts: the one rule for all who read rows, of one store or of several.

    A finished row counts before a failed one, one from a clean tree before any other, then the one that started last;
    of rows that agree in all this, one chosen by its content. In which order, or in which file, they come says nothing.
    """
    out: dict[str, Row] = {}
    for row in rows:
        held = out.get(row["key"])
        if held is None or _rank(row) > _rank(held) or (_rank(row) == _rank(held) and _content(row) > _content(held)):
            out[row["key"]] = row
    return out


def _rank(row: Row) -> tuple[bool, bool, str]:
    where = row.get("provenance", {})
    return row["status"] != "failed", where.get("dirty") is False, where.get("started", "")


def _content(row: Row) -> str:
    return json.dumps({name: value for name, value in row.items() if name != "store"}, sort_keys=True)


def find_row(store: Path, key: str, since: Mark = START) -> Row | None:
    """Return the newest row of one run, or of those that came after a mark."""
    if not Path(store).exists():
        return None
    with open(store, "rb") as file:
        return newest(look(store, file, key, since)[0]).get(key)


def mark(store: Path) -> Mark:
    """Return where the whole lines of a store end now."""
    if not Path(store).exists():
        return START
    with open(store, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end and b"\n" not in (block := _read(file, max(0, end - TAIL), end)):
            end = max(0, end - TAIL)
        return _mark(file, end - len(block) + block.rfind(b"\n") + 1 if end else 0)


def look(store: Path, file: BinaryIO, key: str, since: Mark) -> tuple[list[Row], Mark]:
    """Return the rows of a key after a mark, and where the whole lines end. Other lines are passed over, not parsed.

    Raises:
        ValueError: when one of these rows or the last line is broken: the file may be no store at all.
    """
    end, size, word = since.end if _mark(file, since.end) == since else 0, BLOCK, json.dumps(key).encode()
    found: list[bytes] = []
    last: list[bytes] = []
    while len(block := _read(file, end, end + size)) == size or b"\n" in block:
        cut = block.rfind(b"\n") + 1
        at = block.find(word, 0, cut)
        while at >= 0:
            stop = block.index(b"\n", at)
            found.append(block[block.rfind(b"\n", 0, at) + 1 : stop])
            at = block.find(word, stop, cut)
        if cut:
            last = [block[block.rfind(b"\n", 0, cut - 1) + 1 : cut - 1]]
        else:
            size *= 2  # a line that is longer than that
        end += cut
    if whole := unended(store, block):
        last = [whole]
        found += last if word in whole else []
    try:
        judge = Judge(store)
        rows = [_judged(store, 0, line, judge) for line in found + last]
    except ValueError:
        _read_all(store)  # the same, with the number of the line
        raise
    return [row for row, fault in rows if row["key"] == key and fault in ("", BARE)], _mark(file, end)


def _read(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)


def _mark(file: BinaryIO, end: int) -> Mark:
    return Mark(end, hashlib.sha256(_read(file, max(0, end - TAIL), end)).digest())


def unended(store: Path, tail: bytes) -> bytes:
    """Return the row that stands after the last line's end, b"" where there is only the beginning of one.

    Raises:
        ValueError: for anything else: we did not write it, so it is not ours to pass over or to cut off.
    """
    if not tail:
        return b""
    row = tail.rstrip(b"\0")  # what a power cut may leave
    try:
        text = row.decode()
        _, end = json.JSONDecoder().raw_decode(text)
        if not text[end:].strip():
            return row
    except (ValueError, RecursionError):
        if TORN.fullmatch(tail) and BEGIN not in tail[1:]:
            return b""
    raise ValueError(
        f"{store} ends with {tail[:60].decode(errors='replace')!r}, which is no row and no beginning of one: a line "
        "of a store is one row, ended by a line feed; remove what does not belong there"
    )


def _judged(store: Path, number: int, line: bytes, judge: Judge) -> tuple[Row, str]:
    """Return a row and what is wrong with it, see ``Judge.fault``."""
    row = _row(store, number, line)
    fault = judge.fault(line, row)
    if fault not in ("", BARE):  # orjson takes whole numbers of more than 64 bits for others: before somebody is blamed
        row = json.loads(line)
        fault = judge.fault(line, row)
    return row, fault


def _row(store: Path, number: int, line: bytes) -> Row:
    try:
        row = _parsed(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{store}, line {number} is no JSON: {line[:60].decode(errors='replace')!r}; remove "
            "that line to use the rest"
        ) from error
    if not isinstance(row, dict) or type(row.get("schema")) is not int or row["schema"] != SCHEMA_VERSION:
        schema = row.get("schema") if isinstance(row, dict) else None
        raise ValueError(f"{store}, line {number}: schema {schema!r} is not {SCHEMA_VERSION}")
    missing = [name for name in ("key", "spec", "status") if name not in row]
    if missing:
        raise ValueError(f"{store}, line {number} has no {', '.join(missing)}")
    return row


def _parsed(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:  # also for half a surrogate pair, which a traceback may hold and json writes
        return json.loads(line, parse_constant=_no_number)


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


@contextmanager
def _collector_off() -> Iterator[None]:
    """Python's collector of cycles goes through all that was read again and again: two thirds of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
