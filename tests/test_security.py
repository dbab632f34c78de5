"""Nothing in a shard is run, believed without bound, or written where it does not belong."""

from __future__ import annotations

import io
import json
import os
import pickle
import warnings
from pathlib import Path

import dask
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from faulty_server import faulty_server
from forked_python import run_python
from photo_shards import write_tar

import dask_image_ingest as dii


def read(path, **options):
    return dii.read_webdataset_images(path, backend="pandas", **options)


class Payload:
    def __init__(self, evidence: Path) -> None:
        self.evidence = evidence

    def __reduce__(self):
        return os.mkdir, (str(self.evidence),)


@pytest.mark.parametrize("extension", ["pkl", "pickle", "pyd", "cls", "json", "npy", "pt", "jpg"])
def test_no_pickle_is_loaded(extension, tmp_path, photos):
    evidence = tmp_path / "evidence"
    members = {"0.png": photos[2].encoded, f"0.{extension}": pickle.dumps(Payload(evidence))}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a pickle is no integer
        ddf = read(write_tar(tmp_path / "s.tar", members), members=_named(extension))
        frame = ddf.compute()
    assert len(frame) == 1
    assert not evidence.exists()


def _named(extension):
    if extension == "jpg":
        return "infer"
    return {extension: "int64" if extension == "cls" else "binary"}


@pytest.mark.parametrize("url", ["pipe:mkdir {}", "pipe:mkdir {} | cat", "pipe:mkdir {}.tar"])
def test_no_pipe_is_run(url, tmp_path):
    evidence = tmp_path / "evidence"
    with pytest.raises(dii.ArgumentError, match="pipe:"):
        read(url.format(evidence))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_names_in_a_tar_never_reach_the_file_system(tmp_path, photos, monkeypatch):
    """Every file that is opened for writing, made or removed meanwhile is the journal's own."""
    names = ["../../evil", "/etc/evil", "a/../../evil", "C:\\evil", "~/evil", "$HOME/evil", "a\0b"]
    members = {f"{name}.png".replace("\0", ""): photos[2].encoded for name in names}
    path = write_tar(tmp_path / "s.tar", members)
    script = """
import sys
touched = []
def watch(event, args):
    if event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+"):
        touched.append(str(args[0]))
    if event in ("os.mkdir", "os.remove", "os.rename", "os.symlink", "os.link"):
        touched.append(str(args[0]))
import dask, dask_image_ingest as dii
ddf = dii.read_webdataset_images(sys.argv[1], backend="pandas")
ddf.compute(scheduler="synchronous")
touched.clear()
sys.addaudithook(watch)
frame = ddf.compute(scheduler="synchronous")
assert frame.image.notna().all()
print("\\n".join(t for t in touched if "evil" in t))
"""
    finished = run_python(script, path)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() == ""
    frame = read(path).compute()
    assert sorted(frame["__key__"]) == sorted(name.removesuffix(".png") for name in members)


DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
HOSTILE_JSON = {
    "deep": DEEP,
    "deep list": b"[" * 1_000_000,
    "huge": b'{"a": "' + b"x" * (17 << 20) + b'"}',
    "a number of many digits": b'{"a": ' + b"9" * 10_000 + b"}",
    "not utf-8": b'{"a": "\xff"}',
    "broken": b'{"a": ',
    "empty": b"",
}


@pytest.mark.parametrize("kind", HOSTILE_JSON)
def test_hostile_json_is_null_with_a_warning(kind, tmp_path, photos):
    members = {
        "0.png": photos[2].encoded,
        "0.json": HOSTILE_JSON[kind],
        "1.png": photos[2].encoded,
        "1.json": json.dumps({"a": 7}).encode(),
    }
    path = write_tar(tmp_path / "s.tar", members)
    ddf = read(path, json_fields={"a": "int64"})[["__key__", "json.a"]]
    with pytest.warns(UserWarning, match=r"1 of 2 values of 'json\.a'.*first that of '0'"):
        frame = ddf.compute()
    assert frame["json.a"].isna().tolist() == [True, False]


def test_what_errors_and_warnings_quote_is_escaped(tmp_path, photos, caplog):
    hostile = "\x1b[2J\u202e"
    members = {
        f"{hostile}.png": b"\x1b[31mred\r\n\x07" * 9,
        f"b.{hostile}x": b"\x1b",
        "b.png": photos[2].encoded,
        "b.json": b"\x1b[2J",
    }
    path = write_tar(tmp_path / "s.tar", members)
    first = write_tar(tmp_path / "a.tar", {"b.png": photos[2].encoded, "b.json": b"{}"})
    with pytest.warns() as caught:
        frame = read([first, path], json_fields={"a": "int64"}).compute()
    said = [str(warning.message) for warning in caught]
    said += [record.getMessage() for record in caplog.records]
    said += frame["error"].dropna().tolist()
    assert len(said) >= 4
    assert all(text.isprintable() for text in said), said


def hub(folder, secret, server, png):
    """A table of somebody else, whose columns claim that its images lie in other places."""
    urls = [str(secret), f"{server.url}/latest/meta-data/x.tar", "pipe:cat /etc/passwd"]
    reference = {"url": str(secret), "offset": 512, "nbytes": len(png), "shard_size": None}
    columns = {
        "image": [{"bytes": png, "path": url, **reference} for url in urls],
        "__key__": ["s", "t", "u"],
        "__url__": urls,
        "offset": [512] * 3,
        "nbytes": [len(png)] * 3,
        "reference": [reference] * 3,
    }
    pq.write_table(pa.table(columns), folder / "train.parquet")
    return folder / "train.parquet"


def report(frame, out):
    dii.curate.write_report(
        dii.curate.compute_fingerprints(frame, kinds=("bytes",)), out / "r.html"
    )


USES = {
    "export": lambda frame, out: dii.to_webdataset(frame, f"{out}/{{shard:03d}}.tar"),
    "parquet": lambda frame, out: dii.to_parquet_images(frame, out / "again"),
    "gallery": lambda frame, out: dii.gallery(frame, out / "g.html"),
    "report": report,
    "batches": lambda frame, out: list(frame.images.iter_batches(1)),
    "locations": lambda frame, out: dii.decode_images(frame.drop(columns=["image"])),
}


@pytest.mark.parametrize("kind", ["pixels", "computed references"])
@pytest.mark.parametrize("use", USES)
def test_locations_in_a_table_of_images_are_not_opened(use, kind, tmp_path, photos):
    """Not the file of the user, not the server inside: their bytes are in no result."""
    png, secret, out = photos[2].encoded, tmp_path / "private.tar", tmp_path / "out"
    write_tar(secret, {"s.png": png, "s.txt": b"TOP SECRET"})
    out.mkdir()
    with faulty_server() as server, dask.config.set(scheduler="synchronous"):
        path = hub(tmp_path, secret, server, png)
        frame = dii.read_parquet_images(path, backend="pandas", decode=kind == "pixels")
        frame = frame if kind == "pixels" else frame.compute()
        try:
            USES[use](frame, out)
        except dii.ArgumentError:
            assert use not in ("export", "parquet")
        assert not server.seen
    assert not any(b"TOP SECRET" in file.read_bytes() for file in out.rglob("*") if file.is_file())


def is_writable(array: pa.Array) -> bool:
    """False for views, if this pyarrow writes none to parquet."""
    try:
        pq.write_table(pa.table({"a": array}), io.BytesIO())
    except pa.ArrowNotImplementedError:
        return False
    return True


PLACES = ["/etc/passwd", "http://127.0.0.1:1/x.tar", "memory://x", "pipe:id", "", None, "\0"]


@pytest.mark.rounds(8, nightly=400)
def test_whatever_a_table_claims_it_is_a_result_or_an_error(rng, tmp_path, photos):
    """Columns of locations of any type and value; half of the files are damaged, too."""
    count, png = rng.choice([0, 1, 9]), photos[2].encoded
    places = [rng.choice(PLACES) for _ in range(count)]
    files = [rng.choice([png, png[:40], b"", None]) for _ in range(count)]
    kinds = [
        pa.array(places, pa.large_string()),
        pa.array(places, pa.string()).dictionary_encode(),
        pa.array(places, pa.string_view()),
        pa.array([rng.choice([None, -1, 512, 2**62]) for _ in range(count)], pa.int64()),
        pa.array([[{"url": place}] for place in places], pa.list_(pa.struct([("url", "string")]))),
        pa.nulls(count),
    ]
    encoded = [
        pa.array(files, pa.binary()).dictionary_encode(),
        pa.array(files, pa.binary_view()),
        pa.StructArray.from_arrays([pa.array(files, pa.binary()), kinds[0]], ["bytes", "path"]),
    ]
    encoded, kinds = (list(filter(is_writable, arrays)) for arrays in (encoded, kinds))
    names = ["__url__", "offset", "nbytes", "width", "path"]
    table = pa.table({"image": rng.choice(encoded), **{name: rng.choice(kinds) for name in names}})
    path = tmp_path / "a.parquet"
    pq.write_table(table, path, row_group_size=4, store_schema=rng.random() < 0.5)
    if rng.random() < 0.5:
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
    with warnings.catch_warnings(), dask.config.set(scheduler="synchronous"):
        warnings.simplefilter("ignore")
        try:
            frame = dii.read_parquet_images(path, backend="pandas")
            assert len(frame.compute()) == count
            dii.to_webdataset(frame, f"{tmp_path}/out/{{shard}}.tar", row_errors="drop")
        except dii.DaskImageIngestError:
            pass
