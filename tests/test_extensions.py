"""Optional parts of ``cpt_core.extensions`` in an installation of cpt_core alone."""

import pytest

from cpt_core import extensions


@pytest.fixture
def core_alone(monkeypatch):
    monkeypatch.setattr(extensions, "is_installed", lambda name: False)


def test_services_warns_if_part_is_not_installed(core_alone):
    with pytest.warns(
        UserWarning, match=r"cpt_extras\.integrations\.data_parallel is not installed"
    ):
        assert extensions.services("processes").key_offset() is None


def test_load_names_the_missing_package(core_alone):
    with pytest.raises(
        RuntimeError,
        match="'int8' needs the package cpt_extras, which is not installed",
    ):
        extensions.load("int8")
