"""Frames of references: small, movable, storable, and decoded to what the read would have given."""

from __future__ import annotations

import gzip
import os
import pickle
from pathlib import Path

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from counted import work  # noqa: F401
from nvidia.dali import fn
from odd_shards import PHOTOS, in_this_process, read, write_odd_shards  # noqa: F401

import dask_image_ingest as dii
from dask_image_ingest.dataset.references import Decode
from dask_image_ingest.errors import ArgumentError, ShardError
from dask_image_ingest.frames import ImageReference

# Beside the photographs one that is bad, one that is missing, and one that is there twice.
ROWS = PHOTOS + 3


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return write_odd_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture
def refs(shards):
    return dii.read_webdataset_images(shards, backend="pandas", decode=False)


@pytest.fixture(scope="module")
def whole(shards):
    """The rows with pixels, as the read decodes them."""
    return read(shards).compute(scheduler="sync")


def compare(decoded, whole, image="image"):
    """Rows with images, found by shard and key, are those of the read; errors too."""
    want = whole.set_index(["__url__", "offset", "__key__"])
    got = decoded.set_index(["__url__", "offset", "__key__"])
    assert len(got)
    for label, array, error in zip(got.index, got[[image]].images.arrays(), got.error, strict=True):
        row = want.loc[[label]]
        (expected,) = row.images.arrays()[:1]
        assert (array is None) == (expected is None)
        assert pd.isna(error) == pd.isna(row.error.iloc[0])
        if array is not None:
            np.testing.assert_array_equal(array, expected)


def through_parquet(refs, folder):
    refs.to_parquet(folder / "refs", write_index=False)
    return dd.read_parquet(folder / "refs")


def scores(refs):
    return refs[["__key__", "nbytes"]].rename(columns={"nbytes": "score"})


WAYS = {
    "as it is": lambda refs, _: refs,
    "filtered": lambda refs, _: refs[refs.width > 100],
    "computed": lambda refs, _: refs.compute(),
    "persisted": lambda refs, _: refs.persist(),
    "shuffled": lambda refs, _: refs.shuffle("cls"),
    "sorted": lambda refs, _: refs.sort_values("nbytes"),
    "merged": lambda refs, _: refs.merge(scores(refs), on="__key__"),
    "sampled": lambda refs, _: refs.sample(frac=0.5, random_state=1),
    "concatenated": lambda refs, _: dd.concat([refs, refs]),
    "stored": through_parquet,
    "stored by pandas": lambda refs, folder: (
        refs.compute().to_parquet(folder / "refs.parquet"),
        pd.read_parquet(folder / "refs.parquet"),
    )[1],
    "pickled": lambda refs, _: pickle.loads(pickle.dumps(refs.compute())),
    "set in the index": lambda refs, _: refs.set_index("nbytes", drop=False),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The inplace keyword")  # dask's own call of pandas 3.1
@pytest.mark.parametrize("way", WAYS)
def test_references_become_the_images_of_the_read(way, refs, whole, tmp_path, work):  # noqa: F811
    moved = WAYS[way](refs, tmp_path)
    assert str(moved.dtypes["image"]) == "image_reference"
    assert work["decoded"] == 0
    decoded = dii.decode_images(moved, size=16)
    assert str(decoded.dtypes["image"]) == "image"
    decoded = decoded if isinstance(decoded, pd.DataFrame) else decoded.compute()
    compare(decoded, whole)


def test_a_frame_of_references_decodes_nothing(refs, shards, work):  # noqa: F811
    frame = refs.compute()
    assert "error" not in frame.columns
    assert len(frame) == len(refs) == ROWS
    assert refs.head(2).equals(frame.head(2))
    assert work["decoded"] == 0
    assert all(isinstance(value, ImageReference) for value in frame.image)
    with pytest.raises(ArgumentError, match="error"):
        dii.read_webdataset_images(
            [*map(str, frame["__url__"].unique())], columns=["error"], decode=False
        )


def test_two_columns_of_references_are_decoded_together(refs, whole):
    pairs = refs.merge(refs, on="__key__", suffixes=("", "_too"))
    decoded = dii.decode_images(pairs, size=16).compute()
    bad = decoded["image"].isna()
    assert decoded["error"].notna().tolist() == bad.tolist()
    assert decoded["image_too.error"].notna().tolist() == bad.tolist()
    for one, other in zip(
        decoded[["image"]].images.arrays(), decoded[["image_too"]].images.arrays(), strict=True
    ):
        assert (one is None) == (other is None)


def test_rows_that_a_merge_found_nothing_for_have_no_image_and_no_error(refs):
    more = pd.DataFrame({"__key__": ["elsewhere"], "score": [1]})
    outer = refs.merge(more, on="__key__", how="outer")
    row = dii.decode_images(outer, size=16).compute().set_index("__key__").loc["elsewhere"]
    assert pd.isna(row.image)
    assert pd.isna(row.error)


def test_filters_and_columns_asked_for_later_go_below_the_decode(refs, work):  # noqa: F811
    decoded = dii.decode_images(refs, size=16)
    few = decoded[decoded.cls == 1]
    assert len(decoded[["txt", "cls"]].compute()) == ROWS
    assert work["decoded"] == 0
    assert len(few.compute()) == work["decoded"] > 0


@pytest.mark.parametrize("errors", ["null", "drop"])
def test_a_decode_right_above_a_read_is_one_task_of_both(errors, shards, refs, whole, work):  # noqa: F811
    few = refs[refs.width > 200]
    lazy = dii.decode_images(few, size=16, errors=errors)
    frame = lazy.compute()
    assert work["walks"] == len(shards)
    assert not list(lazy.optimize(fuse=False).expr.find_operations(Decode))
    assert list(frame.columns) == list(lazy.columns)
    assert frame.dtypes.equals(lazy.dtypes)
    compare(frame, whole)
    wanted = whole[whole.width > 200]
    wanted = wanted if errors == "null" else wanted[wanted.error.isna()]
    assert frame["__key__"].tolist() == wanted["__key__"].tolist()


def test_random_numbers_are_those_of_the_sample(shards):
    def flip(images):
        return fn.flip(images, horizontal=fn.random.coin_flip())

    want = read(shards, transform=flip).compute().set_index("__key__")
    refs = dii.read_webdataset_images(shards, backend="pandas", decode=False)
    got = dii.decode_images(refs.sort_values("nbytes"), size=16, transform=flip).compute()
    got = got.set_index("__key__").loc[want.index]
    for one, other in zip(got.images.arrays(), want.images.arrays(), strict=True):
        assert one is other is None or np.array_equal(one, other)


def test_references_to_a_shard_that_was_replaced_are_an_error(shards, tmp_path):
    path = tmp_path / "in.tar"
    path.write_bytes(Path(shards[0]).read_bytes())
    refs = dii.read_webdataset_images(path, backend="pandas", decode=False).compute()
    os.utime(path, (1, 1))
    with pytest.raises(ShardError, match=r"in\.tar has changed since"):
        dii.decode_images(refs)


def test_references_to_a_compressed_shard_have_its_images_with_them(shards, whole, tmp_path):
    path = tmp_path / "in.tar.gz"
    path.write_bytes(gzip.compress(Path(shards[0]).read_bytes()))
    refs = dii.read_webdataset_images(path, backend="pandas", decode=False).compute()
    kept = refs[[value.bytes is not None for value in refs.image]]
    assert len(kept)
    path.unlink()
    images = dii.decode_images(kept, size=16).images.arrays()
    want = whole[whole["__url__"] == str(shards[0])].set_index("offset")
    for offset, image in zip(kept.offset, images, strict=True):
        (expected,) = want.loc[[offset]].images.arrays()
        assert image is expected is None or np.array_equal(image, expected)


@pytest.mark.parametrize(
    "options", [{"size": 8}, {"mode": "L"}, {"errors": "drop"}, {"transform": len}], ids=str
)
def test_how_to_decode_is_for_who_decodes(options, shards):
    with pytest.raises(ArgumentError, match=r"decode=False makes no pixels, .* decode_images\(\)"):
        dii.read_webdataset_images(shards, backend="pandas", decode=False, **options)


def test_references_have_no_pixels_and_no_order(refs):
    frame = refs.compute()
    with pytest.raises(ArgumentError, match="image references have no order"):
        frame.sort_values("image")
    assert frame.image.nunique() == len(frame)
    assert frame.image.isna().sum() == 0
    assert frame.groupby("cls").image.first().notna().all()
