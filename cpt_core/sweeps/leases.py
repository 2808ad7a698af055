"""A claim on a piece of work among processes of one machine or several: a file with a heartbeat.

It needs nothing of the file system but that a file can be created exclusively and renamed, so it works on network file
systems. A holder that died on this machine loses its claim at once, one elsewhere when its file has not changed for
``seconds``. A claim is a way not to do work twice, not a proof: a process that slept through its expiry finds out at
its next heartbeat (``lost``), so what it guards must be safe without it.

>>> import tempfile
>>> with tempfile.TemporaryDirectory() as folder:
...     first, second = Lease(Path(folder) / "run"), Lease(Path(folder) / "run")
...     first.acquire(), second.acquire(), first.release(), second.acquire(), second.release()
(True, False, None, True, None)
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

SECONDS = 60.0


class Lease:
    """One claim; ``acquire`` and ``release`` it, and ask ``lost`` while it is held.

    Args:
        path: the file, the same for all who ask.
        seconds: how long a file must stay as it is before its holder counts as dead.
    """

    def __init__(self, path: Path, seconds: float = SECONDS) -> None:
        self.path, self.seconds = Path(path), seconds
        self.token = uuid.uuid4().hex
        self.lost = False
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self, wait: float = 0.0, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Try to get the claim for ``wait`` seconds; False when somebody else has it or ``should_stop`` says so.

        Raises:
            OSError: when the file cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        until = time.monotonic() + wait
        seen: tuple[Any, float] = (None, 0.0)  # the file as it was when it last changed, and since when
        while not self._create():
            state = _state(self.path)
            if state is None:
                continue  # it went away in between
            if state != seen[0]:
                seen = (state, time.monotonic())
            if _owner_died(self.path) or time.monotonic() - seen[1] >= self.seconds:
                self._remove(state)
            elif time.monotonic() >= until or should_stop():
                return False
            else:
                time.sleep(min(0.2, self.seconds / 10))
        self.lost = False
        self._end.clear()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()
        return True

    def release(self) -> None:
        """Give the claim back."""
        self._end.set()
        if self._thread is not None:
            self._thread.join()
        if _read(self.path).get("token") == self.token:
            self.path.unlink(missing_ok=True)

    def _create(self) -> bool:
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        try:
            os.write(file, json.dumps({"token": self.token, "host": _host(), "pid": os.getpid(), **_start()}).encode())
        except OSError:  # no room: leave no claim that nobody holds
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)
        return True

    def _beat(self) -> None:
        while not self._end.wait(self.seconds / 4):
            try:
                if _read(self.path).get("token") != self.token:
                    self.lost = True
                    return
                os.utime(self.path)
            except OSError:
                continue  # a file system that is away for a moment; the next beat may come through

    def _remove(self, stale: Any) -> None:
        """Remove the file of a dead holder; of those who try at the same time one does it, and nobody a live one's."""
        aside = self.path.with_name(f"{self.path.name}.{uuid.uuid4().hex}")
        if _state(self.path) != stale:
            return
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        if _state(aside) != stale:  # another was quicker, just now, and has the claim already: give it back
            with suppress(OSError):
                os.link(aside, self.path)
        aside.unlink(missing_ok=True)


def _state(path: Path) -> Any:
    """Return what a heartbeat changes, or None when there is no file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: Path) -> dict[str, Any]:
    """Return who holds a claim; nothing when there is no file, or its writer died before it wrote."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def holder(path: Path) -> int | None:
    """Return the process that holds a claim, on whatever machine."""
    return _read(path).get("pid")


def _owner_died(path: Path) -> bool:
    """Whether the holder ran on this machine and is gone."""
    owner = _read(path)
    if owner.get("host") != _host():
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _start(owner["pid"]).get("start") != owner.get("start")  # the number belongs to another process now


def _host() -> str:
    """Return a name for everything that shares process numbers: a machine since its start, or a container."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").stat().st_ino))
    return " ".join(parts)


def _start(pid: int | str = "self") -> dict[str, str]:
    """Return when a process started, where the system tells."""
    try:
        return {"start": Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]}
    except (OSError, IndexError):
        return {}
