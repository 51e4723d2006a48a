"""Prompts that the target answers, so that a draft head can learn its way of writing.

Three groups that share neither a subject nor a way of asking: to train on, to choose by, and one that
nothing is chosen by, for the figure that is reported. All text is written for this project.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

SPLITS: Final = ("train", "validation", "test")

# How a text becomes a prompt: a conversation by the model's template, one without the system message
# that the template puts first, or a text to go on with.
CHAT, BARE_CHAT, OPENING = "chat", "bare chat", "opening"


@dataclass(frozen=True)
class Prompt:
    """A prompt before it is tokenized.

    Attributes
    ----------
    kind : {"chat", "bare chat", "opening"}
        How to turn `text` into tokens.
    text : str
        What a user says, or the beginning of a text.
    """

    kind: str
    text: str


def _lines(text: str) -> tuple[str, ...]:
    return tuple(line.strip() for line in text.strip().splitlines() if line.strip())


def _fields(text: str) -> tuple[str, ...]:
    return tuple(" ".join(field.split()) for field in text.split("|") if field.strip())


_TRAIN_REQUESTS: Final = _lines(
    """
    Explain {} to someone who has never heard of it.
    What is the most important thing to know about {}?
    Write a short story in which {} plays a part.
    Give me five facts about {}.
    Tell me about {} in one paragraph.
    Write a poem about {}.
    How would you describe {} to a child?
    List three advantages and three disadvantages of {}.
    Why do people care about {}?
    What are the basics of {}?
    I have to give a talk about {}. Write the opening for me.
    Write a conversation between a teacher and a student about {}.
    What is the history of {}?
    Name some common misunderstandings about {}.
    Make a quiz with four questions and answers about {}.
    How has {} changed over the last hundred years?
    Write an email to a friend about {}.
    What questions should I ask about {}?
    Summarize what is known about {}.
    Write step by step instructions for someone new to {}.
    What is the difference between {} and what people expect of it?
    Give an example that shows {} in everyday life.
    Write a product review that mentions {}.
    Make a list of ten words related to {} and explain each.
    Is {} a good subject for a school project? Explain.
    Plan a one hour lesson on {}.
    Write a news report about {}.
    What would you tell a visitor who asks about {}?
    Help me understand {}.
    What problems come up with {}, and how are they solved?
    Write a diary entry by someone who loves {}.
    Compare {} with something that is like it.
    Write a short Python program that has to do with {}, and explain it.
    Who should learn about {}, and why?
    Describe {} in exactly three sentences.
    Write a title and an outline for a book about {}.
    """
)

_TRAIN_SUBJECTS: Final = _fields(
    """
    photosynthesis|the French Revolution|black holes|baking bread|a robot that wants a friend|the stock
    market|chess|machine learning|gravity|the deep sea|a dragon who cannot fly|electric cars|yoga|rain|
    binary search|the climate|ancient Rome|volcanoes|coffee|football|solar power|theatre|vaccines|
    dinosaurs|a cat that got lost|planning your day|the internet|fractions|sorting numbers|text
    processing|breakfast|the moon|bees|jazz|taking photographs|growing tomatoes|a knight|recursion|
    databases|prime numbers|speaking in public|the heart|earthquakes|paper planes|wind turbines|atoms|a
    house that talks|saving money|the immune system|watercolours|cooking rice|working in a team|rivers|
    chemical elements|stress|railways|web servers|equations with one unknown|whales|castles|working from
    home|passwords|sleep|bicycles|friendship|inflation|the planet Mars|operating systems|spam|bird
    migration|chance and probability|genes|a festival in winter|number sequences|deserts|job interviews|
    tea|memory|hiking|compilers|the invention of printing|maps|sailing|insects|the Renaissance|knitting|
    the violin|dictionaries|trade|mountains|bridges|clocks|a wise old tortoise|forests|the printing of
    money|mirrors|language learning|running a marathon|soup|robots in factories|democracy|graphs and
    networks|hospitals|the weather forecast|fashion|a secret garden|recycling|light and colour|libraries|
    swimming|the alphabet|video games|soil|the Middle Ages|batteries|cheese|elections|dogs|the piano|a
    pirate who is afraid of water|airports|statistics|painting a room|magnetism|farming|kindness|the
    brain of an octopus|the number zero|cities|wolves|furniture|satellites|a time machine|first aid|
    logic|software testing|fishing|the nervous system|buying a house|camping|negotiation|geometry|
    museums|salt|a letter from the future|trees|digital cameras|loops in a program|lists in Python|
    insurance|the Industrial Revolution|honesty|energy|tides|spiders|dancing|apples|taxes|the telephone|
    functions in mathematics|parallel computing|proverbs|exercise|nutrition|the ozone layer|rockets|
    comics|leadership|the desert fox|algorithms|calendars|radio
    """
)

_TRAIN_OPENINGS: Final = _lines(
    """
    The capital of Spain is
    Water boils at
    Once upon a time, in a village between two hills,
    The main reason why ships float is
    In this chapter we look at
    def average(numbers):
    The three primary colours are
    When the train stopped, nobody
    A healthy diet includes
    The first step in solving any problem is
    Dear Sir or Madam,
    The results of the experiment show that
    There are many ways to
    Today the city council decided
    import math
    The old man opened the door and
    To install the program, first
    The sun is a star that
    She had never seen the sea before, so
    In conclusion,
    The largest animal on Earth
    One of the most common mistakes is
    It was raining on the morning when
    for i in range(10):
    The history of mathematics begins
    My favourite season is
    According to the report,
    The difference between a frog and a toad is
    Ingredients: flour, sugar, butter,
    A good teacher
    Question: What is the largest ocean? Answer:
    The engine of a car works by
    In 1969, people
    The purpose of this document is
    Plants need light because
    The recipe is simple:
    Scientists have discovered
    If you want to learn to draw,
    The company announced
    Long ago, before there were any roads,
    The following table lists
    The speed of light is
    class Animal:
    Here are some tips for travelling with
    The human body has
    At the end of the street there is
    The meaning of this word is
    Most people believe that
    The river begins in
    To make a cup of tea,
    A triangle has
    The king called his advisers and said:
    Computers store information as
    On the first day of school,
    The price of oil
    The following example shows how to
    Music is
    In physics, energy is
    The two brothers had
    An important part of any essay is
    """
)

_VALIDATION_REQUESTS: Final = _lines(
    """
    Can you teach me about {}?
    Write a letter to my grandmother that describes {}.
    What would the world be like without {}?
    Give me a brief overview of {}.
    Write something funny about {}.
    What do experts say about {}?
    How can I get started with {}?
    Please write an essay on {}.
    """
)

_VALIDATION_SUBJECTS: Final = _fields(
    """
    lighthouses|the Silk Road|badgers|hash tables|making pizza|northern lights|pottery|antibiotics|
    skiing|a shy astronaut|counting the vowels of a string|glaciers|meditation|steam engines|Isaac
    Newton|elephants|crossword puzzles|submarines|parking a car|the guitar|sundials|traffic lights|
    rainbows|ants
    """
)

_VALIDATION_OPENINGS: Final = _lines(
    """
    The longest river in Africa
    After the storm the fishermen
    while True:
    The advantages of public transport are
    A contract is an agreement
    Every evening the baker
    The planet Venus
    To change a flat tyre,
    """
)

_TEST_REQUESTS: Final = _lines(
    """
    I would like to know more about {}. Where do I begin?
    Imagine that you are an expert on {}. Introduce yourself.
    Write a fairy tale with {} in it.
    Discuss {} from two points of view.
    In simple words, what does {} mean?
    Which five things would you teach first about {}?
    Draft a short speech about {}.
    How does one become good at {}?
    """
)

_TEST_SUBJECTS: Final = _fields(
    """
    windmills|the Olympic Games|penguins|linked lists|roasting vegetables|comets|carpentry|allergies|ice
    skating|a lazy wizard|reversing a sentence|caves|patience|the telescope|Marie Curie|camels|board
    games|airships|fair trade|the trumpet|compasses|zebra crossings|thunder|butterflies
    """
)

_TEST_OPENINGS: Final = _lines(
    """
    The highest mountain in Europe
    Behind the old mill there was
    def factorial(n):
    The disadvantages of living in a big city are
    A hypothesis is
    Nobody in the office knew why
    The planet Saturn
    To paint a wooden fence,
    """
)


def _held_out(
    requests: tuple[str, ...], subjects: tuple[str, ...], openings: tuple[str, ...]
) -> list[Prompt]:
    """Each subject once, with the requests in turn, and the openings."""
    kinds = (CHAT, CHAT, BARE_CHAT)
    prompts = [
        Prompt(kinds[i % len(kinds)], requests[i % len(requests)].format(subject))
        for i, subject in enumerate(subjects)
    ]
    return prompts + [Prompt(OPENING, text) for text in openings]


def _train() -> list[Prompt]:
    """Every request with every subject, shuffled, and an opening after each five of them."""
    shuffle = random.Random(0).shuffle
    texts = [r.format(s) for r in _TRAIN_REQUESTS for s in _TRAIN_SUBJECTS]
    shuffle(texts)
    kinds = (CHAT, CHAT, BARE_CHAT, CHAT, BARE_CHAT)
    prompts = []
    for i, text in enumerate(texts):
        prompts.append(Prompt(kinds[i % len(kinds)], text))
        if i % len(kinds) == len(kinds) - 1 and i // len(kinds) < 4 * len(_TRAIN_OPENINGS):
            # Openings are few. They come again for the sake of the requests that sample.
            prompts.append(Prompt(OPENING, _TRAIN_OPENINGS[i // len(kinds) % len(_TRAIN_OPENINGS)]))
    return prompts


_MAKERS: Final[dict[str, Callable[[], list[Prompt]]]] = {
    "train": _train,
    "validation": lambda: _held_out(
        _VALIDATION_REQUESTS, _VALIDATION_SUBJECTS, _VALIDATION_OPENINGS
    ),
    "test": lambda: _held_out(_TEST_REQUESTS, _TEST_SUBJECTS, _TEST_OPENINGS),
}


def prompts_of(split: str) -> list[Prompt]:
    """Prompts of a split, the same list at every call.

    Parameters
    ----------
    split : {"train", "validation", "test"}
        Which. ``train`` has some 6,000, the others 32 each.
    """
    return _MAKERS[split]()
