"""Resumption of stored measurements, whose rows hold for one commit and one machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def check_same_provenance(
    path: Path, stored: Mapping[str, Any], current: Mapping[str, Any]
) -> None:
    """Exit if the rows of a file were made by another commit, machine or library.

    Args:
        path: the file, for the message.
        stored: its provenance.
        current: provenance of this process; the time of its start does not matter.
    """
    comparable = json.loads(json.dumps(current))
    names = [name for name in comparable if name != "started"]
    different = [name for name in names if stored.get(name) != comparable[name]]
    if different:
        raise SystemExit(
            f"{path} has rows with another {', '.join(different)}; "
            "move it away to measure all of them again"
        )
