"""Augmentations of pixels: torchvision's operations and magnitudes, the same in every batch."""

from __future__ import annotations

import itertools
import pickle
from collections import Counter

import numpy as np
import pytest
from corpus import save
from photo_shards import write_tar
from PIL import Image, ImageEnhance
from synthetic import encode, photograph

import dask_image_ingest as dii
from dask_image_ingest.decode.augment import UNCHANGED, Step, draw_steps
from dask_image_ingest.decode.augment_pixels import apply_steps
from dask_image_ingest.decode.buffers import Origin
from dask_image_ingest.errors import ArgumentError

pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")

HEIGHT, WIDTH = 61, 90
RAND = dii.RandAugment()
JITTER = dii.ColorJitter(0.4, 0.4, 0.4, 0.1)

# Torchvision's tables (``_augmentation_space``): the largest magnitude, and whether it has a sign.
SIGNED = {
    "ShearX": 0.3,
    "ShearY": 0.3,
    "TranslateX": 150 / 331 * WIDTH,
    "TranslateY": 150 / 331 * HEIGHT,
    "Rotate": 30,
    **dict.fromkeys(("Brightness", "Color", "Contrast", "Sharpness"), 0.9),
}
UNSIGNED = ("Identity", "Posterize", "Solarize", "AutoContrast", "Equalize")


def colours(seed):
    """A picture of all colours, also those that no photograph has."""
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (9, 9, 3), dtype=np.uint8)
    return np.asarray(Image.fromarray(small).resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC))


def drawn(augment, number, shape=(HEIGHT, WIDTH), shard="a.tar"):
    return draw_steps([augment], *shape, Origin(shard, number, ""))


def applied(image, steps):
    return apply_steps(np.array(image), steps)


def test_flips_and_erased_rectangles_are_exact():
    erasing = dii.RandomErasing(p=1, value=(9, 80, 255))
    for number in range(50):
        image = colours(number)
        flip = drawn(dii.RandomHorizontalFlip(p=1), number)
        np.testing.assert_array_equal(applied(image, flip), image[:, ::-1])
        (step,) = drawn(erasing, number)
        top, left, height, width = step.values[:4]
        expected = image.copy()
        expected[top : top + height, left : left + width] = (9, 80, 255)
        np.testing.assert_array_equal(applied(image, [step]), expected)
        assert 0 <= top <= HEIGHT - height
        assert 0 <= left <= WIDTH - width
        # Within the rounding of two edges.
        assert 0.02 * 0.8 <= height * width / (HEIGHT * WIDTH) <= 0.33 * 1.05
        assert 0.3 * 0.8 <= height / width <= 3.3 * 1.25


def test_chances_are_those_that_were_asked_for():
    """Of 2,000 images; 4 standard deviations, more by chance once in 16,000 times."""
    for augment in (dii.RandomHorizontalFlip(0.3), dii.RandomErasing(0.3)):
        changed = sum(drawn(augment, n) != [UNCHANGED] for n in range(2000))
        assert abs(changed / 2000 - 0.3) < 4 * (0.21 / 2000) ** 0.5
    orders = Counter(tuple(step.operation for step in drawn(JITTER, n)) for n in range(2400))
    assert len(orders) == 24
    assert max(orders.values()) < 100 + 4 * 10
    shifts = [step.values[0] for n in range(2000) for step in drawn(JITTER, n) if step[0] == "Hue"]
    assert -0.1 <= min(shifts) < -0.099
    assert 0.099 < max(shifts) <= 0.1


def test_an_operation_of_rand_augment_is_as_likely_as_each_other_and_has_both_signs():
    def kind(step):
        if step.operation != "Affine":
            return step
        a, b, c, d, e, f = step.values
        if (a, e) != (1, 1):
            return Step("Rotate", (round(np.degrees(np.arcsin(d)), 3),))
        return next(
            Step(name, (value,))
            for name, value in zip(
                ("ShearX", "TranslateX", "ShearY", "TranslateY"), (b, c, d, f), strict=True
            )
            if value
        )

    steps = [kind(step) for number in range(7000) for step in drawn(RAND, number)]
    found = Counter(step.operation for step in steps)
    assert found.keys() == {*SIGNED, *UNSIGNED}
    assert all(abs(count - 1000) < 4 * 31 for count in found.values())
    for name, most in SIGNED.items():
        values = Counter(step.values[0] for step in steps if step.operation == name)
        assert len(values) == 2
        assert min(values.values()) > 380
        magnitude = most * 9 / 30
        middle = 1 if most == 0.9 else 0
        expected = int(magnitude) if name.startswith("Translate") else magnitude
        assert sorted(values) == pytest.approx([middle - expected, middle + expected], abs=1e-3)


def test_colour_jitter_is_pillows_enhancement():
    enhance = {
        "Brightness": ImageEnhance.Brightness,
        "Contrast": ImageEnhance.Contrast,
        "Color": ImageEnhance.Color,
    }
    jitter = dii.ColorJitter(0.4, (0.2, 0.5), 0.7)
    for number in range(30):
        pixels = Image.fromarray(colours(number))
        for step in (steps := drawn(jitter, number)):
            pixels = enhance[step.operation](pixels).enhance(step.values[0])
        np.testing.assert_array_equal(applied(colours(number), steps), np.asarray(pixels))


@pytest.mark.more
def test_torchvision_itself_gives_the_same_pixels():
    autoaugment = pytest.importorskip("torchvision.transforms.autoaugment", exc_type=ImportError)
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as theirs

    from dask_image_ingest.decode import augment as ours

    auto = autoaugment.AutoAugment()
    policy = [[(name, p, bin or 0) for name, p, bin in pair] for pair in auto.policies]
    assert policy == [list(pair) for pair in ours._POLICY]
    spaces = {
        31: autoaugment.RandAugment()._augmentation_space(31, (HEIGHT, WIDTH)),
        10: auto._augmentation_space(10, (HEIGHT, WIDTH)),
    }
    assert list(spaces[31]) == list(ours._RAND_AUGMENT)
    for bins, space in spaces.items():
        for name, (table, signed) in space.items():
            for bin, negative in itertools.product(range(bins), (False, True)):
                image = colours(bin)
                magnitude = float(table[bin]) if table.ndim else 0.0
                magnitude *= -1 if negative and signed else 1
                expected = autoaugment._apply_op(
                    Image.fromarray(image), name, magnitude, InterpolationMode.NEAREST, None
                )
                step = ours._step(name, bin, bins, negative, HEIGHT, WIDTH)
                made = applied(image, [step])
                np.testing.assert_array_equal(made, np.asarray(expected), f"{name} {bin}")
    for number, shift in enumerate(np.linspace(-0.5, 0.5, 41)):
        expected = theirs.adjust_hue(Image.fromarray(colours(number)), shift)
        made = applied(colours(number), [Step("Hue", (shift,))])
        np.testing.assert_array_equal(made, np.asarray(expected))


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    members = {}
    for number in range(40):
        image = photograph(60 + number, 110 - number, number)
        members[f"{number:02}.jpg"] = encode(image)
        mask = image.convert("L").point([value // 64 for value in range(256)])
        members[f"{number:02}.seg.png"] = save(mask, "PNG")
    return str(write_tar(tmp_path_factory.mktemp("augment") / "a.tar", members))


ALL = ["random_resized_crop", "random_horizontal_flip", JITTER, RAND, "auto_augment"]
ALL += [dii.RandomErasing()]


def read(shard, **options):
    options = {"size": (48, 64), "image": "jpg", "backend": "pandas", **options}
    return dii.read_webdataset_images(shard, **options)


def test_pixels_are_the_steps_of_the_sample_on_those_without(shard):
    plain = read(shard).compute(scheduler="sync").images.arrays()
    for mode in ("RGB", "L"):
        made = read(shard, augment=ALL[1:], mode=mode).compute(scheduler="sync").images.arrays()
        assert {array.shape for array in made} == {(48, 64, 3 if mode == "RGB" else 1)}
    others = [JITTER, RAND]
    made = read(shard, augment=others).compute(scheduler="sync").images.arrays()
    for number, (before, after) in enumerate(zip(plain, made, strict=True)):
        expected = before
        for each in others:
            expected = applied(expected, drawn(each, number, (48, 64), shard))
        np.testing.assert_array_equal(after, expected)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_neither_partition_batch_order_nor_epoch_of_another_row_changes_a_pixel(shard, mode):
    ddf = read(shard, augment=ALL, mode=mode)
    whole = ddf.compute(scheduler="sync")
    by_key = dict(zip(whole["__key__"], whole.images.arrays(), strict=True))
    small = read(shard, augment=ALL, mode=mode, partition_size="20 kB")
    assert small.npartitions > 3
    some = small[small.width > 90].compute(scheduler="sync")
    for key, array in zip(some["__key__"], some.images.arrays(), strict=True):
        np.testing.assert_array_equal(array, by_key[key])
    epochs = []
    for size, epoch in ((7, 0), (16, 0), (16, 1)):
        batches = ddf.images.iter_batches(
            size, columns=["__key__", "image"], shuffle=3, epoch=epoch
        )
        epochs.append(
            {k: i for b in batches for k, i in zip(b["__key__"], b["image"], strict=True)}
        )
    assert all(np.array_equal(epochs[0][key], epochs[1][key]) for key in by_key)
    assert sum(np.array_equal(epochs[0][key], epochs[2][key]) for key in by_key) < 3


def test_masks_move_with_their_photograph_and_keep_their_classes(shard):
    images = {"image": "jpg", "mask": dii.ImageColumn("seg.png", mode="labels")}
    augment = ["random_horizontal_flip", JITTER, RAND, "random_erasing"]
    frame = read(shard, image=images, augment=augment).compute(scheduler="sync")
    plain = read(shard, image=images).compute(scheduler="sync")
    for number, (before, after) in enumerate(
        zip(plain.images["mask"].arrays(), frame.images["mask"].arrays(), strict=True)
    ):
        assert {*np.unique(after)} <= {0, *np.unique(before)}
        moved = before[..., 0]
        for each in (dii.RandomHorizontalFlip(), RAND):
            for step in drawn(each, number, (48, 64), shard):
                if step.operation == "Flip":
                    moved = moved[:, ::-1]
                if step.operation == "Affine":
                    pixels = Image.fromarray(np.ascontiguousarray(moved))
                    size, affine = pixels.size, Image.Transform.AFFINE
                    moved = np.asarray(pixels.transform(size, affine, step.values))
        np.testing.assert_array_equal(after[..., 0], moved)


@pytest.mark.parametrize(
    "options",
    [
        {"size": None},
        {"size": 40, "resize": "shorter"},
        {"size": 40, "resize": "pad"},
        {"mode": "RGBA"},
        {"mode": "raw", "size": None},
        {"scaled_decode": True},
    ],
)
def test_a_flip_alone_goes_with_every_size_and_mode(shard, options):
    plain = read(shard, **options).compute(scheduler="sync").images.arrays()
    made = read(shard, augment="random_horizontal_flip", **options).compute(scheduler="sync")
    turned = 0
    for before, after in zip(plain, made.images.arrays(), strict=True):
        same = np.array_equal(before, after)
        assert same or np.array_equal(before[:, ::-1], after)
        turned += not same
    assert 8 < turned < 32


def test_boxes_and_the_region_follow_a_flip(shard):
    """A bright rectangle in each image, and its box."""
    members = {}
    for number in range(20):
        pixels = np.zeros((80, 100, 3), np.uint8)
        pixels[20:60, 10:30] = 255
        members[f"{number:02}.png"] = save(Image.fromarray(pixels), "PNG")
        members[f"{number:02}.json"] = b'{"boxes": [[10, 20, 30, 60]]}'
    path = write_tar(shard.replace("a.tar", "boxes.tar"), members)
    for options in (
        {"size": None, "augment": "random_horizontal_flip"},
        {"size": (41, 50), "resize": "pad", "augment": ["random_horizontal_flip", JITTER]},
        {"size": (80, 100), "augment": ["random_resized_crop", "random_horizontal_flip"]},
    ):
        frame = dii.read_webdataset_images(
            path,
            image="png",
            json_fields={"boxes": "list<list<float32>>"},
            boxes="json.boxes",
            backend="pandas",
            **options,
        ).compute(scheduler="sync")
        mirrored = set()
        rows = zip(frame.images.arrays(), frame["json.boxes"], frame["image.region"], strict=True)
        for array, boxes, region in rows:
            mirrored.add(region["flipped"])
            bright = np.argwhere(array[..., 0] > 127)
            if len(boxes) and len(bright):
                (left, top, right, bottom), *_ = boxes
                seen = (*bright.min(axis=0), *(bright.max(axis=0) + 1))
                np.testing.assert_allclose((top, left, bottom, right), seen, atol=2)
        assert mirrored == {True, False}
    with pytest.raises(ArgumentError, match="RandAugment"):
        dii.read_webdataset_images(
            path,
            image="png",
            json_fields={"boxes": "list<list<float32>>"},
            boxes="json.boxes",
            size=80,
            augment=["rand_augment"],
        )


def test_a_transform_follows(shard):
    from nvidia.dali import fn

    def darker(images):
        return fn.brightness(images, brightness=0.5)

    plain = read(shard, augment=ALL).compute(scheduler="sync").images.arrays()
    dark = read(shard, augment=ALL, transform=darker).compute(scheduler="sync").images.arrays()
    for before, after in zip(plain, dark, strict=True):
        assert np.abs(before / 2 - after).max() <= 1


def test_equal_lists_are_one_query_and_others_are_not(shard):
    names = [
        read(shard, augment=augment).expr._name
        for augment in (None, [], ALL, pickle.loads(pickle.dumps(ALL)), ALL[:-1], [JITTER], [RAND])
    ]
    assert names[0] == names[1]
    assert names[2] == names[3]
    assert len({*names}) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"augment": "color_jitter"}, "ColorJitter"),
        ({"augment": ["random_erasing", "random_resized_crop"]}, "comes first"),
        ({"augment": ["random_resized_crop"] * 2}, "comes first"),
        ({"augment": [JITTER], "mode": "RGBA"}, "mode='RGBA' takes no ColorJitter"),
        ({"augment": [RAND], "mode": "raw", "size": None}, "mode='raw' takes no RandAugment"),
        ({"augment": [JITTER], "size": None, "decode": False}, "augment= says how"),
    ],
)
def test_what_can_not_be_augmented_says_what_to_do(shard, options, message):
    with pytest.raises(ArgumentError, match=message):
        read(shard, **options)


@pytest.mark.parametrize(
    ("augment", "numbers"),
    [
        (dii.RandomHorizontalFlip, {"p": 1.5}),
        (dii.ColorJitter, {"brightness": -1}),
        (dii.ColorJitter, {"hue": 0.6}),
        (dii.ColorJitter, {"contrast": (0.5, 0.4)}),
        (dii.ColorJitter, {"saturation": float("nan")}),
        (dii.RandAugment, {"magnitude": 31}),
        (dii.RandAugment, {"num_ops": 0}),
        (dii.RandomErasing, {"scale": (0, 2)}),
        (dii.RandomErasing, {"ratio": (2, 1)}),
        (dii.RandomErasing, {"value": (1, 2)}),
        (dii.RandomErasing, {"value": "random"}),
    ],
)
def test_numbers_that_are_none_are_refused(augment, numbers):
    with pytest.raises(ArgumentError, match=next(iter(numbers))):
        augment(**numbers)
