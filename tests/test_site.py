"""The documentation site builds without a warning, needs no network, and has every public name."""

import re
from pathlib import Path

import pytest
from sphinx.cmd.build import build_main

import affine_attn
import affine_attn.distill
import affine_attn.models
from tests.support.chromium import MISSING, chromium, programs, wait

ROOT = Path(__file__).parent.parent
# Logs grow, and the reference is generated.
LONG = ("log", "reference")

pytestmark = pytest.mark.filterwarnings("ignore:'myst_parser")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Build as `make docs` does, in this process, which has loaded torch and transformers: that is most of its time."""
    folder = tmp_path_factory.mktemp("site")
    status = build_main(["-q", "-W", "--keep-going", "-b", "html", str(ROOT / "docs"), str(folder)])
    assert status == 0, "see the captured warnings"
    return folder


def test_every_public_name_is_in_the_reference(site):
    text = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    named = set(re.findall(r'id="affine_attn\.([\w.]+)"', text))
    public = [*affine_attn.__all__, *(f"models.{name}" for name in affine_attn.models.__all__)]
    public += [f"distill.{name}" for name in affine_attn.distill.__all__]
    assert not set(public) - named
    assert "affine-attn distill" in text
    assert "--sweep" in text


def test_pages_load_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="([^"]*)"', page.read_text())
        assert not [address for address in loaded if re.match(r"(?:https?:)?//", address)], page
    styles = "".join(path.read_text() for path in site.rglob("*.css"))
    assert not re.findall(r"url\([\"']?(?:https?:)?//|@import", styles)


def test_pages_are_short():
    for page in (ROOT / "docs").rglob("*.md"):
        if page.parent.name not in LONG:
            assert len(page.read_text().splitlines()) <= 400, page


def test_the_page_for_language_models_names_every_page(site):
    text = (site / "llms.txt").read_text()
    linked = set(re.findall(r"\]\(([^)]*)\)", text))
    assert not [link for link in linked if not (site / link).exists()]
    pages = {str(page.relative_to(ROOT / "docs").with_suffix(".html")) for page in (ROOT / "docs").rglob("*.md")}
    assert not {page for page in pages - linked if not page.startswith(("log/", "reproduction-", "index"))}


@pytest.mark.browser
@pytest.mark.skipif(programs() is None, reason=MISSING)
def test_search_works_from_disk(site, tmp_path):
    with chromium(tmp_path) as browser:
        browser.get(f"{(site / 'search.html').as_uri()}?q=track_alpha")
        links = wait(lambda: browser.find_elements("css selector", "#search-results li a"))
        assert any("layers.html" in link.get_attribute("href") for link in links)
