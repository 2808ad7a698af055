"""When data of the user's own counts as changed."""

import os

import pytest

from cpt_core.data import fingerprint as module
from cpt_core.data.fingerprint import fingerprint


@pytest.mark.parametrize("large", [False, True])
def test_names_and_contents_count_and_times_do_not(large, tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path / "runs"))
    if large:
        monkeypatch.setattr(module, "LARGE", 1)
    own, file = tmp_path / "own", tmp_path / "own" / "a" / "x.png"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"one")
    seen = [fingerprint(f"{own}/")]
    os.utime(file, (1, 1))
    assert fingerprint(f"{own}/") == fingerprint(f"{own}") == seen[0]
    file.write_bytes(b"two")
    assert (fingerprint(f"{own}/") == seen[0]) == large  # its size is the same
    for change in (
        lambda: file.write_bytes(b"three"),
        lambda: (own / "b").mkdir() or file.rename(own / "b" / "x.png"),  # another class
        lambda: (own / "c.png").write_bytes(b""),
        lambda: (own / "c.png").unlink() or (own / "b" / "x.png").unlink(),
    ):
        change()
        seen.append(fingerprint(f"{own}/"))
    assert len(set(seen)) == len(seen)
    assert fingerprint(f"{own}/") == fingerprint(f"{tmp_path}/nowhere.npz")


def test_files_are_read_once(tmp_path, monkeypatch):
    monkeypatch.setenv("CPT_RUNS_DIR", str(tmp_path / "runs"))
    for name in ("a.npz", "b.npz"):
        (tmp_path / name).write_bytes(name.encode())
    both = f"{tmp_path}/a.npz,{tmp_path}/b.npz"
    seen = fingerprint(both)
    monkeypatch.delattr(module.hashlib, "file_digest")
    assert fingerprint(both) == seen
    (tmp_path / "b.npz").write_bytes(b"new")
    with pytest.raises(AttributeError, match="file_digest"):
        fingerprint(both)
