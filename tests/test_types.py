"""What type checkers know of a user's code: a script, and the pages of the guide."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import dask.dataframe as dd
import pytest
from pages import blocks

pytestmark = pytest.mark.packaging

ROOT = Path(__file__).parents[1]

# Each line of the first kind ends in the type that checkers have to reveal of what it begins with;
# each of the second in the codes of the errors that mypy and pyright have to find.
SCRIPT = """
import dask.dataframe as dd
import dask_image_ingest as dii

ddf = dii.read_webdataset_images("train-{000..099}.tar", size=224)

ddf  # -> ImageDataFrame
ddf.images  # -> LazyImages
ddf.images.column  # -> str
ddf.images.stack()  # -> Array
ddf.images.vectors("embedding")  # -> Array
ddf.images.encode("png")  # -> Series
ddf.images.thumbnails(64)  # -> ImageDataFrame
ddf.images.map_batches(len, {"n": "int8"})  # -> ImageDataFrame
ddf.images.map_batches(len, {"n": "int8"}).images  # -> LazyImages
ddf.images.channel_stats()  # -> DataFrame
ddf.images.show()  # -> Thumbnails
ddf.images.iter_batches(64)  # -> Batches
next(ddf.images.iter_batches(64))  # -> Any
ddf.images.iter_batches(64).position.row  # -> int
dii.mix_batches([ddf, ddf], 64)  # -> Batches
dii.read_images("photos")  # -> ImageDataFrame
dii.read_parquet_images("photos.parquet")  # -> ImageDataFrame
dii.decode_images(ddf)  # -> ImageDataFrame
dii.checkpoint(ddf, "out")  # -> ImageDataFrame

ddf.width  # -> Column
ddf["width"] * ddf.height > 2**16  # -> Column
ddf[ddf.width >= 512]  # -> ImageDataFrame
ddf[ddf.error.isna() & ~ddf.txt.str.contains("cat")]  # -> ImageDataFrame
ddf[ddf.txt.str.len() > 3].images  # -> LazyImages
ddf[["__key__", "image"]]  # -> ImageDataFrame
ddf.partitions[:2].images  # -> LazyImages
ddf.drop(columns=["txt"]).persist().images  # -> LazyImages
ddf.merge(ddf, on="__key__").sort_values("width").images  # -> LazyImages
ddf.shuffle("__key__").assign(wide=ddf.width > 9)  # -> ImageDataFrame
ddf.head(3).images  # -> FrameImages
ddf.compute().images.arrays()  # -> list[Any]


def count(frame: dd.DataFrame) -> int:
    return len(frame)


count(ddf)  # -> int
ddf.images.iter_batches("64")  # ! arg-type reportArgumentType
ddf.images.stak()  # ! attr-defined reportAttributeAccessIssue
dii.read_webdataset_images("a.tar", resize="bigger")  # ! arg-type reportArgumentType
ddf.images.iter_batches(64, format="jax")  # ! arg-type reportArgumentType
ddf.head(rows=3)  # ! call-arg reportCallIssue
"""


def script() -> tuple[str, dict[int, str]]:
    """The script, and the text that each of its lines gets: a type, or the codes of an error."""
    lines, expected = [], {}
    for number, line in enumerate(SCRIPT.splitlines(), 1):
        code, arrow, told = line.partition("  # -> ")
        lines.append(f"reveal_type({code})" if arrow else line)
        if arrow:
            expected[number] = told
        elif "  # ! " in line:
            expected[number] = line.partition("  # ! ")[2]
    return "\n".join(lines), expected


def check(output: str, found: dict[int, str], expected: dict[int, str]) -> None:
    assert found.keys() == expected.keys(), output
    for number, told in expected.items():
        assert found[number] in (told, *told.split()), (number, found[number], output)


def run(*command: object, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    ).stdout


def test_mypy_knows_the_types_of_a_users_script(tmp_path):
    text, expected = script()
    file = tmp_path / "script.py"
    file.write_text(text)
    # As a user has it: strict, and nothing of this project's own settings.
    options = ["--strict", "--config-file=", "--follow-imports=silent"]
    output = run("mypy", *options, "--cache-dir", tmp_path / "cache", file, MYPYPATH=str(ROOT))
    said = r'^\S*script\.py:(\d+): (?:note: Revealed type is "(.*)"|error: .*\[([\w-]+)\])$'
    found = {
        int(number): re.sub(r"[\w.]+\.(\w+)", r"\1", revealed) or code
        for number, revealed, code in re.findall(said, output, re.MULTILINE)
    }
    check(output, found, expected)


def pyright(folder: Path, **rules: str) -> list[tuple[str, int, str, str]]:
    """File, line, rule and message of each thing that pyright says of a folder."""
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "standard", **rules}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    output = run("pyright", "--outputjson", "--pythonpath", sys.executable, "-p", folder)
    return [
        (
            Path(each["file"]).stem,
            each["range"]["start"]["line"] + 1,
            each.get("rule", ""),
            each["message"],
        )
        for each in json.loads(output)["generalDiagnostics"]
    ]


def test_pyright_knows_the_types_of_a_users_script(tmp_path):
    text, expected = script()
    (tmp_path / "script.py").write_text(text)
    told = pyright(tmp_path)
    found = {}
    for _, line, rule, message in told:
        revealed = re.search(r'^Type of ".*" is "(.*)"$', message, re.DOTALL)
        found[line] = revealed[1] if revealed else rule
    check(str(told), found, expected)


def test_pyright_finds_no_error_in_the_pages(tmp_path):
    pages = [ROOT / "README.md", ROOT / "docs" / "index.md", *(ROOT / "docs" / "guide").iterdir()]
    for page in pages:
        lines: list[str] = []
        for block in blocks(page):
            if block.language == "python" and not block.not_run:
                lines += [""] * (block.line - 1 - len(lines))
                lines += code_of(block.code)
        name = "".join(page.relative_to(ROOT).with_suffix("").parts)
        (tmp_path / f"{name}.py").write_text("\n".join(lines) + "\n")
    not_ours = {
        "reportMissingImports": "none",  # of packages that are not installed
        "reportUnusedExpression": "none",  # a page shows values
        "reportPossiblyUnboundVariable": "none",  # after a loop
        "reportPrivateImportUsage": "none",  # dask.config, which Dask does not export by name
    }
    told = pyright(tmp_path, **not_ours)
    # DALI makes these constants when it is imported.
    assert [each for each in told if "INTERP_" not in each[-1]] == []


def code_of(block: str) -> list[str]:
    """The lines of code of a block, without what its examples print."""
    lines = block.splitlines()
    if not block.startswith(">>> "):
        return lines
    return [line[4:] if line.startswith((">>> ", "... ")) else "" for line in lines]


def test_methods_of_the_stub_are_those_of_dask_and_take_their_arguments():
    stub = ast.parse((ROOT / "dask_image_ingest" / "image_frame.pyi").read_text())
    classes = {"ImageDataFrame": dd.DataFrame, "Column": dd.Series}
    compared = 0
    for found in stub.body:
        for method in found.body if getattr(found, "name", None) in classes else ():
            if not isinstance(method, ast.FunctionDef) or method.name == "images":
                continue
            real = getattr(classes[found.name], method.name)
            if method.name.startswith("__") or not inspect.isfunction(real):
                continue
            names = [each.arg for each in method.args.args]
            known = [
                each.name
                for each in inspect.signature(real).parameters.values()
                if each.kind is each.POSITIONAL_OR_KEYWORD
            ]
            assert names == known[: len(names)], method.name
            compared += 1
    assert compared > 20
