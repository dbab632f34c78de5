"""A page as a browser reads it, and a shard that would write to one."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from photo_shards import Photo, write_tar

from dask_image_ingest.view import page

EVIL = '<script>alert(1)</script><img src=x onerror="alert(2)">" onmouseover=\'alert(3)\' &amp;'


class Page(HTMLParser):
    """What a browser would find in a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.attributes, self.text, self.scripts = [], [], "", []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *attr) for attr in attrs]

    def handle_data(self, data):
        if self.tags and self.tags[-1] == "script" and self.cdata_elem == "script":
            self.scripts.append(data)
        else:
            self.text += data

    def sources(self):
        return [value for _, name, value in self.attributes if name == "src"]


#: The script of each page, by which rows are marked: there is no other.
SCRIPTS = Page(page("", "")).scripts


def write_bad_photos(photos: list[Photo], folder: Path) -> Path:
    """A good photograph with an evil key and caption, one cut off, and no image at all."""
    members = {
        'a<b>"&amp;onclick=x.jpg': photos[0].encoded,
        'a<b>"&amp;onclick=x.txt': EVIL.encode(),
        "cut.jpg": photos[1].encoded[:-200],
        "cut.txt": b"short",
        "none.txt": ("long " * 60 + EVIL).encode(),
    }
    write_tar(folder / "bad.tar", members)
    return folder
