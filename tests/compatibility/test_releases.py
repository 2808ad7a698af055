"""Files of earlier releases: read with equal values, reported as different, or rejected with a reason."""

import importlib
import io
import json
import lzma
import shutil
import warnings
from dataclasses import replace

import pytest
import torch

import cpt_core as cpt
from bench import release_corpus
from bench.release_items import STATE_AT, make_batch, make_trainer, train_on
from cpt_extras.kernels import backend, gemm_backend
from cpt_lab.analysis.run_table import load
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.numerics import OtherNumericsWarning
from cpt_lab.sweeps import verify
from cpt_lab.sweeps.row_format import load_rows
from cpt_lab.sweeps.sweep import run_grid

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)
CORPUS = release_corpus.CORPUS
DOCS = CORPUS.parents[1] / "docs" / "sweeps.md"
ITEMS = ("rows", "checkpoint", "scheduler state", "exported program", "whole pickle")
EQUAL, DIFFERS, REFUSED, NONE = "equal", "differs and says so", "refused", "–"
EXPECTED = {  # of every release that is kept, by its folder
    "0.1.0": (DIFFERS, NONE, REFUSED, NONE, REFUSED),
    "0.2.0": (EQUAL, EQUAL, EQUAL, EQUAL, REFUSED),
    "0.2.0-5b61b1d": (EQUAL, EQUAL, EQUAL, EQUAL, REFUSED),
    "0.3.0-e8da0c7": (EQUAL, EQUAL, EQUAL, EQUAL, REFUSED),
    "0.3.0": (EQUAL, EQUAL, EQUAL, EQUAL, EQUAL),
}


@pytest.fixture(autouse=True)
def products_of_torch(monkeypatch):
    """Compute float32 matmuls with torch, as when the corpus was recorded."""
    monkeypatch.setattr(
        backend, "_active", replace(backend.backend(), products="torch")
    )
    library = gemm_backend.active
    gemm_backend.use("torch")
    yield
    gemm_backend.use(library)


def run_again(row, store):
    """Repeat the run of a row in a store, and return its verdict and the first step it took."""
    steps = []
    options = {
        "workers": 0,
        "progress": False,
        "on_step": lambda spec, step, loss: steps.append(step),
    }
    (found,) = run_grid([RunSpec.from_dict(row["spec"])], store, **options)
    return word_of(row, found), steps[0]


def word_of(row, found):
    """Return the verdict on a row that was run again.

    On another processor the metrics of these few steps differ as much as other noise makes them. There the first loss
    is compared, and what rounding cannot change.
    """
    finding = verify.compare(row, found, [row])
    words = {"bit for bit": EQUAL, "within tolerance": EQUAL, "not comparable": DIFFERS}
    if finding.verdict in words:
        return words[finding.verdict]
    first_equal = found["loss"][0] == pytest.approx(row["loss"][0], rel=0.01)
    exact_equal = all(found[name] == row[name] for name in verify.EXACT_FIELDS)
    return EQUAL if finding.differs and first_equal and exact_equal else str(finding)


def outcome_of_rows(folder, tmp_path):
    words = set()
    for row in load_rows(folder / "rows.jsonl"):
        words.add(run_again(row, tmp_path / "rows.jsonl")[0])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(folder / "rows.jsonl")
    said = any(issubclass(one.category, OtherNumericsWarning) for one in caught)
    return (
        words.pop()
        if len(words) == 1 and said == (words == {DIFFERS})
        else f"{words}, said: {said}"
    )


def outcome_of_checkpoint(folder, tmp_path):
    (row,) = (
        row
        for row in load_rows(folder / "rows.jsonl")
        if row["spec"]["recipe"]["task"] == "graph"
    )
    place = tmp_path / "rows.checkpoints" / f"{row['key']}.pt"
    place.parent.mkdir()
    shutil.copy(folder / "checkpoint.pt", place)
    word, first_step = run_again(row, tmp_path / "rows.jsonl")
    return word if first_step == 8 else f"began at step {first_step}"


def outcome_of_state(folder, tmp_path):
    states, expected = (
        torch.load(folder / "states.pt", weights_only=True),
        expected_of(folder),
    )
    model, optimizer, scheduler = make_trainer(cpt)
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    try:
        scheduler.load_state_dict(states["scheduler"])
    except ValueError as error:
        return (
            REFUSED
            if "entries that this release does not know: 'noise'" in str(error)
            else str(error)
        )
    losses = train_on(model, optimizer, scheduler, range(STATE_AT, 2 * STATE_AT))
    return (
        EQUAL
        if losses == pytest.approx(expected["losses"], rel=1e-6)
        else f"losses are {losses}"
    )


def outcome_of_program(folder, tmp_path):
    program = torch.export.load(
        io.BytesIO(lzma.decompress((folder / "program.pt2.xz").read_bytes()))
    )
    outputs = program.module()(make_batch(100)).tolist()
    equal = torch.allclose(
        torch.tensor(outputs),
        torch.tensor(expected_of(folder)["outputs"]),
        rtol=1e-6,
        atol=1e-7,
    )
    return EQUAL if equal else f"outputs are {outputs}"


def outcome_of_pickle(folder, tmp_path):
    try:
        model = torch.load(folder / "model.pickle", weights_only=False)
    except ModuleNotFoundError as error:
        return REFUSED if "pickled whole" in str(error) else str(error)
    with torch.no_grad(), cpt.precision(model.eval(), 8):
        outputs = model(make_batch(100))
    return (
        EQUAL
        if torch.allclose(
            outputs, torch.tensor(expected_of(folder)["outputs"]), rtol=1e-6
        )
        else str(outputs)
    )


def expected_of(folder):
    return json.loads((folder / "expected.json").read_text())


OUTCOMES = (
    outcome_of_rows,
    outcome_of_checkpoint,
    outcome_of_state,
    outcome_of_program,
    outcome_of_pickle,
)
CASES = [
    pytest.param(
        name,
        outcome,
        word,
        id=f"{name}: {item}",
        marks=pytest.mark.slow if item == "rows" else (),
    )
    for name, words in EXPECTED.items()
    for item, outcome, word in zip(ITEMS, OUTCOMES, words, strict=True)
    if word != NONE
]


@pytest.mark.parametrize(("name", "outcome", "word"), CASES)
def test_release_item_has_documented_outcome(name, outcome, word, tmp_path):
    assert outcome(CORPUS / name, tmp_path) == word


def test_release_corpus_matches_documentation():
    """Require a table row in the documentation for every folder of the corpus."""
    assert {
        folder.name for folder in CORPUS.iterdir() if (folder / "rows.jsonl").exists()
    } == set(EXPECTED)
    files = [
        path
        for path in CORPUS.rglob("*")
        if path.is_file() and path.parent.name != "__pycache__"
    ]
    assert sum(path.stat().st_size for path in files) < 300_000
    text = DOCS.read_text()
    for name, words in EXPECTED.items():
        cells = " | ".join(words)
        assert f"| {name} | {cells} |" in text, (
            f"docs/sweeps.md lacks the line of {name}"
        )


def test_missing_module_error_explains_old_pickles(tmp_path):
    """Explain pickles of an older release, and leave other import errors unchanged."""
    with pytest.raises(
        ModuleNotFoundError, match="loads only in the release that wrote it"
    ) as caught:
        importlib.import_module("cpt_core.quantization.layers")
    assert caught.value.name == "cpt_core.quantization.layers"
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        exec("from cpt_core.quantization import no_such_name")
    with pytest.raises(
        ModuleNotFoundError, match=r"^No module named 'no_such_package'$"
    ):
        importlib.import_module("no_such_package")
