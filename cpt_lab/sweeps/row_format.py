"""Lines of a store: serialisation of result rows, integrity checks, and the rule for which row counts. Without torch.

A store is a file with one JSON object per line. ``line_of`` writes a row, ``load_rows`` and ``find_row`` read rows,
``integrity`` counts the lines that are intact, and ``newest`` picks the row that counts where a run has several.

Every line begins with a digest of its row, so that a changed line is noticed: the first 32 hex digits of the SHA-256 of
``json.dumps(row, sort_keys=True)`` without the digest. Lines that begin with the digest were written by this package;
another program may rewrite a line with its fields in any order. Rows that are older than digests have theirs in a file
beside the store, ``NAME.sha256``, in any order. A digest finds mistakes and edits, not forgery: only the history of the
file shows that somebody replaced numbers together with their digest.

>>> line_of({"key": key_of({}), "spec": {}, "status": "ok"})[:57]
b'{"digest": "bbc052f0599814d847acec357ac9b931", "key": "44'
"""

import hashlib
import json
import os
import re
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from cpt_lab.experiments.spec import key_of
from cpt_lab.numerics import is_comparable, numerics_of
from cpt_lab.sweeps.result_row import (
    CHECKED_TYPES,
    OUTCOME_FIELDS,
    STATUSES,
    ResultRow,
)
from cpt_lab.sweeps.row_index import index_of

# Rows of another version are refused, all old ones too: so a new field does not raise it.
SCHEMA_VERSION = 1
NO_DIGEST = "no digest"  # of a row that is older than digests, in a store without a file of them
MAX_LISTED_ROWS = 3  # rows that a warning names
# The beginning of a line of this package, as an interrupted writer leaves it.
TORN = re.compile(rb'\{("\w*("(:( [ -~]*)?)?)?)?\0*|\0+')
_KEY_FIELD = re.compile(rb'"key"\s*:\s*"([0-9a-f]+)"')  # at any depth of a row
_LINE_START = b'{"digest": "'
_DIGEST_DIGITS = 32
_ROW_START = len(_LINE_START) + _DIGEST_DIGITS + len(b'", ')


class NotIntactWarning(UserWarning):
    """Lines of a store were changed after they were written, and do not count."""


@dataclass(frozen=True)
class Integrity:
    """Number of intact lines in stores; ``str`` gives "41 of 41 rows intact" and the faults."""

    rows: int = 0  # number of rows
    bare: int = 0  # rows without a digest: they count, but nobody can tell whether they were changed
    faults: tuple[str, ...] = ()  # file, line and reason of rows that do not count
    doubts: tuple[
        str, ...
    ] = ()  # intact rows that contradict another row of the same run

    def __str__(self) -> str:
        intact = self.rows - self.bare - len(self.faults)
        parts = [f"{intact} of {self.rows} rows intact"]
        if self.bare:
            parts[0] += f", {self.bare} have no digest"
        parts += [f"does not count: {fault}" for fault in self.faults]
        parts += self.doubts
        return "; ".join(parts)


# --- writing a row --------------------------------------------------------------------------------
def digest(text: bytes) -> str:
    """Return the digest of the canonical text of a row."""
    return hashlib.sha256(text).hexdigest()[:_DIGEST_DIGITS]


def canonical(row: ResultRow) -> bytes:
    """Return the text of a row whose digest is stored: JSON with sorted keys, without the digest."""
    fields = {name: value for name, value in row.items() if name != "digest"}
    return json.dumps(fields, sort_keys=True, allow_nan=False).encode()


def line_of(row: ResultRow) -> bytes:
    """Return the line of a row, its digest first.

    Raises:
        ValueError: when a number is not finite, a field has another type, or the key is not the hash of the spec.
    """
    if reason := _invalid(row):
        raise ValueError(f"this is no result row: {reason}")
    text = canonical(row)
    return _LINE_START + digest(text).encode() + b'", ' + text[1:] + b"\n"


def _invalid(row: ResultRow) -> str:
    """Return why a dictionary is no result row: a type, a status or a key that no row has; "" if it is one."""
    for name, expected_type in CHECKED_TYPES.items():
        value = row.get(name)
        if name in row and not isinstance(value, expected_type):
            return f"{name} is {json.dumps(value)[:60]}, no {expected_type.__name__}"

    if row["status"] not in STATUSES:
        return f"status {row['status']!r} is none of {', '.join(STATUSES)}"

    key = key_of(row["spec"])
    if row["key"] != key:
        return f"key {row['key']} is not that of its spec, {key}"
    return ""


# --- reading a store ------------------------------------------------------------------------------
def load_rows(store: Path, keys: Collection[str] | None = None) -> list[ResultRow]:
    """Return the newest row of every key, in the order the keys first appeared; an incomplete last line is left out.

    Args:
        store: file of rows.
        keys: keys of the runs to read; rows of other runs are neither parsed nor checked. None reads all.

    Warns:
        NotIntactWarning: about rows that were changed after they were written. They are left out: their runs count as
            not run. And about two results of one run that differ; ``newest`` picks the one that counts.

    Raises:
        ValueError: for a broken line anywhere else, or a row of another schema version.
    """
    rows, status = _read_all(store, keys=keys)
    _warn_of_rows("do not count", status.faults)
    _warn_of_rows("are in doubt", status.doubts)
    return list(newest(rows).values())


def _warn_of_rows(problem: str, reasons: tuple[str, ...]) -> None:
    """Warn of rows with a problem, if there are any, and name the first ones."""
    if not reasons:
        return
    more = ""
    if len(reasons) > MAX_LISTED_ROWS:
        more = f" and {len(reasons) - MAX_LISTED_ROWS} more"
    warnings.warn(
        f"rows {problem}: {'; '.join(reasons[:MAX_LISTED_ROWS])}{more}",
        NotIntactWarning,
        stacklevel=3,
    )


def integrity(stores: Iterable[Path]) -> Integrity:
    """Return how many rows of some stores are intact, counted together."""
    return _read_all(*stores)[1]


def sidecar_path(store: Path) -> Path:
    """Return the file beside a store that holds the digests of old rows."""
    return linked_file(store).with_suffix(".sha256")


def linked_file(store: Path) -> Path:
    """Return the real file of a store whose path may be a link; locks, curves and checkpoints stand beside it."""
    store = Path(store)
    return Path(os.path.realpath(store)) if store.is_symlink() else store


def find_row(store: Path, key: str) -> ResultRow | None:
    """Return the row of one run that counts; None if the store has none."""
    return look_up(store, key).row


class StoreLookup(NamedTuple):
    """Row of one run, and the end of the store it is in."""

    row: ResultRow | None  # the row that counts; None if there is none
    size: int  # bytes of the complete rows in the file
    is_terminated: bool  # the last complete row ends with a line feed


def look_up(store: Path, key: str) -> StoreLookup:
    """Return the row of a run that counts, and how the store ends.

    Rows of other runs are skipped without parsing, except the last one: the file may be no store at all. Lines that
    this process has read once are not read again, see ``row_index``.

    Raises:
        ValueError: when a line that is parsed is broken.
    """
    try:
        with open(store, "rb") as file, index_of(store) as index:
            scan = index.find(file, json.dumps(key).encode())
    except FileNotFoundError:
        return StoreLookup(None, 0, True)

    lines, size, is_terminated = scan.lines, scan.size, True
    tail = _complete_row(store, scan.rest) if scan.rest else b""
    if tail:
        lines = {**lines, scan.line_count + 1: tail}
        size += len(tail)
        is_terminated = False

    checker = LineChecker(store)
    matching = []
    for number, line in sorted(lines.items()):
        row, fault = checker.check(number, line)
        if row["key"] == key and fault in ("", NO_DIGEST):
            matching.append(row)
    return StoreLookup(newest(matching).get(key), size, is_terminated)


def _read_all(
    *stores: Path, keys: Collection[str] | None = None
) -> tuple[list[ResultRow], Integrity]:
    """Return the intact rows of stores, several per key if there are, and the integrity of all lines.

    With ``keys`` it is the rows of these runs alone, and their integrity.
    """
    rows: list[ResultRow] = []
    faults: list[str] = []
    doubts: list[str] = []
    without_digest = 0
    for store in stores:
        checker = LineChecker(store)
        first_results = dict[tuple[str, int | None], tuple[int, ResultRow]]()
        for number, line in enumerate(_lines(store), 1):
            if keys is not None and not _has_key(line, keys):
                continue
            row, fault = checker.check(number, line)
            if keys is not None and row["key"] not in keys:
                continue
            if fault and fault != NO_DIGEST:
                faults.append(f"{store}, line {number}: {fault}")
                continue

            if fault == NO_DIGEST:
                without_digest += 1
            rows.append(row)
            if row["status"] == "failed":
                continue

            run = (row["key"], numerics_of(row))
            first_number, first_row = first_results.setdefault(run, (number, row))
            if _contradict(first_row, row):
                doubts.append(
                    f"{store}, lines {first_number} and {number} have different results of run {row['key']}"
                )
    total = len(rows) + len(faults)
    return rows, Integrity(total, without_digest, tuple(faults), tuple(doubts))


def _has_key(line: bytes, keys: Collection[str]) -> bool:
    """Return whether some field "key" of an unparsed row is one of the given keys."""
    return any(key.decode() in keys for key in _KEY_FIELD.findall(line))


def _contradict(row: ResultRow, other: ResultRow) -> bool:
    """Return whether two rows of one run have different results."""
    return any(row.get(name) != other.get(name) for name in OUTCOME_FIELDS)


def _lines(store: Path) -> Iterator[bytes]:
    """Yield the complete lines of a store; the last one may lack its line feed."""
    if not Path(store).exists():
        return
    with open(store, "rb") as file:
        for line in file:
            complete = line if line.endswith(b"\n") else _complete_row(store, line)
            if complete:
                yield complete


def _complete_row(store: Path, tail: bytes) -> bytes:
    """Return the row after the last line feed of a store; b"" if it is only the beginning of one.

    Raises:
        ValueError: for anything else. This package did not write it, so it must not skip it or cut it off.
    """
    row = tail.rstrip(b"\0")  # a power cut may leave zeros
    try:
        text = row.decode()
        _, end = json.JSONDecoder().raw_decode(text)
        if not text[end:].strip():
            return row
    except (ValueError, RecursionError):
        if TORN.fullmatch(tail) and _LINE_START not in tail[1:]:
            return b""
    raise ValueError(
        f"{store} ends with {tail[:60].decode(errors='replace')!r}, which is no row and no beginning of one: a line "
        "of a store is one row, ended by a line feed; remove what does not belong there"
    )


class LineChecker:
    """Parser of the lines of one store that compares each row with its digest."""

    def __init__(self, store: Path) -> None:
        self.store = store

    @cached_property
    def sidecar_digests(self) -> frozenset[str]:
        """Digests in the file beside the store; read when the first row without a digest comes."""
        file = sidecar_path(self.store)
        if not file.exists():
            return frozenset()
        return frozenset(file.read_text(encoding="utf-8").split())

    def check(self, number: int, line: bytes) -> tuple[ResultRow, str]:
        """Return the row of a line without its digest, and its fault.

        Returns:
            The row, and "" if it is intact, ``NO_DIGEST`` if that cannot be known, or what is wrong with it.

        Raises:
            ValueError: when the line is no JSON, or no row of this schema; names the line.
        """
        try:
            row = json.loads(line, parse_constant=_refuse_constant)
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
        missing = [name for name in ("key", "spec", "status") if name not in row]
        if missing:
            raise ValueError(f"{self.store}, line {number} has no {', '.join(missing)}")
        return row, self._fault(line, row)

    def _fault(self, line: bytes, row: ResultRow) -> str:
        stored_digest = row.pop("digest", None)
        if reason := _invalid(row):
            return reason
        if stored_digest is None and not self.sidecar_digests:
            return NO_DIGEST

        accepted = self.sidecar_digests if stored_digest is None else (stored_digest,)
        # Most lines were written by this package: their text has the digest without another serialisation.
        line = line.rstrip(b"\n")
        text = b"{" + line[_ROW_START:] if line.startswith(_LINE_START) else line
        if digest(text) in accepted or digest(canonical(row)) in accepted:
            return ""
        if stored_digest is None:
            return f"its digest is not in {sidecar_path(self.store).name}: it was changed, or came after those"
        return "it was changed after it was written: its digest is that of another row"


def _refuse_constant(word: str) -> None:
    """Raise for NaN and Infinity, which JSON does not have."""
    raise ValueError(f"{word} is no number of JSON")


def never_began(row: ResultRow) -> bool:
    """Return whether a failed row was stored for a process that could not start.

    Earlier versions did so for a script without ``if __name__ == "__main__":``. Such a row is no result of its run.
    """
    if row["status"] != "failed":
        return False
    lines = row.get("error", "").splitlines()
    return set(lines) == {"the process of the run ended with status 1 and no result"}


# --- choosing the row that counts -----------------------------------------------------------------
def newest(rows: Iterable[ResultRow]) -> dict[str, ResultRow]:
    """Return the row of every key that counts; every reader of one or several stores uses this rule.

    A finished row counts before a failed one, one of the numerics of this package before those of others, one from a
    clean tree before any other, then the one that started last. Of rows that are equal in all this, the content
    decides. The order of the rows, and the files they come from, do not matter.
    """
    row_by_key: dict[str, ResultRow] = {}
    for row in rows:
        best = row_by_key.get(row["key"])
        if best is None or _counts_before(row, best):
            row_by_key[row["key"]] = row
    return row_by_key


def _counts_before(row: ResultRow, other: ResultRow) -> bool:
    """Return whether a row counts instead of another one of its key."""
    if _rank(row) != _rank(other):
        return _rank(row) > _rank(other)
    return _content(row) > _content(other)


class Rank(NamedTuple):
    """Order of the rows of one run; the highest counts."""

    is_finished: bool
    has_current_numerics: bool
    is_from_clean_tree: bool
    started: str  # ISO 8601


def _rank(row: ResultRow) -> Rank:
    provenance = row.get("provenance", {})
    return Rank(
        is_finished=row["status"] != "failed",
        has_current_numerics=is_comparable(row),
        is_from_clean_tree=provenance.get("dirty") is False,
        started=provenance.get("started", ""),
    )


def _content(row: ResultRow) -> str:
    """Return the text of a row without the file it was loaded from."""
    fields = {name: value for name, value in row.items() if name != "store"}
    return json.dumps(fields, sort_keys=True)
