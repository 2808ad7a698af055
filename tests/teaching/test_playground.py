"""The sliders without a browser: what is trained is what a plain loop trains, and bad settings are told in words."""

import sys

import pytest
import torch

import cpt_core as cpt
from cpt_lessons import playground
from cpt_lessons.demonstrations import held_out, tiny_problem


def short(name):
    return cpt.make_schedule(name, q_min=3, q_max=8, total_steps=60, n_cycles=2)


@pytest.fixture
def brief(monkeypatch):
    monkeypatch.setattr(playground, "STEPS", 40)


@pytest.fixture
def one_thread():
    """As the playground trains, and as many threads as before afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_number_of_threads_makes_no_difference(one_thread):
    playground.train.cache_clear()
    alone = playground.train(short("CR"))
    torch.set_num_threads(2)
    playground.train.cache_clear()
    together = playground.train(short("CR"))
    assert (together.losses, together.accuracy) == (alone.losses, alone.accuracy)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("seed", [0, 1])
def test_trains_as_a_plain_loop_with_three_lines_does(seed, one_thread):
    schedule = short("CR")
    model, loader, loss_fn, optimizer = tiny_problem(seed=seed)
    cpt.quantize_(model)
    precision = cpt.PrecisionScheduler(model, schedule)
    losses = []
    for x, y in [*loader, *loader[:20]]:
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        precision.step()
        losses.append(float(loss.detach()))
    images, labels = held_out(seed=seed)
    with cpt.precision(model.eval(), bits=8):
        right = (model(images).argmax(1) == labels).sum().item()
    run = playground.train(schedule, seed)
    assert list(run.losses) == losses
    assert run.accuracy == pytest.approx(right / len(labels))


def test_held_out_images_are_in_no_batch_and_none_is_missing():
    _, loader, *_ = tiny_problem(seed=3)
    images, labels = held_out(seed=3)
    seen = {x.numpy().tobytes() for batch, _ in loader for x in batch}
    assert len(images) == len(labels) == 1797 - 40 * 32
    assert not seen & {x.numpy().tobytes() for x in images}


def test_gradients_have_8_bits_also_below_a_static_precision_of_fewer():
    """Else a static precision would be compared that nobody asks for."""
    assert playground.cost(playground.chosen_schedule("STATIC", 3)) == pytest.approx((9 + 2 * 3 * 8) / 192)
    few, many = cpt.StaticSchedule(3, 20), cpt.schedules.TableSchedule(((3, 20), (8, 1)))
    assert playground.train(few).losses == playground.train(many).losses[:20]


def test_the_baseline_is_trained_once_and_random_numbers_stay_as_they_were():
    torch.manual_seed(7)
    state = torch.random.get_rng_state()
    assert playground.baseline(short("CR")) is playground.baseline(short("LT"))
    assert torch.equal(state, torch.random.get_rng_state())


SETTINGS = [
    ("RTH", 9, 4, "q_min=9, q_max=8"),
    ("STATIC", 9, 4, "q_min=9, q_max=8"),
    ("LT", 3, 5, "even n_cycles"),
    ("XX", 3, 4, "unknown schedule 'XX'; choose from LR, LT"),
]


@pytest.mark.parametrize(("name", "q_min", "n_cycles", "said"), SETTINGS)
def test_bad_settings_get_a_sentence(name, q_min, n_cycles, said, brief):
    figure = playground.chosen_picture(name, q_min, n_cycles)
    assert said in figure.axes[0].get_title(loc="left").replace("\n", " ")
    assert said in figure.description()
    assert [len(ax.lines) for ax in figure.axes] == [1, 1]  # the baseline stays


def test_axes_stay_while_a_slider_moves(brief):
    figures = [playground.chosen_picture(*s) for s in (("CR", 1, 4), ("STATIC", 1, 1), ("CR", 9, 1))]
    for panels in zip(*(figure.axes for figure in figures), strict=True):
        assert len({(ax.get_xlim(), ax.get_ylim(), tuple(ax.get_yticks())) for ax in panels}) == 1
    assert [figure.axes[0].get_title(loc="left").count("\n") for figure in figures] == [1, 1, 1]
    assert figures[0].axes[1].get_yticks().tolist() == list(range(1, 9))


def test_what_became_of_it_is_said_in_words():
    schedule = playground.chosen_schedule("RR", 2, 4)
    run, static = (playground.Run(schedule, (1.0,) * 10, right) for right in (0.5, 0.75))
    assert playground.words(run, static).splitlines() == [
        "RR, 2 to 8 bits, 4 cycles: relative cost 0.301; the last step has 7 bits;",
        "loss at the end 1.000 (static 8: 1.000); held-out images right 50.0% (static 8: 75.0%)",
    ]


def test_a_moved_slider_trains_anew_and_says_so(monkeypatch, capsys):
    trained = []
    monkeypatch.setattr(playground, "chosen_picture", lambda **chosen: trained.append(chosen))
    row, status, _ = playground.play().children
    assert "arrow keys" in capsys.readouterr().out
    name, q_min, cycles = row.children
    assert not q_min.continuous_update
    assert not cycles.continuous_update
    said = []
    status.observe(lambda change: said.append((len(trained), change["new"])), "value")
    q_min.value, name.value = 2, "CR"
    assert trained == [
        {"name": "RR", "q_min": 3, "n_cycles": 4},
        {"name": "RR", "q_min": 2, "n_cycles": 4},
        {"name": "CR", "q_min": 2, "n_cycles": 4},
    ]
    assert said == [(1, "training for 400 steps ..."), (2, ""), (2, "training for 400 steps ..."), (3, "")]


@pytest.mark.filterwarnings("error")
def test_a_schedule_that_ends_below_q_max_is_drawn_and_its_title_says_so():
    figure = playground.schedule_picture("RTH", q_min=1, q_max=12, n_cycles=16)
    assert figure.axes[0].get_title().endswith(", the last step has 10 bits")


def test_without_widgets_there_is_a_picture(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    assert "noise exposure" in playground.explore().axes[0].get_title()
