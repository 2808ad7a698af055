"""A scheduler that has other bits for evaluation."""

import copy

import pytest
from torch import nn

import cpt_core as cpt
from cpt_core.quantization.convert import layer_precisions


def levels_of(model):
    return {layer.in_force for layer in layer_precisions(model).values()}


def test_evaluation_has_bits_of_its_own_where_a_scheduler_says_so():
    model = cpt.quantize_(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))).eval()
    schedule = cpt.schedules.TableSchedule(((3, 2), (6, 2)))
    scheduler = cpt.PrecisionScheduler(model, schedule, q_grad=5, eval_bits="q_max")
    assert levels_of(model) == {(6, 6, 5, 5)}
    model.train()
    assert levels_of(model) == {(3, 3, 5, 5)}
    scheduler.step()
    with cpt.precision(model, 2):
        model.eval()
        assert levels_of(model) == {(2, 2, 5, 5)}
    assert levels_of(model) == {(6, 6, 5, 5)}
    scheduler.eval_bits = 4
    assert levels_of(model) == {(4, 4, 5, 5)}
    scheduler.step()
    assert levels_of(model) == {(4, 4, 5, 5)}
    scheduler.eval_bits = "float"
    assert levels_of(model) == {(None,) * 4}
    model[1].train()  # a part by itself
    assert [layer.in_force[0] for layer in layer_precisions(model).values()] == [None, 6]
    with pytest.raises(ValueError, match="eval_bits, if not 'q_max' or 'current' or 'float', must be an integer"):
        scheduler.eval_bits = "max"
    scheduler.eval_bits = "current"
    assert levels_of(model) == {(6, 6, 5, 5)}
    both = copy.deepcopy((model, scheduler))
    both[1].eval_bits = 7
    both[0].eval()
    assert (levels_of(both[0]), levels_of(model)) == ({(7, 7, 5, 5)}, {(6, 6, 5, 5)})
