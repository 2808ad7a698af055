"""Former module names of ``cpt_lab`` and ``cpt_lessons``, which go on importing until the release after 0.4.

Importing this module installs a finder. It is asked after all others, so it costs nothing for modules that exist. An
import of a former name warns and gives the module of today: both names are one module object, so that its classes
stay identical and a monkeypatch reaches everybody.

>>> FORMER_NAMES["cpt_lab.sweeps.lines"]
'cpt_lab.sweeps.row_format'
"""

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

FORMER_NAMES = {
    "cpt_lab.machine": "cpt_lab.resources",
    "cpt_lab.analysis.exact": "cpt_lab.analysis.computed_claims",
    "cpt_lab.analysis.execution": "cpt_lab.analysis.int8_comparison",
    "cpt_lab.analysis.groups": "cpt_lab.analysis.run_groups",
    "cpt_lab.analysis.measures": "cpt_lab.analysis.claim_measures",
    "cpt_lab.analysis.pages": "cpt_lab.analysis.rendering",
    "cpt_lab.analysis.paper": "cpt_lab.analysis.paper_comparison",
    "cpt_lab.analysis.printed": "cpt_lab.analysis.paper_numbers",
    "cpt_lab.analysis.runs": "cpt_lab.analysis.run_table",
    "cpt_lab.analysis.trying": "cpt_lab.analysis.precision_search_report",
    "cpt_lab.experiments.recipe": "cpt_lab.experiments.schema",
    "cpt_lab.experiments.recipes": "cpt_lab.experiments.registry",
    "cpt_lab.sweeps.calibration": "cpt_lab.sweeps.step_timing",
    "cpt_lab.sweeps.lines": "cpt_lab.sweeps.row_format",
    "cpt_lab.sweeps.outlook": "cpt_lab.sweeps.forecast",
    "cpt_lab.training.capture": "cpt_lab.training.cuda_graphs",
    "cpt_lab.training.together": "cpt_lab.training.batched_runs",
    "cpt_lessons.answers": "cpt_lessons.answer_parsing",
    "cpt_lessons.checks_of_lessons": "cpt_lessons.exercise_checks",
    "cpt_lessons.checks_of_paper": "cpt_lessons.paper_exercise_checks",
    "cpt_lessons.choosing": "cpt_lessons.evidence_figures",
    "cpt_lessons.kernels": "cpt_lessons.jupyter_kernel",
    "cpt_lessons.own_runs": "cpt_lessons.run_reports",
    "cpt_lessons.pictures": "cpt_lessons.teaching_figures",
    "cpt_lessons.places": "cpt_lessons.notebook_progress",
    "cpt_lessons.watching": "cpt_lessons.live_figures",
}


class FormerNameFinder(MetaPathFinder, Loader):
    """Import hook that resolves the former names of modules."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return a spec for a former name; None for any other."""
        return ModuleSpec(fullname, self) if fullname in FORMER_NAMES else None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of today in the place of the one that is imported, and warn.

        Warns:
            DeprecationWarning: names the module of today.
        """
        former_name = module.__name__
        name = FORMER_NAMES[former_name]
        warnings.warn(f"{former_name} is now {name}", DeprecationWarning, stacklevel=2)
        sys.modules[former_name] = import_module(name)


sys.meta_path.append(FormerNameFinder())
