"""Rows that are shuffled or sorted before their decode are moved on the host, as by cuDF."""

import itertools

import cudf
import dask
import dask.dataframe as dd
import pytest
from simulated.memory import counted
from synthetic import encode, photograph, write_shard

import dask_image_ingest as dii
from dask_image_ingest.decode.dali import DaliDecoder

SHARDS, ROWS = 5, 8


@pytest.fixture(scope="module", autouse=True)
def in_this_thread():
    with dask.config.set({"scheduler": "synchronous", "dataframe.shuffle.method": "tasks"}):
        yield


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    paths = []
    for shard in range(SHARDS):
        members = {}
        for n in range(shard, SHARDS * ROWS, SHARDS):
            members[f"{n:03}.png"] = encode(photograph(4, 5, n), "png")
            members[f"{n:03}.txt"] = f"{n % 5} words".encode()
            members[f"{n:03}.cls"] = str(n % 7).encode()
            members[f"{n:03}.json"] = b"{}" if n % 9 == 4 else b'{"score": %d.5}' % (n % 11)
        paths.append(write_shard(folder / f"{shard}.tar", members))
    return paths


def read(shards, backend="cudf", **options):
    return dii.read_webdataset_images(
        shards, backend=backend, json_fields={"score": "float64"}, **options
    )


def partitions(frame):
    """The rows of each partition, in order of their keys."""
    return [sorted(rows_of(part)) for part in dask.compute(*frame.to_delayed())]


def rows_of(part):
    part = part.to_pandas() if isinstance(part, cudf.DataFrame) else part
    return list(zip(part["__key__"].tolist(), part["cls"].tolist(), strict=True))


MOVES = {
    "shuffle": lambda ddf: ddf.shuffle("cls", npartitions=5),
    "shuffle by two": lambda ddf: ddf.shuffle(["txt", "cls"]),
    "sort": lambda ddf: ddf.sort_values("__key__"),
    "sort by text": lambda ddf: ddf.sort_values("txt", ascending=False),
    "sort with nulls": lambda ddf: ddf.sort_values("json.score", na_position="first"),
    "twice": lambda ddf: ddf.shuffle("cls").rename(columns={"txt": "t"}).sort_values("t"),
    "to more partitions": lambda ddf: ddf.shuffle("cls").repartition(npartitions=11),
    "of chosen rows": lambda ddf: ddf[ddf.txt.str.contains("[123]")].shuffle("cls"),
    "of computed values": lambda ddf: ddf.assign(area=ddf.cls * ddf.width).shuffle("area"),
}


@pytest.mark.parametrize("name", MOVES)
def test_each_partition_has_the_rows_that_cudf_puts_there(shards, name):
    moved = MOVES[name](read(shards))
    with dask.config.set({"image-ingest.decode-late": False}):
        by_cudf = MOVES[name](read(shards).persist())
        want = partitions(by_cudf)
    assert partitions(moved) == want
    assert sum(map(len, want)) > SHARDS


@pytest.mark.parametrize("name", MOVES)
def test_moved_rows_are_those_of_pandas_with_their_own_pixels(shards, name):
    got, want = (MOVES[name](read(shards, backend)).compute() for backend in ("cudf", "pandas"))
    assert isinstance(got, cudf.DataFrame)
    assert list(got.columns) == list(want.columns)
    keys = got["__key__"].to_arrow().to_pylist()
    pixels = dict(zip(keys, [each.get().tobytes() for each in got.images.arrays()], strict=True))
    images = zip(want["__key__"], want.images.arrays(), strict=True)
    assert pixels == {key: image.tobytes() for key, image in images}
    columns = [name for name in want.columns if name not in ("image", "__url__")]
    got, want = (
        frame[columns].sort_values("__key__").reset_index(drop=True)
        for frame in (got.to_pandas(), want)
    )
    for column in columns:
        values = [f[column].astype(object).where(f[column].notna(), None) for f in (got, want)]
        assert list(values[0]) == list(values[1]), column


@pytest.mark.parametrize("name", ["shuffle", "sort", "sort by text", "twice"])
def test_of_a_moved_row_the_gpu_sees_the_key_alone_before_its_decode(shards, name):
    quiet, moved = read(shards), MOVES[name](read(shards))
    moved.compute()  # samples the divisions of a sort
    with counted() as counts:
        quiet.compute()
    with counted() as of_moved:
        moved.compute()
    # Numbers of partitions come back; a reference would be 100 bytes.
    assert of_moved["to_host"] - counts["to_host"] <= 3 * 8 * SHARDS * ROWS
    assert of_moved["waits"] - counts["waits"] < 10 * SHARDS


def test_a_frame_shuffled_by_cudf_fits_a_read_that_was_shuffled(shards):
    """Dask joins them partition by partition, as both were shuffled by the same column."""
    other = cudf.DataFrame({"cls": range(7), "name": [f"class {n}" for n in range(7)]})
    with dask.config.set({"image-ingest.decode-late": False}):
        others = dd.from_pandas(other.to_pandas(), npartitions=3).to_backend("cudf")
        decoded = dii.decode_images(read(shards, decode=False).shuffle("cls", npartitions=4))
        made = decoded.merge(others.shuffle("cls", npartitions=4), on="cls").compute().to_pandas()
    assert len(made) == SHARDS * ROWS
    assert (made["name"] == "class " + made["cls"].astype(int).astype(str)).all()


def test_groups_of_a_shuffled_read_are_whole(shards):
    apply = read(shards).shuffle("cls").groupby("cls").apply(len, meta=(None, "int64"))
    sizes = apply.compute().to_pandas().tolist()
    assert sorted(sizes) == sorted(read(shards, "pandas").cls.compute().value_counts().tolist())


def test_moved_rows_are_decoded_in_chunks_and_in_batches(shards):
    def made(backend):
        images = read(shards, backend).shuffle("__key__").images
        steps = images.iter_batches(5, columns=["__key__"])
        batches = [step["__key__"].tolist() for step in steps]
        return str(images.channel_stats().compute()), sorted(itertools.chain(*batches))

    assert made("cudf") == made("pandas")


def test_the_rows_of_an_epoch_over_moved_rows_are_counted_without_their_pixels(shards, monkeypatch):
    decoded, run = [], DaliDecoder.run

    def run_and_count(decoder, batches):
        batches = list(batches)
        decoded.extend(map(len, batches))
        return run(decoder, batches)

    monkeypatch.setattr(DaliDecoder, "run", run_and_count)
    batches = read(shards).shuffle("cls").images.iter_batches(5, shuffle=0, columns=["cls"])
    assert len(batches) == -(-SHARDS * ROWS // 5)
    # One partition tells how many bytes a row has.
    assert sum(decoded) < SHARDS * ROWS / 2
