"""Shards that can have no index, and those whose versions are known by other means."""

from __future__ import annotations

import io
import zipfile

import fsspec
import pytest
from faulty_server import faulty_server
from PIL import Image
from tars import tar

import dask_image_ingest as dii


def numbered(numbers):
    """A shard of grey squares, each of its own number, as key, caption and pixel."""
    members = {}
    for n in numbers:
        picture = io.BytesIO()
        Image.new("RGB", (8, 8), (n, n, n)).save(picture, "BMP")
        members |= {f"{n:03d}.bmp": picture.getvalue(), f"{n:03d}.txt": b"%d" % n}
    return tar(members)


def numbers(paths, **options):
    """What keys, captions and pixels say, row by row."""
    frame = dii.read_webdataset_images(paths, backend="pandas", **options).compute()
    pixels = [int(image[0, 0, 0]) for image in frame.images.arrays()]
    return [int(key) for key in frame["__key__"]], [int(txt) for txt in frame["txt"]], pixels


def test_a_shard_without_a_version_is_known_by_its_content(tmp_path):
    with faulty_server(files={"/a.tar": numbered(range(4))}) as server:
        url = f"{server.url}/a.tar"
        server.tags = False
        for first in (0, 200):
            server.files["/a.tar"] = numbered(range(first, first + 4))
            if first:
                with pytest.warns(UserWarning, match="is not used: it is stale"):
                    assert numbers(url, index=tmp_path) == ([*range(first, first + 4)],) * 3
            assert dii.write_index(url, folder=tmp_path)["state"].tolist() == ["written"]
            assert numbers(url, index=tmp_path) == ([*range(first, first + 4)],) * 3
        assert dii.write_index(url, folder=tmp_path)["state"].tolist() == ["kept"]


def test_a_shard_in_a_zip_is_known_by_its_checksum(tmp_path):
    for name, first in (("old", 0), ("new", 200)):
        with zipfile.ZipFile(tmp_path / f"{name}.zip", "w") as archive:
            info = zipfile.ZipInfo("a.tar", (2026, 1, 1, 0, 0, 0))
            archive.writestr(info, numbered(range(first, first + 4)))
    url = f"zip://*.tar::{tmp_path}/old.zip"
    dii.write_index(url, folder=tmp_path)
    assert numbers(url, index=tmp_path) == ([*range(4)],) * 3
    (tmp_path / "new.zip").replace(tmp_path / "old.zip")
    fsspec.get_filesystem_class("zip").clear_instance_cache()
    with pytest.warns(UserWarning, match="is not used: it is stale"):
        assert numbers(url, index=tmp_path) == ([*range(200, 204)],) * 3


def test_no_command_runs_that_nobody_wrote(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.tar").write_bytes(numbered(range(4)))
    command = "pipe:cat a.tar | tee copy.tar"
    with pytest.raises(dii.ArgumentError, match=r"index=True: pipe:cat .* it is a command"):
        numbers(command, allow_pipes=True, index=True)
    for folder in (None, "indexes"):
        with pytest.raises(dii.ArgumentError, match="it is a command"):
            dii.write_index(command, folder=folder, storage_options={"allow_pipes": True})
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]
    assert numbers(command, allow_pipes=True) == ([*range(4)],) * 3


def test_what_takes_no_files_is_refused_before_a_shard_is_read(tmp_path):
    with faulty_server(files={"/d/a.tar": numbered(range(4))}) as server:
        url = f"{server.url}/d/a.tar"
        for folder in (None, f"{server.url}/indexes"):
            with pytest.raises(dii.ArgumentError, match=r"web server.* pass folder="):
                dii.write_index(url, folder=folder)
        assert {method for method, _, _ in server.seen} == {"HEAD"}
        assert dii.write_index(url, folder=tmp_path)["state"].tolist() == ["written"]
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.tar", numbered(range(4)))
    with pytest.raises(dii.ArgumentError, match=r"archive: pass folder="):
        dii.write_index(f"zip://*.tar::{tmp_path}/a.zip")
