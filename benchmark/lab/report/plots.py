"""Small plots as SVG that takes its colours and its font from the page.

matplotlib draws with colours that stand for roles; they become the page's CSS variables, so that one
drawing serves light and dark. Text stays text. The same numbers give the same bytes.
"""

from __future__ import annotations

import functools
import io
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final
from xml.sax.saxutils import escape

# By role: a colour that occurs nowhere else.
INK, FAINT, GRID, STALL = "#010203", "#010204", "#010205", "#010206"
SERIES: Final = ("#010207", "#010208", "#010209", "#01020a", "#01020b", "#01020c")
MARKERS: Final = ("o", "s", "D", "^", "v", "P")
_VARIABLES: Final = {
    INK: "--ink",
    FAINT: "--faint",
    GRID: "--grid",
    STALL: "--worse",
    **{colour: f"--series-{i}" for i, colour in enumerate(SERIES)},
}
_COORDINATES: Final = re.compile(r' (?:d|x|y|width|height)="[^"]*"')
_COUNTED: Final = re.compile(r"-(marks|band)-\d+$|-stalls$")
# Inches of 72 points; a point is a pixel where the plot is shown at this size.
WIDTH: Final = 5.0
BODY, LEVEL_LABELS, STEEP_LABELS = 2.4, 0.72, 1.55
# Below that span around the middle, an axis would blow noise up to the size of news.
MIN_RELATIVE_SPAN: Final = 0.1
MOST_LEVEL_LABELS: Final = 5
# Between lines of a plot, in commits.
DODGE: Final = 0.09
# That fit below a plot, side by side; and that fit into a label that stands on end.
LETTERS_IN_ALL: Final = 48
STEEP_LETTERS: Final = 22
# No axis has room for more, and no number of a suite is as large.
LARGEST: Final = 1e30


@dataclass(frozen=True)
class Mark:
    """A point of a line.

    Attributes
    ----------
    x : int
        Number of the commit.
    y, low, high : float
        With bounds of noise, NaN where that is not known.
    """

    x: int
    y: float
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class Line:
    """A case on a machine.

    Attributes
    ----------
    series : int
        Number of the machine, which gives colour and marker.
    label : str
    marks : tuple of Mark
    stalls : tuple of int
        Commits on which it stalls.
    """

    series: int
    label: str
    marks: tuple[Mark, ...]
    stalls: tuple[int, ...] = ()


@dataclass(frozen=True)
class Panel:
    """A plot.

    Attributes
    ----------
    name : str
        Prefix of its ids; letters, digits and hyphens.
    title, text : str
        For those who do not see it.
    ticks : tuple of str
        Labels of commits, with line breaks.
    lines : tuple of Line
    relative : bool
        Whether values are multiples of the first one.
    """

    name: str
    title: str
    text: str
    ticks: tuple[str, ...]
    lines: tuple[Line, ...]
    relative: bool = True

    @property
    def crowded(self) -> bool:
        """Whether labels of commits have to stand on end."""
        return len(self.ticks) > MOST_LEVEL_LABELS

    @property
    def height(self) -> float:
        """In inches of 72 points."""
        return BODY + (STEEP_LABELS if self.crowded else LEVEL_LABELS)


@functools.cache
def _style() -> dict[str, Any]:
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": "lab.report",
        "font.size": 11,
        # The subject of a commit may have dollars.
        "text.parse_math": False,
        "axes.edgecolor": GRID,
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": GRID,
        "ytick.color": GRID,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": FAINT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "grid.color": GRID,
        "path.simplify": False,
    }


def can_draw(*values: float) -> bool:
    """Whether there is a place on an axis for all of them."""
    return all(abs(value) <= LARGEST for value in values)


def svg(panel: Panel) -> str:
    """The plot as an SVG element for a page."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_style()):
        figure = Figure(figsize=(WIDTH, panel.height))
        FigureCanvasSVG(figure)
        labels = panel.height - BODY
        axes = figure.add_axes((0.115, labels / panel.height, 0.775, (BODY - 0.1) / panel.height))
        for place, line in enumerate(panel.lines):
            _draw(axes, line, DODGE * (place - (len(panel.lines) - 1) / 2))
        _x_axis(axes, panel)
        _y_axis(axes, panel)
        _stalls(axes, panel)
        _end_labels(axes, panel)
        sink = io.StringIO()
        figure.savefig(sink, format="svg", transparent=True, metadata={"Date": None})
    return _inline(sink.getvalue(), panel)


def _draw(axes: Any, line: Line, aside: float) -> None:
    """A line with its noise, a little aside, so that no line hides another."""
    colour = SERIES[line.series % len(SERIES)]
    for run in _runs([mark for mark in line.marks if math.isfinite(mark.low)]):
        low, high = [mark.low for mark in run], [mark.high for mark in run]
        where = [mark.x + aside for mark in run]
        if low != high:
            # A ribbon leads the eye from commit to commit; the bars are what was measured.
            ribbon = axes.fill_between(where, low, high, color=colour, alpha=0.16, linewidth=0)
            ribbon.set_gid(f"band-{line.series}")
            axes.vlines(where, low, high, color=colour, linewidth=1.4, alpha=0.75)
    for run in _runs(line.marks):
        xs, ys = [mark.x + aside for mark in run], [mark.y for mark in run]
        axes.plot(xs, ys, color=colour, linewidth=1.6, zorder=3)
    marker = MARKERS[line.series % len(MARKERS)]
    xs, ys = [mark.x + aside for mark in line.marks], [mark.y for mark in line.marks]
    (marks,) = axes.plot(xs, ys, marker, color=colour, markersize=6.5, zorder=4)
    marks.set_gid(f"marks-{line.series}")


def _runs(marks: Sequence[Mark]) -> list[list[Mark]]:
    """Marks of neighbouring commits: no line leads over a commit that has no number."""
    runs: list[list[Mark]] = []
    for mark in marks:
        if runs and runs[-1][-1].x == mark.x - 1:
            runs[-1].append(mark)
        else:
            runs.append([mark])
    return runs


def _x_axis(axes: Any, panel: Panel) -> None:
    count = len(panel.ticks)
    axes.set_xlim(-0.45, count - 0.55)
    axes.set_xticks(range(count), [""] * count)
    axes.tick_params(axis="x", length=3)
    # Each line is a text of its own, so that it is centred whatever the page's font is.
    for x, tick in enumerate(panel.ticks):
        for row, line in enumerate(_label_lines(tick, count)):
            axes.annotate(
                line,
                (x, 0),
                xycoords=axes.get_xaxis_transform(),
                xytext=(0, -8 - 12 * row),
                textcoords="offset points",
                fontsize=9 if count > MOST_LEVEL_LABELS - 1 else 10,
                rotation=70 if panel.crowded else 0,
                rotation_mode="anchor",
                ha="right" if panel.crowded else "center",
                va="center" if panel.crowded else "top",
                color=FAINT if row else INK,
            )


def _label_lines(tick: str, count: int) -> list[str]:
    """A label in lines that have room beside `count - 1` others; the first line stays alone."""
    if count > MOST_LEVEL_LABELS:
        return [textwrap.shorten(tick, STEEP_LETTERS, placeholder=" …")]
    first, _, rest = tick.partition("\n")
    room = {"width": LETTERS_IN_ALL // count, "max_lines": 2, "placeholder": " …"}
    return [first, *textwrap.wrap(rest, **room, break_long_words=False, break_on_hyphens=False)]


def _y_axis(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    values = [
        value
        for line in panel.lines
        for mark in line.marks
        for value in (mark.y, mark.low, mark.high)
        if math.isfinite(value)
    ]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if panel.relative:
        low, high = min(low, 1 - MIN_RELATIVE_SPAN), max(high, 1 + MIN_RELATIVE_SPAN)
        axes.axhline(1, color=FAINT, linewidth=1, dashes=(3, 3), zorder=1)
    else:
        low, high = min(low, 0.0), max(high, 0.0)
        if low == high:
            high = 1.0
    margin = 0.07 * (high - low)
    axes.set_ylim(low - margin if panel.relative else low - 0.4 * margin, high + margin)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10], integer=False))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick_text(panel.relative)))
    axes.grid(axis="y", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0, labelsize=9.5)


def _tick_text(relative: bool) -> Any:
    def text(value: float, _: int) -> str:
        if relative:
            return f"{value:.2f}×" if abs(value) < 1e5 else f"{value:.3g}×"
        if abs(value) >= 1000:
            power = min(int(math.log10(abs(value)) // 3), 4)
            return f"{value / 1000**power:.3g}{' kMGT'[power].strip()}"
        return f"{value:.3g}"

    return text


def _stalls(axes: Any, panel: Panel) -> None:
    """Where a case stalls: a cross at the top, where no number is, and the word."""
    where = sorted({x for line in panel.lines for x in line.stalls})
    if not where:
        return
    top = axes.get_xaxis_transform()
    (crosses,) = axes.plot(
        where, [0.9] * len(where), "X", color=STALL, markersize=9, transform=top, zorder=5
    )
    crosses.set_gid("stalls")
    for x in where:
        axes.text(x, 0.79, "stalls", transform=top, ha="center", fontsize=10)


def _end_labels(axes: Any, panel: Panel) -> None:
    """The last value of each line, beside it, moved apart where two would overlap."""
    lines = [line for line in panel.lines if line.marks]
    bottom, top = axes.get_ylim()
    apart = 0.085 * (top - bottom)
    at, said = -math.inf, ""
    for line in sorted(lines, key=lambda line: line.marks[-1].y):
        last = line.marks[-1]
        text = _tick_text(panel.relative)(last.y, 0)
        if text == said:
            continue
        at, said = max(last.y, at + apart), text
        axes.text(
            1.012,
            (at - bottom) / (top - bottom),
            text,
            transform=axes.transAxes,
            va="center",
            fontsize=10.5,
            fontweight="bold",
        )


def _inline(text: str, panel: Panel) -> str:
    """An SVG file as an element of the page: with ids of its own, roles for colours, and words."""
    text = text[text.index("<svg") :]
    name = escape(panel.name, {'"': "&quot;"})
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    # It would hold for the whole page; the page says it for plots.
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r'(?<=\bid=")|(?<=href="#)|(?<=url\(#)', lambda _: f"{name}-", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    # The page has a font; matplotlib's own is wider than most, so that what fitted there fits.
    text = re.sub(r"font-family: [^;\"]+;? ?", "", text)
    text = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", text)
    text = re.sub(r">\s+<", "><", text)
    text = re.sub(r"\s*\n\s*", " ", text)
    text = _COORDINATES.sub(_rounded, text)
    text = _without_idle_ids(text)
    label = f"{name}-title {name}-desc"
    head = (
        f'<svg role="img" aria-labelledby="{label}" class="plot" '
        f'viewBox="0 0 {72 * WIDTH:g} {72 * panel.height:g}" xmlns="http://www.w3.org/2000/svg" '
        'xmlns:xlink="http://www.w3.org/1999/xlink">'
        f'<title id="{name}-title">{escape(panel.title)}</title>'
        f'<desc id="{name}-desc">{escape(panel.text)}</desc>'
    )
    return re.sub(r"<svg[^>]*>", lambda _: head, text, count=1).strip()


def _rounded(attribute: re.Match[str]) -> str:
    """Coordinates to a tenth of a point, which is finer than what one sees."""
    return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}", attribute[0])


def _without_idle_ids(text: str) -> str:
    """Without ids that nothing refers to, but for those of marks, which tests count."""
    used = set(re.findall(r"[#(]#?([\w.-]+)(?=[\")])", text))

    def keep(match: re.Match[str]) -> str:
        name = match[1]
        return match[0] if name in used or _COUNTED.search(name) else ""

    text = re.sub(r' id="([^"]+)"', keep, text)
    return re.sub(r"<g></g>|<g/>", "", text)
