"""The page REPRODUCING.md, made from the ``Paper:`` and ``Differs:`` lines of the docstrings and comments."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

from cpt_core.analysis import claims
from cpt_core.paths import ROOT, results_dir
from cpt_core.sweeps.stores import load_rows

HEADER = """# Reproducing the paper

*Better Schedules for Low Precision Training of Deep Neural Networks* (Wolfe and Kyrillidis). This page is made from the
`Paper:` and `Differs:` lines of the code by `python -m cpt_core docs`; a test keeps it up to date.

## Figures and their commands

| paper | notebook | grid | command | paper scale run here? |
|---|---|---|---|---|
| figure 2 | [01_schedules](notebooks/01_schedules.ipynb) | closed form | `make reproduce NB=01` | yes, exact |
| costs in section 4.4 | [06_language](notebooks/06_language.ipynb) | counted from the model | `make reproduce NB=06` | yes: 9.1555, 7.0368, 5.5907 |
| figure 3, CIFAR | [03_image_classification](notebooks/03_image_classification.ipynb) | `cifar10/resnet74` and five more | `papermill notebooks/03_image_classification.ipynb out.ipynb -p scale paper -p dataset cifar10 -p model resnet74`, or `python -m cpt_core run cifar10/resnet74` | no, needs a GPU |
| figure 3, ImageNet | the same | `imagenet/resnet18`, `imagenet/resnet34` | the same with `-p dataset imagenet -p model resnet18`, or `python -m cpt_core run imagenet/resnet18` | no, needs a GPU |
| figure 4 | [04_object_detection](notebooks/04_object_detection.ipynb) | `voc2012/retinanet` | `papermill notebooks/04_object_detection.ipynb out.ipynb -p scale paper -p dataset voc2012`, or `python -m cpt_core run voc2012/retinanet` | no, needs a GPU |
| figure 5 | [05_node_classification](notebooks/05_node_classification.ipynb) | `ogbn-arxiv/aggregation`, `ogbn-products/aggregation` | `papermill notebooks/05_node_classification.ipynb out.ipynb -p scale paper -p dataset ogbn-arxiv`, or `python -m cpt_core run ogbn-arxiv/aggregation` | no, needs a GPU |
| figure 6 | the same | `ogbn-arxiv/gcn`, `ogbn-products/sage` | the same, or `python -m cpt_core run ogbn-arxiv/gcn` | no, needs a GPU |
| figure 7, Penn Treebank | [06_language](notebooks/06_language.ipynb) | `ptb/lstm` | `papermill notebooks/06_language.ipynb out.ipynb -p scale paper -p dataset ptb -p pairs ""`, or `python -m cpt_core run ptb/lstm` | no, needs a GPU |
| figure 7, XNLI | the same | `xnli/bert` | the same with `-p pairs xnli`, or `python -m cpt_core run xnli/bert` (198 runs: three learning rates per arm) | no, needs a GPU |
| figure 8, table 1 | [07_critical_periods](notebooks/07_critical_periods.ipynb) | `cifar10/deficit_length`, `cifar10/deficit_window`, `imagenet/deficit_length`, `ogbn-arxiv/deficit_length`, `ogbn-arxiv/deficit_window` | `papermill notebooks/07_critical_periods.ipynb out.ipynb -p scale paper -p dataset cifar10 -p model resnet74 -p graph ogbn-arxiv`, or `python -m cpt_core run cifar10/deficit_length` | no, needs a GPU |
| section 4.5, range test | [08_choosing_a_schedule](notebooks/08_choosing_a_schedule.ipynb) | `digits/equal_cost`, `digits-graph/equal_cost`; any recipe with `designs.equal_cost` | `make reproduce NB=08`, `python -m bench.range_tests` | no, needs a GPU |

`make plan` lists all grids with what is done and what the rest takes; [SWEEPS.md](SWEEPS.md) explains sweeps; `make report`
puts what is stored beside the paper's numbers.

## What is exact, what is not

- Schedules, bits, costs, operation counts: exact on every machine; compared with reference values in `tests/reference`.
- A training run: bit for bit the same when repeated or resumed on one CPU with one thread; close on others.
- Accuracies of notebooks in the tests: inside bands measured over twelve seeds (`data/results/bands.json`).
- `+-` is the standard deviation over seeds (n - 1). Figures show means; diverged and failed runs are counted in titles.
- Choice of the best epoch: on held-out images; the final accuracy, at q_max bits, is the one that is drawn.

## Results kept here

| rows | what | command |
|---|---|---|
| `data/results/image_digits.jsonl` | digits, demo scale: six-hidden-layer network (5 seeds) and ResNet-8 (2 seeds) | `make reproduce NB=03` |
| `data/results/image_cifar10_jpeg.jsonl` | JPEG copies of CIFAR-10 at 16 x 16, ResNet-8, one seed; not CIFAR-10 results | `run_grid(designs.quality_cost("demo", "cifar10-jpeg/", seeds=[0], steps=2400, n_cycles=8, batch=64, train_images=None, test_images=None, valid_images=5000, evaluate_every=800), store)` |
| `data/results/detection_scenes.jsonl` | synthetic scenes of digits: small RetinaNet from scratch, 200 steps, q_min 3, ten schedules and static 2, 3, 4, 8; 2 seeds | `run_grid(designs.quality_cost("demo", "digit-scenes", static=[2, 3, 4, 8]), store)`; without static 2 `make reproduce NB=04` |
| `data/results/detection_voc2007_first16.jsonl` | 16 photographs of VOC 2007, tested on themselves: the paper's network from scratch, 128 pixels, 300 steps; float32 and 8 bits; a proof that it learns, no result | `run_grid(designs.quality_cost("demo", "voc2007-first16/", task="detection", schedules=[], static=[8], seeds=[0], steps=300, evaluate_every=100), store)`, the same with `static=[32], q_max=[32]` |
| `data/results/detection_voc2007_subset320.jsonl` | 320 photographs of VOC 2007's test split, 240 to train and 80 to test on: the paper's network from scratch, 128 pixels, 6 epochs; one seed; not VOC results | `run_grid(designs.quality_cost("demo", "voc2007-subset320/", task="detection", schedules=["CR", "RR", "ER"], static=[8], seeds=[0], steps=360, n_cycles=6, evaluate_every=180), store)` |
| `data/results/graph_facebook.jsonl` | Facebook page-page, 128 derived features: GCN 32 wide, FP-Agg (17 arms) and Q-Agg (static 2, 3, 4, 8), 5 seeds; GraphSAGE, 5 arms, 3 seeds; not OGBN results | `run_grid(designs.quality_cost("demo", task="graph", dataset="facebook_ogb_layout/", seeds=range(5)), store)`, the same with `designs.aggregation(..., bits=[2, 3, 4, 8])`; `model="sage"` |
| `data/results/graph_cora.jsonl` | Cora, standard split of 140 labels: GCN, 17 arms, 3 seeds; FP-Agg and Q-Agg at 2, 3, 8 bits, 5 seeds; shows mechanics only | the same with `"planetoid/cora/"` |
| `data/results/language_pydoc.jsonl` | characters of Python's reference text: LSTM 128 wide, 160 steps, q_min 2, ten schedules, static 2, 3, 4, 8, and 6 with 6-bit gradients; 3 seeds | `make reproduce NB=06` |
| `data/results/language_ptb.jsonl` | Penn Treebank, whole text and vocabulary; LSTM 128 wide instead of 800, one epoch instead of 40, no dropout, rate 20 on a cosine: q_min 5 with CR, RR, ER, static 8 and 6 (8- and 6-bit gradients), RR of q_min 2; one or two seeds; not the paper's setting | `run_grid(designs.quality_cost("demo", "ptb", schedules=["CR", "RR", "ER"], static=[8], seeds=[0], steps=1328, embedding=128, hidden=128, vocabulary=None, train_tokens=None, valid_tokens=None, test_tokens=None, q_min=5), store)`, the same with `static=[6]`, `q_max=[6]`, `q_min=2`, `seeds=[1]` |
| `data/results/entailment_xnli.jsonl` | XNLI in English on 9,888 rows of MultiNLI (2.5 % of the training set): small BERT from scratch, 64 tokens, two epochs, two learning rates; test en, es, ur; one seed; not the paper's setting | `run_grid(designs.quality_cost("demo", "xnli", schedules=["CR", "RR", "ER"], static=[8], seeds=[0], steps=618, n_cycles=2, q_min=5, length=64, dropout=0.1, language="en", test_languages=("en", "es", "ur"), train_pairs=None, valid_pairs=None, test_pairs=None, learning_rates=(5e-4, 1e-3)), store)` |
| `data/results/deficit_digits.jsonl` | critical periods on 300 digits, network without normalisation, 2 instead of 8 bits: deficits of 0 to 400 steps before 400 normal ones, windows of 200 in 600, both controls; 10 seeds | `run_grid(designs.deficit_scan("demo", "digits", seeds=range(10)), store)` |
| `data/results/deficit_facebook.jsonl` | the same on Facebook page-page: deficits of 0 to 64 epochs before 48, windows of 32 in 96; 5 seeds | `run_grid(designs.deficit_scan("demo", "facebook_ogb_layout/", task="graph", seeds=range(5)), store)` |
| `data/results/equal_cost_digits.jsonl` | what the BitOps of RR buy on digits, and those of static 5 bits; 12 seeds | `run_grid(designs.equal_cost("demo", "digits", seeds=range(12)), store)`, the same with `budget=0.546875, delay=0.2` |
| `data/results/equal_cost_facebook.jsonl` | the same on Facebook page-page; 10 seeds | the same with `"facebook_ogb_layout/", task="graph", seeds=range(10)` |
| `data/results/equal_cost_pydoc.jsonl` | the same on characters, at the cost of RR; 6 seeds | the same with `"pydoc", seeds=range(6)` |
| `data/results/image_digits_fresh.jsonl`, `graph_facebook_fresh.jsonl`, `language_pydoc_fresh.jsonl` | ten schedules and static 8 bits with seeds that were run after the rule of `analysis.predictors` was written (seeds 5 to 9; 5 to 7; 3 to 5) | `run_grid(designs.quality_cost("demo", "digits", static=[8], seeds=range(5, 10)), store)` and so on |
| `data/results/cycles_digits.jsonl`, `cycles_pydoc.jsonl` | CR with 2 and with 8 cycles, 10 seeds; with 8 cycles, 6 seeds | `run_grid(designs.quality_cost("demo", "digits", schedules=["CR"], static=[], n_cycles=8, seeds=range(10)), store)` |
| `data/results/range_tests.json` | precision range tests of the demo recipes | `python -m bench.range_tests` |

Null results: on photographs of VOC 2007 the paper's detector learned next to nothing in six epochs from scratch, at any precision;
on scenes of digits static 4 bits did as well as the schedules of its cost. On Penn Treebank no schedule between 5 and 8 bits could be told from static 8 bits, and on characters 6 bits with 6-bit
gradients not from 8 (on Penn Treebank they lost 2 % of perplexity). On Facebook page-page Q-Agg could not be told from FP-Agg at 3, 4 and 8 bits (at 2 bits it was better by 0.4
points with the GCN, n = 5, and not with GraphSAGE); no schedule beat a static precision of its cost. For the network without normalisation and the CIFAR-10 copies no schedule was clearly better than the line
through the static precisions (differences of about a point, to both sides), and none clearly better than static 8 bits.
For the small ResNet the static precisions 4 to 7 were not run, so that line is not known.
"""  # noqa: E501


def harvest(kind: str) -> Iterator[tuple[str, str]]:
    """Yield (place in the code, text) of every ``Paper:`` or ``Differs:`` line."""
    for path in sorted((ROOT / "cpt_core").rglob("*.py")):
        if path.name != Path(__file__).name:
            place = path.relative_to(ROOT).as_posix()
            source = path.read_text()
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                    name = "" if isinstance(node, ast.Module) else f" {node.name}"
                    for entry in _entries(ast.get_docstring(node) or "", kind):
                        yield f"{place}{name}", entry
            comments = re.findall(r"((?:^ *# .*\n)+)", source, flags=re.M)
            for block in comments:
                text = re.sub(r"^ *# ?", "", block, flags=re.M)
                for entry in _entries(text, kind):
                    yield place, entry


def _entries(text: str, kind: str) -> list[str]:
    """Cut the entries out of a text: from the word to the next such word, a blank line or a line of less indent."""
    out = []
    for match in re.finditer(rf"(?:^|\s){kind}: (.*?)(?=(?:\s(?:Paper|Differs): )|\n\s*\n|\n\w+:|\Z)", text, re.S):
        out.append(" ".join(match[1].split()))
    return out


def _claims() -> str:
    """The ledger of claims, from the committed rows."""
    entries = claims.ledger({p.name: load_rows(p) for p in sorted(results_dir().glob("*.jsonl"))})
    lines = [
        "## Claims of the paper, and what the rows say",
        "",
        "Made from `data/paper/claims.csv` and the committed rows by the rules in the docstring of",
        "[claims.py](cpt_core/analysis/claims.py) (effect, 95 % interval, n). *Confirmed* and *contradicted* hold for",
        "the scale they stand under: small runs settle nothing at the paper's. `make report` makes the same table from",
        "your own rows too.",
        "",
        "| claim | where | at paper scale | at smaller scales | rows | settled by |",
        "|---|---|---|---|---|---|",
    ]
    for e in entries:
        rows = ", ".join(f"`{name}`" for name in e.stores()) or "–"
        grids = " ".join(e.claim.grids.split())
        settled = ", ".join(f"`python -m cpt_core run {grid}`" for grid in grids.split()) or "–"
        lines.append(f"| {e.claim.claim} | {e.claim.place} | {' | '.join(e.verdicts())} | {rows} | {settled} |")
    lines += ["", "Effects, with 95 % intervals, positive in the direction of the claim:", ""]
    for e in entries:
        if e.effects:
            lines += [f"- *{e.claim.claim}*", *(f"  - {line}" for line in e.evidence())]
    return "\n".join(lines) + "\n"


def text() -> str:
    """Return the whole page."""
    parts = [HEADER, _claims()]
    for kind, title in (("Differs", "Differences from the paper"), ("Paper", "Where the paper is in the code")):
        parts.append(f"## {title}\n")
        lines = [f"- `{place}`: {entry}" for place, entry in harvest(kind)]
        parts.append("\n".join("\n".join(textwrap.wrap(line, 118, subsequent_indent="  ")) for line in lines) + "\n")
    return "\n".join(parts)
