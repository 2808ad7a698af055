"""torch.compile: a change of bits compiles nothing anew in a whole cycle.  Convolutions: test_scheduler.py."""

import pytest
import torch
from torch import nn

from cpt_core.graphs.graph import Graph
from cpt_core.models.gnn import GraphNet
from cpt_core.quantization.convert import quantize_
from cpt_core.quantization.scheduler import PrecisionScheduler
from cpt_core.schedules.make import make_schedule

STEPS = 12


class OnGraph(nn.Module):
    def __init__(self):
        super().__init__()
        source, target = torch.randint(0, 50, (2, 300), generator=torch.Generator().manual_seed(0))
        self.graph = Graph.from_edges(source, target, 50, "csr")
        self.net = GraphNet("gcn", 8, 4, hidden=16, layers=2)

    def forward(self, x):
        return self.net(self.graph, x)


def bert():
    import transformers

    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16, attn_implementation="eager", num_labels=3,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def sentences():
    return torch.randint(0, 50, (2, 8)), torch.zeros(2, 1, 1, 8), torch.zeros(2, 8, dtype=torch.int64)


# name -> model, batch, graphs; None where sparse matrices break them, which torch.compile does not take: any number
MODELS = {
    "BERT": (bert, sentences, 1),
    "graph network": (OnGraph, lambda: (torch.randn(50, 8),), None),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's, behind a break
@pytest.mark.parametrize("name", MODELS)
def test_a_cycle_of_bits_compiles_nothing_anew(name, device):
    from torch._dynamo.testing import CompileCounterWithBackend  # slow to import

    make, batch, graphs = MODELS[name]
    torch._dynamo.reset()
    torch.manual_seed(0)
    counter = CompileCounterWithBackend("aot_eager")
    model = quantize_(make()).to(device)
    schedule = make_schedule("LR", q_min=3, q_max=8, total_steps=STEPS, n_cycles=1)
    assert set(schedule.bits().tolist()) == {3, 4, 5, 6, 7, 8}
    scheduler = PrecisionScheduler(model, schedule)
    compiled = torch.compile(model, backend=counter)
    for step in range(STEPS):
        y = compiled(*(x.to(device) for x in batch()))
        getattr(y, "logits", y).square().sum().backward()
        graphs = graphs or counter.frame_count
        assert counter.frame_count == graphs, f"step {step}"
        scheduler.step()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    torch._dynamo.reset()
