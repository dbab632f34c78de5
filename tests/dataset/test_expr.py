"""What a query asks of the shards, counted where images are decoded and bytes are read."""

import operator
import pickle
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import dask
import dask.dataframe as dd
import pandas as pd
import pytest

import dask_image_ingest as dii
from dask_image_ingest.dataset.plan.scan_node import Scan
from dask_image_ingest.dataset.scan import partitioning, samples
from dask_image_ingest.decode import DecodeSpec
from dask_image_ingest.decode.planner import BatchPlanner
from dask_image_ingest.storage import ByteReader


class CountedBytes(ByteReader):
    """Bytes that count how many of them are looked at."""

    def __init__(self, data, counts, name):
        self.data, self.counts, self.name = data, counts, name

    def __len__(self):
        return len(self.data)

    def __getitem__(self, part):
        taken = bytes(self.data[part])
        self.counts[self.name] += len(taken)
        return taken


@pytest.fixture
def work(monkeypatch):
    """Counts what is really done.

    Partitions read, image headers read, images decoded, and the bytes looked at: of tar headers, of
    image headers, of other members, of images to be decoded.
    """
    counts: Counter = Counter()

    def index_tar(content, url):
        counts["partitions"] += 1
        return original.index_tar(CountedBytes(content, counts, "tar bytes"), url)

    def read_header(self, data):
        counts["headers"] += 1
        return original.read_header(self, CountedBytes(data, counts, "header bytes"))

    def read_text(content, index, span):
        # Images come through here as well, as views that nobody has looked at yet.
        data = original.read_member(content, index, span)
        counts["member bytes"] += 0 if span[1] > SMALLEST_IMAGE else len(data)
        return data

    def assign(self, row, batch):
        counts["decoded"] += 1
        counts["decoded bytes"] += len(self.images.read(row))
        return original.assign(self, row, batch)

    original = SimpleNamespace(
        index_tar=samples.index_tar,
        read_header=DecodeSpec.read_header,
        read_member=samples.read_member,
        assign=BatchPlanner._assign,
    )
    monkeypatch.setattr(samples, "index_tar", index_tar)
    monkeypatch.setattr(DecodeSpec, "read_header", read_header)
    monkeypatch.setattr(samples, "read_member", read_text)
    monkeypatch.setattr(BatchPlanner, "_assign", assign)
    return counts


# No caption, label or JSON of the test shards is as large, and no image as small.
SMALLEST_IMAGE = 500


@pytest.fixture
def ddf(shards):
    return dii.read_webdataset_images(
        shards, backend="pandas", json_fields={"similarity": "float32"}
    )


@pytest.fixture(scope="module")
def reference(photos):
    """The metadata as pandas has it when everything is read."""
    return pd.DataFrame(
        {
            "__key__": [photo.key for photo in photos],
            "txt": [photo.caption for photo in photos],
            "cls": [photo.label for photo in photos],
            "height": [photo.pixels.shape[0] for photo in photos],
            "width": [photo.pixels.shape[1] for photo in photos],
            "similarity": [photo.similarity for photo in photos],
        }
    )


def reads(collection) -> list[Scan]:
    return list(collection.optimize(fuse=False).expr.find_operations(Scan))


def test_captions_and_keys_read_no_image(ddf, work, photos):
    ddf[["__key__", "txt"]].compute()
    assert work["decoded"] == work["headers"] == 0
    assert work["member bytes"] == sum(len(photo.caption.encode()) for photo in photos)


def test_keys_read_tar_headers_alone(ddf, work, photos):
    ddf[["__key__"]].compute()
    headers = 512 * sum(len(photo.members) for photo in photos)
    # A shard ends in zeros, which are read to see that nothing follows them.
    assert headers < work.pop("tar bytes") <= headers + 3 * 10240
    assert work == {"partitions": 3}


def test_shapes_read_headers_and_decode_nothing(ddf, work, photos):
    ddf[["txt", "width"]].compute()
    assert work["headers"] == 24
    assert work["decoded"] == 0
    assert work["header bytes"] < 24 * 4096
    assert work["header bytes"] < sum(len(photo.encoded) for photo in photos) / 10


@pytest.mark.parametrize(
    "question",
    [
        lambda ddf: ddf.txt.str.len().mean(),
        lambda ddf: ddf.groupby("cls").size(),
        lambda ddf: ddf.describe(),
        lambda ddf: ddf.merge(ddf[["__key__", "cls"]], on="__key__")[["txt", "cls_y"]],
        lambda ddf: ddf["cls"].value_counts(),
        lambda ddf: ddf.index.size,
        lambda ddf: ddf[["txt"]].map_partitions(len),
        lambda ddf: ddf.txt,
    ],
)
def test_questions_about_metadata_decode_nothing(ddf, work, question):
    question(ddf).compute()
    assert work["decoded"] == 0
    assert work["partitions"] >= 3


def test_len_walks_tar_headers_alone(ddf, work):
    assert len(ddf) == 24
    assert work.keys() == {"partitions", "tar bytes"}
    assert work["partitions"] == 3


def test_len_of_a_filter_reads_the_headers_once(ddf, work, reference):
    assert len(ddf[ddf.width >= 200]) == (reference.width >= 200).sum()
    assert work["decoded"] == 0
    assert work["headers"] == 24


@pytest.mark.parametrize(
    "mask",
    [
        lambda frame: frame.width >= 200,
        lambda frame: (frame.width >= 200) & (frame.height > 100),
        lambda frame: frame.width * frame.height > 40_000,
        lambda frame: frame.txt.str.contains("1"),
    ],
)
@pytest.mark.parametrize("count", [len, lambda frame: len(frame.index)])
def test_rows_of_a_filter_are_counted_in_one_walk(ddf, work, reference, mask, count):
    expected = count(reference[mask(reference)])
    assert expected
    work.clear()
    assert count(ddf[mask(ddf)]) == expected
    assert work["partitions"] == 3


@pytest.mark.parametrize(
    "ask",
    [
        lambda ddf: ddf[ddf.width >= 200],
        lambda ddf: ddf[(ddf.cls == 1) | (ddf.height > 200)],
    ],
)
def test_rows_that_are_only_counted_have_no_images(ddf, reference, ask):
    labels = ask(ddf).index
    (read,) = {each._name: each for each in reads(labels)}.values()
    assert not {"image", "error"}.intersection(read.columns)
    assert 0 < len(labels.compute()) == len(ask(reference)) < 24


def test_a_filter_goes_before_the_decode(ddf, work, reference):
    frame = ddf[ddf.width >= 250].compute()
    assert 0 < len(frame) < 24
    assert work["decoded"] == len(frame) == (reference.width >= 250).sum()
    assert work["decoded bytes"] == frame["nbytes"].sum()


PREDICATES = {
    "and": (
        lambda d: (d.height > 150) & (d["json.similarity"] > 0.3),
        lambda r: (r.height > 150) & (r.similarity > 0.3),
    ),
    "or": (lambda d: (d.height > 250) | (d.cls == 1), lambda r: (r.height > 250) | (r.cls == 1)),
    "ne": (lambda d: d.cls != 1, lambda r: r.cls != 1),
    "isin": (lambda d: d.cls.isin([1, 3]), lambda r: r.cls.isin([1, 3])),
    "not isin": (lambda d: ~d.cls.isin([1, 3]), lambda r: ~r.cls.isin([1, 3])),
    "isna": (lambda d: d.txt.isna() | (d.width < 100), lambda r: r.width < 100),
    "notnull": (lambda d: d.txt.notnull() & (d.width < 100), lambda r: r.width < 100),
    "not": (lambda d: ~((d.width < 200) | (d.cls == 0)), lambda r: (r.width >= 200) & (r.cls != 0)),
    "mirrored": (lambda d: 200 <= d.width, lambda r: r.width >= 200),  # noqa: SIM300
    "string": (lambda d: d.txt > "photograph 2", lambda r: r.txt > "photograph 2"),
}


@pytest.mark.parametrize("name", PREDICATES)
def test_simple_predicates_are_filters_of_the_read(ddf, work, reference, name):
    predicate, expected = PREDICATES[name]
    selected = ddf[predicate(ddf)]
    (read,) = reads(selected)
    assert read.operand("filters") is not None
    frame = selected.compute()
    want = reference[expected(reference)]
    assert frame["__key__"].tolist() == want["__key__"].tolist()
    assert work["decoded"] == len(want)


def test_a_chain_of_filters_and_a_projection_fold_into_one_read(ddf, work):
    selected = ddf[ddf.width > 150]
    selected = selected[selected.cls == 1][["txt", "image"]]
    (read,) = reads(selected)
    assert read.columns == ["txt", "image"]
    assert repr(read.operand("filters")) == "(width > 150 and cls == 1)"
    assert work["decoded"] == 0
    assert len(selected.compute()) == work["decoded"]


def test_a_predicate_that_is_not_simple_stays_outside(ddf, reference):
    selected = ddf[ddf.txt.str.len() > 32]
    assert all(read.operand("filters") is None for read in reads(selected))
    assert len(selected.compute()) == (reference.txt.str.len() > 32).sum()


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([("width", ">=", 200)], lambda r: r.width >= 200),
        ([("width", ">=", 200), ("cls", "in", [0, 1])], lambda r: (r.width >= 200) & (r.cls < 2)),
        ([[("cls", "=", 0)], [("cls", "==", 2)]], lambda r: r.cls.isin([0, 2])),
        ([("cls", "not in", {0, 2})], lambda r: ~r.cls.isin([0, 2])),
    ],
)
def test_filters_are_as_in_read_parquet(shards, work, reference, filters, expected):
    frame = dii.read_webdataset_images(shards, filters=filters, backend="pandas").compute()
    assert frame["__key__"].tolist() == reference[expected(reference)]["__key__"].tolist()
    assert work["decoded"] == len(frame)


def test_partitions_touch_their_shards_alone(ddf, work):
    ddf.partitions[1:3].compute()
    assert (work["partitions"], work["decoded"]) == (2, 16)


def test_get_partition_touches_one_shard(ddf, work):
    ddf.get_partition(2).compute()
    assert (work["partitions"], work["decoded"]) == (1, 8)


def test_head_decodes_as_many_images_as_it_shows(ddf, work):
    assert len(ddf.head(3)) == 3
    assert (work["partitions"], work["decoded"]) == (1, 3)


def test_head_of_a_filter_decodes_as_many_images_as_it_shows(ddf, work, reference):
    frame = ddf[ddf.width > 150].head(2)
    want = reference.iloc[:8].query("width > 150").head(2)
    assert frame["__key__"].tolist() == want["__key__"].tolist()
    assert work["decoded"] == 2


def test_head_after_a_new_column_decodes_as_many_images_as_it_shows(ddf, work):
    frame = ddf.assign(area=ddf.width * ddf.height).head(2)
    assert frame["area"].tolist() == (frame["width"] * frame["height"]).tolist()
    assert work["decoded"] == 2


def test_columns_of_a_head_are_asked_for_apart(ddf, work):
    first = ddf.head(2, compute=False)
    texts, labels = dask.compute(first[["txt"]], ddf[["cls"]].head(2, compute=False))
    assert (list(texts), list(labels)) == (["txt"], ["cls"])
    assert (ddf.txt.str.len() + ddf.cls).head(2).tolist() == (
        texts["txt"].str.len() + labels["cls"]
    ).tolist()
    assert work["decoded"] == 0


def test_errors_are_the_same_whether_pixels_are_asked_for_or_not(photos, tmp_path):
    from photo_shards import write_tar

    # Cut inside the compressed data and closed again: only a decoder can tell.
    cut = photos[2].encoded[: len(photos[2].encoded) // 2]
    path = write_tar(tmp_path / "a.tar", {"a.jpg": photos[0].encoded, "b.png": cut})
    ddf = dii.read_webdataset_images(path, backend="pandas")
    want = ddf.compute()["error"].tolist()
    assert want[0] is pd.NA or pd.isna(want[0])
    assert isinstance(want[1], str)
    assert ddf["error"].compute().tolist()[1] == want[1]
    assert ddf[ddf.error.isna()]["__key__"].compute().tolist() == ["a"]
    assert ddf[ddf.error.notnull() & (ddf["nbytes"] > 1)][["__key__", "error"]].compute().shape == (
        1,
        2,
    )
    assert len(ddf[ddf.error.isna()]) == 1


def random_predicate(rng, frame):
    """A random predicate, as a function of either frame."""

    def leaf():
        column, values = rng.choice(
            [
                ("width", [90, 150, 200, 300]),
                ("height", [90, 150, 200, 300]),
                ("cls", [0, 1, 2, 3]),
                ("txt", ["photograph 1", "photograph 5", "zzz"]),
            ]
        )
        value = rng.choice(values)
        return rng.choice(
            [
                lambda f: f[column] < value,
                lambda f: f[column] <= value,
                lambda f: f[column] > value,
                lambda f: f[column] >= value,
                lambda f: f[column] == value,
                lambda f: f[column] != value,
                lambda f: f[column].isin(values[:2]),
                lambda f: f[column].isna(),
                lambda f: f[column].notnull(),
            ]
        )

    def tree(depth):
        if depth == 0 or rng.random() < 0.3:
            return leaf()
        left, right = tree(depth - 1), tree(depth - 1)
        return rng.choice(
            [
                lambda f: left(f) & right(f),
                lambda f: left(f) | right(f),
                lambda f: ~left(f),
            ]
        )

    return tree(3)


@pytest.fixture(scope="module")
def with_gaps(photos, tmp_path_factory):
    """Shards in which some members are missing, so that there are nulls in every column."""
    from photo_shards import write_tar

    folder = tmp_path_factory.mktemp("gaps")
    for shard in range(3):
        members = {}
        for number, photo in enumerate(photos[shard * 8 : shard * 8 + 8]):
            for place, (extension, content) in enumerate(photo.members.items()):
                if number == 0 or (number + place) % 4:
                    members[f"{photo.key}.{extension}"] = content
        write_tar(folder / f"{shard}.tar", members)
    return folder


@pytest.mark.slow
@pytest.mark.rounds(1, nightly=20)
def test_random_queries_give_the_same_with_and_without_the_optimiser(with_gaps, rng):
    ddf = dii.read_webdataset_images(with_gaps, backend="pandas", size=16)
    everything = [ddf.get_partition(i).compute() for i in range(ddf.npartitions)]
    # Partitions in memory take up no filter and no projection.
    plain = dd.from_delayed(
        [dask.delayed(part) for part in everything], meta=everything[0].iloc[:0]
    )
    columns = ["__key__", "width", "height", "cls", "txt", "error", "image"]
    for round_ in range(12):
        predicate = random_predicate(rng, ddf)
        kept = rng.sample(columns, rng.randint(1, len(columns)))
        lazy = ddf[predicate(ddf)][kept]
        whole = pd.concat(everything)
        by_hand = whole[predicate(whole)][kept]
        for got in (lazy.compute(), lazy.optimize(fuse=False).compute()):
            assert to_python(got) == to_python(by_hand), round_
        assert to_python(plain[predicate(plain)][kept].compute()) == to_python(by_hand)
        assert len(ddf[predicate(ddf)]) == len(by_hand)


def to_python(frame):
    columns = {}
    for name in frame.columns:
        if name == "image":
            arrays = frame.images.arrays()
            columns[name] = [None if a is None else a.tobytes() for a in arrays]
        else:
            columns[name] = [None if pd.isna(value) else value for value in frame[name]]
    return frame.index.tolist(), columns


def test_an_equal_read_has_an_equal_name_and_a_changed_shard_another(shards, tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(shards[0].read_bytes())

    def name(**options):
        return dii.read_webdataset_images(path, backend="pandas", **options)._name

    before = name()
    assert before == name()
    assert (
        len({before, name(size=8), name(mode="L"), name(errors="drop"), name(columns=["txt"])}) == 5
    )
    content = shards[1].read_bytes()
    path.write_bytes(
        content[: len(shards[0].read_bytes())].ljust(len(shards[0].read_bytes()), b"\0")
    )
    assert name() != before


def test_partition_size_splits_shards_into_parts_that_share_nothing(shards, work, photos):
    whole = sum(photo.pixels.nbytes for photo in photos[:8])
    ddf = dii.read_webdataset_images(shards, backend="pandas", partition_size=whole // 3)
    assert ddf.npartitions >= 9
    work.clear()
    frame = ddf.compute()
    assert frame["__key__"].tolist() == [photo.key for photo in photos]
    assert work["decoded"] == 24
    work.clear()
    ddf.partitions[1].compute()
    assert work["decoded"] < 8


def test_a_partition_is_never_planned_larger_than_its_backend_can_hold(shards):
    class Cudf:
        largest_partition = 2**31 - 1

        def partition_memory(self):
            return 2**40

    # Half of what fits, since some shards decode to more than the first one, which is looked at.
    assert partitioning.parse_partition_size("auto", Cudf()) == 2**30 - 1
    for asked in ("5 GB", 2**31):
        assert partitioning.parse_partition_size(asked, Cudf()) == 2**31 - 1
    assert partitioning.parse_partition_size("1 GiB", Cudf()) == 2**30


def test_no_partition_size_is_one_task_per_shard(shards):
    assert (
        dii.read_webdataset_images(shards, backend="pandas", partition_size=None).npartitions == 3
    )


def test_the_plan_says_whether_anything_is_decoded(ddf, capsys):
    ddf[["txt"]].optimize(fuse=False).pprint()
    assert "ecode" not in capsys.readouterr().out
    ddf[ddf.width > 300].optimize(fuse=False).pprint()
    out = capsys.readouterr().out
    assert "decode='image'" in out
    assert "filters=width > 300" in out


MANY_SHARDS = """
import resource, sys
import dask_image_ingest as dii

opened = set()
sys.addaudithook(lambda event, args: event == "open" and opened.add(str(args[0])))
idle = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ddf = dii.read_webdataset_images(sys.argv[1], backend="pandas")
graph = ddf[["txt"]].optimize().dask
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(ddf.npartitions, len(graph), (peak - idle) * 1024, sum("shard-" in path for path in opened))
"""


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.newest
def test_a_hundred_thousand_shards_are_a_small_collection_of_small_tasks(shards, tmp_path):
    (tmp_path / "shard-000000.tar").write_bytes(shards[0].read_bytes())
    for number in range(1, 100_000):
        (tmp_path / f"shard-{number:06d}.tar").touch()
    pattern = str(tmp_path / "shard-{000000..099999}.tar")
    run = subprocess.run(
        [sys.executable, "-c", MANY_SHARDS, pattern], capture_output=True, text=True, check=True
    )
    partitions, tasks, memory, opened = map(int, run.stdout.split())
    assert partitions == tasks == 100_000
    assert memory < 500e6
    assert opened == 1
    ddf = dii.read_webdataset_images(shards, backend="pandas")
    assert len(pickle.dumps(ddf.expr._task("name", 2))) < 3000


@pytest.mark.parametrize("combine", [operator.and_, operator.or_, operator.xor])
def test_masks_of_both_booleans_keep_the_dtype_of_pandas(ddf, combine):
    frame = ddf[["txt", "width"]].compute()

    def masks(frame):
        return frame["txt"].str.len() > 2, frame["width"] > 12

    long, wide = masks(frame)
    expected = combine(wide, long).astype("boolean")  # pandas can't combine them the other way
    long, wide = masks(ddf)
    assert combine(long, wide).dtype == "boolean"
    pd.testing.assert_series_equal(combine(long, wide).compute(), expected, check_names=False)
    with dask.config.set({"image-ingest.decode-late": False}):  # dask's own filter, above the read
        filtered = ddf[combine(long, wide)][["txt", "width"]].compute()
    pd.testing.assert_frame_equal(filtered, frame[expected.to_numpy()])


def test_partitions_of_a_read_have_their_own_divisions_when_repartitioned(ddf):
    some = ddf.partitions[1:4]
    some = some[some.width > 12]
    assert some.repartition(npartitions=3).divisions == (None,) * 4
    assert some.repartition(npartitions=2).divisions == (None,) * 3
