"""The documentation as a site: a broken link ends its build, and what is built asks nobody else."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote

import pytest
from console import ROOT, navigation

LOADED: Final = {"img", "link", "script", "iframe", "source", "video"}
"""Elements whose address a browser fetches by itself."""
BUILD_S: Final = 300.0


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` does, in a folder with the settings and docs/."""
    return subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=BUILD_S,
    )


@dataclass(slots=True)
class Page(HTMLParser):
    """What a page has: names that links may lead to, links, and what it makes a browser fetch."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super(Page, self).__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if address := given.get("href") or given.get("src"):
            (self.loads if tag in LOADED else self.links).append(address)


@cache
def page_of(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "zensical.toml", folder)
    shutil.copytree(ROOT / "docs", folder / "docs")
    built = build(folder)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "build/site"


def elsewhere(addresses: Iterable[str]) -> list[str]:
    return [each for each in addresses if re.match(r"(?:[a-z]+:)?//", each)]


def leads_nowhere(path: Path, address: str) -> bool:
    """Whether a link of this page to one of the site's files, or a section of one, is broken."""
    name, _, anchor = unquote(address.partition("?")[0]).partition("#")
    target = path.parent / name if name else path
    if target.is_dir():
        target /= "index.html"
    known = target.exists() and (
        not anchor or target.suffix != ".html" or anchor in page_of(target.resolve()).ids
    )
    return not known


@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    pages = [path for path in site.rglob("*.html") if path.name != "404.html"]
    assert len(pages) > len([page for part in navigation().values() for page in part])
    broken = [
        (str(path.relative_to(site)), address)
        for path in pages
        for address in page_of(path).links + page_of(path).loads
        if not re.match(r"(?:[a-z]+:)", address) and leads_nowhere(path, address)
    ]
    assert broken == []


@pytest.mark.slow
def test_the_site_asks_nobody_else(site: Path) -> None:
    """No font, script, style or picture of another server."""
    fetched = {each for path in site.rglob("*.html") for each in page_of(path).loads}
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    fetched |= set(re.findall(r"(?:url\(|@import )['\"]?([^'\")]+)", styles))
    assert fetched
    assert elsewhere(fetched) == []


@pytest.mark.slow
@pytest.mark.parametrize("link", ["gone.md", "index.md#gone", "../README.md"])
def test_a_broken_link_ends_the_build(link: str, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text(f"# A page\n\n[A link]({link}).\n")
    settings = (ROOT / "zensical.toml").read_text(encoding="utf-8")
    bare = re.sub(r"^nav = .*?^\]$", "", settings, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "zensical.toml").write_text(bare)
    built = build(tmp_path)
    assert built.returncode != 0
    assert "issue" in built.stdout + built.stderr
