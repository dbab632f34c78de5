"""Resizing on the CPU, next to torchvision, to Pillow's antialiased filters and to DALI."""

import corpus
import numpy as np
import pytest
from corpus import picture, save
from photo_shards import write_tar
from PIL import Image
from skimage import data
from witnesses import resized_by_dali, resized_by_pillow

import dask_image_ingest as dii
from dask_image_ingest.decode import DecodeSpec, resize
from dask_image_ingest.decode.resize import Interpolation, ResizedImage, resize_geometry

RESIZES = ("stretch", "crop", "pad", "shorter", "longer")

FILTERS: dict[Interpolation, Image.Resampling] = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}

# Values that lie half way between two may be rounded either way. Where the scale is a simple
# fraction and the image a slope, they are a tenth; the mean of fewer values tells nothing.
FEW = 500


def draw(rng: np.random.Generator, largest: int = 400) -> int:
    """An edge, as likely between 1 and 2 as between 200 and 400."""
    return int(2 ** rng.uniform(0, np.log2(largest)))


def draw_size(rng: np.random.Generator, how: str) -> tuple[int, ...]:
    return (draw(rng),) if how in ("shorter", "longer") else (draw(rng), draw(rng))


def draw_image(rng: np.random.Generator, channels: int) -> np.ndarray:
    """Noise, or something smooth; one in eight has an edge of one pixel."""
    height, width = draw(rng), draw(rng)
    if rng.random() < 1 / 8:
        height, width = (1, width) if rng.random() < 0.5 else (height, 1)
    if rng.random() < 0.5:
        return rng.integers(0, 256, (height, width, channels), np.uint8)
    few = rng.integers(0, 256, (3, 4, channels), np.uint8)
    return resized_by_pillow(few, (height, width), Image.Resampling.BICUBIC)


def resized(
    image: np.ndarray, size: tuple[int, ...], how: str, filter: Interpolation = "bilinear"
) -> np.ndarray:
    geometry = resize_geometry(*image.shape[:2], size, how)
    return np.asarray(ResizedImage(image, geometry, filter))


def as_pillow(
    image: np.ndarray, size: tuple[int, ...], how: str, filter: Interpolation = "bilinear"
) -> np.ndarray | None:
    """The whole image resized, then cut or padded; None where that is too much for a test."""
    whole, (height, width), (top, left) = resize_geometry(*image.shape[:2], size, how)
    if whole[0] * whole[1] > 1e6:
        return None
    pixels = resized_by_pillow(image, whole, FILTERS[filter])
    padded = np.pad(pixels, ((max(0, -top), height), (max(0, -left), width), (0, 0)))
    return padded[max(0, top) :, max(0, left) :][:height, :width]


@pytest.mark.slow
@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("how", RESIZES)
@pytest.mark.rounds(1, nightly=20)
def test_pixels_are_those_of_pillow(seed, how, filter, monkeypatch):
    rng = np.random.default_rng((seed, RESIZES.index(how)))
    large, small = [], []
    for _ in range(150):
        # In bands of rows, or at once.
        monkeypatch.setattr(resize, "_BAND_BYTES", int(rng.choice([300, 9000, 2**23])))
        image, size = draw_image(rng, int(rng.choice([1, 3]))), draw_size(rng, how)
        expected = as_pillow(image, size, how, filter)
        if expected is None:
            continue
        made = resized(image, size, how, filter)
        assert made.shape == expected.shape
        difference = np.abs(made.astype(int) - expected)
        where = f"{image.shape} to {size}, seed {seed}"
        assert difference.max() <= 1, where
        if difference.size < FEW:
            small.append(difference.reshape(-1))
        else:
            assert difference.mean() < 0.2, where
            large.append(difference.mean())
    assert len(large) > 30
    assert np.mean(large) < 0.02
    assert np.concatenate(small).mean() < 0.1


@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("channels", [2, 4, 5])
def test_any_number_of_channels_is_resized_as_each_would_be_alone(channels, filter):
    image = np.random.default_rng(0).integers(0, 256, (50, 70, channels), np.uint8)
    made = resized(image, (20, 30), "crop", filter)
    for channel in range(channels):
        alone = resized(image[..., channel : channel + 1], (20, 30), "crop", filter)
        np.testing.assert_array_equal(made[..., channel : channel + 1], alone)


def test_an_image_of_the_right_size_is_left_as_it_is():
    image = np.random.default_rng(0).integers(0, 256, (30, 40, 3), np.uint8)
    for size, how in (((30, 40), "stretch"), ((30, 40), "crop"), ((30,), "shorter")):
        np.testing.assert_array_equal(resized(image, size, how), image)
    np.testing.assert_array_equal(resized(image, (30, 20), "crop"), image[:, 10:30])


def test_a_crop_reads_no_more_than_it_shows(monkeypatch):
    there, sizes = resize.ImageData, []

    def counted(width, height, kind, pixels=None):
        sizes.append((height, width))
        return there(width, height, kind, pixels)

    monkeypatch.setattr(resize, "ImageData", counted)
    resized(np.zeros((400, 2000, 3), np.uint8), (100, 100), "crop")
    # The middle 400 columns and 2 on each side, to which the filter reaches.
    assert sizes == [(400, 404), (100, 100), (400, 100)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("how", RESIZES)
def test_every_image_of_the_corpus_is_the_full_one_resized(how, mode, tmp_path):
    images = corpus.images()
    for edges in ((1, 40), (40, 1), (1, 1), (3, 700), (700, 2)):
        images[f"edges-{edges[0]}-{edges[1]}"] = save(picture("RGB").resize(edges), "PNG")
    path = write_tar(tmp_path / "a.tar", {f"{name}.img": data for name, data in images.items()})
    size = 33 if how in ("shorter", "longer") else (29, 41)
    read = {"backend": "pandas", "mode": mode}
    full = dii.read_webdataset_images(path, **read).compute(scheduler="synchronous")
    small = dii.read_webdataset_images(path, size=size, resize=how, **read)
    small = small.compute(scheduler="synchronous")
    assert small["error"].equals(full["error"])
    compared, differences = 0, []
    for key, image, made in zip(
        full["__key__"], full.images.arrays(), small.images.arrays(), strict=True
    ):
        if image is None:
            continue
        expected = as_pillow(image, (size,) if isinstance(size, int) else size, how)
        assert made.shape == expected.shape, key
        difference = np.abs(made.astype(int) - expected)
        assert difference.max() <= 2, key
        assert difference.mean() < 0.1 or difference.size < FEW, key
        differences.append(difference.mean())
        compared += 1
    assert compared > 100
    assert np.mean(differences) < 0.05


@pytest.mark.parametrize("how", RESIZES)
def test_dali_makes_the_same_shapes(how):
    rng = np.random.default_rng(7)
    for _ in range(6):
        size = tuple(min(edge, 60) for edge in draw_size(rng, how))
        shapes = [(draw(rng, 120), draw(rng, 120)) for _ in range(100)]
        # Halves, where rounding decides.
        shapes += [(2 * size[0] * k, int(rng.integers(1, 60))) for k in (1, 2, 3)]
        kept = [s for s in shapes if np.prod(resize_geometry(*s, size, how).whole) < 10**5]
        images = [np.zeros((*s, 1), np.uint8) for s in kept]
        made = resized_by_dali(images, resize=how, size=size)
        assert [m.shape[:2] for m in made] == [resize_geometry(*s, size, how).shape for s in kept]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "filter"),
    [*((how, "bilinear") for how in RESIZES), ("crop", "bicubic"), ("crop", "lanczos")],
)
def test_dali_makes_the_same_pixels_except_at_the_edges(how, filter):
    """What a GPU resizes, by the same operators: beyond an edge DALI repeats its pixels."""
    photographs = [data.astronaut(), data.chelsea(), data.coffee(), data.rocket()]
    for edge in (24, 64, 224, 600):
        size = (edge,) if how in ("shorter", "longer") else (edge, edge)
        by_dali = resized_by_dali(photographs, resize=how, size=size, interpolation=filter)
        for image, other in zip(photographs, by_dali, strict=True):
            made = resized(image, size, how, filter)
            difference = np.abs(made.astype(int) - other)
            geometry = resize_geometry(*image.shape[:2], size, how)
            # Inside the outermost pixels of the image, which padding surrounds.
            edges, most = {"bilinear": (1, 2), "bicubic": (4, 14), "lanczos": (6, 25)}[filter]
            inside = [
                slice(max(0, -start) + edges, max(0, -start) + min(whole, result) - edges)
                for whole, result, start in zip(*geometry, strict=True)
            ]
            # Pillow cuts off what is below 0 and above 255 after the first pass, too.
            assert difference[*inside].max() <= most, edge
            assert difference.mean() <= 1, edge


def test_dali_does_not_resize_on_a_cpu():
    from dask_image_ingest.decode.planner import DecoderSet

    decoders = DecoderSet(DecodeSpec(size=(8, 9)))
    image = np.frombuffer(save(picture("RGB"), "JPEG"), np.uint8)
    (decoded,) = decoders.decode_alone([image])
    assert tuple(decoded.shape()) == (*picture("RGB").size[::-1], 3)
