"""Meaning of members' extensions."""

__all__ = ["IMAGE_EXTENSIONS", "INTEGERS", "TEXTS"]

#: Those taken for the image, in order of preference.
IMAGE_EXTENSIONS = (
    "jpg;jpeg;png;webp;jfif;gif;bmp;tif;tiff;avif;heic;heif;jp2;j2k;ppm;pgm;pbm;pnm;ico;img"
)

#: Those that webdataset itself decodes to text and to integers (autodecode.py, 1.0.2).
TEXTS = frozenset({"txt", "text", "transcript", "json", "jsn", "caption"})
INTEGERS = frozenset({"cls", "cls2", "class", "count", "index", "inx", "id"})
