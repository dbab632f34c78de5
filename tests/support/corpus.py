"""Images of every kind that a dataset may hold, made by code and always the same.

`images` are files that have pixels; `bad_images` are files that have none, with the code of the
error that says why. A name is its format, a dash, and the variant: ``png-grey-16``.
"""

from __future__ import annotations

import functools
import io
import struct
import zlib
from collections.abc import Iterator

import numpy as np
from handmade import (
    PNG_SIGNATURE,
    bmp,
    exif,
    insert_after_soi,
    jpeg_segment,
    png,
    png_chunk,
    rare_jpeg,
    rle8,
    webp_with_exif,
    without_segment,
)
from PIL import Image

HEIGHT, WIDTH = 45, 67


@functools.cache
def images() -> dict[str, bytes]:
    """Every good image by name."""
    return {
        **dict(_jpegs()),
        **dict(_pngs()),
        **dict(_webps()),
        **dict(_gifs()),
        **dict(_bmps()),
        **dict(_tiffs()),
        **dict(_others()),
    }


@functools.cache
def bad_images() -> dict[str, tuple[bytes, str]]:
    """Every bad image by name, with the code of its error."""
    return dict(_bad())


@functools.cache
def picture(mode: str = "RGB") -> Image.Image:
    """The picture in all the files: smooth, coloured, and different in each corner.

    Smooth, since decoders differ by rounding where colours jump; different in each corner, so that
    no flip or turn goes unseen.
    """
    y, x = np.mgrid[:HEIGHT, :WIDTH].astype(float)
    hill = 255 * np.exp(-((x - 20) ** 2 + (y - 12) ** 2) / 500)
    planes = [x * 255 / (WIDTH - 1), y * 255 / (HEIGHT - 1), hill, 255 - hill]
    rgba = np.stack(planes, axis=-1).round().astype(np.uint8)
    if mode == "RGBA":
        return Image.fromarray(rgba)
    if mode == "LA":
        return Image.merge("LA", (picture("L"), Image.fromarray(rgba[..., 3])))
    if mode == "P":
        return picture().quantize(64)
    if mode == "I;16":
        return Image.fromarray(deep("L")[..., 0])
    return Image.fromarray(rgba[..., :3]).convert(mode)


def deep(mode: str) -> np.ndarray:
    """The picture with 16 bits a sample; the low byte is not a copy of the high one."""
    grey = np.asarray(picture(mode), dtype=np.uint16).reshape(HEIGHT, WIDTH, -1)
    return grey * 256 + grey[::-1, ::-1]


def save(image: Image.Image, format: str, **options: object) -> bytes:
    """``image`` in ``format``, as Pillow writes it."""
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def _jpegs() -> Iterator[tuple[str, bytes]]:
    rgb = save(picture(), "JPEG", quality=90)
    for sampling in ("4:4:4", "4:2:2", "4:2:0"):
        image = save(picture(), "JPEG", quality=90, subsampling=sampling)
        yield "jpeg-" + sampling.replace(":", ""), image
    yield "jpeg-grey", save(picture("L"), "JPEG", quality=90)
    yield "jpeg-progressive", save(picture(), "JPEG", quality=90, progressive=True)
    yield "jpeg-progressive-grey", save(picture("L"), "JPEG", quality=90, progressive=True)
    yield "jpeg-restart", save(picture(), "JPEG", quality=90, restart_marker_blocks=2)
    yield "jpeg-keep-rgb", save(picture(), "JPEG", quality=90, keep_rgb=True)
    cmyk = save(picture("CMYK"), "JPEG", quality=95)
    yield "jpeg-cmyk", cmyk
    yield "jpeg-cmyk-no-adobe", without_segment(cmyk, 0xEE)
    yield "jpeg-no-jfif", without_segment(rgb, 0xE0)
    yield "jpeg-trailing-junk", rgb + b"junk after the end" * 500
    yield "jpeg-trailing-zeros", rgb + bytes(100_000)
    yield "jpeg-fill-bytes", rgb[:2] + b"\xff\xff\xff" + rgb[2:]
    yield "jpeg-icc-32k", save(picture(), "JPEG", icc_profile=bytes(32_000))
    yield "jpeg-comment-120k", insert_after_soi(rgb, *[jpeg_segment(0xFE, bytes(60_000))] * 2)
    yield "jpeg-xmp-orientation", insert_after_soi(rgb, jpeg_segment(0xE1, _xmp(6)))
    for orientation in range(1, 9):
        segment = jpeg_segment(0xE1, b"Exif\0\0" + exif(orientation))
        yield f"jpeg-exif-{orientation}", insert_after_soi(rgb, segment)
    big_endian = jpeg_segment(0xE1, b"Exif\0\0" + exif(6, ">"))
    yield "jpeg-exif-6-big-endian", insert_after_soi(rgb, big_endian)
    doubled = jpeg_segment(0xE1, b"Exif\0\0" * 2 + exif(6))
    yield "jpeg-exif-6-prefixed", insert_after_soi(rgb, doubled)
    yield "jpeg-exif-9", insert_after_soi(rgb, jpeg_segment(0xE1, b"Exif\0\0" + exif(9)))
    yield "jpeg-exif-cut", insert_after_soi(rgb, jpeg_segment(0xE1, b"Exif\0\0" + exif(6)[:15]))
    yield "jpeg-exif-after-xmp", insert_after_soi(rgb, jpeg_segment(0xE1, _xmp(1)), big_endian)
    thumbnail = exif(6) + save(picture().resize((16, 11)), "JPEG")
    with_thumbnail = jpeg_segment(0xE1, b"Exif\0\0" + thumbnail)
    yield "jpeg-exif-thumbnail", insert_after_soi(rgb, with_thumbnail)
    second = jpeg_segment(0xE1, b"Exif\0\0" + exif(3))
    yield "jpeg-exif-twice", insert_after_soi(rgb, big_endian, second)
    yield "jpeg-1x1", save(picture().resize((1, 1)), "JPEG")
    for rare in ("440", "411", "ycck", "arithmetic", "arithmetic-progressive", "lossless"):
        yield f"jpeg-{rare}", rare_jpeg(f"jpeg-{rare}")


def _xmp(orientation: int) -> bytes:
    return b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="%d"/>' % orientation


def _pngs() -> Iterator[tuple[str, bytes]]:
    grey = np.asarray(picture("L"))[..., None]
    rgb, rgba, la = (np.asarray(picture(mode)) for mode in ("RGB", "RGBA", "LA"))
    for depth in (1, 2, 4, 8):
        yield f"png-grey-{depth}", png(grey >> (8 - depth), depth, 0)
    yield "png-grey-16", png(deep("L"), 16, 0)
    yield "png-grey-alpha-8", png(la, 8, 4)
    yield "png-grey-alpha-16", png(deep("LA"), 16, 4)
    yield "png-rgb-8", png(rgb, 8, 2)
    yield "png-rgb-16", png(deep("RGB"), 16, 2)
    yield "png-rgba-8", png(rgba, 8, 6)
    yield "png-rgba-16", png(deep("RGBA"), 16, 6)
    yield "png-grey-trns", png(grey, 8, 0, chunks=((b"tRNS", b"\0\x50"),))
    yield "png-grey-1-trns", png(grey >> 7, 1, 0, chunks=((b"tRNS", b"\0\0"),))
    yield "png-grey-16-trns", png(deep("L"), 16, 0, chunks=((b"tRNS", b"\x50\x50"),))
    yield "png-rgb-trns", png(rgb, 8, 2, chunks=((b"tRNS", b"\0\x50" * 3),))
    for depth in (1, 2, 4, 8):
        colours = picture().quantize(2**depth)
        palette = (b"PLTE", bytes(colours.getpalette()[: 3 * 2**depth]))
        indices = np.asarray(colours)[..., None]
        yield f"png-palette-{depth}", png(indices, depth, 3, chunks=(palette,))
        alpha = (b"tRNS", bytes(range(2**depth)))
        yield f"png-palette-{depth}-trns", png(indices, depth, 3, chunks=(palette, alpha))
    yield "png-interlaced", png(rgb, 8, 2, interlaced=True)
    yield "png-interlaced-rgba", png(rgba, 8, 6, interlaced=True)
    yield "png-interlaced-grey-1", png(grey >> 7, 1, 0, interlaced=True)
    for orientation in range(1, 9):
        yield f"png-exif-{orientation}", png(rgb, 8, 2, chunks=((b"eXIf", exif(orientation)),))
    yield "png-exif-6-big-endian", png(rgb, 8, 2, chunks=((b"eXIf", exif(6, ">")),))
    twice = ((b"eXIf", exif(6)), (b"eXIf", exif(3)))
    yield "png-exif-twice", png(rgb, 8, 2, chunks=twice)
    prefixed = (b"eXIf", b"Exif\0\0" + exif(6))
    yield "png-exif-6-prefixed", png(rgb, 8, 2, chunks=(prefixed,))
    plain = png(rgb, 8, 2)
    yield "png-exif-6-after-idat", plain[:-12] + png_chunk(b"eXIf", exif(6)) + plain[-12:]
    yield "png-gamma", png(rgb, 8, 2, chunks=((b"gAMA", struct.pack(">I", 100_000)),))
    yield "png-icc", save(picture(), "PNG", icc_profile=bytes(5_000))
    yield "png-text", png(rgb, 8, 2, chunks=((b"tEXt", b"Comment\0" + b"x" * 9_000),))
    text = b"Comment\0\0" + zlib.compress(bytes(2 << 20))
    yield "png-text-2m", png(rgb, 8, 2, chunks=((b"zTXt", text),))
    broken = png_chunk(b"tEXt", b"Comment\0a")[:-4] + bytes(4)
    yield "png-text-checksum", plain[:33] + broken + plain[33:]
    yield "png-rgb-16-gamma", png(deep("RGB"), 16, 2, chunks=((b"gAMA", b"\0\0\xb1\x8f"),))
    yield "png-trailing-junk", plain + b"junk after the end" * 500
    yield "png-1x1", png(rgb[:1, :1], 8, 2)
    turned = picture().transpose(Image.Transpose.ROTATE_180)
    yield "png-animated", save(picture(), "PNG", save_all=True, append_images=[turned])
    yield (
        "png-animated-default-image",
        save(turned, "PNG", save_all=True, append_images=[picture()], default_image=True),
    )


def _webps() -> Iterator[tuple[str, bytes]]:
    lossy = save(picture(), "WEBP", quality=90)
    yield "webp-lossy", lossy
    yield "webp-lossless", save(picture(), "WEBP", lossless=True)
    yield "webp-lossy-alpha", save(picture("RGBA"), "WEBP", quality=90)
    yield "webp-lossless-alpha", save(picture("RGBA"), "WEBP", lossless=True, exact=True)
    yield "webp-grey", save(picture("L"), "WEBP", quality=90)
    yield "webp-icc", save(picture(), "WEBP", quality=90, icc_profile=bytes(5_000))
    yield "webp-trailing-junk", lossy + b"junk after the end" * 50
    for orientation in range(1, 9):
        yield f"webp-exif-{orientation}", webp_with_exif(lossy, WIDTH, HEIGHT, exif(orientation))
    prefixed = webp_with_exif(lossy, WIDTH, HEIGHT, b"Exif\0\0" + exif(6, ">"))
    yield "webp-exif-6-prefixed", prefixed
    turned = picture().transpose(Image.Transpose.ROTATE_180)
    yield "webp-animated", save(picture(), "WEBP", save_all=True, append_images=[turned])
    yield (
        "webp-animated-alpha",
        save(picture("RGBA"), "WEBP", save_all=True, append_images=[turned], lossless=True),
    )
    yield "webp-1x1", save(picture().resize((1, 1)), "WEBP")


def _gifs() -> Iterator[tuple[str, bytes]]:
    still = save(picture("P"), "GIF")
    yield "gif-still", still
    yield "gif-grey", save(picture("L"), "GIF")
    yield "gif-transparent", save(picture("P"), "GIF", transparency=0)
    turned = picture("P").transpose(Image.Transpose.ROTATE_180)
    yield "gif-animated", save(picture("P"), "GIF", save_all=True, append_images=[turned])
    yield "gif-no-trailer", still[:-1]


def _bmps() -> Iterator[tuple[str, bytes]]:
    for mode in ("1", "L", "P", "RGB", "RGBA"):
        yield f"bmp-{mode.lower()}", save(picture(mode), "BMP")
    rgb = np.asarray(picture())
    grey = np.asarray(picture("L"))
    greys = bytes(channel for value in range(256) for channel in (value, value, value, 0))
    yield "bmp-rle8", bmp([rle8(row.tobytes()) for row in grey], WIDTH, 8, greys, compression=1)
    blue_first = [row[:, ::-1].tobytes() for row in rgb]
    yield "bmp-top-down", bmp(blue_first, WIDTH, 24, top_down=True)
    yield "bmp-core-header", bmp(blue_first, WIDTH, 24, core=True)
    deep16 = (rgb >> 3).astype("<u2") @ np.array([1 << 10, 1 << 5, 1], dtype="<u2")
    yield "bmp-16bit", bmp([row.astype("<u2").tobytes() for row in deep16], WIDTH, 16)
    sixteen = bytes(channel for value in range(16) for channel in (value * 17,) * 3 + (0,))
    even = np.pad(grey >> 4, ((0, 0), (0, 1)))
    nibbles = [(row[::2] << 4 | row[1::2]).astype(np.uint8).tobytes() for row in even]
    yield "bmp-4bit", bmp(nibbles, WIDTH, 4, sixteen)


def _tiffs() -> Iterator[tuple[str, bytes]]:
    for mode in ("1", "L", "P", "LA", "RGB", "RGBA", "CMYK", "I;16", "I", "F", "YCbCr"):
        name = "tiff-" + mode.lower().replace(";", "")
        yield name, save(picture(mode), "TIFF")
    for compression in ("raw", "tiff_lzw", "tiff_adobe_deflate", "jpeg", "packbits"):
        yield f"tiff-rgb-{compression}", save(picture(), "TIFF", compression=compression)
    yield "tiff-group4", save(picture("1"), "TIFF", compression="group4")
    yield "tiff-big", save(picture(), "TIFF", big_tiff=True)
    for orientation in range(1, 9):
        image = save(picture(), "TIFF", tiffinfo={274: orientation})
        yield f"tiff-exif-{orientation}", image
    turned = picture().transpose(Image.Transpose.ROTATE_180)
    yield "tiff-pages", save(picture(), "TIFF", save_all=True, append_images=[turned])


def _others() -> Iterator[tuple[str, bytes]]:
    yield "pnm-ppm", save(picture(), "PPM")
    yield "pnm-pgm", save(picture("L"), "PPM")
    yield "pnm-pbm", save(picture("1"), "PPM")
    yield "pnm-pgm-16", save(picture("I;16"), "PPM")
    yield "pnm-pfm", save(picture("F"), "PPM")
    yield "avif-rgb", save(picture(), "AVIF", quality=90)
    yield "avif-alpha", save(picture("RGBA"), "AVIF", quality=90)
    yield "avif-exif-6", save(picture(), "AVIF", quality=90, exif=exif(6))
    yield "jp2-rgb", save(picture(), "JPEG2000")
    yield "j2k-rgb", save(picture(), "JPEG2000", no_jp2=True)
    yield "ico-rgb", save(picture("RGBA"), "ICO", sizes=[(32, 21)])
    yield "qoi-rgb", save(picture(), "QOI")


def _bad() -> Iterator[tuple[str, tuple[bytes, str]]]:
    for code, cases in (
        ("empty", _empty()),
        ("not-an-image", _not_images()),
        ("unsupported-format", _unsupported()),
        ("truncated", _truncated()),
        ("too-large", _bombs()),
        ("corrupt", _corrupt()),
    ):
        for name, data in cases:
            yield f"{code}-{name}", (data, code)


def _empty() -> Iterator[tuple[str, bytes]]:
    yield "file", b""


def _not_images() -> Iterator[tuple[str, bytes]]:
    yield "html", b"<!DOCTYPE html>\n<html><body>404 Not Found</body></html>"
    yield "json", b'{"error": "not found"}'
    yield "text", "no picture h\u00e9re".encode()
    yield "xml", b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>"
    yield "gzip", b"\x1f\x8b\x08\0\0\0\0\0"
    yield "zip", b"PK\x03\x04\x14\0"
    yield "pdf", b"%PDF-1.7\n%\xe2\xe3"
    yield "zeros", bytes(4096)
    yield "one-byte", b"\xff"
    yield "wave", b"RIFF\x24\0\0\0WAVEfmt "
    yield "video", b"\0\0\0\x18ftypisom\0\0\2\0isommp42"
    yield "noise", np.random.default_rng(0).bytes(1000)


def _unsupported() -> Iterator[tuple[str, bytes]]:
    yield "jpeg-12bit", rare_jpeg("jpeg-12bit")
    for name, marker in ("ls", 0xF7), ("hierarchical", 0xC5), ("hierarchical-first", 0xDE):
        jpeg = images()["jpeg-grey"].replace(b"\xff\xc0", bytes((0xFF, marker)))
        yield f"jpeg-{name}", jpeg
        yield f"jpeg-{name}-tables", insert_after_soi(jpeg, jpeg_segment(0xF8, bytes(11)))
    yield "tiff-lab", save(picture("LAB"), "TIFF")
    yield "svg", b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>'
    yield "jxl", b"\xff\x0a\x88\0"
    yield "pam", b"P7\nWIDTH 1\nHEIGHT 1\nDEPTH 1\nMAXVAL 255\nENDHDR\n\0"
    yield "heif", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100)


def _truncated() -> Iterator[tuple[str, bytes]]:
    good = images()
    jpeg, thumbnail = good["jpeg-420"], good["jpeg-exif-thumbnail"]
    yield "jpeg-magic", jpeg[:3]
    yield "jpeg-header", jpeg[:100]
    yield "jpeg-half", jpeg[: len(jpeg) // 2]
    yield "jpeg-end-marker", jpeg[:-2]
    yield "jpeg-last-byte", jpeg[:-1]
    yield "jpeg-zeros", jpeg[: len(jpeg) // 2] + bytes(len(jpeg) // 2)
    yield "jpeg-progressive", good["jpeg-progressive"][:-200]
    yield "jpeg-thumbnail-whole", thumbnail[: len(thumbnail) - 200]
    plain = good["png-rgb-8"]
    for name, length in ("magic", 8), ("header", 20), ("half", len(plain) // 2), ("end", -12):
        yield f"png-{name}", plain[:length]
    yield "png-last-byte", plain[:-1]
    for variant in ("lossy", "lossless", "exif-6"):
        webp = good[f"webp-{variant}"]
        yield f"webp-{variant}", webp[: len(webp) // 2]
    yield "webp-last-byte", good["webp-lossy"][:-1]
    yield "webp-header", good["webp-lossy"][:20]
    yield "tiff-directory", b"II*\0\xff\xff\xff\x7f" + bytes(100)
    for name in ("tiff-rgb", "bmp-rgb", "gif-still", "pnm-ppm"):
        yield name, good[name][: len(good[name]) * 2 // 3]


def _bombs() -> Iterator[tuple[str, bytes]]:
    """Small files that tell of 60,000 x 60,000 pixels and more."""
    jpeg = bytearray(images()["jpeg-420"])
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = b"\xea\x60" * 2
    yield "jpeg", bytes(jpeg)
    plain = images()["png-rgb-8"]
    header = struct.pack(">II", 60_000, 60_000) + plain[24:29]
    yield "png", PNG_SIGNATURE + png_chunk(b"IHDR", header) + plain[33:]
    extended = bytearray(images()["webp-exif-1"])
    extended[24:30] = b"\xff\xff\0" * 2
    # Its canvas is larger than WebP allows for its frame, which no reader of headers looks at.
    yield "webp", bytes(extended)
    gif = images()["gif-still"]
    yield "gif", gif[:6] + b"\xff" * 4 + gif[10:]
    bmp_file = images()["bmp-rgb"]
    yield "bmp", bmp_file[:18] + struct.pack("<ii", 60_000, 60_000) + bmp_file[26:]
    yield "bmp-4-billion", bmp_file[:18] + b"\xff\xff\xff\xff" + bmp_file[22:]
    yield "pnm", b"P6 60000 60000 255\n" + bytes(100)
    yield "pnm-5-billion", b"P6 5000000000 2 255\n" + bytes(100)


def _corrupt() -> Iterator[tuple[str, bytes]]:
    good = images()
    jpeg = bytearray(good["jpeg-420"])
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 7 : frame + 9] = b"\0\0"
    yield "jpeg-no-width", bytes(jpeg)
    yield "jpeg-no-frame", without_segment(good["jpeg-420"], 0xC0)
    plain = good["png-rgb-8"]
    yield "png-no-width", plain[:16] + bytes(4) + plain[20:]
    yield "png-depth-3", plain[:24] + b"\3" + plain[25:]
    data = plain.index(b"IDAT") + 4
    yield "png-pixels", plain[: data + 20] + bytes(40) + plain[data + 60 :]
    webp = good["webp-lossless"]
    yield "webp-pixels", webp[:40] + bytes(len(webp) - 40)
    yield "webp-chunk", webp[:12] + b"VP9 " + webp[16:]
    yield "gif-header", b"GIF89a"
    yield "bmp-header", b"BM" + bytes(60)
    yield "jp2-header", good["jp2-rgb"][:60]
