"""Shards in S3, GCS, Azure and behind web servers are used as local ones are, all of it."""

import dask
import numpy as np
import pandas as pd
import pytest
from faulty_server import KINDS
from remote_places import PLACES
from witnesses import by_webdataset

import dask_image_ingest as dii
from dask_image_ingest.errors import ShardNotFoundError
from dask_image_ingest.storage import find_shards

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*with whole files:UserWarning")]

# So that shards of some photographs take several requests.
SMALL = {
    "image-ingest.remote.head": "8 KiB",
    "image-ingest.remote.request-size": "64 KiB",
    "image-ingest.remote.read-timeout": 1.0,
}
METADATA = ["__key__", "offset", "nbytes", "format", "height", "width", "txt", "cls", "json"]


# `make test-more` has the others.
FEW = ("http", "http-without-ranges", "s3")


@pytest.fixture(
    scope="module",
    params=[pytest.param(p, marks=[] if p in FEW else pytest.mark.more) for p in PLACES],
)
def server(request):
    with PLACES[request.param]() as place:
        yield place


@pytest.fixture
def place(server, shards):
    empty = server.empty()
    for number, path in enumerate(shards):
        empty.put(f"train-{number:03d}.tar", path.read_bytes())
    with dask.config.set(SMALL):
        yield empty


@pytest.fixture
def local(shards):
    return dii.read_webdataset_images(shards, backend="pandas")


def read(place, name="train-{000..002}.tar", **options):
    return dii.read_webdataset_images(
        f"{place.url}/{name}", backend="pandas", storage_options=place.options, **options
    )


def assert_same(remote: pd.DataFrame, local: pd.DataFrame, images: bool = True) -> None:
    columns = [name for name in METADATA if name in local]
    left, right = (frame[columns].reset_index(drop=True) for frame in (remote, local))
    pd.testing.assert_frame_equal(left, right)
    if images:
        pairs = zip(remote.images.arrays(), local.images.arrays(), strict=True)
        assert all(np.array_equal(one, other) for one, other in pairs)


def test_shards_are_found_by_any_kind_of_path(place, shards):
    place.put("other/train-003.tar", shards[0].read_bytes())
    place.put("notes.txt", b"no shard")
    names = [f"{place.url}/train-{number:03d}.tar" for number in range(3)]
    sizes = [path.stat().st_size for path in shards]
    for paths in (f"{place.url}/train-{{000..002}}.tar", f"{place.url}/*.tar", names[::-1]):
        found = find_shards(paths, place.options)
        assert sorted(shard.url for shard in found) == names
        assert sorted(shard.size for shard in found) in (sorted(sizes), [-1] * 3)
    below = find_shards(f"{place.url}/", place.options)
    assert sorted(shard.url for shard in below) == [f"{place.url}/other/train-003.tar", *names]
    assert len(find_shards(f"{place.url}/**/*.tar", place.options)) == 4


def test_what_is_not_there_is_named(place):
    for name in ("no.tar", "no-{0..3}.tar", "no-*.tar"):
        with pytest.raises(ShardNotFoundError, match=r"shards.*/no"):
            read(place, name)


def test_every_row_and_pixel_is_that_of_the_local_shards(place, local):
    remote = read(place)
    assert len(remote) == len(local)
    assert_same(remote.compute(), local.compute())


def test_a_filter_keeps_the_same_rows(place, local):
    def keep(ddf):
        return ddf[(ddf.width >= 150) & (ddf["txt"].str.len() > 3)]

    kept = keep(local).compute()
    assert 0 < len(kept) < len(local)
    assert_same(keep(read(place)).compute(), kept)


def test_images_are_decoded_late(place, local):
    locations = ["__key__", "__url__", "offset", "nbytes"]
    remote = read(place)[locations].compute().sample(7, random_state=1)
    late = dii.decode_images(remote, storage_options=place.options)
    everything = local.compute().set_index("__key__")
    expected = everything.loc[remote["__key__"]].images.arrays()
    pairs = zip(late.images.arrays(), expected, strict=True)
    assert all(np.array_equal(one, other) for one, other in pairs)


def test_shards_are_exported_from_there(place, shards, tmp_path):
    table = read(place).drop(columns=["image", "error"])
    dii.to_webdataset(
        table, tmp_path / "{shard:03d}.tar", samples_per_shard=5, storage_options=place.options
    )
    assert by_webdataset(sorted(tmp_path.glob("*.tar"))) == by_webdataset(shards)


def test_shards_are_exported_to_there(place, local, tmp_path):
    if not place.writes:
        pytest.skip("a web server takes no files")
    table = local.drop(columns=["image", "error"])
    options = {"samples_per_shard": 5, "sidecar": "parquet"}
    dii.to_webdataset(table, tmp_path / "{shard:03d}.tar", **options)
    dii.to_webdataset(
        table, f"{place.url}/out/{{shard:03d}}.tar", storage_options=place.options, **options
    )
    written = dii.read_webdataset_images(str(tmp_path / "*.tar"), backend="pandas")
    assert_same(read(place, "out/*.tar").compute(), written.compute())


def test_faults_of_the_network_lose_and_change_nothing(place, local, tmp_path):
    rates = dict.fromkeys(KINDS, 0.05)
    if place.url.startswith("az"):
        del rates["503"]  # Azure's own package pauses for 15 s after one when it lists
    whole = local.compute()
    with place.behind_faults(rates=rates, seed=1, stall=2.0) as (far, proxy):
        remote = read(far)
        locations = remote[["__key__", "__url__", "offset", "nbytes"]].compute()
        assert_same(remote.compute(), whole)
        late = dii.decode_images(locations, storage_options=far.options)
        pairs = zip(late.images.arrays(), whole.images.arrays(), strict=True)
        assert all(np.array_equal(one, other) for one, other in pairs)
        dii.to_webdataset(
            remote.drop(columns=["image", "error"]),
            tmp_path / "{shard:03d}.tar",
            samples_per_shard=5,
            storage_options=far.options,
        )
        assert sum(proxy.injected.values()) > 3, proxy.injected
    # By webdataset, from the shards themselves.
    keys = [key for key, _ in by_webdataset(sorted(tmp_path.glob("*.tar")))]
    assert keys == whole["__key__"].tolist()
