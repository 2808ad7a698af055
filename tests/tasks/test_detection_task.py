"""Detection task: RetinaNet, its losses, detections and metric, its cost, and pretrained backbones."""

import itertools
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import torchvision
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


@pytest.fixture(scope="session")
def paper_retinanet():
    """Build the paper's RetinaNet once; tests do not change it."""
    torch.manual_seed(0)
    return retinanet("retinanet", 20)


@pytest.mark.slow
def test_retinanet_has_parameter_count_of_paper(paper_retinanet):
    assert sum(p.numel() for p in paper_retinanet.parameters()) == 20_165_400


@pytest.mark.parametrize(("name", "stride"), [("retinanet", 8), ("retinanet_small", 4)])
def test_retinanet_output_and_anchor_shapes(name, stride, paper_retinanet):
    model = paper_retinanet if stride == 8 else retinanet(name, 20)
    images = torch.zeros(2, 3, 8 * stride, 12 * stride)
    with torch.no_grad():
        out = model(images)
    shapes = [(8, 12), (4, 6), (2, 3), (1, 2), (1, 1)]
    assert [tuple(f.shape[-2:]) for f in out.features] == shapes
    count = 9 * sum(math.prod(shape) for shape in shapes)
    assert out.logits.shape == (2, count, 20)
    assert out.offsets.shape == (2, count, 4)
    anchors = image_anchors(model, images, out)
    assert [a.shape for a in anchors] == [(count, 4)] * 2
    sides = (anchors[0][:9, 2:] - anchors[0][:9, :2]).prod(1).sqrt()
    expected = [4 * stride * scale for scale in (1, 1.26, 1.59) for _ in range(3)]
    np.testing.assert_allclose(sorted(sides.tolist()), expected, rtol=0.06)


def test_retinanet_initially_predicts_one_percent():
    out = retinanet("retinanet_small", 3)(torch.randn(1, 3, 64, 64))
    torch.testing.assert_close(out.logits.sigmoid(), torch.full_like(out.logits, 0.01))
    assert not out.offsets.any()


@pytest.mark.parametrize(
    "name",
    [
        "backbone.body.layer3.0.conv1",
        "backbone.fpn.inner_blocks.1.0",
        "head.classification_head.conv.2.0",
    ],
)
def test_retinanet_initialises_convolutions(name, paper_retinanet):
    conv = paper_retinanet.get_submodule(name)
    k, _ = conv.kernel_size
    std = math.sqrt(2 / (k * k * conv.out_channels))
    assert conv.weight.std().item() == pytest.approx(std, rel=0.03)
    assert conv.bias is None or not conv.bias.any()


def test_frozen_batch_norm_trains_scale_and_shift():
    """Train scale and shift, but keep the running statistics."""
    layer, mean = FrozenStatisticsBatchNorm2d(2), torch.tensor([1.0, 2.0])
    layer.load_state_dict({**nn.BatchNorm2d(2).state_dict(), "running_mean": mean})
    model = nn.Sequential(layer).train()
    x = torch.randn(4, 2, 3, 3)
    y = model(x)
    expected = (x - mean.view(1, 2, 1, 1)) / math.sqrt(1 + 1e-5)
    torch.testing.assert_close(y, expected)
    y.sum().backward()
    assert layer.running_mean.tolist() == [1.0, 2.0]
    assert layer.weight.grad is not None
    assert layer.bias.grad.tolist() == [36.0, 36.0]


def test_retinanet_quantizes_all_convolutions_and_biases():
    model = cpt.quantize_(retinanet("retinanet_small", 20))
    rows = cpt.summary(model).rows
    assert {r.kind for r in rows if r.quantized} == {"Conv2d"}
    assert {r.kind for r in rows if not r.quantized} == {"FrozenStatisticsBatchNorm2d"}
    logits = model.head.classification_head.cls_logits
    assert logits.bias is not None
    cpt.PrecisionScheduler(model, cpt.make_schedule("STATIC", q_max=2, total_steps=1))
    values = logits.precision.quantize_operand("bias", torch.linspace(0, 1, 50))
    assert len(values.unique()) == 4


# --- losses and detections ------------------------------------------------------------------------


def focal_loss(logit, is_label):
    p = 1 / (1 + math.exp(-logit))
    if is_label:
        return -0.25 * (1 - p) ** 2 * math.log(p)
    return -0.75 * p**2 * math.log(1 - p)


def box_loss(offsets, anchor, box):
    """Return the smooth L1 loss of one anchor's offsets."""
    width, height = anchor[2] - anchor[0], anchor[3] - anchor[1]
    expected = (
        ((box[0] + box[2]) / 2 - (anchor[0] + anchor[2]) / 2) / width / 0.1,
        ((box[1] + box[3]) / 2 - (anchor[1] + anchor[3]) / 2) / height / 0.1,
        math.log((box[2] - box[0]) / width) / 0.2,
        math.log((box[3] - box[1]) / height) / 0.2,
    )
    distances = [abs(a - b) for a, b in zip(offsets, expected, strict=True)]
    return sum(4.5 * d * d if d < 1 / 9 else d - 1 / 18 for d in distances)


def plain_losses(out, anchors, boxes, labels):
    """Return the paper's losses of one image, written out with loops over anchors."""
    focal = box = 0.0
    positives = 0
    logits, offsets = out.logits[0].tolist(), out.offsets[0].tolist()
    for i, anchor in enumerate(anchors.tolist()):
        overlaps = box_iou(anchors[i : i + 1], boxes)[0].tolist()
        overlap = max(overlaps, default=0)
        if 0.4 <= overlap < 0.5:
            continue
        best = overlaps.index(overlap) if overlap >= 0.5 else None
        label = None if best is None else labels[best]
        focal += sum(focal_loss(logit, k == label) for k, logit in enumerate(logits[i]))
        if best is not None:
            positives += 1
            box += box_loss(offsets[i], anchor, boxes[best].tolist())
    return focal / max(1, positives), box / max(1, 4 * positives)


@pytest.mark.parametrize(
    ("boxes", "has_positives"),
    [
        ([[3.0, 3, 20, 18], [14, 14, 31, 29]], True),
        ([], False),
        ([[5.0, 5, 8, 8]], False),  # too small for any anchor
    ],
)
def test_detection_losses_equal_loop_reference(boxes, has_positives):
    torch.manual_seed(0)
    model = retinanet("retinanet_small", 3)
    head = model.head
    for layer in (head.classification_head.cls_logits, head.regression_head.bbox_reg):
        nn.init.normal_(layer.weight, std=0.02)
    images = torch.randn(1, 3, 32, 32)
    boxes = torch.tensor(boxes).reshape(-1, 4)
    labels = torch.tensor([2, 0][: len(boxes)], dtype=torch.int64)
    out = model(images)
    target = {"boxes": boxes, "labels": labels}
    losses = [loss.item() for loss in detection_losses(model, images, out, [target])]
    anchors = image_anchors(model, images, out)[0]
    expected = plain_losses(out, anchors, boxes, labels.tolist())
    assert losses == pytest.approx(expected, rel=1e-4)
    assert (losses[1] > 0) == has_positives


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
    (result,) = detections(model, images, answer, [(64, 64)])
    torch.testing.assert_close(result["boxes"], box, rtol=1e-4, atol=1e-3)
    assert result["labels"].tolist() == [2]
    assert result["scores"].item() == pytest.approx(1 / (1 + math.exp(-3)))
    (cut,) = detections(model, images, answer, [(30, 40)])  # the rest is padding
    inside = torch.tensor([[6.0, 4, 40, 30]])
    torch.testing.assert_close(cut["boxes"], inside, rtol=1e-4, atol=1e-3)


def test_detections_are_in_original_image_pixels(monkeypatch):
    task = DetectionTask(spec(size=64, max_size=100), CPU)
    model = task.build_model().eval()
    pixels = torch.zeros(3, 50, 130, dtype=torch.uint8)
    wide = annotate_image(pixels, (50, 130), [[10, 20, 30, 40]], [1], [False])
    input_sizes = []

    def whole_image(model, images, outputs, sizes):
        input_sizes.extend(sizes)
        height, width = sizes[0]
        return [make_detections([[0, 0, width, height]], [0.9], [1])]

    monkeypatch.setattr(detection_boxes, "detections", whole_image)
    ((detected, original),), loss = task.detect(model, [wide])
    assert input_sizes == [(38, 100)]  # 64 x 166 would be too long
    assert original is wide
    torch.testing.assert_close(detected["boxes"], torch.tensor([[0.0, 0, 130, 50]]))
    assert math.isfinite(loss)


# --- the metric -----------------------------------------------------------------------------------


def picture(boxes, labels, difficult=None):
    pixels = torch.zeros(3, 100, 100, dtype=torch.uint8)
    difficult = difficult or [False] * len(labels)
    return annotate_image(pixels, (100, 100), boxes, labels, difficult)


def make_detections(boxes, scores, labels):
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "scores": torch.tensor(scores, dtype=torch.float32),
        "labels": torch.tensor(labels, dtype=torch.int64),
    }


A, B, C, FAR = [0, 0, 10, 10], [20, 20, 40, 40], [50, 50, 80, 80], [85, 85, 95, 95]
# Right, wrong, right of two: precision 1 up to recall 1/2, then 2/3, so the area is 1/2 + 1/2 * 2/3. Of the eleven
# points six (0 to 0.5) have precision 1 and five have 2/3.
SECOND_AFTER_A_MISS = (1 / 2 + 1 / 2 * 2 / 3, (6 + 5 * 2 / 3) / 11)
# Detections, objects, and the average precisions at an overlap of 0.5: area, eleven points.
PRECISIONS = {
    "a miss in between": (
        [make_detections([A, FAR, B], [0.9, 0.8, 0.7], [0, 0, 0])],
        [picture([A, B], [0, 0])],
        SECOND_AFTER_A_MISS,
    ),
    "an object found twice": (
        [make_detections([A, A, B], [0.9, 0.8, 0.7], [0, 0, 0])],
        [picture([A, B], [0, 0])],
        SECOND_AFTER_A_MISS,
    ),
    "one of three, which reaches recalls of 0 to 0.3": (
        [make_detections([A], [0.5], [0])],
        [picture([A, B, C], [0, 0, 0])],
        (1 / 3, 4 / 11),
    ),
    "mean over classes with objects": (
        [make_detections([A, B], [0.9, 0.8], [0, 2])],
        [picture([A, B], [0, 1])],
        (1 / 2, 1 / 2),
    ),
    "a wrong detection on another image": (
        [make_detections([A], [0.5], [0]), make_detections([FAR], [0.9], [0])],
        [picture([A], [0]), picture([], [])],
        (1 / 2, 1 / 2),
    ),
    "difficult objects, found or missed": (
        [make_detections([B, A], [0.9, 0.5], [0, 0])],
        [picture([A, B, C], [0, 0, 0], [False, True, True])],
        (1.0, 1.0),
    ),
    "no detection": ([make_detections([], [], [])], [picture([A], [0])], (0.0, 0.0)),
}


@pytest.mark.parametrize("case", PRECISIONS)
def test_average_precision_of_hand_computed_cases(case):
    detected, objects, expected = PRECISIONS[case]
    result = mean_average_precision(list(zip(detected, objects, strict=True)))
    precisions = (result["map50"], result["map50_11point"])
    assert precisions == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("overlap", "metric", "expected"),
    [
        (0.51, "map50", 1),
        (0.49, "map50", 0),  # VOC counts from a half on
        (0.82, "map", 0.7),  # COCO's mean: enough at 0.5, 0.55, ..., 0.8
        (1.0, "map", 1),
    ],
)
def test_average_precision_overlap_thresholds(overlap, metric, expected):
    detected = make_detections([[0, 0, 10 * overlap, 10]], [0.9], [0])
    result = mean_average_precision([(detected, picture([A], [0]))])
    assert result[metric] == pytest.approx(expected)


def test_average_precision_rejects_images_without_objects():
    pairs = [(make_detections([A], [0.9], [0]), picture([], []))]
    refused("no object to be found on 1 images", mean_average_precision, pairs)


# --- training -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_detection_training_learns_and_stores_metrics():
    counts = dict.fromkeys(("train_images", "valid_images", "test_images"), 1)
    config = spec(steps=20, batch=1, lr=3e-3, **counts)
    run = train(DetectionTask, config)
    losses = run.history["loss"]
    assert losses[-1] < losses[0] / 2
    title = "from scratch, on synthetic scenes of scikit-learn digits, 64 x 64"
    assert title in run.title
    task = DetectionTask(config, CPU)
    run.model.eval()
    with cpt.precision(run.model, bits=8):
        pairs, _ = task.detect(run.model, task.data.train)
    assert mean_average_precision(pairs)["map50"] > 0.3
    names = ("map50", "map50_11point", "map", "loss")
    final = itertools.product(names, ("valid", "test"), ["final"], ("q_max", "current"))
    keys = ("name", "split", "when", "precision")
    stored = {tuple(metric[key] for key in keys) for metric in run.metrics}
    assert stored == {("map50", "test", "best_valid", "q_max"), *final}


@pytest.mark.slow
def test_detection_task_loads_pretrained_weights(data_folder):
    config = spec(pretrained=True, train_images=2, valid_images=0, test_images=1)
    config = replace(config, recipe=replace(config.recipe, model="retinanet"))
    message = r"python -m cpt_lab download resnet18, or train from scratch with pre"
    refused(message, DetectionTask, config, CPU, error=DataNotFoundError)
    stored = torchvision.models.resnet18().state_dict()
    stored["bn1.running_mean"] += 7
    torch.save(stored, data_folder / BACKBONE_WEIGHTS_FILE)
    task = DetectionTask(config, CPU)
    body = task.build_model().backbone.body
    assert torch.equal(body.conv1.weight, stored["conv1.weight"])
    assert torch.equal(body.layer4[1].bn2.weight, stored["layer4.1.bn2.weight"])
    assert body.bn1.running_mean[0] == 7
    assert isinstance(body.bn1, FrozenStatisticsBatchNorm2d)
    assert "ImageNet-pretrained backbone" in task.title
    del stored["conv1.weight"]
    torch.save(stored, data_folder / BACKBONE_WEIGHTS_FILE)
    message = r"holds no weights of this backbone.*conv1\.weight"
    refused(message, task.build_model)


def test_detection_task_from_scratch_trains_statistics():
    task = DetectionTask(spec(pretrained=False), CPU)
    kinds = {type(module) for module in task.build_model().modules()}
    assert nn.BatchNorm2d in kinds
    assert FrozenStatisticsBatchNorm2d not in kinds
    assert "from scratch" in task.title


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_count_bitops_of_paper_retinanet(reference_macs):
    with torch.device("meta"):
        model, images = retinanet("retinanet", 20), torch.empty(1, 3, 224, 224)
    counted = plan.count_bitops(model, (images,), convention="paper")
    expected = int(reference_macs["voc_retinanet_r18"]["forward_count"])
    assert counted.forward_macs == expected


def test_detection_cost_uses_real_input_sizes(monkeypatch):
    assert DetectionTask(spec(), CPU).cost_batches == 1

    def scenes_of_two_heights(part, count, size):
        scenes = []
        for i, scene in enumerate(digit_scenes(part, count, 64)):
            height = 32 * (1 + i % 2)
            cut = {"image": scene.image[:, :height], "boxes": scene.boxes.clip(max=32)}
            scenes.append(replace(scene, size=(height, 64), **cut))
        return tuple(scenes)

    monkeypatch.setattr(detection, "digit_scenes", scenes_of_two_heights)
    monkeypatch.setattr(loading, "_last", {})
    assert DetectionTask(spec(), CPU).cost_batches == 8


def test_detection_stand_in_has_paper_sizes():
    config = run_spec(recipe("paper", "voc2012"), "CR", q_max=8, seed=0, scale="paper")
    task = DetectionTask(config, CPU, stand_in=True)
    (images,) = task.inputs(next(task.batches(0)))
    assert images.shape == (4, 3, 608, 832)
