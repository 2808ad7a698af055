"""Detection data: digit scenes, Pascal VOC layouts, invalid input and batches."""

import io
import itertools

import numpy as np
import pytest
import torch
import torchvision
from dataset_layouts import annotated_picture, boxes, write
from helpers import identical
from PIL import Image

from cpt_lab import data as data_sets
from cpt_lab.data import detection
from cpt_lab.data.detection import annotate_image as in_memory
from cpt_lab.data.detection import digit_scenes, load_detection, read_annotated_image
from cpt_lab.data.detection_batches import (
    _draws_flip,
    aspect_groups,
    batches,
    evaluation_batches,
)
from cpt_lab.data.files import DataNotFoundError
from cpt_lab.experiments.detection import DetectionRecipe
from cpt_lab.experiments.registry import recipe


def small(dataset, **changes):
    settings = dict(
        model="retinanet",
        quantized="all",
        steps=4,
        batch=2,
        lr=1e-3,
        q_min=5,
        size=64,
        max_size=96,
    )
    return DetectionRecipe(task="detection", dataset=dataset, **{**settings, **changes})


DIFFICULT = "<difficult>1</difficult>"
PART = "<part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>1</xmax><ymax>1</ymax></bndbox></part>"


def write_picture(folder, name, *given, **more):
    write(folder, annotated_picture(name, *given, **more))
    return folder / "JPEGImages" / f"{name}.jpg", folder / "Annotations" / f"{name}.xml"


def refused(message, error=ValueError, dataset="pets/"):
    with pytest.raises(error, match=message):
        load_detection(small(dataset))


@pytest.fixture
def own(data_folder):
    """Write a dataset of five images in VOC layout to "pets/" in the data folder."""
    folder = data_folder / "pets" / "VOCdevkit" / "VOC2007"
    write_picture(
        folder,
        "a",
        (60, 90),
        [("dog", (1, 1, 90, 60)), ("cat", (10, 20, 30, 40), DIFFICULT)],
    )
    write_picture(
        folder,
        "b",
        (90, 60),
        [("person", (5, 6, 7, 8), "<difficult>0</difficult>", PART)],
    )
    write_picture(folder, "c", (60, 60))  # nothing to be seen
    write_picture(folder, "d", (60, 90), [("cat", (3, 4, 50, 44))], mode="L")
    write_picture(folder, "e", (60, 90), [("dog", (2, 2, 20, 20))])
    write(folder, boxes(train=["a", "b", "c"], val=["d", "e"]))
    return folder


def test_voc_reader_loads_user_dataset(own):
    data = load_detection(small("pets/"))
    assert data.classes == ("cat", "dog", "person")
    assert data.title == "own pictures (pets)"
    assert [len(part) for part in (data.train, data.valid, data.test)] == [3, 0, 2]
    first, second, third = data.train
    assert first.size == (60, 90)
    # counted from 1 with both corners inside -> from 0 with the upper end open: the whole image
    assert first.boxes.tolist() == [[0, 0, 90, 60], [9, 19, 30, 40]]
    assert first.labels.tolist() == [1, 0]
    assert first.difficult.tolist() == [False, True]
    assert second.boxes.tolist() == [[4, 5, 7, 8]]  # of the person, not of the head
    assert third.boxes.shape == (0, 4)
    assert third.labels.dtype == np.int64
    with Image.open(own / "JPEGImages" / "a.jpg") as image:
        assert np.array_equal(first.read().permute(1, 2, 0), np.asarray(image))
    grey = data.test[0].read()
    assert grey.shape == (3, 60, 90)
    assert torch.equal(grey[0], grey[1])
    # processes that read are sent them by the thousand, and each tensor through a file descriptor of its own
    assert not any(
        isinstance(part, torch.Tensor)
        for picture in data.train
        for part in vars(picture).values()
    )


def test_voc_reader_selects_splits_and_subsets(own):
    """Select splits and subsets, and change the checksum with the annotations."""
    held = load_detection(small("pets/", valid_images=2, train_images=1, test_images=1))
    assert [len(part) for part in (held.train, held.valid, held.test)] == [1, 2, 1]
    for name in "fgh":
        write_picture(own, name, (60, 90), [("dog", (2, 2, 20, 20))])
    write(own, boxes(test="defgh"))  # preferred to val
    some = [
        one.image.stem for one in load_detection(small("pets/", test_images=3)).test
    ]
    assert len(some) == 3
    assert some != [*"def"]  # drawn: frames of a film stand one after the other
    (own / "ImageSets" / "Main" / "test.txt").unlink()
    seen = [load_detection(small("pets/")).checksum for _ in range(2)]
    write_picture(
        own, "a", (60, 90), [("dog", (1, 1, 90, 60)), ("cat", (10, 20, 30, 40))]
    )  # not difficult any more
    seen.append(load_detection(small("pets/")).checksum)
    write_picture(own, "b", (90, 60), [("person", (5, 6, 7, 9))])
    seen.append(load_detection(small("pets/")).checksum)
    assert (seen[0] == seen[1], len(set(seen))) == (True, 3)


@pytest.mark.parametrize("where", ["", "VOCdevkit/VOC2012", "VOC2007"])
def test_voc_reader_accepts_nested_folders(data_folder, where):
    folder = data_folder / "mine" / where
    for name in "ab":
        write_picture(folder, name, objects=[("x", (1, 1, 5, 5))])
    write(folder, boxes(train=["a"], val=["b"]))
    assert load_detection(small("mine/")).classes == ("x",)


@pytest.mark.parametrize("dataset", ["voc2007", "voc2012"])
def test_voc_reader_loads_official_layout(data_folder, dataset):
    year, first, second = detection.VOC_SPLITS[dataset]
    folder = data_folder / "VOCdevkit" / f"VOC{year}"
    write_picture(folder, "a", objects=[("person", (1, 1, 5, 5))])
    write_picture(folder, "b", objects=[("aeroplane", (1, 1, 5, 5))])
    write(folder, boxes(**{first: ["a"], second: ["b"]}))
    data = load_detection(small(dataset))
    assert (len(data.classes), data.title) == (20, f"Pascal VOC {year}")
    assert (data.train[0].labels.tolist(), data.test[0].labels.tolist()) == ([14], [0])


@pytest.mark.parametrize(
    ("name", "box", "message"),
    [
        (
            "dog",
            (1, 1, 92, 60),
            r"\(1, 1\) to \(92, 60\) is not inside the 90 x 60 image",
        ),
        (
            "dog",
            (0, 1, 10, 10),
            "is not inside .*: VOC counts pixels from 1, and this file probably from 0; add 1 to",
        ),
        ("dog", (5, 0, 10, 10), "probably from 0; add 1 to xmin and ymin"),
        ("dog", (-1, 5, 10, 10), "is not inside the 90 x 60 image"),
        ("dog", (5, 5, 10, 62.5), "is not inside"),
        ("dog", (91, 5, 91, 10), "is not inside"),
        ("dog", (10, 10, 9, 20), "has no area"),
        ("dog", (10, 30, 20, 10), "has no area"),
        ("dog", ("nan", 1, 10, 10), "bndbox/xmin must be a number, got 'nan'"),
        ("dog", ("ten", 1, 10, 10), "bndbox/xmin must be a number, got 'ten'"),
        ("dgo", (1, 1, 10, 10), "unknown class 'dgo'; the classes are cat, dog"),
        ("", (1, 1, 10, 10), "unknown class ''"),
    ],
)
def test_voc_reader_rejects_invalid_objects(tmp_path, name, box, message):
    """Name the file and the number of an invalid object."""
    one_pixel = ("dog", (90, 60, 90, 60))
    image, xml = write_picture(tmp_path, "a", (60, 90), [one_pixel])
    assert read_annotated_image(image, xml, ("cat", "dog")).boxes.tolist() == [
        [89, 59, 90, 60]
    ]
    write_picture(tmp_path, "a", (60, 90), [one_pixel, (name, box)])
    with pytest.raises(ValueError, match=rf"a\.xml, object 2.*{message}"):
        read_annotated_image(image, xml, ("cat", "dog"))


def test_voc_reader_ignores_trailing_bytes(
    own,
):
    """Accept bytes after the end of an image, and reject a truncated image when it is read."""
    image = own / "JPEGImages" / "b.jpg"
    whole = image.read_bytes()
    image.write_bytes(whole + bytes(200))  # some cameras write more behind the end
    found = load_detection(small("pets/")).train[1]
    image.write_bytes(whole[:300])
    with pytest.raises(ValueError, match=r"b\.jpg cannot be read"):
        found.read()


def test_voc_reader_rejects_missing_or_wrong_files(own):
    xml = own / "Annotations" / "b.xml"
    good = xml.read_text()
    xml.write_text(good.replace("<width>60", "<width>61"))
    refused(r"b\.xml says 61 x 90 pixels, b\.jpg has 60 x 90")
    xml.unlink()
    refused(r"there is no file .*b\.xml", DataNotFoundError)
    xml.write_text(good)
    (own / "JPEGImages" / "b.jpg").unlink()
    refused(r"no file .*b\.jpg", DataNotFoundError)


def test_voc_reader_rejects_wrong_split_lists(own, tmp_path):
    write_picture(own, "f", (60, 60))
    write(own, boxes(val="f"))
    refused("no object that counts on any of 1 test images")
    write_picture(own, "d", (60, 90), [("cat", (3, 4, 50, 44), DIFFICULT)])
    write(own, boxes(val="fd"))
    refused("no object that counts on any of 2 test images")
    write(own, boxes(train=["a", "b", "a"]))
    refused(r"VOC\d+: a\.jpg is listed 2 times; list every image once")
    write(own, boxes(train=[]))
    refused(r"train\.txt is empty")
    write(own, boxes(train=["c"]))
    refused("no object in any training annotation")
    write_picture(own, "e", (60, 90), [("", (3, 4, 50, 44))])
    write(own, boxes(train=["e"]))
    refused("no object in any training annotation")
    write(own, boxes(train=["b"]))  # persons only
    refused("unknown class 'cat'; the classes are person")
    (own / "ImageSets" / "Main" / "val.txt").unlink()
    refused(r"there is no .*val\.txt", DataNotFoundError)
    refused(r"there is no folder .*nowhere", DataNotFoundError, dataset="nowhere/")
    (tmp_path / "empty").mkdir()
    refused(r"must hold one data set in VOC's layout .* found: none", dataset="empty/")
    (own.parent / "VOC2012" / "Annotations").mkdir(parents=True)
    refused("must hold one data set")
    refused("unknown dataset 'voc2013'", dataset="voc2013")


# --- what the report says, and what is refused ----------------------------------------------------
BOX = (2, 2, 20, 20)


def saved(seed, kind="JPEG", size=(30, 40), **options):
    out, values = (
        io.BytesIO(),
        np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8),
    )
    Image.fromarray(values).save(out, kind, **options)
    return out.getvalue()


def xml(*objects, size=(30, 40), more=""):
    """Return an annotation that holds the given objects as XML text."""
    sides = f"<size><width>{size[1]}</width><height>{size[0]}</height></size>"
    return f"<annotation>{more}{sides}{''.join(objects)}</annotation>".encode()


def thing(box=BOX, name="cat", more=""):
    corners = zip(("xmin", "ymin", "xmax", "ymax"), box, strict=True)
    inside = "".join(f"<{corner}>{value}</{corner}>" for corner, value in corners)
    return f"<object><name>{name}</name>{more}<bndbox>{inside}</bndbox></object>"


def voc(ids="abcdef", train="abcd", test="ef", ending=".jpg", kind="JPEG"):
    """Return six images with one object each."""
    files = boxes(train=train, test=test)
    for seed, name in enumerate(ids):
        files |= {
            f"JPEGImages/{name}{ending}": saved(seed, kind),
            f"Annotations/{name}.xml": xml(thing()),
        }
    return files


def without(name):
    return {path: file for path, file in voc().items() if path != name}


def turned(orientation, size=(30, 40), seed=70):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(seed, size=size, exif=exif)


def grey(high, seed):
    out = io.BytesIO()
    values = (
        np.random.default_rng(seed)
        .permutation(np.linspace(0, high, 1200))
        .reshape(30, 40)
    )
    Image.fromarray(values.astype(np.uint16)).save(out, "PNG")
    return out.getvalue()


SPACES = [f"my image {i}" for i in range(6)]
NUMBERED = [f"{name} 1" for name in "abcdef"]
FACTS = {  # what is there -> its files, what the report must say
    "not listed": (
        lambda: (
            voc() | {"JPEGImages/z.jpg": saved(60), "Annotations/z.xml": xml(thing())}
        ),
        [
            "left out: 1 file .jpg: listed neither in train.txt nor in test.txt (JPEGImages/z.jpg)",
            "left out: 1 file .xml: listed neither in train.txt nor in test.txt (Annotations/z.xml)",
        ],
    ),
    "other files": (
        lambda: (
            voc()
            | {
                "ImageSets/Main/val.txt": b"a",
                "SegmentationClass/a.png": saved(60, "PNG"),
                "labels.txt": b"cat",
            }
        ),
        [
            "left out: 1 file .png: no part of the layout that is read (SegmentationClass/a.png)",
            "left out: 1 file .txt: of the lists, only train.txt and test.txt are read (ImageSets/Main/val.txt)",
            "left out: 1 file .txt: no part of the layout that is read (labels.txt)",
        ],
    ),
    "hidden": (
        lambda: (
            voc() | {"JPEGImages/.thumbs/a.jpg": saved(60), "@eaDir/b.jpg": saved(61)}
        ),
        [
            "left out: 2 files .jpg: hidden files and folders are not read (@eaDir/b.jpg, JPEGImages/.thumbs/a.jpg)"
        ],
    ),
    "spaces in ids": (
        lambda: voc(SPACES, SPACES[:4], SPACES[4:]),
        ["read: 6 images"],
    ),
    "numbers after spaces": (
        lambda: voc(NUMBERED, NUMBERED[:4], NUMBERED[4:]),
        ["read: 6 images"],
    ),
    "flags": (
        lambda: voc(train=["a  1", "b -1", "c  0", "d  1"], test=["e 1", "f -1"]),
        [
            "left out: second column of train.txt, 1, -1, 0 in VOC's lists, in 4 lines",
            "second column of test.txt",
        ],
    ),
    "ids with endings": (
        lambda: voc(train=["a.jpg", "b.xml", "c", "d.jpg"]),
        ["read: 6 images"],
    ),
    "png": (
        lambda: voc(ending=".png", kind="PNG"),
        ["read: 6 images: formats PNG 6"],
    ),
    "capitals": (lambda: voc(ending=".JPG"), ["read: 6 images: formats JPEG 6"]),
    "bmp": (
        lambda: voc(ending=".bmp", kind="BMP"),
        ["read: 6 images: formats BMP 6"],
    ),
    "found by filename": (
        lambda: (
            without("JPEGImages/a.jpg")
            | {
                "JPEGImages/IMG 1.jpg": saved(60),
                "Annotations/a.xml": xml(
                    thing(), more="<filename>C:\\x\\IMG 1.jpg</filename>"
                ),
            }
        ),
        ["read: Annotations/a.xml has its image by <filename>: IMG 1.jpg"],
    ),
    "two images, one named": (
        lambda: (
            voc()
            | {
                "JPEGImages/a.png": saved(60, "PNG"),
                "Annotations/a.xml": xml(thing(), more="<filename>a.png</filename>"),
            }
        ),
        ["formats JPEG 5, PNG 1", "left out: 1 file .jpg: listed neither"],
    ),
    "another filename": (
        lambda: (
            voc()
            | {"Annotations/a.xml": xml(thing(), more="<filename>b.jpg</filename>")}
        ),
        [
            "1 annotation with another name in <filename> than that of the image: "
            "it is not used (Annotations/a.xml)"
        ],
    ),
    "sticking out by less than a pixel": (
        lambda: voc() | {"Annotations/a.xml": xml(thing((0.6, 2, 40.4, 30.9)))},
        [
            "changed: 1 annotation with boxes that stick out by at most 1 pixel: clipped (Annotations/a.xml)"
        ],
    ),
    "difficult, parts, poses": (
        lambda: (
            voc()
            | {
                "Annotations/a.xml": xml(
                    thing(),
                    thing(more=f"{DIFFICULT}{PART}<pose>Left</pose>"),
                    more="<sun/>",
                )
            }
        ),
        [
            "left out: 1 difficult object: not trained on, neither found nor missed in tests",
            "left out: elements of annotations, with their number: object/part (1), object/pose (1), sun (1)",
        ],
    ),
    "nothing to be seen": (
        lambda: voc() | {"Annotations/a.xml": xml()},
        ["1 annotation without an object: all background (Annotations/a.xml)"],
    ),
    "classes in two spellings": (
        lambda: (
            voc() | {"Annotations/a.xml": xml(thing(name="Cat"), thing(name=" cat "))}
        ),
        [
            "classes: Cat and cat differ in spelling alone, and are 2 classes",
            "classes: test has no object of 1 class: Cat",
            "changed: 1 annotation with blanks around names of classes: left out",
        ],
    ),
    "turned and annotated as shown": (
        lambda: voc() | {"JPEGImages/a.jpg": turned(6, (40, 30))},
        [
            "changed: EXIF orientation applied to 1 image, as viewers do (orientation 6: 1; JPEGImages",
            "all 40 x 30 pixels",
        ],
    ),
    "turned and annotated as stored": (
        lambda: voc() | {"JPEGImages/a.jpg": turned(6)},
        [
            "changed: EXIF orientation not applied to 1 image",
            "(JPEGImages/a.jpg)",
            "all 40 x 30 pixels",
        ],
    ),
    "upside down": (
        lambda: voc() | {"JPEGImages/a.jpg": turned(3)},
        [
            "read: 1 image with EXIF orientation, of one size before and after: boxes are taken as drawn",
            "changed: EXIF orientation applied to 1 image",
        ],
    ),
    "12 bits": (
        lambda: (
            voc(ending=".png", kind="PNG")
            | {f"JPEGImages/{c}.png": grey(4095, i) for i, c in enumerate("abcdef")}
        ),
        [
            "changed: 6 grey images of 16 bits, values up to 4,095: read as 12 bits, scaled to 8"
        ],
    ),
    "grey and resized": (
        lambda: (
            voc()
            | {
                "JPEGImages/a.jpg": saved(60, size=(90, 80)),
                "Annotations/a.xml": xml(thing(), size=(90, 80)),
            }
        ),
        [
            "2 sizes, 40 to 80 pixels wide and 30 to 90 high",
            "changed: 6 images resized to 64 pixels on the short side, at most 96 on the long one; 5 of them",
        ],
    ),
}


def loaded(folder, files, **changes):
    write(folder / "pets", files)
    return load_detection(small("pets/", **changes))


def facts_of(found):
    return "\n".join(f"{topic}: {text}" for topic, text in found.report.facts)


@pytest.mark.parametrize("case", FACTS)
def test_voc_reader_reports_skipped_and_changed_boxes(case, data_folder):
    files, words = FACTS[case]
    found = loaded(data_folder, files())
    facts = facts_of(found)
    assert [word for word in words if word not in facts] == [], facts
    assert str(data_folder) not in facts
    assert load_detection(small("pets/")).report.digest == found.report.digest


ERRORS = {  # what is there -> its files, what the error must say
    "id or flag": (
        lambda: voc(["a", "a 1", "b", "c"], ["a 1", "b"], ["c"]),
        r"train\.txt: 'a 1' may be image 'a 1', or 'a' and a flag; rename one",
    ),
    "no image of an id with spaces": (
        lambda: voc(train=["a", "my cat 3"]),
        r"there is no file .*my cat 3\.",
    ),
    "two images": (
        lambda: voc() | {"JPEGImages/a.png": saved(60, "PNG")},
        r"a\.jpg and a\.png may both be the image of 'a'; keep one, or name it in <filename> of a\.xml",
    ),
    "another kind": (
        lambda: without("JPEGImages/a.jpg") | {"JPEGImages/a.heic": b"x"},
        r"a\.heic is of a kind that is not read; save",
    ),
    "outside of the folder": (
        lambda: voc(train=["../../secret"]),
        r"'\.\./\.\./secret' is no image id",
    ),
    "objects in objects": (
        lambda: voc() | {"Annotations/a.xml": xml(f"<objects>{thing()}</objects>")},
        r"a\.xml: 1 object inside of other elements; <annotation> must hold them",
    ),
    "polygons": (
        lambda: (
            voc()
            | {"Annotations/a.xml": xml("<object><name>cat</name><polygon/></object>")}
        ),
        r"a\.xml, object 1 \(cat\): there is no bndbox \(found: polygon\)",
    ),
    "difficult in words": (
        lambda: (
            voc()
            | {"Annotations/a.xml": xml(thing(more="<difficult>very</difficult>"))}
        ),
        r"a\.xml, object 1: difficult must be 0 or 1, got 'very'",
    ),
    "of another size, turned": (
        lambda: voc() | {"JPEGImages/a.jpg": turned(6, (44, 33))},
        r"a\.xml says 40 x 30 pixels, a\.jpg has 44 x 33, and 33 x 44 before its EXIF orientation 6 is applied",
    ),
    "not turned any more": (
        lambda: voc() | {"JPEGImages/a.jpg": saved(60, size=(40, 30))},
        r"says 40 x 30 pixels, a\.jpg has 30 x 40: the sides are exchanged, as where an image has lost its EXIF",
    ),
    "12 bits beside 8": (
        lambda: voc(ending=".png", kind="PNG") | {"JPEGImages/a.png": grey(4095, 0)},
        r"1 grey image of 16 bits whose values end at 4,095 .* stand beside 5 of 8 bits",
    ),
    "in both lists": (
        lambda: voc(test="def"),
        r"1 of 3 images in test\.txt stand in train\.txt, too \(d\.jpg\); a test needs images",
    ),
    "tested on its own training images": (
        lambda: voc(test="ab"),
        r"2 of 2 images in test\.txt stand in train\.txt, too \(a\.jpg, b\.jpg\)",
    ),
    "a copy": (
        lambda: voc() | {"JPEGImages/e.jpg": saved(0)},
        r"1 of 2 images in test\.txt are copies of images in train\.txt \(e\.jpg is a\.jpg\); .*take them",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_voc_reader_rejects_ambiguous_boxes(case, data_folder):
    files, message = ERRORS[case]
    with pytest.raises((ValueError, DataNotFoundError), match=message):
        loaded(data_folder, files())


@pytest.mark.parametrize("orientation", range(2, 9))
@pytest.mark.parametrize("as_shown", [True, False])
def test_voc_reader_orients_boxes_by_annotated_size(orientation, as_shown, data_folder):
    """Keep a white patch inside its box, whether the annotated size is of the shown or the stored image."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    drawn = np.zeros((30, 40, 3), np.uint8)
    drawn[1:20, 1:20] = 255
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[
        orientation
    ]  # of PIL's transpositions
    image, out = Image.fromarray(drawn), io.BytesIO()
    (image.transpose(Image.Transpose(undo)) if as_shown else image).save(
        out, "PNG", exif=exif
    )
    if not as_shown and orientation < 5:
        return  # the sizes do not tell
    found = loaded(
        data_folder, without("JPEGImages/a.jpg") | {"JPEGImages/a.png": out.getvalue()}
    )
    picture = next(one for one in found.train if one.image.name == "a.png")
    x1, y1, x2, y2 = picture.boxes[0].astype(int).tolist()
    assert picture.read()[:, y1:y2, x1:x2].float().mean() == 255
    assert tuple(picture.read().shape[1:]) == picture.size == (30, 40)


def test_voc_reader_scales_subsets_by_whole_dataset(data_folder):
    """Take the bit depth from all listed images, even for a subset."""
    files = voc(ending=".png", kind="PNG") | {
        f"JPEGImages/{c}.png": grey(500 * 2**i, i) for i, c in enumerate("abcdef")
    }
    whole = loaded(data_folder, files)
    some = loaded(data_folder, files, train_images=1, test_images=1)
    assert {
        one.bits for one in (*whole.train, *whole.test, *some.train, *some.test)
    } == {14}
    assert max(one.read().max() for one in whole.test) == 16000 >> 6


def test_voc_reader_clips_boxes_to_image(data_folder):
    found = loaded(
        data_folder, voc() | {"Annotations/a.xml": xml(thing((0.6, 2, 40.4, 30.9)))}
    )
    assert found.train[0].boxes.tolist() == [[0, 1, 40, 30]]


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


def test_digit_scenes_are_reproducible():
    again = digit_scenes("train", 5, 96)
    for a, b in zip(digit_scenes("train", 3, 96), again, strict=False):
        assert torch.equal(a.image, b.image)
        assert np.array_equal(a.boxes, b.boxes)
    assert not torch.equal(again[0].image, again[1].image)
    assert not torch.equal(digit_scenes("test", 1, 96)[0].image, again[0].image)
    labels = np.concatenate([s.labels for s in digit_scenes("train", 100, 96)])
    assert set(labels.tolist()) == set(range(10))


# --- batches --------------------------------------------------------------------------------------


def pictures(*sizes):
    return tuple(
        in_memory(
            torch.full((3, h, w), i, dtype=torch.uint8),
            (h, w),
            [[0, 0, w / 2, h]],
            [i],
            [False],
        )
        for i, (h, w) in enumerate(sizes)
    )


def test_aspect_groups_collect_similar_shapes():
    mixed = pictures((60, 90), (90, 60), (60, 60), (61, 90), (90, 61))
    assert aspect_groups(mixed, 2) == [[1, 4], [2, 3], [0]]


def test_detection_batches_resize_and_pad_images():
    """Resize and pad images, and scale their boxes alike."""
    (batch,) = evaluation_batches(
        pictures((50, 100), (100, 50)), small("x/", size=60, max_size=100), workers=0
    )
    # wide: 60 x 120 would be too long, so 50 x 100; both sides of the batch: multiples of 32
    assert batch.sizes == [(100, 50), (50, 100)]
    assert batch.images.shape == (2, 3, 128, 128)
    assert batch.targets[1]["boxes"].tolist() == [[0, 0, 50, 50]]
    (one,) = evaluation_batches(
        pictures((300, 400)), small("x/", size=608, max_size=1024), workers=0
    )
    assert one.sizes == [(608, 810)]
    assert one.images.shape == (1, 3, 608, 832)
    torch.testing.assert_close(
        one.targets[0]["boxes"], torch.tensor([[0, 0, 405.0, 608.0]]), rtol=0, atol=0.5
    )


def test_detection_batches_omit_difficult_objects(own):
    train = load_detection(small("pets/")).train
    labels = [
        t["labels"].tolist()
        for b in evaluation_batches(train, small("pets/"), 0)
        for t in b.targets
    ]
    assert sorted(labels) == [[], [1], [2]]


def test_detection_batches_are_reproducible_by_step(own):
    """Return equal batches for equal seeds and steps, with and without workers."""
    train = load_detection(small("pets/")).train
    r = small("pets/", flip=True)

    def first(n, start=0, seed=0, workers=0):
        return [
            b.images
            for b in itertools.islice(batches(train, r, seed, start, workers), n)
        ]

    whole = first(8)
    assert identical(whole[3:], first(5, start=3))
    assert identical(whole, first(8, workers=1))
    assert any(
        a.shape != b.shape or not torch.equal(a, b)
        for a, b in zip(whole, first(8, seed=1), strict=True)
    )


def test_detection_batches_mirror_boxes():
    (scene,) = digit_scenes("train", 1, 96)
    r = small("x/", flip=True, size=96, max_size=97, batch=1)
    seen = set()
    for batch in itertools.islice(batches((scene,), r, 0, 0, 0), 12):
        ink = (batch.images[0, 0] > batch.images[0, 0].min() + 0.01).clone()
        for x1, y1, x2, y2 in batch.targets[0]["boxes"].int().tolist():
            assert ink[y1:y2, x1].any()
            assert ink[y1:y2, x2 - 1].any()
            ink[y1:y2, x1:x2] = False
        assert not ink.any()
        seen.add(batch.targets[0]["boxes"][0, 0].item())
    assert len(seen) == 2
    plain = small("x/", size=96, max_size=97, batch=1)
    for batch in itertools.islice(batches((scene,), plain, 0, 0, 0), 6):
        assert np.array_equal(batch.targets[0]["boxes"], scene.boxes)


def test_mirroring_coin_is_fair():
    tosses = [
        _draws_flip(seed, epoch, index)
        for seed in range(3)
        for epoch in range(10)
        for index in range(100)
    ]
    assert abs(sum(tosses) / 3000 - 0.5) < 0.035  # four standard deviations


# --- downloads ------------------------------------------------------------------------------------


def test_voc_download_uses_torchvision(data_folder, monkeypatch):
    asked = []
    monkeypatch.setattr(
        torchvision.datasets,
        "VOCDetection",
        lambda *a, **k: asked.append((*a[1:], k["download"])),
    )
    data_sets.download("voc2012")
    data_sets.download("voc2007")
    assert asked == [
        ("2012", "train", True),
        ("2012", "val", True),
        ("2007", "trainval", True),
        ("2007", "test", True),
    ]
    monkeypatch.setattr(
        torch.hub,
        "load_state_dict_from_url",
        lambda url, *a, **k: asked.append((url, k)),
    )
    assert data_sets.download("resnet18").parent == data_folder
    url, options = asked[-1]
    assert url.endswith(detection.BACKBONE_WEIGHTS_FILE)
    assert options["check_hash"]


def test_detection_recipe_rejects_invalid_size():
    assert recipe("paper", "voc2007").pretrained
    assert not recipe("demo", "my/", task="detection").pretrained
    with pytest.raises(
        ValueError, match="size must be at least 32 and below max_size 96, got 96"
    ):
        small("x/", size=96)
