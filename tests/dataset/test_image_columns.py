"""Several image columns: each is the member that webdataset and Pillow have, decoded by itself."""

from __future__ import annotations

import io
from functools import partial

import numpy as np
import pandas as pd
import pytest
from counted import work  # noqa: F401  a fixture
from PIL import Image
from synthetic import encode, photograph, write_shard
from webdataset.tariterators import group_by_keys, tar_file_iterator

import dask_image_ingest as dii

LABELS = np.array([0, 1, 9, 200], np.uint8)
IMAGES = {"image": "jpg;png", "mask": dii.ImageColumn("seg.png", mode="labels")}


def png(image):
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def mask_of(random, height, width, palette):
    labels = LABELS[random.integers(len(LABELS), size=(height, width))]
    if not palette:
        return png(Image.fromarray(labels))
    image = Image.frombytes("P", (int(width), int(height)), labels.tobytes())
    image.putpalette(random.integers(0, 256, 768, np.uint8).tobytes())
    return png(image)


def write_collection(folder, random, shards=3, per_shard=8, suffix=".tar"):
    """Photographs with masks of palettes and of grey; one in five has no mask, one a bad one."""
    paths = []
    for shard in range(shards):
        members = {}
        for number in range(shard * per_shard, (shard + 1) * per_shard):
            height, width = random.integers(16, 80, 2)
            members[f"{number:04d}.png"] = encode(photograph(height, width, number), "png")
            if number % 5 != 4:
                mask = mask_of(random, height, width, palette=number % 2)
                members[f"{number:04d}.seg.png"] = mask[:60] if number % 7 == 6 else mask
            members[f"{number:04d}.cls"] = str(number % 3).encode()
        paths.append(write_shard(folder / f"{shard}{suffix}", members))
    return [str(path) for path in paths]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return write_collection(tmp_path_factory.mktemp("masks"), np.random.default_rng(0))


@pytest.fixture(scope="module")
def witness(paths):
    """Key → class, picture and labels as webdataset and Pillow read them; None for none."""
    rows = {}
    for path in paths:
        with open(path, "rb") as file:
            members = [{**member, "__url__": path} for member in tar_file_iterator(file)]
        for sample in group_by_keys(members):
            picture, labels = (_pillow(sample.get(name)) for name in ("png", "seg.png"))
            rows[sample["__key__"]] = (int(sample["cls"]), picture, labels)
    return rows


def _pillow(data):
    try:
        return None if data is None else np.asarray(Image.open(io.BytesIO(data)))
    except OSError:
        return None


@pytest.fixture(scope="module")
def ddf(paths):
    return dii.read_webdataset_images(paths, image=IMAGES, backend="pandas")


def check(frame, witness, keys, columns=("image", "mask")):
    """Rows are those of the keys, and hold what the witness has."""
    assert sorted(frame["__key__"]) == sorted(keys)
    for name in columns:
        for key, array in zip(frame["__key__"], frame.images[name].arrays(), strict=True):
            want = witness[key][1 + (name == "mask")]
            if want is None:
                assert array is None
            else:
                assert np.array_equal(array if name == "image" else array[:, :, 0], want), (
                    key,
                    name,
                )


def test_each_column_holds_the_member_that_webdataset_and_pillow_have(ddf, witness):
    frame = ddf.compute()
    check(frame, witness, witness)
    assert list(frame["mask.error"].isna()) == [row[2] is not None for row in witness.values()]
    shapes = {key: row[2].shape for key, row in witness.items() if row[2] is not None}
    told = frame.set_index("__key__")[["mask.height", "mask.width"]]
    assert {key: tuple(told.loc[key]) for key in shapes} == shapes
    assert frame["error"].isna().all()


@pytest.mark.parametrize("suffix", [".tar.gz", ".tar"])
@pytest.mark.parametrize("index", [False, True])
def test_compressed_and_indexed_shards_have_the_same_columns(tmp_path, suffix, index):
    paths = write_collection(tmp_path, np.random.default_rng(1), 2, 6, ".tar")
    if suffix == ".tar.gz":
        import gzip

        for path in paths:
            with open(path, "rb") as file, gzip.open(f"{path}.gz", "wb") as packed:
                packed.write(file.read())
        paths = [f"{path}.gz" for path in paths]
    want = dii.read_webdataset_images(paths, image=IMAGES, backend="pandas").compute()
    if index:
        dii.write_index(paths)
    ddf = dii.read_webdataset_images(paths, image=IMAGES, backend="pandas", index=index)
    pd.testing.assert_frame_equal(ddf.compute(), want)


def test_what_is_not_asked_for_is_not_decoded(ddf, witness, work):  # noqa: F811
    ddf[["__key__", "mask.height", "mask.width"]].compute()
    assert len(ddf) == len(witness)
    assert work["decoded"] == 0
    frame = ddf[["__key__", "mask"]].compute()
    check(frame, witness, witness, ["mask"])
    assert work["decoded"] == len(witness)
    widths = ddf["mask.width"].compute()
    work.clear()
    kept = ddf[ddf["mask.width"] > 60][["image"]].compute()
    assert work["decoded"] == len(kept) == (widths > 60).sum() > 0
    assert work["walks"] == ddf.npartitions


@pytest.mark.filterwarnings("ignore:The inplace keyword:Warning")  # of Dask, sorting
@pytest.mark.rounds(12, nightly=300)
def test_any_chain_of_operations_keeps_pictures_and_masks_with_their_rows(
    paths, witness, rng, tmp_path
):
    decode = rng.random() < 0.6
    images = IMAGES if decode else {"image": "png", "mask": "seg.png"}
    frame = dii.read_webdataset_images(paths, image=images, backend="pandas", decode=decode)
    keys, names, done = set(witness), {"image": "image", "mask": "mask"}, []
    for _ in range(rng.randint(1, 5)):
        step = rng.choice(
            ["class", "key", "shuffle", "columns", "rename", "parquet", "sort", "split", "whole"]
        )
        done.append(step)
        if step == "class":
            cls = rng.randrange(3)
            frame, keys = frame[frame["cls"] != cls], {k for k in keys if witness[k][0] != cls}
        elif step == "key":
            least = f"{rng.randrange(24):04d}"
            frame, keys = frame[frame["__key__"] >= least], {k for k in keys if k >= least}
        elif step == "whole" and decode and "mask" in names:
            there = frame[names["mask"]].notnull()
            if "mask.error" in frame.columns and rng.random() < 0.5:
                there = frame["mask.error"].isna()
            frame, keys = frame[there], {k for k in keys if witness[k][2] is not None}
        elif step == "shuffle":
            frame = frame.shuffle("cls", npartitions=rng.randint(1, 4))
        elif step == "sort":
            frame = frame.sort_values("__key__")
        elif step == "split":
            frame = frame.repartition(npartitions=rng.randint(1, 5))
        elif step == "columns":
            kept = [names[n] for n in names if rng.random() < 0.8] or [names["mask"]]
            names = {n: now for n, now in names.items() if now in kept}
            frame = frame[["__key__", "cls", *kept]]
        elif step == "rename" and "mask" in names and names["mask"] == "mask":
            names["mask"] = "labels"
            frame = frame.rename(columns={"mask": "labels"})
        elif step == "parquet" and not decode:
            import dask.dataframe as dd

            path = str(tmp_path / f"{len(done)}")
            frame.to_parquet(path)
            frame = dd.read_parquet(path)
    if not decode:
        if "image" in names:
            frame = dii.decode_images(frame, image="image")
        if "mask" in names:
            frame = dii.decode_images(frame, image=names["mask"], mode="labels")
    found = frame.compute(scheduler="synchronous")
    found = found.rename(columns={now: name for name, now in names.items()})
    check(found, witness, keys, names)


def test_rows_are_kept_by_the_errors_of_each_image(ddf, paths, witness, caplog):
    whole = {key for key, row in witness.items() if row[2] is not None}
    good = ddf[ddf["mask.error"].isna()]
    check(good.compute(), witness, whole)
    assert any("images of 'mask' could not be decoded, first that of" in m for m in caplog.messages)
    bad = ddf[ddf["mask.error"].notnull() & ddf["error"].isna()]
    assert set(bad["__key__"].compute()) == set(witness) - whole
    dropped = dii.read_webdataset_images(paths, image=IMAGES, backend="pandas", errors="drop")
    check(dropped.compute(), witness, whole)
    assert len(dropped) == len(whole)
    filtered = dii.read_webdataset_images(
        paths, filters=[("mask.error", "in", [None])], image=IMAGES, backend="pandas"
    )
    check(filtered.compute(), witness, whole)
    strict = dii.read_webdataset_images(paths, image=IMAGES, backend="pandas", errors="raise")
    with pytest.raises(dii.ImageDecodeError, match=r"'\d+' can't be decoded: (missing|truncated)"):
        strict.compute()


@pytest.mark.parametrize(
    "ask",
    [
        lambda d: d[d["mask.error"].isna()],
        lambda d: d[d["mask"].notnull()],
        lambda d: d[d["mask.error"].notnull() & (d["cls"] == 1)],
        lambda d: (good := d[d["mask.error"].isna()])[good["cls"] == 1],
    ],
)
def test_rows_are_filtered_by_one_of_several_images(paths, ddf, witness, ask):
    references = dii.read_webdataset_images(
        paths, image={"image": "png", "mask": "seg.png"}, decode=False, backend="pandas"
    )
    late = dii.decode_images(references, image="image")
    late = dii.decode_images(late, image="mask", mode="labels")
    for frame in (ddf, late):
        want = ask(frame.compute())
        found = ask(frame).compute()
        assert list(found.columns) == list(frame.columns)
        check(found, witness, want["__key__"])
        assert len(found) == len(want) > 0


def test_photographs_are_decoded_of_the_rows_that_their_masks_leave(paths, witness, work):  # noqa: F811
    references = dii.read_webdataset_images(
        paths, image={"image": "png", "mask": "seg.png"}, decode=False, backend="pandas"
    )
    masks = dii.decode_images(references, image="mask", mode="labels")
    found = dii.decode_images(masks[masks["mask.error"].isna()], image="image").compute()
    assert work["decoded"] == 24 + 17
    check(found, witness, [key for key, row in witness.items() if row[2] is not None])


@pytest.mark.parametrize(
    "query", [lambda d: d, lambda d: d.assign(three=3), lambda d: d.shuffle("__key__")]
)
def test_the_images_of_all_columns_together_have_to_fit(paths, query, monkeypatch):
    from dask_image_ingest.frames import pandas_backend as backend

    ddf = query(dii.read_webdataset_images(paths[0], image=IMAGES, size=64, backend="pandas"))
    pictures, masks = 8 * 64 * 64 * 3, 6 * 64 * 64
    monkeypatch.setattr(backend, "_SPILL_SHARE", 1)
    monkeypatch.setattr(backend, "worker_memory", lambda: pictures + masks)
    assert len(ddf.compute()) == 8
    monkeypatch.setattr(backend, "worker_memory", lambda: pictures + masks - 1)
    with pytest.raises(MemoryError):
        ddf.compute()
    assert len(ddf[["image"]].compute()) == 8


def test_references_of_images_that_are_not_decoded_stay(paths, witness):
    references = dii.read_webdataset_images(
        paths, image={"image": "png", "mask": "seg.png"}, decode=False, backend="pandas"
    )
    part = references.assign(double=references["nbytes"] * 2)
    masks = dii.decode_images(part, image="mask", mode="labels").compute()
    assert str(masks["image"].dtype) == "image_reference"
    check(dii.decode_images(masks), witness, witness)


def _augmented(images, interp):
    from nvidia.dali import fn

    angle = fn.random.uniform(range=(-40.0, 40.0))
    images = fn.rotate(images, angle=angle, interp_type=interp, keep_size=True, fill_value=0)
    images = fn.flip(images, horizontal=fn.random.coin_flip())
    x, y = fn.random.uniform(range=(0.0, 1.0)), fn.random.uniform(range=(0.0, 1.0))
    return fn.crop(images, crop=(12, 12), crop_pos_x=x, crop_pos_y=y)


def test_a_random_transform_is_the_same_for_all_images_of_a_sample(tmp_path, seed):
    from nvidia.dali import types

    random = np.random.default_rng(seed)
    members = {}
    for number in range(30):
        labels = LABELS[random.integers(len(LABELS), size=random.integers(16, 60, 2))]
        members[f"{number:03d}.png"] = png(Image.fromarray(labels[:, :, None].repeat(3, axis=2)))
        if number % 4 != 3:
            members[f"{number:03d}.seg.png"] = png(Image.fromarray(labels))
        members[f"{number:03d}.cls"] = str(number % 3).encode()
    path = write_shard(tmp_path / "0.tar", members)
    nearest = partial(_augmented, interp=types.INTERP_NN)
    mask = dii.ImageColumn("seg.png", mode="labels", transform=nearest)
    ddf = dii.read_webdataset_images(
        path, image={"image": "png", "mask": mask}, transform=nearest, backend="pandas"
    )
    found = [
        dict(zip(frame["__key__"], frame.images["mask"].arrays(), strict=True))
        for frame in (ddf.compute(), ddf[ddf["cls"] == 1].compute())
    ]
    frame = ddf.compute()
    pictures = dict(zip(frame["__key__"], frame.images.arrays(), strict=True))
    there = {key: labels for key, labels in found[0].items() if labels is not None}
    assert len(there) == 23
    for key, labels in there.items():
        assert np.isin(labels, LABELS).all()
        assert np.array_equal(pictures[key][:, :, :1], labels)
    # The same whatever else is asked for.
    assert all(np.array_equal(there[k], v) for k, v in found[1].items() if v is not None)
    assert len({labels.tobytes() for labels in there.values()}) == 23


def test_batches_hold_all_image_columns_of_rows_that_have_them(paths, witness):
    ddf = dii.read_webdataset_images(paths, image=IMAGES, size=16, backend="pandas")
    whole = [key for key, row in witness.items() if row[2] is not None]
    seen = 0
    for batch in ddf.images.iter_batches(5, columns=["mask", "cls"]):
        rows = len(batch["cls"])
        assert batch["image"].shape == (rows, 16, 16, 3)
        assert batch["mask"].shape == (rows, 16, 16, 1)
        assert np.isin(batch["mask"], LABELS).all()
        assert batch["cls"].tolist() == [witness[key][0] for key in whole[seen : seen + rows]]
        seen += rows
    assert seen == len(whole)
    stack = ddf[ddf["mask.error"].isna()].images["mask"].stack().compute()
    assert stack.shape == (len(whole), 16, 16, 1)


def test_images_of_differing_shapes_come_as_lists(ddf):
    batch = next(iter(ddf.images["mask"].iter_batches(4, columns=["image"])))
    assert [mask.shape[:2] for mask in batch["mask"]] == [
        image.shape[:2] for image in batch["image"]
    ]


def test_a_function_gets_several_images_of_a_sample(ddf, witness):
    def share(pictures, masks):
        return np.array([(mask == 9).mean() for _, mask in zip(pictures, masks, strict=True)])

    made = ddf.images.map_batches(share, {"nines": "float64"}, inputs=["image", "mask"]).compute()
    for key, value in zip(made["__key__"], made["nines"], strict=True):
        labels = witness[key][2]
        assert pd.isna(value) if labels is None else value == (labels == 9).mean()


def test_labels_come_back_from_an_export_as_they_were(ddf, tmp_path, witness):
    whole = {key for key, row in witness.items() if row[2] is not None}
    dii.to_webdataset(ddf[ddf["mask.error"].isna()], str(tmp_path / "{shard:03d}.tar"))
    again = dii.read_webdataset_images(str(tmp_path), image=IMAGES, backend="pandas")
    check(again.compute(), witness, whole)


@pytest.mark.parametrize("kind", ["pixels", "references", "dropped"])
def test_a_sidecar_tells_nothing_of_other_images_that_a_new_shard_makes_untrue(
    ddf,
    paths,
    tmp_path,
    kind,
    work,  # noqa: F811
):
    if kind == "references":
        images = {"image": "jpg;png", "mask": "seg.png"}
        ddf = dii.read_webdataset_images(paths, image=images, decode=False, backend="pandas")
    elif kind == "dropped":
        ddf = ddf.drop(columns=["image", "mask"])
    dii.to_webdataset(ddf, tmp_path / "{shard:03d}.tar", members="all")
    assert work["decoded"] == 0
    there = pd.read_parquet(tmp_path / "000.parquet").columns
    facts = ["offset", "nbytes", "format", "height", "width", "channels"]
    assert list(there) == ["__key__", "__url__", *facts, "cls"]


def test_masks_that_are_not_the_stored_ones_are_written_or_refused(paths, tmp_path):
    small = dii.ImageColumn("seg.png", mode="labels", size=8)
    frame = dii.read_webdataset_images(
        paths, image={"image": "png", "mask": small}, backend="pandas"
    )
    out = tmp_path / "{shard:03d}.tar"
    for members in ("all", {"png": "image"}):
        with pytest.raises(dii.ArgumentError, match=r"members={'seg.png': 'mask'} encodes"):
            dii.to_webdataset(frame, out, members=members)
    dii.to_webdataset(frame, out, members={"seg.png": "mask"})
    again = dii.read_webdataset_images(str(tmp_path / "*.tar"), image=IMAGES, backend="pandas")
    want, found = frame.compute().images["mask"].arrays(), again.compute().images["mask"].arrays()
    assert [each is None for each in found] == [each is None for each in want]
    assert all(
        np.array_equal(*pair) for pair in zip(found, want, strict=True) if pair[0] is not None
    )


def test_a_checkpoint_holds_all_images(ddf, tmp_path, witness):
    kept = dii.checkpoint(ddf, str(tmp_path / "kept"))
    check(kept.compute(), witness, witness)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"image": {"mask": "seg.png"}}, "one of the columns of a mapping is 'image'"),
        ({"image": {"image": "png", "width": "seg.png"}}, "'width' can't be the name"),
        ({"image": {"image": "png", 3: "seg.png"}}, "3 can't be the name"),
        ({"image": IMAGES, "transform": len}, "transform= may mix the labels of 'mask'"),
        ({"image": IMAGES, "decode": False}, "pass it to decode_images"),
        ({"image": {"image": "png", "mask": dii.ImageColumn("seg.png", mode="x")}}, "mode='x'"),
        ({"image": IMAGES, "filters": [("mask", "==", 1)]}, "before any pixel is decoded"),
        ({"image": IMAGES, "columns": ["masks"]}, "masks"),
        (
            {
                "image": {"image": "png", "json.a": dii.ImageColumn("seg.png", mode="labels")},
                "json_fields": {"a": "int64"},
            },
            "both make a column 'json.a'",
        ),
        (
            {
                "image": {"image": "png", "json": dii.ImageColumn("seg.png", mode="labels")},
                "json_fields": {"width": "int64"},
            },
            "both make a column 'json.width'",
        ),
    ],
)
def test_arguments_that_can_not_be_are_refused(paths, options, told):
    with pytest.raises(dii.ArgumentError, match=told):
        dii.read_webdataset_images(paths, backend="pandas", **options)


def test_an_image_column_that_is_not_there_is_named(ddf):
    with pytest.raises(dii.ArgumentError, match=r"images\['masks'\]: .* are 'image', 'mask'"):
        ddf.images["masks"]


def test_a_first_shard_without_masks_is_told(paths):
    with pytest.warns(UserWarning, match=r"no image \(depth='depth.png'\)"):
        dii.read_webdataset_images(
            paths, image={"image": "png", "depth": "depth.png"}, backend="pandas"
        )


@pytest.mark.parametrize(
    "image",
    [{"image": "png", "mask": "seg.png"}, {"image": "png", "m": dii.ImageColumn("seg.png")}],
)
def test_a_mask_that_is_read_as_a_photograph_is_warned_of(paths, image):
    with pytest.warns(UserWarning, match="mode='labels'"):
        dii.read_webdataset_images(paths, image=image, backend="pandas")
    # Not where a mode is chosen, nor where nothing is decoded: other warnings are errors.
    dii.read_webdataset_images(paths, image=image, backend="pandas", mode="L")
    chosen = image | {list(image)[1]: dii.ImageColumn("seg.png", mode="RGB")}
    dii.read_webdataset_images(paths, image=chosen, backend="pandas")
    if "mask" in image:
        dii.read_webdataset_images(paths, image=image, backend="pandas", decode=False)


def test_the_thumbnails_of_another_column_have_its_own_sizes(paths):
    ddf = dii.read_webdataset_images(paths, image=IMAGES, backend="pandas")
    frame = ddf.head(4).assign(**{"mask.height": 11, "mask.width": 22, "height": 33})
    for card in frame.images["mask"].show(4).cards:
        assert card.error is not None or card.facts.startswith("22 × 11")
    lazy = ddf.images["mask"].show(4).cards
    sizes = ddf[["mask.width", "mask.height"]].head(4).to_numpy().tolist()
    for card, (width, height) in zip(lazy, sizes, strict=True):
        assert card.error is not None or card.facts.startswith(f"{width} × {height}")
