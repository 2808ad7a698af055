"""All public names of the package, for the pages and for tests."""

from importlib import import_module

from cpt_core.lazy_imports import defining_modules, is_top_level


def reference(package: str) -> dict[str, str]:
    """Return the public names of a package and of its subpackages, such as ``search.allocate``, and their modules."""
    found: dict[str, str] = {}
    for name, home in defining_modules(package).items():
        if is_top_level(home):
            subpackage = import_module(f"{home}.{name}").__name__
            found |= {
                f"{name}.{inner}": module
                for inner, module in defining_modules(subpackage).items()
            }
        else:
            found[name] = home
    return found
