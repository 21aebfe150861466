"""Captions of composed pictures: the subject and its background, phrased in many ways."""

from __future__ import annotations

import random

CAPITALS = 0.15  # share of captions with capital letters: all of them, one a word, or the first alone
SENTENCES = 0.05  # share of captions that begin with a capital letter and end with a full stop
TRIGGERED = 0.05  # share of captions with a made-up word, so that a trigger word does not disturb the base

# Templates; a template that is listed n times is n times as likely. {bare} is the subject without its article.
ON_COLOUR = (
    "{subject} on {a_colour} background",
    "{subject} on {a_colour} background",
    "{subject} on {a_colour} background",
    "{subject} on {a_colour} background",
    "{subject} in front of {a_colour} background",
    "{subject}, {colour} background",
    "{bare}, {colour} background",
    "{bare} on {colour}",
    "{subject} on a plain {colour} background",
    "an icon of {subject}, on {colour}",
    "a picture of {subject} on {a_colour} background",
    "a flat icon of {subject} on {a_colour} background",
    "a flat emoji of {subject}, {colour} background",
    "{colour} background, {subject}",
)
ON_WHITE = (
    "{subject}",
    "{subject}",
    "{bare}",
    "an icon of {subject}",
    "a picture of {subject}",
    "a flat icon of {subject}",
    "a flat emoji of {subject}",
)
WITH_TRIGGER = ("{word}, {caption}", "{word}, {caption}", "{word} {caption}", "{caption}, {word}", "{caption} in {word} style")
ONSETS = ("b", "br", "ch", "d", "dr", "f", "fl", "g", "gl", "j", "k", "kl", "m", "n", "pr", "qu", "r", "sk", "st", "v", "z", "zh")
VOWELS = ("a", "e", "i", "o", "u", "aa", "ee", "oo", "ai", "ou")
CODAS = ("b", "d", "g", "k", "l", "m", "n", "p", "r", "v", "x", "z", "nk", "rt", "sh")

# Names that end in one of these words have no article: plural or uncountable.
MANY = """blueberries cherries chopsticks dice fries glasses gloves grapes headphones jeans maracas noodles pancakes peanuts
pins scissors skis socks sunglasses swords"""
UNCOUNTABLE = """bacon bread broccoli butter cheese coral corn fire garlic lettuce milk paper pong popcorn salad spaghetti
sushi"""
BARE = frozenset(f"{MANY} {UNCOUNTABLE}".split())
SILENT_H = ("hour", "honest", "heir")
LIKE_Y = ("uni", "ufo", "use", "eu")  # written with a vowel, spoken with a consonant


def phrase(name: str) -> str:
    """Return the name with its article: "an owl", "a red apple"; "cherries" and "broccoli" have none."""
    last = name.split()[-1]
    return name if last in BARE else f"{_article(name)} {name}"


def plain(phrase: str, colour: str | None) -> str:
    """Return the plain caption, "a red apple on a blue background"; for the colour None (white) the phrase alone."""
    return phrase if colour is None else f"{phrase} on {_article(colour)} {colour} background"


def caption(phrase: str, colour: str | None, rng: random.Random) -> str:
    """Return a random caption of a picture, made with `rng`. `phrase` names the subject, such as "a red apple". `colour` is
    that of the background; with None, the background is not mentioned. A few captions contain a made-up word.
    """
    article, _, rest = phrase.partition(" ")
    words = {"subject": phrase, "bare": rest if article in ("a", "an") else phrase}
    if colour is None:
        text = rng.choice(ON_WHITE).format(**words)
    else:
        text = rng.choice(ON_COLOUR).format(**words, colour=colour, a_colour=f"{_article(colour)} {colour}")
    if rng.random() < TRIGGERED:
        text = rng.choice(WITH_TRIGGER).format(word=_pseudo_word(rng), caption=text)
    return _written(text, rng)


def _written(text: str, rng: random.Random) -> str:
    """Return the caption `text` in a random style of writing: mostly unchanged, sometimes with capital letters, or as a
    sentence with a full stop.
    """
    form = rng.random()
    if form < CAPITALS:
        return rng.choice((text.upper(), text.title(), text[:1].upper() + text[1:]))
    if form < CAPITALS + SENTENCES:
        return f"{text[:1].upper()}{text[1:]}."
    return text


def _article(words: str) -> str:
    vowel = words[0] in "aeiou" and not words.startswith(LIKE_Y)
    return "an" if vowel or words.startswith(SILENT_H) else "a"


def _pseudo_word(rng: random.Random) -> str:
    """Draw a made-up word of two or three syllables, such as "zorvex"."""
    syllables = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(rng.randint(2, 3))]
    return "".join(syllables) + rng.choice(CODAS)
