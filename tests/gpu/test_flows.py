"""Each flow of the guide gives on a GPU what it gives with pandas, or a difference told there."""

import io
import tarfile
from pathlib import Path

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from contract import on_host
from PIL import Image
from synthetic import bad_files, encode, photograph, write_shard

import dask_image_ingest as dii
from dask_image_ingest import curate
from dask_image_ingest.frames import get_backend


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Shards by name."""
    folder = tmp_path_factory.mktemp("shards")
    noise = np.random.default_rng(0)

    def grey(high, type_):
        return Image.fromarray(noise.integers(0, high, noise.integers(3, 30, 2)).astype(type_))

    small, numbers = [], io.BytesIO()
    np.save(numbers, np.arange(3))
    for shard in range(2):
        members = {}
        for n in range(12 * shard, 12 * shard + 12):
            members[f"{n:06}.png"] = encode(photograph(20, 16, n), "png")
            members[f"{n:06}.txt"] = f"t{n}".encode()
            members[f"{n:06}.cls"] = str(n % 10).encode()
        small.append(write_shard(folder / f"small{shard}.tar", members))
    ragged, several, mixed, deep = {}, {}, {}, {}
    for n in range(8):
        key = f"{n:03}"
        ragged[f"{key}.png"] = encode(photograph(20 + 3 * n, 30, n), "png")
        several[f"{key}.jpg"] = encode(photograph(32, 48, n))
        several[f"{key}.txt"] = f"caption {n}".encode()
        several[f"{key}.json"] = b'{"score": %d.5, "tags": ["a", "b%d"], "box": [1, %d]}' % (
            n,
            n,
            n,
        )
        several[f"{key}.seg.png"] = encode(grey(3, np.uint8), "png")
        several[f"{key}.npy"] = numbers.getvalue()
        mixed[f"{key}.png"] = encode(photograph(40, 50, n), "png")
        deep[f"{key}.png"] = encode(grey(*[(1 << 16, np.uint16), (256, np.uint8)][n % 2]), "png")
    mixed |= {f"bad-{name}.png": content for name, content in bad_files().items()}
    shards = {"ragged": ragged, "several": several, "mixed": mixed, "deep": deep}
    paths = {name: write_shard(folder / f"{name}.tar", each) for name, each in shards.items()}
    return paths | {"small": small}


FIELDS = {"score": "float32", "tags": "list<string>", "box": "list<int64>"}
IMAGES = {"image": "jpg", "seg": dii.ImageColumn("seg.png", mode="labels", size=(10, 15))}


class Flows:
    """What is done with shards, by one backend, in a folder of its own."""

    def __init__(self, backend, made, folder):
        self.backend, self.made, self.folder = backend, made, folder

    def read(self, name="small", **options):
        return dii.read_webdataset_images(self.made[name], backend=self.backend, **options)

    def part(self, **options):
        """Two rows of the first partition, none of the second."""
        stored = self.read(**options).persist()
        return stored[stored["__key__"].isin(["000001", "000003"])]

    def embedded(self, name="small"):
        return curate.embed(self.read(name), means)

    def exported(self, frame, **options):
        dii.to_webdataset(frame, str(self.folder / "out-{shard:06d}.tar"), **options)
        return contents(self.folder)


def means(images):
    return np.stack([on_host(each).reshape(-1, 3).mean(axis=0) for each in images]) / 255


def flip(images):
    from nvidia.dali import fn

    return fn.flip(images, horizontal=fn.random.coin_flip())


def contents(folder):
    """What the shards and tables of a folder hold."""
    found = {}
    for path in sorted(Path(folder).rglob("*.tar")):
        with tarfile.open(path) as tar:
            found |= {f"{path.name}/{m.name}": tar.extractfile(m).read() for m in tar}
    for path in sorted(Path(folder).rglob("*.parquet")):
        found[path.name] = pq.read_table(path).to_pydict()
    return found


def by_key(frame):
    return frame.compute().sort_values("__key__").reset_index(drop=True)


def grouped(frame):
    """Numbers of groups, in the order of their keys."""
    made = frame.groupby(["half", "width"]).agg({"height": ["mean", "max", "std"]}).compute()
    made = made.to_pandas() if hasattr(made, "to_pandas") else made
    return made.sort_index().astype("float64").fillna(-1).to_numpy()


def by_value(counts):
    """Values and how often there are, in order."""
    counts = counts.compute()
    counts = counts.to_pandas() if hasattr(counts, "to_pandas") else counts
    return sorted((int(value), int(number)) for value, number in counts.items())


def batches(frame, size=5, **options):
    return [dict(batch) for batch in frame.images.iter_batches(size, **options)]


def many(images):
    return {
        "mean": images.mean(axis=(1, 2, 3)),
        "vector": images.mean(axis=(1, 2)),
        "text": ["a"] * len(images),
        "bytes": [b"\1"] * len(images),
        "flag": images.max(axis=(1, 2, 3)) > 250,
        "half": images[:, ::2],
    }


MANY = {
    "mean": "float32",
    "vector": "list<float32>",
    "text": "string",
    "bytes": "binary",
    "flag": "bool",
    "half": "image",
}


def tell(images, text, file, box):
    return {
        "n": [len(each or "") for each in text],
        "kind": [type(each).__name__ for each in file],
        "first": [int(each[1]) for each in box],
    }


TOLD = {"n": "int64", "kind": "string", "first": "int64"}

FLOWS = {
    # Read and filter.
    "read": lambda f: f.read("ragged").compute(),
    "size": lambda f: f.read("ragged", size=(32, 40), resize="pad").compute(),
    "grey": lambda f: f.read(mode="L").compute(),
    "rgba": lambda f: f.read(mode="RGBA").compute(),
    "raw": lambda f: f.read("deep", mode="raw").compute(),
    "raw in parts": lambda f: f.read("deep", mode="raw", partition_size="2 kB").compute(),
    "several images": lambda f: f.read("several", image=IMAGES).compute(),
    "fields": lambda f: f.read("several", json_fields=FIELDS).compute(),
    "bad images": lambda f: f.read("mixed").compute(),
    "bad images dropped": lambda f: f.read("mixed", errors="drop").compute(),
    "bad images alone": lambda f: (lambda d: d[d.error.notnull()].compute())(f.read("mixed")),
    "rows": lambda f: (lambda d: d[(d.width > 3) & (d["format"] == "png")].compute())(f.read()),
    "filters": lambda f: f.read(filters=[("cls", ">", 3)]).compute(),
    "no rows": lambda f: f.read(filters=[("cls", ">", 99)]).compute(),
    "head": lambda f: f.read().head(3),
    "length": lambda f: len(f.read()),
    "assign": lambda f: (lambda d: d.assign(area=d.height * d.width).compute())(f.read()),
    "drop, rename": lambda f: f.read().drop(columns="txt").rename(columns={"image": "p"}).compute(),
    "transform": lambda f: f.read(transform=flip).compute(),
    "random crops": lambda f: f.read("ragged", size=12, augment="random_resized_crop").compute(),
    "augmentations": lambda f: f.read(
        size=12, augment=["random_resized_crop", "random_horizontal_flip", dii.RandomErasing()]
    ).compute(),
    "random crops later": lambda f: dii.decode_images(
        f.read("ragged", decode=False), size=12, augment="random_resized_crop"
    ).compute(),
    "read_images": lambda f: files_in_folders(f),
    "read_parquet_images": lambda f: parquet_and_back(f),
    # Move rows.
    "merge": lambda f: by_key(f.read().merge(f.read()[["__key__", "txt"]], on="__key__")),
    "merge without": lambda f: merged_without(f),
    "sort": lambda f: by_key(f.read().sort_values("txt")),
    "shuffle": lambda f: by_key(f.read().shuffle("__key__")),
    "shuffle stored": lambda f: by_key(f.read().persist().shuffle("__key__")),
    "shuffle to few": lambda f: by_key(f.read(filters=[("cls", "==", 3)]).shuffle("cls")),
    "concat": lambda f: dd.concat([f.read(), f.read("small")]).compute(),
    "repartition": lambda f: f.read().repartition(npartitions=1).compute(),
    "set_index": lambda f: f.read().set_index("__key__").compute().reset_index(),
    "group": lambda f: f.read().groupby("cls").width.sum().compute().to_frame("s").reset_index(),
    "outer merge": lambda f: (
        lambda d: by_key(d[d.cls > 3].merge(d[d.cls < 6][["__key__", "width"]], "outer", "__key__"))
    )(f.read()[["__key__", "cls", "txt"]].assign(width=3)),
    "groups of two keys": lambda f: grouped(f.read("ragged").assign(half=lambda d: d.height // 20)),
    "distinct values": lambda f: (
        lambda d: [int(d.cls.nunique().compute()), *by_value(d.cls.value_counts())]
    )(f.read()),
    "spread": lambda f: [
        float(getattr(f.read().cls, name)().compute()) for name in ("std", "var", "mean", "max")
    ],
    "clipped": lambda f: f.read().cls.clip(2, 5).compute(),
    "texts": lambda f: (
        lambda d: d.assign(
            **{
                "long": d.txt.str.len(),
                "with 1": d.txt.str.contains("1"),
                "first": d.txt.str.startswith("caption 1"),
                "pattern": d.txt.str.contains("[12]$"),
                "upper": d.txt.str.upper(),
                "other": d.txt.str.replace("caption", "c"),
                "part": d.txt.str[:4],
            }
        ).compute()
    )(f.read("several")[["__key__", "txt"]]),
    "rows by texts": lambda f: (lambda d: d[d.txt.str.contains("t1")].compute())(f.read()),
    "mean of texts": lambda f: float(f.read().txt.str.len().mean().compute()),
    "duplicates of a column": lambda f: len(f.read().drop_duplicates(subset=["cls"]).compute()),
    # References, decoded later.
    "references": lambda f: f.read(decode=False).drop(columns="image").compute(),
    "decoded later": lambda f: dii.decode_images(f.read(decode=False), size=12).compute(),
    "decoded at once": lambda f: dii.decode_images(f.read(decode=False).compute()),
    "decoded stored": lambda f: dii.decode_images(f.part(decode=False)).compute(),
    "decoded without bad": lambda f: dii.decode_images(
        f.read("mixed", decode=False), errors="drop"
    ).compute(),
    "locations": lambda f: dii.decode_images(f.read().drop(columns=["image", "error"])).compute(),
    # Batches and functions.
    "batches": lambda f: batches(f.read(), columns=["__key__", "cls"]),
    "shuffled batches": lambda f: batches(f.read(), columns=["__key__"], shuffle=3),
    "normalized batches": lambda f: batches(f.read(), normalize=((0.4,) * 3, (0.2,) * 3)),
    "ragged batches": lambda f: batches(f.read("ragged"), columns=["__key__"]),
    "batches of few": lambda f: batches(f.part(), 1, columns=["__key__", "cls"]),
    "batches of none": lambda f: batches(f.read(filters=[("cls", ">", 99)]), columns=["cls"]),
    "batches of lists": lambda f: batches(
        f.read("several", json_fields=FIELDS), columns=["__key__", "npy", "json.box"]
    ),
    "stack": lambda f: f.read().images.stack().compute(),
    "stack of few": lambda f: f.part().images.stack().compute(),
    "map": lambda f: f.read().images.map_batches(many, MANY, keep_image=True).compute(),
    "map inputs": lambda f: (
        f.read("several", json_fields=FIELDS)
        .images.map_batches(tell, TOLD, inputs=["image", "txt", "npy", "json.box"])
        .compute()
    ),
    "map stored": lambda f: f.part().images.map_batches(many, MANY).compute(),
    "map none": lambda f: (
        f.read(filters=[("cls", ">", 99)]).images.map_batches(many, MANY).compute()
    ),
    "map mapped": lambda f: mapped_again(f),
    "batches of mapped": lambda f: batches(
        f.part().images.map_batches(many, MANY, keep_image=True), 1, columns=["mean", "vector"]
    ),
    "vectors": lambda f: f.read().images.map_batches(many, MANY).images.vectors("vector").compute(),
    "statistics": lambda f: f.read("ragged").images.channel_stats().compute(),
    "thumbnails": lambda f: f.part().images.thumbnails(8).compute(),
    "encode": lambda f: f.read("ragged").images.encode("png").compute(),
    # To and from pandas, checkpoints, exports.
    "to pandas": lambda f: f.read("several", json_fields=FIELDS).to_backend("pandas").compute(),
    "from pandas": lambda f: (
        Flows("pandas", f.made, f.folder)
        .read("several", json_fields=FIELDS)
        .to_backend(f.backend)
        .compute()
    ),
    "references from pandas": lambda f: dii.decode_images(
        Flows("pandas", f.made, f.folder).read(decode=False).to_backend(f.backend)
    ).compute(),
    "parquet": lambda f: stored_as_parquet(f),
    "checkpoint": lambda f: dii.checkpoint(
        f.read("mixed").images.map_batches(means, {"m": "list<float32>"}, keep_image=True),
        f.folder / "checkpoint",
        version="1",
    ).compute(),
    "export": lambda f: f.exported(f.read("several", json_fields=FIELDS)),
    "export of few": lambda f: f.exported(f.part().drop(columns=["image", "error"])),
    "export shuffled": lambda f: f.exported(f.read(), shuffle=4),
    "export of pixels": lambda f: f.exported(
        f.read().images.map_batches(lambda x: {"image": x[:, ::2]}, {"image": "image"}),
        members={"png": "image", "txt": "txt"},
    ),
    "export of files": lambda f: exported_files(f),
    "to_parquet_images": lambda f: (
        dii.to_parquet_images(f.read(decode=False)[["txt", "image"]], f.folder / "pq"),
        contents(f.folder),
    ),
    # Curation.
    "issues": lambda f: curate.find_issues(f.read("mixed")).compute(),
    "issues at once": lambda f: curate.find_issues(f.read().compute()),
    "issues counted": lambda f: curate.summarize_issues(curate.find_issues(f.read("mixed"))),
    "fingerprints": lambda f: curate.compute_fingerprints(
        f.read("mixed"), variants=["mirrored"]
    ).compute(),
    "fingerprints at once": lambda f: curate.compute_fingerprints(f.read().compute()),
    "duplicates": lambda f: curate.find_duplicates(f.read("mixed"), keep="first").compute(),
    "duplicates of few": lambda f: curate.find_duplicates(f.part(), by="pixels").compute(),
    "embed": lambda f: f.embedded("mixed").compute(),
    "similarity": lambda f: curate.compute_similarity(
        f.embedded("mixed"), np.array([1.0, 0, 0])
    ).compute(),
    "scores": lambda f: curate.compute_scores(
        f.embedded(), {"sum": lambda vectors: vectors.sum(axis=1)}
    ).compute(),
    "clusters": lambda f: curate.find_clusters(f.embedded().compute(), 3),
    "nearest": lambda f: curate.find_nearest(f.embedded(), np.array([1.0, 0.2, 0.1]), 5).drop(
        columns=["image"], errors="ignore"
    ),
    "semantic duplicates": lambda f: curate.find_semantic_duplicates(
        f.embedded().persist(), 0.99, keep="first"
    ).compute(),
    # Looked at.
    "show": lambda f: f.read("several").compute().images.show()._repr_html_().count("<img"),
    "gallery": lambda f: page(dii.gallery, f.read("several"), f.folder),
    "report": lambda f: page(curate.write_report, curate.find_issues(f.read("mixed")), f.folder),
}


# For a first day on a GPU: each way into memory, out of it, and over it, once.
FIRST = {
    "read",
    "size",
    "raw",
    "several images",
    "bad images",
    "filters",
    "random crops later",
    "merge",
    "shuffle",
    "decoded later",
    "shuffled batches",
    "map",
    "statistics",
    "to pandas",
    "fingerprints",
}


def files_in_folders(flows):
    for number in range(3):
        (flows.folder / "cat").mkdir(exist_ok=True)
        (flows.folder / "cat" / f"{number}.png").write_bytes(encode(photograph(9, 7), "png"))
    frame = dii.read_images(str(flows.folder), backend=flows.backend).compute()
    return frame[[name for name in frame.columns if name not in ("__url__", "__key__")]]


def parquet_and_back(flows):
    there = Flows("pandas", flows.made, flows.folder).read(decode=False)[["txt", "image"]]
    dii.to_parquet_images(there, flows.folder / "pq")
    frame = dii.read_parquet_images(str(flows.folder / "pq"), backend=flows.backend).compute()
    return frame[["txt", "image", "width", "error"]]


def merged_without(flows):
    ddf = flows.read()
    some = ddf[ddf.cls > 6][["__key__", "image"]].rename(columns={"image": "other"})
    return by_key(ddf[["__key__", "cls"]].merge(some, on="__key__", how="left"))


def mapped_again(flows):
    first = flows.part().images.map_batches(many, MANY, keep_image=True)
    return first.images.map_batches(
        lambda mean, vector, text: {"s": [float(each) for each in mean]},
        {"s": "float32"},
        inputs=["mean", "vector", "text"],
    ).compute()


def stored_as_parquet(flows):
    frame = flows.part().images.map_batches(many, MANY).drop(columns="half")
    if flows.backend == "cudf":
        frame = frame.to_backend("pandas")
    frame.to_parquet(flows.folder / "parquet")
    return pd.read_parquet(flows.folder / "parquet", dtype_backend="pyarrow")


def exported_files(flows):
    frame = flows.read("ragged")
    frame = frame.assign(file=frame.images.encode("png"))
    return flows.exported(frame, members={"png": "file"})


def page(write, frame, folder):
    write(frame, folder / "page.html")
    return (folder / "page.html").read_text().count("<img")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.first] if n in FIRST else []) for n in FLOWS]
)
def test_a_flow_gives_on_a_gpu_what_it_gives_with_pandas(made, tmp_path, name):
    answers = {}
    for backend in ("pandas", "cudf"):
        folder = tmp_path / backend
        folder.mkdir()
        with dask.config.set(scheduler="synchronous"):
            answers[backend] = plain(FLOWS[name](Flows(backend, made, folder)))
    assert_alike(answers["cudf"], answers["pandas"])


def plain(value):
    """A result in plain Python, pixels as arrays."""
    library = type(value).__module__.partition(".")[0]
    if hasattr(value, "columns"):
        backend = get_backend("cudf" if library == "cudf" else "pandas")
        columns = {}
        for name in value.columns:
            if backend.is_images(value[name].dtype):
                arrays = backend.arrays(value[name])
                columns[name] = [None if each is None else on_host(each) for each in arrays]
            else:
                columns[name] = backend.to_arrow(value[[name]]).column(0).to_pylist()
        return columns
    if hasattr(value, "to_frame"):
        return plain(value.to_frame("values"))
    if hasattr(value, "get") and hasattr(value, "shape"):
        return value.get()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [*map(plain, value)] if isinstance(value, (list, tuple)) else value


def assert_alike(got, want, place=""):
    """The same, but for rounding: DALI's resize rounds otherwise than this package's."""
    if isinstance(want, dict):
        assert [*got] == [*want], place
        for name in want:
            assert_alike(got[name], want[name], f"{place}.{name}")
    elif isinstance(want, list):
        assert len(got) == len(want), place
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            assert_alike(one, other, f"{place}[{number}]")
    elif isinstance(want, np.ndarray) and want.dtype != object:
        assert (got.shape, got.dtype) == (want.shape, want.dtype), place
        apart = np.abs(got.astype(np.float64) - want.astype(np.float64))
        assert not apart.size or np.nanmean(apart) < 1, place
    elif isinstance(want, np.ndarray):
        assert_alike(got.tolist(), want.tolist(), place)
    elif isinstance(want, float):
        assert got == pytest.approx(want, rel=1e-5, nan_ok=True), place
    else:
        assert got == want or str(got) == str(want).replace("/pandas/", "/cudf/"), place
