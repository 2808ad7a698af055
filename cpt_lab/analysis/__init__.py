"""Analysis of stored runs, from result rows to tables, figures and verdicts.

``run_table`` turns rows into one typed table. One module per question (``quality_cost``, ``aggregation``,
``critical_periods``, ``equal_cost``, ``int8_comparison`` ...) computes its numbers, its table and its figure.
``claims`` judges the claims of the paper, ``preregistered`` the questions of ``cpt_lab.studies``; ``report`` and
``reproduction`` put everything on pages. No module imports torch before it computes a model's cost.
"""
