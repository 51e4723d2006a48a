"""Small stories of requests with penalties, each about one thing that can go wrong.

A story gets `make_rig`, which is `Rig` but for what a test has exchanged in it, and drives a rig, which
compares every row of every step with the reference. They are told to both backends, and to mutants.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from penalty_reference import Rig

MakeRig = Callable[..., Rig]
ALL = {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.3}
CHAIN = [-1, 0, 1, 2, 3, 4, 5, 6]


def plain_decoding(make_rig: MakeRig) -> None:
    """Each penalty, alone and with others, of both signs, on tokens that come again."""
    rig = make_rig()
    rig.admit(0, frequency_penalty=0.5)
    rig.admit(1, presence_penalty=-1.25)
    rig.admit(2, repetition_penalty=0.6)
    rig.admit(3, frequency_penalty=-2.0, presence_penalty=2.0, repetition_penalty=1.9)
    for step in range(5):
        rig.decode([3, 0, 1, 2], [7, 599, step, 0])
        rig.assert_counts()


def half_precision(make_rig: MakeRig) -> None:
    """Logits of 16 bits are computed in 32 and rounded once."""
    rig = make_rig()
    rig.dtype = torch.float16
    rig.admit(0, [9] * 50 + list(range(40)), logit_bias={5: 0.37, 77: -1.1}, **ALL)
    rig.decode([0], [3])
    rig.decode([0], [4])


def changes_of_sign(make_rig: MakeRig) -> None:
    """What decides between product and quotient is the sign that subtraction leaves."""
    rig = make_rig()
    rig.admit(0, [9] * 50 + list(range(300)), **ALL)
    rig.admit(1, range(300), presence_penalty=-2.0, repetition_penalty=1.9)
    rig.decode([0, 1], [3, 3])


def bias_after_scaling(make_rig: MakeRig) -> None:
    """A bias is added to what was scaled, and on tokens that were not seen too."""
    rig = make_rig()
    bias = {3: 4.5, 4: -4.5, 599: 2.0, 600: 1.0, -1: 1.0}
    rig.admit(0, [3, 4], logit_bias=bias, repetition_penalty=1.8)
    rig.admit(1, logit_bias=bias)
    for _ in range(2):
        rig.decode([0, 1], [3, 4])


def short_outputs(make_rig: MakeRig) -> None:
    """Stop tokens are masked up to the last token before the minimum, and never after it."""
    rig = make_rig()
    stops = {2, 5, 600, -3}
    rig.admit(0, min_new_tokens=3, stop_token_ids=stops, logit_bias={2: 9.0})
    rig.admit(1, min_new_tokens=1, stop_token_ids=stops, **ALL)
    for step in range(4):
        rig.decode([0, 1], [step, 5])


def long_chains(make_rig: MakeRig) -> None:
    """A node counts its ancestors and itself, not the root, and reaches the minimum on its way."""
    rig = make_rig(max_draft_tokens=8)
    rig.admit(0, min_new_tokens=4, stop_token_ids={2, 4}, **ALL)
    rig.admit(1, frequency_penalty=0.9)
    rig.decode([0, 1], [3, 3])
    drafts = [[3, 4, 4, 3, 5, 4, 6, 6], [3, 3, 3, 3, 3, 3, 3, 3]]
    rig.verify([0, 1], drafts, [CHAIN] * 2, [[4, 4, 9], [3, 3, 3]], [3, 2])
    rig.assert_counts()
    rig.decode([0, 1], [3, 3])


def branching_trees(make_rig: MakeRig) -> None:
    """Siblings do not count each other, whatever the order of nodes."""
    rig = make_rig(max_draft_tokens=8)
    rig.admit(0, [1, 1], min_new_tokens=5, stop_token_ids={7}, **ALL)
    rig.admit(2, [1, 8], frequency_penalty=-0.5, logit_bias={9: 1.0})
    parents = [-1, 0, 0, 1, 1, 2, 5]
    drafts = [[1, 5, 6, 5, 9, 5, 5], [8, 9, 8, 9, 9, 8, 7]]
    rig.verify([0, 2], drafts, [parents, parents], [[5, 9], [9, 3]], [2, 1])
    parents = [-1, 2, 0, 4, 2, 3, 3]  # children before their parents
    rig.verify([2, 0], drafts, [parents, parents], [[9, 9], [6, 5]], [1, 2])
    rig.assert_counts()


def rejected_drafts(make_rig: MakeRig) -> None:
    """What was staged and not committed is gone for the next step, of either kind."""
    rig = make_rig(max_draft_tokens=8)
    rig.admit(0, [1], **ALL)
    rig.verify([0], [[1, 20, 21, 22]], [CHAIN[:4]], [[30, 0, 0, 0]], [1])
    rig.assert_counts()
    rig.decode([0], [21])
    rig.verify([0], [[21, 22, 20, 40]], [CHAIN[:4]], [[22, 20, 9, 0]], [3])
    rig.verify([0], [[9, 20, 22, 23]], [CHAIN[:4]], [[20, 22, 23, 1]], [4])
    rig.assert_counts()


def reused_slots(make_rig: MakeRig) -> None:
    """A new request in an old slot has nothing of the old one."""
    rig = make_rig(max_draft_tokens=4)
    rig.admit(
        0, range(100, 300), min_new_tokens=500, stop_token_ids={1}, logit_bias={8: 3.0}, **ALL
    )
    rig.admit(1, range(50), **ALL)
    rig.verify([0, 1], [[299, 7, 8, 9]] * 2, [CHAIN[:4]] * 2, [[7, 8]] * 2, [1, 2])
    rig.finish(0)
    rig.admit(0, [8], presence_penalty=1.0)
    rig.finish(1)
    rig.admit(2, range(20, 60), frequency_penalty=1.0)
    rig.decode([2, 0], [8, 200])
    rig.verify([0, 2], [[200, 7, 8, 200]] * 2, [CHAIN[:4]] * 2, [[9, 8]] * 2, [2, 1])
    rig.assert_counts()


def growing_lists(make_rig: MakeRig) -> None:
    """Lists go over from page to page, by one token and by several, and the pool grows with them."""
    rig = make_rig(initial_entries=128, max_draft_tokens=8)
    rig.admit(0, range(126), **ALL)
    rig.admit(1, range(300, 300 + 124), **ALL)
    for token in range(126, 131):
        rig.decode([1, 0], [token, token])
        rig.assert_counts()
    rig.admit(2, range(250), **ALL)  # a tail needs the next page first
    for token in range(400, 403):
        rig.verify(
            [2, 1],
            [[0, *range(token, token + 7)]] * 2,
            [CHAIN] * 2,
            [[token, token + 1, 9]] * 2,
            [2, 1],
        )
        rig.assert_counts()


def many_tokens_a_step(make_rig: MakeRig) -> None:
    """Tokens come again within a step, only the first `lens` count, and no row may count more."""
    rig = make_rig(max_draft_tokens=8)
    rig.admit(0, [4, 4], **ALL)
    rig.admit(1, min_new_tokens=6, stop_token_ids={4}, **ALL)
    tokens = [[4, 6, 6, 4, 6, 7], [6, 6, 5, 6, 5, 5]]
    for lens in ([6, 0], [3, 5], [1, 6]):
        rig.verify([0, 1], [[1, 6]] * 2, [[-1, 0]] * 2, tokens, lens)
        rig.assert_counts()
    rig.decode([0, 1], [6, 6])


def uncommitted_rows(make_rig: MakeRig) -> None:
    """Chunks of a prefill are penalized as any row and leave no token."""
    rig = make_rig()
    rig.admit(0, [5], min_new_tokens=3, stop_token_ids={5}, **ALL)
    rig.admit(1, **ALL)
    rig.decode([0, 1], [9, 9], uncommitted=[0])
    rig.decode([0, 1], [8, 9], uncommitted=[0, 1])
    rig.decode([0, 1], [9, 8])
    rig.assert_counts()


def tokens_from_the_host(make_rig: MakeRig) -> None:
    """Tokens that come with the next step count before it penalizes, in rows that commit."""
    rig = make_rig(initial_entries=128)
    rig.admit(0, range(126), min_new_tokens=129, stop_token_ids={3}, **ALL)
    rig.admit(1, **ALL)
    rig.decode([0, 1], [5, 5], uncommitted=[0, 1])
    for token in (300, 301, 302, 300):
        rig.feed([1, 0, -1], [token, token, 7])
    rig.admit(2, [4, 4], frequency_penalty=1.0)
    rig.feed([2, 0, 1], [0, 8, 9], uncommitted=[0])
    rig.feed([1, 2], [9, 4])
    rig.assert_counts()


def retractions(make_rig: MakeRig) -> None:
    """All that a request has said counts again when it comes back, in whatever slot."""
    rig = make_rig()
    rig.admit(0, min_new_tokens=4, stop_token_ids={3}, logit_bias={1: -2.0}, **ALL)
    for token in (1, 2, 1):
        rig.decode([0], [token])
    rig.retract(0)
    rig.admit(1, [2, 2], **ALL)
    for token in (3, 1):
        rig.decode([1, 0], [2, token])
        rig.assert_counts()


def foreign_tokens(make_rig: MakeRig) -> None:
    """Ids outside the vocabulary count as output, and are no tokens."""
    rig = make_rig(max_draft_tokens=4)
    rig.admit(0, [600, -1, 5], min_new_tokens=6, stop_token_ids={5}, **ALL)
    rig.decode([0], [1 << 40])
    rig.decode([0], [-7])
    rig.verify([0], [[1, 600, 5, -1]], [CHAIN[:4]], [[5, (1 << 32) + 5, 600]], [3])
    rig.decode([0], [5])
    rig.assert_counts()


def mixed_batches(make_rig: MakeRig) -> None:
    """Rows without penalties, and rows of nobody, lie between the others untouched."""
    rig = make_rig(max_draft_tokens=4)
    rig.admit(0, **ALL)
    rig.admit(1)
    rig.admit(5, logit_bias={5: 1.0})
    rig.admit(4)
    rig.decode([1, 0, -1, 5, 4], [1, 2, 3, 5, 5])
    rig.decode([5, -1, 0], [1, 2, 3])
    slots = [1, 5, -1, 0]
    rig.verify(slots, [[3, 1, 3]] * 4, [[-1, 0, 0]] * 4, [[1, 5]] * 4, [1, 2, 1, 2])
    rig.decode(slots, [1, 1, 1, 1])
    rig.assert_counts()


def long_lists(make_rig: MakeRig) -> None:
    """Tokens are found wherever in a long list they are, and counted there."""
    rig = make_rig(vocab_size=3000, max_draft_tokens=8)
    rig.admit(0, range(2999, 400, -2), **ALL)
    rig.admit(1, range(1300), logit_bias={1400: 1.0}, **ALL)
    rig.verify(
        [1, 0],
        [[0, 1299, 127, 128, 1400, 401, 2999, 0]] * 2,
        [CHAIN] * 2,
        [[1299, 1024, 1023, 255]] * 2,
        [4, 4],
    )
    rig.decode([0, 1], [401, 1400])
    rig.decode([0, 1], [2999, 2999])
    rig.assert_counts()


def random_story(make_rig: MakeRig, seed: int = 0, steps: int = 12) -> None:
    """Whatever comes: requests, steps of all kinds, ends, retractions, in batches of any order."""
    draw = random.Random(seed)
    vocab = draw.choice([512, 700])
    rig = make_rig(vocab_size=vocab, max_draft_tokens=8, num_slots=5)
    for _ in range(steps):
        free = [slot for slot in range(5) if slot not in rig.requests]
        if free and draw.random() < 0.6:
            rig.admit(
                draw.choice(free), _draw_tokens(draw, draw.choice([0, 3, 150])), **_params(draw)
            )
        batch = draw.sample(sorted(rig.requests), draw.randint(0, len(rig.requests)))
        if not batch:
            continue
        if draw.random() < 0.5:
            tokens = [_draw_tokens(draw, 3) for _ in batch]
            drafts = [_draw_tokens(draw, 6) for _ in batch]
            parents = [[-1, *(draw.randrange(node) for node in range(1, 6))] for _ in batch]
            rig.verify(batch, drafts, parents, tokens, [draw.randint(0, 3) for _ in batch])
        else:
            uncommitted = [row for row in range(len(batch)) if draw.random() < 0.2]
            rig.decode(batch, _draw_tokens(draw, len(batch)), uncommitted)
        rig.assert_counts()
        for slot in batch:
            if draw.random() < 0.15:
                draw.choice([rig.finish, rig.retract])(slot)


def _draw_tokens(draw: random.Random, num: int) -> list[int]:
    """A few tokens that come often, many that are rare, and now and then one that is none."""
    return [
        draw.choice([draw.randrange(6), draw.randrange(6), draw.randrange(-2, 720)])
        for _ in range(num)
    ]


def _params(draw: random.Random) -> dict[str, object]:
    params: dict[str, object] = {}
    if draw.random() < 0.7:
        params["frequency_penalty"] = draw.uniform(-2, 2)
    if draw.random() < 0.5:
        params["presence_penalty"] = draw.uniform(-2, 2)
    if draw.random() < 0.5:
        params["repetition_penalty"] = draw.uniform(0.2, 2)
    if draw.random() < 0.4:
        params["logit_bias"] = {t: draw.uniform(-5, 5) for t in _draw_tokens(draw, 3)}
    if draw.random() < 0.4:
        params["min_new_tokens"] = draw.randint(0, 9)
        params["stop_token_ids"] = set(_draw_tokens(draw, 2))
    return params


SCENARIOS: tuple[Callable[[MakeRig], None], ...] = (
    plain_decoding,
    half_precision,
    changes_of_sign,
    bias_after_scaling,
    short_outputs,
    long_chains,
    branching_trees,
    rejected_drafts,
    reused_slots,
    growing_lists,
    many_tokens_a_step,
    uncommitted_rows,
    tokens_from_the_host,
    retractions,
    foreign_tokens,
    mixed_batches,
    long_lists,
)
