"""Keys of object stores are no paths: they pass unchanged to rows, requests and exports."""

from __future__ import annotations

import fsspec
import pytest
from photo_shards import encode
from PIL import Image
from remote_places import PLACES, Place
from tars import tar

import dask_image_ingest as dii
from dask_image_ingest.errors import ShardNotFoundError
from dask_image_ingest.storage import find_shards

pytestmark = pytest.mark.slow

EMPTY = ["t/c.tar", "t//c.tar", "t///c.tar", "t/q//r/c.tar", "t/f /c.tar"]
# Azure's client resolves these before it sends them.
DOTS = ["t/./c.tar", "t/../c.tar", "t/x/../e.tar"]


@pytest.fixture(
    params=["memory", *(pytest.param(p, marks=pytest.mark.more) for p in ("s3", "gcs", "azure"))]
)
def place(request):
    if request.param != "memory":
        with PLACES[request.param]() as server:
            yield server.empty()
        return
    yield Place("memory://shards", {}, "", lambda _: {})
    fsspec.filesystem("memory").store.clear()


def keys_of(place) -> list[str]:
    fs, root = fsspec.url_to_fs(place.url, **place.options)
    fs.invalidate_cache()
    return sorted(path[len(root) + 1 :] for path in fs.find(root))


def test_every_key_is_read_by_folder_glob_and_name_and_written_as_it_is(place):
    keys = EMPTY if place.url.startswith("az:") else EMPTY + DOTS
    photo = encode(Image.new("RGB", (9, 8)), "png")
    for number, key in enumerate(keys):
        place.put(key, tar({f"s{number}.png": photo, f"s{number}.txt": key.encode()}))
    urls = {f"{place.url}/{key}": f"s{number}" for number, key in enumerate(keys)}

    def read(*names, **options):
        frame = dii.read_webdataset_images(
            [f"{place.url}/{name}" for name in names], storage_options=place.options, **options
        )
        table = frame.compute()
        assert [text == url[len(place.url) + 1 :] for url, text in table[["__url__", "txt"]].values]
        assert table["error"].isna().all()
        return dict(zip(table["__url__"], table["__key__"], strict=True))

    for names in (["t/"], ["t"], ["t/**/*.tar"], ["t/**"], keys, ["t/{,/,//}c.tar", *keys]):
        assert read(*names) == urls, names
    for key in keys:
        assert read(key) == {f"{place.url}/{key}": urls[f"{place.url}/{key}"]}
    only = {url: sample for url, sample in urls.items() if url.endswith(("t//c.tar", "t///c.tar"))}
    assert read("t//") == only == read("t//**")
    assert read("t//*.tar") == {f"{place.url}/t//c.tar": "s1"}
    with pytest.raises(ShardNotFoundError, match=r"//absent\.tar"):
        read("t//absent.tar")
    # More of a folder than are asked for one by one.
    for number in range(9):
        place.put(f"many//{number}.tar", tar({f"m{number}.png": photo}))
    many = find_shards(f"{place.url}/many//{{0..8}}.tar", place.options)
    assert [shard.url for shard in many] == [f"{place.url}/many//{n}.tar" for n in range(9)]
    assert all(shard.version and shard.size for shard in many)

    before = keys_of(place)
    for combined in (False, True):
        table = dii.write_index(f"{place.url}/t/", combined=combined, storage_options=place.options)
        assert set(table["state"]) == {"written"} if not combined else {"written", "kept"}
        assert read("t/") == urls == read("t/", index=True)
    added = {f"{key}.index.parquet" for key in keys}
    added |= {f"{key.rpartition('/')[0]}/_index.parquet" for key in keys}
    assert set(keys_of(place)) - set(before) == added

    frame = dii.read_webdataset_images(f"{place.url}/t//c.tar", storage_options=place.options)
    before = keys_of(place)
    # The tests' own server of Azure has no copies, by which an export replaces another.
    again = [] if place.url.startswith("az:") else [{"overwrite": True}]
    for options in ({}, {"resume": True}, *again):
        dii.to_webdataset(
            frame.drop(columns=["image", "error"]),
            f"{place.url}/out//{{shard:03d}}.tar",
            storage_options=place.options,
            **options,
        )
    dii.checkpoint(frame, f"{place.url}/kept//", storage_options=place.options)
    new = [key for key in keys_of(place) if key not in before]
    assert all(key.startswith(("out//", "kept//")) and "///" not in key for key in new), new
    assert read("out//000.tar") == {f"{place.url}/out//000.tar": "s1"}


def test_images_of_a_folder_have_keys_of_their_own(place):
    photo = encode(Image.new("RGB", (9, 8)), "png")
    for name in ("c.png", "/c.png", "q//r.png"):
        place.put(f"im/{name}", photo)
    frame = dii.read_images(f"{place.url}/im/", storage_options=place.options).compute()
    assert dict(zip(frame["__key__"], frame["__url__"], strict=True)) == {
        "c": f"{place.url}/im/c.png",
        "/c": f"{place.url}/im//c.png",
        "q//r": f"{place.url}/im/q//r.png",
    }
    assert frame["error"].isna().all()
