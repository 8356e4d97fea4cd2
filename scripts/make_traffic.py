"""Write configs/traffic/example.jsonl: a made-up support desk's requests, as an example of the task `traffic`.

Every desk is a folder of notes about orders, products and depots, and two questions about them: one that a single note
answers, and one that takes two notes. `python scripts/make_traffic.py` writes the same file every time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parent.parent / "configs" / "traffic" / "example.jsonl"
ORDERS_OF_A_DESK = (2, 3, 4, 5, 6, 8, 10, 12, 14, 16)
"""Desks come in these sizes, over and over: some 250 to 1,900 tokens."""
DESKS = 30

FIRST = ("Ada", "Bilal", "Chiara", "Dusan", "Elin", "Farah", "Goran", "Hana", "Ivo", "Jamila", "Kofi", "Lena")
LAST = ("Arslan", "Bergman", "Costa", "Dvorak", "Eriksen", "Fontaine", "Grabow", "Halim", "Iversen", "Jansen", "Kovac")
THINGS = ("kettle", "desk lamp", "bicycle pump", "tent", "blender", "keyboard", "rucksack", "heater", "camera", "drill")
MAKES = ("Alder", "Birch", "Cypress", "Elm", "Hazel", "Larch", "Maple", "Rowan", "Spruce", "Willow")
TOWNS = ("Aalborg", "Brno", "Cadiz", "Dijon", "Essen", "Faro", "Ghent", "Hull", "Izmir", "Jena", "Kaunas", "Linz")
TROUBLES = (
    "arrived with a dent in its side",
    "came without the second part of the set",
    "stopped working after four days",
    "was left with a neighbour who has moved since",
    "has a cable that is too short for the room",
    "makes a noise that the leaflet does not mention",
)
STEPS = (
    "The customer sent two photographs and asked for a call in the afternoon.",
    "We offered a refund or a new one; the customer will decide within the week.",
    "A colleague looked at the case and saw no sign of misuse.",
    "The carrier was asked for its record of the delivery and has not replied yet.",
    "Nothing else is open on this account.",
)
TASK = "You work at a support desk. Read the notes, then answer the question with the name or number alone."


def requests() -> Iterator[dict[str, Any]]:
    """Every request of the file, in its order."""
    for number in range(DESKS):
        yield from _desk(number, ORDERS_OF_A_DESK[number % len(ORDERS_OF_A_DESK)], random.Random(f"desk {number}"))


def _desk(number: int, orders: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    customers = rng.sample([f"{first} {last}" for first in FIRST for last in LAST], orders)
    products = rng.sample([f"{make} {thing}" for make in MAKES for thing in THINGS], orders)
    tickets = [str(n) for n in rng.sample(range(100_000, 1_000_000), orders)]
    depots = [f"{rng.choice(TOWNS)} {rng.randrange(2, 40)}" for _ in range(orders)]
    notes = []
    for customer, product, ticket, depot in zip(customers, products, tickets, depots, strict=True):
        notes.append(
            f"Ticket {ticket}. {customer} bought a {product} on {rng.randrange(1, 29)} March. It "
            f"{rng.choice(TROUBLES)}. {' '.join(rng.sample(STEPS, 2))}"
        )
        notes.append(f"Stock. The {product} is kept in depot {depot}; {rng.randrange(3, 90)} are left.")
    rng.shuffle(notes)
    text = "\n\n".join(notes)
    one, two = rng.sample(range(orders), 2)
    asked = (
        (f"What is the number of {customers[one]}'s ticket?", [tickets[one]]),
        (f"In which depot is the product that {customers[two]} bought kept?", [depots[two], f"depot {depots[two]}"]),
    )
    for place, (question, answers) in enumerate(asked):
        yield {
            "id": f"desk-{number:02d}-{'ab'[place]}",
            "cluster": f"desk-{number:02d}",
            **_asked_as(number, f"{text}\n\n", question),
            **({"answer": answers[0]} if len(answers) == 1 else {"answers": answers}),
        }


def _asked_as(number: int, text: str, question: str) -> dict[str, Any]:
    """One prompt; or, for every third desk, a conversation that was going on."""
    if number % 3:
        return {"prompt": f"{TASK}\n\n{text}{question}"}
    return {
        "messages": [
            {"role": "system", "content": TASK},
            {"role": "user", "content": f"{text}How many notes are these?"},
            {"role": "assistant", "content": str(text.count("\n\n"))},
            {"role": "user", "content": question},
        ]
    }


def lines() -> str:
    """The file's text."""
    return "".join(json.dumps(request, ensure_ascii=False) + "\n" for request in requests())


if __name__ == "__main__":
    EXAMPLE.parent.mkdir(exist_ok=True)
    EXAMPLE.write_text(lines(), encoding="utf-8")
