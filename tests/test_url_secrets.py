"""Passwords and signatures in URLs are for servers: nothing that is shown or written has them."""

from __future__ import annotations

import logging
import pickle
import re
import warnings

import dask
import pytest
from distributed.protocol import deserialize, serialize
from faulty_server import faulty_server
from few_images import encoded
from pyarrow import parquet
from tars import tar

import dask_image_ingest as dii
from dask_image_ingest import errors
from dask_image_ingest.cli import main
from dask_image_ingest.url_secrets import url_identity, without_secrets

SHARD = tar({"a.png": encoded((8, 8), "PNG"), "a.json": b"{}", "b.png": b"no image"})


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("https://user:s3cret@host/a.tar is gone", "https://user:***@host/a.tar is gone"),
        ("'ftp://u:s3@cret@h:21/a@b:c.tar'", "'ftp://u:***@h:21/a@b:c.tar'"),
        ("a::sftp://:p@h/x b+c://u:p@h", "a::sftp://:***@h/x b+c://u:***@h"),
        ("http://u:%40%2F@h?x=y:z@w", "http://u:***@h?x=y:z@w"),
        ("'https://h/a?x=1&sig=b%2F', byte 3", "'https://h/a?x=1&***', byte 3"),
        ("[https://h/a?sv=2&sr=c&sig=x&y=1]: no", "[https://h/a?***&y=1]: no"),
        ('{"u":"https://h/a?token=t","n":1}', '{"u":"https://h/a?***","n":1}'),
        ("with url: /a?X-Amz-Date=1&X%2DAmz-Signature=2 (403)", "with url: /a?*** (403)"),
        ("a.tar?Expires=9&Signature=a;b==&Key-Pair-Id=K", "a.tar?***"),
        ("https://h/a?md5=x-_&expires=3;id=4", "https://h/a?***;id=4"),
        ("zip://a::https://u:p@h/z?hdnts=exp=1~hmac=2", "zip://a::https://u:***@h/z?***"),
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
        "https://host/get?id=1&expires=3&sv=2, is it?",
        "",
    ],
)
def test_what_is_no_password_stays(text):
    assert without_secrets(text) == text


@pytest.mark.parametrize("address", ["h", "h:80", "[::1]:80"])
@pytest.mark.parametrize("chain", ["", "zip://a.tar::", "tar://a::zip://b::"])
def test_an_identity_has_neither_password_nor_signature_nor_fragment(chain, address):
    urls = (
        f"{chain}https://u{password}@{address}/a?{before}id=1&b{after}{fragment}"
        for password in ("", ":p", ":p@q")
        for before in ("", "sig=1&sv=2&", "X-Amz-Date=1&")
        for after in ("", "&Signature=a%2F;b&Expires=2", "&token=", "&access_token=x::y")
        for fragment in ("", "#f")
    )
    assert {url_identity(url) for url in urls} == {f"{chain}https://u@{address}/a?id=1&b"}
    assert url_identity(f"{chain}s3://b/a?sig=1#2") == f"{chain}s3://b/a?sig=1#2"


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


class Told:
    """Everything that a session shows: results, graphs, errors with their causes, and output."""

    def __init__(self, caplog, capsys):
        self.texts, self._caplog, self._capsys = [], caplog, capsys

    def call(self, function, *args, **options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                result = function(*args, **options)
            except Exception as error:
                result, chain = error, error
                while chain is not None:  # as a traceback prints it
                    self.texts.append(str(chain))
                    after = None if chain.__suppress_context__ else chain.__context__
                    chain = chain.__cause__ or after
        self.texts += [repr(result), str(result), repr(getattr(result, "attrs", ""))]
        self.texts += [str(each.message) for each in caught]
        for each in (result, *([result.optimize()] if hasattr(result, "dask") else [])):
            if hasattr(each, "dask"):
                self.texts += [str(each.expr), repr(each.expr), str(dict(each.dask))]
        self.texts += self._capsys.readouterr()
        return result

    def leaks(self):
        texts = self.texts + [record.getMessage() for record in self._caplog.records]
        return [text for text in texts if "CANARY" in text]


def held(path):
    """All that a file has, compressed columns of parquet included."""
    table = parquet.read_table(path).to_pylist() if path.suffix == ".parquet" else ""
    return path.read_bytes() + str(table).encode()


@pytest.mark.slow
def test_no_printer_and_no_written_file_shows_a_secret(tmp_path, caplog, capsys):
    caplog.set_level(logging.DEBUG, "dask_image_ingest")
    told = Told(caplog, capsys)
    options = {"headers": {"X-Token": "CANARY0"}}
    files = {"/a.tar": SHARD, "/a.png": encoded((8, 8), "PNG")}
    quick = {"scheduler": "synchronous", "image-ingest.remote.retry-limit": 0}
    with faulty_server(files=files) as server, dask.config.set(quick):
        base = server.url.replace("://", "://user:CANARY1@")
        url = base + "/a.tar?sv=CANARY2&X-Amz-Signature=ab%2FCANARY3&sig=CANARY/4%3D"
        read = {"backend": "pandas", "storage_options": options}
        ddf = told.call(dii.read_webdataset_images, url, **read)
        refs = told.call(dii.read_webdataset_images, url, decode=False, **read)
        told.texts += [repr(refs.compute()["image"]), repr(refs.compute()["image"].iloc[0])]
        located = ddf[["__key__", "__url__", "offset", "nbytes"]]
        told.call(dii.decode_images, located, storage_options=options)
        told.call(dii.read_images, url.replace("a.tar", "a.png"), **read)
        for wrong in ("b.tar", "{a,b}.tar", "*.tar", "{a.tar"):
            told.call(dii.read_webdataset_images, url.replace("a.tar", wrong), **read)
        told.call(dii.read_webdataset_images, re.sub(r":\d+/", ":1/", url), **read)
        told.call(dii.read_webdataset_images(url, errors="raise", **read).compute)
        told.call(dii.read_webdataset_images, url, storage_options=["CANARY"])
        told.call(ddf.images.map_batches(lambda _: 1 / 0, outputs={"m": "int8"}).compute)
        told.call(dii.to_webdataset, ddf, tmp_path / "a/{shard:03d}.tar", sidecar="parquet")
        told.call(dii.to_webdataset, refs.compute(), tmp_path / "b/{shard:03d}.tar")
        told.call(dii.to_parquet_images, refs, tmp_path / "c", source_options=options)
        for number, frame in enumerate((ddf, refs)):
            told.call(dii.checkpoint, frame, tmp_path / f"checkpoint-{number}")
        for combined in (False, True):
            folder = tmp_path / f"index-{combined}"
            arguments = {"folder": folder, "combined": combined, "storage_options": options}
            told.call(dii.write_index, url, **arguments)
            told.call(dii.read_webdataset_images, url, index=folder, **read)
        told.call(dii.gallery, ddf, tmp_path / "gallery.html", columns=["__key__", "__url__"])
        told.call(ddf.images.show()._repr_html_)
        told.call(
            dii.curate.write_report, dii.curate.measure_quality(ddf), tmp_path / "report.html"
        )
        for verb in ("describe", "check", "head", "quality", "duplicates", "export"):
            output = ["-o", f"{tmp_path}/cli-{verb}"] if verb == "export" else []
            for json in ([], ["--json"]):
                told.call(main, [verb, url, *output, *json])
    assert sum("user:***@127.0.0.1" in text and "a.tar?***" in text for text in told.texts) > 20
    assert not told.leaks()
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 15
    assert not [path for path in written if b"CANARY" in held(path)]
