"""The pages of the site that do not lie in docs/: the README as its first, the public API, results and examples that pages name.

A hook of mkdocs (mkdocs.yml); links from one page to another are set right for the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import soapjax

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def _site_path(path: str) -> str:
    """Where a file of the project stands on the site; a folder has no page."""
    if path == "README.md":
        return "index.md"
    return re.sub(r"\.py$", ".md", path.removeprefix("docs/"))


def _target(page: str, link: str) -> str:
    """What a page's relative link names, from the project's root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _for_site(text: str, path: str) -> str:
    """A page's Markdown with its links set right. A link to what has no page, a folder, leads nowhere."""
    own = posixpath.dirname(_site_path(path))

    def link(found: re.Match) -> str:
        target = _target(path, found[1])
        if not (ROOT / target).is_file():
            return "](#)"
        return f"]({posixpath.relpath(_site_path(target), own or '.')}{found[2] or ''})"

    return LINK.sub(link, text)


def _page(path: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    return f"# {path}\n\n```python\n{text}```\n" if path.endswith(".py") else _for_site(text, path)


def _reference() -> str:
    return "# Reference\n\n" + "\n".join(
        f"::: soapjax.{home}.{name}\n    options: {{heading: {name}, toc_label: {name}}}\n"
        for name, home in sorted(soapjax._HOMES.items(), key=lambda named: named[0].lower())
    )


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages; the API's names are those that `soapjax` exports."""
    files.append(File.generated(config, "reference.md", content=_reference()))
    pages = ["README.md", *(f"docs/{f.src_uri}" for f in files.documentation_pages() if f.generated_by is None)]
    for page in pages:
        for found in LINK.finditer((ROOT / page).read_text(encoding="utf-8")):
            target = _target(page, found[1])
            if not target.startswith("docs/") and target not in pages and (ROOT / target).is_file():
                pages.append(target)
    for page in pages:
        if not page.startswith("docs/"):
            files.append(File.generated(config, _site_path(page), content=_page(page)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    is_own = page.file.generated_by is None
    return _for_site(markdown, f"docs/{page.file.src_uri}") if is_own else markdown
