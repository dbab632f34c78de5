"""The site as Markdown: each page, the reference, and the list of them."""

from __future__ import annotations

import re
from pathlib import Path
from runpy import run_path

import pytest

import dask_image_ingest as dii

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    run_path(str(DOCS / "markdown_pages.py"))["write_pages"](DOCS, out)
    return out


def test_llms_txt_lists_every_page_of_the_guide_with_a_sentence(site):
    text = (site / "llms.txt").read_text()
    assert re.match(r"# dask-image-ingest\n\n> WebDataset tar shards .*\.\n\n## Guide\n", text)
    listed = re.findall(r"^- \[([^\]]+)\]\(([^)]+)\)(?:: (\S.*))?$", text, re.MULTILINE)
    assert len(listed) == len([line for line in text.splitlines() if line.startswith("- ")])
    told = {path: (title, sentence) for title, path, sentence in listed}
    for page in (DOCS / "guide").glob("*.md"):
        if page.name != "index.md":
            title, sentence = told[f"guide/{page.name}"]
            assert f"# {title}\n" in page.read_text()
            # The glossary is a table from its first line on.
            assert len(sentence.split()) > 2 or page.stem == "glossary", page.name
    assert all((site / path).is_file() for path in told)


def test_a_page_is_fetched_as_its_source_and_its_links_lead_to_files_of_the_site(site):
    for page in [*(DOCS / "guide").glob("*.md"), *(DOCS / "design").glob("*.md")]:
        copy = site / page.relative_to(DOCS)
        link = r"\]\([^)\s]+\)"
        assert re.split(link, copy.read_text()) == re.split(link, page.read_text())
    for copy in site.rglob("*.md"):
        prose = re.sub(r"^```.*?^```$", "", copy.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\(([^)\s#]+)", prose):
            target = (copy.parent / link).resolve()
            inside = target.is_relative_to(site) and target.is_file()
            assert "://" in link or inside, (copy, link)


def test_the_reference_as_markdown_has_every_public_name(site):
    text = (site / "reference" / "api.md").read_text()
    named = set(re.findall(r"^## (\S+)$", text, re.MULTILINE))
    assert {name for name in dii.__all__ if name != "curate"} <= named
    assert {f"curate.{name}" for name in dii.curate.__all__} <= named
    assert "DataFrame.images.iter_batches" in named
    assert dii.decode_images.__doc__.splitlines()[0] in text
