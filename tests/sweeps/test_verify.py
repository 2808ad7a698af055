"""Verification of stored rows by rerunning: exact equality, tolerances on different machines, reports."""

import copy
import json
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
from cpt_lab.sweeps import verify
from cpt_lab.sweeps.stores import describe, load_rows
from cpt_lab.sweeps.sweep import run_grid

pytestmark = pytest.mark.filterwarnings(
    "ignore::cpt_core.schedules.schedule.ShortCycleWarning"
)
ON_TEST = {"name": "accuracy", "split": "test", "when": "final", "precision": "q_max"}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Return a store with two runs from a clean tree and one that failed."""
    store = tmp_path_factory.mktemp("stored") / "rows.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "cpt_lab.provenance.commit", lambda: {"commit": "1" * 40, "dirty": False}
        )
        rows = run_grid(specs_of("CR", "LR"), store, workers=0)
    assert [row["status"] for row in rows] == ["ok", "ok"]
    failed = {**describe(specs_of("RR")[0]), "status": "failed", "error": "boom"}
    with open(store, "a") as f:
        f.write(json.dumps(failed) + "\n")
    return store


@pytest.fixture
def row(stored):
    return copy.deepcopy(load_rows(stored)[0])


@pytest.fixture(autouse=True)
def none_committed(tmp_path, monkeypatch):
    """Hide the committed rows, so that thousands are not read."""
    monkeypatch.setattr(verify, "results_dir", lambda: tmp_path / "none")


@pytest.fixture
def as_stored(stored, monkeypatch):
    """Replace runs by the store's first rows; count what was run."""
    ran, rows = [], {row["key"]: row for row in load_rows(stored)}
    monkeypatch.setattr(
        verify, "run_again", lambda row: ran.append(row["key"]) or rows[row["key"]]
    )
    return ran


def test_verify_command_reproduces_rows_bit_for_bit(command, stored, monkeypatch):
    here = lambda *args, workers, **options: run_grid(*args, workers=0, **options)  # noqa: E731 - a process takes seconds
    monkeypatch.setattr(verify, "run_grid", here)
    status, said, _ = command("verify", stored)
    assert status == 0
    whole, *lines = said.splitlines()
    assert whole == "2 of 3 rows intact, 1 have no digest"
    assert lines[0].startswith("2 rows of 1 stores to run again; they took ")
    assert sorted(line.split(maxsplit=1)[1] for line in lines[2:4]) == [
        "CR seed 0: bit for bit",
        "LR seed 0: bit for bit",
    ]
    assert lines[4].startswith("2 bit for bit by commit ")


def last_bit(x):
    return x * (1 + 2**-52)


def change(row, *path, by=last_bit):
    for name in path[:-1]:
        row = row[name]
    row[path[-1]] = by(row[path[-1]])


def more(x):
    return x + 1 if isinstance(x, int) else 2 * x


@pytest.mark.parametrize(
    ("said", "path", "by"),
    [
        ("loss 3 of 10 is ", ("loss", 2), last_bit),
        ("valid accuracy final at q_max is ", ("metrics", 0, "value"), last_bit),
        ("bitops per_op is ", ("bitops", "per_op"), last_bit),
        (
            "test loss at q_max after step 10 is ",
            ("evaluations", -1, "test", "loss"),
            last_bit,
        ),
        ("relative_cost is ", ("relative_cost",), last_bit),
        ("noise_exposure is ", ("noise_exposure",), last_bit),
        ("steps is 10, stored 11", ("steps",), more),
        ("data_checksum is ", ("data_checksum",), more),
        ("key is ", ("key",), more),
        ("status is ok, stored okok", ("status",), more),
    ],
)
def test_verify_compares_every_number_bit_for_bit(said, path, by, row):
    """Report a difference in the last bit of any number on the same machine."""
    found, whole = copy.deepcopy(row), verify.compare(row, copy.deepcopy(row), [])
    assert (whole.verdict, whole.differs, whole.reproduced) == ("bit for bit", (), True)
    change(row, *path, by=by)
    finding = verify.compare(row, found, [])
    assert (finding.verdict, finding.differs, finding.reproduced) == (
        "NOT REPRODUCED",
        (),
        False,
    )
    assert len(finding.said) == 1
    assert finding.said[0].startswith(said)


def test_verify_reports_missing_numbers_and_shortens_lists(row):
    found = copy.deepcopy(row)
    gone = row["metrics"].pop()
    finding = verify.compare(row, found, [])
    assert (
        finding.said[0]
        == f"{gone['split']} accuracy {gone['when']} at q_max is {gone['value']}, stored None"
    )
    row["loss"] = [1.0] * 10
    assert verify.compare(row, found, []).said[3:] == ("and 9 more numbers",)


def test_verify_run_that_fails_is_not_reproduced(row):
    failed = {
        **row,
        "status": "failed",
        "error": "Traceback\n  somewhere\nValueError: no such thing\n",
    }
    finding = verify.compare(row, failed, [])
    assert str(finding).endswith(
        "CR seed 0: NOT REPRODUCED: the run failed: ValueError: no such thing"
    )


# --- other machines -------------------------------------------------------------------------------
DIFFERENT = {
    "cpu": ("machine", "cpu"),
    "threads": ("machine", "threads"),
    "switches": ("machine", "switches"),
    "torch": ("versions", "torch"),
    "python": ("python",),
    "kernels": ("kernels",),
    "products": ("products",),
}


@pytest.mark.parametrize(("name", "path"), DIFFERENT.items())
def test_verify_names_different_provenance(name, path, row):
    found = copy.deepcopy(row)
    change(row["provenance"], *path, by=lambda _: "another")
    finding = verify.compare(row, found, [])
    assert (finding.verdict, finding.differs) == ("bit for bit", (name,))
    assert str(finding).endswith(f"bit for bit; differs in: {name}")
    change(row, "loss", 5)
    assert verify.compare(row, found, []).verdict == "within tolerance"


def test_verify_names_unknown_provenance(row):
    found = copy.deepcopy(row)

    def differs():
        return verify.compare(row, found, []).differs

    row["provenance"] = {**row["provenance"], "dirty": True, "commit": "2" * 40}
    assert differs() == ("code (the row's tree had changes, or no commit)",)
    del (
        row["provenance"]["machine"],
        row["provenance"]["dirty"],
        row["evaluations"],
    )  # as early rows
    assert [why.split()[0] for why in differs()] == ["machine", "code"]
    assert verify.compare(row, found, []).verdict == "within tolerance"
    row["device"] = "some GPU"
    assert differs()[-1] == "device"
    found["device"] = "some GPU"
    assert differs()[-1] == "order of sums (a GPU chooses it)"
    found["provenance"]["machine"]["switches"] = {"CPT_DETERMINISTIC": "1"}
    assert differs()[-1] == "order of sums (a GPU chooses it)"
    row["provenance"]["machine"] = found["provenance"]["machine"]
    assert [why.split()[0] for why in differs()] == ["code"]


def test_verify_ignores_commit_and_package_version(row):
    """Apply no tolerance for a different commit or version of this package."""
    found = copy.deepcopy(row)
    row["provenance"] |= {"commit": "3" * 40, "started": "2020-01-01"}
    row["provenance"]["versions"]["cpt-core"] = "0.0.1"
    change(row, "loss", 5)
    assert verify.compare(row, found, []).verdict == "NOT REPRODUCED"


@pytest.mark.parametrize(
    ("path", "factor", "verdict"),
    [
        (("loss", 0), 1.09, "within tolerance"),
        (("loss", 0), 0.92, "within tolerance"),
        (("loss", 0), 1.12, "NOT REPRODUCED"),
        (("loss", 0), 0.9, "NOT REPRODUCED"),
        (("loss", 9), 2.0, "within tolerance"),
        (("evaluations", -1, "test", "accuracy"), 2.0, "within tolerance"),
        (("bitops", "paper"), 1 + 2**-52, "NOT REPRODUCED"),
        (("relative_cost",), 1 + 2**-52, "NOT REPRODUCED"),
        (("steps",), 2, "NOT REPRODUCED"),
        (("data_checksum",), 2, "NOT REPRODUCED"),
        (("status",), 2, "NOT REPRODUCED"),
        (("key",), 2, "NOT REPRODUCED"),
    ],
)
def test_verify_tolerance_on_different_machine(path, factor, verdict, row):
    found = copy.deepcopy(row)
    row["provenance"]["machine"]["cpu"] = "another"
    change(row, *path, by=lambda x: x * factor)
    assert verify.compare(row, found, []).verdict == verdict


@pytest.mark.parametrize(
    ("off", "verdict"), [(0.04, "within tolerance"), (0.06, "NOT REPRODUCED")]
)
@pytest.mark.parametrize("sign", [-1, 1])
def test_verify_final_metric_tolerance_on_different_machine(off, verdict, sign, row):
    found = copy.deepcopy(row)
    row["provenance"]["machine"]["cpu"] = "another"
    (metric,) = (m for m in row["metrics"] if m.items() >= ON_TEST.items())
    metric["value"] += sign * off
    finding = verify.compare(row, found, [])
    assert finding.verdict == verdict
    assert finding.said[1].endswith("(0.0500 allowed: without seeds to compare)")


def test_verify_allows_later_divergence_on_different_machine(row):
    row |= {"status": "diverged", "metrics": []}
    found = copy.deepcopy(row) | {"steps": 12}
    assert verify.compare(row, found, []).verdict == "NOT REPRODUCED"
    row["provenance"]["machine"]["cpu"] = "another"
    assert verify.compare(row, found, []).verdict == "within tolerance"
    assert verify.compare(row, found | {"status": "ok"}, []).verdict == "NOT REPRODUCED"


def test_verify_metric_tolerance_is_derived_from_seeds():
    def rows(arm, values, dataset="digits", metric="accuracy"):
        specs = designs.quality_cost(
            "demo", dataset, schedules=[arm], static_bits=[], seeds=range(len(values))
        )
        return [
            row_of(spec, value, metric)
            for spec, value in zip(specs, values, strict=True)
        ]

    calm, wild = [0.80, 0.81, 0.82, 0.83], [0.5, 0.7, 0.9]
    cr, lr, rr = rows("CR", calm), rows("LR", wild), rows("RR", calm)
    every = cr + lr + rr
    said = "5 standard deviations between seeds"
    assert verify.allowed(cr[0], every) == (pytest.approx(5 * stdev(calm)), said)
    assert verify.allowed(lr[0], every) == (
        pytest.approx(5 * stdev(wild)),
        said,
    )  # of its own arm
    lucky = rows("ER", [0.8, 0.8001])
    assert verify.allowed(lucky[0], every + lucky)[0] == pytest.approx(
        5 * stdev(calm)
    )  # the median of the arms
    assert verify.allowed(cr[0], rows("CR", [0.8] * 4))[0] == pytest.approx(0.005)
    for few in (
        [],
        cr[:1],
        cr[:2] + rr[:2],
        rows("CR", calm, "cifar10"),
    ):  # one recipe, three degrees of freedom
        assert verify.allowed(cr[0], few) == (0.05, "without seeds to compare")
    (text,) = rows("CR", [80.0], "pydoc", "perplexity")
    assert verify.allowed(text, [])[0] == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("off", "verdict"), [(1.45, "within tolerance"), (1.47, "NOT REPRODUCED")]
)
def test_verify_first_loss_tolerance_derives_from_seeds(off, verdict, row):
    rows = [copy.deepcopy(row) for _ in range(4)]
    for other, factor in zip(
        rows, (0.6, 0.6, 1.4, 1.4), strict=True
    ):  # their standard deviation is .46
        other["loss"][0] *= factor
    found = copy.deepcopy(row)
    row["provenance"]["machine"]["cpu"] = "another"
    found["loss"][0] *= off
    finding = verify.compare(row, found, rows)
    assert finding.verdict == verdict
    assert "(46% allowed: a standard deviation between seeds)" in finding.said[0]


@pytest.mark.slow
def test_verify_tolerance_excludes_rounding_down(tmp_path, monkeypatch):
    rows = load_rows(results_dir() / "image_digits.jsonl")
    row = next(
        r
        for r in rows
        if r["spec"]["arm"] == "static 4" and r["spec"]["recipe"]["model"] == "mlp6"
    )
    row["provenance"]["machine"]["cpu"] = "another one"  # else every bit would count
    right = rounding.round_to_grid

    def down(x, low, width, steps, key, clip):
        return right(
            x if key is not None else x - width / steps / 2,
            low,
            width,
            steps,
            key,
            clip,
        )

    monkeypatch.setattr(rounding, "round_to_grid", down)
    with backend.reference():
        (found,) = run_grid(
            [RunSpec.from_dict(row["spec"])],
            tmp_path / "again.jsonl",
            workers=0,
            progress=False,
        )
    finding = verify.compare(row, found, rows)
    assert finding.differs
    assert finding.verdict == "NOT REPRODUCED"
    assert verify.final(found) < verify.final(row) - verify.allowed(row, rows)[0]


def test_verify_tolerance_uses_seeds_of_committed_rows(tmp_path, monkeypatch):
    specs = designs.quality_cost(
        "demo", "digits", schedules=["CR"], static_bits=[], seeds=range(4)
    )
    rows = [
        stored_row(spec, value)
        for spec, value in zip(specs, [0.5, 0.6, 0.7, 0.8], strict=True)
    ]
    write_rows(tmp_path / "all.jsonl", *rows)
    (tmp_path / "elsewhere").mkdir()
    one = write_rows(tmp_path / "elsewhere" / "one.jsonl", rows[0])
    monkeypatch.setattr(verify, "results_dir", lambda: tmp_path)
    monkeypatch.setattr(verify, "run_again", lambda row: row)
    monkeypatch.setattr(
        verify, "compare", lambda row, found, known: verify.allowed(row, known)
    )
    assert (
        verify.allowed(rows[0], verify.sample(one).rows)[1]
        == "without seeds to compare"
    )
    assert list(verify.verify(verify.sample(one))) == [verify.allowed(rows[0], rows)]
    assert verify.allowed(rows[0], rows)[1] == "5 standard deviations between seeds"


def test_verify_reruns_with_stored_threads_and_device(row, monkeypatch):
    """Rerun a row with its threads, device, kernels and switches."""
    asked, names = [], ("CPT_KERNELS", "CPT_PRODUCTS", "CPT_DETERMINISTIC")
    monkeypatch.setattr(verify.gemm_backend, "has_onednn_matmul", lambda: True)
    for name in names:
        monkeypatch.delenv(name, raising=False)

    def grid(specs, store, *, workers, progress, **options):
        asked.append((*map(os.environ.get, names), *options.values()))
        assert ([spec.key for spec in specs], workers, progress, list(options)) == (
            [row["key"]],
            1,
            False,
            ["threads", "device"],
        )
        return [row]

    monkeypatch.setattr(verify, "run_grid", grid)
    row["provenance"] |= {"machine": {"threads": 3}, "kernels": "reference"}
    row["provenance"].pop("products", None)
    verify.run_again(row)
    row["provenance"] |= {"kernels": "cpp", "products": "onednn"}
    row["provenance"]["machine"]["switches"] = {"CPT_DETERMINISTIC": "1"}
    verify.run_again(row)
    monkeypatch.setenv("CPT_KERNELS", "cpp")
    verify.run_again(
        row | {"device": "some GPU", "provenance": {"kernels": "reference"}}
    )
    assert asked == [  # rows that name no library are older than the choice
        ("reference", "torch", None, 3, "cpu"),
        (None, "onednn", "1", 3, "cpu"),
        ("cpp", "torch", None, 1, "cuda"),
    ]
    assert not {"CPT_PRODUCTS", "CPT_DETERMINISTIC"} & set(os.environ)


# --- which rows, and the command ------------------------------------------------------------------
def test_verify_samples_rows_randomly_or_cheapest(tmp_path):
    specs, store = specs_of("CR", seeds=range(12)), tmp_path / "rows.jsonl"
    rows = [stored_row(s, 0.5, seconds=20.0 - i) for i, s in enumerate(specs)]
    rows[11] |= {"status": "failed"}
    rows[10] |= {"status": "diverged"}
    write_rows(store, *rows)

    def seeds(**how):
        return [row["spec"]["seed"] for row in verify.sample(store, **how).picked]

    assert seeds(rows=3, cheapest=True) == [10, 9, 8]
    assert sorted(seeds(rows=99)) == list(range(11))
    assert len(set(seeds())) == 5
    assert seeds(seed=1) == seeds(seed=1)
    assert len({tuple(seeds(seed=s)) for s in range(6)}) == 6
    refused("rows must be a whole number of at least 1, got 0", verify.sample, store, 0)
    refused(
        "there is no file",
        verify.sample,
        tmp_path / "none.jsonl",
        error=FileNotFoundError,
    )
    write_rows(store, rows[11])
    refused("has no finished row", verify.sample, store)


def test_verify_command_exits_1_if_not_reproduced(command, as_stored, stored, tmp_path):
    assert command("verify", stored, "--rows", 1)[0] == 0
    rows = load_rows(stored)
    change(rows[1], "loss", 0)
    store = write_rows(tmp_path / "rows.jsonl", *rows)
    status, said, _ = command("verify", stored, store)
    assert status == 1
    assert "LR seed 0: NOT REPRODUCED: loss 1 of 10 is " in said
    assert "3 bit for bit, 1 NOT REPRODUCED by commit " in said
    assert len(as_stored) == 5


def test_verify_command_names_missing_data_first(
    command, as_stored, stored, data_folder
):
    spec = smoke_spec("digits")
    spec = replace(spec, recipe=replace(spec.recipe, dataset="cifar10"))
    far = write_rows(data_folder / "far.jsonl", stored_row(spec, 0.5))
    status, said, error = command("verify", stored, far)
    assert (status, said, as_stored) == (2, "", [])
    assert f"{far}: cifar10 is not in {data_folder}; get it with: " in error
    assert "--skip-missing" in error
    status, said, _ = command("verify", far, stored, "--skip-missing")
    assert (status, len(as_stored)) == (0, 2)
    lines = said.splitlines()
    assert lines[-2].startswith(f"skipped {far}: cifar10 is not in ")
    assert lines[-1].endswith("; 1 of 2 stores skipped")


def test_verify_sample_of_gpu_row_needs_gpu(row, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    store = write_rows(tmp_path / "rows.jsonl", row | {"device": "some GPU"})
    assert (
        verify.sample(store).missing
        == f"{row['key']} ran on some GPU, and torch sees no CUDA device here"
    )


def test_verify_tolerances_are_stated_on_results_page():
    page = (ROOT / "book" / "results.md.j2").read_text()
    for words in (
        f"losses within {100 * verify.FIRST_LOSS:.0f} %",
        f"within {verify.SPREADS} standard deviations between seeds",
        f"{verify.BAND} of accuracy and mAP (shares of 1), {100 * verify.BAND:.0f} % of the perplexity",
    ):
        assert words in page


def test_synthetic_rows_have_fields_of_real_rows(row):
    assert PROVENANCE.keys() <= row["provenance"].keys()
    assert verify.final(row_of(specs_of("CR")[0], 0.7)) == 0.7
