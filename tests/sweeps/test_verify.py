"""Verification of stored rows by rerunning: exact equality, tolerances on different machines, reports."""

import copy
import os
from dataclasses import replace
from statistics import stdev

import pytest
from helpers import (
    PROVENANCE,
    refused,
    row_of,
    smoke_spec,
    specs_of,
    stored_row,
    write_rows,
)

from cpt_core.quantization import rounding
from cpt_extras.kernels import backend
from cpt_lab.experiments import designs
from cpt_lab.experiments.spec import RunSpec
from cpt_lab.paths import ROOT, results_dir
from cpt_lab.provenance import version
from cpt_lab.sweeps import verify
from cpt_lab.sweeps.stores import describe, load_rows
from cpt_lab.sweeps.sweep import run_grid

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)


@pytest.fixture
def row(calm):
    """Return the row of CR: ten steps of the digits."""
    return copy.deepcopy(calm.rows[0])


@pytest.fixture
def store(calm, tmp_path):
    """Return a store with two finished runs and one that failed."""
    failed = describe(specs_of("RR")[0]) | {"status": "failed", "error": "boom"}
    return write_rows(tmp_path / "stored.jsonl", *calm.rows[:2], failed)


@pytest.fixture(autouse=True)
def none_committed(tmp_path, monkeypatch):
    """Hide the committed rows, so that thousands are not read."""
    monkeypatch.setattr(verify, "results_dir", lambda: tmp_path / "none")


@pytest.fixture
def reruns(calm, monkeypatch):
    """Replace reruns by the rows of the calm sweep; return the keys of the rows."""
    keys, rows = [], {row["key"]: row for row in calm.rows}

    def run_again(row):
        keys.append(row["key"])
        return rows[row["key"]]

    monkeypatch.setattr(verify, "run_again", run_again)
    return keys


# --- comparison -----------------------------------------------------------------------------------


@pytest.fixture
def finished_row():
    """Return a made-up row with every number that is compared."""
    place = {"when": "final", "precision": "q_max", "step": 10, "bits": 8}
    metrics = [
        {"name": "accuracy", "split": split, "value": value, **place}
        for split, value in (("valid", 0.6), ("test", 0.7))
    ]
    evaluation = {"precision": "q_max", "step": 10, "bits": 8}
    provenance = {
        "machine": {"cpu": "one", "threads": 1, "switches": {}},
        "versions": {"cpt-core": "0.3.0", "torch": version("torch")},
        "python": "3.11",
        "kernels": "cpp",
        "products": "torch",
    }
    return {
        **stored_row(specs_of("CR")[0], 0.7),
        "metrics": metrics,
        "evaluations": [{**evaluation, "test": {"accuracy": 0.7, "loss": 0.5}}],
        "loss": [2.0 - i / 8 for i in range(10)],
        "bitops": {"paper": 4.0, "per_op": 5.0},
        "data_checksum": "0123",
        "provenance": PROVENANCE | provenance,
    }


def last_bit(x):
    return x * (1 + 2**-52)


def times(factor):
    return lambda x: x * factor


def plus(number):
    return lambda x: x + number


def change(row, changes):
    """Set values of a row, or call functions with them, at paths such as "loss.0"."""
    for path, value in changes.items():
        *names, last = path.split(".")
        part = row
        for name in names:
            part = part[int(name) if isinstance(part, list) else name]
        last = int(last) if isinstance(part, list) else last
        part[last] = value(part[last]) if callable(value) else value


def without(*names):
    return lambda part: {k: v for k, v in part.items() if k not in names}


OTHER_CPU = {"provenance.machine.cpu": "another"}
ON_GPU = {"device": "some GPU"}
FIXED_SUMS = {"provenance.machine.switches": {"CPT_DETERMINISTIC": "1"}}
DIVERGED = {"status": "diverged", "metrics": []}
ERROR = "Traceback\n  somewhere\nValueError: no such thing\n"
EXACT_CHANGES = [
    {"bitops.per_op": last_bit},
    {"relative_cost": last_bit},
    {"noise_exposure": last_bit},
    {"steps": 11},
    {"data_checksum": "other"},
    {"key": "other"},
    {"status": "diverged"},
]
PROVENANCE_PATHS = "machine.cpu machine.threads machine.switches versions.torch python kernels products"
# Changes of a stored row; tests/golden/verify.txt has the findings of its comparison with a rerun.
ROW_CHANGES = [
    {},
    {"loss.2": last_bit},
    {"metrics.0.value": last_bit},
    {"evaluations.0.test.loss": last_bit},
    *EXACT_CHANGES,
    {"metrics": lambda metrics: metrics[1:]},
    {"loss": [1.5] * 10},
    {"provenance.commit": "3" * 40, "provenance.started": "2020", "loss.5": last_bit},
    {"provenance.versions.cpt-core": "0.0.1", "loss.5": last_bit},
    OTHER_CPU,
    *(
        {f"provenance.{path}": "another", "loss.5": last_bit}
        for path in PROVENANCE_PATHS.split()
    ),
    {"provenance.dirty": True},
    {"provenance": without("machine", "dirty"), "evaluations": []},
    ON_GPU,
    *(OTHER_CPU | changes for changes in EXACT_CHANGES),
    *(OTHER_CPU | {"loss.0": times(x)} for x in (1.09, 0.92, 1.12, 0.9)),
    OTHER_CPU | {"loss.9": times(2)},
    OTHER_CPU | {"evaluations.0.test.accuracy": times(2)},
    *(OTHER_CPU | {"metrics.1.value": plus(x)} for x in (-0.06, -0.04, 0.04, 0.06)),
]
# Changes of a stored row and of its rerun.
BOTH_CHANGES = [
    ({}, {"status": "failed", "error": ERROR}),
    (ON_GPU, ON_GPU),
    (ON_GPU, ON_GPU | FIXED_SUMS),
    (ON_GPU | FIXED_SUMS, ON_GPU | FIXED_SUMS),
    (DIVERGED, DIVERGED | {"steps": 12}),
    (DIVERGED | OTHER_CPU, DIVERGED | {"steps": 12}),
    (DIVERGED | OTHER_CPU, {"metrics": [], "steps": 12}),
]


def test_verify_finds_differences(finished_row, golden):
    """Compare every number bit for bit, or within a tolerance where the machine differs."""
    lines = []
    for row_changes, rerun_changes in [*((c, {}) for c in ROW_CHANGES), *BOTH_CHANGES]:
        row, rerun = copy.deepcopy(finished_row), copy.deepcopy(finished_row)
        change(row, row_changes)
        change(rerun, rerun_changes)
        finding = verify.compare(row, rerun, [])
        lines.append(str(finding).partition(" ")[2])
        is_reproduced = finding.verdict in ("bit for bit", "within tolerance")
        assert finding.reproduced == is_reproduced
    golden("verify.txt", "\n".join(lines) + "\n")


# --- tolerances -----------------------------------------------------------------------------------


def rows_of(arm, values, dataset="digits", metric="accuracy"):
    """Return rows of an arm, a seed for each value of the final metric."""
    specs = designs.quality_cost(
        "demo", dataset, schedules=[arm], static_bits=[], seeds=range(len(values))
    )
    return [row_of(s, value, metric) for s, value in zip(specs, values, strict=True)]


def test_verify_metric_tolerance_is_derived_from_seeds():
    values, spread_values = [0.80, 0.81, 0.82, 0.83], [0.5, 0.7, 0.9]
    cr, lr, rr = (
        rows_of("CR", values),
        rows_of("LR", spread_values),
        rows_of("RR", values),
    )
    er = rows_of("ER", [0.8, 0.8001])
    rows = cr + lr + rr
    reason = "5 standard deviations between seeds"
    tolerance = pytest.approx(5 * stdev(values))
    assert verify.allowed(cr[0], rows) == (tolerance, reason)
    own = pytest.approx(5 * stdev(spread_values))
    assert verify.allowed(lr[0], rows) == (own, reason)  # of its own arm
    assert verify.allowed(er[0], rows + er)[0] == tolerance  # the median of the arms
    equal_rows = rows_of("CR", [0.8] * 4)
    assert verify.allowed(cr[0], equal_rows)[0] == pytest.approx(0.005)
    # One recipe, three degrees of freedom.
    for few in ([], cr[:1], cr[:2] + rr[:2], rows_of("CR", values, "cifar10")):
        assert verify.allowed(cr[0], few) == (0.05, "without seeds to compare")
    (text,) = rows_of("CR", [80.0], "pydoc", "perplexity")
    assert verify.allowed(text, [])[0] == pytest.approx(4.0)


@pytest.mark.parametrize(("factor", "is_within"), [(1.45, True), (1.47, False)])
def test_verify_first_loss_tolerance_derives_from_seeds(
    factor, is_within, finished_row
):
    rows = [copy.deepcopy(finished_row) for _ in range(4)]
    for other, scale in zip(rows, (0.6, 0.6, 1.4, 1.4), strict=True):
        change(other, {"loss.0": times(scale)})  # their standard deviation is .46
    rerun = copy.deepcopy(finished_row)
    change(rerun, OTHER_CPU | {"loss.0": times(factor)})
    finding = verify.compare(finished_row, rerun, rows)
    assert (finding.verdict == "within tolerance") == is_within
    assert "(46% allowed: a standard deviation between seeds)" in finding.said[0]


@pytest.mark.slow
def test_verify_tolerance_excludes_rounding_down(tmp_path, monkeypatch):
    rows = load_rows(results_dir() / "image_digits.jsonl")
    (row, *_) = (
        row
        for row in rows
        if row["spec"]["arm"] == "static 4" and row["spec"]["recipe"]["model"] == "mlp6"
    )
    row["provenance"]["machine"]["cpu"] = "another one"  # else every bit would count
    round_to_grid = rounding.round_to_grid

    def round_down(x, low, width, steps, key, clip):
        x = x if key is not None else x - width / steps / 2
        return round_to_grid(x, low, width, steps, key, clip)

    monkeypatch.setattr(rounding, "round_to_grid", round_down)
    spec = RunSpec.from_dict(row["spec"])
    with backend.reference():
        (rerun,) = run_grid([spec], tmp_path / "again.jsonl", workers=0)
    finding = verify.compare(row, rerun, rows)
    assert finding.differs
    assert finding.verdict == "NOT REPRODUCED"
    assert verify.final(rerun) < verify.final(row) - verify.allowed(row, rows)[0]


def test_verify_tolerance_uses_seeds_of_committed_rows(tmp_path, monkeypatch):
    specs = designs.quality_cost(
        "demo", "digits", schedules=["CR"], static_bits=[], seeds=range(4)
    )
    values = [0.5, 0.6, 0.7, 0.8]
    rows = [stored_row(s, value) for s, value in zip(specs, values, strict=True)]
    write_rows(tmp_path / "all.jsonl", *rows)
    (tmp_path / "elsewhere").mkdir()
    sample = verify.sample(write_rows(tmp_path / "elsewhere" / "one.jsonl", rows[0]))
    monkeypatch.setattr(verify, "results_dir", lambda: tmp_path)
    monkeypatch.setattr(verify, "run_again", lambda row: row)
    monkeypatch.setattr(
        verify, "compare", lambda row, rerun, known: verify.allowed(row, known)
    )
    assert verify.allowed(rows[0], sample.rows)[1] == "without seeds to compare"
    tolerance = verify.allowed(rows[0], rows)
    assert list(verify.verify(sample)) == [tolerance]
    assert tolerance.reason == "5 standard deviations between seeds"


def test_verify_reruns_with_stored_threads_and_device(row, monkeypatch):
    """Rerun a row with its threads, device, kernels and switches."""
    calls, names = [], ("CPT_KERNELS", "CPT_PRODUCTS", "CPT_DETERMINISTIC")
    monkeypatch.setattr(verify.gemm_backend, "has_onednn_matmul", lambda: True)
    for name in names:
        monkeypatch.delenv(name, raising=False)

    def grid(specs, store, *, workers, progress, threads, device):
        calls.append((*map(os.environ.get, names), threads, device))
        assert [spec.key for spec in specs] == [row["key"]]
        assert (workers, progress) == (1, False)
        return [row]

    monkeypatch.setattr(verify, "run_grid", grid)
    row["provenance"] |= {"machine": {"threads": 3}, "kernels": "reference"}
    row["provenance"].pop("products", None)
    verify.run_again(row)
    row["provenance"] |= {"kernels": "cpp", "products": "onednn"}
    row["provenance"]["machine"]["switches"] = {"CPT_DETERMINISTIC": "1"}
    verify.run_again(row)
    monkeypatch.setenv("CPT_KERNELS", "cpp")
    of_gpu = {"device": "some GPU", "provenance": {"kernels": "reference"}}
    verify.run_again(row | of_gpu)
    assert calls == [  # rows that name no library are older than the choice
        ("reference", "torch", None, 3, "cpu"),
        (None, "onednn", "1", 3, "cpu"),
        ("cpp", "torch", None, 1, "cuda"),
    ]
    assert not {"CPT_PRODUCTS", "CPT_DETERMINISTIC"} & set(os.environ)


# --- samples, and the command ---------------------------------------------------------------------


def test_verify_samples_rows_randomly_or_cheapest(tmp_path):
    specs, store = specs_of("CR", seeds=range(12)), tmp_path / "rows.jsonl"
    rows = [stored_row(s, 0.5, seconds=20.0 - i) for i, s in enumerate(specs)]
    rows[11] |= {"status": "failed"}
    rows[10] |= {"status": "diverged"}
    write_rows(store, *rows)

    def seeds(**options):
        picked = verify.sample(store, **options).picked
        return [row["spec"]["seed"] for row in picked]

    assert seeds(rows=3, cheapest=True) == [10, 9, 8]
    assert sorted(seeds(rows=99)) == list(range(11))
    assert len(set(seeds())) == 5
    assert seeds(seed=1) == seeds(seed=1)
    assert len({tuple(seeds(seed=s)) for s in range(6)}) == 6
    refused("rows must be a whole number of at least 1, got 0", verify.sample, store, 0)
    nowhere = tmp_path / "none.jsonl"
    refused("there is no file", verify.sample, nowhere, error=FileNotFoundError)
    write_rows(store, rows[11])
    refused("has no finished row", verify.sample, store)


def test_verify_sample_of_gpu_row_needs_gpu(row, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    store = write_rows(tmp_path / "rows.jsonl", row | {"device": "some GPU"})
    reason = "ran on some GPU, and torch sees no CUDA device here"
    assert verify.sample(store).missing == f"{row['key']} {reason}"


@pytest.mark.slow
def test_verify_command_reproduces_rows_bit_for_bit(command, store, monkeypatch):
    def run_here(*arguments, workers, **options):
        return run_grid(*arguments, workers=0, **options)

    monkeypatch.setattr(verify, "run_grid", run_here)
    status, out, _ = command("verify", store)
    assert status == 0
    integrity, cost, _, *findings, summary = out.splitlines()
    assert integrity == "0 of 3 rows intact, 3 have no digest"
    assert cost.startswith("2 rows of 1 stores to run again; they took ")
    texts = sorted(line.split(maxsplit=1)[1] for line in findings)
    assert texts == ["CR seed 0: bit for bit", "LR seed 0: bit for bit"]
    assert summary.startswith("2 bit for bit by commit ")


def test_verify_command_exits_1_if_not_reproduced(command, reruns, store, tmp_path):
    assert command("verify", store, "--rows", 1)[0] == 0
    rows = load_rows(store)
    change(rows[1], {"loss.0": last_bit})
    changed = write_rows(tmp_path / "rows.jsonl", *rows)
    status, out, _ = command("verify", store, changed)
    assert status == 1
    assert "LR seed 0: NOT REPRODUCED: loss 1 of 10 is " in out
    assert "3 bit for bit, 1 NOT REPRODUCED by commit " in out
    assert len(reruns) == 5


def test_verify_command_names_missing_data_first(command, reruns, store, data_folder):
    spec = smoke_spec("digits")
    spec = replace(spec, recipe=replace(spec.recipe, dataset="cifar10"))
    far = write_rows(data_folder / "far.jsonl", stored_row(spec, 0.5))
    status, out, error = command("verify", store, far)
    assert (status, out, reruns) == (2, "", [])
    assert f"{far}: cifar10 is not in {data_folder}; get it with: " in error
    assert "--skip-missing" in error
    status, out, _ = command("verify", far, store, "--skip-missing")
    assert (status, len(reruns)) == (0, 2)
    *_, skipped, summary = out.splitlines()
    assert skipped.startswith(f"skipped {far}: cifar10 is not in ")
    assert summary.endswith("; 1 of 2 stores skipped")


def test_verify_tolerances_are_stated_on_results_page():
    page = (ROOT / "book" / "results.md.j2").read_text()
    percent = 100 * verify.BAND
    for text in (
        f"losses within {100 * verify.FIRST_LOSS:.0f} %",
        f"within {verify.SPREADS} standard deviations between seeds",
        f"{verify.BAND} of accuracy and mAP (shares of 1), {percent:.0f} % of the perplexity",
    ):
        assert text in page
