"""Reasons for float32 and simulation: one enum, its texts, and the page that lists them."""

import re
from pathlib import Path

from cpt_core.quantization.fallback_reasons import FallbackReason

PAGE = Path(__file__).parents[2] / "docs" / "fallbacks.md"


def test_fallbacks_page_lists_every_reason():
    rows = re.findall(
        r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", PAGE.read_text("utf-8"), re.M
    )
    listed = [(name, text) for name, text, _ in rows]
    assert listed == [(reason.name, reason.value) for reason in FallbackReason]
