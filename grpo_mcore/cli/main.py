"""The `grpo-mcore` command.

Each verb is a file of a folder beside this one, imported only when it is used. It has `run(args) -> int` and, for
options of its own, `add_arguments(parser)`; or a table COMMANDS: name -> (what it does, whether it takes a recipe as in
VERBS, its `add_arguments`, its `run`).
"""

import argparse
import errno
import io
import logging
import os
import resource
import select
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import grpo_mcore
from grpo_mcore.base.processes import collect_rarely
from grpo_mcore.base.text import escaped
from grpo_mcore.cli.completion import Install, complete, presets, recipes_and_keys, words_so_far
from grpo_mcore.cli.json_output import only_json
from grpo_mcore.cli.numbers import local
from grpo_mcore.observe.console.colors import painted
from grpo_mcore.observe.console.console_stream import UnfailingStream, unfailing_console
from grpo_mcore.observe.console.heartbeat import heartbeat
from grpo_mcore.observe.exit_codes import LOST
from grpo_mcore.recipe import RecipeError, is_override
from grpo_mcore.recipe.errors import nearest_hint

GROUPS = {
    "train": "train and measure models",
    "look": "look at a run, while it goes on or afterwards",
    "check": "check and predict before a run",
    "launch": "run on a cluster",
}
"""Folder of a group's verbs: its heading in the help."""

VERBS = {
    "train": ("train", "train a model as the recipe says: GRPO, SFT, DPO, a reward model (rm) or distillation", True),
    "eval": ("train", "measure how well models or checkpoints solve tasks", False),
    "sweep": ("train", "train a recipe with each combination of some values and seeds", True),
    "demo": ("train", "make a small model and train it with GRPO on this machine, in minutes", False),
    "watch": ("look", "show a run's progress in the terminal", None),
    "runs": ("look", "list the runs below a folder: state, step, score, and which settings differ", None),
    "report": ("look", "write a page that shows a run: curves, device-seconds, timeline, samples", None),
    "ledger": ("look", "audit a run: was every prompt trained on exactly once", None),
    "fetch": ("look", "bring a run that checkpointing.mirror has copied into a folder", None),
    "inspect": ("look", "show what every process of a run is doing, and which process the others wait for", None),
    "replay": ("look", "compute a recorded step again, on any layout, and show where it differs", None),
    "verdict": ("look", "name why policy and engine disagree, on a recorded step or for a model", None),
    "diagnose": ("look", "name what makes a run go otherwise than it should: recipe, data, rewards, loss", None),
    "export": ("look", "write a checkpoint as a model in Hugging Face's format", None),
    "config": ("check", "print the whole recipe, with the source of every value", True),
    "data": ("check", "check training data, or make it of NeMo Gym rollouts", None),
    "plan": ("check", "predict memory, time and refit of a recipe before anything is started", True),
    "rehearse": ("check", "simulate a recipe at full scale in virtual time, with faults if wanted", True),
    "doctor": ("check", "find what is wrong with this machine, or with the nodes of a cluster", False),
    "parity": ("check", "compare the policy on several layouts, and an engine, with transformers", None),
    "refit": ("check", "show how weights move from policy to engines, or verify it", None),
    "launch": ("launch", "submit a recipe to Slurm or Kubernetes", True),
    "prefetch": ("launch", "download the models and data of a recipe, for nodes without internet", True),
}
"""Verb: (group, what it does, whether it takes a recipe; None: nor overrides). The verb is the file of its name in the
group's folder."""

Command = tuple[str, bool | None, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]

ALIASES = {"sft": "train", "dpo": "train", "rm": "train", "distill": "train"}
"""Other names of a verb. Each runs its own algorithm, whichever the recipe describes."""

RUNS = {"train", *ALIASES, "eval", "demo", "sweep"}
"""Verbs that may run for days: they continue when their terminal is gone."""


OPEN_FILES = 65536
"""Number of open files that a run, and every process that it starts, may have, as far as this user may allow it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb. Return its exit code, 2 if the command line or the recipe is wrong, or 141 if the reader of standard
    output has gone away (`grpo-mcore config X | head -1`)."""
    collect_rarely()
    _open_standard_files()
    for name in ("COLUMNS", "LINES"):
        if os.environ.get(name) == "0":  # of a terminal without a size, in which nothing would be shown
            del os.environ[name]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")  # a console that cannot show a letter ends nothing
    try:
        try:
            code = _run(argv)
        except SystemExit:  # after --help and the like
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _reader_is_gone():
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed at exit
        return 141


def _open_standard_files() -> None:
    """Open /dev/null for each standard file that the process was started without (`>&-`): the next file that is opened,
    such as one of a checkpoint, would take its number, and what libraries print."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it takes the lowest free number, which is this
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))


def run_script(verb: str, default: str) -> int:
    """Run a verb for a script in examples/, whose words are options and overrides. Where they name no recipe, it is
    `default`, in the folder `configs` of examples. Return the exit code."""
    words = sys.argv[1:]
    if not any(word == "--config" or word.startswith("--config=") for word in words):
        words = ["--config", str(Path(sys.argv[0]).resolve().parent / "configs" / default), *words]
    return main([verb, *words])


def _reader_is_gone() -> bool:
    """Return whether standard output is the broken pipe, rather than a pipe to another process."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _run(argv: Sequence[str] | None) -> int:
    to_complete = words_so_far()
    words = to_complete or list(sys.argv[1:] if argv is None else argv)
    verb = words[0] if words and words[0] in {**VERBS, **ALIASES} else None
    canonical = ALIASES.get(verb, verb) if verb else None
    module: Any = import_module(f"grpo_mcore.cli.{VERBS[canonical][0]}.{canonical}") if canonical else None
    parser, chosen = _parsers(canonical)
    if verb is None and words and not words[0].startswith("-"):
        parser.error(f"there is no command {words[0]!r}{nearest_hint(words[0], [*VERBS, *ALIASES])}; --help lists them")
    takes_recipe, run = VERBS[canonical][2] if canonical else None, getattr(module, "run", None)
    if hasattr(module, "add_arguments"):
        module.add_arguments(chosen)
    commands: dict[str, Command] = getattr(module, "COMMANDS", {})
    if commands:
        below = chosen.add_subparsers(dest="command", metavar="COMMAND", required=True)
        for name, (purpose, with_recipe, add_arguments, _) in commands.items():
            command = below.add_parser(name, help=purpose, description=f"{purpose}.")
            add_arguments(command)
            _add_words(command, command.prog, with_recipe)
    if to_complete is not None:
        complete(parser)
    args, rest = parser.parse_known_args(words)  # overrides may stand between options
    if commands:
        chosen = below.choices[args.command]
        _, takes_recipe, _, run = commands[args.command]
    if unknown := [word for word in rest if word.startswith("-")]:
        chosen.error(f"unknown option: {' '.join(unknown)}")
    _sort_words(args, rest, chosen, takes_recipe)
    assert run is not None and verb is not None
    work = partial(run, args)
    with only_json() if getattr(args, "json", False) else nullcontext():
        return guarded(verb, work)


def guarded(verb: str, work: Callable[[], int]) -> int:
    """Return the exit code of `work`. An exception becomes one message on standard error, and the exit code that goes
    with it."""
    try:
        os.getcwd()
    except OSError:
        _print_error(verb, "the current folder has been removed; change to another one (cd)")
        return 2
    if verb not in RUNS:
        return _guarded(verb, work)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # the soft one is 1024 in many shells and containers
    if 0 <= soft < (most := OPEN_FILES if hard < 0 else min(hard, OPEN_FILES)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        with unfailing_console(), heartbeat() if verb != "sweep" else nullcontext():  # its runs print into files
            return _guarded(verb, work)
    except RuntimeError as error:
        if "new thread" not in str(error):
            raise
        _print_error(verb, "no thread can be started: the limit of this user's processes is reached (ulimit -u)")
        return 1


def _guarded(verb: str, work: Callable[[], int]) -> int:
    _ignore_warnings()
    _log_to_console()
    try:
        return work()
    except RecipeError as error:
        _print_error(verb, str(error))
        return 2
    except KeyboardInterrupt as interrupt:
        ended = f"\ngrpo-mcore {verb}: interrupted; every process that it started has ended"
        print("\n".join([ended, *_notes(interrupt)]), file=sys.stderr)
        return getattr(interrupt, "exit_code", 130)
    except Exception as error:
        from grpo_mcore.base.files import why_unusable
        from grpo_mcore.rollout.workers import is_fault

        lost = verb in RUNS and is_fault(error)
        if _is_ours(error):
            _print_error(verb, _message(error))
        elif isinstance(error, OSError) and error.filename and (verb not in RUNS or error.errno == errno.ENAMETOOLONG):
            _print_error(verb, f"{error.filename}: {why_unusable(Path(error.filename), error)}")
        elif isinstance(error, FileNotFoundError) and "temporary directory" in str(error):  # of tempfile
            _print_error(verb, f"{error.strerror}: is the disk full? TMPDIR names another folder")
        elif lost:
            traceback.print_exception(error)
        else:
            raise
        return LOST if lost else 1


def _print_error(verb: str, message: str) -> None:
    print(f"{painted(f'grpo-mcore {verb}:', 'red', sys.stderr)} {escaped(message)}", file=sys.stderr)


class _Console(logging.Handler):
    """Prints messages as plain lines: information to standard output, warnings and errors to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        stream, text = sys.stdout, escaped(self.format(record))
        if record.levelno >= logging.WARNING:
            stream = sys.stderr
            text = painted(text, "red" if record.levelno >= logging.ERROR else "yellow", stream)
        print(text, file=UnfailingStream(stream), flush=True)


def _log_to_console() -> None:
    """Show the messages of the package's logger, of level INFO and above."""
    package = logging.getLogger("grpo_mcore")
    if not any(isinstance(handler, _Console) for handler in package.handlers):
        package.addHandler(_Console())
        package.setLevel(logging.INFO)
        package.propagate = False


def _ignore_warnings() -> None:
    """Ignore warnings that no user can act on: of Megatron-Core about TransformerEngine, which is optional, of torch
    about its shards of weights, whose gradients it sets itself, and, where the engine is in this process, about Triton
    and the memory of a CPU."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as `engine_environment` does for an engine's process
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    for message in (
        "Transformer Engine and Apex are not installed",
        r"`torch\.distributed\.\w+_tensor` is deprecated",
        "Please use DTensor instead and we are deprecating ShardedTensor",
        r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    ):
        warnings.filterwarnings("ignore", message=message)


def _is_ours(error: BaseException) -> bool:
    """Return whether an error is this package's own: its message is enough for a reader. Others show a traceback."""
    return type(error).__module__.startswith("grpo_mcore.")


def _message(error: BaseException) -> str:
    """Return the message of an error; of one that a worker raised on purpose, the worker and its message."""
    cause = error.__cause__
    text = f"{error.worker}: {cause}" if cause is not None and _is_ours(cause) and hasattr(error, "worker") else error
    return "\n".join([str(text), *_notes(error)])


def _notes(error: BaseException) -> list[str]:
    return getattr(error, "__notes__", [])


def _parsers(verb: str | None) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Return the parser of the command, and that of the verb."""
    parser = argparse.ArgumentParser(
        prog="grpo-mcore",
        usage="grpo-mcore [-h] [--install-completion] [--version] VERB ...",
        description=grpo_mcore.__doc__,
        epilog=_verbs_by_group(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--install-completion", action=Install, nargs=0, default=argparse.SUPPRESS,
        help="let bash or zsh complete commands",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"grpo-mcore {grpo_mcore.__version__}")
    verbs = parser.add_subparsers(prog="grpo-mcore", dest="verb", metavar="VERB", required=True, help=argparse.SUPPRESS)
    chosen = parser
    for name, (_, purpose, takes_recipe) in VERBS.items():
        aliases = [alias for alias, target in ALIASES.items() if target == name]
        sub = verbs.add_parser(name, aliases=aliases, description=f"{purpose}.")
        if name == verb:
            chosen = sub
        _add_words(sub, f"grpo-mcore {name}", takes_recipe)
    return parser, chosen


def _add_words(parser: argparse.ArgumentParser, command: str, takes_recipe: bool | None) -> None:
    """Add what stands between the options, and the ways to name a recipe."""
    if takes_recipe is None:
        return
    parser.usage = parser.usage or f"{command} {'RECIPE ' if takes_recipe else ''}[options] [key=value ...]"
    overrides = "a value that replaces the recipe's; +key=value adds a key, ~key removes one"
    metavar = "RECIPE | key=value" if takes_recipe else "key=value"
    word: Any = parser.add_argument("words", nargs="*", metavar=metavar, help=overrides)
    word.completer = recipes_and_keys  # an attribute that argcomplete reads
    if takes_recipe:
        recipe_help = "the recipe: a YAML file, or the name of one in recipes/"
        parser.add_argument("--config", metavar="RECIPE", help=recipe_help)
        preset_help = "put an algorithm of recipes/presets/ on the recipe (may be given several times)"
        preset: Any = parser.add_argument("--preset", metavar="NAME", action="append", default=[], help=preset_help)
        preset.completer = presets


def _verbs_by_group() -> str:
    parts = []
    for group, heading in GROUPS.items():
        verbs = [f"  {name:<10}{purpose}" for name, (of_group, purpose, _) in VERBS.items() if of_group == group]
        parts.append("\n".join([f"{heading}:", *verbs]))
    return "\n\n".join([*parts, "`grpo-mcore VERB --help` lists the options of a verb."])


def _sort_words(
    args: argparse.Namespace, rest: Sequence[str], parser: argparse.ArgumentParser, takes_recipe: bool | None
) -> None:
    """Sort the words into `args.recipe`, `args.overrides`, for eval `args.models` and for train `args.resume` (None,
    True or a path)."""
    if takes_recipe is None:
        if rest:
            parser.error(f"unknown: {' '.join(rest)}")
        return
    words = [*args.words, *rest]
    resume = getattr(args, "resume", None)
    if isinstance(resume, str) and (is_override(resume) or resume.endswith((".yaml", ".yml"))):
        words.insert(0, resume)  # the word after `--resume` is not always its path
        args.resume = True
    presets = [f"defaults=presets/{name}" for name in getattr(args, "preset", ())]
    args.overrides = [*presets, *(word for word in words if is_override(word))]
    others = [word for word in words if not is_override(word)]
    del args.words
    if hasattr(args, "models"):
        args.models = [word for word in others if not word.endswith((".yaml", ".yml"))]
        others = [word for word in others if word not in args.models]
        try:
            args.models = [*map(local, args.models)]
        except argparse.ArgumentTypeError as error:
            parser.error(str(error))
    elif not takes_recipe:
        if others:
            parser.error(f"not an override (key=value): {others[0]}")
        return
    if targets := getattr(args, "targets", ()):
        if not others or others[0] not in targets:
            parser.error(f"where to: {' or '.join(targets)}; then the recipe")
        args.target = others.pop(0)
        if args.check:
            return
    recipes = [*([args.config] if args.config else []), *others]
    del args.config
    if takes_recipe and not recipes:
        parser.error("a recipe is required: a YAML file or a name in recipes/")
    if len(recipes) > 1:
        parser.error(f"one recipe at a time, got {' and '.join(recipes)}; an override is written key=value")
    args.recipe = recipes[0] if recipes else None


if __name__ == "__main__":
    sys.exit(main())
