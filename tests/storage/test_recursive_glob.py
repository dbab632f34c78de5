"""A pattern with ``**`` finds each shard once, whatever links to folders there are."""

import glob
import os

import pytest

from dask_image_ingest.errors import ShardNotFoundError
from dask_image_ingest.storage import find_shards
from dask_image_ingest.storage.listing import find_matches
from dask_image_ingest.storage.patterns import SHARDS, LeftOut


@pytest.fixture
def runs(tmp_path):
    """Three runs with a shard each, and links: to the last, to a loop, and to one shard."""
    for number in (1, 2, 3):
        (tmp_path / f"runs/run{number}/part").mkdir(parents=True)
        (tmp_path / f"runs/run{number}/part/{number}.tar").write_bytes(b"1")
    (tmp_path / "runs/latest").symlink_to("run3")
    (tmp_path / "runs/run1/loop").symlink_to(".")
    (tmp_path / "runs/run1/loop2").symlink_to("../../runs")
    (tmp_path / "elsewhere.tar").write_bytes(b"2")
    (tmp_path / "runs/run2/linked.tar").symlink_to(tmp_path / "elsewhere.tar")
    return tmp_path / "runs"


def found(pattern, folder):
    return [os.path.relpath(shard.url, folder) for shard in find_shards(pattern)]


ALL = ["run1/part/1.tar", "run2/linked.tar", "run2/part/2.tar", "run3/part/3.tar"]


def test_links_to_folders_are_not_gone_through(runs):
    assert found(runs, runs) == ALL
    for pattern in ("**/*.tar", "**", "**/*", "**/**/*.tar", "**/*.ta[r]", "../runs/**/*.tar"):
        assert found(f"{runs}/{pattern}", runs) == ALL, pattern
    assert found(f"{runs}/**/part/*.tar", runs) == [ALL[0], ALL[2], ALL[3]]
    assert found(f"{runs}/**/*/*.tar", runs) == ALL


def test_a_link_that_the_pattern_names_is_followed(runs):
    latest = ["latest/part/3.tar"]
    assert found(f"{runs}/latest/**/*.tar", runs) == latest
    assert found(f"{runs}/late*/**/*.tar", runs) == latest
    assert found(f"{runs}/**/latest/**/*.tar", runs) == latest
    assert found(f"{runs}/**/latest", runs) == latest
    assert found(f"{runs}/**/linked.tar", runs) == ["run2/linked.tar"]


def test_what_matches_nothing_is_named(runs):
    with pytest.raises(ShardNotFoundError, match=r"nothing/\*\*"):
        find_shards(f"{runs}/nothing/**/*.tar")


def test_matches_are_those_of_python_where_there_are_no_links(tmp_path, rng):
    names = ["a", "b.tar", ".c", "_d", "a1.tar", "[x]"]
    folders = [tmp_path]
    for _ in range(25):
        folder = rng.choice(folders) / rng.choice(names)
        folder.mkdir(exist_ok=True)
        folders.append(folder)
    for folder in folders:
        for name in rng.sample(names, 3):
            if not (folder / name).exists():
                (folder / name).write_bytes(b"")
    parts = ["**", "**", "*", "*.tar", "a", ".*", "?1*", "[a-b]*", "[[]x]", "[.]c", "a**"]
    for _ in range(300):
        pattern = "/".join([str(tmp_path), *rng.choices(parts, k=rng.randint(1, 4))])
        ours = list(find_matches(pattern, SHARDS, LeftOut()))
        # Python's may end with a slash after what is no folder.
        theirs = filter(os.path.exists, glob.glob(pattern, recursive=True))
        theirs = {path.rstrip("/") for path in theirs}
        assert set(ours) == theirs, pattern
        assert len(ours) == len(theirs) or "**" not in pattern.split("/")
    # Links to folders add nothing to what wildcards after the first ** find.
    for folder in folders[1:6]:
        if not (folder / "zz").exists():
            (folder / "zz").symlink_to(rng.choice(folders))
    for _ in range(100):
        pattern = "/".join([str(tmp_path), "**", *rng.choices(parts, k=rng.randint(1, 3))])
        theirs = {path for path in find_matches(pattern, SHARDS, LeftOut()) if "/zz" in path}
        assert theirs == set(), pattern
