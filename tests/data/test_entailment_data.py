"""Loaders of sentence pairs: every layout that is documented, what happens when its content is wrong, the grammar."""

import random
import socket
from dataclasses import replace

import pandas as pd
import pytest
from layouts import PAIRS, pair_files, pair_rows, tsv, write

from cpt_lab import data
from cpt_lab.data import templates
from cpt_lab.data.entailment import LABELS, load_entailment
from cpt_lab.data.files import DataNotFoundError
from cpt_lab.data.templates import sentence_pairs
from cpt_lab.experiments.recipes import recipe


@pytest.fixture(autouse=True)
def offline(data_folder, monkeypatch):
    """Nothing may ask the network, or look at data that happens to be on this machine."""
    monkeypatch.setattr(socket.socket, "connect", lambda *args: pytest.fail("something asked the network"))


def own(dataset, **changes):
    changes = {"language": "en", "test_languages": ("en",), **changes}
    return replace(recipe("smoke", str(dataset), task="entailment"), **changes)


def write_hub(folder, languages=("en", "de"), shards=1):
    for language in languages:
        (folder / language).mkdir(parents=True)
        for split in PAIRS:
            rows = pair_rows(split, language)
            for i in range(shards):
                rows[i::shards].to_parquet(folder / language / f"{split}-{i:05}-of-{shards:05}.parquet")
    return folder


def write_official(folder, languages=("en", "es"), train=("en",)):
    (folder / "XNLI-1.0").mkdir(parents=True)
    (folder / "XNLI-MT-1.0-part" / "multinli").mkdir(parents=True)
    for split, name in (("validation", "dev"), ("test", "test")):
        parts = []
        for language in languages:
            rows = pair_rows(split, language).rename(
                columns={"premise": "sentence1", "hypothesis": "sentence2", "label": "gold_label"}
            )
            rows["gold_label"] = [LABELS[i] for i in rows.gold_label]
            parts.append(rows.assign(language=language, genre="", match="False"))
        (folder / "XNLI-1.0" / f"xnli.{name}.tsv").write_bytes(tsv(pd.concat(parts)))
    for language in train:
        rows = pair_rows("train", language).rename(columns={"hypothesis": "hypo"})
        rows["label"] = [(*LABELS[:2], "contradictory")[i] for i in rows.label]
        (folder / "XNLI-MT-1.0-part" / "multinli" / f"multinli.train.{language}.tsv").write_bytes(tsv(rows))
    return folder


def refused(asked, message, error=ValueError):
    with pytest.raises(error, match=message):
        load_entailment(asked)


def write_flat(folder, ending, **options):
    return write(folder, pair_files(ending, **options))


# --- layouts --------------------------------------------------------------------------------------


def check(found, language="en", tests=("en",)):
    assert [len(found.train), len(found.valid)] == [6, 3]
    assert list(found.test) == list(tests)
    assert found.train.label.tolist() == [0, 1, 2, 0, 1, 2]
    assert found.train.premise.iloc[4] == f'"{language} train premise 4'
    assert found.valid.hypothesis.iloc[2] == "validation hypothesis 2, NA"
    for name, pairs in found.test.items():
        assert pairs.premise.tolist() == [f'"{name} test premise {i}' for i in range(4)]


def test_xnlis_official_files(tmp_path):
    write_official(tmp_path / "xnli")
    found = load_entailment(own("xnli", test_languages=("es", "en")))
    check(found, tests=("es", "en"))
    assert found.title == "XNLI, en, 6 training pairs"
    refused(own("xnli", language="es"), r"no train pairs in es; there is en$")
    refused(own("xnli", test_languages=("ur", "es", "sw")), r"no test pairs in ur, sw; there is en, es$")


@pytest.mark.parametrize("shards", [1, 2])
def test_the_hubs_layout(tmp_path, shards):
    found = load_entailment(
        own(write_hub(tmp_path / "mine", shards=shards), language="de", test_languages=("de", "en"))
    )
    if shards == 1:
        check(found, "de", ("de", "en"))
    assert sorted(found.train.premise) == [f'"de train premise {i}' for i in range(6)]
    assert found.title == "own pairs (mine), de, 6 training pairs"
    refused(own(tmp_path / "mine", language="fr"), r"no train pairs in fr; there is de, en$")


@pytest.mark.parametrize(
    ("ending", "valid"),
    [
        ("parquet", "validation"), ("jsonl", "validation"), ("json", "validation"), ("tsv", "validation"),
        ("csv", "validation"), ("csv", "valid"), ("csv", "dev"),
    ],
)  # fmt: skip
def test_flat_files(tmp_path, ending, valid):
    found = load_entailment(own(write_flat(tmp_path / "mine", ending, valid=valid)))
    check(found)
    assert found.title == "own pairs (mine), 6 training pairs"  # "en" is the recipe's word, not theirs


def test_names_of_labels_and_a_column_of_languages(tmp_path):
    def change(split, rows):
        rows = rows.assign(label=[LABELS[i].upper() for i in rows.label], language="en")
        return pd.concat([rows, rows.assign(language="es", premise="otra")])

    folder = write_flat(tmp_path / "mine", "csv", change=change)
    found = load_entailment(own(folder, test_languages=("es",)))
    assert found.train.label.tolist() == [0, 1, 2, 0, 1, 2]
    assert found.test["es"].premise.tolist() == ["otra"] * 4
    assert found.title == "own pairs (mine), en, 6 training pairs"
    refused(own(folder, language="de"), r"no train pairs in de; there is en, es")


def test_limits_are_a_fixed_choice_and_the_checksum_sees_everything(tmp_path):
    folder = write_flat(tmp_path / "mine", "csv")
    whole, few = load_entailment(own(folder)), load_entailment(own(folder, train_pairs=3))
    assert len(few.train) == 3
    assert few.train.equals(load_entailment(own(folder, train_pairs=3)).train)
    assert set(few.train.premise) < set(whole.train.premise)
    assert few.checksum != whole.checksum == load_entailment(own(folder)).checksum
    flipped = write_flat(tmp_path / "flipped", "csv", change=lambda split, rows: rows.assign(label=2 - rows.label))
    assert load_entailment(own(flipped)).checksum != whole.checksum


def test_undecided_pairs_are_left_out_and_counted(tmp_path, caplog):
    def change(split, rows):
        return rows.assign(label=["-", *rows.label[1:]])

    with caplog.at_level("INFO"):
        found = load_entailment(own(write_flat(tmp_path / "mine", "csv", change=change)))
    assert [len(found.train), len(found.valid), len(found.test["en"])] == [5, 2, 3]
    assert found.train.label.tolist() == [1, 2, 0, 1, 2]
    assert "train.csv: 1 pairs without an agreed label left out" in caplog.text


# --- wrong content --------------------------------------------------------------------------------


def put(split, row, column, value):
    def change(here, rows):
        rows = rows.astype(object)
        if here == split:
            rows.loc[row, column] = value
        return rows

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("train", 2, "label", 3), r"train\.csv, row 3: label '3'; allowed are entailment, neutral, contradiction"),
        (put("test", 0, "label", "maybe"), r"test\.csv, row 1: label 'maybe'; allowed are"),
        (put("test", 1, "label", ""), r"test\.csv, row 2: label ''; allowed are"),
        (put("train", 5, "premise", "  "), r"train\.csv, row 6: the premise is empty"),
        (put("validation", 0, "hypothesis", ""), r"validation\.csv, row 1: the hypothesis is empty"),
        (lambda split, rows: rows.rename(columns={"premise": "text"}),
         r"train\.csv: needs the columns premise; it has text, hypothesis, label"),
        (lambda split, rows: rows[: 0 if split == "test" else None], r"test\.csv has no rows"),
        (lambda split, rows: rows.assign(label="-"), r"mine: no train pair in en has a label"),
    ],
)  # fmt: skip
def test_wrong_rows(tmp_path, change, message):
    refused(own(write_flat(tmp_path / "mine", "csv", change=change)), message)


def test_rows_are_named_by_their_number_in_the_file(tmp_path):
    folder = write_official(tmp_path / "mine")
    path = folder / "XNLI-1.0" / "xnli.test.tsv"
    path.write_text(path.read_text().replace("neutral", "netural"))
    wanted = own(folder, test_languages=("es",))
    refused(wanted, r"xnli\.test\.tsv, row 6: label 'netural'")  # the second of four in es


def test_files_that_cannot_be_read(tmp_path):
    for ending, mark in (("csv", ","), ("tsv", "\t")):
        folder = write_flat(tmp_path / ending, ending)
        rows = [["premise", "hypothesis", "label"], *[["a", "b", "0"]] * 2, *[["a", "b", "0", "c"]] * 2]
        (folder / f"train.{ending}").write_text("\n".join(mark.join(row) for row in rows))
        refused(own(folder), rf"train\.{ending} cannot be read: .*Expected 3 fields in line 4, saw 4")
        (folder / f"train.{ending}").write_text("\n".join(mark.join(row) for row in (rows[0], *rows[:0:-1])))
        refused(own(folder), rf"train\.{ending} .*row 1 has more fields than the header has names; are quotes missing")
    folder = write_flat(tmp_path / "other", "parquet")
    (folder / "train.parquet").write_bytes(b"nonsense")
    refused(own(folder), r"train\.parquet.*this is not a parquet file")


def test_missing_data(tmp_path):
    refused(own("nowhere/"), r"no folder .*nowhere$", DataNotFoundError)
    (tmp_path / "empty").mkdir()
    refused(own("empty/"), r"empty holds no sentence pairs; it needs one of: XNLI-1\.0.*; <lang.*; \{tr")
    folder = write_flat(tmp_path / "mine", "csv")
    (folder / "train.tsv").touch()
    refused(own(folder), r"needs one file for train, it has train\.csv, train\.tsv")
    (folder / "train.tsv").unlink()
    (folder / "test.csv").unlink()
    refused(own(folder), r"mine has no test split; its layout is \{train,validation,test\}")
    refused(replace(own("mine/"), dataset="snli"), "unknown dataset 'snli'; choose from templates, xnli, or files of y")


def test_downloads_ask_the_hub_for_what_the_loader_reads(tmp_path, monkeypatch):
    asked = []

    def snapshot_download(repository, *, repo_type, allow_patterns, local_dir):
        asked.append((repository, repo_type, allow_patterns, local_dir))
        if repo_type == "dataset":
            write_hub(local_dir, [allow_patterns[0].split("/")[0]])

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert data.download("xnli", "fr") == tmp_path / "xnli"
    assert asked == [("facebook/xnli", "dataset", ["fr/*"], tmp_path / "xnli")]
    check(load_entailment(own("xnli", language="fr", test_languages=("fr",))), "fr", ("fr",))
    data.download("bert-base-multilingual-cased")
    assert asked[1][:2] == ("google-bert/bert-base-multilingual-cased", "model")
    assert {"config.json", "model.safetensors", "vocab.txt"} <= set(asked[1][2])
    assert asked[1][3] == tmp_path / "bert-base-multilingual-cased"


# --- the grammar ----------------------------------------------------------------------------------


def test_templates_are_balanced_distinct_and_the_same_every_time():
    found = load_entailment(recipe("demo", "templates"))
    parts = {"train": found.train, "valid": found.valid, "test": found.test["en"]}
    assert {name: len(pairs) for name, pairs in parts.items()} == {"train": 4998, "valid": 999, "test": 999}
    for pairs in parts.values():
        assert pairs.label.value_counts().to_dict() == dict.fromkeys(range(3), len(pairs) // 3)
    every = [pair for pairs in parts.values() for pair in zip(pairs.premise, pairs.hypothesis, strict=True)]
    assert len(set(every)) == len(every)
    assert not any(premise == hypothesis for premise, hypothesis in every)
    assert "synthetic sentence pairs" in found.title
    assert load_entailment(recipe("demo", "templates")).checksum == found.checksum
    refused(own("templates", test_languages=("en", "de")), "templates: no language de; there is en")


WET, CLEAN = ["wet", "dry", "damp"], ["clean", "dirty", "dusty"]


class World:
    """Things with a kind, a colour, states and owners, and who does what to whom, all at random; judges sentences."""

    def __init__(self, rng, leaves, spoken):
        # few kinds, colours and so on to a world, so that there are worlds with many, or none, of those spoken of
        colours = ["grey", *(colour for colour in templates.COLOURS if colour in spoken)]
        some = [rng.sample(w, min(len(w), rng.choice((1, 1, 2, 9)))) for w in (leaves, colours, WET, CLEAN)]
        owned = rng.choice((0.1, 0.5, 0.95))
        acts = [(p, v) for p in templates.PEOPLE for v in templates.DOES if {p, v.removesuffix("s")} <= spoken]
        self.things = [
            {
                "is": {word for words in some for word in _line(rng.choice(words))},
                "by": {act for act in acts if rng.random() < owned},
            }
            for _ in range(rng.randint(1, 16))
        ]
        self.met = {
            (a, v, b)
            for a in templates.PEOPLE for b in templates.PEOPLE for v in ("help", "call") if rng.random() < 0.5
        }  # fmt: skip

    def such(self, words):
        wanted = {word.removesuffix("s") for word in words}
        return [thing for thing in self.things if wanted <= thing["is"]]

    def holds(self, sentence):
        words = sentence.split()
        if "are" in words:
            quantifier, *noun, _, state = words
            found = [state in thing["is"] for thing in self.such(noun)]
            return {"all": all, "some": any, "no": lambda f: not any(f)}[quantifier](found)
        if words[1] in templates.DOES:
            who, verb, *rest = words
            least = 1 if rest[0] == "some" else int(rest[2]) + 1 if rest[0] == "more" else 0
            noun = rest[3:] if rest[0] == "more" else rest[1:]
            count = sum((who, verb) in thing["by"] for thing in self.such(noun))
            return count == 0 if rest[0] == "no" else count >= least
        negative = "not" in words
        if "by" in words:  # ben is (not) helped by anna
            whom, who, verb = words[0], words[-1], words[-3][:-2]
        else:
            who, whom, verb = words[0], words[-1], words[-2].removesuffix("s")
        true = any(
            v == verb and who in (a, "someone", "nobody") and whom in (b, "someone", "nobody") for a, v, b in self.met
        )
        return true != (negative or "nobody" in (who, whom))


def _line(kind):
    return {kind, *(_line(templates.PARENT[kind]) if kind in templates.PARENT else ())}


def test_labels_follow_from_what_the_words_mean():
    rng = random.Random(0)
    leaves = [kind for kind in templates.PARENT if kind not in templates.KINDS]
    for premise, hypothesis, label in random.Random(1).sample(sentence_pairs(4000), 100):
        words = {word.removesuffix("s") for word in f"{premise} {hypothesis}".split()}
        near = [leaf for leaf in leaves if _line(leaf) & words]
        seen = set()
        for _ in range(300):
            world = World(rng, sorted({*near, rng.choice(leaves)}), words)
            noun = premise.split()[1:-2]
            spoken_of = premise.split()[0] not in ("all", "no") or world.such(noun)
            if spoken_of and world.holds(premise):
                seen.add(world.holds(hypothesis))
                if len(seen) == 2:
                    break
        expected = {0: {True}, 1: {True, False}, 2: {False}}[label]
        assert seen == expected, (premise, hypothesis, LABELS[label], seen)
