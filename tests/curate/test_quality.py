"""Signals of quality beside Pillow's and NumPy's own, and what they cost to ask."""

from importlib.metadata import distribution
from pathlib import Path

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from counted import work  # noqa: F401
from device_arrays import DeviceArray, device_library
from PIL import Image, ImageFilter, ImageStat

import dask_image_ingest as dii
from dask_image_ingest.curate import find_issues, measure_quality, summarize_issues
from dask_image_ingest.curate.quality import PIXEL_SIGNALS, pixel_signals

COLUMNS = [f"quality.{name}" for name in (*PIXEL_SIGNALS, "aspect", "area")]


@pytest.fixture(scope="module")
def ddf(shards):
    return dii.read_webdataset_images(shards, backend="pandas")


def signals(image):
    pixels = np.asarray(image)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    return {name: float(value) for name, (value,) in pixel_signals([pixels[None]], np).items()}


def skimage_photo(name):
    folder = Path(str(distribution("scikit-image").locate_file("skimage/data")))
    return Image.open(folder / f"{name}.png").convert("RGB")


def flat(*colour, size=(40, 30)):
    return Image.new("RGB", size, colour)


def test_brightness_and_contrast_are_those_of_the_formula(photos):
    for photo in photos:
        pixels = photo.pixels.astype(float)
        bright = np.sqrt(pixels**2 @ [0.241, 0.691, 0.068]) / 255
        found = signals(photo.pixels)
        # Levels are whole, and larger photographs are sampled.
        assert found["dark"] == pytest.approx(np.percentile(bright, 99), abs=0.03)
        assert found["light"] == pytest.approx(1 - np.percentile(bright, 5), abs=0.03)
        assert found["contrast"] == pytest.approx(bright.std(), abs=0.01)


def test_entropy_is_pillows(photos):
    for photo in photos:
        image = Image.fromarray(photo.pixels)
        # Larger photographs are sampled.
        off = 1e-4 if image.width * image.height < 32_768 else 0.04
        assert signals(image)["entropy"] == pytest.approx(image.entropy(), abs=off)
        gray = image.convert("L")
        assert signals(gray)["entropy"] == pytest.approx(gray.entropy(), abs=off)


def patterns(height, width, random):
    """Pictures with a regular pattern: ordered dither, halftone, scan lines, hatching, a frame."""
    y, x = np.mgrid[:height, :width]
    smooth = 127 + 60 * np.sin(x / 37) + 60 * np.cos(y / 53)
    period, other = random.integers(2, 17, 2)
    matrix = random.permutation(period * other).reshape(period, other) * 255 / (period * other)
    yield np.where(smooth > matrix[y % period, x % other], 255, 0)
    size = period**2 + other**2
    dots = [((period * a + other * b) % size / size - 0.5) ** 2 for a, b in ((x, y), (-y, x))]
    yield np.where(smooth > 510 * sum(dots), 255, 0)
    yield np.where(y % period < max(period // 3, 1), 255, 20)
    yield np.where(x % period < max(period // 3, 1), 255, 20)
    yield np.where((period * x + other * y) % 29 == 0, 255, 20)
    frame = np.full((height, width), 120)
    frame[[15, -16]] = frame[:, [15, -16]] = 255
    yield frame


def test_no_pattern_changes_what_all_pixels_say(random):
    for height, width in [(512, 512), *random.integers(180, 900, (8, 2))]:
        for pattern in patterns(height, width, random):
            image = Image.fromarray(pattern.astype(np.uint8)).convert("RGB")
            found, bright = signals(image), pattern / 255
            expected = {
                "dark": np.percentile(bright, 99, method="inverted_cdf"),
                "light": 1 - np.percentile(bright, 5, method="inverted_cdf"),
                "contrast": bright.std(),
                "entropy": image.entropy(),
            }
            for name, value in expected.items():
                assert found[name] == pytest.approx(value, abs=0.02), (name, height, width)


def test_sharpness_is_the_variance_of_the_laplacian(photos):
    for photo in photos:
        image = Image.fromarray(photo.pixels)
        gray = np.asarray(image.convert("L"), float)
        inner = gray[1:-1, 1:-1]
        edges = 4 * inner - gray[:-2, 1:-1] - gray[2:, 1:-1] - gray[1:-1, :-2] - gray[1:-1, 2:]
        whole = min(gray.shape) <= 64
        # A taller image is measured in bands of rows.
        assert signals(image)["sharpness"] == pytest.approx(edges.var(), rel=0.01 if whole else 0.5)


def test_directional_sharpness_is_the_least_of_second_derivatives(photos):
    for photo in photos:
        gray = np.asarray(Image.fromarray(photo.pixels).convert("L"), float)
        whole = min(gray.shape) <= 64
        y, x = np.gradient(gray)
        scale = (x[1:-1, 1:-1] ** 2 + y[1:-1, 1:-1] ** 2).mean() / 2 + 5
        by_axis = [(np.diff(gray, 2, axis=axis)[1:-1, 1:-1] ** 2).mean() / scale for axis in (0, 1)]
        found = signals(photo.pixels)["directional_sharpness"]
        # Two of the 16 directions; a taller image is measured in bands of rows.
        assert 0 < found <= min(by_axis) * (1.01 if whole else 1.5)


@pytest.mark.parametrize("angle", [0, 30, 45, 90, 135])
def test_what_moved_is_blurry_in_any_direction_and_a_drawing_is_not(angle):
    blurry = []
    for name in ("astronaut", "coffee", "motorcycle_left", "chelsea"):
        photo = skimage_photo(name)
        photo.thumbnail((500, 500))
        steps = np.linspace(-10, 10, 41)
        shifts = [(np.cos(np.radians(angle)) * s, np.sin(np.radians(angle)) * s) for s in steps]
        moved = [
            photo.transform(
                photo.size, Image.Transform.AFFINE, (1, 0, x, 0, 1, y), Image.Resampling.BILINEAR
            )
            for x, y in shifts
        ]
        mean = np.mean([np.asarray(each)[12:-12, 12:-12] for each in moved], axis=0)
        blurry += [signals(photo), signals(Image.fromarray(mean.astype(np.uint8)))]
    rows, columns = np.mgrid[:300, :400]
    along = np.cos(np.radians(angle)) * columns + np.sin(np.radians(angle)) * rows
    blurry.append(signals(Image.fromarray((along // 20 % 2 * 255).astype(np.uint8)).convert("RGB")))
    found = find_issues(pd.DataFrame(blurry).add_prefix("quality."))["issue.blurry"]
    assert found.tolist() == [False, True] * 4 + [False]


def test_clipped_pixels_are_counted_but_not_paper_ink_and_pure_colours():
    picture = np.full((100, 100, 3), 120, np.uint8)
    picture[:20] = 255, 250, 90  # light
    picture[20:30] = 140, 0, 60  # dark
    for number, colour in enumerate([(255,) * 3, (0,) * 3, (255, 0, 0), (0, 255, 255)]):
        picture[30 + number] = colour
    found = signals(picture)
    assert found["clipped_light"] == pytest.approx(0.2)
    assert found["clipped_dark"] == pytest.approx(0.1)
    assert signals(picture[..., 0])["clipped_light"] == 0
    over = skimage_photo("coffee").point(lambda level: min(level * 2.5, 255))
    found = find_issues(pd.DataFrame([signals(over)]).add_prefix("quality."))
    assert found["issue.light"].tolist() == [True]


def test_light_of_a_chart_is_that_of_nearly_its_share_of_ink(random):
    for share in (0.04, 0.045, 0.055, 0.06):
        page = np.full(700 * 900, 255, np.uint8)
        page[random.permutation(len(page))[: int(share * len(page))]] = 0
        assert signals(page.reshape(700, 900))["light"] == (0 if share < 0.05 else 1)


def test_what_is_blurred_is_blurry_and_what_is_sharp_is_not(random):
    for name in ("astronaut", "coffee", "motorcycle_left", "chelsea"):
        photo = skimage_photo(name)
        photo.thumbnail((500, 500))
        for sigma in (0, 3, 5, 10):
            blurred = photo.filter(ImageFilter.GaussianBlur(sigma))
            table = pd.DataFrame([signals(blurred)]).add_prefix("quality.")
            assert find_issues(table)["issue.blurry"].tolist() == [sigma > 0], (name, sigma)


def test_blur_is_cleanvisions_formula_on_a_small_picture(photos):
    for photo in photos:
        image = Image.fromarray(photo.pixels)
        ratio = max(image.size) / 64
        size = [max(int(side / ratio), 1) for side in image.size]
        gray = image.convert("L").resize(size, Image.Resampling.BICUBIC)
        edges = ImageStat.Stat(gray.filter(ImageFilter.FIND_EDGES)).var[0] ** 0.5
        spread = 1 - np.exp(-0.01 * np.std(gray.histogram()))
        expected = min(1 - np.exp(-0.01 * edges) + (spread if spread > 0.18 else 0), 1)
        assert signals(image)["blur"] == pytest.approx(expected, abs=0.01)


def test_pictures_made_bad_have_the_issue_and_good_ones_have_not(photos):
    image = Image.fromarray(photos[1].pixels).resize((300, 200))
    table = pd.DataFrame(
        [signals(each) for each in (
            image,
            image.point(lambda level: level * 0.25),
            flat(255, 255, 253),
            image.filter(ImageFilter.GaussianBlur(6)),
            flat(10, 200, 30),
            image.convert("L").convert("RGB"),
        )]
    ).add_prefix("quality.")  # fmt: skip
    table["quality.aspect"] = [0.66, 0.66, 0.75, 0.66, 0.75, 0.2]
    table["quality.area"] = [60_000.0] * 6
    found = find_issues(table).filter(like="issue.")
    found.columns = found.columns.str.removeprefix("issue.")
    names = [set(found.columns[row]) for row in found.to_numpy(bool)]
    assert names[0] == set()
    assert "dark" in names[1]  # a quarter of the contrast has a sixteenth of the sharpness
    assert {"light", "low_information", "grayscale"} <= names[2]
    assert "blurry" in names[3]
    assert "low_information" in names[4]
    assert "grayscale" not in names[4]
    assert names[5] == {"grayscale", "odd_aspect"}


def test_pictures_of_any_shape_have_all_signals():
    for shape in [(1, 1, 3), (1, 300, 3), (2, 2, 1), (129, 5, 3)]:
        found = pixel_signals([np.full((1, *shape), 255, np.uint8)], np)
        assert set(found) == set(PIXEL_SIGNALS)
        assert np.isfinite(list(found.values())).all()
        assert (found["dark"], found["light"], found["grayscale"]) == (1, 0, 1)


def test_the_code_is_the_same_on_a_device_and_meets_no_array_of_the_host(photos):
    groups = [photo.pixels[None] for photo in photos[:5]]
    groups.append(np.stack([photo.pixels[:70, :90] for photo in photos]))
    expected = pixel_signals(groups, np)
    found = pixel_signals([DeviceArray(group) for group in groups], device_library)
    for name in PIXEL_SIGNALS:
        # The host's resizer rounds its weights: some pixels of a thumbnail are one level off.
        off = {"rtol": 0, "atol": 0.01} if name == "blur" else {"rtol": 1e-6}
        np.testing.assert_allclose(found[name].get(), expected[name], **off)


def test_a_batch_of_one_shape_and_one_of_many_give_the_same(photos):
    crops = [photo.pixels[:80, :80] for photo in photos]
    large = [np.tile(crop, (3, 4, 1)) for crop in crops]  # of which a sample is taken
    for images in (crops, large):
        together = pixel_signals([np.stack(images)], np)
        for number, image in enumerate(images):
            alone = signals(image)
            for name in PIXEL_SIGNALS:
                assert together[name][number] == pytest.approx(alone[name], rel=1e-6, abs=1e-5)
            # By this, rows are ranked, which must not depend on partitions.
            assert together["fine_detail"][number] == alone["fine_detail"]


def test_aspect_and_area_decode_nothing(ddf, photos, work):  # noqa: F811
    shaped = measure_quality(ddf)[["quality.aspect", "quality.area"]].compute()
    sizes = [Image.fromarray(photo.pixels).size for photo in photos]
    aspects = [min(w / h, h / w) for w, h in sizes]
    assert shaped["quality.aspect"].tolist() == pytest.approx(aspects)
    assert shaped["quality.area"].tolist() == [w * h for w, h in sizes]
    assert work["decoded"] == 0


def test_a_filter_on_other_columns_is_asked_before_the_decode(ddf, work):  # noqa: F811
    judged = measure_quality(ddf)
    wide = judged[(judged.cls == 1) & (judged["quality.aspect"] < 0.9)].compute()
    assert 0 < len(wide) == work["decoded"]


def test_filters_after_issues_decode_the_rows_that_they_keep(ddf, work):  # noqa: F811
    found, all_rows = find_issues(ddf), find_issues(ddf.compute())
    filters = {
        "header": lambda f: f[f.cls == 1],
        "odd aspect": lambda f: f[f["issue.odd_aspect"] | (f.cls == 1)],
        "odd size": lambda f: f[~f["issue.odd_size"] & (f.cls == 1)],
        "pixels, too": lambda f: f[(f.cls == 1) & (f["quality.dark"] >= 0)],
        "some columns": lambda f: f.drop(columns=["issue.dark", "txt"]).loc[f.cls == 1],
    }
    for name, keep in filters.items():
        work.clear()
        kept, expected = keep(found).compute(), keep(all_rows)
        # The limits of odd sizes are those of all rows.
        columns = [c for c in expected.columns if c != "image"]
        pd.testing.assert_frame_equal(kept[columns], expected[columns], obj=name)
        assert 0 < len(kept) == work["decoded"] < 24, name


def test_limits_of_odd_sizes_do_not_wait_for_pixels(ddf, work):  # noqa: F811
    find_issues(ddf)["issue.odd_size"].compute()
    assert work["decoded"] == 0
    walks = work["walks"]
    find_issues(ddf).compute()
    assert work["decoded"] == 24
    # Headers are scanned beside the reads of pixels, which are not held until all limits are known.
    assert work["walks"] - walks == 2 * ddf.npartitions


def test_signals_and_issues_together_decode_each_image_once(ddf, work):  # noqa: F811
    find_issues(measure_quality(ddf)).drop(columns="image").compute()
    assert work["decoded"] == 24


def test_lazy_and_eager_frames_give_the_same_columns(ddf):
    lazy, eager = find_issues(ddf), find_issues(ddf.compute())
    assert list(lazy.columns) == list(eager.columns)
    added = [name for name in lazy.columns if name.startswith(("quality.", "issue."))]
    computed = lazy[added].compute()
    pd.testing.assert_frame_equal(computed, eager[added])
    assert computed.dtypes.to_dict() == lazy[added].dtypes.to_dict()


def test_issues_bring_all_signals_but_two_that_none_uses(ddf):
    found = [name for name in find_issues(ddf).columns if name.startswith("quality.")]
    assert sorted([*found, "quality.blur", "quality.fine_detail"]) == sorted(COLUMNS)
    assert set(find_issues(measure_quality(ddf)).columns) > set(COLUMNS)
    # A signal of its own is enough for a frame without images.
    alone = ddf[["__key__"]].compute().assign(**{"quality.blur": 0.5})
    assert find_issues(alone).equals(alone)


def test_signals_that_are_missing_are_made_and_none_is_dropped(ddf):
    expected = find_issues(ddf).compute().filter(like="issue.")
    partly = measure_quality(ddf).drop(
        columns=["quality.dark", "quality.grayscale", "quality.aspect"]
    )
    found = find_issues(partly)
    assert {"quality.dark", "quality.grayscale", "quality.aspect"} <= set(found.columns)
    pd.testing.assert_frame_equal(found.compute().filter(like="issue."), expected)
    # Without images nothing can be made.
    alone = find_issues(measure_quality(ddf)[["quality.dark", "quality.area"]])
    assert [name for name in alone.columns if name.startswith("issue.")] == [
        "issue.dark",
        "issue.odd_size",
    ]


def test_a_second_call_replaces_the_columns_of_the_first(ddf):
    once = measure_quality(ddf)
    twice = measure_quality(once.assign(**{"quality.dark": -1.0}))
    assert sorted(twice.columns) == sorted(once.columns)
    columns = [name for name in once.columns if name.startswith("quality.")]
    pd.testing.assert_frame_equal(twice[columns].compute(), once[columns].compute())


def test_shapes_come_from_the_pixels_where_no_header_tells_them(ddf):
    expected = measure_quality(ddf)[COLUMNS].compute()
    found = measure_quality(ddf.drop(columns=["height", "width"]))[COLUMNS].compute()
    pd.testing.assert_frame_equal(found, expected, check_exact=True)


def test_odd_sizes_are_numpys_fence_whatever_the_partitions_are(random):
    sides = random.integers(300, 400, (500, 2))
    sides[:3] = [[5000, 4000], [8, 9], [1, 1]]
    table = pd.DataFrame(sides, columns=["height", "width"])
    side = np.sqrt(table.height * table.width)
    low, high = np.percentile(side, [25, 75])
    expected = (side < low - 3 * (high - low)) | (side > high + 3 * (high - low))
    assert expected[:3].all()
    for count in (1, 7):
        lazy = find_issues(dd.from_pandas(table, npartitions=count))
        assert lazy["issue.odd_size"].compute().tolist() == expected.tolist()
        assert lazy.head(2)["issue.odd_size"].tolist() == [True, True]


def test_the_summary_counts_what_the_columns_say(ddf):
    table = find_issues(ddf).compute()
    summary = summarize_issues(ddf)
    for name, row in summary.iterrows():
        assert row["rows"] == table[f"issue.{name}"].sum()
        assert row["unknown"] == table[f"issue.{name}"].isna().sum()
    assert summarize_issues(table).equals(summary)


def test_an_image_that_cannot_be_decoded_has_no_signals(tmp_path):
    from few_images import write_bad_shard

    table = find_issues(dii.read_webdataset_images(write_bad_shard(tmp_path), backend="pandas"))
    table = table.compute()
    assert table["quality.sharpness"].isna().tolist() == table["error"].notna().tolist()
    assert table["issue.dark"].isna().tolist() == table["error"].notna().tolist()
    assert summarize_issues(table)["unknown"]["dark"] == table["error"].notna().sum() == 2


def test_what_it_cannot_judge_is_refused_with_what_to_do(ddf):
    for function in (measure_quality, find_issues):
        with pytest.raises(dii.ArgumentError, match="neither images nor"):
            function(ddf[["__key__", "height"]])
    with pytest.raises(dii.ArgumentError, match="pass a Dask, pandas or cuDF dataframe"):
        measure_quality([1])
    alpha = ddf.images.map_batches(
        lambda images: [np.dstack([image, image[..., :1]]) for image in images],
        {"image": "image"},
    )
    with pytest.raises(dii.FunctionError, match="4 channels"):
        measure_quality(alpha).compute()
