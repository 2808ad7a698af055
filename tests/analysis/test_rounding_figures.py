"""Figures of rounding errors over training and of rounded values."""

import pandas as pd
import pytest
import torch
from torch import nn

import cpt_core as cpt
from cpt_extras.diagnostics.recording import COLUMNS
from cpt_lab.analysis import figures
from cpt_lab.analysis.rounding import STATISTIC_LABELS


@pytest.fixture(scope="module")
def recording():
    torch.manual_seed(0)
    model = cpt.quantize_(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with cpt.diagnostics.record(model, every=1) as recording:
        for bits in (2, 8, 8):
            with cpt.precision(model, bits, 8):
                model(torch.randn(6, 4)).square().sum().backward()
            optimizer.step()
    return recording


def lines_of(figure, place=0):
    return {line.get_label(): line for line in figure.axes[place].get_lines()}


def test_error_figure_draws_roles_over_steps(recording):
    figure = figures.error_over_training(recording)
    table = recording.table()
    assert set(lines_of(figure)) == {"input", "weight", "bias", "grad"}
    weights = (
        table[table["role"] == "weight"].groupby("step")["relative_error"].median()
    )
    assert lines_of(figure)["weight"].get_ydata().tolist() == weights.tolist()
    levels = [line.get_ydata().tolist() for line in figure.axes[1].get_lines()]
    assert sorted(levels) == [[2, 8, 8]] * 3 + [[8, 8, 8]]
    again = figures.error_over_training(table)
    assert lines_of(again)["weight"].get_ydata().tolist() == weights.tolist()


@pytest.mark.parametrize("statistic", STATISTIC_LABELS)
def test_error_figure_draws_every_statistic(recording, statistic):
    figure = figures.error_over_training(recording, statistic)
    figure.canvas.draw()
    rule = [line for line in figure.axes[0].get_lines() if line.get_linestyle() == "--"]
    assert len(rule) == (statistic in ("snr_db", "gradient_to_noise"))
    if statistic == "gradient_to_noise":
        assert rule[0].get_ydata()[0] == pytest.approx(3**0.5)
        assert "weight" not in lines_of(figure)


def test_error_figure_rejects_missing_statistic(recording):
    with pytest.raises(
        ValueError, match="unknown statistic 'loss'; choose from relative_error, snr_db"
    ):
        figures.error_over_training(recording, "loss")
    with pytest.raises(ValueError, match="no step has a snr_db: nothing is recorded"):
        figures.error_over_training(pd.DataFrame(columns=list(COLUMNS)), "snr_db")


def test_histograms_compare_rounded_values():
    x = torch.randn(500, generator=torch.Generator().manual_seed(0))
    figure = figures.histograms({"weights": x, "gradients": x**3}, bits=(2, "e4m3"))
    assert len(figure.axes) == 4
    error = float((cpt.quantize(x, 2) - x).norm() / x.norm())
    assert figure.axes[0].get_title() == f"2 bits, error {error:.1%}"
    assert figure.axes[1].get_title().startswith("e4m3, error ")
    (after,) = (p for p in figure.axes[0].patches if p.get_label() == "after")
    heights = set(after.get_xy()[:, 1].astype(int)) - {0}
    assert heights == set(cpt.quantize(x, 2).unique(return_counts=True)[1].tolist())
    assert len(figures.histograms(x).axes) == 3
