"""The lines of a store, read: all of them, those of one run, and those that came since somebody looked.  No torch."""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

SCHEMA_VERSION = 1
BLOCK = 2**20  # bytes that are looked through at a time
TAIL = 4096  # bytes by which a file is known again: longer than the part that rows of one grid share
Row = dict[str, Any]


@dataclass(frozen=True)
class Mark:
    """How far somebody has read a store: ``end`` bytes, whole lines. ``tail`` is a digest of the last of them.

    As long as those are in their place, nothing before has changed, and only what came after need be read.
    """

    end: int = 0
    tail: bytes = hashlib.sha256().digest()


START = Mark()


def load_rows(store: Path) -> list[Row]:
    """Return the newest row of every key, in the order the keys first appeared; a torn last line is left out.

    Raises:
        ValueError: for a broken line anywhere else, or a row of another schema version.
    """
    if not Path(store).exists():
        return []
    content = Path(store).read_bytes()
    whole = content[: len(content) - len(_torn(store, content))]
    with _collector_off():
        return list(
            newest(_row(store, number, line) for number, line in enumerate(whole.split(b"\n")[:-1], 1)).values()
        )


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
    _torn(store, block)
    try:
        rows = [_row(store, 0, line) for line in found + last]
    except ValueError:
        load_rows(store)  # the same, with the number of the line
        raise
    return [row for row in rows if row["key"] == key], _mark(file, end)


def _read(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)


def _mark(file: BinaryIO, end: int) -> Mark:
    return Mark(end, hashlib.sha256(_read(file, max(0, end - TAIL), end)).digest())


def _torn(store: Path, content: bytes) -> bytes:
    """Return what follows the whole lines. It was torn off a row; anything else is no store, and not ours to cut."""
    torn = content[content.rfind(b"\n") + 1 :]
    if torn and not torn.startswith((b"{", b"\0")):
        raise ValueError(f"{store} is no file of rows: it ends with {torn[:60].decode(errors='replace')!r}")
    return torn


def _row(store: Path, number: int, line: bytes) -> Row:
    try:
        row = _parsed(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{store}, line {number} is no JSON: {line[:60].decode(errors='replace')!r}; remove "
            "that line to use the rest"
        ) from error
    if not isinstance(row, dict) or row.get("schema") != SCHEMA_VERSION:
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
        return json.loads(line)


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
