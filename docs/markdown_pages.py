"""The site for programs that read text: its pages as Markdown, and ``llms.txt``, which lists them.

A page `guide/read.html` is also `guide/read.md`: a copy of its source, whose links lead to other
such pages, and to copies of the pictures and examples that it names. `reference/api.md` has the
signature and docstring of each public name. The form of ``llms.txt`` is that of https://llmstxt.org.
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import dask.dataframe as dd

import dask_image_ingest

# Folder of pages → heading in llms.txt; the first page of a folder is the index, which lists them.
SECTIONS = {"guide": "Guide", "design": "Design", ".": "Optional"}


def setup(app: Any) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("build-finished", _write)
    return {"parallel_read_safe": True}


def _write(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        write_pages(Path(app.srcdir), Path(app.outdir))


def write_pages(source: Path, out: Path) -> None:
    """Copy the Markdown pages below ``source`` into the site ``out``; add reference and list."""
    pages = [page for page in sorted(source.rglob("*.md")) if "_build" not in page.parts]
    for page in pages:
        copy = out / page.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(_with_files(page.read_text(), page.parent, source, out))
    # Pages of the site that only include a file of the repository.
    for name, file in (("contributing", "CONTRIBUTING.md"), ("changes", "CHANGELOG.md")):
        text = (source.parent / file).read_text()
        text = text.replace("](docs/", "](")
        (out / f"{name}.md").write_text(_with_files(text, source, source, out))
    (out / "reference").mkdir(exist_ok=True)
    (out / "reference" / "api.md").write_text(_reference())
    (out / "llms.txt").write_text(_list_of(out, [page.relative_to(source) for page in pages]))


def _with_files(text: str, folder: Path, source: Path, out: Path) -> str:
    """Text of a page in a folder; files that it links to, other than pages, go into the site."""

    def linked(match: re.Match[str]) -> str:
        file = (folder / match[1]).resolve()
        if file.suffix == ".md" or not file.is_file():
            return match[0]
        inner = source if file.is_relative_to(source) else source.parent
        place = file.relative_to(inner)
        if file.suffix == ".rst":
            place = Path("reference", "api.md")
        else:
            (out / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, out / place)
        return f"]({os.path.relpath(place, folder.relative_to(source))})"

    return re.sub(r"\]\(([^)\s#]+)(?:#[^)]*)?\)", linked, text)


def _list_of(out: Path, pages: list[Path]) -> str:
    title, summary = _title_and_summary((out / "index.md").read_text())
    lines = [f"# {title}", "", f"> {summary}"]
    for folder, heading in SECTIONS.items():
        lines += ["", f"## {heading}", ""]
        for page in pages:
            if page.parent == Path(folder) and page.name != "index.md":
                title, summary = _title_and_summary((out / page).read_text())
                lines.append(
                    f"- [{title}]({page.as_posix()})" + (f": {summary}" if summary else "")
                )
        if folder == "guide":
            lines += ["", "## Reference", ""]
            told = "signature and docstring of each function, class and method"
            lines.append(f"- [API](reference/api.md): {told}")
            lines += [
                f"- [{_title_and_summary((out / page).read_text())[0]}]({page.as_posix()})"
                for page in pages
                if page.parent == Path("reference")
            ]
    return "\n".join(lines) + "\n"


def _title_and_summary(text: str) -> tuple[str, str]:
    """The heading of a page, and the first sentence below it, without links."""
    text = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    _, _, text = text.partition("# ")
    title, _, body = text.partition("\n")
    prose = [part for part in re.split(r"\n\s*\n", body) if re.match(r"[\w`\[]", part.strip())]
    first = " ".join(prose[0].split()) if prose else ""
    sentence = re.match(r".*?[.:](?= |$)", first)
    plain = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", sentence[0] if sentence else first)
    return title.strip(), plain.rstrip(":")


def _reference() -> str:
    parts = ["# API reference\n"]
    accessor = dd.DataFrame.images
    methods = {
        f"DataFrame.images.{name}": member
        for name, member in inspect.getmembers(accessor)
        if not name.startswith("_")
    }
    for name, member in {**_public(dask_image_ingest, ""), **methods}.items():
        signature = str(inspect.signature(member)) if callable(member) else ""
        parts.append(
            f"## {name}\n\n```python\n{name}{signature}\n```\n\n{inspect.getdoc(member)}\n"
        )
    return "\n".join(parts)


def _public(module: ModuleType, prefix: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in module.__all__:
        member = getattr(module, name)
        if isinstance(member, ModuleType):
            found |= _public(member, f"{prefix}{name}.")
        else:
            found[prefix + name] = member
    return found
