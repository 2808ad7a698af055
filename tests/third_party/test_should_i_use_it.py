"""docs/should-i-use-it.md: results of ``check`` for the models of its table."""

import re
from pathlib import Path

import pytest
import torch
from helpers import FunctionModule
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import cpt_core as cpt

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "should-i-use-it.md").read_text(encoding="utf-8")
LINES = PAGE.split("```python\n")[1].split("```")[0]
ENDS = re.search(
    r"`quantize_\(model, (.*)\)`",
    (DOCS / "training-loop.md").read_text(encoding="utf-8"),
)[1]


class Block(nn.Module):
    """Block of a small GPT, written with plain torch."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.before, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.mlp = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x):
        qkv = self.qkv(self.before(x)).unflatten(
            -1, (3, self.heads, -1)
        )  # (batch, time, 3, heads, width of a head)
        y = scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


def resnet50(size=224):
    models = pytest.importorskip("torchvision.models")
    return models.resnet50(), (torch.randn(1, 3, size, size),)


def gpt2():
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 100,
        "n_positions": 32,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
    }
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config), (torch.randint(100, (2, 32)),)


def gpt():
    head = nn.Linear(32, 100, bias=False)
    model = nn.Sequential(
        nn.Embedding(100, 32), Block(), Block(), nn.LayerNorm(32), head
    )
    head.weight = model[0].weight
    return model, (torch.randint(100, (2, 32)),)


def gcn():
    layers = {"first": cpt.GraphConv(32, 64), "second": cpt.GraphConv(64, 7)}
    model = FunctionModule(
        lambda m, graph, x: m.second(graph, m.first(graph, x).relu()), **layers
    )
    start = torch.arange(0, 606, 6)  # 100 nodes of six neighbours
    return model, (cpt.Graph(start, torch.randint(100, (600,))), torch.randn(100, 32))


MADE = (lambda: resnet50(64), resnet50, gpt2, gpt, gcn)
ROWS = [
    [cell.strip() for cell in row.split("|")[1:-1]]
    for row in re.findall(r"^\| .*%.*$", PAGE, re.M)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "row"), [*zip(MADE, ROWS, strict=True)], ids=[row[0] for row in ROWS]
)
def test_should_i_use_it_table_equals_check(make, row, capsys, monkeypatch):
    name, share, in_float32 = row
    model, inputs = make()
    results, check = [], cpt.check

    def recorded_check(*arguments):
        results.append(check(*arguments, invariances=False))
        return results[0]

    monkeypatch.setattr(cpt, "check", recorded_check)
    has_float_ends = "ends in float32" in name
    lines = LINES.replace("(model)", f"(model, {ENDS})") if has_float_ends else LINES
    exec(lines, {"model": model, "inputs": inputs, "total_steps": 100})
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"quantised: {share} of the ")
    layers = {operation.layer for operation in results[0].float32}
    assert layers == set(re.findall("`(.*?)`", in_float32))
    quantized = [each for each in model.modules() if hasattr(each, "precision")]
    assert {each.precision.bits for each in quantized} == {5}
