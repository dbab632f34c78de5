"""The second look: changed photographs are found by thumbnails, and nothing else is."""

import io

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from counted import work  # noqa: F401
from hashes import brute, clusters, flipped, random_hashes
from PIL import Image, ImageDraw, ImageOps

import dask_image_ingest as dii
from dask_image_ingest.curate import (
    compute_fingerprints,
    find_duplicates,
    find_overlaps,
    table_plan,
    write_hashes,
)
from dask_image_ingest.curate.near_hashes import SecondLook, nearest, nearest_kept
from dask_image_ingest.curate.second_look import are_same, correlations, turned

COLUMNS = ["duplicate.keep", "duplicate.of", "duplicate.distance"]


def asked(is_same, distance):
    return SecondLook(distance, lambda rows, others, variant: is_same[rows, others])


@pytest.mark.parametrize("variants", [1, pytest.param(2, marks=pytest.mark.more)])
@pytest.mark.parametrize("by_tables", [False, True])
def test_it_is_the_greedy_choice_with_pairs_that_are_the_same(
    random, monkeypatch, variants, by_tables
):
    if by_tables:  # groups of a table, compared by rows
        monkeypatch.setattr(table_plan, "_ALL", 1e9)
    # Trees of few rows and, of copies of one hash, of many.
    copies = flipped(random, random_hashes(random, 1).repeat(60, axis=0), 10)
    hashes = np.unique(np.concatenate([clusters(random, 80, 5, 40), copies]), axis=0)
    hashes = hashes[random.permutation(len(hashes))][:, None]
    others = [random_hashes(random, len(hashes))[:, None] for _ in range(variants - 1)]
    hashes = np.concatenate([hashes, *others], axis=1)
    apart = np.bitwise_count(hashes[:, None, :] ^ hashes[None, :, :1]).sum(axis=3).min(axis=2)
    is_same = np.tril(random.random(apart.shape) < 0.6)
    is_same |= is_same.T
    within = np.tril((apart > 15) & (apart <= 48))
    within &= within.cumsum(axis=1) <= 16  # so many rows before each are looked at
    within |= within.T
    expected = brute(hashes, 15, is_same & within)
    assert (expected[1] > 15).sum() > 30
    found = nearest_kept(hashes, 15, look=asked(is_same, 48))
    if not by_tables:
        for one, other in zip(found, expected, strict=True):
            assert one.tolist() == other.tolist()
    # Tables may miss a pair that is looked at, and so change what follows from it.
    assert (found[0] == expected[0]).mean() > 0.9


@pytest.mark.parametrize("by_tables", [False, True])
def test_a_row_is_near_the_other_that_is_the_same(random, monkeypatch, by_tables):
    if by_tables:
        monkeypatch.setattr(table_plan, "_ALL", 1e9)
    others = random_hashes(random, 300)
    hashes = flipped(random, others, random.integers(0, 60, 300))
    apart = np.bitwise_count(hashes[:, None] ^ others[None]).sum(axis=2)
    is_same = random.random(apart.shape) < 0.5
    near = (apart <= 15) | (is_same & (apart <= 40))
    found, bits = nearest(hashes[:, None], others, 15, look=asked(is_same, 40))
    has = near.any(axis=1)
    right = np.where(has, np.where(near, apart, 999).argmin(axis=1), -1)
    assert (found == right).mean() >= (0.97 if by_tables else 1)
    assert (bits[found >= 0] == apart[np.arange(300), found][found >= 0]).all()


@pytest.fixture(scope="module")
def photographs():
    from importlib.metadata import distribution
    from pathlib import Path

    folder = Path(str(distribution("scikit-image").locate_file("skimage/data")))
    names = ["astronaut", "coffee", "motorcycle_left", "camera", "coins", "chelsea"]
    opened = [Image.open(folder / f"{name}.png").convert("RGB") for name in names]
    return [image.resize((320, 240)) for image in opened]


def captioned(image):
    image = image.copy()
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 216, 320, 240), fill="white")
    draw.text((20, 216), "A line of text", fill="black", font_size=16)
    return image


CHANGES = [
    lambda image: image.crop((8, 6, 312, 234)),
    lambda image: image.rotate(1, Image.Resampling.BICUBIC).crop((8, 6, 312, 234)),
    captioned,
    lambda image: ImageOps.expand(image, 4, "black"),
]


def shard_of(images, path):
    from photo_shards import write_tar

    members = {}
    for key, image in images.items():
        file = io.BytesIO()
        image.save(file, "JPEG", quality=90)
        members[f"{key}.jpg"] = file.getvalue()
    return write_tar(path, members)


@pytest.fixture(scope="module")
def collection(photographs, tmp_path_factory):
    """Photographs, each followed by what becomes of it."""
    images = {}
    for number, image in enumerate(photographs):
        images[f"{number}a"] = image
        images |= {f"{number}b{n}": change(image) for n, change in enumerate(CHANGES)}
    shard = shard_of(images, tmp_path_factory.mktemp("changed") / "changed.tar")
    return dii.read_webdataset_images(shard, backend="pandas")


def verdicts(frame, **options):
    found = find_duplicates(frame, keep="first", **options)[["__key__", *COLUMNS]]
    return (found.compute() if hasattr(found, "compute") else found).set_index("__key__")


def test_crops_turns_captions_and_borders_are_found_in_one_decode(collection, work):  # noqa: F811
    found = verdicts(collection)
    gone = found[~found["duplicate.keep"]]
    assert gone["duplicate.of"].str[0].tolist() == gone.index.str[0].tolist()
    assert (gone["duplicate.of"].str[1] == "a").all()
    assert (gone["duplicate.distance"] > 24).sum() >= 6
    assert len(gone) >= 20  # of 24
    assert work["decoded"] == 30
    without = verdicts(collection, second_look=0)
    assert (~without["duplicate.keep"]).sum() < len(gone) - 6
    assert (without["duplicate.distance"].dropna() <= 24).all()


def test_the_answer_is_the_same_whatever_the_partitions_are_and_from_stored_thumbnails(collection):
    expected = verdicts(collection)
    columns = ["__key__", "__url__", "offset", "fingerprint.pdq", "fingerprint.thumbnail"]
    table = compute_fingerprints(collection, ["pdq", "thumbnail"])[columns].compute()
    shuffled = table.sample(frac=1, random_state=1).reset_index(drop=True)
    for frame in (table, *(dd.from_pandas(shuffled, npartitions=n) for n in (1, 5))):
        found = verdicts(frame).loc[expected.index]
        pd.testing.assert_frame_equal(found, expected, check_index_type=False)


@pytest.mark.parametrize(
    ("thumbnail", "reason"),
    [
        ([1, 2, 3], "lists of 1,024 pixels"),
        ([None] * 1024, "lists of 1,024 pixels"),
        ([0.5] * 1024, "double"),
        ([300] * 1024, "0 to 255"),
        ("a text", "string"),
    ],
)
def test_thumbnails_of_another_kind_are_refused(thumbnail, reason):
    frame = pd.DataFrame({
        "__key__": ["a", "b"], "__url__": "photos.tar",
        "fingerprint.pdq": ["0" * 64, "0" * 56 + "f" * 8],
        "fingerprint.thumbnail": [thumbnail] * 2,
    })  # fmt: skip
    with pytest.raises(dii.ArgumentError, match=reason) as caught:
        find_duplicates(frame, keep="first")
    assert "fingerprint.thumbnail" in str(caught.value)
    assert find_duplicates(frame, keep="first", second_look=0)["duplicate.keep"].all()
    missing = frame.assign(**{"fingerprint.thumbnail": None})
    assert find_duplicates(missing, keep="first")["duplicate.keep"].all()


def test_later_images_are_looked_at_beside_stored_ones(collection, tmp_path):
    keys = collection["__key__"]
    originals = collection[~keys.str.contains("b")]
    changed = collection[keys.str.contains("b")]
    write_hashes(originals, tmp_path / "hashes")
    write_hashes(originals, tmp_path / "bare", thumbnails=False)
    expected = verdicts(collection)
    found = verdicts(changed, against=tmp_path / "hashes")
    pd.testing.assert_frame_equal(found, expected.loc[found.index], check_index_type=False)
    overlaps = find_overlaps(changed, tmp_path / "hashes").compute().set_index("__key__")
    assert overlaps["overlap.found"].tolist() == (~found["duplicate.keep"]).tolist()
    bare = verdicts(changed, against=tmp_path / "bare")
    assert bare["duplicate.of"].str.contains("a").sum() < (~found["duplicate.keep"]).sum()


def test_a_mirrored_crop_is_found_where_mirror_images_are_asked_for(photographs, tmp_path):
    images = {f"{n}a": image for n, image in enumerate(photographs)}
    images |= {f"{n}b": ImageOps.mirror(CHANGES[0](i)) for n, i in enumerate(photographs)}
    ddf = dii.read_webdataset_images(shard_of(images, tmp_path / "a.tar"), backend="pandas")
    found = verdicts(ddf, variants=["mirrored"])
    assert found["duplicate.of"].dropna().to_dict() == {f"{n}b": f"{n}a" for n in range(6)}
    assert (found["duplicate.distance"] > 24).any()


def forms(count, paper=255, ink=0):
    """Thumbnails of forms of one layout that differ in their words."""
    pages = []
    for number in range(count):
        page = Image.new("L", (300, 400), paper)
        draw = ImageDraw.Draw(page)
        for top in range(20, 380, 60):
            draw.rectangle((20, top, 280, top + 30), outline=ink)
            draw.text((24, top + 6), f"{number * 7919 + top * 31 % 977}", fill=ink)
        pages.append(np.asarray(page.resize((32, 32), Image.Resampling.BOX)))
    return np.stack(pages)


def test_unrelated_photographs_forms_and_plain_pictures_are_not_the_same(photographs):
    small = [i.convert("L").resize((32, 32), Image.Resampling.BOX) for i in photographs]
    pictures = np.stack([np.asarray(image) for image in small])
    one, other = np.triu_indices(len(pictures), 1)
    assert not are_same(pictures[one], pictures[other], "pandas").any()
    assert are_same(pictures, pictures, "pandas").all()
    for paper, ink in ((255, 0), (200, 20), (40, 230)):
        pages = forms(4, paper, ink)
        assert (correlations(pages[:2], pages[2:], np) > 0.94).all()
        assert not are_same(pages[:2], pages[2:], "pandas").any(), paper
    plain = np.full((2, 32, 32), 90, np.uint8)
    assert not are_same(plain, plain, "pandas").any()
    assert correlations(plain[:0], plain[:0], np).shape == (0,)


def test_a_cluster_gets_the_thumbnails_beside_the_graph(random, client):
    """Else Dask warns of a large graph, and warnings are errors here."""
    thumbnails = random.integers(0, 256, (6000, 32, 32), np.uint8)
    is_same = are_same(thumbnails, np.roll(thumbnails, 3000, axis=0), "pandas")
    assert not is_same.any()
    assert are_same(thumbnails[:2000], thumbnails[:2000], "pandas").all()


def test_thumbnails_are_turned_as_pillow_turns_pictures(random):
    pixels = random.integers(0, 256, (32, 32), dtype=np.uint8)
    for name, transpose in {
        "mirrored": Image.Transpose.FLIP_LEFT_RIGHT,
        "flipped": Image.Transpose.FLIP_TOP_BOTTOM,
        "rotated90": Image.Transpose.ROTATE_90,
        "rotated270": Image.Transpose.ROTATE_270,
        "transversed": Image.Transpose.TRANSVERSE,
    }.items():
        expected = np.asarray(Image.fromarray(pixels).transpose(transpose))
        assert (turned(pixels[None], name)[0] == expected).all(), name


def test_thumbnails_are_nearly_pillows_box_means(photographs, tmp_path):
    shard = shard_of({f"{n}": image for n, image in enumerate(photographs)}, tmp_path / "a.tar")
    ddf = dii.read_webdataset_images(shard, backend="pandas")
    column = compute_fingerprints(ddf, ["thumbnail"])["fingerprint.thumbnail"].compute()
    for image, pixels in zip(photographs, column, strict=True):
        grey = np.asarray(image.convert("L").resize((32, 32), Image.Resampling.BOX), int).ravel()
        assert np.abs(grey - np.asarray(pixels)).mean() < 6
        assert np.corrcoef(grey, np.asarray(pixels))[0, 1] > 0.97
