"""Demonstrations that several notebooks share."""

import torch

from cpt_core.quantization.convert import quantize_
from cpt_core.schedules import cost
from cpt_lessons import demonstrations


def table(capsys, **options):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    inputs = (torch.empty(2, 4),)
    demonstrations.bitops_table(quantize_(model), inputs, ["CR", "STATIC"], q_min=3, total_steps=800, **options)
    return capsys.readouterr().out.splitlines()


def test_held_out_images_are_in_no_batch_and_none_is_missing():
    _, loader, *_ = demonstrations.tiny_problem(seed=3)
    images, labels = demonstrations.held_out(seed=3)
    seen = {x.numpy().tobytes() for batch, _ in loader for x in batch}
    assert len(images) == len(labels) == 1797 - 40 * 32
    assert not seen & {x.numpy().tobytes() for x in images}


def test_bitops_table_adds_up_by_kind_and_prices_every_schedule(capsys):
    operations, linear, names, cr, static = table(capsys)
    assert [operations, linear] == ["operations of a forward pass: 30", "  Linear  30  100.0%"]
    assert names.split() == ["cost", "BitOps,", "paper", "BitOps,", "per_op"]
    assert static.split()[:3] == ["STATIC", "1.000", f"{cost.total_bitops(30, [8] * 800, q_grad=8):.4e}"]
    assert float(static.split()[3]) < float(static.split()[2])  # the first layer computes no error product
    assert float(cr.split()[2]) < float(static.split()[2])
