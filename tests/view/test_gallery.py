"""``show`` and ``gallery``: few images decoded, errors visible, nothing from the web believed."""

from __future__ import annotations

import base64
import io
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import dask.dataframe as dd
import numpy as np
import pytest
from counted import work  # noqa: F401  a fixture
from photo_shards import write_photo_shards, write_tar
from PIL import Image

import dask_image_ingest as dii
from dask_image_ingest import cli
from dask_image_ingest.view.gallery import count_facts

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">" onmouseover=\'alert(3)\' &amp;'


class Page(HTMLParser):
    """What a browser would find in a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *attr) for attr in attrs]

    def handle_data(self, data):
        self.text += data

    def sources(self):
        return [value for _, name, value in self.attributes if name == "src"]


@pytest.fixture
def ddf(shards):
    return dii.read_webdataset_images(shards, backend="pandas")


@pytest.fixture(scope="module")
def bad(photos, tmp_path_factory):
    """A good photograph with an evil key and caption, one cut off, and no image at all."""
    folder = tmp_path_factory.mktemp("bad")
    members = {
        'a<b>"&amp;onclick=x.jpg': photos[0].encoded,
        'a<b>"&amp;onclick=x.txt': EVIL.encode(),
        "cut.jpg": photos[1].encoded[:-200],
        "cut.txt": b"short",
        "none.txt": ("long " * 60 + EVIL).encode(),
    }
    write_tar(folder / "bad.tar", members)
    return folder


def test_show_decodes_as_many_images_as_it_shows(ddf, work):  # noqa: F811
    shown = ddf.images.show(5)
    assert len(shown) == work["decoded"] == 5
    html = shown._repr_html_()
    assert html.count("<img") == 5
    assert work["decoded"] == 5


def test_show_of_a_filter_decodes_what_it_shows(ddf, work):  # noqa: F811
    wide = ddf[ddf.width >= 250]
    assert len(wide.images.show(3)) == work["decoded"] == 3
    everything = len(wide)
    assert len(wide.images.show(1000)) == everything == work["decoded"] - 3


def test_thumbnails_are_the_images(ddf, photos):
    page = Page(ddf.images.show(12, thumbnail=64)._repr_html_())
    for source, photo in zip(page.sources(), photos, strict=False):
        data = base64.b64decode(source.removeprefix("data:image/jpeg;base64,"))
        with Image.open(io.BytesIO(data)) as thumbnail:
            assert max(thumbnail.size) == 64
            want = Image.fromarray(photo.pixels).resize(thumbnail.size, Image.Resampling.BILINEAR)
            difference = np.asarray(thumbnail).astype(int) - np.asarray(want)
        assert abs(difference).mean() < 12
        assert photo.key in page.text
        height, width, _ = photo.pixels.shape
        assert f"{width} × {height}" in page.text


def test_captions_are_shown_on_demand(ddf, photos):
    assert photos[0].caption not in Page(ddf.images.show(1)._repr_html_()).text
    with_caption = ddf.images.show(1, columns=("__key__", "txt"))
    assert photos[0].caption in Page(with_caption._repr_html_()).text
    with pytest.raises(dii.ArgumentError, match="'nothing'"):
        ddf.images.show(columns=["nothing"])


def test_errors_are_visible(bad):
    ddf = dii.read_webdataset_images(bad, backend="pandas")
    page = Page(ddf.images.show()._repr_html_())
    assert len(page.sources()) == 1
    assert "truncated" in page.text
    assert "missing" in page.text


def test_what_comes_from_the_web_is_shown_and_not_believed(bad, tmp_path):
    ddf = dii.read_webdataset_images(bad, backend="pandas")
    dii.gallery(ddf, tmp_path / "out.html", columns=("__key__", "txt"), title=EVIL)
    html = (tmp_path / "out.html").read_text()
    page = Page(html)
    assert "script" not in page.tags
    assert {name for _, name, _ in page.attributes if name.startswith("on")} == set()
    assert [source[:22] for source in page.sources()] == ["data:image/jpeg;base64"]
    assert EVIL in page.text
    assert 'a<b>"&amp;onclick=x' in page.text
    assert EVIL not in html


def test_frames_of_every_kind_can_be_shown(ddf):
    frame = ddf.compute()
    assert len(frame.images.show(4)) == 4
    assert len(ddf.persist().images.show(30)) == 24
    without_pointer = frame[["image", "txt"]].rename(columns={"image": "picture"})
    shown = without_pointer.images.show(4, columns=("txt",))
    assert shown._repr_html_().count("<img") == 4
    assert len(ddf[["__key__", "image"]].images.show(4)) == 4
    text_only = ddf.drop(columns=["image", "error"])
    assert text_only[text_only.txt.str.contains("photograph 1")].images.show(50)._repr_html_()
    nothing = ddf[ddf.width > 10_000].images.show()
    assert "No rows" in nothing._repr_html_()
    with pytest.raises(dii.ArgumentError, match="no column of images"):
        ddf[["txt"]].images.show(columns=["txt"])


def test_a_page_of_thumbnails_can_be_saved(ddf, tmp_path):
    ddf.images.show(3).save(tmp_path / "page.html")
    assert len(Page((tmp_path / "page.html").read_text()).sources()) == 3


class TestGallery:
    def test_it_decodes_no_more_than_it_shows(self, ddf, work, tmp_path):  # noqa: F811
        sheet = dii.gallery(ddf, tmp_path / "out.html", n=7)
        assert len(sheet) == work["decoded"] == 7

    def test_it_shows_images_of_every_shard(self, ddf, tmp_path):
        sheet = dii.gallery(ddf, tmp_path / "out.html", n=6)
        keys = ddf["__key__"].compute().tolist()
        shards = [keys.index(card.texts["__key__"]) // 8 for card in sheet.cards]
        assert shards == [0, 0, 1, 1, 2, 2]

    def test_it_shows_all_of_a_small_collection(self, photos, tmp_path):
        write_photo_shards(photos[:9], tmp_path, per_shard=8)
        ddf = dii.read_webdataset_images(tmp_path, backend="pandas")
        assert len(dii.gallery(ddf, tmp_path / "out.html", n=9)) == 9
        assert len(dii.gallery(ddf, tmp_path / "out.html")) == 9

    def test_it_needs_no_other_file(self, ddf, tmp_path):
        dii.gallery(ddf, tmp_path / "out.html")
        page = Page((tmp_path / "out.html").read_text())
        assert not {"script", "link", "iframe", "object"} & set(page.tags)
        assert all(source.startswith("data:image/jpeg;base64,") for source in page.sources())
        assert not [name for _, name, _ in page.attributes if name == "href"]
        assert list(tmp_path.iterdir()) == [tmp_path / "out.html"]

    def test_counts_are_of_the_whole_collection(self, ddf, photos):
        facts = count_facts(ddf)
        assert facts["total"]["rows"] == 24
        assert facts["total"]["bytes"] == sum(len(photo.encoded) for photo in photos)
        longer = [max(photo.pixels.shape[:2]) for photo in photos]
        edges = [0, 32, 64, 96, 128, 192, 256, 384]
        want = np.histogram(longer, edges)[0]
        got = [facts["size"][str(edge)] for edge in edges[:-1]]
        assert got == want.tolist()
        assert sum(facts["aspect"].values()) == 24
        assert facts["format"] == {"jpeg": 15, "png": 5, "webp": 4}
        assert facts == count_facts(ddf.compute())

    def test_errors_are_counted_among_those_shown_or_everywhere(self, bad, tmp_path):
        ddf = dii.read_webdataset_images(bad, backend="pandas")
        dii.gallery(ddf, tmp_path / "out.html")
        assert "2 of the 3 shown" in Page((tmp_path / "out.html").read_text()).text
        dii.gallery(ddf, tmp_path / "out.html", n=1, decode=True)
        assert "2 of all images" in Page((tmp_path / "out.html").read_text()).text

    def test_it_works_after_a_merge(self, ddf, tmp_path):
        merged = ddf.merge(ddf[["__key__", "cls"]], on="__key__")
        assert len(dii.gallery(merged, tmp_path / "out.html", n=5)) == 5
        both = dd.concat([ddf, ddf])
        assert len(dii.gallery(both, tmp_path / "out.html", n=5)) == 5

    def test_the_command_line_writes_it(self, shards, bad, tmp_path, capsys):
        out = tmp_path / "out.html"
        assert cli.main(["gallery", *map(str, shards), "-o", str(out), "-n", "5"]) == 0
        assert "5 images" in capsys.readouterr().out
        assert len(Page(out.read_text()).sources()) == 5
        assert cli.main(["gallery", str(bad), "-o", str(out), "--json"]) == 1
        assert "truncated" in capsys.readouterr().out
        arguments = ["gallery", str(bad), "-o", str(out), "--columns", "nothing"]
        assert cli.main(arguments) == 2


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: apt-get install chromium")
def test_a_browser_shows_it(bad, shards, tmp_path):
    for shard in shards:
        shutil.copy(shard, tmp_path)
    shutil.copy(bad / "bad.tar", tmp_path / "z.tar")
    ddf = dii.read_webdataset_images(tmp_path, backend="pandas")
    dii.gallery(ddf, tmp_path / "out.html", columns=("__key__", "txt"))
    picture, dark = (screenshot(tmp_path, scheme) for scheme in (1, 0))
    assert picture.size == dark.size == (1200, 1000)
    light, night = np.asarray(picture.convert("RGB")), np.asarray(dark.convert("RGB"))
    # The ground is light or dark as the reader has it, and the first row of photographs is there.
    assert light[2, 2].min() > 230
    assert night[2, 2].max() < 50
    assert len(np.unique(light.reshape(-1, 3), axis=0)) > 5_000
    # Nothing is wider than the window.
    dom = browse(tmp_path, "--dump-dom", "--window-size=400,800")
    assert dom.count("<figure") == 27


def screenshot(folder, scheme):
    picture = folder / f"{scheme}.png"
    browse(
        folder,
        f"--screenshot={picture}",
        "--window-size=1200,1000",
        f"--blink-settings=preferredColorScheme={scheme}",
    )
    return Image.open(picture)


def browse(folder, *options):
    quiet = ("background-networking", "component-update", "sync", "quic", "gpu")
    finished = subprocess.run(
        [
            CHROMIUM,
            "--headless",
            "--no-sandbox",
            "--no-first-run",
            "--hide-scrollbars",
            *(f"--disable-{name}" for name in quiet),
            f"--user-data-dir={folder / 'browser'}",
            *options,
            (folder / "out.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return finished.stdout


@pytest.mark.slow
def test_importing_the_gallery_draws_in_no_browser_and_no_notebook():
    run = subprocess.run(
        [sys.executable, "-c", "import sys, dask_image_ingest; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not re.search(r"\b(IPython|torch|matplotlib)\b", run.stdout)
