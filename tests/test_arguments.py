"""Errors and warnings about arguments say in plain words what is wrong."""

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from faulty_server import faulty_server
from photo_shards import write_photo_shards, write_tar

import dask_image_ingest as dii


@pytest.fixture(scope="module")
def shard(photos, tmp_path_factory):
    (path,) = write_photo_shards(photos[:2], tmp_path_factory.mktemp("arguments"), per_shard=2)
    return path


# fmt: off
REFUSED = [
    ({"size": 100_000}, r"size=100000: .* from 1 to 32767"),
    ({"size": True}, "size=True: "),
    ({"size": (224,)}, r"size=\(224,\): .*\(height, width\)"),
    ({"resize": ["crop"]}, r"resize=\['crop'\]; choose 'stretch', .* or 'longer'"),
    ({"mode": 3}, "mode=3; choose 'RGB', 'RGBA', 'L', 'labels' or 'raw'"),
    ({"errors": None}, "errors=None; choose 'null', 'raise' or 'drop'"),
    ({"shard_errors": 1}, "shard_errors=1; choose 'raise' or 'drop'"),
    ({"transform": "flip"}, "transform='flip': pass a function"),
    ({"max_pixels": 1e6}, "max_pixels=1000000.0: .*whole number.* or None"),
    ({"scaled_decode": 1}, "scaled_decode=1: pass True or False"),
    ({"columns": "txt"}, "columns='txt': pass a list of column names"),
    ({"columns": [1]}, r"columns=\[1\]: pass a list"),
    ({"members": ["txt"]}, r"members=\['txt'\]: pass 'infer', or a mapping"),
    ({"json_fields": ["synset"]}, r"json_fields=\['synset'\]: pass a mapping .*'float32'"),
    ({"json_fields": {"synset": "text"}}, r"json_fields\['synset'\]: 'text' is no type"),
    ({"partition_size": True}, "partition_size=True: .*'512 MiB'"),
    ({"shards_per_partition": 0}, "shards_per_partition=0: .*'auto'"),
    ({"storage_options": "anon"}, "storage_options is of type str: pass a dict"),
    ({"backend": ["pandas"]}, "backend=.*choose 'cudf' or 'pandas'"),
    ({"filters": pd.DataFrame({"a": [1]})}, "filters=.*pass a list of"),
]
# fmt: on


def test_an_error_names_the_argument_what_it_got_and_what_it_takes(shard):
    for options, said in REFUSED:
        with pytest.raises(dii.ArgumentError, match=said):
            dii.read_webdataset_images(shard, **{"backend": "pandas", **options})


def test_whole_numbers_of_numpy_are_numbers(shard):
    for size in (np.int64(64), np.array([64, 64]), [64, np.uint8(64)]):
        ddf = dii.read_webdataset_images(shard, backend="pandas", size=size)
        assert {array.shape for array in ddf.compute().images.arrays()} == {(64, 64, 3)}


def test_there_are_no_more_partitions_than_images(shards, photos):
    ddf = dii.read_webdataset_images(shards, backend="pandas", partition_size=10)
    assert len(shards) < ddf.npartitions <= len(photos) + len(shards)
    assert ddf["__key__"].compute().tolist() == [photo.key for photo in photos]


# fmt: off
MISSPELT = [
    ({"json_fields": {"similarty": "float32"}}, "'similarty'.* of its json are 'similarity'"),
    ({"json_fields": {"source.nme": str, "similarity": float}}, "'source.nme'.*'source.name'"),
    ({"members": {"caption": str}}, "no member 'caption'; its members are 'jpg', 'txt'"),
    ({"image": "jpgg"}, r"no image \(image='jpgg'\); its members are 'jpg', 'txt'"),
    ({"members": {"jsn": str}, "json_fields": {"a": str}}, "no member 'jsn', no field 'a'"),
]
# fmt: on


def test_misspelt_names_are_one_warning_that_says_what_there_is(shards):
    for options, said in MISSPELT:
        with pytest.warns(UserWarning, match=said) as caught:
            dii.read_webdataset_images(shards, backend="pandas", **options)
        assert len(caught) == 1
        assert caught[0].filename == __file__


def test_names_that_are_there_are_no_warning(shards, tmp_path):
    options = {"json_fields": {"similarity": float, "source.name": str}, "members": {"TXT": str}}
    dii.read_webdataset_images(shards, backend="pandas", image="webp;jpg", **options)
    dii.read_webdataset_images(write_tar(tmp_path / "empty.tar", {}), backend="pandas", **options)
    # One record of a hundred has the field.
    members = {f"{n}.json": b'{"rare": 1}' if n == 99 else b"{" for n in range(100)}
    members["0.jpg"] = b""
    path = write_tar(tmp_path / "rare.tar", members)
    dii.read_webdataset_images(path, backend="pandas", json_fields={"rare": int})


def test_components_that_were_named_are_all_that_is_wanted(shards):
    ddf = dii.read_webdataset_images(shards, backend="pandas", members={"txt": str})
    assert len(ddf.compute()) == 24  # with no warning of the others


def test_many_kinds_of_members_are_one_warning(tmp_path, photos):
    write_tar(tmp_path / "0.tar", {"a.jpg": photos[0].encoded})
    many = {f"b.kind{n:05d}": b"" for n in range(3000)}
    write_tar(tmp_path / "1.tar", {"b.jpg": photos[0].encoded, **many})
    with pytest.warns(UserWarning, match=r"'kind00000'.* and 2997 more") as caught:
        assert len(dii.read_webdataset_images(tmp_path, backend="pandas").compute()) == 2
    assert len(caught) == 1
    assert re.search("'kind00003'", str(caught[0].message)) is None


def test_headers_that_no_request_can_have_are_no_missing_file():
    for headers in ({"X": "a\nb"}, {"X": "a\r"}, {"a\n": "x"}, {"X": 1}):
        for place in ((), ("http",), ("https",), ("client_kwargs",)):
            options = {"headers": headers}
            for name in place:
                options = {name: options}
            with pytest.raises(dii.ArgumentError, match=r"storage_options: headers"):
                dii.read_webdataset_images("http://127.0.0.1:9/a.tar", storage_options=options)


def test_headers_are_sent_as_they_are_and_their_values_not_repeated(shard):
    sent = {"Authorization": "Bearer s3cret==", "X-Name": "é\tü", "x!": ""}
    with faulty_server(files={"/a.tar": Path(shard).read_bytes()}) as server:
        options = {"headers": sent}
        ddf = dii.read_webdataset_images(
            f"{server.url}/a.tar", backend="pandas", storage_options=options
        )
        assert len(ddf) > 0
    with pytest.raises(dii.ArgumentError, match="no line break may follow") as raised:
        dii.read_webdataset_images(
            "http://h/a.tar", storage_options={"headers": {"Authorization": "s3cret\n"}}
        )
    assert "s3cret" not in str(raised.value)
