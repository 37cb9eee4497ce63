"""Stories of people who move about and carry things: what a question about them needs is told in several sentences.

In the manner of bAbI (Weston et al. 2015, arXiv:1502.05698) and of BABILong (Kuratov et al. 2024, arXiv:2406.10149),
which hides such stories in long text; the wording is our own. A world is kept while a story is told, and it answers.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

SENTENCES = 12  # of a story, however long the text around it
_CAST = (4, 5, 3)  # people, places and things of one story; few, so that they meet
_NAMES = "Aneta Bruno Carmen Dmitri Esther Farid Greta Hugo Ines Jonas Keiko Leila Milan Nadia Oskar Petra"
_ROOMS = "attic bakery cellar chapel garage garden kitchen library market office stable workshop"
_OBJECTS = "basket bottle candle coin compass drum hammer ladder lamp letter mirror rope teapot violin"
_PEOPLE, _PLACES, _THINGS = _NAMES.split(), _ROOMS.split(), _OBJECTS.split()
_MOVED = ("walked over to", "came into", "went across to", "arrived in")
_TOOK = ("took", "got hold of", "now carries")
_LEFT = ("put down", "let go of", "left behind")


@dataclass(frozen=True)
class Story:
    """Sentences in order; the question's answer follows from those numbered in `supporting` (ascending) alone."""

    sentences: list[str]
    question: str
    lead: str
    answer: str
    supporting: list[int]


@dataclass(frozen=True)
class _Stay:
    """A thing's time at a place. moves: of whoever had it there, each tells the place; named: the last to name it."""

    place: str
    moves: frozenset[int]
    named: int


class _World:
    """Who is where and who carries what, with the numbers of the sentences that say so."""

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self.at: dict[str, tuple[str, int]] = {}  # person: place, sentence
        self.held: dict[str, tuple[str, int]] = {}  # thing: person, sentence
        self.stays: dict[str, list[_Stay]] = {}  # thing: in order

    def move(self, person: str, place: str, verb: str) -> None:
        number = self._tell(f"{person} {verb} the {place}.")
        self.at[person] = place, number
        for thing, (holder, since) in self.held.items():
            if holder == person:
                self.stays[thing].append(_Stay(place, frozenset({number}), since))

    def take(self, person: str, thing: str, verb: str) -> None:
        number = self._tell(f"{person} {verb} the {thing}.")
        self.held[thing] = person, number
        self._found(thing, person, number)

    def leave(self, person: str, thing: str, verb: str) -> None:
        number = self._tell(f"{person} {verb} the {thing}.")
        del self.held[thing]
        self._found(thing, person, number)

    def hand_over(self, person: str, thing: str, other: str) -> None:
        number = self._tell(f"{person} handed the {thing} to {other}.")
        self.held[thing] = other, number
        self._found(thing, other, number)

    def carried(self, person: str) -> list[str]:
        return [thing for thing, (holder, _) in self.held.items() if holder == person]

    def within_reach(self, person: str, things: list[str]) -> list[str]:
        """Things that nobody carries and that lie where the person is, or of which nothing has been told yet."""
        free = [thing for thing in things if thing not in self.held]
        return [t for t in free if t not in self.stays or self.stays[t][-1].place == self.at[person][0]]

    def beside(self, person: str) -> list[str]:
        return [other for other in self.at if other != person and self.at[other][0] == self.at[person][0]]

    def _tell(self, sentence: str) -> int:
        self.sentences.append(sentence)
        return len(self.sentences) - 1

    def _found(self, thing: str, person: str, number: int) -> None:
        """Sentence `number` tells of a thing where this person is."""
        place, move = self.at[person]
        stays = self.stays.setdefault(thing, [_Stay(place, frozenset(), number)])
        stays[-1] = _Stay(place, stays[-1].moves | {move}, number)


def tell(pick: random.Random) -> Story:
    """A story of SENTENCES sentences and a question: where a thing is (two sentences say it), or was before (three)."""
    asks = pick.choice([_where_now, _where_before])
    while True:
        people, places, things = map(pick.sample, (_PEOPLE, _PLACES, _THINGS), _CAST)
        world = _World()
        while len(world.sentences) < SENTENCES:
            _go_on(world, pick, people, places, things)
        if found := asks(world):
            return pick.choice(found)


def _go_on(world: _World, pick: random.Random, people: list[str], places: list[str], things: list[str]) -> None:
    """One more sentence, of any kind that the world allows; everyone comes to some place first."""
    person = pick.choice(people)
    here = world.at[person][0] if person in world.at else None
    carried, near = world.carried(person), world.beside(person) if here else []
    free = world.within_reach(person, things) if here else []
    kinds = ["move", *["take"] * bool(free), *["leave"] * bool(carried), *["hand over"] * bool(carried and near)]
    kind = pick.choice(kinds)
    if kind == "move":
        world.move(person, pick.choice([place for place in places if place != here]), pick.choice(_MOVED))
    elif kind == "take":
        world.take(person, pick.choice(free), pick.choice(_TOOK))
    elif kind == "leave":
        world.leave(person, pick.choice(carried), pick.choice(_LEFT))
    else:
        world.hand_over(person, pick.choice(carried), pick.choice(near))


def _where_now(world: _World) -> list[Story]:
    """Of each thing: what is told of it last, and the move of the person it speaks of, support it."""
    found = []
    for thing, (*_, stay) in world.stays.items():
        if len(stay.moves) == 1:  # else there are several ways to know
            question, lead = f"Where is the {thing} now?", f"The {thing} is now in the "
            found.append(Story(world.sentences, question, lead, stay.place, sorted({stay.named, *stay.moves})))
    return found


def _where_before(world: _World) -> list[Story]:
    """Of each thing that came to a place once: how it was carried, the move to there and the one before support it."""
    found = []
    for thing, stays in world.stays.items():
        places = [stay.place for stay in stays]
        for before, stay in pairwise(stays):
            if places.count(stay.place) == len(before.moves) == len(stay.moves) == 1:
                question = f"Where was the {thing} before it was in the {stay.place}?"
                lead = f"Before it was in the {stay.place}, the {thing} was in the "
                supporting = sorted({before.named, *before.moves, *stay.moves})
                found.append(Story(world.sentences, question, lead, before.place, supporting))
    return found
