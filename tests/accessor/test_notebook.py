"""What IPython shows of a dataframe: thumbnails in place of images, and pandas' own of others."""

from __future__ import annotations

import base64
import io
import re
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from small_frames import small_frame

from dask_image_ingest.accessor.frames import frame_html, register_html


def pictures(html):
    found = re.findall(r'<img src="data:image/png;base64,([\w+/=]+)"', html)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for data in found]


def test_images_are_thumbnails_and_the_rest_is_as_pandas_has_it():
    frame = small_frame([7, 9, 200], (4, 5, 3), bad=[9]).assign(txt=["<b>", "\ue0d1", None])
    html = frame_html(frame)
    assert [(p.shape, p.flat[0]) for p in pictures(html)] == [((4, 5, 3), 7), ((4, 5, 3), 200)]
    # The cells of image, key and txt, row by row: the picture comes first.
    cells = re.findall(r"<td>(.*?)</td>", html)
    others = [cell for at, cell in enumerate(cells) if at % 3]
    assert others == re.findall(r"<td>(.*?)</td>", frame.drop(columns="image")._repr_html_())
    assert cells[2] == "&lt;b&gt;"


def test_no_text_is_taken_for_the_place_of_a_picture():
    texts = ["\ue0d10.1\ue0d2", "\ue0d17.99\ue0d2", "\ue0d10.0\ue0d2" * 4]
    frame = small_frame([7, 9, 200]).assign(txt=texts)
    html = frame_html(frame)
    assert len(pictures(html)) == 3
    assert all(text in html for text in texts)


def test_only_rows_that_are_shown_are_encoded():
    frame = small_frame([number % 250 for number in range(500)])
    assert len(pictures(frame_html(frame))) == pd.get_option("display.min_rows")


def test_frames_without_images_are_pandas_own():
    frame = pd.DataFrame({"a": [1, 2]})
    assert frame_html(frame) == frame._repr_html_()
    twice = pd.concat([small_frame([1])] * 2, axis=1)
    assert frame_html(twice) == twice._repr_html_()
    with pd.option_context("display.notebook_repr_html", False):
        assert frame_html(small_frame([1])) is None


def test_it_is_registered_in_ipython_alone(monkeypatch):
    formatters = {"text/html": SimpleNamespace(for_type=lambda *given: registered.append(given))}
    registered = []
    shell = SimpleNamespace(display_formatter=SimpleNamespace(formatters=formatters))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    register_html()
    assert registered == [(pd.DataFrame, frame_html)]
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    register_html()
    monkeypatch.delitem(sys.modules, "IPython")
    register_html()
    assert len(registered) == 1


def test_ipython_shows_it():
    formatters = pytest.importorskip("IPython.core.formatters", reason="pip install ipython")
    html = formatters.HTMLFormatter()
    html.for_type(pd.DataFrame, frame_html)
    assert len(pictures(html(small_frame([1, 2])))) == 2
    assert html(pd.DataFrame({"a": [1]})) == pd.DataFrame({"a": [1]})._repr_html_()


def test_images_of_a_frame_show_some_of_them():
    html = small_frame(range(20)).images._repr_html_()
    assert html.count("<figure") == 8
    assert "20 rows" in html
