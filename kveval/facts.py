"""Made-up worlds of people, towns, companies and regions: documents, and questions with one answer each.

Every entity has one document, and every fact stands in the document of its subject and nowhere else. A relation gives
one object per subject, so a chain of relations ("the mayor of the birthplace of ...") leads to one answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kveval.words import made_up_words

__all__ = ["Chain", "World", "make_world"]


@dataclass(frozen=True)
class _Kind:
    """A kind of entity.

    Attributes:
        share: Of a hundred entities, how many are of this kind.
        relations: Relation -> kind of its object, "" for a name without a document.
        text: The document, with the subject as {name} and objects by relation.
    """

    share: int
    relations: Mapping[str, str]
    text: str


_KINDS = {
    "person": _Kind(
        50,
        {"birthplace": "town", "home": "town", "teacher": "person", "employer": "company"},
        "{name} was born in {birthplace} and now has a home in {home}. "
        "The teacher of {name} was {teacher}, and the employer of {name} is {employer}.",
    ),
    "town": _Kind(
        25,
        {"region": "region", "mayor": "person", "river": ""},
        "{name} is a town in the region of {region}, on the river {river}. The mayor of {name} is {mayor}.",
    ),
    "company": _Kind(
        15,
        {"seat": "town", "founder": "person", "director": "person"},
        "{name} is a company with its seat in {seat}. "
        "The founder of {name} was {founder}, and its director today is {director}.",
    ),
    "region": _Kind(
        10,
        {"capital": "town", "governor": "person"},
        "{name} is a region with {capital} as its capital. The governor of {name} is {governor}.",
    ),
}


@dataclass(frozen=True)
class Chain:
    """A question: `relations`, followed one after the other from `names[0]`, lead over `names[1:]` to the answer."""

    relations: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def question(self) -> str:
        """The question, as a sentence."""
        nested = " of ".join(f"the {relation}" for relation in reversed(self.relations))
        return f"What is the name of {nested} of {self.names[0]}?"

    @property
    def answer(self) -> str:
        """The name that the chain ends at."""
        return self.names[-1]


@dataclass(frozen=True)
class World:
    """Entities by name, each with its facts (relation -> name) and its document."""

    facts: Mapping[str, Mapping[str, str]]
    documents: Mapping[str, str]

    def chains(self, rng: random.Random, hops: int) -> Iterator[Chain]:
        """Random chains of `hops` relations, no two over the same document; their names are all different."""
        used: dict[str, None] = {}
        for start in rng.sample(list(self.facts), len(self.facts)):
            chain = self._chain(rng, start, hops, used)
            if chain is not None:
                used.update(dict.fromkeys(chain.names[:-1]))
                yield chain

    def _chain(self, rng: random.Random, start: str, hops: int, used: Collection[str]) -> Chain | None:
        """A chain from `start`, or None where its random walk comes to a document of `used` or of its own."""
        relations: list[str] = []
        names = [start]
        for _ in range(hops):
            if names[-1] in used or names[-1] not in self.facts:
                return None
            relation, name = rng.choice(list(self.facts[names[-1]].items()))
            if name in names:
                return None
            relations.append(relation)
            names.append(name)
        return Chain(tuple(relations), tuple(names))


def make_world(rng: random.Random, size: int) -> World:
    """A world of at least `size` entities. No name is part of another.

    Args:
        rng: The world's generator.
        size: Entities, each with a document of some thirty words.
    """
    counts = {kind: -(-size * what.share // 100) + 1 for kind, what in _KINDS.items()}
    words = iter([word.capitalize() for word in made_up_words(rng, 2 * counts["person"] + 2 * sum(counts.values()))])
    makers: dict[str, Callable[[], str]] = {"person": lambda: f"{next(words)} {next(words)}"}
    names = {kind: [makers.get(kind, words.__next__)() for _ in range(count)] for kind, count in counts.items()}
    facts = {
        name: {
            relation: _other(rng, names[other], name) if other else next(words)
            for relation, other in _KINDS[kind].relations.items()
        }
        for kind in _KINDS
        for name in names[kind]
    }
    documents = {name: _KINDS[kind].text.format(name=name, **facts[name]) for kind in _KINDS for name in names[kind]}
    return World(facts, documents)


def _other(rng: random.Random, names: Sequence[str], name: str) -> str:
    """One of the names, but not `name`: nobody is their own teacher."""
    while (found := rng.choice(names)) == name:
        pass
    return found
