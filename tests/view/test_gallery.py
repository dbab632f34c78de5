"""``gallery``: few images decoded, counts of all of them, nothing from the web believed."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import sys

import dask.dataframe as dd
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from counted import work  # noqa: F401  a fixture
from dying import dies, moments
from html_page import EVIL, SCRIPTS, Page, write_bad_photos
from photo_shards import write_photo_shards
from PIL import Image
from witnesses import contents

import dask_image_ingest as dii
from dask_image_ingest import cli
from dask_image_ingest.errors import ArgumentError, ExportError
from dask_image_ingest.view import write_page
from dask_image_ingest.view.gallery import count_headers, histograms

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


@pytest.fixture
def ddf(shards):
    return dii.read_webdataset_images(shards, backend="pandas")


@pytest.fixture(scope="module")
def bad(photos, tmp_path_factory):
    return write_bad_photos(photos, tmp_path_factory.mktemp("bad"))


def negatives(images):
    return [255 - image for image in images]


def test_what_comes_from_the_web_is_shown_and_not_believed(bad, tmp_path):
    ddf = dii.read_webdataset_images(bad, backend="pandas")
    dii.gallery(ddf, tmp_path / "out.html", columns=("__key__", "txt"), title=EVIL)
    html = (tmp_path / "out.html").read_text()
    page = Page(html)
    assert page.scripts == SCRIPTS
    assert {name for _, name, _ in page.attributes if name.startswith("on")} == set()
    assert [source[:22] for source in page.sources()] == ["data:image/jpeg;base64"]
    assert EVIL in page.text
    assert 'a<b>"&amp;onclick=x' in page.text
    assert EVIL not in html


def test_names_of_columns_are_escaped_and_need_not_be_texts(ddf, tmp_path):
    frame = ddf.compute().rename(columns={"txt": 0, "cls": ("a", 1), "json": EVIL, "image": "</p>"})
    sheet = dii.gallery(frame, tmp_path / "out.html", 3, columns=["__key__", 0, ("a", 1), EVIL])
    for html in ((tmp_path / "out.html").read_text(), sheet._repr_html_()):
        page = Page(html)
        assert page.scripts in ([], SCRIPTS)
        assert {name for _, name, _ in page.attributes if name.startswith("on")} == set()
        assert page.text.count(EVIL) == page.text.count("('a', 1)") == 3
    first = dii.gallery(frame, n=1, columns=[("a", 1)]).cards[0]
    assert Page(first.html()).text.startswith(str(frame[("a", 1)].iloc[0]))


class TestGallery:
    def test_it_decodes_no_more_than_it_shows(self, ddf, work, tmp_path):  # noqa: F811
        sheet = dii.gallery(ddf, tmp_path / "out.html", n=7)
        assert len(sheet) == work["decoded"] == 7

    def test_a_notebook_shows_the_same_without_a_file(self, ddf, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        sheet = dii.gallery(ddf, n=6)
        shown = Page(sheet._repr_html_())
        dii.gallery(ddf, tmp_path / "out.html", n=6)
        written = Page((tmp_path / "out.html").read_text())
        assert shown.sources() == written.sources()
        assert len(shown.sources()) > 0
        assert "Aspect" in shown.text
        assert [path.name for path in tmp_path.iterdir()] == ["out.html"]

    def test_it_shows_every_so_many_th_row_and_decodes_no_other(
        self,
        shards,
        ddf,
        work,  # noqa: F811
        tmp_path,
    ):
        keys = ddf["__key__"].compute().tolist()
        one = {"shards_per_partition": 3}
        for options, change in [
            ({}, lambda f: f),
            (one, lambda f: f),
            ({"partition_size": "200 kB"}, lambda f: f),
            ({}, lambda f: f.repartition(npartitions=2)),
            (one, lambda f: f.assign(a=f.width / f.height)),
            (one | {"mode": "raw"}, lambda f: f),
            (one | {"augment": "random_resized_crop", "size": 32}, lambda f: f),
            (one, lambda f: f.images.map_batches(negatives, outputs={"negative": "image"})),
        ]:
            frame = change(dii.read_webdataset_images(shards, backend="pandas", **options))
            work.clear()
            sheet = dii.gallery(frame, tmp_path / "out.html", n=7)
            shown = [card.texts["__key__"] for card in sheet.cards]
            assert shown == [keys[row] for row in (0, 3, 6, 10, 13, 17, 20)]
            assert work["decoded"] == 7

    def test_its_widget_has_the_same_sheet_and_tells_what_is_marked(self, ddf):
        pytest.importorskip("anywidget", reason="needs anywidget")
        sheet = dii.gallery(ddf, n=5)
        widget = sheet.widget()
        assert Page(widget.sheet).sources() == Page(sheet.html()).sources()
        values = [
            v for tag, name, v in Page(widget.sheet).attributes if (tag, name) == ("input", "value")
        ]
        assert widget.marked == []
        widget.set_state({"marks": values[1:3]})  # as a browser sends it
        assert widget.marked == [card.texts["__key__"] for card in sheet.cards[1:3]]

    def test_the_smallest_of_many_counts_are_one_bar(self, ddf):
        table = ddf.drop(columns=["image", "error"]).compute()
        names = [f"format{number:02}" for number in range(12)]
        counts = [5, 4, 3, 2, 2, *[1] * 6, 2]
        shown = dii.gallery(table.assign(format=np.repeat(names, counts)), n=1)
        bars = re.findall(r"<title>([^<]*): ([0-9,]+)</title>", shown._repr_html_())
        found = {name: int(count) for name, count in bars if name.startswith(("format", "5 "))}
        kept = dict(zip(names, counts, strict=True))
        others = {"5 others": sum(kept.pop(f"format{number:02}") for number in range(6, 11))}
        assert found == kept | others
        exact = dii.gallery(table.assign(format=np.repeat(names[:8], 3)), n=1)._repr_html_()
        assert "others" not in exact

    def test_it_shows_all_of_a_small_collection(self, photos, tmp_path):
        write_photo_shards(photos[:9], tmp_path, per_shard=8)
        ddf = dii.read_webdataset_images(tmp_path, backend="pandas")
        assert len(dii.gallery(ddf, tmp_path / "out.html", n=9)) == 9
        assert len(dii.gallery(ddf, tmp_path / "out.html")) == 9

    def test_it_needs_no_other_file(self, ddf, tmp_path):
        dii.gallery(ddf, tmp_path / "out.html")
        page = Page((tmp_path / "out.html").read_text())
        assert not {"link", "iframe", "object"} & set(page.tags)
        assert all(source.startswith("data:image/jpeg;base64,") for source in page.sources())
        assert not [name for _, name, _ in page.attributes if name == "href"]
        assert not re.search(r"https?:|fetch|import", "".join(page.scripts))
        assert list(tmp_path.iterdir()) == [tmp_path / "out.html"]

    def test_counts_are_of_the_whole_collection(self, ddf, photos):
        counts, lengths = count_headers(ddf)
        assert lengths == [8, 8, 8]
        assert counts["samples"].sum() == 24
        assert counts["nbytes"].sum() == sum(len(photo.encoded) for photo in photos)
        facts = histograms(counts)
        longer = [max(photo.pixels.shape[:2]) for photo in photos]
        edges = [0, 32, 64, 96, 128, 192, 256, 384]
        want = np.histogram(longer, edges)[0]
        got = [facts["size"][str(edge)] for edge in edges[:-1]]
        assert got == want.tolist()
        assert sum(facts["aspect"].values()) == 24
        assert facts["format"] == {"jpeg": 15, "png": 5, "webp": 4}
        assert facts == histograms(count_headers(ddf.compute())[0])

    def test_errors_are_counted_among_those_shown_or_everywhere(self, bad, tmp_path):
        ddf = dii.read_webdataset_images(bad, backend="pandas")
        dii.gallery(ddf, tmp_path / "out.html")
        assert "2 of the 3 shown" in Page((tmp_path / "out.html").read_text()).text
        dii.gallery(ddf, tmp_path / "out.html", n=1, decode=True)
        assert "2 of all images" in Page((tmp_path / "out.html").read_text()).text

    def test_all_errors_are_counted_by_the_column_of_errors(self, bad, tmp_path):
        frame = dii.read_webdataset_images(bad, backend="pandas").drop(columns="error")
        with pytest.raises(dii.ArgumentError, match="decode=True counts the column 'error'"):
            dii.gallery(frame, tmp_path / "none.html", decode=True)
        assert not (tmp_path / "none.html").exists()

    @pytest.mark.slow
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
        timeout=280,
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


@pytest.mark.parametrize("kind", ["lazy", "computed", "linked"])
def test_a_shard_is_not_overwritten(kind, shards, tmp_path):
    folder = shutil.copytree(shards[0].parent, tmp_path / "in")
    target = folder / shards[0].name
    before = target.read_bytes()
    ddf = dii.read_webdataset_images(folder, backend="pandas", columns=["__key__", "__url__"])
    if kind == "linked":
        (tmp_path / "link.html").symlink_to(target)
        target = tmp_path / "link.html"
    with pytest.raises(ArgumentError, match=r"the frame reads .*: write the page to another file"):
        dii.gallery(ddf.compute() if kind == "computed" else ddf, target)
    assert target.read_bytes() == before
    assert not list(tmp_path.rglob("_staging"))


def test_a_page_that_cannot_be_written_leaves_what_was_there(ddf, tmp_path):
    page = tmp_path / "out.html"
    dii.gallery(ddf, page, n=1)
    before = page.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, limit[1]))
        with pytest.raises(ExportError, match=r"out\.html cannot be written: File too large"):
            dii.gallery(ddf, page, n=24)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [path.name for path in tmp_path.iterdir()] == ["out.html"]
    assert page.read_bytes() == before
    with pytest.raises(ArgumentError, match="its folder does not exist"):
        dii.gallery(ddf, tmp_path / "no_folder" / "out.html", n=1)


def test_the_next_page_removes_what_killed_ones_left(tmp_path):
    page = tmp_path / "out.html"
    for moment in moments(lambda: write_page(page, "<!doctype html>1")):
        write_page(page, "<!doctype html>1")
        assert dies(moment, lambda: write_page(page, "<!doctype html>2"))
        assert page.read_text() in ("<!doctype html>1", "<!doctype html>2"), moment
        write_page(page, "<!doctype html>3")
        assert contents(tmp_path).keys() == {"out.html"}, moment
        assert page.read_text() == "<!doctype html>3"


@pytest.mark.parametrize(
    "sizes",
    [
        {"height": ["x", "y"], "width": [1.5, float("nan")], "nbytes": [b"1", b"2"]},
        {"height": [-5, 0], "width": [2**62, 7], "nbytes": [-1, 3], "format": [5, 6]},
        {"height": [[1], None], "width": [True, False], "nbytes": [float("inf"), 2.0]},
        {"height": [24, None], "width": [None, 24]},
    ],
)
def test_columns_of_a_table_that_are_called_like_sizes(sizes, ddf, tmp_path):
    images = ddf.images.encode("png").compute().tolist()[:2]
    pq.write_table(pa.table({"image": images, **sizes}), tmp_path / "a.parquet")
    table = dii.read_parquet_images(tmp_path / "a.parquet", backend="pandas")
    sheet = dii.gallery(table, tmp_path / "out.html")
    assert [card.error for card in sheet.cards] == [None, None]
    assert "2 samples" in Page((tmp_path / "out.html").read_text()).text
