"""A random transform gives a sample the same picture, whatever else is read with it."""

import numpy as np
import pytest
from corpus import save
from photo_shards import write_tar
from PIL import Image

import dask_image_ingest as dii
from dask_image_ingest.decode import DecodeSpec, EncodedImages, Origin, crash_log, decode
from dask_image_ingest.decode.formats.header import read_header
from dask_image_ingest.frames.pandas_backend import HostPixels

pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")

SIZE = 16
COUNT = 24


def uniform(images):
    from nvidia.dali import fn

    return fn.brightness(images, brightness=fn.random.uniform(range=(0.2, 1.8)))


def normal(images):
    from nvidia.dali import fn, types

    shifted = images + fn.random.normal(mean=0, stddev=40)
    return fn.cast_like(fn.cast(shifted, dtype=types.UINT8), images)


def choice_and_coin(images):
    from nvidia.dali import fn

    turned = fn.rotate(images, angle=fn.random.choice(8) * 45.0, keep_size=True, fill_value=0)
    return fn.flip(turned, horizontal=fn.random.coin_flip())


def beta(images):
    from nvidia.dali import fn

    return fn.brightness(images, brightness=fn.random.beta(alpha=0.5, beta=0.5) * 2)


def crop(images):
    from nvidia.dali import fn

    return fn.random_resized_crop(images, size=(SIZE, SIZE))


def gaussian_noise(images):
    from nvidia.dali import fn

    return fn.noise.gaussian(images, mean=0, stddev=50)


def salt_and_pepper(images):
    from nvidia.dali import fn

    return fn.noise.salt_and_pepper(images)


def shot_noise(images):
    from nvidia.dali import fn

    return fn.noise.shot(images, factor=30)


def of_other_random_numbers(images):
    from nvidia.dali import fn

    low = fn.random.uniform(range=(0.2, 0.6))
    span = fn.stack(low, low + 1)
    return fn.brightness(images, brightness=fn.random.uniform(range=span))


TRANSFORMS = [
    uniform,
    normal,
    choice_and_coin,
    beta,
    crop,
    gaussian_noise,
    salt_and_pepper,
    shot_noise,
    of_other_random_numbers,
]


@pytest.fixture(scope="module")
def encoded():
    """The same picture many times: what differs was drawn."""
    picture = np.arange(20 * 20 * 3, dtype=np.uint8).reshape(20, 20, 3) // 2 + 50
    return save(Image.fromarray(picture), "PNG")


def pictures(encoded, numbers, transform, shard="a.tar", size=SIZE):
    """The pictures of samples of these numbers of a shard, decoded together."""
    headers = [read_header(encoded, 1 << 20)] * len(numbers)
    decoding = DecodeSpec(size=(size, size), transform=transform)
    images = EncodedImages(
        headers,
        lambda row: encoded,
        lambda row: Origin(shard, numbers[row], f"sample {numbers[row]}"),
    )
    (pixels,) = decode(images, [decoding], [HostPixels(len(numbers) * size * size * 3)])
    assert pixels.errors == [None] * len(numbers)
    return dict(zip(numbers, pixels.flat.reshape(-1, size, size, 3), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_picture_depends_on_its_sample_alone(encoded, transform, seed):
    whole = pictures(encoded, range(COUNT), transform)
    random = np.random.default_rng(seed)
    for count in (1, 3, 8, 15, COUNT):
        some = random.choice(COUNT, count, replace=False)
        for numbers in (sorted(some.tolist()), some.tolist()):
            for number, picture in pictures(encoded, numbers, transform).items():
                np.testing.assert_array_equal(picture, whole[number], f"{number} of {numbers}")


@pytest.mark.slow
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_pictures_of_different_samples_are_drawn_for_each(encoded, transform):
    drawn = [*pictures(encoded, range(COUNT), transform).values()]
    other = [*pictures(encoded, range(COUNT), transform, shard="b.tar").values()]
    kinds = {picture.tobytes() for picture in (*drawn, *other)}
    # Of the turns there are 16, of the others as many as samples.
    assert len(kinds) >= 8
    assert any(not np.array_equal(a, b) for a, b in zip(drawn, other, strict=True))


def test_an_if_on_values_of_dali_says_what_to_do(encoded):
    def some_noisy(images):
        from nvidia.dali import fn, types

        if fn.random.coin_flip(dtype=types.BOOL):
            images = fn.noise.gaussian(images, stddev=20)
        return images

    def automatic(images):
        from nvidia.dali.auto_aug import rand_augment

        return rand_augment.rand_augment(images, n=2, m=9)

    for transform in (some_noisy, automatic):
        with pytest.raises(dii.ArgumentError, match=r"`if` on values of DALI.*augment=\['rand_aug"):
            pictures(encoded, range(4), transform)


def test_numbers_far_apart_are_drawn_for_each_too(encoded):
    """As after a late decode, where the number is that of a byte in a shard of any size."""
    numbers = [0, 1, 2**16 + 1, 2**31, 2**32, 2**32 + 1, 2**47 + 512, 2**62]
    together = pictures(encoded, numbers, gaussian_noise)
    assert len({picture.tobytes() for picture in together.values()}) == len(numbers)
    for number in numbers:
        (alone,) = pictures(encoded, [number], gaussian_noise).values()
        np.testing.assert_array_equal(alone, together[number])


def seeded(first, second):
    def transform(images):
        from nvidia.dali import fn

        low = fn.random.uniform(range=(0, 1), **first)
        high = fn.random.uniform(range=(0, 1), **second)
        return fn.brightness(images, brightness=1 + (high - low) / 2)

    return transform


def test_operators_draw_apart_unless_they_have_the_same_seed(encoded):
    def unchanged(images):
        return images

    plain = pictures(encoded, range(8), unchanged)
    apart = pictures(encoded, range(8), seeded({}, {}))
    assert not any(np.array_equal(apart[n], plain[n]) for n in plain)
    same = pictures(encoded, range(8), seeded({"seed": 5}, {"seed": 5}))
    assert all(np.array_equal(same[n], plain[n]) for n in plain)


def test_a_seed_of_the_transform_gives_other_pictures(encoded):
    """As for another epoch."""

    def epoch(number):
        def transform(images):
            from nvidia.dali import fn

            shine = fn.random.uniform(range=(0.2, 1.8), seed=number)
            return fn.brightness(images, brightness=shine)

        return transform

    first, second, again = (pictures(encoded, range(8), epoch(n)) for n in (1, 2, 1))
    assert all(np.array_equal(first[n], again[n]) for n in first)
    assert not any(np.array_equal(first[n], second[n]) for n in first)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Three shards with images for DALI, for Pillow, and for nobody."""
    random = np.random.default_rng(5)
    folder = tmp_path_factory.mktemp("random")
    paths = []
    for shard in range(3):
        files = {}
        for number in range(20):
            edge = (40, 200)[number % 2]
            image = Image.fromarray(random.integers(0, 255, (edge, edge, 3), dtype=np.uint8))
            kind = ("JPEG", "JPEG", "PNG", "BMP")[number % 4]
            nbytes = 50 if number % 7 == 5 else None
            files[f"{shard}-{number:02}.{kind[:3].lower()}"] = save(image, kind)[:nbytes]
        paths.append(write_tar(folder / f"{shard}.tar", files))
    return paths


def by_key(frame):
    arrays = zip(frame["__key__"], frame.images.arrays(), strict=True)
    return {key: array for key, array in arrays if array is not None}


def read(shards, **options):
    return dii.read_webdataset_images(
        shards, backend="pandas", size=32, transform=augment, image="jpe;png;bmp", **options
    )


def augment(images):
    return gaussian_noise(uniform(images))


QUERIES = {
    "again": lambda paths: read(paths),
    "a filter that is pushed down": lambda paths: (d := read(paths))[d.width > 100],
    "a filter after the read": lambda paths: read(paths).map_partitions(lambda f: f[f.width > 100]),
    "some, by their key": lambda paths: (d := read(paths))[d["__key__"].str[-1].isin(list("258"))],
    "a filter on error": lambda paths: (d := read(paths))[d.error.isna()],
    "a filter of the reader": lambda paths: read(paths, filters=[("format", "==", "png")]),
    "dropped": lambda paths: read(paths, errors="drop"),
    "small partitions": lambda paths: read(paths, partition_size="20 kB"),
    "one shard": lambda paths: read(paths[1]),
    "partitions": lambda paths: read(paths).partitions[1:],
    "columns": lambda paths: read(paths)[["__key__", "image"]],
    "sorted": lambda paths: read(paths).sort_values("nbytes"),
}


@pytest.mark.slow
@pytest.mark.parametrize("query", QUERIES)
def test_no_query_changes_a_picture(query, shards):
    want = by_key(read(shards).compute())
    assert len(want) > 40
    for scheduler in ("synchronous", "threads"):
        got = by_key(QUERIES[query](shards).compute(scheduler=scheduler))
        assert 0 < len(got) <= len(want)
        for key, array in got.items():
            np.testing.assert_array_equal(array, want[key], key)


def test_the_head_shows_the_pictures_of_the_whole(shards):
    want = by_key(read(shards).compute())
    for key, array in by_key(read(shards).head(5)).items():
        np.testing.assert_array_equal(array, want[key])


def test_a_late_decode_gives_a_row_the_same_picture_wherever_it_stands(shards):
    table = dii.read_webdataset_images(shards, backend="pandas", image="jpe;png;bmp")
    table = table.drop(columns=["image", "error"]).compute()

    def decoded(rows):
        return by_key(dii.decode_images(rows, size=32, transform=augment))

    want = decoded(table)
    assert len(want) > 40
    shuffled = table.sample(frac=1, random_state=3)
    for rows in (shuffled, shuffled.iloc[:1], shuffled.iloc[10:17], table.iloc[::3]):
        for key, array in decoded(rows).items():
            np.testing.assert_array_equal(array, want[key], key)


@pytest.mark.newest
@pytest.mark.slow
def test_a_partition_under_guard_has_the_same_pictures(shards, monkeypatch):
    want = by_key(read(shards[0]).compute())
    monkeypatch.setattr(crash_log, "has_crashed", lambda: True)
    for key, array in by_key(read(shards[0]).compute()).items():
        np.testing.assert_array_equal(array, want[key], key)


def shuffle_in_batch(images):
    from nvidia.dali import fn

    return fn.permute_batch(images, indices=fn.batch_permutation())


def test_a_transform_that_mixes_images_is_refused(encoded):
    with pytest.raises(dii.ArgumentError, match="mixes the images"):
        pictures(encoded, range(4), shuffle_in_batch)


def test_an_image_that_fails_without_neighbours_is_named(encoded):
    """It is transformed with others that have none, of which any may be at fault."""

    def crop_of_ten(images):
        from nvidia.dali import fn

        images = fn.slice(images, 0, 10, axes=(1,))
        return fn.brightness(images, brightness=fn.random.uniform(range=(0.2, 1.8)))

    small = save(Image.new("RGB", (9, 20)), "PNG")
    files = [small if row == 5 else encoded for row in range(8)]
    images = EncodedImages(
        [read_header(data, 1 << 20) for data in files],
        files.__getitem__,
        lambda row: Origin("a.tar", 100 * row, f"sample {row}"),
    )
    with pytest.raises(dii.FunctionError, match=r"a\.tar: transform= fails for sample 5"):
        decode(images, [DecodeSpec(transform=crop_of_ten)], [HostPixels(0)])
