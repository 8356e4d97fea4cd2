"""Words and codes to put into generated texts: word pairs, uuids and made-up words, all from a given generator."""

from __future__ import annotations

import random
import uuid
from itertools import product

__all__ = ["ADJECTIVES", "NOUNS", "made_up_words", "uuids", "word_pairs"]

_SYLLABLES = tuple(f"{consonant}{vowel}" for consonant, vowel in product("bdfghjklmnprstvwz", "aeiou"))


def word_pairs(rng: random.Random, count: int) -> list[str]:
    """`count` different adjective-noun keys ("amber-falcon"); no word twice while words last.

    There are some six and a half thousand pairs; `count` has to stay well below.
    """
    pairs: dict[str, None] = {}
    while len(pairs) < count:
        adjectives, nouns = (rng.sample(words, len(words)) for words in (ADJECTIVES, NOUNS))
        pairs.update(dict.fromkeys(f"{a}-{n}" for a, n in zip(adjectives, nouns, strict=False)))
    return list(pairs)[:count]


def uuids(rng: random.Random, count: int) -> list[str]:
    """`count` different random UUIDs (version 4 of RFC 9562)."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[str(uuid.UUID(int=rng.getrandbits(128), version=4))] = None
    return list(found)


def made_up_words(rng: random.Random, count: int) -> list[str]:
    """`count` different made-up words of three syllables ("tavilo"), of some 600,000.

    All have six letters, so that none occurs inside another.
    """
    base = len(_SYLLABLES)
    numbers = rng.sample(range(base**3), count)
    return [_SYLLABLES[n // base**2] + _SYLLABLES[n // base % base] + _SYLLABLES[n % base] for n in numbers]


# fmt: off
ADJECTIVES = (
    "amber", "ancient", "bold", "brave", "brief", "bright", "brisk", "calm", "careful", "cheerful",
    "clever", "cold", "cosy", "crisp", "curious", "daring", "deep", "distant", "early", "easy", "fair",
    "famous", "fancy", "fierce", "fresh", "gentle", "giant", "glad", "golden", "graceful", "happy",
    "hidden", "honest", "humble", "jolly", "keen", "kind", "lively", "lonely", "loud", "lucky", "merry",
    "mighty", "modest", "narrow", "noble", "odd", "patient", "plain", "polite", "proud", "quick",
    "quiet", "rapid", "rare", "royal", "silent", "simple", "slow", "smooth", "steady", "strong",
    "sweet", "tall", "tidy", "warm", "wild", "wise",
)
NOUNS = (
    "anchor", "apple", "badge", "basket", "beacon", "bell", "bottle", "bridge", "brush", "bucket",
    "button", "cabin", "candle", "canyon", "carpet", "castle", "cedar", "circle", "cliff", "clock",
    "cloud", "compass", "copper", "coral", "desk", "dragon", "drum", "engine", "falcon", "feather",
    "fiddle", "forest", "garden", "glove", "hammer", "harbor", "helmet", "island", "jacket", "kettle",
    "ladder", "lantern", "lemon", "magnet", "maple", "meadow", "mirror", "needle", "orchid", "paddle",
    "pebble", "pepper", "pillow", "planet", "pocket", "rabbit", "ribbon", "river", "rocket", "saddle",
    "scarf", "shadow", "signal", "spoon", "statue", "sugar", "table", "temple", "ticket", "tiger",
    "tower", "tunnel", "valley", "violin", "wagon", "whistle", "window",
)
# fmt: on
