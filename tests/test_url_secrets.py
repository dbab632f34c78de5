"""Passwords in URLs are for servers: no error, warning, log line or repr has them."""

from __future__ import annotations

import logging
import pickle
import warnings

import pytest
from distributed.protocol import deserialize, serialize
from faulty_server import faulty_server
from few_images import encoded
from tars import tar

import dask_image_ingest as dii
from dask_image_ingest import errors
from dask_image_ingest.url_secrets import without_secrets

SHARD = tar({"a.png": encoded((8, 8), "PNG"), "a.json": b"{}", "b.png": b"no image"})


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://user:s3cret@host/a.tar is gone", "https://user:***@host/a.tar is gone"),
        ("'ftp://u:s3@cret@h:21/a@b:c.tar'", "'ftp://u:***@h:21/a@b:c.tar'"),
        ("a::sftp://:p@h/x b+c://u:p@h", "a::sftp://:***@h/x b+c://u:***@h"),
        ("http://u:%40%2F@h?x=y:z@w", "http://u:***@h?x=y:z@w"),
    ],
)
def test_the_password_of_each_url_is_masked(text, masked):
    assert without_secrets(text) == masked
    assert without_secrets(masked) == masked


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/a@b:c.tar",
        "https://host:8080/a.tar, and user:x@host",
        "https://user@host/a.tar",
        "/data/a:b@c.tar",
        "https://host/a?b=c:d@e",
        "",
    ],
)
def test_what_is_no_password_stays(text):
    assert without_secrets(text) == text


@pytest.mark.parametrize("name", errors.__all__)
def test_no_error_has_one_also_after_its_way_to_the_client(name):
    error = getattr(errors, name)("https://user:s3cret@host/a.tar cannot be read")
    for one in (error, pickle.loads(pickle.dumps(error)), deserialize(*serialize(error))):
        assert str(one) == "https://user:***@host/a.tar cannot be read"
        assert "s3cret" not in repr(one)


def test_whatever_is_told_of_a_remote_shard_it_is_read_and_its_column_says_where(caplog):
    caplog.set_level(logging.DEBUG, "dask_image_ingest")
    told = []
    with (
        faulty_server(files={"/a.tar": SHARD}) as server,
        warnings.catch_warnings(record=True) as w,
    ):
        warnings.simplefilter("always")
        url = server.url.replace("://", "://user:s3cret@") + "/a.tar"
        read = {"backend": "pandas", "json_fields": {"missing": "int64"}}
        ddf = dii.read_webdataset_images(url, **read)
        assert ddf.compute()["__url__"].tolist() == [url] * 2
        late = dii.decode_images(ddf[["__key__", "__url__", "offset", "nbytes"]])
        told += [repr(ddf), str(ddf.expr), repr(ddf.expr), str(late.expr), str(ddf.dask)]
        told += [str(task) for task in dict(ddf.dask).values()]
        for wrong in ("b.tar", "{a,b}.tar", "c/", "*.tar", "{a.tar"):
            with pytest.raises(dii.DaskImageIngestError) as raised:
                dii.read_webdataset_images(url.replace("a.tar", wrong), **read)
            told.append(str(raised.value))
        with pytest.raises(dii.ImageDecodeError) as raised:
            dii.read_webdataset_images(url, errors="raise", backend="pandas").compute()
        told.append(str(raised.value))
    told += [str(warning.message) for warning in w] + [
        record.getMessage() for record in caplog.records
    ]
    assert any("images could not be decoded" in text for text in told)
    assert any("no field 'missing'" in text for text in told)
    assert sum("user:***@127.0.0.1" in text for text in told) > 10
    assert not [text for text in told if "s3cret" in text]
