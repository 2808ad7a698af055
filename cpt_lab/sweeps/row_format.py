"""The lines of a store: how a row is written, what a line is worth, and which of several rows counts.  No torch.

Rows certify themselves: a digest stands in every line, so that what is not as it was written is noticed. The digest is
the SHA-256 of the row without it, as ``json.dumps(row, sort_keys=True)`` writes it. Lines are ours when they begin with
it; the fields of one that other programs wrote may come in any order. Rows that are older than digests have theirs in a
file beside the store, ``NAME.sha256``, in any order. A digest tells mistakes and edits, no forgery: who writes a new
one beside new numbers is told by the history of the file alone.

>>> line_of({"key": key_of({}), "spec": {}, "status": "ok"})[:57]
b'{"digest": "bbc052f0599814d847acec357ac9b931", "key": "44'
"""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cpt_lab.experiments.spec import key_of
from cpt_lab.numerics import is_comparable, numerics_of
from cpt_lab.sweeps.result_row import (
    CHECKED_TYPES,
    OUTCOME_FIELDS,
    STATUSES,
    ResultRow,
)
from cpt_lab.sweeps.row_index import index_of

SCHEMA_VERSION = 1
BARE = "no digest"  # of a row that is older than they are, in a store that has no file of them
# the beginning of a line of ours, as a dying writer leaves it
TORN = re.compile(rb'\{("\w*("(:( [ -~]*)?)?)?)?\0*|\0+')
_BEGIN, _LENGTH = b'{"digest": "', 32
_REST = len(_BEGIN) + _LENGTH + len(b'", ')


class NotIntactWarning(UserWarning):
    """Lines of a store do not count: they are not as they were written."""


@dataclass(frozen=True)
class Integrity:
    """What the lines of stores are worth; print it: "41 of 41 rows intact"."""

    rows: int = 0  # how many there are
    bare: int = 0  # how many of them have no digest: they count, but nobody can tell whether they were changed
    # file, line and reason of those that were, or that are no rows of ours. They do not count
    faults: tuple[str, ...] = ()
    doubts: tuple[
        str, ...
    ] = ()  # lines that are intact, but give other results than another line of the same run

    def __str__(self) -> str:
        bare = f", {self.bare} have no digest" if self.bare else ""
        said = f"{self.rows - self.bare - len(self.faults)} of {self.rows} rows intact{bare}"
        return "; ".join(
            [said, *(f"does not count: {fault}" for fault in self.faults), *self.doubts]
        )


# --- a row, written -------------------------------------------------------------------------------
def digest(text: bytes) -> str:
    """Return the digest of a row as it is written."""
    return hashlib.sha256(text).hexdigest()[:_LENGTH]


def canonical(row: ResultRow) -> bytes:
    """Return the text that the digest of a row is of."""
    return json.dumps(
        {k: v for k, v in row.items() if k != "digest"}, sort_keys=True, allow_nan=False
    ).encode()


def line_of(row: ResultRow) -> bytes:
    """Return the line of a row, its digest first; ValueError for a number that is not finite, and for another's key."""
    if reason := _wrong(row):
        raise ValueError(f"this is no row: {reason}")
    text = canonical(row)
    return _BEGIN + digest(text).encode() + b'", ' + text[1:] + b"\n"


def _wrong(row: ResultRow) -> str:
    """Say what no row has: another type, a status of its own, the key of another spec."""
    for name, kind in CHECKED_TYPES.items():
        value = row.get(name)
        if name in row and not isinstance(value, kind):
            return f"{name} is {json.dumps(value)[:60]}, no {kind.__name__}"
    if row["status"] not in STATUSES:
        return f"status {row['status']!r} is none of {', '.join(STATUSES)}"
    if row["key"] != (key := key_of(row["spec"])):
        return f"key {row['key']} is not that of its spec, {key}"
    return ""


# --- a store, read --------------------------------------------------------------------------------
def load_rows(store: Path) -> list[ResultRow]:
    """Return the newest row of every key, in the order the keys first appeared; a torn last line is left out.

    Warns:
        NotIntactWarning: about rows that were changed after they were written. They are left out: their runs count as
            not run. And about two results of one run that differ; which one counts is said by ``newest``.

    Raises:
        ValueError: for a broken line anywhere else, or a row of another schema version.
    """
    rows, found = _read_all(store)
    for what, reasons in (
        ("do not count", found.faults),
        ("are in doubt", found.doubts),
    ):
        if reasons:
            more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
            warnings.warn(
                f"rows {what}: {'; '.join(reasons[:3])}{more}",
                NotIntactWarning,
                stacklevel=2,
            )
    return list(newest(rows).values())


def integrity(stores: Iterable[Path]) -> Integrity:
    """Return what the rows of some stores are worth, all together."""
    return _read_all(*stores)[1]


def sidecar_path(store: Path) -> Path:
    """Return the file of the digests of old rows."""
    return linked_file(store).with_suffix(".sha256")


def linked_file(store: Path) -> Path:
    """Return the file that a store is, where its path is a link: locks, curves and checkpoints lie beside that one."""
    store = Path(store)
    return Path(os.path.realpath(store)) if store.is_symlink() else store


def find_row(store: Path, key: str) -> ResultRow | None:
    """Return the row of one run that counts."""
    return look(store, key)[0]


def look(store: Path, key: str) -> tuple[ResultRow | None, int, bool]:
    """Return the row of a run that counts, how many bytes the whole rows are, and whether the last has its line's end.

    Rows of other runs are passed over, not parsed, but for the last: the file may be no store at all. What this process
    has passed over once is not read again, see ``row_index``. ValueError when one of these lines is broken.
    """
    try:
        with open(store, "rb") as file, index_of(store) as index:
            found = index.find(file, json.dumps(key).encode())
    except FileNotFoundError:
        return None, 0, True
    lines, size, ended = found.lines, found.size, True
    if found.rest and (tail := _unended(store, found.rest)):
        lines = {**lines, found.whole + 1: tail}
        size, ended = size + len(tail), False
    judge = Judge(store)
    rows = [judge.row(number, line) for number, line in sorted(lines.items())]
    matching = [row for row, fault in rows if row["key"] == key and fault in ("", BARE)]
    return newest(matching).get(key), size, ended


def _read_all(*stores: Path) -> tuple[list[ResultRow], Integrity]:
    """Return the rows of stores that count, several of one key if there are, and what all their lines are worth."""
    rows: list[ResultRow] = []
    faults: list[str] = []
    doubts: list[str] = []
    bare = 0
    for store in stores:
        judge, results = (
            Judge(store),
            dict[tuple[str, int | None], tuple[int, ResultRow]](),
        )
        for number, line in enumerate(_lines(store), 1):
            row, fault = judge.row(number, line)
            if fault and fault != BARE:
                faults.append(f"{store}, line {number}: {fault}")
                continue
            bare += fault == BARE
            rows.append(row)
            if row["status"] != "failed":
                first, other = results.setdefault(
                    (row["key"], numerics_of(row)), (number, row)
                )
                if other is not row and any(
                    other.get(name) != row.get(name) for name in OUTCOME_FIELDS
                ):
                    doubts.append(
                        f"{store}, lines {first} and {number} have different results of run {row['key']}"
                    )
    return rows, Integrity(len(rows) + len(faults), bare, tuple(faults), tuple(doubts))


def _lines(store: Path) -> Iterator[bytes]:
    """Yield the lines of a store, the last one also without its end if it is whole, but not if it is torn."""
    if not Path(store).exists():
        return
    with open(store, "rb") as file:
        for line in file:
            if whole := line if line.endswith(b"\n") else _unended(store, line):
                yield whole


def _unended(store: Path, tail: bytes) -> bytes:
    """Return the row that stands after the last line's end, b"" where there is only the beginning of one.

    ValueError for anything else: we did not write it, so it is not ours to pass over or to cut off.
    """
    row = tail.rstrip(b"\0")  # what a power cut may leave
    try:
        text = row.decode()
        _, end = json.JSONDecoder().raw_decode(text)
        if not text[end:].strip():
            return row
    except (ValueError, RecursionError):
        if TORN.fullmatch(tail) and _BEGIN not in tail[1:]:
            return b""
    raise ValueError(
        f"{store} ends with {tail[:60].decode(errors='replace')!r}, which is no row and no beginning of one: a line "
        "of a store is one row, ended by a line feed; remove what does not belong there"
    )


class Judge:
    """Reads the rows of a store and says whether they are as they were written."""

    def __init__(self, store: Path) -> None:
        self.store = store

    @cached_property
    def known(self) -> frozenset[str]:
        """The digests beside the store; read when the first row comes that has none in it."""
        file = sidecar_path(self.store)
        return (
            frozenset(file.read_text(encoding="utf-8").split())
            if file.exists()
            else frozenset()
        )

    def row(self, number: int, line: bytes) -> tuple[ResultRow, str]:
        """Return the row of a line without its digest, and what is wrong with it: "", or ``BARE`` if nobody can tell.

        ValueError names the line of what is no JSON, or no row of this schema.
        """
        try:
            row = json.loads(line, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.store}, line {number} is no JSON: {line[:60].decode(errors='replace').rstrip()!r}; remove "
                "that line to use the rest"
            ) from error
        schema = row.get("schema") if isinstance(row, dict) else None
        if type(schema) is not int or schema != SCHEMA_VERSION:
            raise ValueError(
                f"{self.store}, line {number}: schema {schema!r} is not {SCHEMA_VERSION}"
            )
        if missing := [name for name in ("key", "spec", "status") if name not in row]:
            raise ValueError(f"{self.store}, line {number} has no {', '.join(missing)}")
        return row, self._fault(line, row)

    def _fault(self, line: bytes, row: ResultRow) -> str:
        given = row.pop("digest", None)
        if reason := _wrong(row):
            return reason
        if given is None and not self.known:
            return BARE
        # as a line of ours has it, mostly, and then the row need not be written again to see
        line = line.rstrip(b"\n")
        text = b"{" + line[_REST:] if line.startswith(_BEGIN) else line
        there = self.known if given is None else (given,)
        if digest(text) in there or digest(canonical(row)) in there:
            return ""
        if given is None:
            return f"its digest is not in {sidecar_path(self.store).name}: it was changed, or came after those"
        return "it was changed after it was written: its digest is that of another row"


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def never_began(row: ResultRow) -> bool:
    """Return whether a failed row says nothing of its run: earlier versions kept one where no process could start.

    They did so for a script without ``if __name__ == "__main__":``. Nothing but the process's end is known of it.
    """
    said = (
        set(row.get("error", "").splitlines()) if row["status"] == "failed" else set()
    )
    return said == {"the process of the run ended with status 1 and no result"}


# --- which row counts -----------------------------------------------------------------------------
def newest(rows: Iterable[ResultRow]) -> dict[str, ResultRow]:
    """Return the row of every key that counts: the one rule for all who read rows, of one store or of several.

    A finished row counts before a failed one, one of the numerics of this package before those of others, one from a
    clean tree before any other, then the one that started last; of rows that agree in all this, one chosen by its
    content. In which order, or in which file, they come says nothing.
    """
    out: dict[str, ResultRow] = {}
    for row in rows:
        held = out.get(row["key"])
        if (
            held is None
            or _rank(row) > _rank(held)
            or (_rank(row) == _rank(held) and _content(row) > _content(held))
        ):
            out[row["key"]] = row
    return out


def _rank(row: ResultRow) -> tuple[bool, bool, bool, str]:
    where = row.get("provenance", {})
    return (
        row["status"] != "failed",
        is_comparable(row),
        where.get("dirty") is False,
        where.get("started", ""),
    )


def _content(row: ResultRow) -> str:
    return json.dumps(
        {name: value for name, value in row.items() if name != "store"}, sort_keys=True
    )
