"""Lines of texts as files have them: line breaks, markers of ends and starts, and lines that two texts share.

A text that was made for another program often has its ends of lines written out, as ``<eos>`` or ``</s>``. Every line
gets an end here, so a second one would follow each line and cost nothing to predict: perplexity would fall for nothing.
"""

import re
from collections import Counter
from collections.abc import Mapping

from cpt_lab.data.report import DataReport, list_counts, pluralize

EOS, UNKNOWN = "<eos>", "<unk>"
UNKNOWN_SPELLINGS = (
    "<UNK>",
    "<Unk>",
    "[UNK]",
    "<oov>",
    "<OOV>",
)  # words of their own here
MARKER_SHAPES = (
    r"<\|?/?[A-Za-z][\w/.-]{0,20}\|?>",  # <eos>, </s>, <|endoftext|>
    r"\[/?[A-Z]{2,8}\]",  # [SEP]
    r"<\uff5c[^\uff5c\s]{1,40}\uff5c>",  # the same with wide bars
    r"__?(?:eos|EOS|bos|BOS|sos|SOS|end|END|start|START)__?",
    r"(?<!\S)(?:EOS|eos|EOL|BOS|bos|SOS|sos|\\n|\u00b6|\u23ce)(?!\S)",  # as words alone
)
MARKER = "|".join(MARKER_SHAPES)
END_MARKER, START_MARKER = (
    re.compile(rf"({MARKER})\s*$"),
    re.compile(rf"^\s*({MARKER})"),
)
MARKER_WORDS = (
    "EOS",
    "eos",
    "EOL",
    "BOS",
    "bos",
    "SOS",
    "sos",
    "\\n",
    "\u00b6",
    "\u23ce",
)
MARKER_ENDS, MARKER_STARTS = (
    (">", "]", "_", *MARKER_WORDS),
    ("<", "[", "_", *MARKER_WORDS),
)  # characters of the markers: a quick look
MAX_MARKER_LENGTH = 48  # characters of a marker, at most
MIN_MARKED_SHARE = (
    0.9  # of the lines of a text: a marker that ends so many is the end of a line
)
LONG_LINE_WORDS = 5  # words: shorter lines recur in any text
MIN_UNSPACED_LETTERS = (
    8  # of a word, on average: words of other scripts that are sentences
)
MAX_SHARED_LINES = 0.5  # of the long lines of a text
SPLIT_PURPOSES = {"valid": "validation", "test": "test"}
BREAK_NAMES = {
    "\x0b": "vertical tabs",
    "\x0c": "form feeds",
    "\x1c": "U+001C",
    "\x1d": "U+001D",
    "\x1e": "U+001E",
    "\x85": "U+0085",
    "\u2028": "U+2028",
    "\u2029": "U+2029",
}
Matches = dict[int, re.Match[str]]  # by the number of the line


def normalize_line_breaks(name: str, text: str, report: DataReport) -> str:
    """Return a text whose lines end in a line feed where they ended in CR or CR LF.

    Args:
        name: of the file, for the report.
        text: as it is in the file.
        report: gets a fact for what was changed, and for characters that stand for damaged ones.
    """
    if text.startswith("\ufeff"):
        report.add("changed", f"{name}: the byte order mark is left out")
        text = text.removeprefix("\ufeff")
    for ending, said in (("\r\n", "CR LF"), ("\r", "CR")):
        if count := text.count(ending):
            report.add(
                "changed",
                f"{name}: {pluralize(count, 'line')} ended in {said}, and end in a line feed now",
            )
            text = text.replace(ending, "\n")
    if damaged := text.count("\ufffd"):
        report.add(
            "markers",
            f"{name}: {pluralize(damaged, 'character')} U+FFFD, which stand for damaged ones",
        )
    return text


def report_line_breaks(name: str, text: str, report: DataReport) -> None:
    """Add the characters besides line feeds at which a text of words is cut into lines."""
    counts = {said: text.count(character) for character, said in BREAK_NAMES.items()}
    if found := {said: count for said, count in counts.items() if count}:
        report.add(
            "changed",
            f"{name}: lines end at these characters, too: {list_counts(found)}",
        )


def strip_markers(texts: Mapping[str, str], report: DataReport) -> dict[str, str]:
    """Return texts without the markers that end or begin their lines; markers that stay words are reported.

    ``<eos>`` is always the end of a line. Another marker is one where it ends, or begins, nearly all lines of a text,
    or stands in a line of its own for nearly every other line.
    """
    lines = {split: text.splitlines(keepends=True) for split, text in texts.items()}
    for pattern, place in ((END_MARKER, "end in"), (START_MARKER, "begin with")):
        found = {split: _find_markers(part, pattern) for split, part in lines.items()}
        while taken := _line_markers(lines, found):
            for split, part in lines.items():
                _strip_split(split, part, found[split], taken, report)
            found = {
                split: _find_markers(part, pattern) for split, part in lines.items()
            }
        words = Counter(
            match[1]
            for part in found.values()
            for match in part.values()
            if _stands_alone(match)
        )
        if stay := {
            repr(marker): count for marker, count in words.items() if marker != UNKNOWN
        }:
            report.add(
                "markers",
                f"lines that {place} what looks like a marker, but stays a word: {list_counts(stay)}",
            )
    return {split: "".join(part) for split, part in lines.items()}


def _find_markers(lines: list[str], pattern: re.Pattern[str]) -> Matches:
    """Return the lines that have a marker in the place of a pattern."""
    found = {}
    for number, line in enumerate(lines):
        likely = (
            line.rstrip().endswith(MARKER_ENDS)
            if pattern is END_MARKER
            else line.lstrip().startswith(MARKER_STARTS)
        )
        if likely and (
            match := pattern.search(
                line, _search_start(line) if pattern is END_MARKER else 0
            )
        ):
            found[number] = match
    return found


def _search_start(line: str) -> int:
    """Return where to begin to look for a marker at the end of a line."""
    return max(0, len(line.rstrip()) - MAX_MARKER_LENGTH)


def _stands_alone(match: re.Match[str]) -> bool:
    """Return whether a marker stands alone and is no part of a longer word."""
    before, after = match.string[: match.start(1)], match.string[match.end(1) :]
    return (not before or before[-1].isspace()) and (not after or after[0].isspace())


def _line_markers(
    lines: Mapping[str, list[str]], found: Mapping[str, Matches]
) -> set[str]:
    """Return the markers that are ends, or starts, of lines."""
    taken = set()
    for split, matches in found.items():
        marked = sum(match.string.strip() == match[1] for match in matches.values())
        filled = max(
            1, sum(not line.isspace() for line in lines[split]) - marked
        )  # lines with more than a marker
        for marker, count in Counter(match[1] for match in matches.values()).items():
            if marker == EOS or (
                count >= MIN_MARKED_SHARE * filled
                and marker not in (UNKNOWN, *UNKNOWN_SPELLINGS)
            ):
                taken.add(marker)
    return taken


def _strip_split(
    split: str, lines: list[str], matches: Matches, taken: set[str], report: DataReport
) -> None:
    """Take markers out of the lines of a split, in place."""
    counts: Counter[tuple[str, str]] = Counter()
    for number, match in matches.items():
        if match[1] in taken:
            line, ends = lines[number], match.re is END_MARKER
            before, after = line[: match.start(1)], line[match.end(1) :]
            lines[number] = (
                before.rstrip() + _line_break(line)
                if ends
                else before + after.lstrip(" \t")
            )
            counts[match[1], "end in" if ends else "begin with"] += 1
    for (marker, place), count in sorted(counts.items()):
        what = (
            "taken as the end that every line gets"
            if place == "end in"
            else "left out, as the line begins there"
        )
        report.add(
            "markers",
            f"{count:,} of {pluralize(len(lines), 'line')} of {split} {place} {marker!r}: {what}",
        )


def _line_break(line: str) -> str:
    """Return the characters that end a line, "" for the last line of a text without."""
    return line[len(line.splitlines()[0]) :]


def report_unknown_words(split: str, text: str, report: DataReport) -> None:
    """Add how often words stand in a text that mean unknown words or ends of lines."""
    special = {word for word in (UNKNOWN, EOS, *UNKNOWN_SPELLINGS) if word in text}
    words = (
        Counter(word for word in text.split() if word in special)
        if special
        else Counter[str]()
    )
    if count := words[UNKNOWN]:
        report.add(
            "markers", f"{split}: {count:,} times '{UNKNOWN}' in the file itself"
        )
    if count := words[EOS]:
        report.add(
            "markers",
            f"{split}: {count:,} times '{EOS}' inside lines, as if the line ended there",
        )
    if others := {repr(word): words[word] for word in UNKNOWN_SPELLINGS if words[word]}:
        report.add(
            "markers",
            f"{split}: words of their own beside '{UNKNOWN}': {list_counts(others)}",
        )


def long_lines(text: str) -> list[str]:
    """Return the lines of at least five words, or of a script without blanks, with single blanks between words.

    >>> long_lines("a  b c d e")
    ['a b c d e']
    """
    words = (line.split() for line in text.splitlines())
    return [
        " ".join(line)
        for line in words
        if len(line) >= LONG_LINE_WORDS or _is_unspaced(line)
    ]


def _is_unspaced(words: list[str]) -> bool:
    """Return whether a line is likely to be a sentence of a script without blanks, such as Chinese."""
    letters = sum(map(len, words))
    return (
        bool(words)
        and letters >= MIN_UNSPACED_LETTERS * len(words)
        and not any(word.isascii() for word in words)
    )


def check_overlap(
    dataset: str, texts: Mapping[str, str], report: DataReport, refuse: bool
) -> None:
    """Report lines that two texts share; refuse texts that are the same, or most of which is in another one.

    Args:
        dataset: name of the data set, for errors.
        texts: by split.
        report: gets a fact for each two texts that share lines of at least five words.
        refuse: whether an overlap is an error; False reports it.

    Raises:
        ValueError: names the texts, how many lines they share and the first of them.
    """
    lines = {split: long_lines(text) for split, text in texts.items()}
    words = {
        split: " ".join(text.split()) for split, text in texts.items()
    }  # however lines are cut
    for part, other in (("test", "train"), ("valid", "train"), ("test", "valid")):
        use, there = (
            SPLIT_PURPOSES[part],
            f"the {'training' if other == 'train' else other} text",
        )
        if refuse and texts[part] == texts[other] and (other == "train" or lines[part]):
            raise ValueError(
                f"{dataset}: the {part} text is {there}; a {use} needs another"
            )
        if refuse and lines[part] and words[part] in words[other]:
            raise ValueError(
                f"{dataset}: the {part} text is a part of {there}; a {use} needs another"
            )
        known = set(lines[other])
        shared = [line for line in lines[part] if line in known]
        if not shared:
            continue
        which = f"lines of at least {LONG_LINE_WORDS} words of the {part} text stand in {there}, too"
        said = f"{len(shared):,} of {len(lines[part]):,} {which}"
        if refuse and len(shared) > MAX_SHARED_LINES * len(lines[part]):
            raise ValueError(
                f"{dataset}: {said}; a {use} needs others than {shared[0][:60]!r}"
            )
        report.add("overlap", said)
