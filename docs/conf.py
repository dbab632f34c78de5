"""How ``make docs`` builds the site: the guide from Markdown, the reference from docstrings."""

import sys
from pathlib import Path

import dask_image_ingest

sys.path.insert(0, str(Path(__file__).parent))

project = "dask-image-ingest"
version = release = dask_image_ingest.__version__
author = "the contributors"
copyright = f"2026, {author}"

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.viewcode",
    "sphinx_autosummary_accessors",
    "sphinx_copybutton",
    "sphinx_design",
    "markdown_pages",  # beside this file: the pages as Markdown, and llms.txt
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]

# The guide. Names of headings are those that GitHub gives, so that links work in both places.
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]

# The reference. Types stand in the signatures, one parameter a line, and not in the text.
autosummary_generate = True
autodoc_typehints = "signature"
autodoc_preserve_defaults = True  # names of constants, not what they hold
maximum_signature_line_length = 88
python_display_short_literal_types = True
numpydoc_show_class_members = False
numpydoc_validation_checks = {
    "GL01",  # the text begins on the line of the quotes, here
    "GL03",  # double blank lines
    "GL06",  # unknown sections
    "GL07",  # sections in the usual order
    "SS01",  # no summary
    "SS03",  # a summary without a full stop
    "PR01",  # parameters that are not told
    "PR02",  # parameters that don't exist
    "PR03",  # parameters in another order
    "RT03",  # a result that is not told
    "SA04",  # a "see also" without a description
}
# Nobody makes these but the package.
numpydoc_validation_exclude = {
    r"dask_image_ingest\.\w+Error$",
    r"(curate\.Report|Batches|Position|Thumbnails)$",
}

# Links between code are checked (-n), but for the libraries whose pages are elsewhere.
nitpick_ignore_regex = [
    ("py:.*", r"(builtins|collections|typing|os|abc)\..*"),
    ("py:.*", r"(dask|distributed|pandas|numpy|pyarrow|cupy|cudf|torch|PIL)\..*"),
    # What some calls give; their docstrings tell what it can do.
    (
        "py:class",
        r"(dask_image_ingest\..*\.)?(Source|Card|TorchDataset|BatchLoader|Versions|ReportPart|PixelAugment)",
    ),
    # What only this package makes: arguments of a class that nobody calls.
    ("py:class", r"dask_image_ingest\..*\.(_\w+|FrameSource|Schedule|Share)"),
    # Type variables and aliases, and short names of modules, in signatures.
    (
        "py:.*",
        r"(.*\.)?(Format|Frame|DataFrame|Series|AnyFrame|Array|ArrowTable|PathLike|PerChannel)",
    ),
    ("py:.*", r"(.*\.)?(d[ad]|np|pd|pa)\.\w+"),
]

html_theme = "pydata_sphinx_theme"
html_title = "dask-image-ingest"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_sidebars = {"index": [], "changes": [], "benchmarks": [], "contributing": []}
html_theme_options = {
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "show_prev_next": True,
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
    "secondary_sidebar_items": ["page-toc"],
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
