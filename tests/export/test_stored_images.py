"""Images that are in no shard are written as they are stored: of parquet, columns and files."""

from __future__ import annotations

import importlib
import io
from functools import partial

import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from counted import work  # noqa: F401
from PIL import Image
from synthetic import encode, photograph
from witnesses import by_webdataset, contents, shards_in

import dask_image_ingest as dii
from dask_image_ingest.errors import ArgumentError

# The module, not the function of this name.
run = importlib.import_module("dask_image_ingest.export.to_webdataset")

pytestmark = pytest.mark.filterwarnings("ignore:The inplace keyword:Warning")  # of Dask

KINDS = ("jpg", "png", "webp")


@pytest.fixture(scope="module")
def pictures():
    """Key → extension and file of eight photographs."""
    kinds = [KINDS[number % 3] for number in range(8)]
    return {f"{n:02d}": (k, encode(photograph(30 + n, 40, n), k)) for n, k in enumerate(kinds)}


@pytest.fixture
def table(pictures):
    """The photographs as a table of Hugging Face's kind, with a caption and a number each."""
    return pa.table(
        {
            "__key__": list(pictures),
            "image": [{"bytes": data, "path": f"{key}.x"} for key, (_, data) in pictures.items()],
            "caption": [f"picture {key}" for key in pictures],
            "score": [number / 8 for number in range(8)],
        }
    )


@pytest.fixture
def parquet(table, tmp_path):
    (tmp_path / "in").mkdir()
    pq.write_table(table[:5], tmp_path / "in" / "0.parquet")
    pq.write_table(table[5:], tmp_path / "in" / "1.parquet")
    return tmp_path / "in"


def export(frame, tmp_path, **options):
    return dii.to_webdataset(frame, tmp_path / "out" / "{shard}.tar", **options)


def written(tmp_path):
    return dict(by_webdataset(shards_in(tmp_path / "out")))


def expected(pictures, keys=None):
    return {
        key: {"txt": f"picture {key}".encode(), kind: data}
        for key, (kind, data) in pictures.items()
        if keys is None or key in keys
    }


SOURCES = {
    "pixels": lambda path, table: dii.read_parquet_images(path, backend="pandas"),
    "references": lambda path, table: dii.read_parquet_images(path, backend="pandas", decode=False),
    "computed": lambda path, table: dii.read_parquet_images(
        path, backend="pandas", decode=False
    ).compute(),
    "a column of bytes": lambda path, table: dii.decode_images(
        dd.from_pandas(as_bytes(table), npartitions=2), image={"image": "bytes"}
    ),
}


def as_bytes(table):
    frame = table.drop_columns(["image"]).to_pandas()
    data = pa.array([each["bytes"] for each in table.column("image").to_pylist()])
    return frame.assign(bytes=pd.Series(data, dtype=pd.ArrowDtype(pa.binary())))


@pytest.mark.parametrize("source", SOURCES)
def test_images_are_written_byte_for_byte_with_the_extension_of_their_contents(
    source, parquet, table, pictures, tmp_path
):
    frame = SOURCES[source](parquet, table)
    told = export(frame, tmp_path, members={"txt": "caption"}, samples_per_shard=3)
    assert written(tmp_path) == expected(pictures)
    assert told.samples.tolist() == [3, 3, 2]
    assert told.attrs["sources"] == []
    side = pd.concat([pd.read_parquet(path) for path in (tmp_path / "out").glob("?.parquet")])
    assert not {"image", "bytes"} & {*side.columns}
    assert dict(zip(side["__key__"], side.score, strict=True)) == {
        key: number / 8 for number, key in enumerate(pictures)
    }
    for row in side.to_dict("records"):
        with open(row["__url__"], "rb") as file:
            file.seek(row["offset"])
            assert file.read(row["nbytes"]) == pictures[row["__key__"]][1]


def test_only_rows_that_are_left_are_written_and_nothing_is_decoded(
    parquet,
    pictures,
    tmp_path,
    work,  # noqa: F811
):
    frame = dii.read_parquet_images(parquet, backend="pandas")
    some = frame[frame.score > 0.4]
    export(some, tmp_path, members={"txt": "caption"})
    keys = list(pictures)[4:]
    assert written(tmp_path) == expected(pictures, keys)
    assert not work["decoded"]


def test_members_are_chosen_as_those_of_shards(parquet, pictures, tmp_path):
    frame = dii.read_parquet_images(parquet, backend="pandas", decode=False)
    export(frame, tmp_path, members=["jpg", {"txt": "caption", "json": ["score"]}])
    for key, members in written(tmp_path).items():
        assert members["txt"].decode() == f"picture {key}"
        kind, data = pictures[key]
        assert members.get("jpg") == (data if kind == "jpg" else None)
        assert not {"png", "webp"} & {*members}
    export(frame, tmp_path, members={"photo.bin": "image"}, overwrite=True)
    assert written(tmp_path) == {key: {"photo.bin": data} for key, (_, data) in pictures.items()}


def test_pixels_are_encoded_on_request(parquet, tmp_path):
    frame = dii.read_parquet_images(parquet, backend="pandas", size=16)
    with pytest.raises(ArgumentError, match=r"read_parquet_images with size=.*members={'jpg'"):
        export(frame, tmp_path)
    export(frame, tmp_path, members={"jpg": "image"})
    for members in written(tmp_path).values():
        assert Image.open(io.BytesIO(members["jpg"])).size == (16, 16)


def test_bad_images_are_dropped_on_request_and_kept_else(table, pictures, tmp_path):
    files = table.column("image").to_pylist()
    files[3]["bytes"] = files[3]["bytes"][:100]
    table = table.set_column(1, "image", pa.array(files))
    pq.write_table(table, tmp_path / "in.parquet")
    frame = dii.read_parquet_images(tmp_path / "in.parquet", backend="pandas")
    export(frame, tmp_path)
    assert written(tmp_path)["03"] == {"jpg": files[3]["bytes"]}
    with pytest.raises(ArgumentError, match=r"1 of .* 03.*: bad-image.*errors='drop'"):
        export(frame, tmp_path, errors="raise", row_errors="drop", overwrite=True)
    told = export(frame, tmp_path, errors="drop", overwrite=True)
    assert told.attrs["left_out"]["bad-image"]["first"] == ["03"]
    assert written(tmp_path) == {k: {e: d} for k, (e, d) in pictures.items() if k != "03"}


def test_rows_without_an_image_have_their_other_members(table, tmp_path):
    files = [None, *table.column("image").to_pylist()[1:]]
    pq.write_table(table.set_column(1, "image", pa.array(files)), tmp_path / "in.parquet")
    frame = dii.read_parquet_images(tmp_path / "in.parquet", backend="pandas")
    export(frame, tmp_path, members={"txt": "caption"})
    assert written(tmp_path)["00"] == {"txt": b"picture 00"}
    with pytest.raises(ArgumentError, match=r"1 of 8 rows cannot be exported: 00: no-members"):
        export(frame, tmp_path, overwrite=True)


def test_rows_of_several_files_without_keys_are_named_by_their_file(table, tmp_path, pictures):
    (tmp_path / "in").mkdir()
    for name in ("a", "b.c"):
        pq.write_table(table.drop_columns("__key__"), tmp_path / "in" / f"{name}.parquet")
    export(dii.read_parquet_images(tmp_path / "in", backend="pandas"), tmp_path)
    found = written(tmp_path)
    assert list(found) == [f"{file}/0000000{n}" for file in ("a", "b.c") for n in range(8)]
    files = [data for _, data in pictures.values()]
    assert [next(iter(members.values())) for members in found.values()] == files * 2


def test_rows_without_duplicates_are_exported_undecoded(table, tmp_path, work):  # noqa: F811
    twice = table[:2].set_column(0, "__key__", pa.array(["08", "09"]))
    pq.write_table(pa.concat_tables([table, twice]), tmp_path / "in.parquet")
    frame = dii.read_parquet_images(tmp_path / "in.parquet", backend="pandas")
    told = dii.curate.find_duplicates(frame, by="pixels", keep="first")
    work["decoded"] = 0
    alone = told[told["duplicate.keep"]]
    export(alone[alone["score"] < 0.8], tmp_path)
    assert list(written(tmp_path)) == ["00", "01", "02", "03", "04", "05", "06"]
    export(told, tmp_path, overwrite=True)
    assert len(written(tmp_path)) == 10
    dii.to_parquet_images(alone[["__key__", "image"]], tmp_path / "parquet")
    assert work["decoded"] == 0
    again = dii.read_parquet_images(tmp_path / "parquet", backend="pandas")
    assert again["__key__"].compute().tolist() == table["__key__"].to_pylist()


def test_keys_are_unique_within_a_shard(table, tmp_path):
    pq.write_table(pa.concat_tables([table[:2], table[:2]]), tmp_path / "in.parquet")
    frame = dii.read_parquet_images(tmp_path / "in.parquet", backend="pandas")
    with pytest.raises(ArgumentError, match=r"2 of 4 rows cannot be exported: 00: repeated-key"):
        export(frame, tmp_path)
    assert export(frame, tmp_path, samples_per_shard=2).samples.tolist() == [2, 2]


def test_a_stopped_export_goes_on_and_partitions_do_not_matter(parquet, tmp_path, monkeypatch):
    frame = dii.read_parquet_images(parquet, backend="pandas", decode=False)
    options = {"members": {"txt": "caption"}, "samples_per_shard": 3, "shuffle": 3}
    export(frame, tmp_path, **options)
    whole = contents(tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "whole")
    write = run.write_shard

    def stopping(number, context):
        if number == 1:
            raise KeyboardInterrupt
        return write(number, context)

    with monkeypatch.context() as context, dask.config.set(scheduler="sync"):
        context.setattr(run, "write_shard", stopping)
        with pytest.raises(KeyboardInterrupt):
            export(frame, tmp_path, **options)
    monkeypatch.setattr(run, "stage_frame", None)
    export(frame, tmp_path, resume=True, **options)
    assert contents(tmp_path / "out") == whole
    monkeypatch.undo()
    export(frame.repartition(npartitions=1), tmp_path / "one", **options)
    for path in shards_in(tmp_path / "one" / "out"):
        assert path.read_bytes() == (tmp_path / "whole" / path.name).read_bytes()


@pytest.fixture
def folders(pictures, tmp_path):
    """The photographs in one folder, and masks of most of them in another one."""
    masks = {}
    for number, (key, (kind, data)) in enumerate(pictures.items()):
        (tmp_path / "photos").mkdir(exist_ok=True)
        (tmp_path / "masks").mkdir(exist_ok=True)
        (tmp_path / "photos" / f"{key}.{kind}").write_bytes(data)
        if number != 2:
            mask = Image.fromarray(np.full((30 + number, 40), number, np.uint8))
            masks[key] = encode(mask, "png")
            (tmp_path / "masks" / f"{key}.png").write_bytes(masks[key])
    return masks


def merged(tmp_path, how="left", **options):
    """Photographs, and the masks of the same keys."""
    read = partial(dii.read_images, backend="pandas", **options)
    masks = read(tmp_path / "masks")[["__key__", "image"]].rename(columns={"image": "mask"})
    return read(tmp_path / "photos").merge(masks, on="__key__", how=how)


MERGED = {
    "pixels": merged,
    "references": partial(merged, decode=False),
    "computed": lambda path: merged(path, decode=False).compute(),
    "sorted": lambda path: merged(path).sort_values("width"),
    "after a decode": lambda path: dii.decode_images(merged(path, decode=False)),
}


@pytest.mark.parametrize("kind", MERGED)
def test_photographs_and_masks_of_two_folders_are_written_together(
    kind,
    folders,
    pictures,
    tmp_path,
    work,  # noqa: F811
):
    export(MERGED[kind](tmp_path), tmp_path)
    assert written(tmp_path) == {
        key: {extension: data} | ({"mask.png": folders[key]} if key in folders else {})
        for key, (extension, data) in pictures.items()
    }
    assert not work["decoded"]


def test_resized_photographs_lie_beside_masks_as_they_are_stored(folders, tmp_path):
    photos = dii.read_images(tmp_path / "photos", size=16, backend="pandas")
    masks = dii.read_images(tmp_path / "masks", mode="labels", backend="pandas")
    masks = masks[["__key__", "image"]].rename(columns={"image": "mask"})
    frame = photos.merge(masks, on="__key__")
    export(frame, tmp_path, members={"jpg": "image"})
    found = written(tmp_path)
    assert found.keys() == folders.keys()
    for key, members in found.items():
        assert members.keys() == {"jpg", "mask.png"}
        assert members["mask.png"] == folders[key]
        assert Image.open(io.BytesIO(members["jpg"])).size == (16, 16)


def test_a_step_that_looks_at_the_masks_says_what_to_do(folders, tmp_path):
    frame = merged(tmp_path)
    frame = frame[frame["mask"].notnull()]
    with pytest.raises(ArgumentError, match=r"stored images of 'mask' .*decode=False"):
        export(frame, tmp_path)


def test_samples_without_locations_are_refused(shards, tmp_path):
    frame = dii.read_webdataset_images(shards, backend="pandas")
    with pytest.raises(ArgumentError, match=r"no column '__url__', 'offset'"):
        export(frame[["__key__", "image"]], tmp_path)


@pytest.mark.parametrize(("least", "count"), [(0.9, []), (0.6, [3])])
def test_partitions_of_parquet_that_a_filter_empties_are_no_error(least, count, parquet, tmp_path):
    frame = dii.read_parquet_images(parquet, backend="pandas")
    assert export(frame[frame["score"] > least], tmp_path)["samples"].tolist() == count


def test_a_lazy_frame_of_made_images_is_written_as_the_computed_one_is(shards, tmp_path):
    frame = dii.read_webdataset_images(shards[0], backend="pandas", size=8)
    made = frame.images.map_batches(lambda x: x[:, ::-1], {"flip": "image"})
    made = made.loc[made["flip"].notnull(), ["__key__", "flip"]]
    lazy = export(made, tmp_path / "lazy", members={"png": "flip"})
    computed = export(made.compute(), tmp_path / "computed", members={"png": "flip"})
    assert lazy["sha256"].tolist() == computed["sha256"].tolist()
    assert lazy["samples"].sum() == len(made) > 0
