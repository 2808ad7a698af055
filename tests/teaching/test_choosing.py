"""What notebook 08 prints: committed range tests, and a reader's own beside them."""

import numpy as np

from cpt_core.teaching import choosing
from cpt_core.teaching.parameters import check_parameters


def test_a_committed_range_test_is_a_range_test_again(capsys):
    found = choosing.stored_range_test("digits/mlp6")
    assert found.q_min == next(q for q in found.bits if found.mean(q) >= found.threshold) == 4
    choosing.show_range_tests()
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("digits/mlp6")]
    assert f"{found.mean(4):.2f}" in line
    assert "4? (6 seeds)" in line


def test_a_smoke_range_test_never_names_a_q_min(capsys):
    found = choosing.own_range_test(check_parameters("image", scale="smoke", dataset="digits", model="", q_max=8))
    said = capsys.readouterr().out
    assert found.bits == (2, 3, 8)
    assert said.startswith("smoke scale: not a result")
    assert "q_min" not in said
    assert all(f"{q} bits {found.mean(q):.2f}" in said for q in (2, 3))
    assert np.isfinite(found.shares).all()
