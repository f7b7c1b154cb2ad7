"""Completion in the shell: verbs, options, recipes and recipe keys. `grpo-mcore --install-completion` sets it up."""

import argparse
import os
import shlex
from pathlib import Path
from typing import Any

START = {"bash": ".bashrc", "zsh": ".zshrc"}
"""File in the home folder that a shell reads when it starts."""


def words_so_far() -> list[str] | None:
    """Return the words of the command line that the shell wants completed. None: this is an ordinary call."""
    if "_ARGCOMPLETE" not in os.environ:
        return None
    line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    try:
        return shlex.split(line)[1:]
    except ValueError:  # an open quotation mark
        return line.split()[1:]


def complete(parser: argparse.ArgumentParser) -> None:
    """Print the possible next words and exit."""
    import argcomplete

    argcomplete.autocomplete(parser, always_complete_options=False)


def recipes_and_keys(prefix: str, **_: Any) -> list[str]:
    """Return what a word that begins with `prefix` may become: names of recipes, and keys up to their next dot."""
    from grpo_mcore.recipe.loading.load import recipe_folders
    from grpo_mcore.recipe.schema.keys import known_keys, section_of

    words = {path.stem for folder in recipe_folders() for path in folder.glob("*.yaml")}
    for key, field in known_keys().items():
        if "*" not in key and key.count(".") == prefix.count("."):
            words.add(f"{key}." if section_of(field.annotation)[0] else f"{key}=")
    return sorted(word for word in words if word.startswith(prefix) and word != prefix)


def presets(prefix: str, **_: Any) -> list[str]:
    """Return the presets whose names begin with `prefix`."""
    from grpo_mcore.recipe.loading.load import recipe_folders

    names = {path.stem for folder in recipe_folders() for path in folder.glob("presets/*.yaml")}
    return sorted(name for name in names if name.startswith(prefix))


class Install(argparse.Action):
    """Writes the completion script of the user's shell, lets the shell read it at its start, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        import argcomplete

        shell = Path(os.environ.get("SHELL", "bash")).name
        if shell not in START:
            parser.error(f"--install-completion knows {' and '.join(START)}, and SHELL is {shell}")
        script = Path.home() / ".local" / "share" / "grpo-mcore" / f"completion.{shell}"
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(argcomplete.shellcode(["grpo-mcore"], shell=shell), encoding="utf-8")
        start, line = Path.home() / START[shell], f". {shlex.quote(str(script))}"
        text = start.read_text(encoding="utf-8") if start.is_file() else ""
        if line not in text.splitlines():
            start.write_text(f"{text.rstrip()}\n{line}\n".lstrip(), encoding="utf-8")
        print(f"completion is in {script}, read by ~/{START[shell]}: open a new shell, or `{line}`")
        parser.exit()
