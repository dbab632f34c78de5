"""``write_report``: what the page says, counted by pandas; what it decodes; nothing believed."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
from html import unescape

import dask.dataframe as dd
import numpy as np
import pandas as pd
import pytest
from counted import work  # noqa: F401  a fixture
from embeddings import table_of, topics
from html_page import EVIL, SCRIPTS, Page, write_bad_photos
from PIL import Image

import dask_image_ingest as dii
from dask_image_ingest.curate import (
    compute_scores,
    embed,
    find_duplicates,
    find_issues,
    find_overlaps,
    find_semantic_duplicates,
    measure_quality,
    write_report,
)
from dask_image_ingest.curate.report import _THRESHOLDS, _histogram

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


@pytest.fixture(scope="module")
def collection(shards, tmp_path_factory):
    """The photographs, and half of them again, darker, smaller and in another quality."""
    folder = tmp_path_factory.mktemp("again")
    ddf = dii.read_webdataset_images(shards, backend="pandas", size=48, resize="longer")
    members = {"jpg": dii.Encode("image", quality=70)}
    dii.to_webdataset(ddf.partitions[:1], folder / "again-{shard:03d}.tar", members=members)
    return dii.read_webdataset_images([*shards, *folder.glob("*.tar")], backend="pandas")


@pytest.fixture(scope="module")
def curated(collection):
    def model(images):
        pictures = images if isinstance(images, list) else list(images)
        small = [Image.fromarray(each).convert("RGB").resize((8, 8)) for each in pictures]
        return np.stack([np.asarray(each, "float32").reshape(-1) for each in small])

    found = find_duplicates(find_issues(measure_quality(embed(collection, model))))
    found = find_semantic_duplicates(found, threshold=0.99)
    found = find_overlaps(found, collection.partitions[1])
    return compute_scores(found, {"first": lambda vectors: vectors[:, 0]})


@pytest.fixture(scope="module")
def made(curated, tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    return write_report(curated, path), path.read_text()


def section(html, title):
    """The part of a page below a heading."""
    return html.partition(f'<h2 class="dii-part">{title}</h2>')[2].partition(
        '<h2 class="dii-part"'
    )[0]


def test_rules_are_counted_as_pandas_counts_them(curated, made):
    table = curated.drop(columns=["image", "error", "embedding"]).compute()
    takes = pd.DataFrame(
        {
            name: table[name].fillna(False).astype(bool)
            for name in table
            if name.startswith("issue.")
        }
    )
    takes["duplicate.keep"] = ~table["duplicate.keep"].astype(bool)
    takes["semantic.keep"] = ~table["semantic.keep"].astype(bool)
    takes["overlap.found"] = table["overlap.found"].astype(bool)
    rules = made[0].rules
    assert set(rules.index) == {*takes, "all rules"}
    assert rules["rows"].drop("all rules").to_dict() == takes.sum().to_dict()
    alone = {name: int((takes[name] & (takes.sum(axis=1) == 1)).sum()) for name in takes}
    assert rules["alone"].drop("all rules").to_dict() == alone
    assert rules["rows"]["all rules"] == takes.any(axis=1).sum() > 0
    assert rules["share"]["all rules"] == pytest.approx(takes.any(axis=1).mean())


def test_the_worst_of_each_signal_are_shown(curated, made):
    table = curated[["__key__", "quality.blur", "quality.grayscale"]].compute()
    for name, lowest in (("quality.blur", True), ("quality.grayscale", False)):
        part = made[1].partition(f"<h2>{name}</h2>")[2].partition("</details>")[0]
        keys = re.findall(r'<span class="dii-key" title="([^"]*)"', part)
        ordered = table.sort_values([name, "__key__"], ascending=[lowest, True])
        values = ordered[name][:12].round(4).tolist()
        assert len(keys) == 12
        by_key = table.groupby("__key__")[name].agg(list)
        for key, value in zip(keys, values, strict=True):
            assert min(abs(each - value) for each in by_key[key]) < 1e-3


def test_groups_stand_side_by_side_with_their_distances(curated, made):
    table = curated[["__key__", "duplicate.group", "duplicate.distance"]].compute()
    groups = table.dropna(subset="duplicate.group").groupby("duplicate.group")
    assert 0 < len(groups) <= 12
    part = section(made[1], "Duplicate groups")
    shown = part.split('<section class="dii-group">')[1:]
    assert len(shown) == len(groups)
    farthest = []
    for each in shown:
        number = int(re.search(r"Group (\d+)", each)[1])
        expected = groups.get_group(number)
        assert (
            re.findall(r'dii-key" title="([^"]*)"', each)[1:]
            == (
                expected.dropna().sort_values(
                    ["duplicate.distance", "__key__"], ascending=[False, True]
                )
            )["__key__"].tolist()
        )
        assert "kept" in each
        distances = [int(bits) for bits in re.findall(r"distance (\d+)", each)]
        assert sorted(distances) == sorted(expected["duplicate.distance"].dropna())
        farthest.append(max(distances))
    assert farthest == sorted(farthest, reverse=True)


def test_the_page_needs_no_other_file_and_its_pictures_are_whole(made):
    page = Page(made[1])
    assert not {"link", "iframe"} & set(page.tags)
    sources = page.sources()
    assert {source[:23] for source in sources} == {"data:image/jpeg;base64,"}
    for source in sources:
        picture = Image.open(io.BytesIO(base64.b64decode(source[23:])))
        picture.load()
        assert max(picture.size) <= 120
    assert made[0]._repr_html_().startswith("<iframe srcdoc=")


def test_the_map_has_a_point_for_each_vector_in_its_frame(curated, made):
    part = section(made[1], "Map of the embeddings")
    points = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', part)
    there = curated["embedding"].compute().notna()
    assert len(points) == there.sum()
    places = np.array(points, float)
    assert (places >= 12).all()
    assert (places <= (808, 468)).all()
    assert part.count("dii-dropped") == made[0].rules["rows"]["all rules"]


def test_the_map_is_that_of_a_principal_component_analysis(tmp_path):
    from sklearn.decomposition import PCA

    vectors = topics(np.random.default_rng(5), 200, 16)
    table = table_of(list(vectors), nbytes=10)
    table["quality.blur"] = None  # nothing to show, so nothing is decoded
    table["quality.blur"] = table["quality.blur"].astype("float64")
    write_report(table, tmp_path / "map.html")
    html = (tmp_path / "map.html").read_text()
    found = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"[^>]*><title>(\d+)</title>', html)
    places = np.array([(float(x), float(y)) for x, y, _ in found])
    expected = PCA(2).fit_transform(vectors)[[int(key) for *_, key in found]]
    for axis in range(2):
        assert abs(np.corrcoef(places[:, axis], expected[:, axis])[0, 1]) > 0.9999


def test_only_what_is_shown_is_decoded_and_signals_once(collection, tmp_path, work):  # noqa: F811
    judged = find_issues(collection)
    before = work["decoded"]
    write_report(judged, tmp_path / "report.html")
    # All 32 for the signals, then at most those shown.
    assert 32 < work["decoded"] - before <= 64


def test_the_page_is_the_same_whatever_the_partitions_are(curated, made):
    table = curated.drop(columns=["image", "error"]).compute()
    shuffled = table.sample(frac=1, random_state=1).reset_index(drop=True)
    assert write_report(dd.from_pandas(shuffled, 17)).html == made[1]


def test_what_comes_from_the_web_is_shown_and_not_believed(photos, tmp_path):
    ddf = dii.read_webdataset_images(write_bad_photos(photos, tmp_path), backend="pandas")
    judged = find_issues(ddf).assign(**{f"issue.{EVIL}": True})
    write_report(judged, tmp_path / "out.html")
    html = (tmp_path / "out.html").read_text()
    page = Page(html)
    assert page.scripts == SCRIPTS
    assert {name for _, name, _ in page.attributes if name.startswith("on")} == set()
    assert EVIL in page.text
    assert EVIL not in html


def test_bins_left_of_a_threshold_are_red_and_none_has_both_sides():
    random = np.random.default_rng(3)
    values = pd.Series(random.uniform(0.1, 0.9, 5000).round(3))
    html = _histogram("quality.dark", values.value_counts().sort_index())
    bins = re.findall(r'<g class="([^"]*)"><title>([\d.]+): ([\d,]+)</title>', html)
    red = sum(int(count.replace(",", "")) for kind, _, count in bins if kind == "dii-marked")
    assert red == (values < 0.32).sum()
    assert sum(int(count.replace(",", "")) for *_, count in bins) == 5000
    assert [float(edge) for _, edge, _ in bins] == sorted(float(edge) for _, edge, _ in bins)


def test_the_few_beyond_a_threshold_are_red_too():
    for name in ["quality.dark", "quality.directional_sharpness", "quality.grayscale"]:
        for bad in [1, 2, 30]:
            threshold, above = _THRESHOLDS[name]
            good = (
                np.linspace(0.9, 0.99, 600) * threshold
                if above
                else np.linspace(2, 9, 600) * threshold
            )
            beyond = np.full(bad, threshold * 1.03 if above else threshold * 0.1)
            values = pd.Series(np.concatenate([good, beyond])).round(6)
            html = _histogram(name, values.value_counts().sort_index())
            bins = re.findall(r'<g class="dii-marked"><title>[^:]+: ([\d,]+)</title>', html)
            assert sum(int(count.replace(",", "")) for count in bins) == bad


def test_histograms_of_few_values_have_all_of_them():
    for values in [[3.0], [0.0, 1e9], [-1.0, 1.0], [1e6, 1e6 + 1]]:
        html = _histogram("score", pd.Series(values).value_counts().sort_index())
        assert sum(map(int, re.findall(r"<title>[^:]+: (\d+)</title>", html))) == len(values)


def test_edges_of_bins_are_round_and_short():
    values = pd.Series(np.random.default_rng(4).uniform(1e4, 4e6, 900).round())
    html = _histogram("score", values.value_counts().sort_index())
    edges = re.findall(r"<title>([^:]+): ", html)
    assert edges[:4] == ["0.0M", "0.2M", "0.4M", "0.6M"]


def test_areas_have_a_logarithmic_axis():
    random = np.random.default_rng(4)
    for areas in (10 ** random.uniform(3, 8, 900), [1e6] * 9, [0.0, 1.0, 1e9], [1e6, 1e6 + 1]):
        areas = pd.Series(areas).round()
        html = _histogram("quality.area", areas.value_counts().sort_index())
        bins = re.findall(r"<title>([\d.]+)([kM]?): (\d+)</title>", html)
        assert sum(int(count) for *_, count in bins) == len(areas)
        units = {"": 1, "k": 1e3, "M": 1e6}
        edges = np.array([float(edge) * units[unit] for edge, unit, _ in bins])
        steps = edges[1:] / edges[:-1]
        assert np.allclose(steps, np.median(steps), rtol=0.02) if len(steps) else True
        assert "logarithmic" in html


def test_a_text_column_called_as_a_score_is_no_signal(collection):
    table = collection.drop(columns=["image", "error"]).compute()
    found = write_report(table.assign(**{"score.label": "cat", "score.good": 0.5}))
    assert list(found.signals) == ["score.good"]


def test_both_ends_of_the_area_are_shown_and_each_part_by_itself(made):
    found = made[0]
    assert "12 lowest" in found.worst["quality.area"].html
    assert "12 highest" in found.worst["quality.area"].html
    assert set(found.groups) == {"duplicate", "semantic"}
    assert set(found.signals) == set(found.worst) >= {"quality.blur", "score.first"}
    for part in (found.signals["quality.blur"], found.worst["quality.blur"]):
        assert part.html in found.html
        assert part._repr_html_().startswith("<iframe srcdoc=")


def test_groups_of_boxes_show_the_boxes(shards, photos):
    refs = dii.read_webdataset_images(shards, decode=False, backend="pandas").compute()
    sizes = zip(refs.height, refs.width, strict=True)
    halves = [[[0, 0, w / 2, h], [0, 0, w / 2, h - 1]] for h, w in sizes]
    halves = pd.Series(halves, refs.index, "list<list<float32>>")
    rows = dd.from_pandas(refs.assign(box=halves).explode("box"), 2)
    found = find_duplicates(dii.decode_images(rows, box="box", size=64))
    groups = section(write_report(found).html, "Duplicate groups")
    card = r'base64,([A-Za-z0-9+/=]+).*?class="dii-key" title="([^"]*)"'
    cards = re.findall(card, groups, re.DOTALL)
    assert cards
    by_key = {photo.key: photo.pixels.shape for photo in photos}
    for encoded, key in cards:
        width, height = Image.open(io.BytesIO(base64.b64decode(encoded))).size
        assert width / height == pytest.approx(by_key[key][1] / by_key[key][0] / 2, rel=0.03)


@pytest.mark.parametrize("kind", ["lazy", "eager", "references"])
def test_images_that_no_shard_has_are_shown_from_the_frame(collection, kind):
    files = collection.partitions[:2].compute()
    encoded = files.assign(png=files.images.encode("png"))[["__key__", "__url__", "cls", "png"]]
    encoded["name"] = encoded["__url__"] + "/" + encoded["__key__"]
    encoded = encoded[["name", "png"]].dropna().reset_index(drop=True)
    frame = dii.decode_images(dd.from_pandas(encoded, npartitions=3), image={"image": "png"})
    frame = find_issues(frame)
    frame = frame.compute() if kind == "eager" else frame
    if kind == "references":
        columns = ["name", *(name for name in frame.columns if name.startswith("quality."))]
        frame = frame[columns].compute().merge(
            collection.drop(columns=["image", "error"]).compute().assign(
                name=lambda rows: rows["__url__"] + "/" + rows["__key__"],
            )[["name"]], on="name",
        )  # fmt: skip
        located = dii.read_webdataset_images(
            collection["__url__"].unique().compute().tolist(), backend="pandas", decode=False
        ).compute()
        located["name"] = located["__url__"] + "/" + located["__key__"]
        frame = frame.merge(located[["name", "image"]], on="name")
    found = write_report(frame, identity="name")
    assert found.html.count("data:image/jpeg;base64,") >= 12
    assert "dii-bad" not in found.html
    with pytest.raises(dii.ArgumentError, match="nor images, nor references"):
        write_report(frame.drop(columns=["image"]), identity="name")


def test_the_page_names_its_shards_and_each_picture_its_key_and_shard(curated, made):
    assert "<h1>Curation of again-000.tar … photos-002.tar</h1>" in made[1]
    assert "4 shards" in made[1]
    shard_of = curated[["__key__", "__url__"]].compute()
    shards = shard_of.groupby("__key__")["__url__"].agg(
        lambda urls: {u.rpartition("/")[2] for u in urls}
    )
    cards = made[1].split('<figure class="dii-card')[1:]
    assert len(cards) > 30
    for card in cards:
        key = re.search(r'dii-key" title="([^"]*)"', card)[1]
        assert json.loads(unescape(re.search(r'class="dii-mark" value="([^"]*)"', card)[1])) == key
        assert re.search(r'dii-facts">[^<]* · ([^<·]+)</span>', card)[1] in shards[key]


def test_rules_that_drop_most_come_first_with_some_of_their_rows(curated, made):
    table = curated[
        ["__key__", *(name for name in made[0].rules.index if name in curated)]
    ].compute()
    part = section(made[1], "Dropped rows by rule")
    shown = part.split('<section class="dii-group">')[1:]
    counts = made[0].rules["rows"].drop("all rules")
    assert len(shown) == (counts > 0).sum() > 2
    found = []
    for each in shown:
        name, rows = re.search(r"<h3>([\w.]+): ([\d,]+) rows", each).groups()
        drops = not name.endswith(".keep")
        dropped = table["__key__"][(table[name].fillna(not drops) == drops).to_numpy(bool)]
        keys = re.findall(r'dii-key" title="([^"]*)"', each)
        assert int(rows) == counts[name] == len(dropped)
        assert len(keys) == min(4, len(dropped))
        assert set(keys) <= set(dropped)
        found.append(int(rows))
    assert found == sorted(found, reverse=True)
    for name in counts.index[counts == 0]:
        assert name in part.partition("Nothing found by")[2]


def test_a_column_of_vectors_that_is_not_there_is_refused(curated):
    with pytest.raises(dii.ArgumentError, match="no column 'nope'"):
        write_report(curated, column="nope")


def test_labels_of_a_histogram_lie_inside_the_drawing():
    areas = pd.Series(np.random.default_rng(4).uniform(1e6, 4e6, 900).round())
    html = _histogram("quality.area", areas.value_counts().sort_index())
    for x, anchor, label in re.findall(
        r'<text x="([\d.]+)" y="[\d.]+" text-anchor="(\w+)" class="dii-quiet">([^<]+)<', html
    ):
        width = 6 * len(label)
        left = float(x) - {"start": 0, "middle": width / 2, "end": width}[anchor]
        assert left >= 0
        assert left + width <= 320


def test_wrong_arguments_are_refused(collection, shards, tmp_path):
    path = tmp_path / "out.html"
    with pytest.raises(dii.ArgumentError, match="add one"):
        write_report(collection, path)
    with pytest.raises(dii.ArgumentError, match="neither the columns __url__, offset, nbytes"):
        write_report(find_issues(collection).drop(columns=["nbytes", "image"]), path)
    with pytest.raises(dii.ArgumentError, match="write the page to another file"):
        write_report(find_issues(collection), shards[0])
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_browser_shows_the_page(made, tmp_path):
    (tmp_path / "report.html").write_text(made[1])
    shot = tmp_path / "shot.png"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,2000"]
    subprocess.run(
        [CHROMIUM, *options, f"--screenshot={shot}", (tmp_path / "report.html").as_uri()],
        check=True, capture_output=True, timeout=280,
    )  # fmt: skip
    pixels = np.asarray(Image.open(shot).convert("RGB"))
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 1000


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_marked_keys_leave_the_page_as_json(made, collection, tmp_path):
    mark = """<script>
    const boxes = [...document.querySelectorAll(".dii-mark")], first = boxes[0];
    first.click();
    boxes.find(box => box.value !== first.value).click();
    fetch(document.querySelector("[download]").href).then(file => file.text()).then(text => {
      const checked = boxes.filter(box => box.checked).length;
      document.body.textContent = text + "|" + [first.value, checked];
    });
    </script></body>"""
    (tmp_path / "report.html").write_text(made[1].replace("</body>", mark))
    dumped = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000",
         "--dump-dom", (tmp_path / "report.html").as_uri()],
        check=True, capture_output=True, text=True, timeout=280,
    ).stdout  # fmt: skip
    text, _, rest = Page(dumped).text.rpartition("|")
    marked = json.loads(text[text.rindex('["') :])
    assert len(marked) == 2
    assert json.loads(rest.split(",")[0]) == marked[0]
    assert int(rest.split(",")[1]) == sum(
        made[1].count(f'value="&quot;{key}&quot;"') for key in marked
    )
    chosen = collection[collection["__key__"].isin(marked)]["__key__"].compute()
    assert set(chosen) == set(marked)
