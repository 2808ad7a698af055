"""What a reader meets in a browser: the notebooks in JupyterLab, the report, the site. ``make browser`` runs it."""
