"""asv's own site without a network: what is replaced by what, and that it works in Chromium."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import report_results as made
from offline_browser import chromium, offline_tab

import asv_site
import bench
from asv_site import PACKAGES, Package, SiteError

REPO_ROOT = Path(__file__).resolve().parents[2]
CACHE = REPO_ROOT / ".cache" / "asv-site"
NAMES = [name for package in PACKAGES for name in package.files]


def asv_page() -> str:
    import asv

    return (Path(asv.__file__).parent / "www" / "index.html").read_text()


def test_the_ten_files_of_asvs_page_are_ours() -> None:
    page = asv_site.localize(asv_page(), NAMES)
    assert len(NAMES) == 10
    for name in NAMES:
        assert page.count(f'"{asv_site.FOLDER}/{name}"') == 1
    # Links that a reader may click remain; nothing is loaded from elsewhere.
    assert not asv_site._TAG.search(page)
    assert "integrity=" not in page
    # Data is answered for as soon as there is jQuery.
    assert (
        page.index("jquery-3.3.1") < page.index(asv_site.LOADER) < page.index("jquery.flot.min.js")
    )


def test_doing_it_twice_changes_nothing() -> None:
    page = asv_site.localize(asv_page(), NAMES)
    assert asv_site.localize(page, NAMES) == page


def test_a_file_that_is_not_known_is_refused() -> None:
    page = '<script src="https://cdn.example.invalid/new.min.js"></script>'
    with pytest.raises(SiteError, match=r"new\.min\.js, which is in none"):
        asv_site.localize(page, NAMES)


def package(tmp_path: Path, text: str = "code") -> Package:
    """A package whose archive lies in `tmp_path`."""
    path = tmp_path / "made-up-1.0.0.tgz"
    with tarfile.open(path, "w:gz") as archive:
        entry = tarfile.TarInfo("package/dist/x.js")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text.encode()))
    return Package("made-up", "1.0.0", asv_site._integrity(path), {"x.min.js": "dist/x.js"})


def test_a_kept_archive_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = package(tmp_path)
    monkeypatch.setattr(asv_site.shutil, "which", lambda name: None)
    asv_site.fetch([one], tmp_path)
    asv_site.unpack([one], tmp_path, tmp_path / "site")
    assert (tmp_path / "site" / "x.min.js").read_text() == "code"


def test_an_archive_with_another_hash_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    one = package(cache)
    other = (package(tmp_path, "other code"), (tmp_path / one.archive).read_bytes())[1]
    (cache / one.archive).write_bytes(other)
    monkeypatch.setattr(asv_site, "_pack", lambda p, c: (c / p.archive).write_bytes(other))
    with pytest.raises(SiteError, match="SHA-512 is pinned"):
        asv_site.fetch([one], cache)
    # What was there before is no better, and is not used either.
    assert asv_site._integrity(cache / one.archive) != one.integrity
    assert [path.name for path in cache.iterdir()] == [one.archive]


def test_without_npm_the_site_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index.html").write_text(asv_page())
    monkeypatch.setattr(asv_site.shutil, "which", lambda name: None)
    with pytest.raises(SiteError, match="npm is not installed"):
        asv_site.make_offline(tmp_path, tmp_path / "cache")
    assert (tmp_path / "index.html").read_text() == asv_page()
    with pytest.raises(SiteError, match="asv publish"):
        asv_site.make_offline(tmp_path / "nowhere", tmp_path / "cache")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published site, made to work offline."""
    root = tmp_path_factory.mktemp("site")
    results = made.write_results(root / "results", made.make_repo(root / "repo"))
    made.config(root / "repo", results)
    try:
        asv_site.fetch(PACKAGES, CACHE)
    except SiteError as error:
        pytest.skip(f"needs the packages of npm: {error}")
    (root / "repo" / ".cache").mkdir()
    (root / "repo" / ".cache" / "asv-site").symlink_to(CACHE)
    page, how = bench.publish(root / "repo")
    assert how == "opens without a network"
    return page.parent


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


# How much of each canvas is not transparent.
_INK = """
() => [...document.querySelectorAll("canvas.flot-base")].map((canvas) => {
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let inked = 0;
  for (let i = 3; i < data.length; i += 4) inked += data[i] > 0;
  return inked;
})
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "least"),
    [("#/", 16), ("#decode.Decode.track_us_per_token_ratio", 2), ("#mixed.Mixed.track_stalled", 2)],
)
def test_asvs_site_draws_without_a_network(
    browser: Any, site: Path, place: str, least: int
) -> None:
    with offline_tab(browser) as tab:
        tab.page.goto((site / "index.html").as_uri() + place)
        tab.page.wait_for_function(
            f"document.querySelectorAll('canvas.flot-base').length >= {least}", timeout=30_000
        )
        tab.page.wait_for_timeout(300)
        ink = tab.page.evaluate(_INK)
        tab.check()
    assert min(ink) > 200, ink


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "text"),
    [("#/summarylist", "decode.Decode.track_us_per_token"), ("#/regressions", "Regressions")],
)
def test_asvs_lists_show_without_a_network(browser: Any, site: Path, place: str, text: str) -> None:
    with offline_tab(browser) as tab:
        tab.page.goto((site / "index.html").as_uri() + place)
        tab.page.wait_for_selector("table tbody tr", timeout=30_000)
        assert text in tab.page.inner_text("body")
        # The plugin that sorts tables is a later version than asv's.
        tab.page.click("table thead th >> nth=0")
        tab.check()
