"""Duplicates and overlaps: which rows go, for which, and what it costs to know."""

import io

import cloudpickle
import dask
import dask.dataframe as dd
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from counted import work  # noqa: F401
from hashes import brute, clusters, flipped, random_hashes
from photo_shards import encode
from PIL import Image, ImageDraw, ImageFilter

import dask_image_ingest as dii
from dask_image_ingest.curate import (
    compute_fingerprints,
    find_duplicates,
    find_overlaps,
    hash_store,
    measure_quality,
    table_plan,
    write_hashes,
)

COLUMNS = ["duplicate.keep", "duplicate.group", "duplicate.of", "duplicate.distance"]


def digits(hashes):
    return [row.tobytes().hex() for row in hashes]


def table_of(hashes, **columns):
    """Rows as a read gives them, with a PDQ hash each and no image."""
    count = len(hashes)
    names = np.array([f"{number:07d}" for number in range(count)])
    return pd.DataFrame(
        {
            "__key__": names,
            "__url__": [f"/data/{number % 7}.tar" for number in range(count)],
            "offset": np.arange(count) * 512,
            "height": 100,
            "width": 100,
            "fingerprint.pdq": digits(hashes),
            **columns,
        }
    )


def planted(photos, folder):
    """Photographs and what becomes of them: key of each variant -> the photograph's key."""
    from photo_shards import write_tar

    variants, members = {}, {}
    for number, photo in enumerate(photos):
        image = Image.fromarray(photo.pixels)
        made = {
            "a": (image.resize((image.width * 2, image.height * 2)), "PNG", {}),
            "b": (image, "JPEG", {"quality": 60}),
            "c": (image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), "PNG", {}),
        }
        for name, (picture, format, options) in made.items():
            file = io.BytesIO()
            picture.save(file, format, **options)
            members[f"{number:03d}{name}.{'jpg' if format == 'JPEG' else 'png'}"] = file.getvalue()
            variants[f"{number:03d}{name}"] = f"{number:03d}a"
        members[f"{number:03d}d.jpg"] = members[f"{number:03d}b.jpg"]
        variants[f"{number:03d}d"] = f"{number:03d}a"
    return write_tar(folder / "planted.tar", members), variants


@pytest.fixture(scope="module")
def detailed():
    from importlib.metadata import distribution
    from pathlib import Path

    from photo_shards import Photo, encode

    folder = Path(str(distribution("scikit-image").locate_file("skimage/data")))
    names = ["astronaut", "coffee", "motorcycle_left", "camera", "coins", "chelsea"]
    images = [Image.open(folder / f"{name}.png").convert("RGB") for name in names]
    return [
        Photo(name, "png", encode(image.resize((300, 200)), "png"), "", 0, 0)
        for name, image in zip(names, images, strict=True)
    ]


@pytest.fixture(scope="module")
def collection(detailed, tmp_path_factory):
    shard, variants = planted(detailed, tmp_path_factory.mktemp("planted"))
    return dii.read_webdataset_images(shard, backend="pandas"), variants


def test_variants_of_a_photograph_go_and_the_largest_stays(collection):
    ddf, variants = collection
    found = (
        find_duplicates(ddf, keep="largest")[["__key__", *COLUMNS]].compute().set_index("__key__")
    )
    kept = found[found["duplicate.keep"]]
    assert sorted(kept.index) == sorted(key for key in variants if key[-1] in "ac")
    gone = found[~found["duplicate.keep"]]
    assert gone["duplicate.of"].to_dict() == {key: variants[key] for key in gone.index}
    assert gone["duplicate.distance"].between(0, 24).all()
    assert kept[["duplicate.of", "duplicate.distance"]].isna().all(axis=None)
    assert found["duplicate.group"].isna().tolist() == [key[-1] == "c" for key in found.index]
    assert found.groupby("duplicate.group")["duplicate.keep"].sum().eq(1).all()


def encoded(picture, format, **options):
    file = io.BytesIO()
    picture.save(file, format, **options)
    return file.getvalue()


def kept_of(members, folder):
    """The keys that stay of files that are all near, whatever PDQ makes of them."""
    from photo_shards import write_tar

    ddf = dii.read_webdataset_images(write_tar(folder / "a.tar", members), backend="pandas")
    alike = ddf.assign(**{"fingerprint.pdq": "0" * 64})
    found = find_duplicates(alike)[["__key__", "duplicate.keep"]].compute()
    return found["__key__"][found["duplicate.keep"]].tolist()


def test_the_original_stays_and_not_a_poor_a_small_or_an_enlarged_copy(detailed, tmp_path):
    for photo in detailed:
        image = Image.fromarray(photo.pixels)
        small = image.resize((image.width // 2, image.height // 2))
        large = image.resize((image.width * 2, image.height * 2), Image.Resampling.LANCZOS)
        members = {
            "quality_20.jpg": encoded(image, "JPEG", quality=20),
            "quality_50.jpg": encoded(image, "JPEG", quality=50),
            "webp.webp": encoded(image, "WEBP", quality=80),
            "blurred.jpg": encoded(image.filter(ImageFilter.GaussianBlur(2)), "JPEG", quality=95),
            "half.jpg": encoded(small, "JPEG", quality=95),
            "half_as_png.png": encoded(small, "PNG"),
            "enlarged.jpg": encoded(large, "JPEG", quality=95),
            "enlarged_as_png.png": encoded(large, "PNG"),
            "cut.png": encoded(image.crop((0, 0, image.width - 2, image.height)), "PNG"),
            "z.jpg": encoded(image, "JPEG", quality=95),
        }
        assert kept_of(members, tmp_path) == ["z"], photo.key


def test_colour_stays_before_grey_rgb_before_cmyk_and_of_equals_the_first(detailed, tmp_path):
    for photo in detailed[:3]:
        image = Image.fromarray(photo.pixels)
        grey = image.convert("L")
        colours = {
            "a.jpg": encoded(grey, "JPEG", quality=95),
            "b.jpg": encoded(grey.convert("RGB"), "JPEG", quality=95),
            "c.jpg": encoded(image.convert("CMYK"), "JPEG", quality=95),
            "d.jpg": encoded(image, "JPEG", quality=40),
            "e.jpg": encoded(image, "JPEG", quality=40),
        }
        assert kept_of(colours, tmp_path) == ["d"], photo.key


def page_of_text():
    page = Image.new("RGB", (400, 300), "white")
    lines = "\n".join(f"line {n} of a page, {n * 37 % 101} words" for n in range(25))
    ImageDraw.Draw(page).multiline_text((10, 5), lines, fill="black")
    return page


def drawing():
    picture = Image.new("RGB", (400, 300), (230, 240, 250))
    draw = ImageDraw.Draw(picture)
    for n in range(6):
        draw.ellipse([50 * n, 30 * n, 50 * n + 90, 30 * n + 70], fill=(40 * n, 200 - 30 * n, 90))
    return picture


def waves():
    rows, columns = np.mgrid[0:300, 0:400] / 90
    levels = 128 + 50 * np.sin(columns)[..., None] + 50 * np.cos(rows)[..., None] * [1, 0.5, 0]
    return Image.fromarray(levels.round().astype(np.uint8))


def test_a_picture_without_fine_structure_stays_at_its_full_size(tmp_path):
    for make in (page_of_text, drawing, waves):
        for format, extension, options in (("PNG", "png", {}), ("JPEG", "jpg", {"quality": 90})):
            picture = make()
            small = (picture.width // 2, picture.height // 2)
            members = {
                f"z_original.{extension}": encoded(picture, format, **options),
                "half.jpg": encoded(picture.resize(small), "JPEG", quality=95),
                "half_area.png": encoded(picture.resize(small, Image.Resampling.BOX), "PNG"),
                "three_quarters.png": encoded(picture.resize((300, 225)), "PNG"),
                "q75.jpg": encoded(picture, "JPEG", quality=75),
                "q20.jpg": encoded(picture, "JPEG", quality=20),
            }
            assert kept_of(members, tmp_path) == ["z_original"], (make.__name__, format)


def test_rows_without_a_header_are_ranked_by_the_area_of_their_pixels(collection):
    ddf, _ = collection
    expected = find_duplicates(ddf, keep="largest")[COLUMNS].compute()
    bare = ddf.drop(columns=["height", "width", "format", "channels", "nbytes"])
    for frame in (bare, bare.compute()):
        found = find_duplicates(frame, keep="largest")[COLUMNS]
        pd.testing.assert_frame_equal(found.compute() if frame is bare else found, expected)
    assert find_duplicates(bare)["duplicate.keep"].sum().compute() == 12


def test_mirror_images_go_too_where_that_is_asked(collection):
    ddf, variants = collection
    found = find_duplicates(ddf, variants=["mirrored"], keep="largest")
    found = found.set_index("__key__")[COLUMNS].compute()
    assert sorted(found.index[found["duplicate.keep"]]) == sorted({*variants.values()})
    assert found.groupby("duplicate.group").size().eq(4).all()


def test_equal_bytes_are_found_without_a_decode(collection, work):  # noqa: F811
    ddf, _ = collection
    found = find_duplicates(ddf, by="bytes")
    gone = found[~found["duplicate.keep"]][["__key__", "duplicate.of", "duplicate.distance"]]
    gone = gone.compute()
    assert gone["__key__"].str[-1].tolist() == ["d"] * 6
    assert gone["duplicate.of"].tolist() == [f"{key[:-1]}b" for key in gone["__key__"]]
    assert gone["duplicate.distance"].tolist() == [0] * 6
    assert work["decoded"] == 0


def test_fingerprints_are_decoded_once_and_the_result_never(collection, work):  # noqa: F811
    ddf, _ = collection
    found = find_duplicates(ddf)
    assert work["decoded"] == 24
    assert len(found[found["duplicate.keep"]].drop(columns=["image", "error"]).compute()) == 12
    assert work["decoded"] == 24


def test_a_filter_on_other_columns_is_asked_before_the_decode(collection, work):  # noqa: F811
    ddf, _ = collection
    found = find_duplicates(ddf, by="bytes")
    some = found[found["__key__"] < "002"].compute()
    assert len(some) == work["decoded"] == 8
    assert some["duplicate.keep"].sum() == 6


# Two columns to rank by, and one with nulls; how each is ranked, the next test says.
@pytest.mark.parametrize(
    "keep",
    ["best", *(pytest.param(k, marks=pytest.mark.more) for k in ("score", "largest", "first"))],
)
def test_the_answer_is_the_same_whatever_the_partitions_are(random, keep):
    hashes = clusters(random, 60, 6, 15)
    table = table_of(hashes, nbytes=random.integers(1, 9, len(hashes)))
    table["width"] = random.integers(1, 4, len(hashes))
    table["score"] = random.choice([0.5, 1.5, np.nan], len(hashes))
    expected = find_duplicates(table, distance=15, keep=keep).set_index("__key__")[COLUMNS]
    assert 0 < (~expected["duplicate.keep"]).sum() < len(table)
    shuffled = table.sample(frac=1, random_state=1).reset_index(drop=True)
    for count in (1, 3, 11):
        lazy = find_duplicates(dd.from_pandas(shuffled, npartitions=count), distance=15, keep=keep)
        found = lazy.compute().set_index("__key__").loc[expected.index, COLUMNS]
        pd.testing.assert_frame_equal(found, expected, check_index_type=False)


@pytest.mark.parametrize(
    "keep",
    ["best", *(pytest.param(k, marks=pytest.mark.more) for k in ("largest", "first", "score"))],
)
def test_it_is_the_greedy_choice_in_the_order_of_keep(random, keep):
    hashes = clusters(random, 60, 6, 15)
    count = len(hashes)
    table = table_of(hashes, nbytes=random.integers(1, 9, count))
    table["width"] = random.integers(1, 4, count)
    table["score"] = random.choice([0.5, 1.5, np.nan], count)
    columns = {"largest": ["width"], "best": ["width", "nbytes"], "first": [], "score": ["score"]}
    ascending = [False] * len(columns[keep]) + [True]
    order = table.sort_values([*columns[keep], "__key__"], ascending=ascending).index.to_numpy()
    of, bits = brute(hashes[order][:, None], 15)
    found = find_duplicates(table, distance=15, keep=keep).loc[order]
    assert found["duplicate.keep"].tolist() == (of < 0).tolist()
    gone = found[~found["duplicate.keep"]]
    assert gone["duplicate.of"].tolist() == table["__key__"][order[of[of >= 0]]].tolist()
    assert gone["duplicate.distance"].tolist() == bits[of >= 0].tolist()


def test_pictures_without_detail_and_rows_without_a_hash_stay(random):
    hashes = np.repeat(random_hashes(random, 1), 6, axis=0)
    table = table_of(hashes)
    table["fingerprint.pdq_quality"] = [100, 50, 49, 0, 100, None]
    table.loc[4, "fingerprint.pdq"] = None
    found = find_duplicates(table)
    assert found["duplicate.keep"].tolist() == [True, False, True, True, True, True]
    assert found["duplicate.group"].isna().tolist() == [False, False, True, True, True, True]


@pytest.fixture
def flat(tmp_path):
    """Two plain pictures that are equal byte for byte, the same pixels as BMP, and another one."""
    from photo_shards import write_tar

    def file(colour, format):
        buffer = io.BytesIO()
        Image.new("RGB", (90, 60), colour).save(buffer, format)
        return buffer.getvalue()

    png = file("teal", "PNG")
    members = {
        "a.png": png,
        "b.png": png,
        "c.bmp": file("teal", "BMP"),
        "d.png": file("tan", "PNG"),
    }
    shard = write_tar(tmp_path / "flat.tar", members)
    return dii.read_webdataset_images(shard, backend="pandas")


def test_equal_pictures_without_detail_go_and_others_stay(flat, work):  # noqa: F811
    found = find_duplicates(flat, keep="first")[["__key__", *COLUMNS]].compute()
    assert found["duplicate.keep"].tolist() == [True, False, False, True]
    assert found["duplicate.of"].tolist()[1:3] == ["a", "a"]
    assert found["duplicate.distance"].tolist()[1:3] == [0, 0]
    assert work["decoded"] == 4


def test_a_picture_without_detail_is_in_the_collection_that_has_it(flat):
    both = find_overlaps(flat, flat).compute()
    assert both["overlap.found"].all()
    assert both["overlap.of"].tolist() == ["a", "a", "a", "d"]
    other = find_overlaps(flat[flat["__key__"] == "d"], flat[flat["__key__"] != "d"]).compute()
    assert not other["overlap.found"].any()


def test_rows_of_any_frame_are_told_apart_by_a_column_of_unique_values(random):
    hashes = np.repeat(random_hashes(random, 3), 2, axis=0)
    table = pd.DataFrame({"number": [9, 10, 3, 4, 5, 6], "fingerprint.pdq": digits(hashes)})
    for count in (1, 3):
        lazy = dd.from_pandas(table.sample(frac=1, random_state=1), npartitions=count)
        found = (
            find_duplicates(lazy, keep="first", identity="number").compute().sort_values("number")
        )
        gone = found[~found["duplicate.keep"]]
        assert gone["number"].tolist() == [4, 6, 10]
        assert gone["duplicate.of"].tolist() == ["3", "5", "9"]
        both = find_overlaps(lazy, table[:2], identity="number").compute()
        assert sorted(both["number"][both["overlap.found"]]) == [9, 10]
    with pytest.raises(dii.ArgumentError, match="2 of 6 rows have the value of another"):
        find_duplicates(table.replace({"number": {3: 4, 5: 6}}), keep="first", identity="number")
    with pytest.raises(dii.ArgumentError, match="identity='name'"):
        find_duplicates(table, keep="first", identity="name")
    with pytest.raises(dii.ArgumentError, match="or pass identity="):
        find_duplicates(table, keep="first")


def test_a_row_is_known_by_url_and_key_where_there_is_no_offset(random):
    table = table_of(np.repeat(random_hashes(random, 3), 2, axis=0)).drop(columns="offset")
    assert find_duplicates(table)["duplicate.keep"].tolist() == [True, False] * 3


def test_a_row_that_the_frame_has_twice_is_one_row(random):
    table = table_of(random_hashes(random, 5))
    found = find_duplicates(pd.concat([table, table]))
    assert found["duplicate.keep"].all()


def test_verdicts_replace_those_of_an_earlier_call(random):
    table = table_of(np.repeat(random_hashes(random, 2), 2, axis=0))
    once = find_duplicates(table)
    twice = find_duplicates(dd.from_pandas(once, npartitions=2)).compute()
    assert list(twice.columns) == list(once.columns)
    assert twice["duplicate.keep"].tolist() == [True, False, True, False]


@pytest.mark.slow
def test_it_runs_on_a_cluster(collection, client):
    ddf, _ = collection
    expected = find_duplicates(ddf)[["__key__", *COLUMNS]].compute(scheduler="synchronous")
    found = find_duplicates(ddf)[["__key__", *COLUMNS]].compute()
    pd.testing.assert_frame_equal(found, expected)


def test_a_frame_without_rows_has_the_columns(random):
    found = find_duplicates(table_of(random_hashes(random, 0)).astype({"offset": int}))
    assert list(found.columns[-4:]) == COLUMNS
    assert len(found) == 0


def test_lazy_columns_have_the_types_they_say(collection):
    ddf, _ = collection
    for lazy in (find_duplicates(ddf), find_overlaps(ddf, ddf)):
        added = [name for name in lazy.columns if name.startswith(("duplicate", "overlap"))]
        assert lazy[added].compute().dtypes.to_dict() == lazy[added].dtypes.to_dict()


def test_overlaps_are_the_rows_of_one_that_the_other_has(random):
    test = table_of(random_hashes(random, 300))
    hashes = random_hashes(random, 500)
    train = table_of(hashes)
    train.loc[:99, "fingerprint.pdq"] = digits(
        flipped(random, np.frombuffer(bytes.fromhex("".join(test["fingerprint.pdq"][:100])),
                                      np.uint64).reshape(-1, 4), 9)
    )  # fmt: skip
    for partitions in (1, 4):
        found = find_overlaps(dd.from_pandas(train, npartitions=partitions), test).compute()
        assert found["overlap.found"].tolist() == [True] * 100 + [False] * 400
        assert found["overlap.of"][:100].tolist() == test["__key__"][:100].tolist()
        assert found["overlap.distance"][:100].tolist() == [9] * 100
        assert found["overlap.of"][100:].isna().all()


def test_overlaps_of_equal_bytes_and_mirror_images(collection):
    ddf, _ = collection
    jpegs, pngs = ddf[ddf.format == "jpeg"], ddf[ddf.format == "png"]
    assert not find_overlaps(jpegs, pngs, by="bytes")["overlap.found"].any().compute()
    assert find_overlaps(jpegs, pngs)["overlap.found"].all().compute()
    mirrored = pngs[pngs["__key__"].str.endswith("c")]
    assert not find_overlaps(mirrored, jpegs)["overlap.found"].any().compute()
    assert find_overlaps(mirrored, jpegs, variants=["mirrored"])["overlap.found"].all().compute()


def rows_of_scratch(kept, new, **options):
    """Verdicts of the new rows, where the kept ones come first."""
    both = pd.concat([kept, new], ignore_index=True)
    found = find_duplicates(both, keep="first_key", **options)
    return found[len(kept) :].set_index("__key__")[COLUMNS]


@pytest.mark.parametrize("stored", [True, pytest.param(False, marks=pytest.mark.more)])
@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.more)])
def test_new_rows_get_the_verdicts_of_a_run_in_which_the_kept_come_first(
    random, tmp_path, monkeypatch, stored, few
):
    if not few:  # as if all with all were too costly
        monkeypatch.setattr(table_plan, "_ALL", 1e9)
    table = table_of(clusters(random, 80, 6, 20), first_key=0)
    old = find_duplicates(table[:250])
    kept = old[old["duplicate.keep"]][table.columns].assign(first_key=1)
    new = table[250:]
    expected = rows_of_scratch(kept, new)
    if stored:
        half = len(kept) // 2
        write_hashes(kept[:half], tmp_path / "hashes")
        write_hashes(dd.from_pandas(kept[half:], npartitions=3), tmp_path / "hashes")
    against = tmp_path / "hashes" if stored else kept
    for lazy in (new, dd.from_pandas(new, npartitions=4)):
        found = find_duplicates(lazy, keep="first_key", against=against)
        found = found[["__key__", *COLUMNS]].compute() if lazy is not new else found
        found = found.set_index("__key__")[COLUMNS].loc[expected.index]
        for name in ("duplicate.keep", "duplicate.of", "duplicate.distance"):
            pd.testing.assert_series_equal(found[name], expected[name], check_index_type=False)
        # Groups are numbered anew, and are the same ones.
        same = pd.DataFrame({"one": found["duplicate.group"], "other": expected["duplicate.group"]})
        in_new = same.dropna().drop_duplicates()
        assert in_new["one"].is_unique
        assert in_new["other"].is_unique
    assert (found["duplicate.of"].isin(kept["__key__"])).sum() > 20
    assert (found["duplicate.of"].isin(new["__key__"])).sum() > 20


def test_stored_hashes_take_less_than_60_bytes_a_row(random, tmp_path):
    write_hashes(table_of(random_hashes(random, 5000)), tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 60 * 5000
    assert [file.name for file in tmp_path.iterdir()] == ["000000.arrow"]


def test_stored_hashes_of_bytes_and_of_pictures_without_detail_are_compared_too(flat, tmp_path):
    write_hashes(flat[flat["__key__"] == "a"], tmp_path / "bytes", "bytes")
    found = find_duplicates(flat, "bytes", against=tmp_path / "bytes").compute()
    assert found["duplicate.of"].fillna("").tolist() == ["a", "a", "", ""]
    write_hashes(flat[flat["__key__"] == "c"], tmp_path / "pdq")
    found = find_duplicates(flat, against=tmp_path / "pdq").compute()
    assert found["duplicate.of"].fillna("").tolist() == ["c", "c", "c", ""]
    overlaps = find_overlaps(flat, tmp_path / "pdq").compute()
    assert overlaps["overlap.found"].tolist() == [True, True, True, False]


def test_stored_hashes_of_another_kind_or_version_are_refused(random, tmp_path, monkeypatch):
    table = table_of(random_hashes(random, 5))
    write_hashes(table, tmp_path)
    bytes_too = table.assign(**{"fingerprint.bytes": ["0" * 32] * 5})
    for refused in (
        lambda: find_duplicates(bytes_too, "bytes", against=tmp_path),
        lambda: write_hashes(bytes_too, tmp_path, "bytes"),
    ):
        with pytest.raises(dii.ArgumentError, match=r"000000.arrow has hashes of by='pdq' in ver"):
            refused()
    monkeypatch.setattr(hash_store, "_VERSION", 4)
    with pytest.raises(dii.ArgumentError, match="in version 3, not of by='pdq' in version 4"):
        find_duplicates(table, against=tmp_path)


@pytest.mark.slow
def test_a_cluster_finds_the_same_by_tables(random, client, monkeypatch):
    monkeypatch.setattr(table_plan, "_ALL", 1e9)
    table = table_of(clusters(random, 60, 6, 24))
    found = find_duplicates(table, against=table[:50])
    with dask.config.set(scheduler="synchronous"):
        pd.testing.assert_frame_equal(found, find_duplicates(table, against=table[:50]))


def test_what_is_kept_is_exported_with_its_original_bytes(collection, tmp_path):
    ddf, variants = collection
    found = find_duplicates(ddf, variants=["mirrored"], keep="largest")
    dii.to_webdataset(found[found["duplicate.keep"]], tmp_path / "{shard:03d}.tar")
    again = dii.read_webdataset_images(tmp_path / "000.tar", backend="pandas")
    both = [
        compute_fingerprints(each, ["bytes"])[["__key__", "fingerprint.bytes"]]
        for each in (ddf, again)
    ]
    before, after = (each.compute().set_index("__key__")["fingerprint.bytes"] for each in both)
    assert after.to_dict() == before.loc[sorted({*variants.values()})].to_dict()


def test_a_signal_that_keep_names_is_made(collection):
    ddf, _ = collection
    expected = find_duplicates(measure_quality(ddf), keep="quality.dark")[COLUMNS].compute()
    found = find_duplicates(ddf, keep="quality.dark")
    assert list(found.columns) == [*ddf.columns, *COLUMNS]
    pd.testing.assert_frame_equal(found[COLUMNS].compute(), expected)


@pytest.mark.more
def test_a_signal_of_quality_can_say_which_stays(collection):
    ddf, _ = collection
    judged = measure_quality(ddf)
    found = find_duplicates(judged, keep="quality.blur")[
        ["__key__", "quality.blur", *COLUMNS]
    ].compute()
    for _, group in found.dropna(subset="duplicate.group").groupby("duplicate.group"):
        assert (
            group.loc[group["duplicate.keep"], "quality.blur"].item() == group["quality.blur"].max()
        )


def test_wrong_arguments_are_refused(collection):
    for arguments, said in [
        ({"by": "phash"}, "by='phash'; choose 'bytes', 'pixels' or 'pdq'"),
        ({"distance": 65}, "pass 0 to 64"),
        ({"distance": 1.5}, "pass 0 to 64"),
        ({"memory": "1 MiB"}, "memory='1 MiB': pass at least 64 MiB"),
        ({"against": "no folder"}, "against='no folder': no folder of write_hashes"),
        ({"against": 3}, "against="),
        ({"by": "bytes", "variants": ["mirrored"]}, "by='bytes' finds equal"),
        ({"keep": "prettiest"}, "choose 'best', 'largest', 'first' or a column"),
        ({"keep": "format"}, "of numbers"),
    ]:
        with pytest.raises(dii.ArgumentError, match=said):
            find_duplicates(collection[0], **arguments)


@pytest.mark.parametrize("lazy", [False, True])
def test_the_larger_stays_of_images_decoded_from_bytes_that_have_no_shapes(photos, lazy):
    rows = []
    for number, photo in enumerate(photos[:3]):
        image = Image.fromarray(photo.pixels)
        for name, of in (("z", image), ("a", image.resize([side // 2 for side in image.size]))):
            rows.append((f"{number}-{name}", encode(of, "png")))
    files = pd.DataFrame(rows, columns=["name", "png"])
    files["png"] = files["png"].astype(pd.ArrowDtype(pa.binary()))
    frame = dd.from_pandas(files, npartitions=2) if lazy else files
    images = dii.decode_images(frame, image={"image": "png"})
    hashed = compute_fingerprints(images, ["pdq", "pixels"]).drop(columns="image")
    for found in (images, hashed):
        for keep in ("best", "largest"):
            table = find_duplicates(found, keep=keep, identity="name")[["name", "duplicate.keep"]]
            table = table.compute() if lazy else table
            kept = table["name"][table["duplicate.keep"].astype(bool)]
            assert sorted(kept) == ["0-z", "1-z", "2-z"]
    equal = find_duplicates(hashed.drop(columns="quality.area"), by="pixels", identity="name")
    equal = equal[["duplicate.keep"]]
    assert (equal.compute() if lazy else equal)["duplicate.keep"].all()


def test_a_frame_without_what_it_needs_is_refused(collection, random):
    ddf, _ = collection
    with pytest.raises(dii.ArgumentError, match="no column '__key__'"):
        find_duplicates(ddf.drop(columns="__key__"))
    hashed = compute_fingerprints(ddf, ["pdq"]).drop(columns=["height", "width", "image"])
    with pytest.raises(dii.ArgumentError, match="neither images nor the columns 'height' and 'wi"):
        find_duplicates(hashed)
    with pytest.raises(dii.ArgumentError, match="test= has no column '__url__'"):
        find_overlaps(ddf, ddf.drop(columns="__url__"))
    table = table_of(random_hashes(random, 3))
    table["fingerprint.pdq"] = "no hash"
    with pytest.raises(dii.ArgumentError, match="64 hexadecimal digits"):
        find_duplicates(table)


def test_a_column_of_another_type_is_refused_in_our_own_words():
    for column, values, options in [
        ("fingerprint.pdq", [1, 2], {}),
        ("fingerprint.pdq", [1.5, 2.5], {}),
        ("fingerprint.pdq", [True, False], {}),
        ("fingerprint.pdq", [b"x", b"y"], {}),
        ("fingerprint.pdq", ["a" * 63, "a" * 65], {}),
        ("fingerprint.pdq", ["g" * 64, "a" * 64], {}),
        ("fingerprint.bytes", [1, 2], {"by": "bytes"}),
        ("fingerprint.pixels", [None, 2], {"by": "pixels"}),
        ("fingerprint.pdq_quality", ["good", "bad"], {}),
        ("height", ["tall", "low"], {"keep": "largest"}),
        ("nbytes", [[1], [2]], {"keep": "best"}),
        ("quality.blur", ["much", "little"], {"keep": "quality.blur"}),
        ("quality.blur", [1, "little"], {"keep": "quality.blur"}),
        ("offset", ["first", "second"], {}),
        ("offset", [0.5, 1.5], {}),
    ]:
        frame = pd.DataFrame(
            {"__key__": ["a", "b"], "__url__": "s.tar", "fingerprint.pdq": ["0" * 64] * 2}
            | {"height": [1, 2], "width": [1, 2], "quality.fine_detail": [1.0, 2.0]}
        )
        frame[column] = values
        for given in (frame, dd.from_pandas(frame, npartitions=1)):
            with pytest.raises(dii.ArgumentError, match=column):
                find_duplicates(given, **{"keep": "first", **options})


def test_the_graph_of_each_query_has_few_bytes_a_row():
    count = 20_000
    table = table_of(random_hashes(np.random.default_rng(0), count // 2).repeat(2, axis=0))
    found = find_duplicates(dd.from_pandas(table, npartitions=1), distance=0, keep="first")
    query = found[["__key__", *COLUMNS]].optimize()
    types = query.compute().dtypes
    assert types["duplicate.group"] == "int64[pyarrow]"
    assert types["duplicate.distance"] == "int32[pyarrow]"
    rest = len(cloudpickle.dumps(dict(dd.from_pandas(table, npartitions=1).__dask_graph__())))
    assert len(cloudpickle.dumps(dict(query.__dask_graph__()))) - rest < 30 * count
