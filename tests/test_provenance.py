"""Where rows come from."""

import torch
from helpers import said_by

from cpt_extras import cpu_info
from cpt_lab import provenance

TEXT = """processor	: 0
vendor_id	: GenuineIntel
cpu family	: 6
model		: 207
model name	: Some Processor
stepping	: 2
flags		: fpu sse2 avx2 fma avx512f amx_tile

processor	: 1
model		: 999
"""


def test_a_processor_is_named_by_model_and_wide_instructions(tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(TEXT)
    monkeypatch.setattr(cpu_info, "CPU_INFO", tmp_path / "cpuinfo")
    assert cpu_info.cpu() == {
        "cpu": "Some Processor, cpu family 6, model 207, stepping 2",
        "instructions": ["avx2", "fma", "avx512f", "amx_tile"],
    }


def test_a_processor_of_another_system_has_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_info, "CPU_INFO", tmp_path / "none")
    found = cpu_info.cpu()
    assert found["cpu"]
    assert found["instructions"] == []


def test_the_machine_names_what_computes_and_what_was_switched(monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    monkeypatch.delenv("MKL_CBWR", raising=False)
    found = provenance.machine()
    assert found["threads"] == torch.get_num_threads()
    assert found["switches"]["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert "MKL_CBWR" not in found["switches"]
    assert found["onednn"]
    assert found["onednn"] in torch.__config__.show()


def test_versions_are_those_of_what_was_imported(monkeypatch):
    found = provenance.versions()
    assert found["torch"] == torch.__version__.partition("+")[0] or found["torch"] == torch.__version__
    monkeypatch.setitem(provenance.LIBRARIES, "pretended", "torch")
    monkeypatch.setitem(provenance.LIBRARIES, "absent", "no_such_module")
    found = provenance.versions()
    assert found["pretended"] == "not installed"
    assert "absent" not in found


def test_a_changed_file_makes_a_checkout_dirty_but_a_row_that_came_does_not(tmp_path, monkeypatch):
    rows, file = tmp_path / "data" / "results" / "x.jsonl", tmp_path / "data" / "card"
    rows.parent.mkdir(parents=True)
    rows.write_text("one\n")
    file.write_text("one")
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x"]):
        said_by("git", "-C", tmp_path, *words)
    monkeypatch.setattr(provenance, "CHECKOUT", tmp_path)
    clean = provenance.commit()
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "new").write_text("not tracked")
    rows.write_text("one\ntwo\n")
    assert provenance.commit() == clean
    file.write_text("two")
    assert provenance.commit() == {**clean, "dirty": True}
