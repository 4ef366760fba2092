"""The words that tasks are made of, and the one rule that says which of them are held out.

A word is held out when its hash says so, whatever role it plays: name, noun, parameter or value.
Synthetic words, built from syllables, make sure that a model must copy and cannot memorise.
"""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterable
from dataclasses import dataclass

from clover.tasks.splits import Split

HELD_OUT_EVERY = 6  # one word in six is never seen in training
# Chosen so that no word which questions and tool schemas are phrased with ("price", "list") is held
# out, and every list below has words on both sides.
_SALT = b"182882"

VERBS = {  # verb of the tool name: other ways in which a user says it
    "add": ("insert", "put in"),
    "book": ("reserve",),
    "call": ("ring", "phone"),
    "cancel": ("drop", "call off"),
    "check": ("verify", "inspect"),
    "close": ("shut",),
    "copy": ("duplicate",),
    "create": ("make", "build"),
    "delete": ("remove", "erase"),
    "find": ("look up", "search for"),
    "get": ("show me", "give me"),
    "move": ("shift",),
    "open": ("bring up",),
    "order": ("buy", "purchase"),
    "play": ("put on",),
    "print": ("print out",),
    "read": ("go through",),
    "save": ("store", "keep"),
    "send": ("mail", "pass on"),
    "set": ("change", "adjust"),
    "share": ("publish",),
    "start": ("launch", "begin"),
    "stop": ("halt", "end"),
    "update": ("refresh", "revise"),
}

_NOUNS = """
account alarm album alert archive article backup badge balance banner battery bike bill blog boat
bonus bridge budget bus cable calendar camera car card cart channel chart chat class client clock
coffee comment contact contract course cup curtain desk device diary dinner doctor door draft
drawing drive engine event fan farm feed fence film filter flight folder food forum fridge game
garage garden gate gift graph guide guitar heater hotel house image invoice job journal kettle
kiosk lamp laptop lesson letter library light loan lock lunch machine map market meal medal memo
menu message meter mirror module monitor motor movie museum network note notice nurse office oven
page paint parcel parking party patient payment phone photo piano picture pipe plan plant player
podcast poem policy pool post printer product profile program project pump puzzle quiz radio
recipe record refund report rocket route salary scanner school screen script sensor server shift
shop signal song speaker station stock store story stove street survey table task taxi team
thermostat ticket timer token tour toy track trade train trip truck tunnel vault vehicle video
visa volume wallet washer watch weather website window wiki
"""

_NAMES = """
Adam Alice Amir Anna Anton Bella Ben Bruno Carla Cecil Chen Clara Daniel Diana Dora Edgar Ella Emil
Erik Eva Felix Fiona Frank Gina Greta Hanna Hugo Ida Igor Irene Ivan Jack Jana Jonas Julia Karl
Kate Kenji Kim Laura Leo Lina Louis Lucy Marco Maria Max Mei Mila Nadia Nina Noah Nora Olga Omar
Oscar Paula Pedro Petra Quinn Rafael Rita Rosa Ruth Sam Sara Simon Sofia Stefan Tara Theo Tina Tom
Ugo Uma Vera Victor Wanda Wendy Xenia Yara Yusuf Zara Zoe
"""

_CITIES = """
Athens Berlin Bogota Boston Cairo Chicago Dakar Delhi Denver Dublin Geneva Hanoi Havana Helsinki
Istanbul Jakarta Kyoto Lagos Lima Lisbon London Madrid Manila Miami Milan Moscow Mumbai Munich
Nairobi Naples Oslo Paris Prague Quito Rabat Riga Rome Seoul Sofia Sydney Taipei Tallinn Tokyo
Toronto Tunis Vienna Warsaw Zagreb Zurich
"""

# Grouped by first letter, about six each: sorting needs words whose first letters differ.
_THINGS = """
apple anchor arrow amber acorn almond banana basket beacon berry bottle butter candle carrot cherry
copper cotton cactus dagger desert dragon dolphin daisy donkey eagle ember emerald engine elbow
echo falcon feather forest fossil flower fiddle ginger goblet granite grape guitar glove hammer
harbor helmet honey hazel hornet iron island ivory indigo igloo iris jacket jasmine jungle jewel
jaguar juniper kettle kitten kernel kiwi koala knight ladder lemon lantern lizard lotus lime magnet
maple marble meadow melon mango needle nickel novel nutmeg nectar north ocean olive onion orchid
otter oyster paddle pepper pearl pigeon planet plum quartz quiver quilt quail queen quarry rabbit
ribbon river rocket ruby raven saddle salmon silver spider spruce saffron table temple thistle
tiger timber tulip umbrella uncle unicorn urchin usher urn valley velvet violet vanilla vessel vine
wagon walnut willow winter wolf wheat xenon xylem xerox yacht yarrow yellow yogurt yonder yeast
zebra zinc zipper zephyr zenith zigzag
"""

_COLORS = """
red blue green black white orange purple brown gray pink cyan teal navy gold crimson scarlet
turquoise lilac beige olive
"""

_CHOICES = """
low high fast slow light dark small large soft loud warm cold auto manual public private daily
weekly monthly short long plain bold quiet strict loose new used full empty left right upper lower
open closed early late inner outer sharp flat rough smooth wide narrow deep shallow
"""

CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"
ENDINGS = "nrls"
_ENDED = 0.25  # share of synthetic words that end with a consonant


@functools.cache
def is_held_out(word: str) -> bool:
    """Returns whether `word` may appear only in held-out tasks. Case does not matter."""
    digest = hashlib.blake2b(word.lower().encode(), digest_size=4, salt=_SALT).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_EVERY == 0


@dataclass(frozen=True, slots=True)
class Pool:
    """A list of words, parted into those of training and those held out."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]

    @classmethod
    def of(cls, words: Iterable[str] | str) -> Pool:
        """Returns the pool of `words`, or of the words of a text, parted by `is_held_out`."""
        listed = tuple(dict.fromkeys(words.split() if isinstance(words, str) else words))
        return cls(
            tuple(word for word in listed if not is_held_out(word)),
            tuple(word for word in listed if is_held_out(word)),
        )

    def words(self, split: Split) -> tuple[str, ...]:
        """Returns the words of one side."""
        return self.held_out if split == "heldout" else self.train

    def draw(self, rng: random.Random, split: Split) -> str:
        """Returns one word of one side."""
        return rng.choice(self.words(split))


NOUNS = Pool.of(_NOUNS)
NAMES = Pool.of(_NAMES)
CITIES = Pool.of(_CITIES)
THINGS = Pool.of(_THINGS)
COLORS = Pool.of(_COLORS)
CHOICES = Pool.of(_CHOICES)


_LISTED = tuple(
    dict.fromkeys(
        word.lower()
        for pool in (NOUNS, NAMES, CITIES, THINGS, COLORS, CHOICES)
        for word in pool.train
    )
)
_INVENTED_LENGTHS = range(4, 11)
# Share of training's values: a listed word that is held out is spelled like these, not like `kaluno`
INVENTED_VALUES = 0.25


def invented_word(rng: random.Random) -> str:
    """Returns a word for training that begins like one of the lists and ends like another, `lanoon`.

    Its pieces are those of real words, their sequence is new: like a held-out word it can only be
    copied, piece by piece.
    """
    while True:
        first, second = rng.sample(_LISTED, 2)
        word = first[: rng.randrange(1, len(first))] + second[rng.randrange(1, len(second)) :]
        if len(word) in _INVENTED_LENGTHS and word not in _LISTED and not is_held_out(word):
            return word


def synthetic_word(rng: random.Random, split: Split) -> str:
    """Returns a pronounceable word of two or three syllables that means nothing, as `kaluno`."""
    while True:
        syllables = rng.choice((2, 2, 3))
        word = "".join(rng.choice(CONSONANTS) + rng.choice(VOWELS) for _ in range(syllables))
        if rng.random() < _ENDED:
            word += rng.choice(ENDINGS)
        if is_held_out(word) == (split == "heldout"):
            return word


@dataclass(frozen=True, slots=True)
class Mix:
    """A source of words: listed ones, and synthetic ones with probability `synthetic`."""

    pool: Pool
    synthetic: float
    capital: bool = False

    def draw(self, rng: random.Random, split: Split) -> str:
        """Returns one word of one side, in training often a made-up one."""
        if split == "train" and rng.random() < INVENTED_VALUES:
            word = invented_word(rng).lower()
        elif rng.random() < self.synthetic:
            word = synthetic_word(rng, split)
        else:
            return self.pool.draw(rng, split)
        return word.capitalize() if self.capital else word

    def sample(self, rng: random.Random, split: Split, count: int) -> list[str]:
        """Returns `count` different words of one side."""
        found: dict[str, None] = {}
        while len(found) < count:
            found[self.draw(rng, split)] = None
        return list(found)


PEOPLE = Mix(NAMES, synthetic=0.4, capital=True)
PLACES = Mix(CITIES, synthetic=0.4, capital=True)
OBJECTS = Mix(THINGS, synthetic=0.4)
