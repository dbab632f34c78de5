"""A pattern with ``**`` finds each shard once, whatever links to folders there are."""

import glob
import os

import pytest

from dask_image_ingest.errors import ShardNotFoundError
from dask_image_ingest.storage import find_shards


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
    compared = 0
    for _ in range(300):
        pattern = "/".join([str(tmp_path), *rng.choices(parts, k=rng.randint(1, 4))])
        theirs = {path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)}
        if pattern.endswith("*"):
            theirs = {p for p in theirs if is_visible_shard(p)}
        folders = [p for p in glob.glob(pattern, recursive=True) if os.path.isdir(p)]
        for folder in folders:
            if not pattern.endswith("*") or not os.path.basename(folder).startswith((".", "_")):
                theirs |= shards_below(folder)
        try:
            ours = {shard.url for shard in find_shards(pattern)}
        except ShardNotFoundError:
            ours = set()
        assert ours == {os.path.normpath(path) for path in theirs}, pattern
        compared += bool(ours)
    assert compared > 50


def is_visible_shard(path):
    return path.endswith(".tar") and not os.path.basename(path).startswith((".", "_"))


def shards_below(top):
    """What a search of a folder takes, by a walk."""
    found = set()
    for folder, folders, files in os.walk(top):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        found |= {os.path.join(folder, name) for name in files}
    return {path for path in found if is_visible_shard(path)}
