"""Which files of a folder are rows, and which classes they have, whatever lies in the folder."""

import os
import re
import socket
import warnings
from pathlib import Path

import dask
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import dask_image_ingest as dii
from dask_image_ingest.storage import searches_of


@pytest.fixture(autouse=True)
def threads():
    with dask.config.set(scheduler="sync"):
        yield


def save(path, content=b"no image"):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def rows(paths, **options):
    frame = dii.read_images(paths, backend="pandas", size=8, **options)
    return frame.drop(columns=["image"]).compute()


def labels(paths, **options):
    return dict(rows(paths, label="folder", **options)[["class_name", "label"]].values.tolist())


def image_folder(root):
    """torchvision's rule, as in ``ImageFolder.find_classes``."""
    names = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    return {name: number for number, name in enumerate(names)}


def test_underscores_hide_nothing(tmp_path):
    names = ["_DSC0001.JPG", "_MG_0002.jpeg", "IMG_3.Jpg", "_a/_b/__4.pNg"]
    for name in names:
        save(tmp_path / name)
    expected = sorted(name.rpartition(".")[0] for name in names)
    for paths in (tmp_path, f"{tmp_path}/*", f"{tmp_path}/**/*", f"{tmp_path}/**/*.*"):
        assert sorted(rows(paths)["__key__"]) == expected
    fs = MemoryFileSystem()
    for name in names:
        fs.pipe(f"/underscores/{name}", b"no image")
    for paths in ("memory://underscores/", "memory://underscores/*", "memory://underscores/**/*"):
        assert sorted(rows(paths)["__key__"]) == expected
    fs.rm("/underscores", recursive=True)


@pytest.mark.parametrize("paths", ["{{{0}/left,{0}/right}}", "{{../left,../right}}/*"])
def test_braces_may_hold_whole_paths(paths, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    names = ["left/ant/1.jpg", "left/bee/1.jpg", "right/ant/1.jpg"]
    for name in names:
        save(tmp_path / name)
    paths = paths.format(tmp_path)
    assert list(rows(paths)["__key__"]) == [name.removesuffix(".jpg") for name in names]
    shard = f"{tmp_path}/right/ant/1.tar"  # a later read of these folders would find it
    assert [search.first_found([shard]) for search in searches_of(paths, [])] == [None, shard]


@pytest.mark.parametrize("where", ["{}", "{}/*", "{}/**/*.jpg", "{}/*/*.jpg", "{}/**"])
def test_linked_class_folders_are_classes_as_in_torchvision(where, tmp_path):
    for name in ("ant", "bee", "cat"):
        save(tmp_path / "full" / name / "deep" / "1.jpg")
        save(tmp_path / "full" / name / "2.jpg")
    root = tmp_path / "some"
    save(root / "zebra" / "2.jpg")
    (root / "ant").symlink_to("../full/ant")
    (root / "cat").symlink_to(tmp_path / "full" / "cat")
    (root / "cat again").symlink_to("cat")
    assert labels(where.format(root)) == image_folder(root)
    if "*/*" not in where:
        assert len(rows(where.format(root))) == 7


def test_classes_without_a_readable_image_keep_the_numbers_of_the_others(tmp_path):
    save(tmp_path / "b" / "1.jpg")
    save(tmp_path / "d" / "1.jpg")
    save(tmp_path / "a" / "notes.txt")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "1.jpg").symlink_to("gone")
    expected = image_folder(tmp_path)
    with (
        pytest.warns(UserWarning, match="left out 1 links to nothing"),
        pytest.warns(UserWarning, match=r"2 of 4 folders .* hold no image, such as 'a'"),
    ):
        found = labels(tmp_path)
    assert found == {name: expected[name] for name in "bd"}
    fs = MemoryFileSystem()
    for name in ("a/notes.txt", "b/1.jpg", "d/1.jpg"):
        fs.pipe(f"/classes/{name}", b"no image")
    with pytest.warns(UserWarning, match=r"1 of 3 folders"):
        assert labels("memory://classes/") == {"b": 1, "d": 2}
    fs.rm("/classes", recursive=True)


def hidden(root):
    save(root / ".thumbs" / "1.jpg")
    save(root / "a" / "._1.jpg")
    save(root / "a" / ".DS_Store")


def broken_links(root):
    (root / "a" / "broken.jpg").symlink_to("nowhere.jpg")
    (root / "a" / "itself.jpg").symlink_to("itself.jpg")
    (root / "b").symlink_to("gone")


def names_of_bytes(root):
    save(Path(os.fsdecode(os.fsencode(root / "a") + b"/caf\xe9.jpg")))
    save(Path(os.fsdecode(os.fsencode(root) + b"/\xff/1.jpg")))


def special(root):
    os.mkfifo(root / "a" / "pipe.jpg")
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind("a/socket.png")
    (root / "a" / "zero.jpg").symlink_to("/dev/zero")


def cycles(root):
    (root / "a" / "up").symlink_to("..")
    (root / "a" / "here").symlink_to(".")
    (root / "b").symlink_to(root)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (hidden, "2 hidden files and folders, such as .*"),
        (broken_links, "2 links to nothing, such as .*; 1 files that can't be read .*itself.jpg"),
        (names_of_bytes, r"2 names that are not UTF-8.*xe9.jpg|xff"),
        (special, "3 pipes, sockets and devices, such as"),
        (cycles, "3 links to a folder that they are in, such as"),
    ],
)
def test_what_can_be_no_row_is_left_out_and_told(make, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the name of a socket is short enough
    save(tmp_path / "a" / "1.jpg")
    save(tmp_path / "c" / "2.jpg")
    make(tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frame = rows(tmp_path, label="folder")
    assert frame["__key__"].tolist() == ["a/1", "c/2"]
    expected = {name: n for name, n in image_folder(tmp_path).items() if name in "ac"}
    if make is hidden:
        expected = {"a": 0, "c": 1}
    assert dict(frame[["class_name", "label"]].values.tolist()) == expected
    messages = [str(each.message) for each in caught if "left out" in str(each.message)]
    assert len(messages) == 1
    assert re.search(told, messages[0]), messages


def test_a_named_file_that_is_none_is_left_out_beside_others(tmp_path):
    save(tmp_path / "1.jpg")
    (tmp_path / "2.jpg").symlink_to("gone")
    os.mkfifo(tmp_path / "3.jpg")
    named = [tmp_path / f"{number}.jpg" for number in (1, 2, 3)]
    for paths in (named, f"{tmp_path}/{{1,2,3}}.jpg", f"{tmp_path}/*.jpg"):
        with pytest.warns(UserWarning, match=r"links to nothing, such as .*2.jpg; 1 pipes"):
            assert rows(paths)["__key__"].tolist() == ["1"]
    with pytest.raises(dii.ShardNotFoundError, match="it is a link to nothing, a special file"):
        rows(named[2])
    with pytest.raises(dii.ShardNotFoundError, match="no such file"):  # a mistake of the caller
        rows([*named, tmp_path / "4.jpg"])


def test_a_folder_that_cannot_be_listed_is_left_out(tmp_path, monkeypatch):
    save(tmp_path / "a" / "1.jpg")
    save(tmp_path / "b" / "2.jpg")
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("/a"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with (
        pytest.warns(UserWarning, match=r"1 folders that can't be listed \(Perm.*\), such"),
        pytest.warns(UserWarning, match="1 of 2 folders .* hold no image"),
    ):
        assert labels(tmp_path) == {"b": 1}


@pytest.mark.parametrize("name", ["[a]", "*", "?", "{a,b}", "a\nb", " ", "~", "pipe:x", "ü"])
def test_a_name_may_have_any_characters(name, tmp_path):
    save(tmp_path / name / name / f"{name}.jpg")
    for paths in (tmp_path, tmp_path / name, f"{tmp_path}/**/*.jpg", f"{tmp_path}/*"):
        (key,) = rows(paths)["__key__"]
        assert key.endswith(f"{name}/{name}")
    assert len(rows(f"{tmp_path / name}/**/*.jpg" if "{" not in name else tmp_path)) == 1


def test_folders_that_all_link_to_each_other_come_to_an_end(tmp_path):
    for number in range(6):
        save(tmp_path / str(number) / f"{number}.jpg")
        for other in range(6):
            if other != number:
                (tmp_path / str(number) / f"to{other}").symlink_to(f"../{other}")
    with pytest.warns(UserWarning, match="below 3 others"):
        frame = rows(tmp_path)
    assert len(frame) < 1000
    assert len({os.path.realpath(url) for url in frame["__url__"]}) == 6


# --- random trees ---------------------------------------------------------------------------------

NAMES = ["a", "_b", "C.jpg", "d e", "[f]", "g\n", "{h}", "é", ".i", "j.v2"]
SUFFIXES = [".jpg", ".JPG", ".Png", ".webp", ".txt", "", ".jpg.bak", ".tar"]


def grow(root, rng):
    """A tree of folders, files and links, hidden, broken and circular ones among them."""
    folders = [root]
    for _ in range(rng.randint(1, 12)):
        folder = rng.choice(folders) / rng.choice(NAMES)
        if not os.path.lexists(folder):
            folder.mkdir()
            folders.append(folder)
    files = []
    for _ in range(rng.randint(3, 25)):
        file = (
            rng.choice(folders) / f"{rng.choice(NAMES)}{rng.randint(0, 99)}{rng.choice(SUFFIXES)}"
        )
        if not os.path.lexists(file):
            file.write_bytes(b"x" * rng.randint(0, 5))
            files.append(file)
    for _ in range(rng.randint(0, 4)):
        link = rng.choice(folders) / f"l{rng.randint(0, 99)}{rng.choice(['', '', '.jpg'])}"
        target = rng.choice([rng.choice(folders), rng.choice(files), root / "nowhere"])
        if not os.path.lexists(link):
            link.symlink_to(rng.choice([target, os.path.relpath(target, link.parent)]))


def walked(root):
    """The images that `os.walk` finds through all links but those back to where they are."""
    found, above = set(), {str(root): {os.path.realpath(root)}}
    for folder, folders, files in os.walk(root, followlinks=True):
        kept = []
        for name in folders:
            path = os.path.join(folder, name)
            real = os.path.realpath(path)
            is_back = any(f"{each}/".startswith(f"{real}/") for each in above[folder])
            if not name.startswith(".") and not is_back:
                above[path] = above[folder] | {real}
                kept.append(name)
        folders[:] = kept
        found |= {
            os.path.join(folder, name)
            for name in files
            if os.path.splitext(name)[1].lower() in (".jpg", ".png", ".webp")
            and not name.startswith(".")
            and os.path.isfile(os.path.join(folder, name))
        }
    return found


@pytest.mark.rounds(40, nightly=400)
def test_any_tree_gives_the_files_and_labels_of_a_walk(tmp_path, rng):
    grow(tmp_path, rng)
    expected = walked(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if not any(os.path.dirname(path) != str(tmp_path) for path in expected):
            return
        frame = dii.read_images(tmp_path, label="folder", backend="pandas", size=8)
        frame = frame[["__url__", "class_name", "label", "nbytes"]].compute()
        matched = dii.read_images(f"{tmp_path}/**/*", backend="pandas", size=8)
    assert set(frame["__url__"]) == expected
    assert len(frame) == len(expected)
    matched = set(matched["__url__"].compute())
    assert matched >= expected  # a folder that matches is searched by itself, links anew
    assert {*map(os.path.realpath, matched)} == {*map(os.path.realpath, expected)}
    names = [n for n in sorted(image_folder(tmp_path)) if not n.startswith(".")]
    for url, name, label, nbytes in frame.values.tolist():
        first, *rest = os.path.relpath(url, tmp_path).split("/")
        assert nbytes == os.path.getsize(url)
        if rest:
            assert (name, names[int(label)]) == (first, first)
