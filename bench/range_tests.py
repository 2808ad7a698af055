"""Precision range tests of the demo recipes, stored: ``python -m bench.range_tests``.

Writes ``data/results/range_tests.json``: one entry per data set and model, with every share, beside the q_min that the
paper found with its own test on its own data. Data sets that are not embedded are left as they are when their data are
not there; ``--only`` measures some of them again.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings

import torch

from cpt_extras.search.range_test import RangeTestWarning
from cpt_lab.experiments.registry import recipe
from cpt_lab.paths import results_dir
from cpt_lab.provenance import commit
from cpt_lab.training.recipe_search import recipe_range_test

# task, data set, model, dwell, precisions below 8 bits, seeds
TESTS = [
    ("image", "digits", "mlp6", 100, range(2, 8), 6),
    ("image", "digits", "resnet8_w8", 100, range(2, 6), 3),
    ("image", "cifar10-jpeg/", "resnet8_w8", 160, range(2, 6), 3),
    ("detection", "digit-scenes", "retinanet_small", 80, range(2, 5), 1),
    ("graph", "digits-graph", "gcn", 100, range(2, 6), 3),
    ("graph", "facebook_ogb_layout/", "gcn", 64, range(2, 6), 3),
    ("language_model", "pydoc", "lstm", 160, range(2, 7), 3),
    ("language_model", "ptb", "lstm", 120, range(2, 7), 3),
    ("entailment", "templates", "bert_small", 100, range(2, 6), 3),
]
PAPER = {
    "image": "3 (CIFAR), 4 (ImageNet)",
    "detection": "5",
    "graph": "3",
    "language_model": "5",
    "entailment": "5",
}


def main() -> None:
    """Run the range tests, all or those that --only selects, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--only",
        default="",
        help="part of a name such as digits/mlp6; the others stay as they are",
    )
    only = parser.parse_args().only
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RangeTestWarning)  # it is part of the answer
    path = results_dir() / "range_tests.json"
    results = json.loads(path.read_text())["tests"] if path.exists() else {}
    for task, dataset, model, dwell, bits, seeds in TESTS:
        name = f"{dataset}{'' if dataset.endswith('/') else '/'}{model}"
        if only not in name:
            continue
        test_recipe = recipe("demo", dataset, model, task=task)
        start = time.monotonic()
        result = recipe_range_test(
            test_recipe, bits=bits, dwell=dwell, seeds=range(seeds)
        )
        print(f"{name}\n{result}\n", flush=True)
        results[name] = {
            "task": task,
            "recipe_q_min": test_recipe.q_min,
            "paper_q_min": PAPER[task],
            **result.to_dict(),
            "seconds": round(time.monotonic() - start, 1),
            "torch": torch.__version__,
            **commit(),
        }
        path.write_text(
            json.dumps(
                {"command": "python -m bench.range_tests", "tests": results}, indent=1
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
