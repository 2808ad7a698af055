"""Whether data of the user's own has changed: a digest of its files, which are read only when they look different."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from cpt_core.checks import write_text
from cpt_core.data.common import own_path
from cpt_core.paths import runs_dir

LARGE = 2 * 2**30  # bytes


def fingerprint(dataset: str) -> str:
    """Return a digest of the names and contents of all files of the user's data, such as "my-images/".

    Of more than ``LARGE`` bytes the sizes stand for the contents, for reading them would take too long. The digest is
    kept in ``runs/fingerprints.json``; files with the same sizes and times are not read again. Data that is not there
    has the digest of no files.
    """
    parts = [own_path(part) for part in dataset.split(",")]
    files = [(str(file.relative_to(part.parent)), file, file.stat()) for part in parts for file in _files(part)]
    looks = hashlib.sha256(repr([(name, s.st_size, s.st_mtime_ns) for name, _, s in files]).encode()).hexdigest()
    kept = runs_dir() / "fingerprints.json"
    known: dict[str, list[str]] = {}
    with suppress(FileNotFoundError, ValueError):  # none yet, or damaged: the files are read again
        known = json.loads(kept.read_text(encoding="utf-8"))
    data = ",".join(map(str, parts))
    if known.get(data, [""])[0] != looks:
        large = sum(stat.st_size for *_, stat in files) > LARGE
        contents = [(name, stat.st_size if large else _content(file)) for name, file, stat in files]
        known[data] = [looks, hashlib.sha256(repr(contents).encode()).hexdigest()]
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_text(kept, json.dumps(known, indent=1))
    return known[data][1]


def _files(path: Path) -> list[Path]:
    """All files of a folder in their order, or the file itself."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file())


def _content(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
