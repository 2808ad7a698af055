"""All documented layouts: recognition, damaged and stray files, fingerprints, caching, and data reports."""

import gzip
import io
import os
import pickle
import re
import zipfile
import zlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from dataset_layouts import (
    LAYOUTS,
    LOAD,
    archive,
    describe_cases,
    image_folder,
    load_own,
    own_recipe,
    picture,
    split_sizes,
    voc_folder,
    write,
    write_own,
)
from helpers import refused

from cpt_lab.data import loading
from cpt_lab.data.files import DataNotFoundError, check_data, fingerprint, task_for_data
from cpt_lab.data.loading import load_once
from cpt_lab.data.report import NOTICES, TOPICS, DataReport, list_counts, list_first
from cpt_lab.data.splits import as_int64_vector, title_with_sizes
from cpt_lab.data.splits import split_sizes as sizes_within
from cpt_lab.data.text import load_text
from cpt_lab.experiments.registry import DATASETS, EXPERIMENTS, recipe
from cpt_lab.paths import cards_dir
from cpt_lab.tasks.base import load_data

pytestmark = pytest.mark.usefixtures("data_folder")


# --- recognition ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_belongs_to_one_task(layout, data_folder):
    task, files, _ = LAYOUTS[layout]
    dataset = write_own(data_folder, files())
    assert task_for_data(dataset) == task
    assert (cards_dir() / EXPERIMENTS[task].card).is_file()
    check_data(own_recipe(task, dataset))
    facts = LOAD[task](own_recipe(task, dataset)).report.facts
    assert {"read", "split"} <= {fact.topic for fact in facts} <= set(TOPICS)
    assert not [text for topic, text in facts if topic == "left out" and "file" in text]
    for other in set(EXPERIMENTS) - {task}:
        refused(
            rf"mine.* is no data for this task \({other}\); it needs .*own-\w+\.md",
            check_data,
            own_recipe(other, dataset),
        )


UNKNOWN_LAYOUTS = (
    "a.JPG",
    "a.jpg a.xml",
    "train/a.jpg train/a.xml valid/b.jpg valid/b.xml",
    "JPEGImages/a.jpg Annotations/a.xml",
    "JPEGImages/a.jpg annotation/a.xml ImageSets/Main/train.txt",
    "cat/a.heic dog/b.HEIC",
    "cat/a.GIF",
    "cat/a.avif dog/b.avif",
    "training/cat/a.jpg testing/cat/a.jpg",
    "data/train/cat/a.jpg data/val/cat/a.jpg",
    "MNIST/raw/train-images-idx3-ubyte.gz",
    "labels/train/a.txt",
    "labels/a.txt images/a.jpg",
    "train/labels/a.txt train/images/a.jpg",
    "train.json train/a.jpg",
    "annotations/instances_train2017.json train2017/a.jpg",
    "train/_annotations.coco.json train/a.jpg valid/a.jpg",
    "Train/cat/a.jpg Test/cat/a.jpg",
    "processed/data.pt",
    "train/data-0.arrow train/dataset_info.json",
    "snli_1.0_train.jsonl snli_1.0_test.jsonl",
    "wiki.train.tokens",
    "karate.gml",
)


def test_task_of_data_rejects_unknown_layouts(tmp_path, golden):
    """Suggest the nearest layout in a short message, also to a user who has named the task."""
    blocks = []
    for number, names in enumerate(UNKNOWN_LAYOUTS):
        folder = tmp_path / str(number)
        write(folder / "mine", dict.fromkeys(names.split(), b""))
        config = own_recipe("graph", f"{folder}/mine/")
        message = error_text(task_for_data, config.dataset)
        assert len(message) - len(str(folder)) < 300
        assert message.partition("; found")[2] in error_text(check_data, config)
        blocks.append(f"[{names}]\n{message.replace(str(folder), 'DATA')}\n")
    golden("data/unknown_layouts.txt", "\n".join(blocks))


def error_text(call, *args):
    """Return the text of the ValueError of a call."""
    with pytest.raises(ValueError, match="mine") as error:
        call(*args)
    return str(error.value)


def test_task_of_data_names_arrays_of_archive(data_folder):
    write(data_folder, {"mine.npz": archive(x=np.ones((3, 2)), y=np.arange(3))})
    message = r"mine\.npz is not .*; found the array x, the array y\. .*edge_index"
    refused(message, task_for_data, "mine.npz")


@pytest.mark.parametrize("dataset", DATASETS)
def test_check_data_suggests_download_command(dataset, data_folder):
    known = DATASETS[dataset]
    has_smoke = "smoke" in known.recipes or known.like
    config = recipe("smoke" if has_smoke else "paper", dataset)
    if known.embedded:
        check_data(config)
        assert fingerprint(config) == ""
        return
    message = f"python -m cpt_lab download {dataset}"
    for look in (check_data, LOAD[config.task]):
        refused(message, look, config, error=DataNotFoundError)
    (data_folder / known.folders[0]).mkdir(parents=True)
    check_data(config)


# --- files that are not read ----------------------------------------------------------------------

STRAY = "a.heic b.dcm c.gif d.docx e.zip README f.xlsx g.pt".split()
HIDDEN = ".ipynb_checkpoints @eaDir .thumbnails __MACOSX .git .Trash-1000 .AppleDouble"
LAYOUTS_OF_FOLDERS = (
    "class folders",
    "split folders",
    "image archives",
    "boxes",
    "OGB folder",
    "Planetoid",
    "texts",
    "pairs",
)


def hidden_files(layout):
    """Return copies of the files of a layout in hidden folders beside them."""
    files, copies = layout.files(), {}
    for folder in layout.folders:
        for hidden in HIDDEN.split():
            place = f"{folder}{hidden}/"
            copies[f"{place}copy.png"] = picture((12, 12), "PNG", 99)
            for name, content in files.items():
                if name.rpartition("/")[0] == folder.removesuffix("/"):
                    copies[f"{place}copy-{name.rpartition('/')[2]}"] = content
    return copies


@pytest.mark.slow
def test_readers_report_stray_files(data_folder, golden):
    """Name every file of another kind, and count files of hidden folders."""
    texts = []
    for name in LAYOUTS_OF_FOLDERS:
        layout = LAYOUTS[name]
        files = layout.files()
        stray = [folder + stray for folder in layout.folders for stray in STRAY]
        cases = {
            f"{name}: sound": files,
            f"{name}: stray files": files | dict.fromkeys(stray, b"no data"),
            f"{name}: hidden files": files | hidden_files(layout),
        }
        texts.append(describe_cases(data_folder, layout.task, cases))
    golden("data/stray_files.txt", "\n".join(texts))


@pytest.mark.parametrize("name", LAYOUTS_OF_FOLDERS)
def test_readers_skip_and_log_hidden_files(name, data_folder, caplog):
    layout = LAYOUTS[name]
    before = load_own(data_folder, layout.task, layout.files())
    caplog.clear()
    with caplog.at_level("INFO"):
        after = load_own(data_folder, layout.task, hidden_files(layout))
    notices = [f"mine/: {topic}: {text}" for topic, text in after.report.notices]
    assert [line for line in caplog.messages if line.startswith("mine/")] == notices
    assert any("hidden" in line for line in notices)
    assert after.checksum == before.checksum
    assert split_sizes(after) == split_sizes(before)


# --- damaged files --------------------------------------------------------------------------------


class Code:
    """Object whose unpickling fails the test."""

    def __reduce__(self):
        return (pytest.fail, ("code of a file ran",))


def zipped(**members):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        for name, content in members.items():
            file.writestr(f"{name}.npy", content)
    return out.getvalue()


DAMAGED = {
    "empty": b"",
    "noise": np.random.default_rng(0).bytes(200),
    "zeros": bytes(300),
    "code": pickle.dumps(Code()),
    "zip": zipped(data="", labels=""),
    "gzip of noise": gzip.compress(np.random.default_rng(1).bytes(200)),
}
HALVES_MAY_BE_WHOLE = (".txt", ".csv", ".tsv", ".jsonl")


def kinds_of_files(files):
    """Return one name of every kind of files, without those that differ by a number, a class or a split."""
    kinds = {}
    for name in files:
        kind = name.translate(str.maketrans("bcdef123456789", "aaaaa000000000"))
        kinds.setdefault(kind.replace("test", "").replace("val", "train"), name)
    return kinds.values()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_readers_name_damaged_files(layout, data_folder):
    """Name every damaged file and the reason in one short line."""
    task, make, _ = LAYOUTS[layout]
    files = make()
    config = own_recipe(task, write_own(data_folder, files))
    for name in kinds_of_files(files):
        path, whole = data_folder / "mine" / name, files[name]
        for damage, content in {**DAMAGED, "half": whole[: len(whole) // 2]}.items():
            path.write_bytes(content)
            try:
                LOAD[task](config)
            except (ValueError, DataNotFoundError) as error:
                message = str(error)
                assert re.search("mine[/:]", message), (name, damage, message)
                assert "\n" not in message, (name, damage, message)
                assert len(message) < 400, (name, damage, message)
            else:
                assert damage == "half", (name, damage)
                assert path.suffix in HALVES_MAY_BE_WHOLE, (name, damage)
        path.write_bytes(whole)


def huge_archive():
    """Return an archive of images that claims 2**60 bytes."""
    header, labels = io.BytesIO(), io.BytesIO()
    fields = {"descr": "|u1", "fortran_order": False, "shape": (1 << 20,) * 3}
    np.lib.format.write_array_header_1_0(header, fields)
    np.save(labels, np.arange(3))
    return zipped(data=header.getvalue(), labels=labels.getvalue())


def bomb():
    """Return an image of a few bytes whose header claims 40,000 x 40,000 pixels."""
    whole = picture((1, 1))
    header = b"IHDR" + (40_000).to_bytes(4) * 2 + whole[24:29]
    return whole[:12] + header + zlib.crc32(header).to_bytes(4) + whole[33:]


HOSTILE = {
    "a picture of 40,000 x 40,000 pixels": (
        "image",
        image_folder() | {"train/a/0.png": bomb()},
        r"train/a/0\.png cannot be read: DecompressionBombError",
    ),
    "an array of 2**60 bytes": (
        "image",
        {"train.npz": huge_archive(), "test.npz": b""},
        r"train\.npz cannot be read: .*(Memory|allocate|too big)",
    ),
    "an annotated picture of 40,000 x 40,000 pixels": (
        "detection",
        voc_folder() | {"JPEGImages/a.jpg": bomb()},
        r"a\.jpg cannot be read: DecompressionBombError",
    ),
    "an unknown encoding": (
        "detection",
        voc_folder()
        | {"Annotations/a.xml": b'<?xml version="1.0" encoding="klingon"?>'},
        r"a\.xml cannot be read: LookupError",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_readers_reject_hostile_content(case, data_folder):
    task, files, message = HOSTILE[case]
    with pytest.raises(ValueError, match=message):
        load_own(data_folder, task, files)


def test_readers_name_all_wrong_files(data_folder):
    files = image_folder(counts=(12, 4))
    wrong = [f"train/{name}/{i}.png" for name in "ab" for i in (1, 2, 11)]
    with pytest.raises(ValueError, match=r"^6 files are wrong:\n") as error:
        load_own(data_folder, "image", files | dict.fromkeys(wrong, b""))
    assert str(error.value).count("cannot be read: it is empty") == 6
    refused(
        r"15 files are wrong:\n(.*\n){10}and 5 more",
        loading.read_each,
        lambda name: as_int64_vector(name, ["a"]),
        [str(i) for i in range(15)],
    )


# --- fingerprints and caching ---------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["graph archive", "image archives", "split folders"])
def test_fingerprint_changes_with_files(layout, data_folder):
    task, make, _ = LAYOUTS[layout]
    files = make()
    config = own_recipe(task, write_own(data_folder, files))
    before = fingerprint(config)
    assert before == fingerprint(config) != ""
    path = data_folder / "mine" / list(files)[-1]
    content, stat = path.read_bytes(), path.stat()
    path.write_bytes(bytes(len(content)))
    assert (path.stat().st_size, fingerprint(config) == before) == (stat.st_size, False)
    for new_content, is_same in ((content + b"x", False), (content, True)):
        path.write_bytes(new_content)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert (fingerprint(config) == before) == is_same
    path.unlink()
    assert fingerprint(config) != before


def test_fingerprint_follows_links(data_folder):
    config = own_recipe("image", write_own(data_folder, image_folder()))
    folder = data_folder / "mine" / "train" / "a"
    folder.rename(data_folder / "elsewhere")
    folder.symlink_to(data_folder / "elsewhere")
    before = fingerprint(config)
    (data_folder / "elsewhere" / "0.png").unlink()
    assert fingerprint(config) != before


def test_load_once_reloads_after_changes(data_folder, tmp_path_factory, monkeypatch):
    monkeypatch.setattr(loading, "_last", {})
    files = LAYOUTS["texts"].files()
    words = own_recipe("language_model", write_own(data_folder, files))
    fields = ("unit", "batch")
    first = load_once(load_text, words, *fields)
    assert load_once(load_text, replace(words, steps=words.steps + 1), *fields) is first
    characters = load_once(load_text, replace(words, unit="characters"), *fields)
    assert len(characters.train) > len(first.train)
    assert load_once(load_text, words, *fields) is not first  # only the last is cached
    train = data_folder / "mine" / "train.txt"
    train.write_bytes(files["train.txt"] + b"quite another one\n")
    assert "another" in load_once(load_text, words, *fields).vocabulary

    # A copy elsewhere with the sizes and times of the files has their fingerprint.
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    other = {
        "train.txt": train.read_bytes().replace(b"quite another", b"quite similar")
    }
    write_own(elsewhere, {**files, **other})
    for name in files:
        stat = (data_folder / "mine" / name).stat()
        os.utime(elsewhere / "mine" / name, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    before = fingerprint(words)
    monkeypatch.setenv("CPT_DATA_DIR", str(elsewhere))
    assert fingerprint(words) == before
    assert "similar" in load_once(load_text, words, *fields).vocabulary


# --- sizes of splits ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "count", "sizes"),
    [
        ((500, 100), 600, (500, 100)),
        ((500, 100), 360, (324, 36)),
        ((500, 10), 360, (350, 10)),
        ((500, 0), 360, (360, 0)),
        ((None, 5), 12, (None, 5)),
        ((None, 5_000), 600, (None, 60)),
        ((10, 10), 3, (2, 1)),
        ((350, 100), 400, (350, 40)),
    ],
)
def test_split_sizes_shrink_for_small_data(limits, count, sizes):
    config = own_recipe("image", train_images=limits[0], valid_images=limits[1])
    assert sizes_within(config, count) == sizes
    used, held = sizes
    rest = range(count - held)[:used]
    title = title_with_sizes("mine", config, rest, range(held))
    assert (title == "mine") == (sizes == limits)
    if sum(filter(None, limits)) > count:
        named = replace(config, dataset="cifar10")
        refused(rf"images wanted, there are {count}", sizes_within, named, count)


# --- reports --------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("dataset", [d.name for d in DATASETS.values() if d.embedded])
def test_embedded_data_is_independent_of_threads(dataset):
    threads = torch.get_num_threads()
    try:
        loaded = []
        for count in (1, 3):
            torch.set_num_threads(count)
            loading._last.clear()
            loaded.append(load_data(recipe("smoke", dataset)))
    finally:
        torch.set_num_threads(threads)
    assert loaded[0].report.facts
    assert loaded[0].report.digest == loaded[1].report.digest
    assert loaded[0].checksum == loaded[1].checksum


def test_data_report_rejects_unknown_topics():
    message = "topic: expected one of read, left out"
    refused(message, DataReport("x").add, "rubbish", "text")


def test_data_report_escapes_control_characters():
    report = DataReport("x/")
    report.leave_out("not read", ["\x1b[31mred\n.heic", "bad\udc80.heic"])
    line = str(report)
    assert "\x1b" not in line
    assert "\\x1b[31mred\\n.heic" in line
    assert "\\udc80" in line


def test_report_lists_are_truncated():
    assert list_first(["a", "b"]) == "a, b"
    counts = list_counts({str(i): 100 - i for i in range(20)})
    assert counts.endswith("and 8 more from 81 up")
    assert set(NOTICES) < set(TOPICS)
