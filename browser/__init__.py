"""Browser tests of the notebooks in JupyterLab, the report and the site; ``make browser`` runs them."""
