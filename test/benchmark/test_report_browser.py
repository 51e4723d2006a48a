"""The page in headless Chromium with the network off: drawn, legible, and nothing asked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import report_results as made
from offline_browser import Tab, chromium, find_chromium, offline_tab

import report
from lab.report import plots

pytestmark = pytest.mark.slow

# Panels of a question, then marks: cases * commits * machines, a mark a number that is there.
MARKS: Final = {
    "decode": (7, 7 * 4 * 2),
    "mixed": (2 * 2, 2 * 2 * 3 * 2),
    "overlap": (2, 2 * 4),
    "transfers": (2, 2 * 4 * 2),
}
# One cross a panel where both machines stall on the same commit.
STALLS: Final = {"mixed": 2 * 2}

_BOXES: Final = """
(svg) => {
  const sizes = (selector) => [...svg.querySelectorAll(selector)].map((node) => {
    const box = node.getBoundingClientRect();
    return [box.width, box.height];
  });
  return {
    id: svg.querySelector("title").id,
    marks: sizes('[id*="-marks-"] use'),
    bands: sizes('[id*="-band-"] use'),
    stalls: sizes('[id$="-stalls"] use'),
    size: [svg.getBoundingClientRect().width, svg.getBoundingClientRect().height],
  };
}
"""

# Contrast of each piece of text with what lies behind it (WCAG 2.2, relative luminance).
_CONTRASTS: Final = """
() => {
  const parse = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour[3] > 0) return colour;
    }
    return [255, 255, 255, 1];
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.getClientRects().length) continue;
    const style = getComputedStyle(node);
    const inPlot = node instanceof SVGElement;
    const pair = [parse(inPlot ? style.fill : style.color), behind(node)].map(luminance);
    const [low, high] = pair.sort((a, b) => a - b);
    found.push([(high + 0.05) / (low + 0.05), walker.currentNode.data.trim().slice(0, 40)]);
  }
  return found;
}
"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    root: Path = tmp_path_factory.mktemp("page")
    shas = made.make_repo(root / "repo")
    results = made.write_results(root / "results", shas)
    out = root / "page.html"
    arguments = ["--repo", str(root / "repo"), "--results", str(results), "--out", str(out)]
    assert report.main(arguments) == 0
    return out.as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def open_all(tab: Tab, address: str) -> None:
    """Open the page and all that is folded."""
    tab.page.goto(address)
    tab.page.evaluate("document.querySelectorAll('details').forEach((d) => (d.open = true))")


@pytest.mark.parametrize(("part", "status"), [("mixed", 0), ("nothing", 1)])
def test_a_picture_of_the_page(address: str, tmp_path: Path, part: str, status: int) -> None:
    from PIL import Image

    find_chromium()
    root, picture = Path(address.removeprefix("file://")).parent, tmp_path / "page.png"
    arguments = ["--repo", str(root / "repo"), "--results", str(root / "results")]
    arguments += ["--out", str(tmp_path / "page.html"), "--screenshot", str(picture)]
    # A browser of its own, in a process of its own: playwright has one loop a thread.
    command = [sys.executable, report.__file__, *arguments, "--part", part]
    assert subprocess.run(command, capture_output=True).returncode == status
    if status == 0:
        with Image.open(picture) as image:
            assert image.width > 1000
            assert len(image.convert("RGB").getcolors(1 << 24) or []) > 30


@pytest.mark.parametrize("width", [1200, 390])
def test_every_plot_is_drawn(browser: Any, address: str, width: int) -> None:
    with offline_tab(browser, width) as tab:
        open_all(tab, address)
        drawn = [svg.evaluate(_BOXES) for svg in tab.page.query_selector_all("svg.plot")]
        tab.check()
    for question, (panels, marks) in MARKS.items():
        own = [plot for plot in drawn if plot["id"].startswith(f"{question}-")]
        assert len(own) == panels, question
        assert sum(len(plot["marks"]) for plot in own) == marks, question
        assert sum(len(plot["stalls"]) for plot in own) == STALLS.get(question, 0), question
        for plot in own:
            assert all(w > 3 and h > 3 for w, h in plot["marks"] + plot["stalls"])
            assert plot["size"][0] > 300
            # Exact numbers have no noise.
            assert bool(plot["bands"]) == (question != "transfers")
            assert all(w > 20 and h > 0 for w, h in plot["bands"])
    assert len(drawn) == sum(panels for panels, _ in MARKS.values())


def test_a_phone_need_not_scroll_sideways(browser: Any, address: str) -> None:
    with offline_tab(browser, 390) as tab:
        open_all(tab, address)
        assert tab.page.evaluate("document.documentElement.scrollWidth") == 390
        sizes = tab.page.evaluate(
            "[...document.querySelectorAll('svg.plot text')].map((text) =>"
            " text.getBoundingClientRect()).map((box) => [box.left, box.right])"
        )
        tab.check()
    assert sizes
    assert all(0 <= left < right <= 390 for left, right in sizes)


def test_labels_of_commits_do_not_overlap(browser: Any, address: str) -> None:
    script = """
    [...document.querySelectorAll("svg.plot")].flatMap((svg) => {
      const boxes = [...svg.querySelectorAll("text")].map((text) => text.getBoundingClientRect());
      return boxes.flatMap((a, i) => boxes.slice(i + 1).map((b) =>
        Math.min(Math.min(a.right, b.right) - Math.max(a.left, b.left),
                 Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top))));
    })
    """
    for width in (1200, 390):
        with offline_tab(browser, width) as tab:
            open_all(tab, address)
            overlaps = tab.page.evaluate(script)
            # Boxes of lines below each other share the room for letters' accents and tails.
            assert max(overlaps) < 5, width


@pytest.mark.parametrize("count", [1, 5, 6, 12])
def test_labels_stay_within_the_plot(browser: Any, tmp_path: Path, count: int) -> None:
    ticks = (*["#28500\npenalties' copy"] * (count - 1), "0123abcd\nWhat the newest commit did")
    marks = tuple(plots.Mark(x, 1 + x / 50, 0.9, 1.3) for x in range(count))
    svg = plots.svg(plots.Panel("x", "title", "text", ticks, (plots.Line(0, "m", marks),)))
    (tmp_path / "plot.html").write_text(f"<!doctype html><div style='width:350px'>{svg}</div>")
    with offline_tab(browser) as tab:
        tab.page.goto((tmp_path / "plot.html").as_uri())
        outer, *inner = tab.page.evaluate(
            "[...document.querySelectorAll('svg, svg text')].map((n) => n.getBoundingClientRect())"
            ".map((box) => [box.left, box.top, box.right, box.bottom])"
        )
        tab.check()
    assert len(inner) >= count + 4
    for left, top, right, bottom in inner:
        assert outer[0] <= left < right <= outer[2]
        assert outer[1] <= top < bottom <= outer[3]


def test_a_page_that_asks_the_network_is_found_out(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text("<!doctype html><img src='http://example.invalid/x.png'>")
    with offline_tab(browser) as tab:
        tab.page.goto((tmp_path / "bad.html").as_uri())
        assert tab.requests == ["http://example.invalid/x.png"]
        assert tab.errors


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(browser: Any, address: str, scheme: str) -> None:
    with offline_tab(browser, scheme=scheme) as tab:
        open_all(tab, address)
        contrasts = tab.page.evaluate(_CONTRASTS)
        background = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        tab.check()
    assert len(contrasts) > 300
    assert min(contrasts)[0] >= 4.5, min(contrasts)
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")


def test_links_of_the_page_lead_somewhere(browser: Any, address: str) -> None:
    with offline_tab(browser) as tab:
        tab.page.goto(address)
        lost = tab.page.evaluate(
            "[...document.querySelectorAll('a[href^=\"#\"]')].map((a) => a.hash)"
            ".filter((hash) => !document.getElementById(hash.slice(1)))"
        )
        tab.check()
    assert lost == []
