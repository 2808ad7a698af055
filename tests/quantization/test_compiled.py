"""torch.compile: a change of bits compiles nothing anew in a whole cycle.  Convolutions: test_scheduler.py; LSTM:
test_lstm_compiled.py; graphs: test_graph_passes.py."""

import pytest
import torch

from cpt_core.quantization.convert import quantize_
from cpt_core.quantization.scheduler import PrecisionScheduler
from cpt_core.schedules.make import make_schedule

STEPS = 12


def bert():
    import transformers

    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, attn_implementation="eager", num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def sentences():
    return torch.randint(0, 50, (2, 8)), torch.zeros(2, 1, 1, 8), torch.zeros(2, 8, dtype=torch.int64)


@pytest.mark.slow
def test_a_cycle_of_bits_compiles_nothing_anew(device):
    from torch._dynamo.testing import CompileCounterWithBackend  # slow to import

    torch._dynamo.reset()
    torch.manual_seed(0)
    counter = CompileCounterWithBackend("aot_eager")
    model = quantize_(bert()).to(device)
    schedule = make_schedule("LR", q_min=3, q_max=8, total_steps=STEPS, n_cycles=1)
    assert set(schedule.bits().tolist()) == {3, 4, 5, 6, 7, 8}
    scheduler = PrecisionScheduler(model, schedule)
    compiled = torch.compile(model, backend=counter)
    for step in range(STEPS):
        y = compiled(*(x.to(device) for x in sentences()))
        y.logits.square().sum().backward()
        assert counter.frame_count == 1, f"step {step}"
        scheduler.step()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    torch._dynamo.reset()
