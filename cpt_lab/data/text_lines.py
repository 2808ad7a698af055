"""Lines of text files: line breaks, markers at their ends and starts, and lines that two texts share.

A text that was prepared for another program often has its line ends written out, as ``<eos>`` or ``</s>``. Every line
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
MARKER_WORDS = ("EOS", "eos", "EOL", "BOS", "bos", "SOS", "sos")
STOPPED_WORDS = tuple(f"{word}." for word in MARKER_WORDS)
# last or first characters of markers that are no words
MARKER_SIGNS = ("\\n", "\u00b6", "\u23ce", "#", "|", "*")
MARKER_SHAPES = (
    r"<\|?/?[A-Za-z][\w/.-]{0,20}\|?>",  # <eos>, </s>, <|endoftext|>
    r"\[/?[A-Za-z]{2,8}\]|\{/?[A-Za-z]{2,8}\}",  # [SEP], {eos}
    r"<<?/?[A-Za-z]{2,8} ?/?>>?|&lt;/?[A-Za-z]{1,8}/?&gt;",  # <<EOS>>, <br />, &lt;eos&gt;
    r"<\uff5c[^\uff5c\s]{1,40}\uff5c>",  # the same with wide bars
    r"__?(?:eos|EOS|bos|BOS|sos|SOS|end|END|start|START)__?",
    rf"(?<!\S)(?:{'|'.join(MARKER_WORDS)})\.?(?!\S)",
    r"(?<!\S)(?:\\n|\u00b6|\u23ce|\#{2,}|\|{1,3}|\*{2,})(?!\S)",
)
MARKER = "|".join(MARKER_SHAPES)
END_MARKER, START_MARKER = (
    re.compile(rf"({MARKER})\s*$"),
    re.compile(rf"^\s*({MARKER})"),
)
# how markers end and begin: a quick look before the pattern
MARKER_ENDS, MARKER_STARTS = (
    (">", "]", "_", "}", "&gt;", *MARKER_WORDS, *STOPPED_WORDS, *MARKER_SIGNS),
    ("<", "[", "_", "{", "&lt;", *MARKER_WORDS, *MARKER_SIGNS),
)
MAX_MARKER_LENGTH = 48  # characters
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
    """Return a text with line feeds in place of CR and CR LF.

    Args:
        name: name of the file, for the report.
        text: text as it is in the file.
        report: gets facts about changes, and about characters that stand for damaged ones.
    """
    if text.startswith("\ufeff"):
        report.add("changed", f"{name}: the byte order mark is left out")
        text = text.removeprefix("\ufeff")
    for ending, ending_name in (("\r\n", "CR LF"), ("\r", "CR")):
        if count := text.count(ending):
            report.add(
                "changed",
                f"{name}: {pluralize(count, 'line')} ended in {ending_name}, and end in a line feed now",
            )
            text = text.replace(ending, "\n")
    if damaged := text.count("\ufffd"):
        report.add(
            "markers",
            f"{name}: {pluralize(damaged, 'character')} U+FFFD, which stand for damaged ones",
        )
    return text


def report_line_breaks(name: str, text: str, report: DataReport) -> None:
    """Add a fact about characters besides line feeds at which a text of words is split into lines."""
    counts = {}
    for character, character_name in BREAK_NAMES.items():
        count = text.count(character)
        if count:
            counts[character_name] = count
    if counts:
        report.add(
            "changed",
            f"{name}: lines end at these characters, too: {list_counts(counts)}",
        )


def report_word_breaks(name: str, text: str, report: DataReport) -> None:
    """Add a fact about white space besides blanks, tabs and ends of lines at which a text is split into words."""
    known = {" ", "\t", "\n", *BREAK_NAMES}
    others = sorted(c for c in set(text) - known if c.isspace())
    if others:
        counts = {f"U+{ord(c):04X}": text.count(c) for c in others}
        report.add(
            "changed",
            f"{name}: words end at these characters, too: {list_counts(counts)}",
        )


def strip_markers(texts: Mapping[str, str], report: DataReport) -> dict[str, str]:
    """Return texts without the markers that end or begin their lines; report markers that stay words.

    ``<eos>`` is always the end of a line. Another marker is one if it ends, or begins, nearly all lines of a text, or
    if it is alone in a line for nearly every other line.
    """
    lines = {split: text.splitlines(keepends=True) for split, text in texts.items()}
    for pattern, position in ((END_MARKER, "end in"), (START_MARKER, "begin with")):
        matches = {split: _find_markers(part, pattern) for split, part in lines.items()}
        while markers := _line_markers(lines, matches):
            for split, part in lines.items():
                _strip_split(split, part, matches[split], markers, report)
            matches = {
                split: _find_markers(part, pattern) for split, part in lines.items()
            }

        remaining: Counter[str] = Counter()
        for split_matches in matches.values():
            for match in split_matches.values():
                if _stands_alone(match) and match[1] != UNKNOWN:
                    remaining[repr(match[1])] += 1
        if remaining:
            report.add(
                "markers",
                f"lines that {position} what looks like a marker, but stays a word: {list_counts(remaining)}",
            )
    return {split: "".join(part) for split, part in lines.items()}


def _find_markers(lines: list[str], pattern: re.Pattern[str]) -> Matches:
    """Return the match of a pattern in every line that has one, by the number of the line."""
    matches = {}
    for number, line in enumerate(lines):
        # A quick check of the first or last character comes before the slower pattern.
        if pattern is END_MARKER:
            may_match, start = line.rstrip().endswith(MARKER_ENDS), _search_start(line)
        else:
            may_match, start = line.lstrip().startswith(MARKER_STARTS), 0
        match = pattern.search(line, start) if may_match else None
        if match:
            matches[number] = match
    return matches


def _search_start(line: str) -> int:
    """Return the position from which to search a line for a marker at its end."""
    return max(0, len(line.rstrip()) - MAX_MARKER_LENGTH)


def _stands_alone(match: re.Match[str]) -> bool:
    """Return whether a marker is a word of its own, not a part of a longer one."""
    before, after = match.string[: match.start(1)], match.string[match.end(1) :]
    return (not before or before[-1].isspace()) and (not after or after[0].isspace())


def _line_markers(
    lines: Mapping[str, list[str]], matches: Mapping[str, Matches]
) -> set[str]:
    """Return the markers that are ends, or starts, of lines."""
    markers = set()
    for split, split_matches in matches.items():
        num_marker_lines = sum(
            match.string.strip() == match[1] for match in split_matches.values()
        )
        num_filled = sum(not line.isspace() for line in lines[split])
        num_text_lines = max(
            1, num_filled - num_marker_lines
        )  # lines with more than a marker
        counts = Counter(match[1] for match in split_matches.values())
        for marker, count in counts.items():
            is_unknown_word = marker in (UNKNOWN, *UNKNOWN_SPELLINGS)
            if marker == EOS or (
                count >= MIN_MARKED_SHARE * num_text_lines and not is_unknown_word
            ):
                markers.add(marker)
    return markers


def _strip_split(
    split: str,
    lines: list[str],
    matches: Matches,
    markers: set[str],
    report: DataReport,
) -> None:
    """Remove markers from the lines of a split, in place."""
    counts: Counter[tuple[str, str]] = Counter()
    for number, match in matches.items():
        if match[1] not in markers:
            continue
        line = lines[number]
        before, after = line[: match.start(1)], line[match.end(1) :]
        if match.re is END_MARKER:
            lines[number] = before.rstrip() + _line_break(line)
            counts[match[1], "end in"] += 1
        else:
            lines[number] = before + after.lstrip(" \t")
            counts[match[1], "begin with"] += 1

    for (marker, position), count in sorted(counts.items()):
        if position == "end in":
            treatment = "taken as the end that every line gets"
        else:
            treatment = "left out, as the line begins there"
        report.add(
            "markers",
            f"{count:,} of {pluralize(len(lines), 'line')} of {split} {position} {marker!r}: {treatment}",
        )


def _line_break(line: str) -> str:
    """Return the characters that end a line, "" for the last line of a text without."""
    return line[len(line.splitlines()[0]) :]


def report_unknown_words(split: str, text: str, report: DataReport) -> None:
    """Add facts about words in a text that stand for unknown words or line ends."""
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
    other_spellings = {
        repr(word): words[word] for word in UNKNOWN_SPELLINGS if words[word]
    }
    if other_spellings:
        report.add(
            "markers",
            f"{split}: words of their own beside '{UNKNOWN}': {list_counts(other_spellings)}",
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
    """Report lines that two texts share; refuse a text that equals, or is mostly part of, another one.

    Args:
        dataset: name of the data set, for errors.
        texts: texts by split.
        report: gets a fact for each two texts that share lines of at least five words.
        refuse: whether an overlap is an error; False reports it.

    Raises:
        ValueError: names the texts, how many lines they share and the first of them.
    """
    lines = {split: long_lines(text) for split, text in texts.items()}
    words = {
        split: " ".join(text.split()) for split, text in texts.items()
    }  # without line breaks
    for split, other_split in (
        ("test", "train"),
        ("valid", "train"),
        ("test", "valid"),
    ):
        purpose = SPLIT_PURPOSES[split]
        other_text = f"the {'training' if other_split == 'train' else other_split} text"
        is_equal = texts[split] == texts[other_split] and (
            other_split == "train" or lines[split]
        )
        if refuse and is_equal:
            raise ValueError(
                f"{dataset}: the {split} text is {other_text}; a {purpose} needs another"
            )
        if refuse and lines[split] and words[split] in words[other_split]:
            raise ValueError(
                f"{dataset}: the {split} text is a part of {other_text}; a {purpose} needs another"
            )

        other_lines = set(lines[other_split])
        shared = [line for line in lines[split] if line in other_lines]
        if not shared:
            continue
        text = (
            f"{len(shared):,} of {len(lines[split]):,} lines of at least {LONG_LINE_WORDS} words of the {split} text "
            f"stand in {other_text}, too"
        )
        if refuse and len(shared) > MAX_SHARED_LINES * len(lines[split]):
            raise ValueError(
                f"{dataset}: {text}; a {purpose} needs others than {shared[0][:60]!r}"
            )
        report.add("overlap", text)
