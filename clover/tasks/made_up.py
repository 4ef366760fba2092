"""Wordings that training makes up, so that a sentence is read and not remembered.

A held-out wording tells names and values with words around them, and in an order, that no wording of
training has. So training takes its own wordings apart and joins pieces of different ones, now and then
with a word in place of another that means nothing: what is left to go by are the names and values
themselves. What comes out need not be good English. Nothing that a held-out wording says comes out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from clover.tasks.parted import Parted, choose
from clover.tasks.splits import Split
from clover.tasks.words import invented_word

_SHARE = 0.5  # of training's wordings
_NEW_WORDS = 0.4  # of these, how many bind name and value by a word that means nothing
_FACT = re.compile(
    r"(?P<before>[^{]*)\{(?P<first>\w+)\}(?P<between>[^{]*)\{(?P<second>\w+)\}(?P<after>[^{]*)"
)
_REQUEST = re.compile(r"(?P<opener>[^{]*)\{act\} (?P<object>.*)", re.DOTALL)
_ALTERNATIVES = re.compile(r"\[([^][]*)\]")
_UNHEARD = frozenset(("a", "an", "the", "its"))


@dataclass(frozen=True, slots=True)
class Style:
    """How a list of facts is written: before it, one fact, between two, behind it."""

    lead: str
    fact: str
    joint: str
    end: str

    @property
    def example(self) -> str:
        """Two facts in this style."""
        return f"{self.lead}{self.fact}{self.joint}{self.fact}{self.end}"


class Sentences:
    """Sentences that tell `{name}` and `{value}`."""

    def __init__(self, listed: Parted[str]) -> None:
        self._listed = listed
        self._refused = gists(listed.held_out)

    def draw(self, rng: random.Random, split: Split) -> str:
        """Returns one of the list or, for training, one of pieces."""
        if not _makes_up(rng, split):
            return self._listed.draw(rng, split)
        while True:
            drawn = [choose(rng, rng.choice(self._listed.train)) for _ in range(3)]
            start, middle, end = (part for each in drawn if (part := _FACT.fullmatch(each)))
            sentence = start["before"] + _bind(rng, middle[0]) + end["after"]
            if gist(sentence) not in self._refused:
                return sentence


class Styles:
    """Styles to list facts in."""

    def __init__(self, listed: Parted[Style]) -> None:
        self._listed = listed
        self._refused = gists(style.example for style in listed.held_out)

    def draw(self, rng: random.Random, split: Split) -> Style:
        """Returns one of the list or, for training, one of pieces."""
        if not _makes_up(rng, split):
            return self._listed.draw(rng, split)
        while True:
            frame, fact, joint = (rng.choice(self._listed.train) for _ in range(3))
            style = Style(frame.lead, _bind(rng, fact.fact), joint.joint, frame.end)
            if gist(style.example) not in self._refused:
                return style


class Requests:
    """Requests to `{act}`, some of them opened as those of `others` are."""

    def __init__(self, listed: Parted[str], others: Sequence[Parted[str]]) -> None:
        self._listed = listed
        self._others = others
        self._refused = gists(wording for each in (listed, *others) for wording in each.held_out)

    def draw(self, rng: random.Random, split: Split) -> str:
        """Returns one of the list or, for training, one with another opening."""
        if not _makes_up(rng, split):
            return self._listed.draw(rng, split)
        request = rng.choice(self._listed.train)
        parts = _REQUEST.fullmatch(request)
        while parts is not None:
            opening = _REQUEST.fullmatch(rng.choice(rng.choice(self._others).train))
            if opening is None:
                continue
            request = f"{opening['opener']}{{act}} {parts['object']}"
            if not gists([request]) & self._refused:
                break
        return request


def _makes_up(rng: random.Random, split: Split) -> bool:
    return split == "train" and rng.random() < _SHARE


def _bind(rng: random.Random, fact: str) -> str:
    """Returns the words from a fact's first slot to its second, or a new word between both."""
    parts = _FACT.fullmatch(fact)
    assert parts, f"not a fact: {fact}"
    slots = [parts["first"], parts["second"]]
    between = parts["between"]
    if rng.random() < _NEW_WORDS:
        rng.shuffle(slots)
        words = [invented_word(rng), *between.split()]
        between = f" {' '.join(rng.sample(words[:2], rng.choice((1, len(words[:2])))))} "
    return f"{{{slots[0]}}}{between}{{{slots[1]}}}"


def gist(wording: str) -> str:
    """Returns the words and slots of a wording without alternatives, less articles and punctuation."""
    words = re.findall(r"\w+|\{\w+\}|[=]", wording.lower())
    return " ".join(word for word in words if word not in _UNHEARD)


def gists(wordings: Iterable[str]) -> set[str]:
    """Returns the gists of wordings in all their alternatives."""
    found = set[str]()
    for wording in wordings:
        match = _ALTERNATIVES.search(wording)
        if match is None:
            found.add(gist(wording))
        else:
            rest = wording[match.end() :]
            found |= gists(
                f"{wording[: match.start()]}{word}{rest}" for word in match[1].split("|")
            )
    return found
