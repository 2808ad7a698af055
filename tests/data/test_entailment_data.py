"""Readers of sentence pairs: documented layouts, invalid content, and the grammar of the templates."""

import json
import random
import shutil
import socket
from dataclasses import replace

import pandas as pd
import pyarrow
import pytest
from dataset_layouts import PAIRS, pair_files, pair_rows, tsv, write
from pyarrow import parquet

from cpt_lab import data
from cpt_lab.data import entailment, templates
from cpt_lab.data.entailment import PAIR_LABELS, load_entailment
from cpt_lab.data.files import DataNotFoundError, check_data
from cpt_lab.data.templates import sentence_pairs
from cpt_lab.experiments.registry import recipe


@pytest.fixture(autouse=True)
def offline(data_folder, monkeypatch):
    """Block the network, and hide data sets on this machine."""
    monkeypatch.setattr(
        socket.socket,
        "connect",
        lambda *args: pytest.fail("something asked the network"),
    )


def own(dataset, **changes):
    changes = {"language": "en", "test_languages": ("en",), **changes}
    return replace(recipe("smoke", str(dataset), task="entailment"), **changes)


def write_hub(folder, languages=("en", "de"), shards=1):
    for language in languages:
        (folder / language).mkdir(parents=True)
        for split in PAIRS:
            rows = pair_rows(split, language)
            for i in range(shards):
                rows[i::shards].to_parquet(
                    folder / language / f"{split}-{i:05}-of-{shards:05}.parquet"
                )
    return folder


def write_official(folder, languages=("en", "es"), train=("en",)):
    (folder / "XNLI-1.0").mkdir(parents=True)
    (folder / "XNLI-MT-1.0-part" / "multinli").mkdir(parents=True)
    for split, name in (("validation", "dev"), ("test", "test")):
        parts = []
        for language in languages:
            rows = pair_rows(split, language).rename(
                columns={
                    "premise": "sentence1",
                    "hypothesis": "sentence2",
                    "label": "gold_label",
                }
            )
            rows["gold_label"] = [PAIR_LABELS[i] for i in rows.gold_label]
            parts.append(rows.assign(language=language, genre="", match="False"))
        (folder / "XNLI-1.0" / f"xnli.{name}.tsv").write_bytes(tsv(pd.concat(parts)))
    for language in train:
        rows = pair_rows("train", language).rename(columns={"hypothesis": "hypo"})
        rows["label"] = [(*PAIR_LABELS[:2], "contradictory")[i] for i in rows.label]
        (
            folder / "XNLI-MT-1.0-part" / "multinli" / f"multinli.train.{language}.tsv"
        ).write_bytes(tsv(rows))
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


def test_entailment_reader_loads_official_xnli(tmp_path):
    write_official(tmp_path / "xnli")
    found = load_entailment(own("xnli", test_languages=("es", "en")))
    check(found, tests=("es", "en"))
    assert found.title == "XNLI, en, 6 training pairs"
    refused(own("xnli", language="es"), r"no train pairs in es; there is en$")
    refused(
        own("xnli", test_languages=("ur", "es", "sw")),
        r"no test pairs in ur, sw; there is en, es$",
    )


@pytest.mark.parametrize("shards", [1, 2])
def test_entailment_reader_loads_hub_layout(tmp_path, shards):
    found = load_entailment(
        own(
            write_hub(tmp_path / "mine", shards=shards),
            language="de",
            test_languages=("de", "en"),
        )
    )
    if shards == 1:
        check(found, "de", ("de", "en"))
    assert sorted(found.train.premise) == [f'"de train premise {i}' for i in range(6)]
    assert found.title == "own pairs (mine), de, 6 training pairs"
    refused(
        own(tmp_path / "mine", language="fr"), r"no train pairs in fr; there is de, en$"
    )


@pytest.mark.parametrize(
    ("ending", "valid"),
    [
        ("parquet", "validation"),
        ("jsonl", "validation"),
        ("json", "validation"),
        ("tsv", "validation"),
        ("csv", "validation"),
        ("csv", "valid"),
        ("csv", "dev"),
    ],
)
def test_entailment_reader_loads_flat_files(tmp_path, ending, valid):
    found = load_entailment(own(write_flat(tmp_path / "mine", ending, valid=valid)))
    check(found)
    assert (
        found.title == "own pairs (mine), 6 training pairs"
    )  # "en" is the recipe's word, not theirs


def test_entailment_reader_maps_labels_and_languages(tmp_path):
    def change(split, rows):
        rows = rows.assign(
            label=[PAIR_LABELS[i].upper() for i in rows.label], language="en"
        )
        return pd.concat([rows, rows.assign(language="es", premise="otra")])

    folder = write_flat(tmp_path / "mine", "csv", change=change)
    found = load_entailment(own(folder, test_languages=("es",)))
    assert found.train.label.tolist() == [0, 1, 2, 0, 1, 2]
    assert found.test["es"].premise.tolist() == ["otra"] * 4
    assert found.title == "own pairs (mine), en, 6 training pairs"
    refused(own(folder, language="de"), r"no train pairs in de; there is en, es")


def test_entailment_reader_draws_reproducible_subset(tmp_path):
    """Draw the same subset each time, and let the checksum depend on pairs and labels."""
    folder = write_flat(tmp_path / "mine", "csv")
    whole, few = (
        load_entailment(own(folder)),
        load_entailment(own(folder, train_pairs=3)),
    )
    assert len(few.train) == 3
    assert few.train.equals(load_entailment(own(folder, train_pairs=3)).train)
    assert set(few.train.premise) < set(whole.train.premise)
    assert few.checksum != whole.checksum == load_entailment(own(folder)).checksum
    flipped = write_flat(
        tmp_path / "flipped",
        "csv",
        change=lambda split, rows: rows.assign(label=2 - rows.label),
    )
    assert load_entailment(own(flipped)).checksum != whole.checksum


def test_entailment_reader_skips_undecided_pairs(tmp_path, caplog):
    def change(split, rows):
        return rows.assign(label=["-", *rows.label[1:]])

    with caplog.at_level("INFO"):
        found = load_entailment(
            own(write_flat(tmp_path / "mine", "csv", change=change))
        )
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
        (
            put("train", 2, "label", 3),
            r"train\.csv, row 3: label '3'; allowed are entailment, neutral, contradiction",
        ),
        (
            put("test", 0, "label", "maybe"),
            r"test\.csv, row 1: label 'maybe'; allowed are",
        ),
        (put("test", 1, "label", ""), r"test\.csv, row 2: label ''; allowed are"),
        (put("train", 5, "premise", "  "), r"train\.csv, row 6: the premise is empty"),
        (
            put("validation", 0, "hypothesis", ""),
            r"validation\.csv, row 1: the hypothesis is empty",
        ),
        (
            lambda split, rows: rows.rename(columns={"premise": "text"}),
            r"train\.csv: needs the columns premise; it has text, hypothesis, label",
        ),
        (
            lambda split, rows: rows[: 0 if split == "test" else None],
            r"test\.csv has no rows",
        ),
        (
            lambda split, rows: rows.assign(label="-"),
            r"mine: no train pair in en has a label",
        ),
    ],
)
def test_entailment_reader_rejects_invalid_rows(tmp_path, change, message):
    refused(own(write_flat(tmp_path / "mine", "csv", change=change)), message)


def test_entailment_reader_names_row_of_file(tmp_path):
    folder = write_official(tmp_path / "mine")
    path = folder / "XNLI-1.0" / "xnli.test.tsv"
    path.write_text(path.read_text().replace("neutral", "netural"))
    wanted = own(folder, test_languages=("es",))
    refused(
        wanted, r"xnli\.test\.tsv, row 6: label 'netural'"
    )  # the second of four in es


def test_entailment_reader_rejects_unreadable_files(tmp_path):
    for ending, mark in (("csv", ","), ("tsv", "\t")):
        folder = write_flat(tmp_path / ending, ending)
        rows = [
            ["premise", "hypothesis", "label"],
            *[["a", "b", "0"]] * 2,
            *[["a", "b", "0", "c"]] * 2,
        ]
        (folder / f"train.{ending}").write_text(
            "\n".join(mark.join(row) for row in rows)
        )
        refused(
            own(folder),
            rf"train\.{ending} cannot be read: .*Expected 3 fields in line 4, saw 4",
        )
        (folder / f"train.{ending}").write_text(
            "\n".join(mark.join(row) for row in (rows[0], *rows[:0:-1]))
        )
        refused(
            own(folder),
            rf"train\.{ending} .*row 1 has more fields than the header has names; are quotes missing",
        )
    folder = write_flat(tmp_path / "other", "parquet")
    (folder / "train.parquet").write_bytes(b"nonsense")
    refused(own(folder), r"train\.parquet.*this is not a parquet file")


def test_entailment_reader_rejects_missing_data(tmp_path):
    refused(own("nowhere/"), r"no folder .*nowhere$", DataNotFoundError)
    (tmp_path / "empty").mkdir()
    refused(
        own("empty/"),
        r"empty holds no sentence pairs; it needs one of: XNLI-1\.0.*; <lang.*; \{tr",
    )
    folder = write_flat(tmp_path / "mine", "csv")
    (folder / "train.tsv").touch()
    refused(own(folder), r"needs one file for train, it has train\.csv, train\.tsv")
    (folder / "train.tsv").unlink()
    (folder / "test.csv").unlink()
    refused(
        own(folder),
        r"no test split; its layout is \{train,validation,test\}.*; it has train\.csv, val",
    )
    refused(
        replace(own("mine/"), dataset="snli"),
        "unknown dataset 'snli'; choose from templates, xnli, or files of y",
    )


def test_entailment_download_requests_needed_files(tmp_path, monkeypatch):
    asked = []

    def snapshot_download(repository, *, repo_type, allow_patterns, local_dir):
        asked.append((repository, repo_type, allow_patterns, local_dir))
        if repo_type == "dataset":
            write_hub(local_dir, [allow_patterns[0].split("/")[0]])

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert data.download("xnli", "fr") == tmp_path / "xnli"
    assert asked == [("facebook/xnli", "dataset", ["fr/*"], tmp_path / "xnli")]
    check(
        load_entailment(own("xnli", language="fr", test_languages=("fr",))),
        "fr",
        ("fr",),
    )
    data.download("bert-base-multilingual-cased")
    assert asked[1][:2] == ("google-bert/bert-base-multilingual-cased", "model")
    assert {"config.json", "model.safetensors", "vocab.txt"} <= set(asked[1][2])
    assert asked[1][3] == tmp_path / "bert-base-multilingual-cased"


# --- the grammar ----------------------------------------------------------------------------------


def test_templates_are_balanced_and_reproducible():
    found = load_entailment(recipe("demo", "templates"))
    parts = {"train": found.train, "valid": found.valid, "test": found.test["en"]}
    assert {name: len(pairs) for name, pairs in parts.items()} == {
        "train": 4998,
        "valid": 999,
        "test": 999,
    }
    for pairs in parts.values():
        assert pairs.label.value_counts().to_dict() == dict.fromkeys(
            range(3), len(pairs) // 3
        )
    every = [
        pair
        for pairs in parts.values()
        for pair in zip(pairs.premise, pairs.hypothesis, strict=True)
    ]
    assert len(set(every)) == len(every)
    assert not any(premise == hypothesis for premise, hypothesis in every)
    assert "synthetic sentence pairs" in found.title
    assert load_entailment(recipe("demo", "templates")).checksum == found.checksum
    refused(
        own("templates", test_languages=("en", "de")),
        "templates: no language de; there is en",
    )


WET, CLEAN = ["wet", "dry", "damp"], ["clean", "dirty", "dusty"]


class World:
    """Random world of objects, kinds, colours, states, owners and actions that judges sentences."""

    def __init__(self, rng, leaves, spoken):
        # few kinds, colours and so on to a world, so that there are worlds with many, or none, of those spoken of
        colours = [
            "grey",
            *(colour for colour in templates.COLOURS if colour in spoken),
        ]
        some = [
            rng.sample(w, min(len(w), rng.choice((1, 1, 2, 9))))
            for w in (leaves, colours, WET, CLEAN)
        ]
        owned = rng.choice((0.1, 0.5, 0.95))
        acts = [
            (p, v)
            for p in templates.PEOPLE
            for v in templates.THING_VERBS
            if {p, v.removesuffix("s")} <= spoken
        ]
        self.things = [
            {
                "is": {word for words in some for word in _line(rng.choice(words))},
                "by": {act for act in acts if rng.random() < owned},
            }
            for _ in range(rng.randint(1, 16))
        ]
        self.met = {
            (a, v, b)
            for a in templates.PEOPLE
            for b in templates.PEOPLE
            for v in ("help", "call")
            if rng.random() < 0.5
        }

    def such(self, words):
        wanted = {word.removesuffix("s") for word in words}
        return [thing for thing in self.things if wanted <= thing["is"]]

    def holds(self, sentence):
        words = sentence.split()
        if "are" in words:
            quantifier, *noun, _, state = words
            found = [state in thing["is"] for thing in self.such(noun)]
            return {"all": all, "some": any, "no": lambda f: not any(f)}[quantifier](
                found
            )
        if words[1] in templates.THING_VERBS:
            who, verb, *rest = words
            least = (
                1 if rest[0] == "some" else int(rest[2]) + 1 if rest[0] == "more" else 0
            )
            noun = rest[3:] if rest[0] == "more" else rest[1:]
            count = sum((who, verb) in thing["by"] for thing in self.such(noun))
            return count == 0 if rest[0] == "no" else count >= least
        negative = "not" in words
        if "by" in words:  # ben is (not) helped by anna
            whom, who, verb = words[0], words[-1], words[-3][:-2]
        else:
            who, whom, verb = words[0], words[-1], words[-2].removesuffix("s")
        true = any(
            v == verb
            and who in (a, "someone", "nobody")
            and whom in (b, "someone", "nobody")
            for a, v, b in self.met
        )
        return true != (negative or "nobody" in (who, whom))


def _line(kind):
    return {
        kind,
        *(_line(templates.PARENT_KIND[kind]) if kind in templates.PARENT_KIND else ()),
    }


def test_template_labels_follow_word_meaning():
    rng = random.Random(0)
    leaves = [kind for kind in templates.PARENT_KIND if kind not in templates.SUBKINDS]
    for premise, hypothesis, label in random.Random(1).sample(
        sentence_pairs(4000), 100
    ):
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
        assert seen == expected, (premise, hypothesis, PAIR_LABELS[label], seen)


# --- facts of the report, and errors ----------------------------------------------------------------


def in_all(column, value):
    """Put a value into a column of every row of every split."""
    return lambda split, rows: rows.assign(**{column: [value] * len(rows)})


def told(folder, **changes):
    """Load pairs, and return the facts by topic and the data."""
    data = load_entailment(own(folder, **changes))
    return "\n".join(f"{topic}: {text}" for topic, text in data.report.facts), data


def repeat_first(label):
    def change(split, rows):
        again = rows.iloc[:1].assign(label=[rows.label[0] if label is None else label])
        return pd.concat([rows, again]) if split == "train" else rows

    return change


def other_languages(split, rows):
    return pd.concat(
        [
            rows.assign(language=code, premise=code + rows.premise)
            for code in ("en", "it", "fr")
        ]
    )


FACTS = {  # change of the rows, what the recipe changes, facts
    "columns": (
        lambda split, rows: rows.assign(genre="x", idx=1),
        {},
        ["left out: train: the columns genre, idx"],
    ),
    "a column": (
        lambda split, rows: rows.assign(idx=1),
        {},
        ["left out: test: the column idx, which nothing reads"],
    ),
    "no label": (
        put("train", 0, "label", -1),
        {},
        ["left out: train: 1 pair of train.jsonl without an agreed label"],
    ),
    "a limit": (
        lambda split, rows: rows,
        {"train_pairs": 4},
        ["left out: all but 4 of 6 pairs of train, a fixed"],
    ),
    "languages": (
        other_languages,
        {},
        ["left out: train: pairs in fr, it; the recipe takes en"],
    ),
    "no language": (
        lambda split, rows: rows.assign(language=["en"] * (len(rows) - 1) + [" "]),
        {},
        ["left out: train: 1 pair of train.jsonl without a language"],
    ),
    "numbers": (
        lambda split, rows: rows,
        {},
        ["markers: valid: labels 0, 1, 2 are read as entailment, neutral"],
    ),
    "repeated": (repeat_first(None), {}, ["values: train: 1 pair given again"]),
    "another label": (
        repeat_first(2),
        {},
        ["values: train: 1 pair given again, 1 with another label"],
    ),
    "classes": (
        put("test", 0, "label", 1),
        {},
        ["classes: test: neutral 2, entailment 1, contradiction 1"],
    ),
    "premises": (
        in_all("premise", "it rains"),
        {},
        ["overlap: 4 of 4 test pairs have the premise of a training pair"],
    ),
    "letters": (
        lambda split, rows: rows,
        {},
        ["changed: letters become small and lose their accents"],
    ),
    "splits": (
        lambda split, rows: rows,
        {},
        ["split: train: 6 pairs", "read: valid: validation.jsonl"],
    ),
}


@pytest.mark.parametrize("case", FACTS)
def test_entailment_reader_reports_skipped_and_changed_pairs(case, tmp_path, caplog):
    change, changes, wanted = FACTS[case]
    folder = write_flat(tmp_path / "mine", "jsonl", change=change)
    with caplog.at_level("INFO"):
        facts, data = told(folder, **changes)
    assert not [words for words in wanted if words not in facts], facts
    for topic, text in data.report.notices:
        assert f"{folder}: {topic}: {text}" in caplog.messages
    assert told(folder, **changes)[1].report.digest == data.report.digest


def test_entailment_reader_reports_ignored_files(tmp_path):
    folder = write_flat(tmp_path / "mine", "csv")
    write(
        folder,
        {
            "README.md": b"x",
            "old/train.csv": b"x",
            "de/train-0.parquet.lock": b"",
            "._train.csv": b"x",
        },
    )
    facts, _ = told(folder)
    for name in ("README.md", "old/train.csv", "de/train-0.parquet.lock"):
        assert name in facts
    assert (
        "left out: 1 file .csv: hidden files and folders are not read (._train.csv)"
        in facts
    )


def test_entailment_reader_reports_ignored_languages(tmp_path):
    facts, _ = told(write_hub(tmp_path / "mine", ("en", "de", "fr")))
    assert "left out: train: pairs in de, fr; the recipe takes en" in facts
    assert "file .parquet" not in facts


@pytest.mark.parametrize(
    "folder", ["data", "plain_text", "default", "all_languages", "mnli", ""]
)
def test_entailment_reader_accepts_hub_config_folders(folder, tmp_path):
    place = tmp_path / "mine" / folder
    place.mkdir(parents=True)
    for split in PAIRS:
        pair_rows(split).to_parquet(place / f"{split}-00000-of-00001.parquet")
    found = load_entailment(own(tmp_path / "mine"))
    check(found)
    assert found.title == "own pairs (mine), 6 training pairs"
    check_data(own(f"{tmp_path}/mine/"))


def test_entailment_reader_rejects_several_hub_folders(tmp_path):
    for folder in ("data", "plain_text"):
        (tmp_path / "mine" / folder).mkdir(parents=True)
        for split in PAIRS:
            pair_rows(split).to_parquet(
                tmp_path / "mine" / folder / f"{split}-0.parquet"
            )
    refused(own(tmp_path / "mine"), r"several folders: data/, plain_text/; keep one")


def test_entailment_reader_rejects_missing_shards(tmp_path):
    folder = write_hub(tmp_path / "mine", shards=3)
    (folder / "en" / "train-00001-of-00003.parquet").unlink()
    refused(own(folder), r"mine: en/ lacks part 1 of 3 of the train split")


def test_entailment_reader_rejects_duplicate_official_files(tmp_path):
    folder = write_official(tmp_path / "mine")
    shutil.copytree(folder / "XNLI-MT-1.0-part", folder / "XNLI-MT-1.0")
    refused(
        own(folder),
        r"mine has several files for train in en; keep one folder XNLI-MT-1\.0\*",
    )


def all_languages(split, rows):
    """Return XNLI's configuration all_languages, whose sentences are tables of languages."""
    return pd.DataFrame(
        {
            "premise": [
                {"en": premise, "de": f"de {premise}"} for premise in rows.premise
            ],
            "hypothesis": [
                {"language": ["de", "en"], "translation": [f"de {h}", h]}
                for h in rows.hypothesis
            ],
            "label": rows.label,
        }
    )


@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_entailment_reader_loads_all_languages_rows(ending, tmp_path):
    folder = write_flat(tmp_path / "mine", ending, change=all_languages)
    facts, found = told(folder)
    check(found)
    assert "left out: train: pairs in de; the recipe takes en" in facts
    both = load_entailment(own(folder, language="de", test_languages=("de", "en")))
    assert both.train.premise.iloc[0] == 'de "en train premise 0'
    assert both.valid.hypothesis.iloc[1] == "de validation hypothesis 1, NA"
    assert both.test["en"].hypothesis.iloc[1] == "test hypothesis 1, NA"
    assert both.title == "own pairs (mine), de, 6 training pairs"
    refused(own(folder, language="fr"), "no train pairs in fr; there is de, en")


def test_entailment_reader_accepts_snli_columns(tmp_path):
    names = {"premise": "sentence1", "hypothesis": "sentence2", "label": "gold_label"}

    def change(split, rows):
        rows = rows.assign(
            label=[PAIR_LABELS[i] for i in rows.label], annotator_labels="x"
        )
        return rows.rename(columns=names)

    facts, found = told(write_flat(tmp_path / "mine", "jsonl", change=change))
    check(found)
    assert "train: the column annotator_labels, which nothing reads" in facts
    assert "labels 0, 1, 2" not in facts


@pytest.mark.parametrize(
    "order",
    [
        ("entailment", "neutral", "contradiction"),
        ("contradiction", "entailment", "neutral"),
    ],
)
def test_entailment_reader_follows_parquet_label_names(order, tmp_path):
    folder = tmp_path / "mine"
    folder.mkdir()
    stored = {
        "info": {"features": {"label": {"names": list(order), "_type": "ClassLabel"}}}
    }
    for split in PAIRS:
        rows = pair_rows(split)
        rows["label"] = [order.index(PAIR_LABELS[i]) for i in rows.label]
        table = pyarrow.Table.from_pandas(rows)
        parquet.write_table(
            table.replace_schema_metadata({b"huggingface": json.dumps(stored)}),
            folder / f"{split}.parquet",
        )
    facts, found = told(folder)
    check(found)
    assert "labels 0, 1, 2" not in facts


def test_entailment_reader_accepts_whole_float_labels(tmp_path):
    folder = write_flat(
        tmp_path / "mine",
        "jsonl",
        change=lambda split, rows: rows.assign(label=rows.label / 1.0),
    )
    check(load_entailment(own(folder)))


# --- no sentences, and pairs of two splits ----------------------------------------------------------


@pytest.mark.parametrize("column", ["premise", "hypothesis"])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"fr": "un"},
            "is a table, not a sentence; of a table of languages as in XNLI's all_languages, save the rows",
        ),
        (["a", "man"], "is a list, not a sentence; join its words with blanks"),
        (7, "is a number, not a sentence"),
        (2.5, "is a number, not a sentence"),
        (True, "is a truth value, not a sentence"),
        (b"a man", "is bytes, not a sentence; decode it"),
        (float("nan"), "is empty"),
        (None, "is empty"),
        ("", "is empty"),
        (" \n", "is empty"),
    ],
)
def test_entailment_reader_rejects_non_text_sentences(column, value, message, tmp_path):
    def change(split, rows):
        rows = rows.astype(object)
        rows.at[2, column] = value
        return rows

    folder = tmp_path / "mine"
    folder.mkdir()
    for split in PAIRS:  # as any tool may write them: pandas' own objects
        change(split, pair_rows(split)).to_pickle(folder / f"{split}.pkl")
    write_flat(folder, "csv")

    def table(path):
        return pd.read_pickle(path.with_suffix(".pkl"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entailment, "_read_table", table)
        refused(own(folder), rf"train\.csv, row 3: the {column} {message}")


def shared(part, other, count):
    def change(split, rows):
        return pd.concat([rows, pair_rows(other)[:count]]) if split == part else rows

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            shared("test", "train", 1),
            "1 of 5 test pairs are training pairs, too, the first in row 5 of the test file",
        ),
        (
            shared("validation", "train", 2),
            "2 of 5 validation pairs are training pairs, too, the first in row 4",
        ),
        (
            shared("test", "validation", 3),
            "3 of 7 test pairs are validation pairs, too, the first in row 5",
        ),
        (
            lambda split, rows: pair_rows("train").assign(
                label=1 - rows.label % 2 if split == "x" else [0, 1] * 3
            ),
            "6 of 6 test pairs are training pairs",
        ),
        (
            lambda split, rows: pair_rows("train").assign(
                premise=f"a {' ' * len(split)} b"
            ),
            "6 of 6 test pairs",
        ),
        (
            in_all("label", "neutral"),
            "all 6 training pairs have the label neutral; there is nothing to learn",
        ),
    ],
)
def test_entailment_reader_rejects_overlapping_splits(change, message, tmp_path):
    refused(own(write_flat(tmp_path / "mine", "jsonl", change=change)), message)


def test_entailment_reader_counts_shared_xnli_pairs(tmp_path):
    write_flat(tmp_path / "xnli", "jsonl", change=shared("test", "train", 2))
    facts, _ = told("xnli")
    assert "overlap: 2 of 6 test pairs are training pairs, too" in facts
