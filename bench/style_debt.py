"""Style debt: the violations of ruff's rules that are older than the rules, listed per file at the end of ruff.toml.

    python -m bench.style_debt          remove fixed violations from the list
    python -m bench.style_debt --add    list new violations too: after files moved, or when a rule is turned on

The list is the last part of `[lint.per-file-ignores]`, below the comment DEBT_COMMENT. Ruff ignores the listed rules in
the listed files, so that only new violations fail `make lint`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "ruff.toml"
DEBT_COMMENT = "# Style debt: "
DEBT_RULES = re.compile(r"(C90|D|N|PLR)\d+")  # other rules have no debt

Debt = set[tuple[str, str]]  # (file, rule), such as ("bench/sizes.py", "D417")


def split_config(text: str) -> tuple[str, str]:
    """Return the settings and the debt list of ruff.toml, both as text.

    Raises:
        ValueError: if ruff.toml has no comment that starts the list.
    """
    lines = text.splitlines(keepends=True)
    for number, line in enumerate(lines):
        if line.startswith(DEBT_COMMENT):
            return "".join(lines[: number + 1]), "".join(lines[number + 1 :])
    raise ValueError(f"ruff.toml: expected a line that starts with {DEBT_COMMENT!r}")


def parse_debt(listed: str) -> Debt:
    """Return the (file, rule) pairs of a debt list."""
    files = tomllib.loads(listed)
    return {(file, rule) for file, rules in files.items() for rule in rules}


def find_violations(settings: str) -> Debt:
    """Return the (file, rule) pairs of DEBT_RULES that ruff finds with the settings, without the debt list.

    Raises:
        RuntimeError: if ruff does not run.
    """
    ruff = [sys.executable, "-m", "ruff", "check", "--exit-zero", "--no-cache"]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "ruff.toml")
        config.write_text(settings, encoding="utf-8")
        # Ruff resolves the patterns of a config that is given by name in the working directory.
        command = [*ruff, "--output-format", "json", "--config", str(config), "."]
        process = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, check=False
        )
    if process.returncode:
        raise RuntimeError(f"ruff check failed: {process.stderr}")
    return {
        (Path(v["filename"]).relative_to(ROOT).as_posix(), v["code"])
        for v in json.loads(process.stdout)
        if DEBT_RULES.fullmatch(v["code"])
    }


def format_debt(debt: Debt) -> str:
    """Return the lines of a debt list: one per file, files and rules sorted."""
    rules_by_file: dict[str, list[str]] = {}
    for file, rule in sorted(debt):
        rules_by_file.setdefault(file, []).append(rule)

    lines = []
    for file, rules in rules_by_file.items():
        lines.append(f"{json.dumps(file)} = {json.dumps(rules)}\n")
    return "".join(lines)


def main() -> int:
    """Rewrite the debt list, and print its number of (file, rule) pairs."""
    parser = argparse.ArgumentParser(
        description="Update the list of style debt in ruff.toml."
    )
    parser.add_argument("--add", action="store_true", help="List new violations too.")
    allow_new = parser.parse_args().add
    settings, listed = split_config(CONFIG.read_text(encoding="utf-8"))
    old_debt, violations = parse_debt(listed), find_violations(settings)
    new_debt = violations if allow_new else violations & old_debt
    CONFIG.write_text(settings + format_debt(new_debt), encoding="utf-8")
    print(f"style debt: {len(old_debt)} before, {len(new_debt)} now")
    return 0


if __name__ == "__main__":
    sys.exit(main())
