"""The rules of commit subjects, and the commits of this checkout."""

import subprocess
import sys

import pytest

from bench import commit_subjects

RULES = {
    "docs: Explain the range test": "",
    "quant: Process empty tensors": "",
    "tree: Feed seeds to every reader": "",
    "Explain the range test": "expected",
    "docs:Explain the range test": "expected",
    "docs: explain the range test": "expected",
    "docs: Explain the range test.": "expected",
    "prose: Explain the range test": "unknown area 'prose'",
    "docs: Explained the range test": "imperative",
    "docs: Explaining the range test": "imperative",
    "docs: Explains the range test": "imperative",
    "docs: Explain " + "x" * 59: "73 characters",
}


@pytest.mark.parametrize(("subject", "fault"), RULES.items())
def test_find_fault_names_the_broken_rule(subject, fault):
    message = commit_subjects.find_fault(subject)
    assert fault in message
    assert bool(fault) == bool(message)


def test_commit_subjects_without_history_are_not_checked(capsys):
    assert commit_subjects.main(["0123456789abcdef.."]) == 0
    assert "not checked" in capsys.readouterr().out


def test_commit_subjects_of_a_repository(tmp_path, monkeypatch, capsys):
    """Read the commits of a range, and end with 1 for a wrong subject."""
    monkeypatch.setattr(commit_subjects, "ROOT", tmp_path)
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "A")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "a@example.org")

    def git(*arguments):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)

    git("init", "-q")
    for subject in ("anything at all", "docs: Explain ranges", "docs: explains ranges"):
        git("commit", "-q", "--allow-empty", "-m", subject)
    assert commit_subjects.main(["HEAD~2..HEAD~1"]) == 0
    assert commit_subjects.main(["HEAD~2.."]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "docs: explains ranges" in lines[0]


def test_commit_subjects_command_passes_on_this_checkout():
    command = [sys.executable, "-m", "bench.commit_subjects"]
    process = subprocess.run(command, cwd=commit_subjects.ROOT, capture_output=True)
    assert process.returncode == 0, process.stderr.decode()
