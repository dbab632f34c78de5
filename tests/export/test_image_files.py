"""Image files become the members of shards, byte for byte."""

import tarfile
from pathlib import Path

import dask
import pytest
from witnesses import by_webdataset

import dask_image_ingest as dii


@pytest.fixture(autouse=True)
def threads():
    with dask.config.set(scheduler="sync"):
        yield


@pytest.fixture
def folder(photos, tmp_path):
    """Six photographs in two classes."""
    for number, photo in enumerate(photos[:6]):
        path = tmp_path / "pictures" / ("cat", "dog")[number % 2] / f"{number}.{photo.extension}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo.encoded)
    return tmp_path / "pictures"


def contents(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_folder_becomes_shards_with_its_files_as_they_are(folder, tmp_path):
    ddf = dii.read_images(folder, backend="pandas", label="folder")
    made = dii.to_webdataset(
        ddf, tmp_path / "{shard:03d}.tar", samples_per_shard=4, members=["all", {"cls": "label"}]
    )
    assert made.samples.tolist() == [4, 2]
    found, labels = {}, {}
    for url in made.url:
        with tarfile.open(url) as tar:
            for member in tar:
                data = tar.extractfile(member).read()
                (labels if member.name.endswith(".cls") else found)[member.name] = data
    assert found == contents(folder)
    assert labels == {
        name.rpartition(".")[0] + ".cls": b"%d" % name.startswith("dog") for name in found
    }
    keys = [key for key, _ in by_webdataset(made.url)]
    assert keys == ddf["__key__"].compute().tolist()


def test_the_shards_give_the_frame_of_the_folder(folder, tmp_path):
    ddf = dii.read_images(folder, backend="pandas", label="folder")
    kept = ddf[ddf.width > 200]
    dii.to_webdataset(kept, tmp_path / "{shard}.tar")
    again = dii.read_webdataset_images(tmp_path / "*.tar", backend="pandas", sidecar="parquet")
    same = ["__key__", "nbytes", "format", "height", "width", "channels", "error"]
    expected, made = kept.compute(), again.compute()
    assert made[same].values.tolist() == expected[same].values.tolist()
    assert made.label.tolist() == expected.label.tolist()
    for one, other in zip(made.images.arrays(), expected.images.arrays(), strict=True):
        assert (one == other).all()


def test_a_file_that_is_another_one_by_now_is_refused(folder, tmp_path):
    frame = dii.read_images(folder, backend="pandas").drop(columns=["image", "error"]).compute()
    Path(frame["__url__"].iloc[0]).write_bytes(b"short")
    with pytest.raises(dii.ArgumentError, match=r"1 of 6 rows.*lost-sample"):
        dii.to_webdataset(frame, tmp_path / "{shard}.tar")
    made = dii.to_webdataset(frame, tmp_path / "{shard}.tar", row_errors="drop")
    assert made.samples.tolist() == [5]
