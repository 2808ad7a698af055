"""Copied, averaged, saved and overwritten models compute with the state they report."""

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from helpers import (
    NEAREST,
    identical,
    pictures,
    refused,
    running_ranges,
    save_and_load,
    small,
)
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from cpt_core.quantization.convert import layer_precisions, quantize_
from cpt_core.quantization.scheduler import PrecisionScheduler, copy_ranges, precision
from cpt_core.schedules.schedule import StaticSchedule
from cpt_extras.search.custom_schedules import FunctionSchedule


def rising(u):
    return 3 + 5 * u


RISING = FunctionSchedule(rising, total_steps=5)


# --- copies -------------------------------------------------------------------------


def on_meta():
    with torch.device("meta"):
        return small()


def load_weights(model, other=None, assign=False):
    """Return a second model at 6 bits that loads the weights of this one."""
    is_meta = other is not None
    other = quantize_(small(seed=9) if other is None else other, NEAREST)
    PrecisionScheduler(other, StaticSchedule(6, 4))
    if is_meta and not assign:
        other.to_empty(device="cpu")
    other.load_state_dict(copy.deepcopy(model.state_dict()), assign=assign)
    other.eval()(pictures())  # moves what is on meta still
    assert not any(x.is_meta for x in running_ranges(other))
    return other.train()


def ema(model):
    average = get_ema_multi_avg_fn(0.5)
    return AveragedModel(model, multi_avg_fn=average, use_buffers=True).eval()


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": save_and_load,
    "casts": lambda model: copy.deepcopy(model).double().float(),
    "average": AveragedModel,
    "average in evaluation": lambda model: AveragedModel(model).eval(),
    "average with buffers": lambda model: AveragedModel(model, use_buffers=True),
    "ema with buffers": ema,
}
LOADED = {
    "state_dict": load_weights,
    "state_dict, assigned": lambda model: load_weights(model, assign=True),
    "meta, to_empty": lambda model: load_weights(model, on_meta()),
    "meta, assigned": lambda model: load_weights(model, on_meta(), True),
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


def results(model, x):
    """Return the output and the gradients; keep the running ranges."""
    model.zero_grad()
    layers = layer_precisions(model).values()
    states = [layer.get_running() for layer in layers]
    y = model(x)
    if y.requires_grad:
        y.square().sum().backward()
    for layer, state in zip(layers, states, strict=True):
        for name, value in state.items():
            getattr(layer, name).copy_(value)
    gradients = [p.grad for p in (x, *model.parameters()) if p.grad is not None]
    return [y.detach(), *gradients]


def assert_equals_plain(model, plain, x):
    """Compare with a new model that has the same weights, ranges and reported bits."""
    inner = model.module if isinstance(model, AveragedModel) else model
    twin = quantize_(plain, NEAREST)
    twin.load_state_dict({name: v.clone() for name, v in inner.state_dict().items()})
    layers = layer_precisions(twin).values(), layer_precisions(model).values()
    for own, layer in zip(*layers, strict=True):
        own.set_bits(layer.bits, layer.q_grad)
        own.set_running(layer.get_running())
    expected, x.grad = results(twin.train(model.training), x), None
    assert identical(results(model, x), expected)


@pytest.mark.parametrize("is_inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("way", [*COPIES, *LOADED])
def test_copied_model_computes_with_reported_bits(way, is_inside):
    """Copy outside and inside of a precision block; the model trains on."""
    model = quantize_(small(), NEAREST)
    scheduler = PrecisionScheduler(model, RISING)
    with precision(model, 2) if is_inside else nullcontext():
        twin = {**COPIES, **LOADED}[way](model)
    for _ in range(2):
        train(model, scheduler, 2)
        if isinstance(twin, AveragedModel):
            twin.update_parameters(model)
    assert scheduler.get_last_bits() != [RISING(0)]

    has_scheduler = way in LOADED
    if not is_inside and not has_scheduler:
        message = r'copy of a model whose bits .*precision\(copy, "q_max"\)'
        refused(message, twin, pictures(), error=RuntimeError)
    bits = 2 if is_inside else RISING.q_max
    expected = (6, 6) if has_scheduler else (bits, RISING.q_max)
    has_bits = is_inside or has_scheduler
    with nullcontext() if has_bits else precision(twin, "q_max"):
        layers = layer_precisions(twin).values()
        assert {(layer.bits, layer.q_grad) for layer in layers} == {expected}
        for is_training in (twin.training, True, False):
            twin.train(is_training)
            assert_equals_plain(twin, small(seed=8), batch())
            with precision(twin, 4, q_grad=5):
                assert_equals_plain(twin, small(seed=8), batch())
        with precision(model.train(twin.training), *expected):
            y, y_twin = results(model, batch())[0], results(twin, batch())[0]
            assert not torch.equal(y, y_twin)


def test_copied_model_takes_a_second_scheduler():
    """Refuse to run later copies, of either model, until their bits are set."""
    model = quantize_(small(), NEAREST)
    scheduler = PrecisionScheduler(model, RISING)
    twin = copy.deepcopy(model)
    own = PrecisionScheduler(twin, RISING)
    own.step()
    assert (own.get_last_bits(), scheduler.get_last_bits()) == ([4], [3])
    for m, bits in ((twin, 4), (model, 3)):
        assert {layer.bits for layer in layer_precisions(m).values()} == {bits}
    message = "copy of a model"
    refused(message, copy.deepcopy(twin), pictures(), error=RuntimeError)
    with precision(model, "q_max"):
        pass
    # the block is over, so the scheduler sets the bits again
    refused(message, copy.deepcopy(model), pictures(), error=RuntimeError)


def test_pickled_model_of_former_release_is_refused():
    """Name state_dict as the remedy for models pickled whole by release 0.3."""
    message = r"stored whole by release 0\.3\.0 of cpt_core; load its state_dict"
    data = b"ccpt_core.quantization.coverage\nChanged\n."
    refused(message, pickle.loads, data, error=ImportError)


# --- running ranges -----------------------------------------------------------------


def test_copy_ranges_covers_lstm_of_averaged_model():
    model = quantize_(nn.LSTM(4, 3, bidirectional=True))
    average = AveragedModel(model).eval()
    torch.manual_seed(1)
    with precision(model, 4), precision(average, 4):
        for scale in (1, 2):
            model(scale * torch.randn(5, 2, 4))
        average.update_parameters(model)
        copy_ranges(model, average)
        x = 3 * torch.randn(5, 2, 4)
        expected = model.eval()(x)[0]
        assert torch.equal(average(x)[0], expected)
        assert not torch.equal(model.train()(x)[0], expected)


@pytest.mark.parametrize(
    ("model", "other", "message"),
    [
        (small(), nn.Sequential(nn.Linear(4, 2)), "got 0, 3, 5; and 0"),
        (nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.LSTM(4, 4)), ""),
    ],
)
def test_copy_ranges_rejects_different_layers(model, other, message):
    models = quantize_(copy.deepcopy(model)), quantize_(copy.deepcopy(other))
    refused(f"the same quantised layers.*{message}", copy_ranges, *models)


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
        loaded = save_and_load(former)
        assert identical(running_ranges(loaded), running_ranges(model))
        for layer in layer_precisions(loaded).values():
            assert not any(name.startswith("running") for name in layer._buffers)
        assert torch.equal(loaded.eval()(pictures(3)), model.eval()(pictures(3)))


def test_meta_model_takes_scheduler_state():
    source, target = quantize_(small(), NEAREST), quantize_(on_meta(), NEAREST)
    schedulers = [PrecisionScheduler(m, StaticSchedule(4, 4)) for m in (source, target)]
    train(source, schedulers[0], 2)
    target.load_state_dict(source.state_dict(), assign=True)
    schedulers[1].load_state_dict(schedulers[0].state_dict())
    x = pictures(3)
    assert torch.equal(target.eval()(x), source.eval()(x))
    assert not torch.equal(target.train()(x), source(x))


def test_meta_model_starts_with_reset_ranges():
    model = quantize_(small(), NEAREST)
    with precision(model, 4):
        model(pictures())
        empty = copy.deepcopy(model.eval())
        empty.to("meta").to_empty(device="cpu")
        empty.load_state_dict(model.state_dict())
        for layer in layer_precisions(model).values():
            names = [name for name in layer.get_running() if name != "noise_key"]
            layer.set_running({name: torch.zeros(3) for name in names})
        assert torch.equal(empty(pictures()), model(pictures()))
        layers = layer_precisions(empty).values(), layer_precisions(model).values()
        for own, layer in zip(*layers, strict=True):
            assert own.noise_key == layer.noise_key


# --- written weights ----------------------------------------------------------------


class Net(nn.Module):
    """Convolution, a layer used three times, and an LSTM."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.shared = nn.Conv1d(2, 6, 3), nn.Linear(6, 6)
        self.last = nn.LSTM(6, 6)

    def forward(self, x):
        x = self.conv(x).transpose(1, 2)
        for _ in range(3):
            x = self.shared(x).tanh()
        return self.last(x)[0]


def sequences():
    return torch.randn(3, 2, 6, generator=torch.Generator().manual_seed(1))


def for_each_parameter(write):
    """Return a function that writes every parameter of a model in turn."""
    return lambda model: [write(parameter) for parameter in model.parameters()]


def replace_parameters(model):
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(-2 * p.detach()))


def optimizer_step(model):
    gradients = [p.grad for p in model.parameters()]
    for p in model.parameters():
        p.grad = 3 * p.detach()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        p.grad = gradient


WRITES = {
    "no_grad": torch.no_grad()(for_each_parameter(lambda p: p.mul_(-2))),
    "inference_mode": torch.inference_mode()(for_each_parameter(lambda p: p.mul_(-2))),
    ".data in place": for_each_parameter(lambda p: p.data.mul_(-2)),
    ".data assigned": for_each_parameter(lambda p: setattr(p, "data", p.data * -2)),
    "view of detach()": for_each_parameter(lambda p: p.detach().view(-1).mul_(-2)),
    "numpy": for_each_parameter(lambda p: p.detach().numpy().__imul__(-2)),
    "new Parameter": replace_parameters,
    "optimizer": optimizer_step,
}


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
@pytest.mark.parametrize("way", WRITES)
def test_quantized_weight_follows_every_write(way, mode):
    model = quantize_(Net(), NEAREST).train(mode == "train")
    with precision(model, 3), torch.set_grad_enabled(mode != "no_grad"):
        before = results(model, sequences())[0]
        WRITES[way](model)
        assert_equals_plain(model, Net(), sequences())
        assert not torch.equal(model(sequences()).detach(), before)
