"""Course on cyclic precision training: everything that the notebooks import, and the commands that run them.

A notebook imports four kinds of modules. ``parameters`` checks the values in its first cell, ``paper_runs`` and
``run_reports`` train and show the runs it is about, ``demonstrations`` and the modules named after a task (``images``,
``graphs``, ``detection``, ``language``) prepare small examples, and ``teaching_figures``, ``live_figures``,
``evidence_figures`` and ``diagrams`` draw.

Exercises work without a server. A notebook calls ``exercises.check`` with the number of an exercise and the answer;
``exercise_checks`` and ``paper_exercise_checks`` compute the right answer with ``cpt_core`` where they can, instead of
storing it, so that the answers follow the code. ``submissions`` collects what the checks printed in handed-in files.

``notebooks`` runs all of them with papermill: each notebook, data set and set of parameters has a page of its own, a
failed run has its page beside the last good one, and ``notebook_progress`` shows how far a reproduction has come.
"""

import cpt_lab.former_names  # noqa: F401 - the former module names go on importing
