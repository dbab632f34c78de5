"""Fingerprints: what they are equal for, and what is read to have them."""

import sys

import dask.dataframe as dd
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import xxhash
from counted import work  # noqa: F401
from photo_shards import encode, write_tar
from PIL import Image
from tars import tar

import dask_image_ingest as dii
from dask_image_ingest.curate import (
    compute_fingerprints,
    find_duplicates,
    find_issues,
    measure_quality,
)


@pytest.fixture(scope="module")
def ddf(shards):
    return dii.read_webdataset_images(shards, backend="pandas")


def test_bytes_are_hashed_without_a_decode(ddf, photos, work):  # noqa: F811
    hashed = compute_fingerprints(ddf, ["bytes"])["fingerprint.bytes"].compute()
    assert hashed.tolist() == [xxhash.xxh3_128(photo.encoded).hexdigest() for photo in photos]
    assert work["decoded"] == 0


def test_only_the_bytes_of_rows_that_a_filter_keeps_are_read(ddf, monkeypatch):
    module = sys.modules["dask_image_ingest.curate.fingerprints"]
    read = []

    def counted(references, options, _read=module.fetch_encoded):
        read.append(len(references))
        return _read(references, options)

    monkeypatch.setattr(module, "fetch_encoded", counted)
    hashed = compute_fingerprints(ddf, ["bytes"])
    kept = hashed[hashed.cls == 1].compute()
    assert 0 < len(kept) == sum(read) < 24
    read.clear()
    assert len(hashed) == 24
    assert hashed["__key__"].compute().nunique() == 24
    assert read == []


@pytest.fixture
def stored(photos, tmp_path):
    """Half of the photographs in a parquet file, the first of them twice."""
    files = [photo.encoded for photo in [*photos[:12], photos[0]]]
    table = pa.table({"image": [{"bytes": file, "path": None} for file in files]})
    table = table.append_column("row", pa.array(range(13)))
    pq.write_table(table, tmp_path / "photos.parquet", row_group_size=5)
    return tmp_path / "photos.parquet", files


@pytest.mark.filterwarnings("ignore:The inplace keyword")  # of Dask's read of parquet files
@pytest.mark.parametrize("decode", [True, False])
def test_images_of_parquet_files_are_hashed_by_their_own_bytes(stored, decode, work):  # noqa: F811
    path, files = stored
    frame = dii.read_parquet_images(path, backend="pandas", decode=decode)
    hashed = compute_fingerprints(frame, ["bytes"])
    assert list(hashed.columns) == [*frame.columns, "fingerprint.bytes"]
    found = hashed[hashed["row"] >= 3][["row", "fingerprint.bytes"]].compute()
    assert found["row"].tolist() == list(range(3, 13))
    expected = [xxhash.xxh3_128(file).hexdigest() for file in files]
    assert found["fingerprint.bytes"].tolist() == expected[3:]
    assert work["decoded"] == 0
    assert find_duplicates(frame, by="bytes", keep="first", identity="row").compute()[
        "duplicate.keep"
    ].tolist() == [True] * 12 + [False]


def test_bytes_of_any_column_are_hashed_and_their_pictures_compared(stored):
    path, files = stored
    encoded = pq.read_table(path).to_pandas(types_mapper=pd.ArrowDtype)
    table = dd.from_pandas(encoded, npartitions=2)
    frame = dii.decode_images(table, image="image")
    hashed = compute_fingerprints(measure_quality(frame)[["row", "image", "error"]], ["bytes"])
    expected = [xxhash.xxh3_128(file).hexdigest() for file in files]
    assert hashed["fingerprint.bytes"].compute().tolist() == expected
    found = find_duplicates(frame, keep="first", identity="row").compute()
    assert found["duplicate.keep"].tolist() == [True] * 12 + [False]
    assert found["duplicate.of"].iloc[-1] == "0"


def test_pixels_are_equal_in_two_lossless_formats_and_not_when_one_differs(photos, tmp_path):
    image = Image.fromarray(photos[0].pixels)
    other = image.copy()
    other.putpixel((0, 0), (1, 2, 3))
    turned = Image.fromarray(photos[0].pixels.reshape(image.width, image.height, 3))
    members = {"0.png": encode(image, "png"), "2.png": encode(other, "png")}
    members["3.png"] = encode(turned, "png")
    file = tmp_path / "1.bmp"
    image.save(file)
    members["1.bmp"] = file.read_bytes()
    shard = write_tar(tmp_path / "a.tar", members)
    frame = dii.read_webdataset_images(shard, backend="pandas")
    hashes = (
        compute_fingerprints(frame, ["pixels"]).set_index("__key__")["fingerprint.pixels"].compute()
    )
    assert hashes["0"] == hashes["1"]
    assert hashes.nunique() == 3
    assert hashes.str.len().eq(32).all()


def test_quality_and_all_fingerprints_together_decode_each_image_once(ddf, work):  # noqa: F811
    both = compute_fingerprints(measure_quality(ddf), variants=["mirrored"])
    table = find_issues(both).drop(columns="image").compute()
    assert work["decoded"] == 24
    assert table["fingerprint.pdq"].str.len().eq(64).all()
    assert (table["fingerprint.pdq_mirrored"] != table["fingerprint.pdq"]).all()
    assert table["fingerprint.pdq_quality"].between(0, 100).all()
    assert table["quality.blur"].notna().all()


def test_lazy_and_eager_frames_give_the_same(ddf):
    lazy = compute_fingerprints(ddf)
    eager = compute_fingerprints(ddf.compute())
    assert list(lazy.columns) == list(eager.columns)
    added = [name for name in lazy.columns if name.startswith("fingerprint.")]
    pd.testing.assert_frame_equal(lazy[added].compute(), eager[added])
    assert lazy[added].dtypes.to_dict() == eager[added].dtypes.to_dict()


def test_a_second_call_replaces_the_columns_of_the_first(ddf):
    once = compute_fingerprints(ddf)
    twice = compute_fingerprints(once.assign(**{"fingerprint.pdq": "", "fingerprint.bytes": ""}))
    assert sorted(twice.columns) == sorted(once.columns)
    columns = [name for name in once.columns if name.startswith("fingerprint.")]
    pd.testing.assert_frame_equal(twice[columns].compute(), once[columns].compute())


def test_rows_without_an_image_have_no_fingerprint(tmp_path):
    from few_images import write_bad_shard

    bad = compute_fingerprints(
        dii.read_webdataset_images(write_bad_shard(tmp_path), backend="pandas")
    )
    bad = bad.compute()
    assert bad["fingerprint.pdq"].isna().tolist() == bad["error"].notna().tolist()
    assert bad["fingerprint.bytes"].notna().all()  # bytes that are no image are bytes all the same
    (tmp_path / "b.tar").write_bytes(tar({"1.txt": b"no image here"}))
    (tmp_path / "a.tar").write_bytes(tar({"2.jpg": b"bytes", "2.txt": b""}))
    alone = dii.read_webdataset_images(
        [tmp_path / "a.tar", tmp_path / "b.tar"], members={"txt": str}, backend="pandas"
    )
    hashed = compute_fingerprints(alone, ["bytes"]).compute()
    assert hashed["fingerprint.bytes"].isna().tolist() == [False, True]


def test_empty_files_are_no_duplicates_of_each_other(tmp_path):
    (tmp_path / "a.tar").write_bytes(
        tar({"1.jpg": b"", "2.jpg": b"", "3.jpg": b"x", "4.jpg": b"x"})
    )
    frame = dii.read_webdataset_images(tmp_path / "a.tar", backend="pandas")
    hashed = compute_fingerprints(frame, ["bytes"]).compute()
    assert hashed["fingerprint.bytes"].isna().tolist() == [True, True, False, False]
    found = dii.curate.find_duplicates(frame, "bytes").compute()
    assert found["duplicate.keep"].tolist() == [True, True, True, False]


def test_an_export_of_the_frame_still_copies_the_original_bytes(ddf, photos, tmp_path):
    hashed = compute_fingerprints(ddf, ["bytes", "pdq"])
    dii.to_webdataset(hashed[hashed.cls == 1], tmp_path / "out-{shard:03d}.tar")
    again = dii.read_webdataset_images(tmp_path / "out-000.tar", backend="pandas")
    found = compute_fingerprints(again, ["bytes"])["fingerprint.bytes"].compute().tolist()
    assert found == [xxhash.xxh3_128(p.encoded).hexdigest() for p in photos if p.label == 1]


def test_wrong_arguments_are_refused(ddf):
    for arguments, said in [
        ({"kinds": ["phash"]}, "choose 'bytes', 'pixels', 'pdq' or 'thumbnail'"),
        ({"kinds": "pdq"}, "pass a list"),
        ({"variants": ["upside down"]}, "choose 'mirrored'"),
        ({"kinds": ["bytes"], "variants": ["mirrored"]}, "have 'pdq' among kinds="),
    ]:
        with pytest.raises(dii.ArgumentError, match=said):
            compute_fingerprints(ddf, **arguments)


def test_a_frame_without_what_it_needs_is_refused(ddf):
    with pytest.raises(dii.ArgumentError, match="nor references, nor images"):
        compute_fingerprints(ddf.drop(columns=["offset", "image"]), ["bytes"])
    with pytest.raises(dii.ArgumentError, match="image"):
        compute_fingerprints(ddf.drop(columns="image"), ["pdq"])
