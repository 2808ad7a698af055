"""Index of the rows in stores, kept by this process, so that finding a run reads only new lines. Without torch.

A store grows at its end. An index knows, for the part that it has read, the lines of every key. It starts again when
the file is another one, is shorter, or no longer ends that part with the same bytes, and when one of its lines has
another key. So an edit in place that keeps every length is missed only if rows are appended after it before the next
read; then a run may get a second row, and ``newest`` decides which one counts.
"""

import os
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

MAX_INDEXES = 8  # stores that a process remembers
END_BYTES = 4096  # last bytes that are compared to see whether a file only grew
_KEY = re.compile(rb'"key"\s*:\s*("[^"\\]*")')


class Line(NamedTuple):
    """Position of a line in a file."""

    number: int  # from 1
    start: int
    size: int


class LineScan(NamedTuple):
    """Lines of a store that are about one run, and the end of the store."""

    lines: dict[
        int, bytes
    ]  # by number, those of the run and the last one that has an end
    line_count: int  # number of lines with an end
    size: int  # bytes of lines with an end
    rest: bytes  # what follows the last line's end


class StoreIndex:
    """Positions of the lines of every key, for the part of a file that was read."""

    def __init__(self, keys: Collection[bytes] | None = None) -> None:
        self.keys = keys  # keys that are indexed; None for all
        self.file = (0, 0)  # device and inode number
        self.changed = 0  # modification time when the file was last read, in ns
        self.size = self.count = 0
        self.end = b""  # last bytes of the part that was read
        self.last: Line | None = None
        self.places: dict[bytes, list[Line]] = {}

    def find(self, file: BinaryIO, word: bytes) -> LineScan:
        """Return the lines of a key, given as a JSON string, after reading the lines that were appended."""
        if self.keys is not None and word not in self.keys:
            self.__init__()  # type: ignore[misc]
        rest = self._read_on(file)
        lines = self._lines(file, word)
        if lines is None:  # edited in place
            self.__init__()  # type: ignore[misc]
            rest = self._read_on(file)
            lines = self._lines(file, word) or {}
        return LineScan(lines, self.count, self.size, rest)

    def part(self, keys: Collection[str]) -> "StoreIndex":
        """Return an index of some keys alone, small enough to be sent to another process."""
        words = frozenset(f'"{key}"'.encode() for key in keys)
        index = StoreIndex(words)
        for name in ("file", "changed", "size", "count", "end", "last"):
            setattr(index, name, getattr(self, name))

        for word in words:
            if word in self.places:
                index.places[word] = self.places[word]
        return index

    def _read_on(self, file: BinaryIO) -> bytes:
        """Index the new lines; return the bytes after the last line feed."""
        status = os.fstat(file.fileno())
        if not self._has_only_grown(file, status):
            self.__init__(self.keys)  # type: ignore[misc]
        self.file, self.changed = (status.st_dev, status.st_ino), status.st_mtime_ns
        before = self.size
        file.seek(before)
        rest = b""
        for line in file:
            if not line.endswith(b"\n"):
                rest = line
                break
            self._add(line)
        if self.size > before:
            start = max(0, self.size - END_BYTES)
            self.end = _bytes_at(file, start, self.size - start)
        return rest

    def _has_only_grown(self, file: BinaryIO, status: os.stat_result) -> bool:
        """Return whether the part of the file that was read is unchanged."""
        if self.file != (status.st_dev, status.st_ino):
            return False
        if status.st_size < self.size:
            return False
        if status.st_size == self.size and status.st_mtime_ns != self.changed:
            return False

        return _bytes_at(file, self.size - len(self.end), len(self.end)) == self.end

    def _add(self, line: bytes) -> None:
        """Index a line at the end of the part that was read."""
        self.count += 1
        self.last = Line(self.count, self.size, len(line))

        for word in set(_KEY.findall(line)):
            if self.keys is None or word in self.keys:
                self.places.setdefault(word, []).append(self.last)

        self.size += len(line)

    def _lines(self, file: BinaryIO, word: bytes) -> dict[int, bytes] | None:
        """Return the lines of a key, and the last one, by number; None when the file was edited in place."""
        out: dict[int, bytes] = {}
        for place in self.places.get(word, []):
            text = _bytes_at(file, place.start, place.size)
            if word not in text or text.find(b"\n") != place.size - 1:
                return None
            out[place.number] = text
        if self.last is not None:
            out[self.last.number] = _bytes_at(file, self.last.start, self.last.size)
        return out


def _bytes_at(file: BinaryIO, start: int, size: int) -> bytes:
    file.seek(start)
    return file.read(size)


_indexes: dict[Path, StoreIndex] = {}
_busy = threading.RLock()


@contextmanager
def index_of(store: Path) -> Iterator[StoreIndex]:
    """Lock and return the index of a store for a ``with`` block."""
    path = Path(store).absolute()
    with _busy:
        index = _indexes.pop(path, None) or StoreIndex()
        _indexes[path] = index  # most recently used last
        while len(_indexes) > MAX_INDEXES:
            del _indexes[next(iter(_indexes))]
        yield index


def index_part(store: Path, keys: Collection[str]) -> StoreIndex | None:
    """Return an up-to-date index of some runs of a store; None where there is no store."""
    try:
        with open(store, "rb") as file, index_of(store) as index:
            index.find(file, b"")
            return index.part(keys)
    except FileNotFoundError:
        return None


def remember(store: Path, index: StoreIndex | None) -> None:
    """Start with the index of a store that another process has made."""
    if index is not None:
        with _busy:
            _indexes[Path(store).absolute()] = index
