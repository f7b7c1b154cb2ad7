"""Hooks of mkdocs.yml: pages from outside of docs/, links that lead out of the site, and the check of the API pages."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
log = get_plugin_logger("docs_site")

FROM_ROOT = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""File of the repository's root -> page of the site."""
DOCUMENTED = (
    "algorithms/grpo.py", "algorithms/nemo_rl_api.py", "driver/interfaces.py", "environments/interfaces.py",
    "environments/config.py", "environments/registry.py", "parallel/policy.py", "generation/engine.py",
    "recipe/validation/validate.py",
)  # fmt: skip
"""Modules whose public names must have a place in the API pages, besides those of objective/ and recipe/schema/."""
FOLDER = re.compile(r"^::: ([\w.]+)\.\*$", re.MULTILINE)
"""Line of an API page that stands for all modules of a folder."""
LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the repository's root."""
    for name, page in FROM_ROOT.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, files: Any, **_: Any) -> str:
    """Point links to pages of the site at these, leave only the text of links to files that the site has not, and put
    the modules of a folder in place of the folder."""
    source = page.file.src_uri
    folder = ROOT if source in FROM_ROOT.values() else (ROOT / "docs" / source).parent

    def placed(match: re.Match[str]) -> str:
        picture, text, target, anchor = match.groups()
        path = os.path.relpath(os.path.normpath(folder / target), ROOT)
        uri = FROM_ROOT.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(uri) is None:
            return f"`{text}`" if "/" in text and "`" not in text else text
        return f"{picture}[{text}]({os.path.relpath(uri, Path(source).parent)}{anchor or ''})"

    return FOLDER.sub(_modules, LINK.sub(placed, markdown))


def _modules(match: re.Match[str]) -> str:
    """Return a line for each module of the folder."""
    files = sorted((ROOT / match[1].replace(".", "/")).glob("[!_]*.py"))
    return "\n\n".join(f"::: {match[1]}.{file.stem}" for file in files)


def on_post_build(config: Any) -> None:
    """Fail if a public name of the documented modules has no place in the API pages."""
    inventory = config.plugins["mkdocstrings"].handlers.inventory
    if missing := [name for name in _public_names() if name not in inventory]:
        raise PluginError(f"no page in docs/api has {', '.join(missing)}")
    log.info("all %d public names have a page", len(list(_public_names())))


def _public_names() -> Iterator[str]:
    """Yield the full names of the classes and functions that the documented modules define."""
    package = ROOT / "grpo_mcore"
    modules = [package / name for name in DOCUMENTED]
    modules += [*sorted((package / "objective").glob("*.py")), *sorted((package / "recipe" / "schema").glob("*.py"))]
    for path in modules:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                yield ".".join((*path.relative_to(ROOT).with_suffix("").parts, node.name))
