"""Sentence pairs from a small grammar: whether one sentence entails or contradicts another follows from the words.

Three forms: quantifiers over things ("no red dogs are wet"), how many things a person does something to ("anna paints
more than 3 robins"), and what people do to each other ("ben is not helped by anna"). What the words mean where everyday
English leaves room:

- things that the first sentence puts after "all" or "no" exist: "all dogs are wet" entails "some dogs are wet";
- "some" means at least one; nothing is both wet and dry, or clean and dirty;
- words that are not above one another in the tree of kinds are independent: verbs, people, dogs and birds.

The labels come from rules about sets and counts; the tests check them in random worlds. Words are few, so that a small
network learns the rules, which need pairs of words and their order, from thousands of examples.
"""

import math
import random

SUBKINDS: dict[str, tuple[str, ...]] = {  # kind -> the kinds below it
    "animal": ("dog", "bird"),
    "plant": ("flower", "tree"),
    "dog": ("poodle", "beagle"),
    "bird": ("robin", "parrot"),
    "flower": ("rose", "tulip"),
    "tree": ("oak", "maple"),
}
PARENT_KIND = {kind: above for above, kinds in SUBKINDS.items() for kind in kinds}
COLOURS = ("red", "blue")
STATE_PAIRS = (("wet", "dry"), ("clean", "dirty"))
PEOPLE = ("anna", "ben", "carl", "dora")
THING_VERBS = ("buys", "paints")  # to things
PERSON_VERBS = {"helps": "helped", "calls": "called"}  # people: active, passive
COUNT_WORDS: dict[str, tuple[float, float]] = {  # words -> smallest and largest number
    "no": (0, 0),
    "some": (1, math.inf),
    **{f"more than {n}": (n + 1, math.inf) for n in range(2, 6)},
}
ENTAILMENT, NEUTRAL, CONTRADICTION = range(3)
Thing = tuple[str, str]  # a colour or "", a kind
Hypotheses = tuple[
    list[str], list[str], list[str]
]  # second sentences by label: entailed, neutral, contradicted


def sentence_pairs(count: int) -> list[tuple[str, str, int]]:
    """Return ``count`` different pairs (premise, hypothesis, label) with the labels 0, 1, 2, 0, 1, ... in turn."""
    rng = random.Random(0)
    found: dict[tuple[str, str, int], None] = {}
    while len(found) < count:
        label, form = len(found) % 3, rng.choice(SENTENCE_FORMS)
        premise, rules = form(rng)
        if hypotheses := [h for h in rules[label] if h != premise]:
            found[premise, rng.choice(hypotheses), label] = None
    return list(found)


def _related_things(rng: random.Random) -> tuple[Thing, Thing, Thing, Thing]:
    """Return a thing, a wider one, a narrower one, and one that is independent of the first."""
    kind, colour = rng.choice([*PARENT_KIND]), rng.choice(("", *COLOURS))
    above = [kind]
    while above[-1] in PARENT_KIND:
        above.append(PARENT_KIND[above[-1]])
    wider = [
        (c, k)
        for c in dict.fromkeys((colour, ""))
        for k in above
        if (c, k) != (colour, kind)
    ]
    narrower = [(colour, k) for k in SUBKINDS.get(kind, ())] + (
        [] if colour else [(c, kind) for c in COLOURS]
    )
    apart = [
        (colour, k) for k in PARENT_KIND if k not in above and PARENT_KIND[k] != kind
    ]
    # nothing is narrower than a red poodle but itself
    return (
        (colour, kind),
        rng.choice(wider),
        rng.choice(narrower or [(colour, kind)]),
        rng.choice(apart),
    )


def _plural(thing: Thing) -> str:
    return f"{' '.join(thing).strip()}s"


def _quantifier_pair(rng: random.Random) -> tuple[str, Hypotheses]:
    x, up, down, other = _related_things(rng)
    p, contrary = rng.sample(rng.choice(STATE_PAIRS), 2)
    quantifier = rng.choice(("all", "some", "no"))
    entailed, neutral, contradicted = {
        "all": (
            [("some", x, p), ("some", up, p), ("all", down, p)],
            [("all", up, p), ("all", other, p), ("some", other, p)],
            [("no", x, p), ("no", up, p), ("all", x, contrary), ("some", x, contrary)],
        ),
        "some": (
            [("some", up, p)],
            [("all", x, p), ("some", down, p), ("some", other, p)],
            [("no", x, p), ("no", up, p)],
        ),
        "no": (
            [("no", down, p)],
            [("no", up, p), ("no", other, p)],
            [("some", x, p), ("some", down, p), ("all", x, p)],
        ),
    }[quantifier]

    def make(sentences: list[tuple[str, Thing, str]]) -> list[str]:
        return [f"{q} {_plural(thing)} are {state}" for q, thing, state in sentences]

    return make([(quantifier, x, p)])[0], (
        make(entailed),
        make(neutral),
        make(contradicted),
    )


def _counting_pair(rng: random.Random) -> tuple[str, Hypotheses]:
    x, up, down, _ = _related_things(rng)
    who, verb, words = (
        rng.choice(PEOPLE),
        rng.choice(THING_VERBS),
        rng.choice([*COUNT_WORDS]),
    )
    low, high = COUNT_WORDS[words]
    rules: Hypotheses = ([], [], [])
    known = {
        down: (0, high),
        up: (low, math.inf),
        x: (low, high),
    }  # x last: ``down`` may be x
    for thing, (least, most) in known.items():
        for said, (a, b) in COUNT_WORDS.items():  # against what is known of the number
            label = (
                ENTAILMENT
                if a <= least and most <= b
                else CONTRADICTION
                if most < a or b < least
                else NEUTRAL
            )
            rules[label].append(f"{who} {verb} {said} {_plural(thing)}")
    return f"{who} {verb} {words} {_plural(x)}", rules


def _person_pair(rng: random.Random) -> tuple[str, Hypotheses]:
    (a, b, c), verb, holds = (
        rng.sample(PEOPLE, 3),
        rng.choice([*PERSON_VERBS]),
        rng.random() < 0.5,
    )

    def make(who: str, whom: str, holds: bool) -> str:
        active = f"{who} {verb if holds else f'does not {verb[:-1]}'} {whom}"
        return rng.choice(
            (
                active,
                f"{whom} is {'' if holds else 'not '}{PERSON_VERBS[verb]} by {who}",
            )
        )

    same, opposite = [make(a, b, holds)], [make(a, b, not holds)]
    neutral = [make(b, a, holds), make(a, c, holds), make(c, b, not holds)]
    anyone = [make("someone", b, True), make(a, "someone", True)]
    no_one = [f"nobody {verb} {b}", f"nobody is {PERSON_VERBS[verb]} by {a}"]
    if holds:
        return make(a, b, True), (same + anyone, neutral, opposite + no_one)
    return make(a, b, False), (same, neutral + anyone + no_one, opposite)


SENTENCE_FORMS = (
    _quantifier_pair,
    _quantifier_pair,
    _counting_pair,
    _counting_pair,
    _person_pair,
)
