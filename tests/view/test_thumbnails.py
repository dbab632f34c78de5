"""``show``: no more images decoded than shown, each with its key, size, captions and error."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from counted import work  # noqa: F401  a fixture
from html_page import Page, write_bad_photos
from PIL import Image
from tars import tar

import dask_image_ingest as dii


@pytest.fixture
def ddf(shards):
    return dii.read_webdataset_images(shards, backend="pandas")


@pytest.fixture(scope="module")
def bad(photos, tmp_path_factory):
    return write_bad_photos(photos, tmp_path_factory.mktemp("bad"))


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
    page = Page(ddf.images.show(12, size=64)._repr_html_())
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


def test_an_image_is_no_caption(ddf, work):  # noqa: F811
    shown = ddf.images.show(2, columns=("image", "txt"))
    assert work["decoded"] == 2
    frame = ddf.compute()
    for sheet in (shown, frame.images.show(2, columns=("image", "txt"))):
        assert [card.texts for card in sheet.cards] == [{"txt": text} for text in frame.txt[:2]]


def test_errors_are_visible(bad):
    ddf = dii.read_webdataset_images(bad, backend="pandas")
    page = Page(ddf.images.show()._repr_html_())
    assert len(page.sources()) == 1
    assert "truncated" in page.text
    assert "missing" in page.text


def test_frames_of_every_kind_can_be_shown(ddf):
    frame = ddf.compute()
    assert len(frame.images.show(4)) == 4
    assert len(ddf.persist().images.show(30)) == 24
    without_location = frame[["image", "txt"]].rename(columns={"image": "picture"})
    shown = without_location.images.show(4, columns=("txt",))
    assert shown._repr_html_().count("<img") == 4
    assert len(ddf[["__key__", "image"]].images.show(4)) == 4
    text_only = ddf.drop(columns=["image", "error"])
    assert text_only[text_only.txt.str.contains("photograph 1")].images.show(50)._repr_html_()
    nothing = ddf[ddf.width > 10_000].images.show()
    assert "No rows" in nothing._repr_html_()
    with pytest.raises(dii.ArgumentError, match="no column of images"):
        ddf[["txt"]].images.show(columns=["txt"])


def means(shown) -> list[float]:
    """The mean brightness of each thumbnail."""
    return [float(np.asarray(Image.open(io.BytesIO(card.jpeg))).mean()) for card in shown.cards]


def negative(images):
    return [255 - image for image in images]


def test_what_a_function_makes_of_images_is_shown(ddf):
    before = np.array(means(ddf.images.show(4)))
    made = ddf.images.map_batches(negative, {"image": "image"})
    for frame in (made, made[made.width > 0], made.persist(), made.compute()):
        assert abs(means(frame.images.show(4)) - (255 - before)).max() < 2
    renamed = made.rename(columns={"txt": "caption"}).sort_values("__key__")
    assert abs(means(renamed.images.show(4)) - (255 - before)).max() < 2


def test_what_a_transform_makes_of_images_is_shown(ddf, shards):
    def darker(images):
        from nvidia.dali import fn

        return fn.brightness(images, brightness=0.5)

    before = np.array(means(ddf.images.show(4)))
    made = dii.read_webdataset_images(shards, backend="pandas", transform=darker)
    assert abs(means(made.images.show(4)) - before / 2).max() < 2


def test_regions_are_shown_and_not_the_images_that_they_are_of(ddf, shards):
    tiny = dii.RandomResizedCrop(scale=(0.01, 0.01))
    made = dii.read_webdataset_images(shards, backend="pandas", size=64, augment=tiny)
    regions = np.array([array.mean() for array in made.compute().images.arrays()[:4]])
    assert np.abs(np.array(means(made.images.show(4))) - regions).max() < 2
    assert np.abs(np.array(means(ddf.images.show(4))) - regions).max() > 5


def test_images_in_memory_are_shown_when_their_shards_are_gone(photos, tmp_path):
    write_bad_photos(photos, tmp_path)
    ddf = dii.read_webdataset_images(tmp_path, backend="pandas")
    kept = [ddf.persist(), ddf.compute()]
    for path in tmp_path.glob("*.tar"):
        path.unlink()
    for frame in kept:
        page = Page(frame.images.show()._repr_html_())
        assert len(page.sources()) == 1
        assert "truncated" in page.text
        assert "missing" in page.text


def test_a_page_of_thumbnails_can_be_saved(ddf, tmp_path):
    ddf.images.show(3).save(tmp_path / "page.html")
    assert len(Page((tmp_path / "page.html").read_text()).sources()) == 3


def test_the_edge_of_a_thumbnail_has_a_limit_of_its_own_name(ddf):
    for size in (0, 40_000, 2.5):
        with pytest.raises(dii.ArgumentError, match=rf"size={size}: .* 1 to 32767"):
            ddf.images.show(size=size)


def test_what_is_wrong_is_said_in_the_words_of_the_frame(tmp_path, photos):
    (tmp_path / "a.tar").write_bytes(tar({"a.jpg": photos[0].encoded, "none.txt": b"no image"}))
    ddf = dii.read_webdataset_images(tmp_path, backend="pandas")
    told = "missing: the sample has no image member"
    metadata = ddf.drop(columns=["image", "error"])
    for frame in (ddf, metadata, metadata.compute(), ddf.compute()):
        assert [card.error for card in frame.images.show().cards] == [None, told]
    assert dii.decode_images(metadata).error.compute().iloc[1] == told
