"""Sentence pairs from a small grammar: whether one sentence entails or contradicts another follows from the words.

Three forms: quantifiers over things ("not all red dogs are wet"), how many things a person does something to ("more
than 3 robins are painted by anna"), and what people do to each other ("nobody helps ben"). What the words mean where
everyday English leaves room:

- things that the first sentence puts after "all" or "no" exist: "all dogs are wet" entails "some dogs are wet";
- "some" and "a" mean at least one; nothing is both red and blue, wet and dry, or clean and dirty;
- words that are not above one another in the tree of kinds are independent: verbs, people, dogs and birds.

The labels come from rules about sets and counts; the tests check them in random worlds.
"""

from __future__ import annotations

import math
import random

KINDS: dict[str, tuple[str, ...]] = {  # kind -> the kinds below it
    "animal": ("dog", "bird", "snake"),
    "plant": ("flower", "tree", "shrub"),
    "dog": ("poodle", "beagle"),
    "bird": ("robin", "parrot"),
    "snake": ("cobra", "python"),
    "flower": ("rose", "tulip"),
    "tree": ("oak", "maple"),
    "shrub": ("lilac", "azalea"),
}
PARENT = {kind: above for above, kinds in KINDS.items() for kind in kinds}
CONTRARIES = (("red", "blue"), ("wet", "dry"), ("clean", "dirty"))
PEOPLE = ("anna", "ben", "carl", "dora", "emil", "fay", "gus", "hana")
DOES = {"buys": "bought", "finds": "found", "paints": "painted", "draws": "drawn"}  # to things: active, passive
MEETS = {"helps": "helped", "calls": "called", "hears": "heard", "follows": "followed"}  # people
COUNTS: dict[str, tuple[float, float]] = {  # words -> smallest and largest number
    "no": (0, 0),
    "a": (1, math.inf),
    **{f"exactly {n}": (n, n) for n in range(2, 6)},
    **{f"more than {n}": (n + 1, math.inf) for n in range(1, 6)},
    **{f"fewer than {n}": (0, n - 1) for n in range(2, 7)},
}
ENTAILMENT, NEUTRAL, CONTRADICTION = range(3)

Thing = tuple[str, str]  # an adjective or "", a kind
Rules = dict[int, list[str]]  # label -> second sentences


def sentence_pairs(count: int, seed: int = 0) -> list[tuple[str, str, int]]:
    """Return ``count`` different pairs (premise, hypothesis, label) with the labels 0, 1, 2, 0, 1, ... in turn."""
    rng = random.Random(seed)
    found: dict[tuple[str, str, int], None] = {}
    while len(found) < count:
        label, form = len(found) % 3, rng.choice((_quantified, _counted, _met))
        hypotheses: list[str] = []
        while not hypotheses:
            premise, rules = form(rng)
            hypotheses = [h for h in rules[label] if h != premise]
        found[premise, rng.choice(hypotheses), label] = None
    return list(found)


def _things(rng: random.Random) -> tuple[Thing, Thing, Thing, Thing]:
    """Return a thing, a wider one, a narrower one, and one that says nothing about the first."""
    kind, adjective = rng.choice([*PARENT]), rng.choice(("", *CONTRARIES[0]))
    above = [kind]
    while above[-1] in PARENT:
        above.append(PARENT[above[-1]])
    wider = [(a, k) for a in {adjective: 0, "": 0} for k in above][1:]
    narrower = [(adjective, k) for k in KINDS.get(kind, ())]
    if not adjective:
        narrower += [(a, kind) for a in CONTRARIES[0]]
    apart = [k for k in PARENT if k not in above and kind not in (k, PARENT[k])]
    # a red poodle has nothing narrower: every rule for narrower things holds for itself
    return (
        (adjective, kind),
        rng.choice(wider),
        rng.choice(narrower or [(adjective, kind)]),
        (adjective, rng.choice(apart)),
    )


def _name(thing: Thing) -> str:
    return " ".join(thing).strip()


def _quantified(rng: random.Random) -> tuple[str, Rules]:
    x, up, down, other = _things(rng)
    p, o = rng.sample(rng.choice(CONTRARIES[1:]), 2)
    quantifier = rng.choice(("all", "some", "no", "not all"))
    # quantifier -> what follows, what is left open, what is ruled out
    rules = {
        "all": (
            [("some", x, p), ("some", up, p), ("all", down, p), ("no", x, o), ("no", down, o)],
            [("all", up, p), ("some", up, o), ("no", up, o), ("not all", up, p)],
            [("no", x, p), ("no", up, p), ("some", x, o), ("some", down, o), ("all", x, o), ("not all", x, p)],
        ),
        "some": (
            [("some", up, p), ("not all", x, o), ("not all", up, o)],
            [("all", x, p), ("all", up, p), ("some", x, o), ("no", x, o), ("not all", x, p)],
            [("no", x, p), ("no", up, p), ("all", x, o), ("all", up, o)],
        ),
        "no": (
            [("no", down, p), ("not all", x, p), ("not all", up, p)],
            [("no", up, p), ("some", up, p), ("all", x, o), ("some", x, o), ("no", x, o)],
            [("some", x, p), ("some", down, p), ("all", x, p), ("all", up, p)],
        ),
        "not all": (
            [("not all", up, p)],
            [("no", x, p), ("some", x, p), ("some", x, o), ("all", x, o), ("no", up, p)],
            [("all", x, p), ("all", up, p)],
        ),
    }  # fmt: skip
    made = [[f"{q} {_name(t)}s are {state}" for q, t, state in sentences] for sentences in rules[quantifier]]
    made[NEUTRAL] += [f"{q} {_name(other)}s are {p}" for q in rules]
    return f"{quantifier} {_name(x)}s are {p}", dict(enumerate(made))


def _counted(rng: random.Random) -> tuple[str, Rules]:
    x, up, down, other = _things(rng)
    (who, whoever), (verb, verb2) = rng.sample(PEOPLE, 2), rng.sample(sorted(DOES), 2)

    def make(words: str, thing: Thing, who: str = who, verb: str = verb) -> str:
        name = _name(thing)
        article = "an" if words == "a" and name[0] in "aeiou" else words
        one = words in ("no", "a")
        what = f"{article} {name}{'' if one else 's'}"
        return rng.choice((f"{who} {verb} {what}", f"{what} {'is' if one else 'are'} {DOES[verb]} by {who}"))

    words = rng.choice(sorted(COUNTS))
    low, high = COUNTS[words]
    rules: Rules = {ENTAILMENT: [], NEUTRAL: [], CONTRADICTION: []}
    for thing, least, most in ((x, low, high), (up, low, math.inf), (down, 0, high)):
        for said, (a, b) in COUNTS.items():  # what is known of the number, and what is said of it
            label = ENTAILMENT if a <= least and most <= b else CONTRADICTION if most < a or b < least else NEUTRAL
            rules[label].append(make(said, thing))
    said = rng.choice(sorted(COUNTS))
    rules[NEUTRAL] += [make(said, x, whoever), make(said, x, verb=verb2), make(said, other)]
    return make(words, x), rules


def _met(rng: random.Random) -> tuple[str, Rules]:
    (a, b, c), (verb, verb2) = rng.sample(PEOPLE, 3), rng.sample(sorted(MEETS), 2)

    def make(who: str, whom: str, holds: bool, verb: str = verb) -> str:
        plain = verb.removesuffix("s")
        active = f"{who} {verb if holds else f'does not {plain}'} {whom}"
        return rng.choice((active, f"{whom} is {'' if holds else 'not '}{MEETS[verb]} by {who}"))

    holds = rng.random() < 0.5
    same, opposite = make(a, b, holds), make(a, b, not holds)
    anyone = [make("someone", b, True), make(a, "someone", True)]
    no_one = [f"nobody {verb} {b}", f"nobody is {MEETS[verb]} by {a}"]
    open_ = [make(b, a, holds), make(b, a, not holds), make(a, c, holds), make(c, b, not holds)]
    open_ += [make(a, b, holds, verb2), make(a, b, not holds, verb2)]
    if holds:
        return make(a, b, True), {ENTAILMENT: [same, *anyone], NEUTRAL: open_, CONTRADICTION: [opposite, *no_one]}
    if rng.random() < 0.5:
        return make(a, b, False), {ENTAILMENT: [same], NEUTRAL: [*open_, *anyone, *no_one], CONTRADICTION: [opposite]}
    premise, active = rng.choice(((no_one[0], True), (no_one[1], False)))
    both = [make(a, b, False)]
    return premise, {
        ENTAILMENT: both,
        NEUTRAL: [make(b, a, True), make(b, a, False), no_one[1 if active else 0], make(a, b, True, verb2)],
        CONTRADICTION: [make(a, b, True), anyone[0 if active else 1]],
    }
