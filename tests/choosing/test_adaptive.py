"""Bits that rise when the loss stalls: the rule on losses that are made up, its cost, its state, wrong input."""

import copy

import pytest
import torch
from helpers import refused
from torch import nn

from cpt_core.choosing.adaptive import AdaptiveScheduler
from cpt_core.quantization.convert import layer_precisions, quantize_
from cpt_core.quantization.scheduler import PrecisionScheduler, precision
from cpt_core.schedules.schedule import StaticSchedule


def model():
    torch.manual_seed(0)
    return quantize_(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)))


def after(losses, **given):
    scheduler = AdaptiveScheduler(model(), **{"levels": (3, 4, 6, 8), "steps_per_epoch": 1, **given})
    for loss in losses:
        scheduler.step(loss)
    return scheduler


def test_the_next_level_begins_when_five_epochs_are_alike():
    falling = (3.0, 2.0, 1.5, 1.2, 1.0)
    assert after(falling).ran.runs == ((3, 5),)
    almost = (*falling, 0.9, 0.91, 0.9, 0.91)  # the window still holds 1.0, which is too far away
    assert after(almost).get_last_bits() == [3]
    risen = after((*almost, 0.9))
    assert risen.get_last_bits() == [4]
    assert (risen.state["share"], risen.state["window"]) == (pytest.approx(0.015), [])
    assert after((*almost, *[0.9] * 21)).ran.runs == ((3, 10), (4, 5), (6, 5), (8, 10))  # and no more than there are


def test_what_is_near_is_told_by_the_first_ten_epochs():
    losses = [10.0] * 4 + [5.0] * 6  # their mean is 7: 0.05 of it is 0.35
    assert after([*losses[:4], 5.0, 5.0, 5.0, 5.0, 5.3, 5.3], levels=(3, 8)).get_last_bits() == [8]
    assert after([*losses[:4], 5.0, 5.0, 5.0, 5.0, 5.4, 5.4], levels=(3, 8)).get_last_bits() == [3]
    late = after([*[10.0] * 4, *[5.0, 6.0] * 20, *[1.0, 1.3] * 3], levels=(3, 8))
    assert late.get_last_bits() == [8]  # 0.3 is near, though the last losses are small


def test_epochs_are_means_of_steps_and_the_loss_is_not_waited_for():
    scheduler = AdaptiveScheduler(model(), (3, 8), steps_per_epoch=2)
    for _ in range(5):
        for loss in (0.0, 2.0):  # alike by epochs alone
            scheduler.step(torch.tensor(loss, requires_grad=True))
            if scheduler.last_step % 2:
                assert isinstance(scheduler.total, torch.Tensor)
                assert not scheduler.total.requires_grad
    assert scheduler.get_last_bits() == [8]
    assert scheduler.state["first"] == [1.0] * 5


def test_layers_have_the_level_in_force_and_gradients_and_evaluation_theirs():
    for q_grad, wanted in ((None, 8), (6, 6)):
        scheduler = AdaptiveScheduler(net := model(), (3, 8), steps_per_epoch=1, q_grad=q_grad)
        for level in (3, 8):
            assert {(p.bits, p.q_grad) for p in layer_precisions(net).values()} == {(level, wanted)}
            scheduler.eval_bits = "q_max"
            assert net.eval()[0].precision.in_force == (8, 8, wanted, wanted)
            assert net.train()[0].precision.in_force == (level, level, wanted, wanted)
            for _ in range(5):
                scheduler.step(1.0)
        with precision(net, "q_max"):
            assert {p.bits for p in layer_precisions(net).values()} == {8}


def test_a_state_goes_on_in_the_middle_of_an_epoch():
    losses = list(torch.rand(40, generator=torch.Generator().manual_seed(3)))
    how = {"levels": (3, 8), "steps_per_epoch": 3, "share": 1.0}
    whole, again = after(losses, **how), after([], **how)
    state = copy.deepcopy(after(losses[:8], **how).state_dict())
    kept = copy.deepcopy(state)
    again.load_state_dict(state)
    for loss in losses[8:]:
        again.step(loss)
    assert again.state == whole.state
    assert again.ran.runs == whole.ran.runs == ((3, 18), (8, 22))
    assert {p.bits for p in again._layers.values()} == {8}
    assert state["adaptive"] == kept["adaptive"]  # it is not written to


def test_a_state_of_another_scheduler_is_refused_and_nothing_changes():
    scheduler = after([1.0] * 3, levels=(3, 8))
    for state, message in (
        (PrecisionScheduler(model(), StaticSchedule(8, 5)).state_dict(), "lacks 'adaptive'"),
        (after([1.0] * 7, levels=(4, 8)).state_dict(), "the checkpoint has schedules"),
    ):
        refused(message, scheduler.load_state_dict, state)
    assert scheduler.ran.runs == ((3, 3),)
    refused("runs must be pairs", getattr, after([]), "ran")
    refused(r"levels must rise, got \(4, 4\)", AdaptiveScheduler, model(), (4, 4), steps_per_epoch=1)
    refused(r"share must be a number from 0 to 1, got -0\.1", AdaptiveScheduler, model(), steps_per_epoch=1, share=-0.1)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_an_epoch_whose_loss_is_not_finite_is_left_out(loss):
    with pytest.warns(UserWarning, match="the epoch that ends at step 1 has a loss that is not finite: it is left out"):
        odd = after([torch.tensor(loss), *[1.0] * 5, 2.0])
    assert odd.ran.runs == ((3, 6), (4, 1))


def test_losses_below_zero_stall_like_others_and_a_loss_is_one_number():
    assert after([-1.0] * 10).ran.runs == after([1.0] * 10).ran.runs == ((3, 5), (4, 5))
    refused(r"loss must be one number, got a tensor of shape \(4,\)", after, [torch.ones(4)])
