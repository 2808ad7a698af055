"""Copied, averaged, saved and overwritten models: matmuls use the bits and weights that the model reports."""

import copy
import io
import itertools
import pickle
from contextlib import nullcontext

import pytest
import torch
from helpers import NEAREST, identical, pictures, refused, running_ranges, small
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cpt_core.quantization.convert import layer_precisions, quantize_
from cpt_core.quantization.scheduler import PrecisionScheduler, copy_ranges, precision
from cpt_core.schedules.make import make_schedule
from cpt_extras.search.custom_schedules import FunctionSchedule


def rising(u):
    return 3 + 5 * u


RISING = FunctionSchedule(rising, total_steps=5)


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def of_its_state(model, assign=False, start=None):
    """Return a second model at 6 bits that loads the weights of this one."""
    other = small(seed=9) if start is None else start
    PrecisionScheduler(
        quantize_(other, NEAREST), make_schedule("STATIC", q_max=6, total_steps=4)
    )
    if start is not None and not assign:
        other.to_empty(device="cpu")
    other.load_state_dict(copy.deepcopy(model.state_dict()), assign=assign)
    other.eval()(pictures())  # what is on meta still comes now
    assert not any(x.is_meta for x in running_ranges(other))
    return other.train()


def on_meta():
    with torch.device("meta"):
        return small()


EMA = {"multi_avg_fn": get_ema_multi_avg_fn(0.5), "use_buffers": True}
WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
    "casts": lambda model: copy.deepcopy(model).double().float(),
    "average": AveragedModel,
    "average in evaluation": lambda model: AveragedModel(
        model
    ).eval(),  # and never told again
    "average with buffers": lambda model: AveragedModel(model, use_buffers=True),
    "ema with buffers": lambda model: AveragedModel(model, **EMA).eval(),
    "state_dict": of_its_state,
    "state_dict, assigned": lambda model: of_its_state(model, True),
    "from meta, to_empty": lambda model: of_its_state(model, False, on_meta()),
    "from meta, assigned": lambda model: of_its_state(model, True, on_meta()),
}


def train(model, scheduler, steps):
    for seed in range(steps):
        model.zero_grad()
        model(pictures(seed)).square().mean().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad
        scheduler.step()


def batch():
    return pictures(99).requires_grad_()


def results(model, x, run=None):
    """Return the output and any gradients; keep the running ranges."""
    model.zero_grad()
    running = [layer.get_running() for layer in layer_precisions(model).values()]
    y = model(x) if run is None else run(x)
    if y.requires_grad:
        y.square().sum().backward()
    for layer, state in zip(layer_precisions(model).values(), running, strict=True):
        for name, value in state.items():
            getattr(layer, name).copy_(value)
    return [
        y.detach(),
        *(p.grad for p in (x, *model.parameters()) if p.grad is not None),
    ]


def compare(model, plain, x, run=None):
    """Compare with a plain model converted with the same weights, running ranges and reported bits."""
    twin, inner = (
        quantize_(plain, NEAREST),
        model.module if isinstance(model, AveragedModel) else model,
    )
    twin.load_state_dict(
        {name: value.clone() for name, value in inner.state_dict().items()}
    )
    for own, layer in zip(
        layer_precisions(twin).values(), layer_precisions(model).values(), strict=True
    ):
        own.set_bits(layer.bits, layer.q_grad)
        own.set_running(layer.get_running())
    of_twin, x.grad = results(twin.train(model.training), x), None
    assert identical(results(model, x, run), of_twin)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("way", list(WAYS))
def test_copied_model_computes_with_reported_bits(way, inside):
    model = quantize_(small(), NEAREST)
    scheduler = PrecisionScheduler(model, RISING)
    with precision(model, 2) if inside else nullcontext():
        twin = WAYS[way](model)
    for _ in range(
        2
    ):  # the model goes on: other weights, ranges and bits than the copy was made with
        train(model, scheduler, 2)
        if isinstance(twin, AveragedModel):
            twin.update_parameters(model)
    assert scheduler.get_last_bits() != [RISING(0)]
    another = "state_dict" in way or "meta" in way  # driven by a scheduler of its own
    if not inside and not another:
        refused(
            r'copy of a model whose bits .*precision\(copy, "q_max"\)',
            twin,
            pictures(),
            error=RuntimeError,
        )
    expected = (6, 6) if another else (2 if inside else RISING.q_max, RISING.q_max)
    with nullcontext() if inside or another else precision(twin, "q_max"):
        assert {
            (layer.bits, layer.q_grad) for layer in layer_precisions(twin).values()
        } == {expected}
        compare(
            twin, small(seed=8), batch()
        )  # as it is, then in both modes, then at other bits
        for mode in (True, False):
            twin.train(mode)
            compare(twin, small(seed=8), batch())
            with precision(twin, 4, q_grad=5):
                compare(twin, small(seed=8), batch())
        with precision(model.train(mode), *expected):
            assert not torch.equal(
                results(model, batch())[0], results(twin, batch())[0]
            )  # a copy, not the same


def in_turn(model, scheduler):
    """Return the output of a model at every step of its scheduler."""
    found = []
    for _ in range(4):
        found.append(model(pictures()).detach())
        scheduler.step()
    return found


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copied_model_and_scheduler_stay_connected(way):
    model = quantize_(small(), NEAREST)
    pair = model, PrecisionScheduler(model, RISING)
    pair[1].step()
    twins, before = WAYS[way](pair), pair[1].get_last_bits()
    found = in_turn(*twins)
    assert pair[1].get_last_bits() == before  # only the copy moved
    assert all(map(torch.equal, found, in_turn(*pair)))
    assert not torch.equal(found[0], found[-1])


def test_copied_model_takes_a_second_scheduler():
    """Refuse to run later copies, of either model, until their bits are set."""
    model = quantize_(small(), NEAREST)
    scheduler = PrecisionScheduler(model, RISING)
    twin = copy.deepcopy(model)
    own = PrecisionScheduler(twin, RISING)
    own.step()
    assert (own.get_last_bits(), scheduler.get_last_bits()) == ([4], [3])
    assert [
        {layer.bits for layer in layer_precisions(m).values()} for m in (twin, model)
    ] == [{4}, {3}]
    with pytest.raises(RuntimeError, match="copy of a model"):
        copy.deepcopy(twin)(pictures())
    with precision(model, "q_max"):
        pass
    with pytest.raises(
        RuntimeError, match="copy of a model"
    ):  # the block is over, the scheduler drives again
        copy.deepcopy(model)(pictures())


def test_pickled_model_of_former_release_is_refused():
    """Name state_dict as the remedy for models pickled whole by release 0.3."""
    with pytest.raises(
        ImportError,
        match=r"stored whole by release 0\.3\.0 of cpt_core; load its state_dict",
    ):
        pickle.loads(b"ccpt_core.quantization.coverage\nChanged\n.")


def test_averaged_model_without_bits_is_refused():
    model = quantize_(small())
    average = AveragedModel(model, use_buffers=True)
    PrecisionScheduler(model, make_schedule("STATIC", q_max=6, total_steps=4))
    average.update_parameters(model)
    refused("no precision yet", average, pictures(), error=RuntimeError)
    with precision(average, 6), precision(model, 6):
        assert torch.equal(average(pictures()), model(pictures()))


def test_copy_ranges_covers_lstm_of_averaged_model():
    model = quantize_(nn.LSTM(4, 3, bidirectional=True))
    average = AveragedModel(model).eval()
    with precision(model, 4), precision(average, 4):
        for k in (1, 2):
            model(k * torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(k)))
        average.update_parameters(model)
        copy_ranges(model, average)
        x = 3 * torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(3))
        expected = model.eval()(x)[0]
        assert torch.equal(average(x)[0], expected)
        assert not torch.equal(model.train()(x)[0], expected)


def test_copy_ranges_rejects_different_layers():
    model, other = quantize_(small()), quantize_(nn.Sequential(nn.Linear(4, 2)))
    with pytest.raises(
        ValueError, match=r"must have the same quantised layers, got 0, 3, 5; and 0"
    ):
        copy_ranges(model, other)
    kinds = [
        quantize_(nn.Sequential(layer)) for layer in (nn.Linear(4, 4), nn.LSTM(4, 4))
    ]
    with pytest.raises(ValueError, match="the same quantised layers"):
        copy_ranges(*kinds)


def test_quantize_adds_no_buffers():
    model = small()
    before = [name for name, _ in model.named_buffers()]
    quantize_(model)
    with precision(model, 4):
        model(pictures())
    assert [name for name, _ in model.named_buffers()] == before
    assert all(running[2] > 0 for running in running_ranges(model))


def test_pickled_layer_with_buffers_keeps_running_ranges():
    """Load running ranges from buffers, as stored up to release 0.3.0."""
    model = quantize_(small())
    with precision(model, 4):
        model(pictures())
        former = copy.deepcopy(model)
        for layer in layer_precisions(former).values():
            for name in vars(layer).pop("_running"):
                running = vars(layer).pop(name)
                layer.register_buffer(name, running, persistent=False)
        loaded = saved_and_loaded(former)
        assert identical(running_ranges(loaded), running_ranges(model))
        assert not any(
            name.startswith("running")
            for p in layer_precisions(loaded).values()
            for name in p._buffers
        )
        assert torch.equal(loaded.eval()(pictures(3)), model.eval()(pictures(3)))


def test_meta_model_takes_scheduler_state():
    source, target = quantize_(small(), NEAREST), quantize_(on_meta(), NEAREST)
    schedulers = [
        PrecisionScheduler(m, make_schedule("STATIC", q_max=4, total_steps=4))
        for m in (source, target)
    ]
    train(source, schedulers[0], 2)
    target.load_state_dict(source.state_dict(), assign=True)
    schedulers[1].load_state_dict(schedulers[0].state_dict())
    assert torch.equal(target.eval()(pictures(3)), source.eval()(pictures(3)))
    assert not torch.equal(target.train()(pictures(3)), source(pictures(3)))


def test_meta_model_starts_with_reset_ranges():
    model = quantize_(small(), NEAREST)
    with precision(model, 4):
        model(pictures())
        first = copy.deepcopy(model.eval())  # calibrated
        first.to("meta").to_empty(device="cpu")
        first.load_state_dict(model.state_dict())
        for layer in layer_precisions(model).values():
            layer.set_running(
                {
                    name: torch.zeros(3)
                    for name in layer.get_running()
                    if name != "noise_key"
                }
            )
        assert torch.equal(first(pictures()), model(pictures()))
        keys = [
            [layer.noise_key for layer in layer_precisions(m).values()]
            for m in (first, model)
        ]
        assert keys[0] == keys[1]


# --- written weights -------------------------------------------------------------------------------


class Net(nn.Module):
    """Convolution, a linear layer used three times with a call of ``between`` after each, and an LSTM."""

    def __init__(self, recurrent):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.shared = nn.Conv1d(2, 6, 3), nn.Linear(6, 6)
        self.last = nn.LSTM(6, 6) if recurrent else nn.Linear(6, 6)
        self.between = lambda: None

    def forward(self, x):
        x = self.conv(x).transpose(1, 2)
        for _ in range(3):
            x = self.shared(x).tanh()
            self.between()
        x = self.last(x)
        return x[0] if isinstance(x, tuple) else x


def sequences():
    return torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(1))


def each(write):
    """Return a function that writes every parameter of a model in turn."""
    return lambda model: [write(parameter) for parameter in model.parameters()]


def replaced(model):
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(-2 * p.detach()))


def stepped(model):
    grads = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = 3 * p.detach()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad


WRITES = {
    "no_grad": torch.no_grad()(each(lambda p: p.mul_(-2))),
    "inference_mode": torch.inference_mode()(each(lambda p: p.mul_(-2))),
    ".data in place": each(lambda p: p.data.mul_(-2)),
    ".data assigned": each(lambda p: setattr(p, "data", p.data * -2)),
    "a view of detach()": each(lambda p: p.detach().view(-1).mul_(-2)),
    "numpy": each(lambda p: p.detach().numpy().__imul__(-2)),
    "a new Parameter": replaced,
    "an optimizer": stepped,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "way"),
    [
        *itertools.product(["train", "eval", "no_grad"], WRITES),
        ("compile", ".data in place"),
    ],
)
def test_quantized_weight_follows_every_write(when, way):
    model = quantize_(Net(recurrent=when != "compile"), NEAREST).train(
        when not in ("eval", "no_grad")
    )
    run = torch.compile(model, backend="eager") if when == "compile" else model
    with precision(model, 3), torch.set_grad_enabled(when != "no_grad"):
        before = results(model, sequences(), run)[0]
        WRITES[way](model)
        compare(model, Net(recurrent=when != "compile"), sequences(), run)
        assert not torch.equal(run(sequences()).detach(), before)
    if when == "compile":
        torch._dynamo.reset()


@pytest.mark.parametrize("way", [".data in place", "numpy"])
def test_quantized_weight_follows_write_within_forward(way):
    model, plain = quantize_(Net(recurrent=False), NEAREST), Net(recurrent=False)
    for m in (model, plain):
        m.between = lambda m=m: WRITES[way](m.shared)
    with precision(model, 16), torch.no_grad():  # fine enough to be the float32 model's
        torch.testing.assert_close(
            model(sequences()), plain(sequences()), rtol=0, atol=1e-3
        )
    assert not torch.allclose(
        plain(sequences()), Net(recurrent=False)(sequences()), atol=0.1
    )
