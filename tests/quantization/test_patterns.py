"""Patterns of module names, for float32 layers and for schedules, against one-by-one matching."""

import random
from fnmatch import fnmatchcase
from types import SimpleNamespace

import pytest
from torch import nn

from cpt_core.quantization.convert import _excluded
from cpt_core.quantization.scheduler import _match_patterns

PARTS = {
    "0": nn.Identity(),
    "1": nn.ModuleDict({"a": nn.Identity(), "aa": nn.Identity()}),
}
MODEL = nn.ModuleDict({name: nn.ModuleDict(PARTS) for name in ("a", "b", "ab", "a1")})
NAMES = [name for name, _ in MODEL.named_modules() if name]
PATTERNS = [*NAMES, "*", "a*", "*.a", "?", "[ab]", "a?", "*.1", "a.*"]


@pytest.mark.parametrize("seed", range(20))
def test_patterns_equal_one_by_one_matching(seed):
    patterns = random.Random(seed).sample(PATTERNS, 4)
    hits = [
        name
        for name in NAMES
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    ]
    inside = {
        name for name in NAMES if any(f"{name}.".startswith(f"{hit}.") for hit in hits)
    }
    assert _excluded(MODEL, tuple(patterns), {}) == inside
    first = {name: next(p for p in patterns if fnmatchcase(name, p)) for name in hits}
    assert (
        _match_patterns(
            {name: SimpleNamespace(has_weights=False) for name in NAMES},
            patterns,
            "schedule",
        )
        == first
    )
