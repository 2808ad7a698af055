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
    "09_from_bitops_to_seconds": {
        "relative": "(0.4 * 20 + 0.6 * 40) / 40",
        "schedule": "cpt.solve_schedule(0.75, 4, 16, 64_000, cost=lambda q: 20 if q <= 8 else 40)",
        "intensity": "2 * 512 * 384 * 1536 / (512 * 384 + 384 * 1536 + 4 * 512 * 1536)",
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
    "09_from_bitops_to_seconds": {
        "relative": "0.6",
        "schedule": "cpt.solve_schedule(0.75, 4, 16, 64_000)",
        "intensity": "2 * 512 * 384 * 1536 / (4 * (512 * 384 + 384 * 1536 + 512 * 1536))",
    },
}

# further answers that are right, and further ones that are wrong: notebook -> exercise -> answers
BETWEEN = "q_min=3, q_max=8, total_steps=64_000"
ALSO_RIGHT = {
    "00_start_here": {
        "half": [f'cpt.make_schedule("RTH", {BETWEEN})', f'cpt.make_schedule("RR", {BETWEEN}, n_cycles=2)'],
    },
    "01_schedules": {"name": ['"ER"', '"eth"']},
    "02_quantizers_and_bitops": {"values": ["2**5", "32.0"], "relative": ["80 / 192", "0.4167"]},
    "03_image_classification": {"group": ['"Large"', '"large savings"', '" LARGE  savings"'], "largest": ["5.0"]},
    "04_object_detection": {"overlap": ["4 / 9", "0.44"]},
    "05_node_classification": {"divisor": ["8**0.5", "2.83"], "smallest": ['-float("inf")']},
    "06_language": {
        "missing": ["0.063", "-0.063"],
        "products": ["3_584_000_000 / 700"],
        "perplexity": ["math.exp(math.log(10_000))", "1 / (1 / 10_000)"],
    },
    "08_choosing_a_schedule": {
        "half": [f'cpt.solve_schedule(0.5, {BETWEEN}, family="cosine", n_cycles=4, triangular=True)'],
    },
}
ALSO_WRONG = {
    "00_start_here": {
        "half": [
            '"RR"',
            "0.4",
            "cpt.DeficitSchedule(3, 8, [(0, 60_000)], 64_000)",
            'cpt.make_schedule("RR", q_min=3, q_max=8, total_steps=6400)',
            'cpt.make_schedule("RR", q_min=2, q_max=8, total_steps=64_000)',
        ],
        "falling": [
            '"ETH"',
            "cpt.DeficitSchedule(3, 8, [(16_000, 32_000)], 64_000)",
            f'cpt.make_schedule("RTH", {BETWEEN})',
        ],
    },
    "01_schedules": {
        "name": ['"RTH"', f'cpt.make_schedule("ER", {BETWEEN})'],
        "mine": ["lambda u: 3 + 5 * u**1.9", "cpt.FunctionSchedule(lambda u: 3 + 5 * u**1.9, total_steps=500)"],
    },
    "02_quantizers_and_bitops": {"values": ['"32"'], "relative": ['"0.417"', "1 / 4"]},
    "03_image_classification": {
        "group": ['"medium"', '"large cost"', '"not large"', '["large"]', "1"],
        "largest": ['"static 5"'],
    },
    "04_object_detection": {"overlap": ['"4/9"'], "anchors": ["9 * (76 * 104)"]},
    "05_node_classification": {"smallest": ['float("inf")', '"-inf"']},
    "06_language": {"perplexity": ["math.log(10_000)", "9_990", '"10_000"']},
    "08_choosing_a_schedule": {
        "half": [
            f'cpt.solve_schedule(0.5, {BETWEEN}, family="rex")',
            f"cpt.solve_schedule(0.5, {BETWEEN})",
            'cpt.solve_schedule(0.5, q_min=3, q_max=8, total_steps=6400, family="cosine")',
            '"cosine"',
        ],
    },
}
