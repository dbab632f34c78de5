"""Pictures decoded at a reduced scale, next to the same ones decoded in full."""

import io

import numpy as np
import pytest
import simplejpeg
from photo_shards import encode, write_tar
from PIL import Image
from skimage import data

from dask_image_ingest import read_webdataset_images
from dask_image_ingest.decode import scaled_jpeg
from dask_image_ingest.errors import ArgumentError

pytest.importorskip("nvidia.dali", reason="nothing is decoded without DALI")


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    """A photograph of 2048 × 1536."""
    return Image.fromarray(data.astronaut()).crop((0, 0, 512, 384)).resize((2048, 1536))


def read(path, **options) -> list:
    frame = read_webdataset_images(path, backend="pandas", **options).compute()
    assert frame.error.isna().all()
    return frame.images.arrays()


def psnr(ours: np.ndarray, theirs: np.ndarray) -> float:
    assert ours.shape == theirs.shape
    return float(10 * np.log10(255**2 / np.mean((ours.astype(float) - theirs) ** 2)))


def turned(picture: Image.Image, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[274] = orientation
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=92, exif=exif)
    return file.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("resize", ["stretch", "crop", "pad"])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_what_comes_out_is_the_full_way_but_for_little(tmp_path, picture, resize, mode):
    shard = write_tar(tmp_path / "a.tar", {"a.jpg": encode(picture)})
    options = {"size": (200, 260), "resize": resize, "mode": mode}
    (full,) = read(shard, **options)
    (scaled,) = read(shard, **options, scaled_decode=True)
    assert psnr(scaled, full) > 37
    assert not np.array_equal(scaled, full)


def test_the_orientation_of_exif_is_applied(tmp_path, picture):
    picture = picture.resize((800, 600))
    shard = write_tar(
        tmp_path / "a.tar", {f"{turn}.jpg": turned(picture, turn) for turn in range(1, 9)}
    )
    full = read(shard, size=(150, 180), resize="crop")
    scaled = read(shard, size=(150, 180), resize="crop", scaled_decode=True)
    for ours, theirs in zip(scaled, full, strict=True):
        assert psnr(ours, theirs) > 37


@pytest.mark.slow
def test_images_that_can_not_be_scaled_are_decoded_in_full(tmp_path, picture):
    members = {
        "small.jpg": encode(picture.resize((300, 200))),
        "large.jpg": encode(picture),
        "other.png": encode(picture.resize((640, 480)), "png"),
        "grey.jpg": encode(picture.convert("L")),
        "cmyk.jpg": encode(picture.resize((900, 700)).convert("CMYK")),
    }
    shard = write_tar(tmp_path / "a.tar", members)
    full = dict(zip(members, read(shard, size=192), strict=True))
    scaled = dict(zip(members, read(shard, size=192, scaled_decode=True), strict=True))
    for name in ("small.jpg", "other.png", "cmyk.jpg"):
        np.testing.assert_array_equal(scaled[name], full[name])
    for name in ("large.jpg", "grey.jpg"):
        assert not np.array_equal(scaled[name], full[name])
        assert psnr(scaled[name], full[name]) > 37


def test_a_bad_image_is_an_error_row_as_ever(tmp_path, picture):
    good = encode(picture)
    middle = len(good) // 2
    damaged = good[:middle] + b"\xff\xd8\xff\xc0" * 30 + good[middle + 120 :]
    shard = write_tar(
        tmp_path / "a.tar", {"a.jpg": good, "b.jpg": good[:5000], "c.jpg": damaged, "d.jpg": good}
    )
    frames = [
        read_webdataset_images(shard, backend="pandas", size=128, scaled_decode=scaled).compute()
        for scaled in (False, True)
    ]
    assert list(frames[0].error.isna()) == list(frames[1].error.isna())
    assert frames[1].error.isna().iloc[3]
    assert frames[1].error.iloc[1].startswith("truncated")


def test_arguments_that_do_not_go_together_are_refused(tmp_path, picture):
    shard = write_tar(tmp_path / "a.tar", {"a.jpg": encode(picture.resize((64, 48)))})
    with pytest.raises(ArgumentError, match="size="):
        read_webdataset_images(shard, backend="pandas", scaled_decode=True)
    with pytest.raises(ArgumentError, match="shape"):
        read_webdataset_images(
            shard, backend="pandas", size=32, resize="shorter", scaled_decode=True
        )


@pytest.mark.slow
@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("subsampling", [0, 2])
def test_the_worst_photograph_is_near_at_every_scale_and_size(tmp_path, factor, subsampling):
    """Sizes that are no multiple of a block, turned in all eight ways, at the least margin."""
    rng = np.random.default_rng(factor)
    for name in ("astronaut", "chelsea", "coffee", "rocket", "colorwheel"):
        pixels = Image.fromarray(getattr(data, name)()[..., :3])
        members, sizes = {}, set()
        width, height = (edge - int(rng.integers(1, 16)) for edge in pixels.size)
        size = (int(height / factor / 1.5), int(width / factor / 1.5))
        for orientation in range(1, 9):
            exif = Image.Exif()
            exif[274] = orientation
            file = io.BytesIO()
            cut = pixels.crop((0, 0, width, height))
            cut = cut.transpose(Image.Transpose.TRANSPOSE) if orientation > 4 else cut
            cut.save(file, "JPEG", quality=90, subsampling=subsampling, exif=exif)
            members[f"{orientation}.jpg"] = file.getvalue()
            sizes.add(cut.size)
        shard = write_tar(tmp_path / f"{name}.tar", members)
        decoded = scaled_shapes(shard, size)
        assert decoded == {tuple(-(-edge // factor) for edge in shape) for shape in sizes}, name
        for ours, theirs in zip(
            read(shard, size=size, scaled_decode=True), read(shard, size=size), strict=True
        ):
            assert psnr(ours, theirs) >= 35, name


def scaled_shapes(shard, size) -> set:
    """Widths and heights at which JPEGs of a shard are decoded, before they are turned."""
    found, decode = set(), scaled_jpeg.decode_reduced

    def counted(*args):
        picture = decode(*args)
        found.add(picture.shape[1::-1])
        return picture

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaled_jpeg, "decode_reduced", counted)
        read(shard, size=size, scaled_decode=True)
    return found


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("factor", [2, 4, 8])
def test_a_reduced_picture_is_that_of_another_binding_of_libjpeg(picture, factor, mode):
    encoded = encode(picture.crop((0, 0, 501, 403)))
    height, width = -(-403 // factor), -(-501 // factor)
    wanted = simplejpeg.decode_jpeg(
        encoded, "GRAY" if mode == "L" else "RGB", min_height=height, min_width=width
    )
    np.testing.assert_array_equal(scaled_jpeg.decode_reduced(encoded, mode, factor), wanted)
