"""Whatever is passed to a public function, it works or says in plain words what is wrong."""

import datetime
import math
import re
import warnings
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from faulty_server import faulty_server
from photo_shards import write_photo_shards, write_tar

import dask_image_ingest as dii

WRONG = (
    None, True, False, 0, -1, 1, 3, 10**30, 2.5, -0.0, math.nan, math.inf, 1j, "", "x", "txt",
    "null", "\0", "\ud83d", "1e9999", "-1 MiB", "http://", "s3:/", "::", "{", "*", b"", b"x",
    (), (1,), (1, 2), (1, 2, 3), (True, 1), [], [None], ["x"], [1], [[1]], ["txt", "txt"],
    [("width", ">", 1)], [()], [("width", ">", object())], [("width", "in", 1)],
    {}, {"a": 1}, {1: 2}, {"txt": None}, {None: "int8"}, {"txt": "string", ".txt": "string"},
    {"": "string"}, {"txt": [1]}, {"\ud83d": int}, set(), {"x"}, frozenset({1}),
    object(), object, int, len, Ellipsis, NotImplemented, range(2), iter("ab"), Decimal("NaN"),
    datetime.date(2020, 1, 1), np.int64(3), np.float32(1), np.bool_(1), np.str_("x"), np.array(1),
    np.array([1, 2]), np.array(["txt"]), np.array([[1]]), np.array([]), pd.NA,
    pd.Series([1, 2]), pd.Series(["txt"]), pd.DataFrame({"a": [1]}), pd.Index(["txt"]), pa.string(),
    pa.map_(pa.string(), pa.int8()), pa.array([1]), pa.scalar(1), Path("/no/such/place"), Path("."),
    np.datetime64("NaT", "s"),
)  # fmt: skip


@pytest.fixture(scope="module")
def shard(photos, tmp_path_factory):
    (path,) = write_photo_shards(photos[:2], tmp_path_factory.mktemp("arguments"), per_shard=2)
    return path


@pytest.fixture(scope="module")
def calls(shard, tmp_path_factory):
    """Each public function with its arguments, all of them right."""
    table = dii.read_webdataset_images(shard, backend="pandas").drop(columns=["image", "error"])
    page = tmp_path_factory.mktemp("gallery") / "page.html"
    read = {
        "paths": shard, "columns": None, "filters": None, "image": "jpg;png", "components": "infer",
        "json_fields": None, "size": None, "resize": "stretch", "transform": None, "mode": "RGB",
        "backend": "pandas", "errors": "null", "shard_errors": "raise", "partition_size": "auto",
        "shards_per_partition": 1,
        "max_pixels": 10**6, "max_member_bytes": 10**6, "scaled_decode": False,
        "storage_options": None,
    }  # fmt: skip
    late = {
        "frame": table, "size": None, "resize": "stretch", "transform": None, "mode": "RGB",
        "errors": "null", "max_pixels": 10**6, "storage_options": None,
    }  # fmt: skip
    gallery = {
        "frame": table, "path": page, "n": 1, "size": 8, "columns": ("__key__",),
        "decode": False, "title": None, "storage_options": None,
    }  # fmt: skip
    eager = {**late, "frame": table.compute()}
    return [
        (dii.read_webdataset_images, read),
        (dii.decode_images, late),
        (dii.decode_images, eager),
        (dii.gallery, gallery),
    ]


def passes(function, arguments):
    """Whether a call is accepted; raises what is no error of this package."""
    at_once = isinstance(arguments.get("frame"), pd.DataFrame)
    transformed = callable(arguments.get("transform"))
    if at_once and transformed:
        return True  # what a function does to images is not known before it is tried
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            made = function(**arguments)
            if hasattr(made, "dask") and not transformed:
                made[[name for name in made.columns if name not in ("image", "error")]].compute()
        except dii.DaskImageIngestError:
            return False
    return True


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.newest
def test_one_wrong_argument_is_an_error_of_this_package(calls, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    accepted = {}
    for function, right in calls:
        assert passes(function, right)
        for name in right:
            for wrong in WRONG:
                wrong = iter("ab") if type(wrong) is type(iter("ab")) else wrong
                if passes(function, {**right, name: wrong}):
                    accepted.setdefault(f"{function.__name__} {name}", []).append(repr(wrong))
    taken = {call: {*values} for call, values in accepted.items()}
    for name in ("read_webdataset_images", "decode_images"):
        assert taken[f"{name} size"] == {"None", "1", "3", "(1, 2)", "np.int64(3)", "array([1, 2])"}
        assert taken[f"{name} max_pixels"] == {"None", "1", "3", "np.int64(3)", str(10**30)}
        assert taken[f"{name} errors"] == {"'null'"}
        assert not {f"{name} resize", f"{name} mode"} & {*taken}
    assert taken["read_webdataset_images scaled_decode"] == {"False"}
    assert taken["read_webdataset_images filters"] == {"None", "[('width', '>', 1)]"}
    assert taken["gallery decode"] == {"True", "False"}
    assert taken["gallery size"] == {"1", "3", "np.int64(3)"}


@pytest.mark.slow
def test_any_wrong_arguments_together_are_an_error_of_this_package(
    calls, rng, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    for _ in range(1500):
        function, right = rng.choice(calls)
        wrong = {name: rng.choice(WRONG) for name in rng.sample([*right], 3)}
        print(function.__name__, wrong)
        passes(function, {**right, **wrong})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"size": 100_000}, r"size=100000: .* from 1 to 32767"),
        ({"size": True}, "size=True: "),
        ({"size": (224,)}, r"size=\(224,\): .*\(height, width\)"),
        ({"resize": ["crop"]}, r"resize=\['crop'\]; choose 'stretch', .* or 'longer'"),
        ({"mode": 3}, "mode=3; choose 'RGB', 'RGBA', 'L', 'labels' or 'raw'"),
        ({"errors": None}, "errors=None; choose 'null', 'raise' or 'drop'"),
        ({"shard_errors": 1}, "shard_errors=1; choose 'raise' or 'skip'"),
        ({"transform": "flip"}, "transform='flip': pass a function"),
        ({"max_pixels": 1e6}, "max_pixels=1000000.0: .*whole number.* or None"),
        ({"scaled_decode": 1}, "scaled_decode=1: pass True or False"),
        ({"columns": "txt"}, "columns='txt': pass a list of column names"),
        ({"columns": [1]}, r"columns=\[1\]: pass a list"),
        ({"image": 7}, "image=7: pass a list of extensions"),
        ({"components": ["txt"]}, r"components=\['txt'\]: pass 'infer', or a mapping"),
        ({"json_fields": ["synset"]}, r"json_fields=\['synset'\]: pass a mapping .*'float32'"),
        ({"json_fields": {"synset": "text"}}, r"json_fields\['synset'\]: 'text' is no type"),
        ({"partition_size": True}, "partition_size=True: .*'512 MiB'"),
        ({"shards_per_partition": 0}, "shards_per_partition=0: .*'auto'"),
        ({"storage_options": "anon"}, "storage_options is of type str: pass a dict"),
        ({"backend": ["pandas"]}, "backend=.*choose 'cudf' or 'pandas'"),
        ({"filters": pd.DataFrame({"a": [1]})}, "filters=.*pass a list of"),
    ],
)  # fmt: skip
def test_an_error_names_the_argument_what_it_got_and_what_it_takes(shard, options, said):
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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"json_fields": {"similarty": "float32"}}, "'similarty'.* of its json are 'similarity'"),
        ({"json_fields": {"source.nme": str, "similarity": float}}, "'source.nme'.*'source.name'"),
        ({"components": {"caption": str}}, "no member 'caption'; its members are 'jpg', 'txt'"),
        ({"image": "jpgg"}, r"no image \(image='jpgg'\); its members are 'jpg', 'txt'"),
        ({"components": {"jsn": str}, "json_fields": {"a": str}}, "no member 'jsn', no field 'a'"),
    ],
)  # fmt: skip
def test_misspelt_names_are_one_warning_that_says_what_there_is(shards, options, said):
    with pytest.warns(UserWarning, match=said) as caught:
        dii.read_webdataset_images(shards, backend="pandas", **options)
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_names_that_are_there_are_no_warning(shards, tmp_path):
    options = {"json_fields": {"similarity": float, "source.name": str}, "components": {"TXT": str}}
    dii.read_webdataset_images(shards, backend="pandas", image="webp;jpg", **options)
    dii.read_webdataset_images(write_tar(tmp_path / "empty.tar", {}), backend="pandas", **options)
    # One record of a hundred has the field.
    members = {f"{n}.json": b'{"rare": 1}' if n == 99 else b"{" for n in range(100)}
    members["0.jpg"] = b""
    path = write_tar(tmp_path / "rare.tar", members)
    dii.read_webdataset_images(path, backend="pandas", json_fields={"rare": int})


def test_components_that_were_named_are_all_that_is_wanted(shards):
    ddf = dii.read_webdataset_images(shards, backend="pandas", components={"txt": str})
    assert len(ddf.compute()) == 24  # with no warning of the others


def test_many_kinds_of_members_are_one_warning(tmp_path, photos):
    write_tar(tmp_path / "0.tar", {"a.jpg": photos[0].encoded})
    many = {f"b.kind{n:05d}": b"" for n in range(3000)}
    write_tar(tmp_path / "1.tar", {"b.jpg": photos[0].encoded, **many})
    with pytest.warns(UserWarning, match=r"'kind00000'.* and 2997 more") as caught:
        assert len(dii.read_webdataset_images(tmp_path, backend="pandas").compute()) == 2
    assert len(caught) == 1
    assert re.search("'kind00003'", str(caught[0].message)) is None


NO_HEADERS = {
    "a list": ["x"],
    "text": "x",
    "a number": {"X": 1},
    "two lines": {"X": "a\nb"},
    "a carriage return": {"X": "a\r"},
    "letters that no header has": {"X": "é☃"},
    "a name with a blank": {"a b": "x"},
    "a name on two lines": {"a\n": "x"},
    "no name": {"": "x"},
    "a name that is a number": {1: "x"},
}


@pytest.mark.parametrize("kind", NO_HEADERS)
@pytest.mark.parametrize("place", [(), ("http",), ("https",), ("client_kwargs",)])
def test_headers_that_no_request_can_have_are_no_missing_file(kind, place):
    options = {"headers": NO_HEADERS[kind]}
    for name in place:
        options = {name: options}
    with pytest.raises(dii.ArgumentError, match=r"storage_options: .*header"):
        dii.read_webdataset_images("http://127.0.0.1:9/a.tar", storage_options=options)


def test_headers_are_sent_as_they_are_and_their_values_not_repeated(shard):
    sent = {"Authorization": "Bearer s3cret==", "X-Name": "é\tü", "x!": ""}
    with faulty_server(files={"/a.tar": Path(shard).read_bytes()}) as server:
        options = {"headers": sent}
        ddf = dii.read_webdataset_images(
            f"{server.url}/a.tar", backend="pandas", storage_options=options
        )
        assert len(ddf) > 0
    with pytest.raises(dii.ArgumentError, match="header 'Authorization' must be") as raised:
        dii.read_webdataset_images(
            "http://h/a.tar", storage_options={"headers": {"Authorization": "s3cret\n"}}
        )
    assert "s3cret" not in str(raised.value)
