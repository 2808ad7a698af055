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
from typing import NamedTuple

# The kinds directly below each kind.
SUBKINDS: dict[str, tuple[str, ...]] = {
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
THING_VERBS = ("buys", "paints")  # a person does this to things
PERSON_VERBS = {
    "helps": "helped",
    "calls": "called",
}  # active form -> participle of the passive
# Smallest and largest number that words stand for.
COUNT_WORDS: dict[str, tuple[float, float]] = {
    "no": (0, 0),
    "some": (1, math.inf),
    **{f"more than {n}": (n + 1, math.inf) for n in range(2, 6)},
}
ENTAILMENT, NEUTRAL, CONTRADICTION = range(3)
Thing = tuple[str, str]  # a colour or "", a kind


class Hypotheses(NamedTuple):
    """Second sentences by label, in the order of the labels 0, 1, 2."""

    entailed: list[str]
    neutral: list[str]
    contradicted: list[str]


class _RelatedThings(NamedTuple):
    """A thing, a wider one, a narrower one, and one that is independent of the first."""

    thing: Thing
    wider: Thing
    narrower: Thing
    unrelated: Thing


def sentence_pairs(count: int) -> list[tuple[str, str, int]]:
    """Return ``count`` different pairs (premise, hypothesis, label) with the labels 0, 1, 2, 0, 1, ... in turn."""
    rng = random.Random(0)
    pairs: dict[tuple[str, str, int], None] = {}
    while len(pairs) < count:
        label = len(pairs) % 3
        form = rng.choice(SENTENCE_FORMS)
        premise, hypotheses = form(rng)
        candidates = [
            hypothesis for hypothesis in hypotheses[label] if hypothesis != premise
        ]
        if candidates:
            pairs[premise, rng.choice(candidates), label] = None
    return list(pairs)


def _related_things(rng: random.Random) -> _RelatedThings:
    """Draw a thing and things that are wider, narrower and independent of it."""
    kind, colour = rng.choice([*PARENT_KIND]), rng.choice(("", *COLOURS))
    kinds_above = [kind]
    while kinds_above[-1] in PARENT_KIND:
        kinds_above.append(PARENT_KIND[kinds_above[-1]])

    wider = []
    for wider_colour in dict.fromkeys((colour, "")):
        for wider_kind in kinds_above:
            if (wider_colour, wider_kind) != (colour, kind):
                wider.append((wider_colour, wider_kind))
    narrower = [(colour, subkind) for subkind in SUBKINDS.get(kind, ())]
    if not colour:
        narrower += [(c, kind) for c in COLOURS]
    if not narrower:  # nothing is narrower than a red poodle but itself
        narrower = [(colour, kind)]
    unrelated = [
        (colour, k)
        for k in PARENT_KIND
        if k not in kinds_above and PARENT_KIND[k] != kind
    ]
    return _RelatedThings(
        thing=(colour, kind),
        wider=rng.choice(wider),
        narrower=rng.choice(narrower),
        unrelated=rng.choice(unrelated),
    )


def _plural(thing: Thing) -> str:
    return f"{' '.join(thing).strip()}s"


def _quantifier_pair(rng: random.Random) -> tuple[str, Hypotheses]:
    """Draw a sentence with a quantifier over things, and its hypotheses."""
    x, wider, narrower, unrelated = _related_things(rng)
    state, opposite = rng.sample(rng.choice(STATE_PAIRS), 2)
    quantifier = rng.choice(("all", "some", "no"))

    def sentence(quantifier: str, thing: Thing, state: str) -> str:
        return f"{quantifier} {_plural(thing)} are {state}"

    if quantifier == "all":
        hypotheses = Hypotheses(
            entailed=[
                sentence("some", x, state),
                sentence("some", wider, state),
                sentence("all", narrower, state),
            ],
            neutral=[
                sentence("all", wider, state),
                sentence("all", unrelated, state),
                sentence("some", unrelated, state),
            ],
            contradicted=[
                sentence("no", x, state),
                sentence("no", wider, state),
                sentence("all", x, opposite),
                sentence("some", x, opposite),
            ],
        )
    elif quantifier == "some":
        hypotheses = Hypotheses(
            entailed=[sentence("some", wider, state)],
            neutral=[
                sentence("all", x, state),
                sentence("some", narrower, state),
                sentence("some", unrelated, state),
            ],
            contradicted=[sentence("no", x, state), sentence("no", wider, state)],
        )
    else:
        hypotheses = Hypotheses(
            entailed=[sentence("no", narrower, state)],
            neutral=[sentence("no", wider, state), sentence("no", unrelated, state)],
            contradicted=[
                sentence("some", x, state),
                sentence("some", narrower, state),
                sentence("all", x, state),
            ],
        )
    return sentence(quantifier, x, state), hypotheses


def _counting_pair(rng: random.Random) -> tuple[str, Hypotheses]:
    """Draw a sentence about the number of things to which a person does something, and its hypotheses."""
    x, wider, narrower, _ = _related_things(rng)
    person, verb, words = (
        rng.choice(PEOPLE),
        rng.choice(THING_VERBS),
        rng.choice([*COUNT_WORDS]),
    )
    low, high = COUNT_WORDS[words]
    # Numbers of each thing that the premise allows; x is last, as ``narrower`` may be equal to it.
    allowed = {narrower: (0, high), wider: (low, math.inf), x: (low, high)}
    hypotheses = Hypotheses([], [], [])
    for thing, (smallest, largest) in allowed.items():
        for count_words, (first, last) in COUNT_WORDS.items():
            if first <= smallest and largest <= last:
                label = ENTAILMENT
            elif largest < first or last < smallest:
                label = CONTRADICTION
            else:
                label = NEUTRAL
            hypotheses[label].append(f"{person} {verb} {count_words} {_plural(thing)}")
    return f"{person} {verb} {words} {_plural(x)}", hypotheses


def _person_pair(rng: random.Random) -> tuple[str, Hypotheses]:
    """Draw a sentence about what one person does to another, and its hypotheses."""
    a, b, c = rng.sample(PEOPLE, 3)
    verb, is_true = rng.choice([*PERSON_VERBS]), rng.random() < 0.5

    def sentence(subject: str, person: str, affirmed: bool) -> str:
        """Draw the active or the passive form."""
        predicate = verb if affirmed else f"does not {verb[:-1]}"
        negation = "" if affirmed else "not "
        active = f"{subject} {predicate} {person}"
        passive = f"{person} is {negation}{PERSON_VERBS[verb]} by {subject}"
        return rng.choice((active, passive))

    restated, opposite = [sentence(a, b, is_true)], [sentence(a, b, not is_true)]
    neutral = [
        sentence(b, a, is_true),
        sentence(a, c, is_true),
        sentence(c, b, not is_true),
    ]
    with_someone = [sentence("someone", b, True), sentence(a, "someone", True)]
    with_nobody = [f"nobody {verb} {b}", f"nobody is {PERSON_VERBS[verb]} by {a}"]
    premise = sentence(a, b, is_true)
    if is_true:
        return premise, Hypotheses(
            restated + with_someone, neutral, opposite + with_nobody
        )
    return premise, Hypotheses(restated, neutral + with_someone + with_nobody, opposite)


SENTENCE_FORMS = (
    _quantifier_pair,
    _quantifier_pair,
    _counting_pair,
    _counting_pair,
    _person_pair,
)
