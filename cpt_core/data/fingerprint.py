"""Whether data of the user's own has changed: a digest of its files, which are read only when they look different."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path

from cpt_core.checks import write_text
from cpt_core.data.common import own_path
from cpt_core.paths import runs_dir


def fingerprint(dataset: str) -> str:
    """Return a digest of the names and contents of all files of the user's data, such as "my-images/".

    The digest is kept in ``runs/fingerprints.json``; files with the same sizes and times are not read again.
    Data that is not there has the digest of no files.
    """
    parts = [own_path(part) for part in dataset.split(",")]
    files = [(str(file.relative_to(part.parent)), file) for part in parts for file in _files(part)]
    stats = [(name, file.stat()) for name, file in files]
    looks = hashlib.sha256(repr([(name, s.st_size, s.st_mtime_ns) for name, s in stats]).encode()).hexdigest()
    kept = runs_dir() / "fingerprints.json"
    known: dict[str, list[str]] = {}
    with suppress(FileNotFoundError, ValueError):  # none yet, or damaged: the files are read again
        known = json.loads(kept.read_text(encoding="utf-8"))
    data = ",".join(map(str, parts))
    if known.get(data, [""])[0] != looks:
        digest = hashlib.sha256()
        for name, file in files:
            with file.open("rb") as stream:
                digest.update(repr((name, hashlib.file_digest(stream, "sha256").hexdigest())).encode())
        known[data] = [looks, digest.hexdigest()]
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_text(kept, json.dumps(known, indent=1))
    return known[data][1]


def _files(path: Path) -> list[Path]:
    """All files of a folder in their order, or the file itself."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file())
