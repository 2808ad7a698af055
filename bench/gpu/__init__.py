"""The first hour on a GPU: ``python -m bench.gpu``; see ``__main__.py``."""
