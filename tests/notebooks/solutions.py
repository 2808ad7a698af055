"""Answers to the exercises: notebook -> exercise cell -> the lines that replace the ``...``.  Tests run them."""

SOLUTIONS = {
    "00_start_here": {
        "half": 'cpt.make_schedule("RR", q_min=3, q_max=8, total_steps=64_000)',
        "falling": 'cpt.make_schedule("ETH", q_min=3, q_max=8, total_steps=64_000)',
    },
    "01_schedules": {
        "name": '"ETH"',
        "mine": "cpt.FunctionSchedule(lambda u: 3 + 5 * u**1.9, total_steps=1000)",
    },
    "02_quantizers_and_bitops": {"values": "32", "relative": "round((4**2 + 2 * 4 * 8) / (3 * 64), 3)"},
    "03_image_classification": {"group": '"large"', "largest": "5"},
    "04_object_detection": {"overlap": "32 * 32 / (48 * 48)", "anchors": "94_851"},
    "05_node_classification": {"divisor": "(4 * 2) ** 0.5", "percent": "59.3", "smallest": 'float("-inf")'},
    "06_language": {"missing": "1 - 0.937", "products": "4 * 800 * (800 + 800)", "perplexity": "10_000"},
    "07_critical_periods": {
        "cost": "(200 * 36 + 400 * 192) / (600 * 192)",
        "window": "cpt.DeficitSchedule(3, 8, [(16_000, 144_000)], 256_000)",
        "steps": "800",
    },
    "08_choosing_a_schedule": {
        "half": 'cpt.solve_schedule(0.5, q_min=3, q_max=8, total_steps=64_000, family="cosine")',
        "lowest": "(4**2 + 2 * 4 * 8) / 192",
        "bits": "4",
    },
}
WRONG = {
    "00_start_here": {
        "half": 'cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=64_000)',
        "falling": 'cpt.make_schedule("ER", q_min=3, q_max=8, total_steps=64_000)',
    },
    "01_schedules": {"name": '"RR"', "mine": "cpt.FunctionSchedule(lambda u: 3 + 5 * u, total_steps=1000)"},
    "02_quantizers_and_bitops": {"values": "31", "relative": "0.5"},
    "03_image_classification": {"group": '"small"', "largest": "6"},
    "04_object_detection": {"overlap": "32 / 48", "anchors": "9 * 5"},
    "05_node_classification": {"divisor": "4", "percent": "1.4", "smallest": "0"},
    "06_language": {"missing": "0.007", "products": "3_584_000_000", "perplexity": "9.2"},
    "07_critical_periods": {
        "cost": "1 - 200 / 600",
        "window": "cpt.DeficitSchedule(3, 8, [(16_000, 128_000)], 256_000)",
        "steps": "400",
    },
    "08_choosing_a_schedule": {
        "half": 'cpt.make_schedule("CR", q_min=3, q_max=8, total_steps=64_000)',
        "lowest": "0.5",
        "bits": "3",
    },
}
