from __future__ import annotations

import random
from itertools import islice

import pytest

from kveval.facts import make_world
from kveval.words import made_up_words, uuids


@pytest.mark.parametrize("size", [1, 40, 2000])
def test_every_name_has_its_facts_in_its_own_document_only(size: int) -> None:
    world = make_world(random.Random(size), size)
    assert size <= len(world.documents) <= 1.1 * size + 8
    assert list(world.documents) == list(world.facts)
    for name, facts in islice(world.facts.items(), 50):
        assert all(other in world.documents[name] for other in facts.values())
        assert world.documents[name].startswith(f"{name} ")
        assert name not in facts.values()
    rivers = [facts["river"] for facts in world.facts.values() if "river" in facts]
    assert len(set(rivers)) == len(rivers) > 0
    assert not set(rivers) & set(world.facts)


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_chains_follow_the_facts_over_documents_of_their_own(hops: int) -> None:
    world = make_world(random.Random(0), 200)
    chains = list(islice(world.chains(random.Random(1), hops), 10))
    assert len(chains) == 10
    for chain in chains:
        name = chain.names[0]
        for relation, following in zip(chain.relations, chain.names[1:], strict=True):
            name = world.facts[name][relation]
            assert name == following
        assert (chain.answer, len(chain.relations), len(set(chain.names))) == (name, hops, hops + 1)
        assert chain.answer not in chain.question
        assert chain.question.endswith(f" of {chain.names[0]}?")
        assert [chain.question.count(f"the {relation} of") > 0 for relation in chain.relations] == [True] * hops
    documents = [name for chain in chains for name in chain.names[:-1]]
    assert len(set(documents)) == len(documents)


def test_chains_end_when_no_documents_are_left() -> None:
    world = make_world(random.Random(0), 20)
    chains = list(world.chains(random.Random(1), 2))
    assert 3 < len(chains) <= len(world.facts) // 2


def test_words_are_different_and_none_is_part_of_another() -> None:
    words = made_up_words(random.Random(0), 5000)
    assert len(set(words)) == 5000
    assert {len(word) for word in words} == {6}
    assert len(set(uuids(random.Random(0), 1000))) == 1000
