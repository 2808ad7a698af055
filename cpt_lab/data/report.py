"""Data reports: what a reader found, used, left out and changed, one sentence per fact.

Nothing of a data set is left out, converted, scaled, merged or split without a fact in its report. A reader adds facts
while it reads; the loaded data set carries the report, a sweep prints it before training, and result rows hold its
digest. Needs no torch.

>>> report = DataReport("my-images/")
>>> report.add("read", "20 images of 2 classes")
>>> report.leave_out("images of this kind are not read", ["cat/1.heic", "cat/2.heic"])
>>> print(report)
data report of my-images/
  read      20 images of 2 classes
  left out  2 files .heic: images of this kind are not read (cat/1.heic, cat/2.heic)
"""

import hashlib
import json
import logging
import textwrap
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from pathlib import PurePath
from typing import Any, NamedTuple

TOPICS = {
    "read": "files, layout, sizes and types as they were found",
    "left out": "what was not used, and why",
    "changed": "what was converted, scaled, turned or merged",
    "split": "how many samples each split has, and how they were divided",
    "overlap": "samples that two splits share",
    "values": "range of the values after reading",
    "classes": "samples per class",
    "markers": "words or labels with a meaning of their own",
}
NOTICES = ("left out", "changed", "overlap")  # topics of facts that are also logged
MAX_NAMES = 3  # files that one fact names
MAX_COUNTS = 12  # classes that one fact lists with their counts
LINE_WIDTH = 118


class Fact(NamedTuple):
    """A sentence on one topic of ``TOPICS``."""

    topic: str
    text: str


class DataReport:
    """Facts about one data set, in the order of ``TOPICS``.

    Args:
        dataset: name or path of the data set, as the recipe has it.
        facts: facts to begin with, such as those of a stored report.
    """

    def __init__(self, dataset: str, facts: Iterable[tuple[str, str]] = ()) -> None:
        self.dataset = dataset
        self._facts: list[Fact] = []
        for topic, text in facts:
            self.add(topic, text)

    def add(self, topic: str, text: str) -> None:
        """Add a fact, unless it is there already; characters that do not print are escaped.

        Raises:
            ValueError: for an unknown topic.
        """
        if topic not in TOPICS:
            raise ValueError(
                f"topic: expected one of {', '.join(TOPICS)}, got {topic!r}"
            )
        printable = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
        fact = Fact(topic, printable)
        if fact not in self._facts:
            self._facts.append(fact)

    def leave_out(self, reason: str, names: Collection[str]) -> None:
        """Add a fact for files that are not read: their number per ending, the first names, and the reason."""
        names_by_ending = defaultdict(list)
        for name in names:
            ending = PurePath(name).suffix.lower() or "without ending"
            names_by_ending[ending].append(name)
        for ending, ending_names in sorted(names_by_ending.items()):
            count = f"{pluralize(len(ending_names), 'file')} {ending}"
            self.add(
                "left out", f"{count}: {reason} ({list_first(sorted(ending_names))})"
            )

    @property
    def facts(self) -> tuple[Fact, ...]:
        """All facts, sorted by topic."""
        order = list(TOPICS)
        return tuple(sorted(self._facts, key=lambda fact: order.index(fact.topic)))

    @property
    def notices(self) -> tuple[Fact, ...]:
        """Facts that tell how training differs from what the files hold."""
        return tuple(fact for fact in self.facts if fact.topic in NOTICES)

    def log_notices(self, log: logging.Logger) -> None:
        """Log every notice at info level."""
        for topic, text in self.notices:
            log.info("%s: %s: %s", self.dataset, topic, text)

    @property
    def digest(self) -> str:
        """Hash of all facts, 16 hexadecimal digits."""
        content = json.dumps([list(fact) for fact in self.facts], ensure_ascii=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON, which ``from_dict`` reads."""
        return {"dataset": self.dataset, "facts": [list(fact) for fact in self.facts]}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "DataReport":
        """Return the report that ``to_dict`` stored; ValueError for an unknown topic."""
        return cls(content["dataset"], [tuple(fact) for fact in content["facts"]])

    def __str__(self) -> str:
        width = max((len(fact.topic) for fact in self._facts), default=0)
        lines = [f"data report of {self.dataset}"]
        previous = ""
        for topic, text in self.facts:
            label = "" if topic == previous else topic
            first, *rest = textwrap.wrap(text, LINE_WIDTH - width - 4) or [""]
            lines += [
                f"  {label:<{width}}  {first}",
                *(" " * (width + 6) + more for more in rest),
            ]
            previous = topic
        return "\n".join(lines)


def empty_report() -> DataReport:
    """Return a report without facts, for data that was not read from files."""
    return DataReport("")


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural.

    >>> pluralize(1, "file"), pluralize(1200, "file")
    ('1 file', '1,200 files')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def list_first(names: Collection[str], limit: int = MAX_NAMES) -> str:
    """Return the first names, and "..." if there are more.

    >>> list_first(["a", "b", "c", "d"])
    'a, b, c, ...'
    """
    parts = list(names)[:limit]
    if len(names) > limit:
        parts.append("...")
    return ", ".join(parts)


def list_counts(counts: Mapping[str, int]) -> str:
    """Return how often each value occurs, the most frequent first.

    >>> list_counts({"RGB": 20, "L": 3})
    'RGB 20, L 3'
    """
    by_frequency = Counter(counts).most_common()
    parts = []
    for name, count in by_frequency[:MAX_COUNTS]:
        parts.append(f"{name} {count:,}")
    if len(by_frequency) > MAX_COUNTS:
        _, smallest = by_frequency[-1]
        parts.append(f"and {len(by_frequency) - MAX_COUNTS} more from {smallest:,} up")
    return ", ".join(parts)
