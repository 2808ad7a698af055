"""Detection data: Pascal VOC's layout, reports and errors, digit scenes, and batches."""

import functools
import itertools

import numpy as np
import pytest
import torch
import torchvision
from dataset_layouts import (
    BOX,
    annotated_picture,
    annotation,
    boxes,
    describe_cases,
    encoded,
    grey_picture,
    load_own,
    noise,
    own_recipe,
    pictures,
    report_lines,
    split_sizes,
    voc_folder,
    voc_object,
    write,
    write_own,
)
from helpers import identical, refused, smoke_spec
from PIL import Image

from cpt_lab import data as data_sets
from cpt_lab.data import detection
from cpt_lab.data.detection import annotate_image, digit_scenes, load_detection
from cpt_lab.data.detection_batches import (
    _draws_flip,
    aspect_groups,
    batches,
    evaluation_batches,
)
from cpt_lab.data.files import DataNotFoundError
from cpt_lab.experiments.registry import recipe
from cpt_lab.tasks.detection import DetectionTask

small = functools.partial(own_recipe, "detection")
DIFFICULT = "<difficult>1</difficult>"
PART = "<part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>1</xmax><ymax>1</ymax></bndbox></part>"

# --- layouts --------------------------------------------------------------------------------------


def own_pictures():
    """Return five images of three classes."""
    wide, high = (60, 90), (90, 60)
    whole_image = voc_object("dog", (1, 1, 90, 60))
    difficult = voc_object("cat", (10, 20, 30, 40), DIFFICULT)
    person = voc_object("person", (5, 6, 7, 8), f"<difficult>0</difficult>{PART}")
    pixel = voc_object("cat", (90, 60, 90, 60))
    return {
        **annotated_picture("a", whole_image, difficult, size=wide),
        **annotated_picture("b", person, size=high),
        **annotated_picture("c", size=(60, 60)),
        **annotated_picture("d", pixel, size=wide, mode="L"),
        **annotated_picture("e", voc_object("dog"), size=wide),
        **boxes(train="abc", val="de"),
    }


def test_voc_reader_loads_user_dataset(data_folder):
    result = load_own(data_folder, "detection", own_pictures())
    assert result.classes == ("cat", "dog", "person")
    assert result.title == "own pictures (mine)"
    assert split_sizes(result) == [3, 0, 2]
    first, second, third = result.train
    assert first.size == (60, 90)
    # Counted from 1 with both corners inside becomes from 0 with the upper end open.
    assert first.boxes.tolist() == [[0, 0, 90, 60], [9, 19, 30, 40]]
    assert first.labels.tolist() == [1, 0]
    assert first.difficult.tolist() == [False, True]
    assert second.boxes.tolist() == [[4, 5, 7, 8]]  # of the person, not of the head
    assert third.boxes.shape == (0, 4)
    assert third.labels.dtype == np.int64
    assert result.test[0].boxes.tolist() == [[89, 59, 90, 60]]
    with Image.open(data_folder / "mine/JPEGImages/a.jpg") as image:
        assert np.array_equal(first.read().permute(1, 2, 0), np.asarray(image))
    grey = result.test[0].read()
    assert grey.shape == (3, 60, 90)
    assert torch.equal(grey[0], grey[1])
    # Reading processes receive thousands of pictures, and every tensor through a file descriptor.
    parts = [part for picture in result.train for part in vars(picture).values()]
    assert not any(isinstance(part, torch.Tensor) for part in parts)


def test_voc_reader_selects_splits_and_subsets(data_folder):
    limits = {"valid_images": 2, "train_images": 1, "test_images": 1}
    some = load_own(data_folder, "detection", voc_folder(), **limits)
    assert split_sizes(some) == [1, 2, 1]
    files = voc_folder("abcdefgh", "abc", "defgh") | boxes(val="de")
    result = load_own(data_folder, "detection", files, test_images=3)
    names = [one.image.stem for one in result.test]
    assert len(names) == 3
    assert names != [*"def"]  # drawn: neighbours in a film are alike


def test_voc_reader_checksum_follows_annotations(data_folder):
    files = voc_folder()
    changes = ([], [voc_object(more=DIFFICULT)], [voc_object(box=(2, 2, 20, 21))])
    checksums = []
    for objects in changes:
        extra = {"Annotations/b.xml": annotation(*objects)} if objects else {}
        result = load_own(data_folder, "detection", files | extra)
        checksums.append(result.checksum)
        assert load_detection(small()).checksum == result.checksum
    assert len(set(checksums)) == 3


@pytest.mark.parametrize("where", ["VOCdevkit/VOC2012", "VOC2007"])
def test_voc_reader_accepts_nested_folders(where, data_folder):
    files = {f"{where}/{name}": file for name, file in voc_folder().items()}
    assert load_own(data_folder, "detection", files).classes == ("cat",)


@pytest.mark.parametrize("dataset", ["voc2007", "voc2012"])
def test_voc_reader_loads_official_layout(dataset, data_folder):
    year, first, second = detection.VOC_SPLITS[dataset]
    files = {
        **annotated_picture("a", voc_object("person")),
        **annotated_picture("b", voc_object("aeroplane")),
        **boxes(**{first: "a", second: "b"}),
    }
    write(data_folder / "VOCdevkit" / f"VOC{year}", files)
    result = load_detection(small(dataset))
    assert (len(result.classes), result.title) == (20, f"Pascal VOC {year}")
    assert result.train[0].labels.tolist() == [14]
    assert result.test[0].labels.tolist() == [0]


def test_read_annotated_image_of_any_folder(tmp_path):
    write(tmp_path, annotated_picture("a", voc_object(), ending=".png"))
    image, xml = tmp_path / "JPEGImages/a.png", tmp_path / "Annotations/a.xml"
    read = detection.read_annotated_image(image, xml, ("dog", "cat"))
    assert (read.boxes.tolist(), read.labels.tolist()) == ([[1, 1, 20, 20]], [1])
    refused("unknown class 'cat'", detection.read_annotated_image, image, xml, ("dog",))


def test_voc_reader_ignores_trailing_bytes(data_folder):
    """Accept bytes after the end of an image, and reject a truncated image when it is read."""
    files = voc_folder()
    image = data_folder / "mine/JPEGImages/a.jpg"
    whole = files["JPEGImages/a.jpg"]
    files["JPEGImages/a.jpg"] = whole + bytes(200)  # as some cameras write
    result = load_own(data_folder, "detection", files).train[0]
    image.write_bytes(whole[:300])
    refused(r"a\.jpg cannot be read", result.read)


def test_voc_reader_names_missing_folders(data_folder):
    with pytest.raises(DataNotFoundError, match=r"there is no folder .*nowhere"):
        load_detection(small("nowhere/"))
    (data_folder / "mine").mkdir()
    message = "must hold one data set in VOC's layout .* found: none"
    refused(message, load_detection, small())
    for year in (2007, 2012):
        (data_folder / f"mine/VOC{year}/Annotations").mkdir(parents=True)
    refused("must hold one data set", load_detection, small())
    refused("unknown dataset 'voc2013'", load_detection, small("voc2013"))


# --- reports and errors ---------------------------------------------------------------------------


def voc_cases():
    """Return data sets in VOC's layout, a sound one first."""
    files = voc_folder()
    spaces = [f"my image {i}" for i in range(6)]
    numbers = [f"{name} 1" for name in "abcdef"]
    letters = "abcdef"
    flags = boxes(train=["a  1", "b -1", "c  0", "d  1"], test=["e 1", "f -1"])
    parts = voc_object(more=f"{DIFFICULT}{PART}<pose>Left</pose>")
    two_names = annotation(voc_object("Cat"), voc_object(" cat "))
    other_size = pictures("JPEGImages/a.jpg", size=(80, 90))
    polygon = "<object><name>cat</name><polygon/></object>"
    corners = "<xmin>3</xmin><ymin>3</ymin><xmax>9</xmax><ymax>9</ymax>"
    second_box = f"<bndbox>{corners}</bndbox>"
    very_difficult = voc_object(more="<difficult>very</difficult>")

    def turned(orientation, size=(30, 40)):
        image = encoded(noise(size, 70), "JPEG", orientation)
        return {"JPEGImages/a.jpg": image}

    def grey_images(**images):
        deep = {
            f"JPEGImages/{name}.png": grey_picture(high, seed, size=(30, 40))
            for seed, (name, high) in enumerate(images.items())
        }
        return voc_folder(ending=".png") | deep

    def annotated(*objects, **options):
        return files | {"Annotations/a.xml": annotation(*objects, **options)}

    def without(name):
        return {path: file for path, file in files.items() if path != name}

    renamed = {
        **without("JPEGImages/a.jpg"),
        **pictures("JPEGImages/IMG 1.jpg", size=(30, 40)),
        "Annotations/a.xml": annotation(
            voc_object(), more="<filename>C:\\x\\IMG 1.jpg</filename>"
        ),
    }
    second_image = pictures("JPEGImages/a.png", size=(30, 40))
    wrong_objects = {  # of the 40 x 30 pixels
        "a box two pixels outside": ("cat", (1, 1, 42, 30)),
        "a box counted from 0": ("cat", (0, 1, 9, 9)),
        "a box counted from 0 at the top": ("cat", (5, 0, 9, 9)),
        "a box at -1": ("cat", (-1, 5, 9, 9)),
        "a box in fractions of the image": ("cat", (0.1, 0.2, 0.5, 1)),
        "a box outside by a fraction": ("cat", (5, 5, 9, 32.5)),
        "a box behind the image": ("cat", (41, 5, 41, 9)),
        "a box that ends before it begins": ("cat", (10, 10, 9, 20)),
        "a box upside down": ("cat", (10, 30, 20, 10)),
        "a corner of NaN": ("cat", ("nan", 1, 9, 9)),
        "a corner in words": ("cat", ("ten", 1, 9, 9)),
        "an unknown class": ("dog", BOX),
        "no class": ("", BOX),
    }
    wrong = {
        name: {"Annotations/e.xml": annotation(voc_object(), voc_object(*wrong_object))}
        for name, wrong_object in wrong_objects.items()
    }
    return {
        "sound": files,
        "not listed": files | annotated_picture("z", voc_object()),
        "other files": files
        | {
            "ImageSets/Main/val.txt": b"a",
            "SegmentationClass/a.png": b"x",
            "labels.txt": b"cat",
        },
        "hidden": files | pictures("JPEGImages/.thumbs/a.jpg", "@eaDir/b.jpg"),
        "spaces in ids": voc_folder(spaces, spaces[:4], spaces[4:]),
        "numbers after spaces": voc_folder(numbers, numbers[:4], numbers[4:]),
        "flags": files | flags,
        "ids with endings": files | boxes(train=["a.jpg", "b.xml", "c", "d.jpg"]),
        "png": voc_folder(ending=".png"),
        "capitals": voc_folder(ending=".JPG"),
        "bmp": voc_folder(ending=".bmp"),
        "an image by its filename": renamed,
        "two images, one named": annotated(
            voc_object(), more="<filename>a.png</filename>"
        )
        | second_image,
        "another filename": annotated(voc_object(), more="<filename>b.jpg</filename>"),
        "sticking out by less than a pixel": annotated(
            voc_object(box=(0.6, 2, 40.4, 30.9))
        ),
        "difficult, parts, poses": annotated(voc_object(), parts, more="<sun/>"),
        "no object": annotated(),
        "classes in two spellings": files | {"Annotations/a.xml": two_names},
        "turned and annotated as shown": files | turned(6, (40, 30)),
        "turned and annotated as stored": files | turned(6),
        "upside down": files | turned(3),
        "12 bits": grey_images(**dict.fromkeys(letters, 4095)),
        "images of two sizes": annotated(voc_object(), size=(80, 90)) | other_size,
        "an id or a flag": voc_folder(["a", "a 1", "b", "c"], ["a 1", "b"], "c"),
        "no image of an id with spaces": files | boxes(train=["a", "my cat 3"]),
        "two images": files | second_image,
        "no image": without("JPEGImages/b.jpg"),
        "no annotation": without("Annotations/b.xml"),
        "an image of another kind": without("JPEGImages/a.jpg")
        | {"JPEGImages/a.heic": b"x"},
        "an image outside of the folder": files | boxes(train=["../../secret"]),
        "objects in objects": annotated(f"<objects>{voc_object()}</objects>"),
        "polygons": annotated(polygon),
        "difficult in words": annotated(very_difficult),
        "two boxes in an object": annotated(voc_object(more=second_box)),
        "two names in an object": annotated(voc_object(more="<name>cat</name>")),
        "an object of one pixel": annotated(voc_object(box=(1, 1, 1, 1))),
        "another size": annotated(voc_object(), size=(30, 41)),
        "another size, turned": files | turned(6, (44, 33)),
        "turned no more": files | pictures("JPEGImages/a.jpg", size=(40, 30)),
        "12 bits beside 8": grey_images(a=4095),
        "an image in both lists": files | boxes(test="def"),
        "tested on its own training images": files | boxes(test="ab"),
        "a copy": files | {"JPEGImages/e.jpg": files["JPEGImages/a.jpg"]},
        "an image listed twice": files | boxes(train="aba"),
        "an empty list": files | boxes(train=""),
        "no list": without("ImageSets/Main/test.txt"),
        "no object to train on": files
        | dict.fromkeys((f"Annotations/{i}.xml" for i in "abcd"), annotation()),
        "no class to train on": files
        | dict.fromkeys(
            (f"Annotations/{i}.xml" for i in "abcd"), annotation(voc_object(""))
        ),
        **{name: files | change for name, change in wrong.items()},
        "no object that counts in the test": files
        | {
            "Annotations/e.xml": annotation(),
            "Annotations/f.xml": annotation(voc_object(more=DIFFICULT)),
        },
    }


@pytest.mark.slow
def test_voc_reader_reports_unusual_content(data_folder, golden):
    golden("data/voc.txt", describe_cases(data_folder, "detection", voc_cases()))


@pytest.mark.parametrize(
    ("orientation", "as_shown"),
    # Only orientations from 5 on exchange the sides, so that the size tells which image was annotated.
    [*((k, True) for k in range(2, 9)), *((k, False) for k in range(5, 9))],
)
def test_voc_reader_orients_boxes_by_annotated_size(orientation, as_shown, data_folder):
    """Keep a white patch inside its box, whether the annotated size is of the shown or the stored image."""
    drawn = np.zeros((30, 40, 3), np.uint8)
    drawn[1:20, 1:20] = 255
    image = Image.fromarray(drawn)
    if as_shown:
        undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # by PIL's transpositions
        image = image.transpose(Image.Transpose(undo[orientation]))
    files = voc_folder(ending=".png")
    files["JPEGImages/a.png"] = encoded(image, "PNG", orientation)
    result = load_own(data_folder, "detection", files)
    picture = next(one for one in result.train if one.image.name == "a.png")
    x1, y1, x2, y2 = picture.boxes[0].astype(int).tolist()
    assert picture.read()[:, y1:y2, x1:x2].float().mean() == 255
    assert tuple(picture.read().shape[1:]) == picture.size == (30, 40)


def test_voc_reader_scales_subsets_by_whole_dataset(data_folder):
    """Take the bit depth from all listed images, even for a subset."""
    files = voc_folder(ending=".png")
    for i, name in enumerate("abcdef"):
        files[f"JPEGImages/{name}.png"] = grey_picture(500 * 2**i, i, size=(30, 40))
    whole = load_own(data_folder, "detection", files)
    some = load_detection(small(train_images=1, test_images=1))
    every = (*whole.train, *whole.test, *some.train, *some.test)
    assert {one.bits for one in every} == {14}
    assert max(one.read().max() for one in whole.test) == 16000 >> 6


def test_voc_report_follows_max_size(data_folder):
    """Report the largest side of this recipe, also if the data of another one are cached."""
    write_own(data_folder, voc_folder())
    for max_size in (70, 90, 70):
        spec = smoke_spec("digit-scenes", dataset="mine/", size=64, max_size=max_size)
        lines = report_lines(DetectionTask(spec, torch.device("cpu")).data)
        assert any(f"at most {max_size} on the long one" in line for line in lines)


def test_voc_reader_clips_boxes_to_image(data_folder):
    sticking_out = annotation(voc_object(box=(0.6, 2, 40.4, 30.9)))
    files = voc_folder() | {"Annotations/a.xml": sticking_out}
    result = load_own(data_folder, "detection", files)
    assert result.train[0].boxes.tolist() == [[0, 1, 40, 30]]


# --- scenes ---------------------------------------------------------------------------------------


def test_digit_scenes_have_exact_boxes():
    for scene in digit_scenes("train", 40, 96):
        ink = scene.image[0].clone()
        assert torch.equal(scene.image[0], scene.image[2])
        assert 1 <= len(scene.boxes) <= 4
        for x1, y1, x2, y2 in scene.boxes.astype(int).tolist():
            part = ink[y1:y2, x1:x2]
            for edge in (part[0], part[-1], part[:, 0], part[:, -1]):
                assert edge.any()  # no smaller box would do
            part.zero_()
        assert not ink.any()  # nothing outside the boxes, and no overlap


# --- batches --------------------------------------------------------------------------------------


def blank_pictures(*sizes):
    return tuple(
        annotate_image(
            torch.full((3, h, w), i, dtype=torch.uint8),
            (h, w),
            [[0, 0, w / 2, h]],
            [i],
            [False],
        )
        for i, (h, w) in enumerate(sizes)
    )


def test_aspect_groups_collect_similar_shapes():
    mixed = blank_pictures((60, 90), (90, 60), (60, 60), (61, 90), (90, 61))
    assert aspect_groups(mixed, 2) == [[1, 4], [2, 3], [0]]


def test_detection_batches_resize_and_pad_images():
    """Resize and pad images, and scale their boxes alike."""
    config = small(size=60, max_size=100)
    (batch,) = evaluation_batches(blank_pictures((50, 100), (100, 50)), config, 0)
    # Wide: 60 x 120 would be too long, so 50 x 100. Both sides of a batch are multiples of 32.
    assert batch.sizes == [(100, 50), (50, 100)]
    assert batch.images.shape == (2, 3, 128, 128)
    assert batch.targets[1]["boxes"].tolist() == [[0, 0, 50, 50]]
    config = small(size=608, max_size=1024)
    (one,) = evaluation_batches(blank_pictures((300, 400)), config, workers=0)
    assert one.sizes == [(608, 810)]
    assert one.images.shape == (1, 3, 608, 832)
    expected = torch.tensor([[0, 0, 405.0, 608.0]])
    torch.testing.assert_close(one.targets[0]["boxes"], expected, rtol=0, atol=0.5)


def test_detection_batches_omit_difficult_objects(data_folder):
    train = load_own(data_folder, "detection", own_pictures()).train
    result = evaluation_batches(train, small(), 0)
    labels = [target["labels"].tolist() for batch in result for target in batch.targets]
    assert sorted(labels) == [[], [1], [2]]


@pytest.mark.slow
def test_detection_batches_are_reproducible_by_step(data_folder):
    """Return equal batches for equal seeds and steps, with and without workers."""
    train = load_own(data_folder, "detection", own_pictures()).train
    config = small(flip=True)

    def first(count, start=0, seed=0, workers=0):
        stream = batches(train, config, seed, start, workers)
        return [batch.images for batch in itertools.islice(stream, count)]

    whole = first(8)
    assert identical(whole[3:], first(5, start=3))
    assert identical(whole, first(8, workers=1))
    others = first(8, seed=1)
    assert any(
        a.shape != b.shape or not torch.equal(a, b)
        for a, b in zip(whole, others, strict=True)
    )


def test_detection_batches_mirror_boxes():
    (scene,) = digit_scenes("train", 1, 96)
    mirrored, plain = (
        small(flip=flip, size=96, max_size=97, batch=1) for flip in (True, False)
    )
    lefts = set()
    for batch in itertools.islice(batches((scene,), mirrored, 0, 0, 0), 12):
        ink = (batch.images[0, 0] > batch.images[0, 0].min() + 0.01).clone()
        for x1, y1, x2, y2 in batch.targets[0]["boxes"].int().tolist():
            assert ink[y1:y2, x1].any()
            assert ink[y1:y2, x2 - 1].any()
            ink[y1:y2, x1:x2] = False
        assert not ink.any()
        lefts.add(batch.targets[0]["boxes"][0, 0].item())
    assert len(lefts) == 2
    for batch in itertools.islice(batches((scene,), plain, 0, 0, 0), 6):
        assert np.array_equal(batch.targets[0]["boxes"], scene.boxes)


def test_mirroring_coin_is_fair():
    keys = itertools.product(range(3), range(10), range(100))
    tosses = [_draws_flip(seed, epoch, index) for seed, epoch, index in keys]
    assert abs(sum(tosses) / 3000 - 0.5) < 0.035  # four standard deviations


# --- downloads and recipes ------------------------------------------------------------------------


def test_voc_download_uses_torchvision(data_folder, monkeypatch):
    requests = []

    def fake_dataset(folder, *args, download):
        requests.append((*args, download))

    monkeypatch.setattr(torchvision.datasets, "VOCDetection", fake_dataset)
    data_sets.download("voc2012")
    data_sets.download("voc2007")
    assert requests == [
        ("2012", "train", True),
        ("2012", "val", True),
        ("2007", "trainval", True),
        ("2007", "test", True),
    ]


def test_backbone_download_checks_hash(data_folder, monkeypatch):
    requests = []

    def fake_download(url, *args, **options):
        requests.append((url, options["check_hash"]))

    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", fake_download)
    assert data_sets.download("resnet18").parent == data_folder
    ((url, checks_hash),) = requests
    assert url.endswith(detection.BACKBONE_WEIGHTS_FILE)
    assert checks_hash


def test_detection_recipe_rejects_invalid_size():
    assert recipe("paper", "voc2007").pretrained
    assert not recipe("demo", "my/", task="detection").pretrained
    message = "size must be at least 32 and below max_size 96, got 96"
    refused(message, small, size=96)
