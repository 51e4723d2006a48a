"""Verdicts on two commits where some cases vary and others do not, and where a number is 0."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from lab import verdicts
from lab.report import changes, page, plots, texts, wording
from lab.report.data import Commit, Key, Machine, Measured, Question, Results

MACHINE = Machine("made-up", "CPU")
BEFORE, AFTER = Commit("a" * 40, "before", ("a",)), Commit("b" * 40, "after", ("b",), fix=1)
# Nine rounds of three processes.
VARYING = (0.95, 0.96, 0.97, 0.96, 0.97, 0.98, 0.97, 0.98, 0.99)

Number = float | tuple[float, ...]


def measured(number: Number) -> Measured:
    if isinstance(number, tuple):
        return Measured(sorted(number)[len(number) // 2], number)
    return Measured(number)


def make(unit: str, **cases: tuple[Number, Number]) -> Results:
    """A metric of these cases, each before and after."""
    question = Question("overlap", "?", dict.fromkeys(cases, True), {"count": unit})
    return Results(
        [MACHINE],
        [BEFORE, AFTER],
        {"overlap": question},
        {
            Key(MACHINE.key, commit.sha, "overlap", "count", case): measured(number)
            for case, numbers in cases.items()
            for commit, number in zip((BEFORE, AFTER), numbers, strict=True)
        },
        processes=3,
    )


def change(results: Results, case: str, family: int = 1) -> changes.Change:
    found = changes.compare(results, (BEFORE, AFTER), MACHINE, "overlap", "count", case, family)
    assert found is not None
    return found


def test_a_case_that_varies_does_not_make_the_others_vary() -> None:
    results = make("stalls", varying=(VARYING, VARYING), gone=(1.0, 0.0), half=(2.0, 1.0))
    gone, half = change(results, "gone"), change(results, "half")
    assert (gone.ratio, gone.low, gone.high, gone.verdict) == (0.0, 0.0, 0.0, changes.BETTER)
    assert (half.ratio, half.low, half.high, half.verdict) == (0.5, 0.5, 0.5, changes.BETTER)
    assert gone.before.is_exact and gone.after.is_exact
    varying = change(results, "varying")
    assert varying.before.has_band and not varying.before.is_exact
    assert (varying.ratio, varying.verdict) == (pytest.approx(1.0), changes.WITHIN_NOISE)
    assert varying.low < 1 < varying.high


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (VARYING, 0.0, changes.BETTER),
        (0.0, VARYING, changes.WORSE),
        (1.0, 0.0, changes.BETTER),
        (0.0, 1.0, changes.WORSE),
        (0.0, 0.0, changes.SAME),
    ],
)
def test_nothing_is_between_0_and_what_is_always_more(
    before: Number, after: Number, verdict: str
) -> None:
    results = make("stalls", case=(before, after), varying=(VARYING, VARYING))
    found = change(results, "case", family=1000)
    assert found.verdict == verdict
    expected = {changes.BETTER: 0.0, changes.SAME: 1.0}.get(verdict, math.nan)
    assert found.ratio == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    "mostly_0", [(0.0,) * 8 + (0.01,), (0.0, 0.0, 0.0, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1)]
)
def test_processes_without_a_logarithm_have_no_noise_that_is_known(
    mostly_0: tuple[float, ...],
) -> None:
    results = make("stalls", case=(mostly_0, 0.0), other=(1.0, mostly_0))
    for case in ("case", "other"):
        assert change(results, case).verdict == changes.NO_INTERVAL
    page.render(results)


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        (1000.0, changes.SAME),
        (1009.0, changes.ALIKE),
        (991.0, changes.ALIKE),
        (1011.0, changes.WORSE),
        (989.0, changes.BETTER),
    ],
)
def test_what_is_counted_may_differ_by_as_much_as_the_gate_allows(
    after: float, verdict: str
) -> None:
    results = make("bytes", case=(1000.0, after), none=(0.0, 0.001))
    found = change(results, "case")
    assert (found.verdict, found.ratio, found.low) == (verdict, after / 1000, after / 1000)
    gate = verdicts.count("", 1000.0, after).within(verdicts.TOLERANCE).verdict
    assert (gate == verdicts.SAME) == (verdict in (changes.SAME, changes.ALIKE))
    # A share of nothing is nothing.
    assert change(results, "none").verdict == changes.WORSE
    assert changes.ALIKE == "the same to 1%" and texts.summary([found]).startswith("1 ")


def test_an_exact_number_is_held_against_one_that_varies() -> None:
    results = make("stalls", near=(0.97, VARYING), far=(VARYING, 2.0))
    near, far = change(results, "near"), change(results, "far")
    assert near.verdict == changes.WITHIN_NOISE
    assert far.verdict == changes.WORSE
    assert far.low < far.ratio < far.high
    assert far.ratio == pytest.approx(2 / 0.97, rel=1e-3)


def test_times_without_samples_are_not_exact() -> None:
    results = make("us", varying=(VARYING, VARYING), alone=(2.0, 1.0))
    assert change(results, "alone").verdict == changes.NO_INTERVAL
    assert math.isnan(change(results, "alone").low)


def test_a_noisier_case_is_judged_by_its_own_noise() -> None:
    """Three processes 40% apart, among cases that agree within 2%."""
    wide = (1.0, 1.0, 1.0, 1.4, 1.4, 1.4, 1.9, 1.9, 1.9)
    calm = {f"calm{i}": (VARYING, VARYING) for i in range(8)}
    results = make("us", wide=(wide, tuple(0.7 * x for x in wide)), **calm)
    assert change(results, "wide").verdict == changes.WITHIN_NOISE
    assert results.noise(MACHINE, "overlap", "count", "wide").dof == 4
    assert results.noise(MACHINE, "overlap", "count", "calm0").dof == 9 * 4
    wide_reading, calm_reading = (change(results, case).before for case in ("wide", "calm0"))
    assert wide_reading.high / wide_reading.value > 1.5
    assert calm_reading.high / calm_reading.value < 1.25


def test_the_page_says_which_numbers_are_exact() -> None:
    results = make("stalls", varying=(VARYING, VARYING), gone=(1.0, 0.0), new=(0.0, 1.0))
    text = page.render(results)
    assert "A number without them was the same in every round" in text
    assert text.count("exact</td>") == 1
    assert "0 → 1 stalls from before to after, no ratio: worse." in texts.sentence(
        results, MACHINE, "overlap", "count", "new"
    )
    said = texts.sentence(results, MACHINE, "overlap", "count", "gone")
    assert "1 → 0 stalls from before to after, better." in said
    gone = change(results, "gone")
    assert texts.largest([gone]) == "overlap gone, count: 1 → 0"
    exact = make("stalls", gone=(1.0, 0.0))
    assert "Exact: the same in every run" in page.render(exact)


# --- Which commits are held against each other ------------------------------------------------


def commit(name: str, fix: int | None = None, known: bool = True) -> Commit:
    return Commit(name * 40, f"what {name} is", (name,), fix, known=known)


OTHER = Machine("other", "GPU", is_gpu=True)
BASE, FIRST, MIDDLE, LAST, NEW = (
    commit("0"),
    commit("1", 1),
    commit("2"),
    commit("3", 3),
    commit("4"),
)


def measure(commits: list[Commit], **by_machine: dict[Commit, float | None]) -> Results:
    """A count on these commits, as each machine has it."""
    machines = {MACHINE.key: MACHINE, OTHER.key: OTHER}
    return Results(
        [machines[key.replace("_", "-")] for key in by_machine],
        commits,
        {"decode": Question("decode", "?", {"case": True}, {"count": "stalls"})},
        {
            Key(key.replace("_", "-"), commit.sha, "decode", "count", "case"): Measured(value)
            for key, values in by_machine.items()
            for commit, value in values.items()
        },
        processes=3,
    )


# Keys of pairs.
HERE, THERE = (MACHINE.key, "decode"), (OTHER.key, "decode")


def test_each_question_has_its_own_two_commits() -> None:
    """A commit between was asked one of them."""
    results = measure(
        [BASE, MIDDLE, LAST],
        made_up={BASE: 8.0, MIDDLE: 5.0, LAST: 4.0},
        other={BASE: 8.0, LAST: 4.0},
    )
    results.questions["mixed"] = Question("mixed", "?", {"case": True}, {"count": "stalls"})
    results.measured |= {
        Key(MACHINE.key, commit.sha, "mixed", "count", "case"): Measured(number)
        for commit, number in ((BASE, 9.0), (LAST, 3.0))
    }
    (last,) = changes.steps(results)
    whole = changes.Pair(BASE, LAST, (MIDDLE,))
    assert last.pairs == {
        HERE: changes.Pair(MIDDLE, LAST),
        THERE: whole,
        (MACHINE.key, "mixed"): whole,
    }
    ratios = {(c.machine.key, c.question): c.ratio for c in changes.changes(results, last)}
    assert ratios == {HERE: 4 / 5, THERE: 4 / 8, (MACHINE.key, "mixed"): 3 / 9}
    found = page.compared(results, 1, last)
    assert [of for _, of in found.pairs] == [("CPU, decode",), ("CPU, mixed", "GPU")]
    said = [summary for _, _, summary, _ in found.summaries]
    assert said == [
        "compared with “what 2 is” and “what 0 is”, 2 better",
        "compared with “what 0 is”, 1 better",
    ]
    page.render(results)


def test_each_machine_has_its_own_two_commits() -> None:
    results = measure(
        [BASE, FIRST, MIDDLE, LAST, NEW],
        made_up={BASE: 8.0, FIRST: 6.0, LAST: 3.0},
        other={BASE: 8.0, MIDDLE: 5.0, LAST: 2.0, NEW: 4.0},
    )
    first, last, since = changes.steps(results)
    assert (first.title, last.title) == ("Fix what 1 is", "Fix what 3 is")
    assert first.pairs == {HERE: changes.Pair(BASE, FIRST)}
    assert last.pairs == {
        HERE: changes.Pair(FIRST, LAST, (MIDDLE,)),
        THERE: changes.Pair(MIDDLE, LAST),
    }
    assert since.pairs == {THERE: changes.Pair(LAST, NEW)}
    ratios = {c.machine.key: c.ratio for c in changes.changes(results, last)}
    assert ratios == {MACHINE.key: 3 / 6, OTHER.key: 2 / 5}
    assert [c.ratio for c in changes.changes(results, since)] == [4 / 2]


def test_a_commit_on_which_all_failed_is_no_commit_before() -> None:
    results = measure([BASE, MIDDLE, LAST], made_up={BASE: 8.0, MIDDLE: None, LAST: 2.0})
    (last,) = changes.steps(results)
    assert last.pairs == {HERE: changes.Pair(BASE, LAST, (MIDDLE,))}
    results = measure([BASE, MIDDLE, LAST], made_up={BASE: 8.0, MIDDLE: math.nan, LAST: 2.0})
    assert [c.ratio for c in changes.changes(results, changes.steps(results)[0])] == [2 / 8]


def test_without_the_last_fix_nothing_is_since_it() -> None:
    results = measure([BASE, FIRST, LAST, NEW], made_up={FIRST: 6.0, NEW: 2.0}, other={LAST: 1.0})
    assert [(s.title, s.pairs) for s in changes.steps(results)] == [
        ("Fix what 1 is", {}),
        ("Fix what 3 is", {}),
    ]
    assert page.render(results).count("No number on both sides.") == 2 * 2


def test_strangers_are_on_no_side() -> None:
    early, between, late = (commit(name, known=False) for name in "abc")
    results = measure(
        [early, BASE, between, LAST, NEW, late],
        made_up={early: 9.0, BASE: 8.0, between: 7.0, LAST: 4.0, NEW: 2.0, late: 1.0},
    )
    assert [s.pairs[HERE] for s in changes.steps(results)] == [
        changes.Pair(BASE, LAST),
        changes.Pair(LAST, NEW),
    ]
    said = texts.sentence(results, MACHINE, "decode", "count", "case")
    assert "8 → 2 stalls from what 0 is to what 4 is, 0.25 times" in said
    # Plots are multiples of the same number.
    line = page._line(results, MACHINE, 0, "decode", "count", "case", relative=True)
    assert line is not None
    assert [mark.y for mark in line.marks] == [9 / 8, 1, 7 / 8, 4 / 8, 2 / 8, 1 / 8]


def test_strangers_alone_are_held_against_each_other() -> None:
    results = measure(
        [commit("a", known=False), commit("b", known=False)],
        made_up={commit("a", known=False): 4.0, commit("b", known=False): 1.0},
    )
    assert changes.steps(results) == []
    assert "4 → 1 stalls" in texts.sentence(results, MACHINE, "decode", "count", "case")


# --- Numbers and names that no suite has ------------------------------------------------------

WIDE = (1e-300,) * 3 + (1.0,) * 3 + (1e300,) * 3
FAR = tuple(1e300 * x for x in VARYING)


@pytest.mark.parametrize("unit", ["us/token", "bytes", ""])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (0.0, 0.0),
        (0.0, 5.0),
        (5.0, 0.0),
        (1e300, 1e-300),
        (1e-300, 1e300),
        (1e-320, 1e-320),
        (-5.0, -5.0),
        (-1e300, 3.0),
        (WIDE, VARYING),
        (FAR, VARYING),
        ((0.0,) * 9, WIDE),
    ],
)
@pytest.mark.filterwarnings("error")
def test_numbers_of_any_size_make_a_page(unit: str, before: Number, after: Number) -> None:
    results = make(unit, case=(before, after), other=(VARYING, VARYING))
    results.questions["overlap"].units["us_per_token"] = unit
    for key, number in list(results.measured.items()):
        results.measured[Key(key.machine, key.sha, key.question, "us_per_token", key.case)] = number
    text = page.render(results)
    assert "nan" not in text.lower()
    assert "± inf" not in text
    assert max(map(len, re.findall(r"[\d,.]+", text))) < 25
    # The drawing has numbers too.
    assert not re.search(r'="[^"]*\b(inf|nan)\b', text)


def test_what_a_plot_has_no_room_for_is_said() -> None:
    results = make("us", case=(2e31, 3.0), other=(VARYING, VARYING))
    results.questions["overlap"].units["us"] = "us"
    line = page._line(results, MACHINE, 0, "overlap", "count", "case", relative=False)
    assert line is not None
    assert [(mark.x, mark.y) for mark in line.marks] == [(1, 3.0)]
    text = page.render(make("bytes", case=(2e31, 3.0)))
    assert "Too large to be drawn: before." in text
    assert "2e+31" in text
    assert "Too large" not in page.render(make("bytes", case=(2e12, 3.0)))


def test_no_tokens_a_second_without_a_time() -> None:
    results = make("anchors", case=(0.0, 4.0))
    question = results.questions["overlap"]
    question.units = {"us_per_token_ratio": "anchors", "us_per_token": "us"}
    for key, number in list(results.measured.items()):
        for metric in question.units:
            results.measured[Key(key.machine, key.sha, key.question, metric, key.case)] = number
    said = texts.sentence(results, MACHINE, "overlap", "us_per_token_ratio", "case")
    assert said.endswith("(0 → 4 us)")
    assert "tokens/s" not in said


def test_numbers_beyond_counting_have_an_exponent() -> None:
    assert [wording.number(x) for x in (1e300, -2.5e15, 1e-12, 999e12)] == [
        *("1e+300", "-2.5e+15", "1e-12", "999,000,000,000,000")
    ]
    assert [wording.factor(x) for x in (1e300, 1e-12, 1234.5, 0.004)] == [
        *("1e+300", "1e-12", "1234.50", "0.0040")
    ]


def test_names_of_questions_cannot_break_out() -> None:
    names = [
        'x"><script>alert(1)</script><i a="',
        "x script alert 1 script i a",
        "ä",
        "ö",
        "decode",
    ]
    results = measure([BASE, LAST], made_up={BASE: 8.0, LAST: 2.0})
    results.questions = {
        name: Question(name, name, {"case": True}, {"count": "stalls"}) for name in names
    }
    results.measured = {
        Key(key.machine, key.sha, name, "count", "case"): number
        for key, number in results.measured.items()
        for name in names
    }
    text = page.render(results)
    assert "<script" not in text
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[\w-]+", one) for one in ids)
    anchors = page.anchors(names)
    assert len(set(anchors.values())) == len(names)
    assert anchors["decode"] == "decode"
    for anchor in anchors.values():
        assert f'<section id="{anchor}">' in text
        assert f'<a href="#{anchor}">' in text


def test_a_name_cannot_break_out_of_a_plot() -> None:
    line = plots.Line(0, "m", (plots.Mark(0, 1.0), plots.Mark(1, 2.0)))
    text = plots.svg(plots.Panel('x"><script>\\1', "t", "d", ("a\nb", "c\nd"), (line,)))
    assert "<script" not in text
    assert ElementTree.fromstring(text)[0].attrib["id"] == 'x"><script>\\1-title'


@pytest.mark.parametrize("subject", ["Cut $x_$ from $y", "${ $} \\frac", "100$ & <b>"])
def test_dollars_are_no_formula(subject: str) -> None:
    line = plots.Line(0, "m", (plots.Mark(0, 1.0),))
    text = plots.svg(plots.Panel("x", "t", "d", (f"01234567\n{subject}",), (line,)))
    said = [node.text for node in ElementTree.fromstring(text).iter() if node.text]
    assert subject in said
