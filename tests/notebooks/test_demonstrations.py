"""Demonstrations that several notebooks share."""

from cpt_lessons import demonstrations


def test_held_out_images_are_in_no_batch_and_none_is_missing():
    _, loader, *_ = demonstrations.tiny_problem(seed=3)
    images, labels = demonstrations.held_out(seed=3)
    seen = {x.numpy().tobytes() for batch, _ in loader for x in batch}
    assert len(images) == len(labels) == 1797 - 40 * 32
    assert not seen & {x.numpy().tobytes() for x in images}
