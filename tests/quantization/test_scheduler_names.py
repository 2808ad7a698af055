"""A scheduler's state fits the same layers whatever wraps their model."""

import pytest
from helpers import make, small
from torch import nn

from cpt_core.quantization.convert import layer_precisions, quantize_
from cpt_core.quantization.scheduler import PrecisionScheduler


class Wrapper(nn.Module):
    """Names of layers as DDP and ``torch.compile`` make them; for themselves: test_processes, test_compiled."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


WRAPPED = {
    "bare": lambda m: m,
    "ddp": lambda m: Wrapper(module=m),
    "compiled": lambda m: Wrapper(_orig_mod=m),
    "ddp, compiled": lambda m: Wrapper(module=Wrapper(_orig_mod=m)),
    "compiled average of ddp": lambda m: Wrapper(_orig_mod=Wrapper(module=Wrapper(module=m))),
    "a part compiled": lambda m: Wrapper(**{name: Wrapper(_orig_mod=part) for name, part in m.named_children()}),
}
MODELS = {
    "layers": small,
    "a part named module": lambda: Wrapper(module=nn.Linear(2, 2), head=nn.Linear(2, 2)),
    "one layer": lambda: nn.Linear(2, 2),  # without a name, and without parts
}


# What goes to the bare model and what comes from it: the names of the one are those of the other, so any fits any.
PAIRS = [(way, "bare") for way in WRAPPED] + [("bare", way) for way in WRAPPED if way != "bare"]


@pytest.mark.parametrize(
    ("model", "source", "target"),
    [(m, *p) for m in MODELS for p in PAIRS if not (m == "one layer" and "a part compiled" in p)],
)
def test_a_state_does_not_depend_on_what_wraps_the_model(model, source, target):
    schedulers = []
    for wrapper in (source, target):
        wrapped = WRAPPED[wrapper](quantize_(MODELS[model]()))
        first, *rest = layer_precisions(wrapped)
        patterns = {first: make("CR")} | ({"*": make("LR")} if rest else {})
        schedulers.append(PrecisionScheduler(wrapped, patterns))
    theirs, mine = (list(scheduler._layers.values()) for scheduler in schedulers)
    for number, layer in enumerate(theirs):
        layer.running_input.fill_(number + 1)
    schedulers[0].step()
    schedulers[1].load_state_dict(schedulers[0].state_dict())
    assert schedulers[1].last_step == 1
    assert [layer.running_input[0] for layer in mine] == list(range(1, len(theirs) + 1))
