"""Live figure of runs in training."""

import pytest

from cpt_extras.figures import AltTextFigure
from cpt_lab.experiments import designs
from cpt_lab.sweeps.stores import SCHEMA_VERSION, append_row, load_rows
from cpt_lab.sweeps.sweep import run_grid
from cpt_lessons import live_figures
from tests.helpers import row_of


@pytest.fixture
def pictures(monkeypatch):
    """Return the displays sent to a notebook, in order: how, and the drawing in words."""
    sent = []

    class Handle:
        def display(self, data, raw, metadata):
            sent.append(("display", data["text/plain"]))

        def update(self, data, raw, metadata):
            sent.append(("update", data["text/plain"]))

    monkeypatch.setattr(live_figures, "DisplayHandle", Handle)
    return sent


SPECS = designs.quality_cost("smoke", "digits", schedules=["CR"], static_bits=[8])


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 100])  # the later one after a stop
def test_live_figure_has_line_per_arm(start, pictures, monkeypatch):
    """Name the arms with the lowest and highest loss in the title."""
    monkeypatch.setattr(live_figures, "REDRAW_SECONDS", 0.0)
    titles, show = [], AltTextFigure.show_by

    def noted(figure, by):
        titles.append(figure.get_suptitle())
        show(figure, by)

    monkeypatch.setattr(AltTextFigure, "show_by", noted)
    watched = live_figures.Watched(SPECS)
    for step, losses in enumerate([(2.0, 3.0), (2.0, 1.0), (1.0, 0.5)], start):
        for spec, loss in zip(SPECS, losses, strict=True):
            watched(spec, step, loss)
    assert [how for how, _ in pictures] == ["display"] + 5 * ["update"]
    assert (
        f"1: 2 parts, 6 points; x {start}..{start + 2}, mean {start + 1}; y 3..8"
        in pictures[-1][1]
    )
    assert "2: 2 parts, 6 points" in pictures[-1][1]
    steps, (cr, static) = SPECS[0].recipe.steps, (spec.arm for spec in SPECS)
    said = f"Step {start + 3} of {steps}, seed 0 only: the training loss of {static} is lowest, of {cr} highest"
    assert titles[-1] == f"Smoke scale, not a result. {said}"


@pytest.mark.slow
def test_live_figure_names_stored_arms(pictures, tmp_path, monkeypatch):
    """Count the runs in a bar, and name in the title the arms that are not drawn."""
    options = []

    def train_missing(specs, store, on_step, **kwargs):
        options.append(kwargs)
        on_step(specs[1], 0, 2.0)

    titles = []
    monkeypatch.setattr(live_figures, "run_grid", train_missing)
    monkeypatch.setattr(
        AltTextFigure,
        "show_by",
        lambda figure, by: titles.append(figure.get_suptitle()),
    )
    stored, missing = designs.quality_cost(
        "demo", "digits", schedules=["CR"], static_bits=[8], seeds=[3]
    )
    store = tmp_path / "image.jsonl"
    append_row(store, {"schema": SCHEMA_VERSION, **row_of(stored, 0.5)})
    live_figures.watch([stored, missing], store)
    steps = missing.recipe.steps
    assert titles[-1] == (
        f"Step 1 of {steps}, seed 3 only: the training loss of {missing.arm} is 2.00\n"
        f"not drawn, as stored already: {stored.arm}"
    )
    assert options[0]["progress"] is True


@pytest.mark.slow
def test_watched_runs_equal_unwatched_runs(pictures, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(live_figures, "REDRAW_SECONDS", 1e9)
    stores = [tmp_path / "watched.jsonl", tmp_path / "alone.jsonl"]
    live_figures.watch(SPECS, stores[0])
    assert [how for how, _ in pictures] == [
        "display",
        "update",
    ]  # the first step, and the end
    assert f"1: 2 parts, {2 * SPECS[0].recipe.steps} points" in pictures[-1][1]
    run_grid(SPECS, stores[1], workers=0, progress=False)
    watched, alone = (
        {row["key"]: row["metrics"] for row in load_rows(store)} for store in stores
    )
    assert watched == alone
    capsys.readouterr()
    live_figures.watch(SPECS, stores[0])
    assert len(pictures) == 2  # the store holds them: nothing trains
    assert "nothing trained" in capsys.readouterr().out


def test_watching_needs_in_process_runs(tmp_path):
    with pytest.raises(ValueError, match=r"on_step .* needs workers=0; got workers=2"):
        run_grid(SPECS, tmp_path / "x.jsonl", workers=2, on_step=print)
