"""What is shown is what the frame computes, read as the frame reads it, and no more of it."""

from __future__ import annotations

import io

import dask.dataframe as dd
import numpy as np
import pytest
from counted import work  # noqa: F401  a fixture
from guarded import put_guarded
from html_page import Page
from photo_shards import write_tar
from PIL import Image
from tars import sparse_tar, tar

import dask_image_ingest as dii
from dask_image_ingest.dataset.references import LOCATION_COLUMNS

N = 6
KEPT = ["__key__", *LOCATION_COLUMNS, "image"]
SESAME = {"word": "sesame"}


@pytest.fixture(scope="module")
def pair(photos, tmp_path_factory):
    """Two reads of other images under the same keys."""
    folder = tmp_path_factory.mktemp("pair")
    reads = []
    for name, some in (("a", photos[:N]), ("b", photos[N : 2 * N])):
        members = {f"{i}.{photo.extension}": photo.encoded for i, photo in enumerate(some)}
        path = write_tar(folder / f"{name}.tar", members)
        reads.append(dii.read_webdataset_images(path, backend="pandas"))
    return reads


def without_pixels(frame):
    return frame.drop(columns=["image", "error"])


def errors(sheet):
    return [card.error for card in sheet.cards]


def assert_shows_what_is_computed(frame, told="", in_order=True):
    """Each thumbnail is the image of its row of the computed frame, resized by Pillow."""
    rows = frame.compute()
    shown = frame.images.show(len(rows), size=64)
    assert len(shown) == len(rows) > 0, told
    cards, arrays = shown.cards, rows.images.arrays()
    if not in_order:
        cards = sorted(cards, key=lambda card: by_key_and_shape(card.texts["__key__"], card.shape))
        keyed = zip(rows["__key__"], arrays, strict=True)
        shapes = [(key, None if array is None else array.shape) for key, array in keyed]
        order = sorted(range(len(rows)), key=lambda row: by_key_and_shape(*shapes[row]))
        arrays = [arrays[row] for row in order]
    for card, array in zip(cards, arrays, strict=True):
        if array is None:
            assert card.jpeg is None, told
            continue
        thumbnail = Image.open(io.BytesIO(card.jpeg))
        edges = np.array(array.shape[:2]) * 64 / max(array.shape[:2])
        assert abs(np.array(thumbnail.size[::-1]) - edges).max() <= 1, told
        want = Image.fromarray(array).resize(thumbnail.size, Image.Resampling.BILINEAR)
        assert abs(np.asarray(thumbnail).astype(int) - np.asarray(want)).mean() < 12, told


def by_key_and_shape(key, shape):
    return key, shape[0] / shape[1] if shape else 0


@pytest.mark.more
@pytest.mark.slow
def test_images_of_moved_rows_are_decoded_for_what_is_shown(pair, work):  # noqa: F811
    a, b = pair
    scores = a[["__key__", "__url__", "width"]].rename(columns={"width": "score"})
    more = dd.concat([scores, scores.assign(__key__=scores["__key__"] + "x")])[["__key__", "score"]]
    pixels_of_b = without_pixels(a).merge(b[["__key__", "image"]], on="__key__")
    frames = [
        pixels_of_b,
        a.merge(b, on="__key__", suffixes=("", "_b")).drop(columns="image"),
        without_pixels(b).merge(a, on="__key__", suffixes=("_b", "")),
        a.merge(scores.drop(columns="__url__"), on="__key__", how="left"),
        more.merge(a, on="__key__", how="left"),
        a.merge(more, on="__key__", how="outer"),
        dd.concat([a, b]),
        dd.concat([a, b.drop(columns="image")]),
        a.shuffle("__key__").simplify(),
        a.assign(offset=0, __url__="elsewhere", __key__="other"),
        a.rename(columns={"offset": "nbytes", "nbytes": "offset"}),
        dii.decode_images(pixels_of_b.drop(columns="image")),
    ]
    for frame in frames:
        assert_shows_what_is_computed(frame)
        before = work["decoded"]
        frame.images.show(2)
        assert work["decoded"] - before == 2, frame


STEPS = {
    "filter": lambda d, other: d[d.width > 90],
    "shuffle": lambda d, other: d.shuffle("width"),
    "concat": lambda d, other: dd.concat([d, other]),
    "offset": lambda d, other: d.assign(offset=d.offset + 512),
    "key": lambda d, other: d.assign(__key__=d["__key__"].astype("string")),
    "pixels": lambda d, other: d.drop(columns="image").merge(
        other[["__key__", "image"]].drop_duplicates(subset="__key__"), on="__key__"
    ),
    "outer": lambda d, other: d.merge(
        other[["__key__", "width"]].rename(columns={"width": "of"}), on="__key__", how="outer"
    ).drop(columns="of"),
    "late": lambda d, other: dii.decode_images(d),
    "negative": lambda d, other: d.drop(columns="image").merge(
        other[["__key__", "image"]]
        .drop_duplicates(subset="__key__")
        .images.map_batches(lambda images: [255 - i for i in images], {"image": "image"}),
        on="__key__",
    ),
}


@pytest.mark.slow
@pytest.mark.rounds(4, nightly=100)
def test_whatever_was_done_before_the_frames_own_images_are_shown(pair, rng):
    frame = rng.choice(pair)[[*KEPT, "height", "width"]]
    names = rng.choices(list(STEPS), k=rng.randrange(1, 5))
    for name in names:
        frame = STEPS[name](frame, rng.choice(pair)[list(frame.columns)])
    # The order of equal keys in a merge is Dask's, which differs from one computation to the next.
    repeated = names.index("concat") if "concat" in names else len(names)
    merged = {"outer", "pixels", "negative"} & {*names[repeated:]}
    assert_shows_what_is_computed(frame, f"{names}", in_order=not merged)


@pytest.fixture
def odd(photos, tmp_path):
    """A good image, one that is there twice, no image, and in another shard one with holes."""
    jpeg = photos[0].encoded
    members = [("a.jpg", jpeg), ("twice.jpg", jpeg), ("twice.jpg", jpeg), ("none.txt", b"none")]
    (tmp_path / "0.tar").write_bytes(tar(members))
    holes = io.BytesIO()
    Image.new("RGB", (200, 200)).save(holes, "BMP")
    sparse_tar(tmp_path / "1.tar", {"holes.bmp": holes.getvalue()})
    return dii.read_webdataset_images(sorted(tmp_path.glob("*.tar")), backend="pandas")


@pytest.mark.parametrize("columns", [None, ["width"], []])
def test_images_that_are_no_range_of_a_shard_are_shown_whatever_the_caption(odd, columns, tmp_path):
    want = odd.error.compute().isna().tolist()
    assert want == [True, False, False, True]
    assert odd.offset.compute().isna().tolist() == [False, True, True, True]
    metadata = without_pixels(odd)
    without_key = odd.drop(columns="__key__")
    # Only a reference tells where an image with holes is.
    located = [True, False, False, False]
    for frame, expected in (
        *((frame, want) for frame in (odd, without_key, without_key.simplify())),
        *((frame, located) for frame in (metadata, metadata.compute())),
    ):
        sheet = frame.images.show(columns=columns)
        assert [card.jpeg is not None for card in sheet.cards] == expected
        if columns is not None:
            assert all(list(card.texts) == columns for card in sheet.cards)
    sheet = dii.gallery(odd, tmp_path / "out.html", columns=columns)
    assert [card.jpeg is not None for card in sheet.cards] == want
    assert_shows_what_is_computed(odd)


@pytest.fixture
def guarded(photos):
    """Two shards that open to those who know a word."""
    put_guarded(
        {
            f"/in/{name}.tar": tar({f"{name}{n}.jpg": photos[n].encoded for n in (0, 1)})
            for name in "ab"
        }
    )
    return ["guarded://in/a.tar", "guarded://in/b.tar"]


def read(url, word="sesame", **options):
    return dii.read_webdataset_images(
        url, backend="pandas", storage_options={"word": word}, **options
    )


GUARDED = {
    "read": lambda urls, _: read(urls),
    "metadata": lambda urls, _: without_pixels(read(urls)),
    "late decode of rows in memory": lambda urls, _: dii.decode_images(
        dd.from_pandas(without_pixels(read(urls)).compute(), npartitions=2), storage_options=SESAME
    ),
    "concat": lambda urls, _: dd.concat([read(urls[0]), read(urls[1], "please")]),
    "concat with a late decode": lambda urls, _: dd.concat(
        [
            read(urls[0], "please")[KEPT],
            dii.decode_images(without_pixels(read(urls[1])), storage_options=SESAME)[KEPT],
        ]
    ),
    "merge": lambda urls, _: without_pixels(read(urls)).merge(
        read(urls, "please")[["__key__", "image"]], on="__key__"
    ),
    "checkpoint": lambda urls, folder: dii.checkpoint(without_pixels(read(urls)), folder / "kept"),
    "function": lambda urls, _: without_pixels(read(urls)).map_partitions(lambda rows: rows),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", GUARDED)
def test_shards_open_with_the_options_they_were_read_with(guarded, kind, tmp_path):
    frame = GUARDED[kind](guarded, tmp_path)
    assert errors(frame.images.show(9)) == [None] * 4
    assert errors(dii.gallery(frame, tmp_path / "out.html")) == [None] * 4


def test_each_part_of_a_concat_has_its_own_options(guarded):
    one, other = read(guarded[0]), read(guarded[1], "please", max_pixels=1000)
    for second in (other, read(guarded[0], max_pixels=1000)):
        rows = dd.concat([one, second, one])
        told = errors(rows.images.show(9))
        assert told == rows.error.compute().replace({np.nan: None}).tolist()
        assert [error and error.split(":")[0] for error in told[1:4]] == [None, *["too-large"] * 2]


def test_options_that_are_given_hold_for_all(guarded):
    frame = dd.from_pandas(without_pixels(read(guarded)).compute(), npartitions=1)
    with pytest.raises(dii.ShardError, match="what is the word"):
        frame.images.show()
    assert errors(frame.images.show(storage_options=SESAME)) == [None] * 4


def test_a_late_decode_may_run_commands_for_thumbnails(shards):
    rows = without_pixels(dii.read_webdataset_images(shards[0], backend="pandas")).compute()
    rows["__url__"] = f"pipe:cat {shards[0]}"
    frame = dd.from_pandas(rows, npartitions=1)
    late = dii.decode_images(frame, allow_pipes=True)
    assert errors(late.images.show()) == [None] * 8
    with pytest.raises(dii.ArgumentError, match="is a command"):
        frame.images.show()


@pytest.mark.slow
def test_what_the_read_refuses_is_not_decoded_for_a_thumbnail(tmp_path):
    bomb = io.BytesIO()
    Image.new("1", (20_000, 10_000)).save(bomb, "PNG")
    (tmp_path / "large.tar").write_bytes(tar({"large.png": bomb.getvalue()}))
    frame = dii.read_webdataset_images(tmp_path / "large.tar", backend="pandas")
    (told,) = frame.error.compute()
    assert told.startswith("too-large")
    table = without_pixels(frame)
    for each in (frame, table, table.compute(), dii.decode_images(table), table.persist()):
        assert errors(each.images.show()) == [told]
        assert errors(dii.gallery(each, tmp_path / "out.html")) == [told]
    assert told.partition(": ")[2] in Page((tmp_path / "out.html").read_text()).text


def test_the_limit_of_pixels_is_that_of_the_read_or_of_the_late_decode(shards):
    few = dii.read_webdataset_images(shards[0], backend="pandas", max_pixels=20_000)
    table = without_pixels(few)
    late = dii.decode_images(table, max_pixels=30_000)
    for frame, of in ((few, few), (late, late), (table, few)):
        want = of.error.compute().isna().tolist()
        assert len(set(want)) == 2
        assert [error is None for error in errors(frame.images.show())] == want
