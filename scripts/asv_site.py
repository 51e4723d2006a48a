#!/usr/bin/env python3
"""Make the site that ``asv publish`` wrote open without a network, and from a file.

asv's page loads ten files from elsewhere: jQuery and its plugins, MD5, Bootstrap. They are in six
packages of npm, which are fetched once, with ``npm pack`` from wherever npm is configured to get
packages, into ``.cache/asv-site``, and checked against the hashes below. The page is then made to load
its own copies. It also asks for its data by requests that browsers refuse to pages opened from a file;
there each file of data gets a twin that is a script.

Examples
--------
::

    python scripts/asv_site.py                  # .asv/html; `make bench` does it by itself
    python scripts/asv_site.py --site DIR
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

REPO_ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = "offline"
LOADER: Final = "data.js"
NPM_TIMEOUT_S: Final = 300


class SiteError(RuntimeError):
    """The site stays as it is; the message says why."""


@dataclass(frozen=True)
class Package:
    """A package of npm and what asv's page needs of it.

    Attributes
    ----------
    name, version : str
    integrity : str
        SHA-512 of the archive, in base64, as npm states it.
    files : dict of str to str
        By the file's name in the page's tags: its path in the package.
    """

    name: str
    version: str
    integrity: str
    files: dict[str, str]

    @property
    def archive(self) -> str:
        """File name of the archive."""
        return f"{self.name}-{self.version}.tgz"


# flot is not in npm as the minified files that asv names, so its sources take their place.
PACKAGES: Final = (
    Package(
        "jquery",
        "3.3.1",
        "Ubldcmxp5np52/ENotGxlLe6aGMvmF4R8S6tZjsP6Knsaxd/xp3Zrh50cG93lR6nPXyUFwzN3ZSOQI0wRJNdGg==",
        {"jquery-3.3.1.min.js": "dist/jquery.min.js"},
    ),
    Package(
        "flot",
        "0.8.3",
        "xg2otcTJDvS+ERK+my4wxG/ASq90QURXtoM4LhacCq0jQW2jbyjdttbRNqU2cPykrpMvJ6b2uSp6SAgYAzj9tQ==",
        {
            "jquery.flot.min.js": "jquery.flot.js",
            "jquery.flot.time.min.js": "jquery.flot.time.js",
            "jquery.flot.selection.min.js": "jquery.flot.selection.js",
            "jquery.flot.categories.min.js": "jquery.flot.categories.js",
        },
    ),
    Package(
        "flot-orderbars",
        "1.0.0",
        "Jv51fvzevUjNXEeozpwEKfPjhiZhfiJddv0WHjduUTCmSF+7T5K7C9c9Y1wIVmUhDBv5fLMjgbwKecT0GIKPZA==",
        {"jquery.flot.orderBars.js": "js/jquery.flot.orderBars.js"},
    ),
    Package(
        "stupid-table-plugin",
        "1.1.3",
        "2Vk7XouQPxUQPRe9w0Fu7ZZ8kHLK7rDoLMsCgtKxRNJ7f4dSOGvW9CkHsq5wD6QsaEnWoyLBYH3xOEsrK3yWBg==",
        {"stupidtable.min.js": "stupidtable.min.js"},
    ),
    Package(
        "blueimp-md5",
        "2.19.0",
        "DRQrD6gJyy8FbiE4s+bDoXS9hiW3Vbx5uCdwvcCf3zLHL+Iv7LtGHLpr+GZV8rHG8tK766FGYBwRbu8pELTt+w==",
        {"md5.min.js": "js/md5.min.js"},
    ),
    Package(
        "bootstrap",
        "3.1.1",
        "TAzqS8E/ISpVHP29gYhy+1NSV+FJwApDVQhDfgLYsIuUDJiqJzH2DfORN5tiu+Ie2iBLrzEG34t4Rf465cigqg==",
        {
            "bootstrap.min.js": "dist/js/bootstrap.min.js",
            "bootstrap.min.css": "dist/css/bootstrap.min.css",
        },
    ),
)

# Answers the page's requests for JSON, where it was opened from a file, with the twin of each file.
_LOADER_SOURCE: Final = """\
jQuery.ajaxTransport("json", function (options) {
  if (window.location.protocol !== "file:") {
    return undefined;
  }
  return {
    send: function (headers, complete) {
      var script = document.createElement("script");
      script.src = options.url.split("?")[0] + ".js";
      script.onload = function () {
        complete(200, "OK", {json: window.asvData});
        script.remove();
      };
      script.onerror = function () {
        complete(404, "Not Found");
        script.remove();
      };
      document.head.appendChild(script);
    },
    abort: function () {}
  };
});
"""

_TAG: Final = re.compile(
    r"<(?P<kind>script|link)\b(?P<attributes>[^>]*?\b(?:src|href)=\"(?P<url>https?://[^\"]+)\"[^>]*)>",
    re.DOTALL,
)


def fetch(packages: Sequence[Package], cache: Path) -> None:
    """Have the archives of `packages` in `cache`, each with the hash that it must have.

    Raises
    ------
    SiteError
        If npm is missing or fails, or an archive is not the one that was meant.
    """
    cache.mkdir(parents=True, exist_ok=True)
    for package in packages:
        path = cache / package.archive
        if path.is_file() and _integrity(path) == package.integrity:
            continue
        # Only what has been checked gets its name, also where two do this at a time.
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            fresh = Path(scratch) / package.archive
            _pack(package, fresh.parent)
            if not fresh.is_file():
                raise SiteError(f"npm pack left no {package.archive}")
            if _integrity(fresh) != package.integrity:
                raise SiteError(f"{package.archive} is not the archive whose SHA-512 is pinned")
            fresh.replace(path)


def _integrity(path: Path) -> str:
    return base64.b64encode(hashlib.sha512(path.read_bytes()).digest()).decode()


def _pack(package: Package, folder: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise SiteError("npm is not installed, which fetches what asv's site loads from elsewhere")
    wanted = f"{package.name}@{package.version}"
    try:
        done = subprocess.run(
            [npm, "pack", wanted, "--silent", "--fetch-retries=1"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=NPM_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise SiteError(f"npm pack {wanted} took more than {NPM_TIMEOUT_S} s") from error
    if done.returncode != 0:
        reason = (done.stderr or done.stdout).strip()[-300:]
        raise SiteError(f"npm pack {wanted} failed: {reason}")


def unpack(packages: Sequence[Package], cache: Path, folder: Path) -> None:
    """Write the files of the archives into `folder`, under the names that the page has for them."""
    folder.mkdir(exist_ok=True)
    for package in packages:
        with tarfile.open(cache / package.archive) as archive:
            for name, member in package.files.items():
                source = archive.extractfile(f"package/{member}")
                if source is None:
                    raise SiteError(f"{package.archive} has no {member}")
                (folder / name).write_bytes(source.read())


def localize(page: str, names: Sequence[str]) -> str:
    """The page with its own copies of what it loaded from elsewhere.

    Raises
    ------
    SiteError
        If it loads something else.
    """

    def own(tag: re.Match[str]) -> str:
        url = html.unescape(tag["url"])
        name = url.rpartition("/")[2]
        if name not in names:
            raise SiteError(f"asv's page loads {url}, which is in none of the packages")
        if tag["kind"] == "link":
            return f'<link rel="stylesheet" href="{FOLDER}/{name}">'
        script = f'<script src="{FOLDER}/{name}" onerror="js_load_failure()">'
        if name.startswith("jquery-"):
            script += f'</script>\n    <script src="{FOLDER}/{LOADER}">'
        return script

    return _TAG.sub(own, page)


def write_twins(site: Path) -> int:
    """Give each file of JSON a twin that is a script; return how many there are."""
    paths = sorted(site.rglob("*.json"))
    for path in paths:
        # U+2028 and U+2029 are allowed in both; "NaN", which JSON has not, a script has.
        text = path.read_text(encoding="utf-8")
        path.with_name(path.name + ".js").write_text(
            f"window.asvData = {text};\n", encoding="utf-8"
        )
    return len(paths)


def make_offline(site: Path, cache: Path) -> None:
    """Make the site below `site` work without a network, served or opened from a file.

    Parameters
    ----------
    site : Path
        What ``asv publish`` wrote. It may have been made to work before.
    cache : Path
        Where archives of npm are kept.

    Raises
    ------
    SiteError
        If that cannot be done; the page then stays as asv wrote it.
    """
    index = site / "index.html"
    if not index.is_file():
        raise SiteError(f"there is no site in {site}: asv publish writes one")
    names = [name for package in PACKAGES for name in package.files]
    page = localize(index.read_text(encoding="utf-8"), names)
    fetch(PACKAGES, cache)
    unpack(PACKAGES, cache, site / FOLDER)
    (site / FOLDER / LOADER).write_text(_LOADER_SOURCE, encoding="utf-8")
    write_twins(site)
    index.write_text(page, encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Make a site work offline; return the exit status."""
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(prog="asv_site.py", description=summary)
    parser.add_argument("--site", type=Path, default=REPO_ROOT / ".asv" / "html", metavar="DIR")
    parser.add_argument(
        "--cache", type=Path, default=REPO_ROOT / ".cache" / "asv-site", metavar="DIR"
    )
    args = parser.parse_args(argv)
    try:
        make_offline(args.site, args.cache)
    except SiteError as error:
        print(f"asv_site: error: {error}", file=sys.stderr)
        return 1
    print(f"{args.site / 'index.html'} opens without a network")
    return 0


if __name__ == "__main__":
    sys.exit(main())
