"""Places of rows in stores, remembered by this process, so that finding a run reads only what is new.  No torch.

A store grows at its end. An index knows, for the part that it has read, in which lines every key stands. It begins
anew when the file is another one, is shorter, or no longer ends that part with the same bytes, and when a line that it
names has another key. So an edit in place that keeps every length is missed only if rows are appended after it before
anybody looks; then a run may get a second row, and ``newest`` says which one counts.
"""

import os
import re
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

MAX_INDEXES = 8  # stores that a process remembers
END_BYTES = 4096  # that are compared to see whether a file only grew
_KEY = re.compile(rb'"key"\s*:\s*("[^"\\]*")')


class Line(NamedTuple):
    """The place of a line in a file."""

    number: int  # from 1
    start: int
    size: int


class LineScan(NamedTuple):
    """The lines of a store that concern a run, and how the store ends."""

    lines: dict[
        int, bytes
    ]  # by number, those of the run and the last one that has an end
    line_count: int  # number of lines with an end
    size: int  # bytes of lines with an end
    rest: bytes  # what follows the last line's end


class StoreIndex:
    """The keys of the first lines of a file."""

    def __init__(self, keys: Collection[bytes] | None = None) -> None:
        self.keys = keys  # that it knows of; None for all
        self.file = (0, 0)  # device and number of the file
        self.changed = 0  # time of the file's last change that was seen
        self.size = self.count = 0
        self.end = b""  # the last bytes of the part that was read
        self.last: Line | None = None
        self.places: dict[bytes, list[Line]] = {}

    def find(self, file: BinaryIO, word: bytes) -> LineScan:
        """Return the lines with a key, a JSON string, after reading what was appended since the last time."""
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
        """Return an index of these keys alone, small enough to be sent to another process."""
        words = frozenset(f'"{key}"'.encode() for key in keys)
        out = StoreIndex(words)
        for name in ("file", "changed", "size", "count", "end", "last"):
            setattr(out, name, getattr(self, name))
        out.places = {word: self.places[word] for word in words if word in self.places}
        return out

    def _read_on(self, file: BinaryIO) -> bytes:
        """Index the lines that are new; return what follows the last one's end."""
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
        if self.file != (status.st_dev, status.st_ino) or status.st_size < self.size:
            return False
        if status.st_size == self.size and status.st_mtime_ns != self.changed:
            return False
        return _bytes_at(file, self.size - len(self.end), len(self.end)) == self.end

    def _add(self, line: bytes) -> None:
        self.count += 1
        self.last = Line(self.count, self.size, len(line))
        for word in set(_KEY.findall(line)):
            if self.keys is None or word in self.keys:
                self.places.setdefault(word, []).append(self.last)
        self.size += len(line)

    def _lines(self, file: BinaryIO, word: bytes) -> dict[int, bytes] | None:
        """Return the lines with a key, and the last one; None when another line stands in the place of one."""
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
    """Give the index of a store to one thread at a time."""
    path = Path(store).absolute()
    with _busy:
        index = _indexes.pop(path, None) or StoreIndex()
        _indexes[path] = index  # the one that was used last stands last
        while len(_indexes) > MAX_INDEXES:
            del _indexes[next(iter(_indexes))]
        yield index


def index_part(store: Path, keys: Collection[str]) -> StoreIndex | None:
    """Return what this process knows of some runs of a store, brought up to date; None where there is no store."""
    try:
        with open(store, "rb") as file, index_of(store) as index:
            index.find(file, b"")
            return index.part(keys)
    except FileNotFoundError:
        return None


def remember(store: Path, index: StoreIndex | None) -> None:
    """Begin with what another process knew of a store."""
    if index is not None:
        with _busy:
            _indexes[Path(store).absolute()] = index
