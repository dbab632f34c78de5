"""What other tools have written beside a shard is believed only where a walk finds the same."""

from __future__ import annotations

import fsspec
import pytest
from faulty_server import faulty_server
from random_shards import members_json, wds2idx_file
from s3 import empty_bucket, s3_options
from synthetic import write_shards
from tars import FORMATS, tar

import dask_image_ingest as dii
from dask_image_ingest.dataset import first_shard, opened

WRITERS = pytest.mark.parametrize("write", [wds2idx_file, members_json])
KINDS = ("jpg", "txt", "cls")
EARLY, LATE = "Thu, 01 Jan 2026 00:00:00 GMT", "Fri, 02 Jan 2026 00:00:00 GMT"


def shard_of(numbers, tar_format="ustar"):
    """A shard whose members are all of one size; captions and labels are those of the keys."""
    names = [f"{n:03d}.{kind}" for n in numbers for kind in KINDS]
    return tar({name: name.partition(".")[0].encode() for name in names}, tar_format)


def rows(paths, **options):
    ddf = dii.read_webdataset_images(
        paths, backend="pandas", components={"txt": "string", "cls": "int64"}, **options
    )
    frame = ddf[["__key__", "txt", "cls"]].compute()
    return [(key, txt, int(cls)) for key, txt, cls in frame.itertuples(index=False)]


def expected(numbers):
    return [(f"{n:03d}", f"{n:03d}", n) for n in numbers]


def index_of(content, tmp_path, write):
    """The name and the bytes of the index of a shard."""
    (tmp_path / "a.tar").write_bytes(content)
    made = write(tmp_path / "a.tar")
    return made.name, made.read_bytes()


@pytest.fixture
def memory():
    fs = fsspec.filesystem("memory")
    yield fs
    fs.rm("/foreign", recursive=True)


@WRITERS
@pytest.mark.parametrize("tar_format", FORMATS)
def test_it_spares_the_walk(memory, tmp_path, no_walk, write, tar_format):
    content = shard_of(range(30), tar_format)
    memory.pipe_file("/foreign/a.tar", content)
    with pytest.raises(AssertionError, match="walked"):
        rows("memory://foreign/a.tar")
    name, index = index_of(content, tmp_path, write)
    memory.pipe_file(f"/foreign/{name}", index)
    assert rows("memory://foreign/a.tar") == expected(range(30))
    with pytest.raises(AssertionError, match="walked"):
        rows("memory://foreign/a.tar", index=False)


@WRITERS
def test_one_of_another_order_is_told_and_not_used(tmp_path, write):
    """All members have one size, and the last sample is the same."""
    name, index = index_of(shard_of(range(40)), tmp_path, write)
    numbers = [*reversed(range(39)), 39]
    with faulty_server(files={"/a.tar": shard_of(numbers), f"/{name}": index}) as server:
        server.files["/"] = f'<a href="{name}">x</a>'.encode()
        with pytest.warns(UserWarning, match=rf"{name} is not used: it is stale: '.*' is not at"):
            assert rows(f"{server.url}/a.tar") == expected(numbers)


@WRITERS
def test_one_of_a_shard_of_another_size_is_told_and_not_used(tmp_path, write):
    name, index = index_of(shard_of(range(40)), tmp_path, write)
    with faulty_server(files={"/a.tar": shard_of(range(90)), f"/{name}": index}) as server:
        server.files["/"] = f'<a href="{name}">x</a>'.encode()
        with pytest.warns(UserWarning, match=rf"{name} is not used: it is stale: its last member"):
            assert rows(f"{server.url}/a.tar") == expected(range(90))


@WRITERS
def test_one_that_is_older_than_its_shard_is_not_used(tmp_path, write):
    """Two of 400 samples were exchanged, which few headers are likely to show."""
    name, index = index_of(shard_of(range(400)), tmp_path, write)
    numbers = list(range(400))
    numbers[7], numbers[8] = 8, 7
    with faulty_server(files={"/a.tar": shard_of(numbers), f"/{name}": index}) as server:
        server.files["/"] = f'<a href="{name}">x</a>'.encode()
        server.times = {"/a.tar": LATE, f"/{name}": EARLY}
        assert rows(f"{server.url}/a.tar") == expected(numbers)


@WRITERS
def test_a_shard_that_is_at_hand_is_walked(tmp_path, write):
    index_of(shard_of(range(40)), tmp_path, write)
    numbers = [0, 2, 1, *range(3, 40)]
    (tmp_path / "a.tar").write_bytes(shard_of(numbers))
    assert rows(tmp_path / "a.tar") == expected(numbers)


@WRITERS
def test_headers_cost_few_requests(tmp_path, write):
    name, index = index_of(shard_of(range(400)), tmp_path, write)
    files = {"/a.tar": shard_of(range(400)), f"/{name}": index}
    with faulty_server(files=files) as server:
        server.files["/"] = f'<a href="{name}">x</a>'.encode()
        server.times = {"/a.tar": EARLY, f"/{name}": LATE}
        ddf = dii.read_webdataset_images(f"{server.url}/a.tar", backend="pandas", components={})
        server.reset()
        assert ddf["__key__"].compute().tolist() == [f"{n:03d}" for n in range(400)]
        assert len([path for _, path, _ in server.seen if path == "/a.tar"]) <= 20


@pytest.mark.slow
def test_the_index_that_an_export_writes_spares_the_walk(s3_server, tmp_path, monkeypatch):
    """It is uploaded before its shard, as others upload them."""
    shards = write_shards(tmp_path, shards=3, per_shard=20, size=(300, 400))
    fs, options = empty_bucket(s3_server, "exported"), s3_options(s3_server)
    table = dii.read_webdataset_images(shards, backend="pandas").drop(columns=["image", "error"])
    out = "s3://exported/out"
    dii.to_webdataset(table, f"{out}/{{shard:03d}}.tar", index=True, storage_options=options)
    infos = fs.ls("exported/out", detail=True, refresh=True)
    times = {info["name"].rpartition(".")[2]: info["LastModified"] for info in infos}
    assert times["idx"] <= times["tar"]
    monkeypatch.setattr(opened, "index_tar", None)
    monkeypatch.setattr(first_shard, "index_head", None)
    found = dii.read_webdataset_images(out, backend="pandas", storage_options=options)
    assert found["txt"].compute().tolist() == [f"picture {n}" for n in range(60)]
