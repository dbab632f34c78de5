"""What is shown is what the frame computes, wherever its images and its pointers come from."""

from __future__ import annotations

import io

import dask.dataframe as dd
import numpy as np
import pytest
from counted import work  # noqa: F401  a fixture
from photo_shards import write_tar
from PIL import Image
from tars import sparse_tar, tar

import dask_image_ingest as dii
from dask_image_ingest.dataset import POINTER

N = 6


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


def assert_shows_what_is_computed(frame, told=""):
    """Each thumbnail is the image of its row of the computed frame, resized by Pillow."""
    rows = frame.compute()
    shown = frame.images.show(len(rows), thumbnail=64)
    assert len(shown) == len(rows) > 0, told
    for card, array in zip(shown.cards, rows.images.arrays(), strict=True):
        if array is None:
            assert card.jpeg is None, told
            continue
        thumbnail = Image.open(io.BytesIO(card.jpeg))
        scale = 64 / max(array.shape[:2])
        edges = np.array(array.shape[:2]) * scale
        assert abs(np.array(thumbnail.size[::-1]) - edges).max() <= 1, told
        want = Image.fromarray(array).resize(thumbnail.size, Image.Resampling.BILINEAR)
        difference = np.asarray(thumbnail).astype(int) - np.asarray(want)
        assert abs(difference).mean() < 12, told


def pixels_of_b(a, b):
    return a.drop(columns=["image", "error"]).merge(b[["__key__", "image"]], on="__key__")


def with_suffixes(a, b):
    return a.merge(b, on="__key__", suffixes=("", "_b")).drop(columns="image")


def other_rows_of_itself(a, b):
    turned = a[["__key__", "image"]].rename(columns={"__key__": "before"})
    rows = a.drop(columns=["image", "error"])
    keys = rows["__key__"]
    rows = rows.assign(before=keys.map(lambda key: str(5 - int(key)), meta=keys._meta))
    return rows.merge(turned, on="before")


def nulls_of_a_part(a, b):
    return dd.concat([a, b.drop(columns="image")])


MIXED = {
    "merge": pixels_of_b,
    "suffixes": with_suffixes,
    "merge with itself": other_rows_of_itself,
    "concat": nulls_of_a_part,
    "offset": lambda a, b: a.assign(offset=0),
    "url": lambda a, b: a.assign(__url__=b["__url__"].compute().iloc[0]),
    "nbytes": lambda a, b: a.assign(nbytes=a["nbytes"] / 1024),
    "key": lambda a, b: a.assign(__key__="other"),
    "renamed": lambda a, b: a.rename(columns={"offset": "nbytes", "nbytes": "offset"}),
    "key as pointer": lambda a, b: a.merge(b[list(POINTER)], on=list(POINTER), how="right"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXED)
def test_pointers_of_other_rows_are_not_believed(pair, name):
    assert_shows_what_is_computed(MIXED[name](*pair))


@pytest.mark.slow
def test_pointers_of_the_same_rows_are_decoded_for_what_is_shown(pair, work):  # noqa: F811
    a, b = pair
    scores = a[["__key__", "__url__", "width"]].rename(columns={"width": "score"})
    more = dd.concat([scores, scores.assign(__key__=scores["__key__"] + "x")])[["__key__", "score"]]
    late = dii.decode_images(pixels_of_b(a, b).drop(columns="image"))
    frames = [
        a.merge(b.drop(columns=["image", "error"]), on="__key__", suffixes=("", "_b")),
        b.drop(columns=["image", "error"]).merge(a, on="__key__", suffixes=("_b", "")),
        a.merge(scores, on=["__key__", "__url__"]),
        a.merge(scores.drop(columns="__url__"), on="__key__", how="left"),
        more.merge(a, on="__key__", how="left"),
        a.merge(more, on="__key__", how="outer"),
        dd.concat([a, b]),
        a.shuffle("__key__").simplify(),
        a.rename(columns={"width": "w"}).assign(area=lambda d: d.w * d.height),
        late,
    ]
    for frame in frames:
        assert_shows_what_is_computed(frame)
        before = work["decoded"]
        frame.images.show(2)
        assert work["decoded"] - before == 2, frame


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
def test_images_that_only_their_key_tells_are_shown_whatever_the_caption(odd, columns, tmp_path):
    want = odd.error.compute().isna().tolist()
    assert want == [True, False, False, True]
    assert odd.offset.compute().isna().tolist() == [False, True, True, True]
    metadata = odd.drop(columns=["image", "error"])
    without_key = odd.drop(columns="__key__")
    for frame in (odd, metadata, metadata.compute(), without_key, without_key.simplify()):
        sheet = frame.images.show(columns=columns)
        assert [card.jpeg is not None for card in sheet.cards] == want
        if columns is not None:
            assert all(list(card.texts) == columns for card in sheet.cards)
    sheet = dii.gallery(odd, tmp_path / "out.html", columns=columns)
    assert [card.jpeg is not None for card in sheet.cards] == want
    assert_shows_what_is_computed(odd)


STEPS = {
    "filter": lambda d, other: d[d.width > 90],
    "shuffle": lambda d, other: d.shuffle("width"),
    "concat": lambda d, other: dd.concat([d, other]),
    "offset": lambda d, other: d.assign(offset=d.offset + 512),
    "key": lambda d, other: d.assign(__key__=d["__key__"].astype("string")),
    "pixels": lambda d, other: d.drop(columns="image").merge(
        other[["__key__", "image"]].drop_duplicates(subset="__key__"), on="__key__"
    ),
    "pointers": lambda d, other: d.drop(columns=list(POINTER)).merge(
        other[["__key__", *POINTER]].drop_duplicates(subset="__key__"), on="__key__"
    ),
    "url": lambda d, other: d.drop(columns="__url__").merge(
        other[["__key__", "__url__"]].drop_duplicates(subset="__key__"), on="__key__", how="left"
    ),
    "outer": lambda d, other: d.merge(
        other[["__key__", "__url__", "width"]]
        .rename(columns={"width": "of"})
        .assign(__url__=lambda rows: rows["__url__"] + "x"),
        on=["__key__", "__url__"],
        how="outer",
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
    frame = rng.choice(pair)[["__key__", *POINTER, "height", "width", "image"]]
    names = rng.choices(list(STEPS), k=rng.randrange(1, 5))
    for name in names:
        frame = STEPS[name](frame, rng.choice(pair)[list(frame.columns)])
    assert_shows_what_is_computed(frame, f"{names}")
