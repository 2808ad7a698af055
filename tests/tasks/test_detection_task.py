"""Detection task: RetinaNet, its loss, its metric, and training by the common loop."""

import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from helpers import refused, smoke_spec
from torch import nn
from torchvision.ops import box_iou

import cpt_core as cpt
from cpt_core.bitops import plan
from cpt_core.bitops.conventions import CONVENTIONS
from cpt_lab.data import detection, loading
from cpt_lab.data.detection import BACKBONE_WEIGHTS_FILE, annotate_image, digit_scenes
from cpt_lab.data.files import DataNotFoundError
from cpt_lab.experiments import designs
from cpt_lab.experiments.registry import recipe
from cpt_lab.experiments.spec import run_spec
from cpt_lab.tasks import detection_boxes
from cpt_lab.tasks.detection import DetectionTask, mean_average_precision
from cpt_lab.tasks.detection_boxes import detection_losses, detections, image_anchors
from cpt_lab.tasks.retinanet import FrozenStatisticsBatchNorm2d, retinanet
from cpt_lab.training.train import train
from cpt_lessons.detection import pretrained_or_scratch

CPU = torch.device("cpu")
spec = partial(smoke_spec, "digit-scenes", steps=6, n_cycles=1)


# --- the model ------------------------------------------------------------------------------------


def test_retinanet_has_parameter_count_of_paper():
    assert sum(p.numel() for p in retinanet("retinanet", 20).parameters()) == 20_165_400


@pytest.mark.parametrize(("name", "stride"), [("retinanet", 8), ("retinanet_small", 4)])
def test_retinanet_output_and_anchor_shapes(name, stride):
    model = retinanet(name, 7)
    images = torch.zeros(2, 3, 8 * stride, 12 * stride)
    out = model(images)
    places = 8 * 12 + 4 * 6 + 2 * 3 + 1 * 2 + 1 * 1
    assert [tuple(f.shape[-2:]) for f in out.features] == [
        (8, 12),
        (4, 6),
        (2, 3),
        (1, 2),
        (1, 1),
    ]
    assert out.logits.shape == (2, 9 * places, 7)
    assert out.offsets.shape == (2, 9 * places, 4)
    anchors = image_anchors(model, images, out)
    assert [a.shape for a in anchors] == [(9 * places, 4)] * 2
    sides = (anchors[0][:9, 2:] - anchors[0][:9, :2]).prod(1).sqrt()
    np.testing.assert_allclose(
        sorted(sides.tolist()),
        sorted(4 * stride * x for x in (1, 1.26, 1.59) * 3),
        rtol=0.06,
    )


def test_retinanet_initially_predicts_one_percent():
    out = retinanet("retinanet_small", 3)(torch.randn(1, 3, 64, 64))
    torch.testing.assert_close(out.logits.sigmoid(), torch.full_like(out.logits, 0.01))
    assert not out.offsets.any()


def test_retinanet_initialises_convolutions():
    torch.manual_seed(0)
    model = retinanet("retinanet", 20)
    for name in (
        "backbone.body.layer3.0.conv1",
        "backbone.fpn.inner_blocks.1.0",
        "head.classification_head.conv.2.0",
    ):
        conv = model.get_submodule(name)
        k, _ = conv.kernel_size
        assert conv.weight.std().item() == pytest.approx(
            math.sqrt(2 / (k * k * conv.out_channels)), rel=0.03
        )
        assert conv.bias is None or not conv.bias.any()


def test_frozen_batch_norm_trains_scale_and_shift():
    """Train scale and shift, but keep the running statistics."""
    layer = FrozenStatisticsBatchNorm2d(2)
    layer.load_state_dict(
        {**nn.BatchNorm2d(2).state_dict(), "running_mean": torch.tensor([1.0, 2.0])}
    )
    model = nn.Sequential(layer).train()
    x = torch.randn(4, 2, 3, 3)
    y = model(x)
    torch.testing.assert_close(
        y, (x - torch.tensor([1.0, 2.0]).view(1, 2, 1, 1)) / math.sqrt(1 + 1e-5)
    )
    y.sum().backward()
    assert layer.running_mean.tolist() == [1.0, 2.0]
    assert layer.weight.grad is not None
    assert layer.bias.grad.tolist() == [36.0, 36.0]


def test_retinanet_quantizes_all_convolutions_and_biases():
    model = cpt.quantize_(retinanet("retinanet", 20))
    rows = cpt.summary(model).rows
    assert {r.kind for r in rows if r.quantized} == {"Conv2d"}
    assert {r.kind for r in rows if not r.quantized} == {"FrozenStatisticsBatchNorm2d"}
    head = model.head.classification_head
    assert head.cls_logits.bias is not None
    cpt.PrecisionScheduler(model, cpt.make_schedule("STATIC", q_max=2, total_steps=1))
    values = head.cls_logits.precision.quantize_operand(
        "bias", torch.linspace(0, 1, 50)
    )
    assert len(values.unique()) == 4


def plain_losses(out, anchors, boxes, labels, classes):
    """Return the paper's loss of one image, written out with loops over anchors."""
    focal = box = 0.0
    positives = 0
    for i, anchor in enumerate(anchors.tolist()):
        overlaps = box_iou(anchors[i : i + 1], boxes)[0].tolist()
        best = int(np.argmax(overlaps)) if overlaps else -1
        if overlaps and 0.4 <= overlaps[best] < 0.5:
            continue
        positive = bool(overlaps) and overlaps[best] >= 0.5
        for k in range(classes):
            p = 1 / (1 + math.exp(-out.logits[0, i, k].item()))
            if positive and labels[best] == k:
                focal -= 0.25 * (1 - p) ** 2 * math.log(p)
            else:
                focal -= 0.75 * p**2 * math.log(1 - p)
        if positive:
            positives += 1
            b, aw, ah = (
                boxes[best].tolist(),
                anchor[2] - anchor[0],
                anchor[3] - anchor[1],
            )
            wanted = (
                ((b[0] + b[2]) / 2 - (anchor[0] + anchor[2]) / 2) / aw / 0.1,
                ((b[1] + b[3]) / 2 - (anchor[1] + anchor[3]) / 2) / ah / 0.1,
                math.log((b[2] - b[0]) / aw) / 0.2,
                math.log((b[3] - b[1]) / ah) / 0.2,
            )
            for found, target in zip(out.offsets[0, i].tolist(), wanted, strict=True):
                d = abs(found - target)
                box += 4.5 * d * d if d < 1 / 9 else d - 1 / 18
    return focal / max(1, positives), box / max(1, 4 * positives)


@pytest.mark.parametrize(
    ("boxes", "learned"),
    [
        ([[5.0, 5, 40, 37], [30, 30, 60, 58]], True),
        ([], False),
        ([[5.0, 5, 9, 9]], False),
    ],  # too small for any anchor
)
def test_detection_losses_equal_loop_reference(boxes, learned):
    torch.manual_seed(0)
    model = retinanet("retinanet_small", 3)
    for layer in (
        model.head.classification_head.cls_logits,
        model.head.regression_head.bbox_reg,
    ):
        nn.init.normal_(layer.weight, std=0.02)
    images = torch.randn(1, 3, 64, 64)
    target = {
        "boxes": torch.tensor(boxes).reshape(-1, 4),
        "labels": torch.tensor([2, 0][: len(boxes)], dtype=torch.int64),
    }
    out = model(images)
    found_focal, found_box = detection_losses(model, images, out, [target])
    focal, box = plain_losses(
        out,
        image_anchors(model, images, out)[0],
        target["boxes"],
        target["labels"].tolist(),
        3,
    )
    assert found_focal.item() == pytest.approx(focal, rel=1e-4)
    assert found_box.item() == pytest.approx(box, rel=1e-4)
    assert (box > 0) == learned


def test_detections_decode_target_offsets():
    """Return the boxes themselves if the network predicts their target offsets."""
    model = retinanet("retinanet_small", 3).eval()
    images = torch.zeros(1, 3, 64, 64)
    box = torch.tensor([[6.0, 4, 50, 44]])
    out = model(images)
    anchors = image_anchors(model, images, out)[0]
    offsets = model.box_coder.encode_single(box.expand(len(anchors), 4), anchors)
    logits = torch.full_like(out.logits, -9.0)
    logits[0, 17, 2] = 3.0
    answer = out._replace(logits=logits, offsets=offsets[None])
    (found,) = detections(model, images, answer, [(64, 64)])
    torch.testing.assert_close(found["boxes"], box, rtol=1e-4, atol=1e-3)
    assert found["labels"].tolist() == [2]
    assert found["scores"].item() == pytest.approx(1 / (1 + math.exp(-3)))
    (cut,) = detections(model, images, answer, [(30, 40)])  # the rest is padding
    torch.testing.assert_close(
        cut["boxes"], torch.tensor([[6.0, 4, 40, 30]]), rtol=1e-4, atol=1e-3
    )


def test_detections_are_in_original_image_pixels(monkeypatch):
    task = DetectionTask(spec(size=64, max_size=100), CPU)
    model = task.build_model().eval()
    odd = [
        replace(
            picture([[10, 20, 30, 40]], [1]),
            image=torch.zeros(3, 50, 130, dtype=torch.uint8),
            size=(50, 130),
        )
    ]
    seen = []

    def whole(model, images, outputs, sizes):
        seen.extend(sizes)
        return [found([[0, 0, sizes[0][1], sizes[0][0]]], [0.9], [1])]

    monkeypatch.setattr(detection_boxes, "detections", whole)
    ((detection, there),), loss = task.detect(model, odd)
    assert seen == [(38, 100)]  # 64 x 166 would be too long
    assert there is odd[0]
    torch.testing.assert_close(detection["boxes"], torch.tensor([[0.0, 0, 130, 50]]))
    assert math.isfinite(loss)


# --- the metric -----------------------------------------------------------------------------------


def picture(boxes, labels, difficult=None):
    pixels = torch.zeros(3, 100, 100, dtype=torch.uint8)
    return annotate_image(
        pixels, (100, 100), boxes, labels, difficult or [False] * len(labels)
    )


def found(boxes, scores, labels):
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "scores": torch.tensor(scores, dtype=torch.float32),
        "labels": torch.tensor(labels, dtype=torch.int64),
    }


A, B, C, FAR = [0, 0, 10, 10], [20, 20, 40, 40], [50, 50, 80, 80], [85, 85, 95, 95]
# right, wrong, right of two: precision 1 up to recall 1/2, then 2/3: area 1/2 + 1/2 * 2/3; at the eleven points six
# times 1 (0 to 0.5) and five times 2/3
SECOND_AFTER_A_MISS = (1 / 2 + 1 / 2 * 2 / 3, (6 + 5 * 2 / 3) / 11)


@pytest.mark.parametrize(
    ("detections", "objects", "expected"),
    [
        (
            [found([A, FAR, B], [0.9, 0.8, 0.7], [0, 0, 0])],
            [picture([A, B], [0, 0])],
            SECOND_AFTER_A_MISS,
        ),
        # one of three found: area 1/3; 0, 0.1, 0.2, 0.3 are reached
        ([found([A], [0.5], [0])], [picture([A, B, C], [0, 0, 0])], (1 / 3, 4 / 11)),
        # the same object twice: the second counts against
        (
            [found([A, A, B], [0.9, 0.8, 0.7], [0, 0, 0])],
            [picture([A, B], [0, 0])],
            SECOND_AFTER_A_MISS,
        ),
        # the mean over classes that have objects: 1 and 0; class 2 has none
        (
            [found([A, B], [0.9, 0.8], [0, 2])],
            [picture([A, B], [0, 1])],
            (1 / 2, 1 / 2),
        ),
        # over images: the second one's only detection is wrong and scores best
        (
            [found([A], [0.5], [0]), found([FAR], [0.9], [0])],
            [picture([A], [0]), picture([], [])],
            (1 / 2, 1 / 2),
        ),
        # what is found on a difficult object, and what is missed of it, does not count
        (
            [found([B, A], [0.9, 0.5], [0, 0])],
            [picture([A, B, C], [0, 0, 0], [False, True, True])],
            (1.0, 1.0),
        ),
        ([found([], [], [])], [picture([A], [0])], (0.0, 0.0)),
    ],
)
def test_average_precision_of_hand_computed_cases(detections, objects, expected):
    result = mean_average_precision(list(zip(detections, objects, strict=True)))
    assert (result["map50"], result["map50_11point"]) == pytest.approx(
        expected, abs=1e-6
    )


@pytest.mark.parametrize(
    ("overlap", "metric", "expected"),
    [
        (0.51, "map50", 1),
        (0.49, "map50", 0),  # VOC counts from a half on
        (0.82, "map", 0.7),
        (1.0, "map", 1),  # COCO's mean: 0.82 is enough at 0.5, 0.55, ..., 0.8
    ],
)
def test_average_precision_overlap_thresholds(overlap, metric, expected):
    result = mean_average_precision(
        [(found([[0, 0, 10 * overlap, 10]], [0.9], [0]), picture([A], [0]))]
    )
    assert result[metric] == pytest.approx(expected)


def test_average_precision_equals_numpy_definition():
    """Compare all-point and 11-point precision of one object and one detection per image."""
    rng, n = np.random.default_rng(0), 40
    hits, scores = rng.random(n) < 0.7, (1 + rng.permutation(n)) / n
    pairs = [
        (found([A if h else FAR], [s], [0]), picture([A], [0]))
        for h, s in zip(hits, scores, strict=True)
    ]
    right = hits[scores.argsort()[::-1]]
    recall, exact = right.cumsum() / n, right.cumsum() / np.arange(1, n + 1)
    envelope = np.maximum.accumulate(exact[::-1])[::-1]
    area = (np.diff(recall, prepend=0) * envelope).sum()
    eleven = np.mean(
        [envelope[recall >= r - 1e-12].max(initial=0) for r in np.arange(11) / 10]
    )
    result = mean_average_precision(pairs)
    assert 0.3 < area < 0.9
    assert (result["map50"], result["map50_11point"]) == pytest.approx(
        (area, eleven), abs=1e-6
    )


def test_average_precision_rejects_images_without_objects():
    refused(
        "no object to be found on 1 images",
        mean_average_precision,
        [(found([A], [0.9], [0]), picture([], []))],
    )


# --- training -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_detection_training_learns_and_stores_metrics():
    s = spec(steps=30, train_images=2, batch=2, valid_images=1, test_images=1, lr=3e-3)
    task = DetectionTask(s, CPU)
    losses = []
    run = train(DetectionTask, s, on_step=lambda step, model, loss: losses.append(loss))
    assert losses[-1] < losses[0] / 2
    assert (
        "from scratch, on synthetic scenes of scikit-learn digits, 64 x 64" in run.title
    )
    run.model.eval()
    with cpt.precision(run.model, bits=8):
        on_training = mean_average_precision(task.detect(run.model, task.data.train)[0])
    assert on_training["map50"] > 0.3
    names, splits, policies = (
        ("map50", "map50_11point", "map", "loss"),
        ("valid", "test"),
        ("q_max", "current"),
    )
    assert {
        (m["name"], m["split"], m["when"], m["precision"]) for m in run.metrics
    } == {
        ("map50", "test", "best_valid", "q_max"),
        *(
            (name, split, "final", policy)
            for name, split, policy in itertools.product(names, splits, policies)
        ),
    }


# --- a pretrained backbone ------------------------------------------------------------------------


@pytest.mark.slow
def test_detection_task_loads_pretrained_weights(data_folder):
    import torchvision

    s = spec(pretrained=True, train_images=2, valid_images=0, test_images=1)
    s = replace(s, recipe=replace(s.recipe, model="retinanet"))
    with pytest.raises(
        DataNotFoundError,
        match=r"python -m cpt_lab download resnet18, or train from scratch with pre",
    ):
        DetectionTask(s, CPU)
    torch.manual_seed(5)
    stored = torchvision.models.resnet18().state_dict()
    stored["bn1.running_mean"] += 7
    torch.save(stored, data_folder / BACKBONE_WEIGHTS_FILE)
    task = DetectionTask(s, CPU)
    body = task.build_model().backbone.body
    assert torch.equal(body.conv1.weight, stored["conv1.weight"])
    assert torch.equal(body.layer4[1].bn2.weight, stored["layer4.1.bn2.weight"])
    assert body.bn1.running_mean[0] == 7
    assert isinstance(body.bn1, FrozenStatisticsBatchNorm2d)
    assert "ImageNet-pretrained backbone" in task.title
    torch.save(
        {k: v for k, v in stored.items() if k != "conv1.weight"},
        data_folder / BACKBONE_WEIGHTS_FILE,
    )
    refused(r"holds no weights of this backbone.*conv1\.weight", task.build_model)
    scratch = DetectionTask(replace(s, recipe=replace(s.recipe, pretrained=False)), CPU)
    assert isinstance(scratch.build_model().backbone.body.bn1, nn.BatchNorm2d)
    assert not isinstance(
        scratch.build_model().backbone.body.bn1, FrozenStatisticsBatchNorm2d
    )
    assert "from scratch" in scratch.title


def test_pretrained_or_scratch_falls_back_with_message(data_folder, capsys):
    assert pretrained_or_scratch("demo") == {}
    assert capsys.readouterr().out == ""
    changes = pretrained_or_scratch("paper")
    assert "from scratch, unlike the paper's" in capsys.readouterr().out
    (first, *_) = designs.quality_cost("paper", "voc2012", preset="authors", **changes)
    assert not first.recipe.pretrained
    (data_folder / BACKBONE_WEIGHTS_FILE).write_bytes(b"")
    assert pretrained_or_scratch("paper") == {}
    assert BACKBONE_WEIGHTS_FILE in capsys.readouterr().out


# --- cost -----------------------------------------------------------------------------------------


def test_upsampling_counts_in_paper_convention_only():
    model = retinanet("retinanet_small", 3)
    x = (torch.zeros(1, 3, 64, 64),)
    paper, per_op = (plan.count_bitops(model, x, convention=c) for c in CONVENTIONS)
    copied = 32 * (16 * 16 + 8 * 8)
    assert paper.macs["backbone.fpn (upsampling)"] == copied
    assert per_op.unpriced["backbone.fpn (upsampling)"] == copied
    assert paper.forward_macs == per_op.forward_macs + copied
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    with cpt.BitOpsLedger(model) as ledger:
        sum(detection_losses(model, *x, model(*x), [nothing])).backward()
    assert ledger.by_layer("paper")["backbone.fpn (upsampling)"] == 3 * copied


def test_count_bitops_of_paper_retinanet(reference_macs):
    with torch.device("meta"):
        model = retinanet("retinanet", 20)
    one = plan.count_bitops(
        model, (torch.empty(1, 3, 224, 224, device="meta"),), convention="paper"
    )
    assert one.forward_macs == int(reference_macs["voc_retinanet_r18"]["forward_count"])


def test_detection_cost_uses_real_input_sizes(monkeypatch):
    assert DetectionTask(spec(), CPU).cost_batches == 1
    monkeypatch.setattr(
        detection,
        "digit_scenes",
        lambda part, count, size: tuple(
            replace(
                a,
                image=a.image[:, : 32 * (1 + i % 2)],
                size=(32 * (1 + i % 2), 64),
                boxes=a.boxes.clip(max=32),
            )
            for i, a in enumerate(digit_scenes(part, count, 64))
        ),
    )
    loading._last.clear()
    assert DetectionTask(spec(), CPU).cost_batches == 8
    loading._last.clear()
    r = recipe("paper", "voc2012")
    paper = DetectionTask(
        run_spec(r, "CR", q_max=8, seed=0, scale="paper"), CPU, stand_in=True
    )
    (images,) = paper.inputs(next(paper.batches(0)))
    assert images.shape == (4, 3, 608, 832)
