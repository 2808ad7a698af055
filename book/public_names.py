"""Public names of the package, for the pages and for tests."""

from importlib import import_module

from cpt_core.lazy_imports import defining_modules, is_top_level


def reference(package: str) -> dict[str, str]:
    """Return the defining module of every public name of a package, such as ``search.allocate``."""
    module_by_name: dict[str, str] = {}
    for name, module in defining_modules(package).items():
        if is_top_level(module):
            subpackage = import_module(f"{module}.{name}").__name__
            module_by_name |= {
                f"{name}.{inner}": module
                for inner, module in defining_modules(subpackage).items()
            }
        else:
            module_by_name[name] = module
    return module_by_name
