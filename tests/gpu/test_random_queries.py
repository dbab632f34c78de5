"""Random queries give on a GPU what they give with pandas."""

import dask
import dask.dataframe as dd
import pytest
from contract import on_host
from synthetic import encode, photograph, write_shard

import dask_image_ingest as dii
from dask_image_ingest.frames import get_backend


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    paths = []
    for shard in range(3):
        members = {}
        for n in range(6 * shard, 6 * shard + 6):
            is_bad = n % 7 == 3
            members[f"{n:03}.png"] = b"" if is_bad else encode(photograph(6 + n, 9, n), "png")
            members[f"{n:03}.txt"] = f"{n % 4} words".encode()
            members[f"{n:03}.cls"] = str(n % 5).encode()
        paths.append(write_shard(folder / f"{shard}.tar", members))
    return paths


def merged(rng, ddf, read):
    how = rng.choice(["inner", "left"])
    other = read()[["__key__", "width"]].rename(columns={"width": "w"})
    other = other[other.w > rng.choice([0, 8, 99])]
    return ddf.merge(other, on="__key__", how=how)


STEPS = {
    "filter": lambda rng, ddf, read: ddf[ddf.cls > rng.randrange(6)],
    "filter text": lambda rng, ddf, read: ddf[ddf.txt == f"{rng.randrange(5)} words"],
    "no errors": lambda rng, ddf, read: ddf[ddf.error.isna()],
    "errors": lambda rng, ddf, read: ddf[ddf.error.notnull()],
    "isin": lambda rng, ddf, read: ddf[ddf["__key__"].isin(["001", "007", "016"])],
    "assign": lambda rng, ddf, read: ddf.assign(area=ddf.height * ddf.width),
    "drop": lambda rng, ddf, read: ddf.drop(
        columns=rng.choice(
            [name for name in ("channels", "nbytes", "format") if name in ddf] or [[]]
        )
    ),
    "merge": merged,
    "shuffle": lambda rng, ddf, read: ddf.shuffle(rng.choice(["__key__", "cls"]), npartitions=2),
    "sort": lambda rng, ddf, read: ddf.sort_values(rng.choice(["__key__", "txt"])),
    "repartition": lambda rng, ddf, read: ddf.repartition(npartitions=1),
    "concat": lambda rng, ddf, read: dd.concat([ddf, ddf]),
    "persist": lambda rng, ddf, read: ddf.persist(),
    "map": lambda rng, ddf, read: ddf.images.map_batches(
        lambda images: [int(each.sum()) for each in images], {"total": "int64"}, keep_image=True
    ),
}


@pytest.mark.rounds(25, nightly=400)
def test_a_random_query_gives_on_a_gpu_what_it_gives_with_pandas(shards, rng, seed):
    names = [rng.choice([*STEPS]) for _ in range(rng.randint(1, 4))]
    late, draws = rng.random() < 0.3, rng.randrange(10**6)
    answers = []
    for backend in ("pandas", "cudf"):
        rng.seed(draws)

        def read(decode=True, backend=backend):
            return dii.read_webdataset_images(shards, backend=backend, decode=decode)

        ddf = read(not late)
        if late:
            ddf = dii.decode_images(ddf)
        ddf = rng.choice([ddf, ddf, ddf.partitions[[0, 2]]])
        with dask.config.set({"scheduler": "synchronous", "dataframe.shuffle.method": "tasks"}):
            answers.append(rows_of(applied(names, rng, ddf, read), backend))
    want, got = answers
    assert got == want, names


def applied(names, rng, ddf, read):
    for name in names:
        ddf = STEPS[name](rng, ddf, read)
    return ddf.compute()


def rows_of(frame, name):
    """The rows in an order of their own: a GPU shuffles by other hashes."""
    backend = get_backend(name)
    pixels = [None if each is None else on_host(each) for each in backend.arrays(frame["image"])]
    frame = frame[[column for column in frame.columns if column != "image"]]
    rows = [
        (*row.items(), ("image", None if array is None else (array.shape, array.tobytes())))
        for row, array in zip(backend.to_arrow(frame).to_pylist(), pixels, strict=True)
    ]
    return sorted(rows, key=repr)
