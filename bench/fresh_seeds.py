"""Primary effects of the studies with fresh seeds: ``python -m bench.fresh_seeds``.

``cpt verify --verdict GRID`` runs a preregistered grid with seeds that nothing committed has; its rows stay in
``runs/verdicts``. This reads the grids that are complete there, and writes their effects to
``data/results/fresh_seeds.json``, a value per seed, with the commits that ran them; grids that were run elsewhere keep
what is written there. Each is compared with the committed rows where it is shown, docs/reproducing/repeating.md, by the
rule of ``analysis.preregistered.Repeated``.
"""

import json
from typing import Any

from cpt_extras.files import write_text
from cpt_lab.analysis.preregistered import (
    fresh_seed_specs,
    grid_data,
    replicated_effects,
)
from cpt_lab.experiments.grids import studies
from cpt_lab.paths import results_dir, runs_dir
from cpt_lab.sweeps.result_row import ResultRow
from cpt_lab.sweeps.row_format import load_rows


def complete_rows(grid: str) -> list[ResultRow]:
    """Return the rows of a grid with fresh seeds; none if rows are missing or the data differ."""
    store = runs_dir() / "verdicts" / f"{grid}.jsonl"
    if not store.is_file():
        return []
    rows_by_key = {
        row["key"]: row for row in load_rows(store) if row["status"] != "failed"
    }
    keys = [spec.key for spec in fresh_seed_specs(grid)]
    rows = [rows_by_key[key] for key in keys if key in rows_by_key]
    checksums = {checksum for _, checksum in grid_data(grid)}
    is_complete = (
        len(rows) == len(keys) and {row["data_checksum"] for row in rows} == checksums
    )
    return rows if is_complete else []


def main() -> None:
    """Compute the effects of all complete grids, print and write them."""
    path, effects_by_grid = results_dir() / "fresh_seeds.json", dict[str, Any]()
    stored_effects = (
        json.loads(path.read_text(encoding="utf-8"))["grids"] if path.is_file() else {}
    )
    for grid in (name for study in studies("arms") for name in study.GRIDS):
        if not (rows := complete_rows(grid)):
            effects_by_grid |= (
                {grid: stored_effects[grid]} if grid in stored_effects else {}
            )
            continue
        effects = replicated_effects(grid, rows)
        print(grid, *effects, sep="\n  ", flush=True)
        sources = {
            (row["provenance"]["commit"], row["provenance"]["dirty"]) for row in rows
        }
        if not all(commit and dirty is False for commit, dirty in sources):
            raise ValueError(
                f"{grid}: some of its rows are not those of a clean commit"
            )
        effects_by_grid[grid] = {
            "runs": len(rows),
            "commits": sorted(commit for commit, _ in sources),
            "data_checksum": sorted({row["data_checksum"] for row in rows}),
            "processors": sorted({row["provenance"]["machine"]["cpu"] for row in rows}),
            "effects": {
                effect.replication.description: list(effect.replication.values)
                for effect in effects
            },
        }
    write_text(
        path,
        json.dumps(
            {"command": "python -m bench.fresh_seeds", "grids": effects_by_grid},
            indent=1,
        )
        + "\n",
    )


if __name__ == "__main__":
    main()
