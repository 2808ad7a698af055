"""The site: pages, notebooks with their committed outputs and a reference of every public name, by ``make book``."""
