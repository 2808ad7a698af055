"""The Makefile, called in an empty folder with a Python that prints its arguments."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRINTS_ARGUMENTS = '#!/bin/sh\nfor word in "$@"; do printf \'%s\\n\' "$word"; done\n'


@pytest.fixture
def make(tmp_path):
    """Return a function that calls make, and returns its status, stdout and stderr without make's own lines."""
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PRINTS_ARGUMENTS)
    python.chmod(0o755)
    for target in (".packages", ".installed"):
        (tmp_path / ".venv" / target).touch()

    def call(*words, **environment):
        process = subprocess.run(
            ["make", "-C", tmp_path, "-s", *words],
            capture_output=True,
            text=True,
            env={"PATH": os.environ["PATH"], **environment},
        )
        outputs = process.stdout.splitlines(), process.stderr.splitlines()
        out, err = (
            [line for line in lines if not line.startswith("make")] for lines in outputs
        )
        return process.returncode, out, err

    return call


SPECIAL = 'a$b a$$b it\'s"mine" a;b $(HOME) `id` * \\a\\'.split()


def test_make_passes_special_characters_unchanged(make):
    """Hand variables to programs as they were written, without executing them."""
    dataset = " ".join(SPECIAL)
    called = ["-m", "cpt_lab", "reproduce", "--dataset", dataset]
    assert make("reproduce", f"DATASET={dataset}") == (0, called, [])
    assert make("reproduce", DATASET=dataset) == (0, called, [])
    words = "-m cpt_lab reproduce --scale paper --notebook 03 --parameter"
    parameters = f"dataset={dataset} q=[1, 2]"
    given = ("SCALE=paper", "NB=03", f"PARAMS={parameters}")
    assert make("reproduce", *given) == (0, [*words.split(), parameters], [])


def test_make_refuses_variables_in_lower_case(make):
    status, out, (error,) = make("reproduce", "nb=01")
    assert (status, out) == (2, [])
    assert "unknown variable nb=01; did you mean NB=01?" in error


@pytest.mark.parametrize(
    ("target", "variables", "called"),
    [
        (
            "mutants",
            ("ONLY={0}", "JOBS={1}", "CHANGED={1}"),
            "-m bench.mutants --only {0} -j {1} --changed {1}",
        ),
        ("demo-check", ("ONLY={0}",), "-m bench.demo_check --only {0}"),
        (
            "third-party",
            ("ONLY={0}", "UPDATE=1"),
            "-m bench.third_party --only {0} --update",
        ),
        ("compat", ("COMPAT=--torch {0}",), "-m bench.compat --torch {0}"),
        ("reproduce", (), "-m cpt_lab reproduce"),
    ],
)
def test_make_target_splits_words_at_blanks(target, variables, called, make):
    several, one = " ".join(SPECIAL), SPECIAL[4]
    words = [variable.format(several, one) for variable in variables]
    assert make(target, *words) == (0, called.format(several, one).split(" "), [])


def test_make_evidence_verifies_a_row_per_store(make, tmp_path):
    folder = tmp_path / "data" / "results"
    folder.mkdir(parents=True)
    for name in ("a.jsonl", "b.jsonl", "no_rows.json"):
        (folder / name).touch()
    verify = "-m cpt_lab verify --rows 1 --cheapest --skip-missing"
    stores = "data/results/a.jsonl data/results/b.jsonl"
    called = f"-m cpt_lab claims --evidence {verify} {stores}".split()
    assert make("evidence") == (0, called, [])


PIP_ERRORS = {
    "exit 1": "is there a network connection",
    'echo "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES" >&2; exit 1': (
        "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"
    ),
}
NETWORK_ERRORS = (
    "Failed to establish a new connection: Name or service not known",
    "Temporary failure in name resolution",
    "[Errno 101] Network is unreachable",
    "ProxyError(Cannot connect to proxy.)",
)
for _error in NETWORK_ERRORS:
    _retries = f'for i in 1 2 3; do echo "WARNING: Retrying: {_error}" >&2; done'
    PIP_ERRORS[f"{_retries}; exit 1"] = "setup: no network: "


@pytest.mark.parametrize(("pip", "message"), PIP_ERRORS.items())
def test_make_setup_names_reason_of_failure(pip, message, make, tmp_path):
    """Install with pip where uv is missing, and name the network only if it failed."""
    cases = f'*"pip install"*) {pip};; *"-m uv"*) exit 1;; *" -c "*|-c*) echo True;;'
    script = tmp_path / ".venv/bin/python"
    script.write_text(f'#!/bin/sh\ncase "$*" in {cases} esac\n')
    (tmp_path / ".venv/.packages").unlink()
    status, _, errors = make("setup", f"PYTHON={script}")
    assert status == 2
    assert message in errors[0]
    assert ("no network" in "".join(errors)) == ("no network" in message)
    assert len(errors) == (2 if "HASHES" in message else 1)
    assert not (tmp_path / ".venv/.packages").exists()


def test_make_clean_keeps_rows_unless_requested(make, tmp_path):
    rows = "runs/paper/image.jsonl"
    checkpoint = "runs/paper/image.checkpoints/0.pt"
    generated = ("runs/reproduce/demo/index.html", ".ruff_cache/0/x")
    for name in (rows, checkpoint, *generated, "data/a/b"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1\n2\n")

    def remaining():
        paths = (rows, checkpoint, *generated, "data/a/b", ".venv")
        return {path for path in paths if (tmp_path / path).exists()}

    status, out, _ = make("clean")
    assert (status, out[0]) == (0, f"kept: {rows} (2 rows)")
    assert "make clean RUNS=delete" in out[1]
    assert remaining() == {rows, checkpoint, "data/a/b", ".venv"}
    assert make("distclean")[0] == 0
    assert remaining() == {rows, checkpoint, "data/a/b"}
    assert make("clean", "RUNS=delete") == (0, [], [])
    assert remaining() == {"data/a/b"}
