"""The parts that all commands share: options, profiles, output, and the conversion of errors to a line and an exit code.

Rules: results go to standard output, as tables on a terminal, else as one JSON object per line. Progress, notes and errors go to
standard error. A command is a function of a Shell and the command's own parameters. A profile is a named set of options, with the names
that they have in Spark, that select a broker and the connection to it. Profiles are in a private TOML file.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import functools
import inspect
import json
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Concatenate, Final, Literal, NamedTuple, NoReturn, ParamSpec, get_args

import typer

from orderedmq.conditions import OptionCondition
from orderedmq.endpoint import Endpoint
from orderedmq.errors import Kind, OptionError, OrderedMQError, kind_of
from orderedmq.options.endpoint import (
    ADDRESS_VARIABLES,
    SECRETS,
    VARIABLES,
    BrokerOptions,
    address_from_environment,
    from_environment,
    layered,
)
from orderedmq.options.values import DEFAULT_DIRECTORY, names_of, parse_duration, parse_timestamp, shown
from orderedmq.secret_files import read_secret_file
from orderedmq.tools.readable import CONTROL, escaped, one_line, shortened

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from rich.table import Table

    from orderedmq.broker import Broker


P = ParamSpec("P")

REFUSED: Final = 1
USAGE: Final = 2
MISSING: Final = 3
INTERRUPTED: Final = 130
#: The exit code that a shell reports for a program that SIGPIPE ended.
PIPE_CLOSED: Final = 141
EXIT_CODES: Final = (
    "Exit codes: 0 success; 1 refused or failed, or an audit or a check found something; 2 wrong usage; 3 the store, topic, queue or group "
    "does not exist; 130 interrupted."
)

#: The errors of a write to a full file system, or beyond a limit of disk space or of a file's size.
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CODES: Final[Mapping[Kind, int]] = {"usage": USAGE, "missing": MISSING, "refused": REFUSED}

#: Characters of a value that people see, about a screen, and the text after a longer one, which says how to see the whole value.
LONGEST: Final = 1920
WHOLE: Final = "--full shows all"
#: Characters of a name that a table shows in one line.
_LONGEST_NAME: Final = 28
#: The option of commands that show messages.
Full = Annotated[
    bool,
    typer.Option(
        "--full",
        help="Show complete bodies, keys and errors on a terminal. Otherwise long values are cut.",
    ),
]

#: The environment variable that replaces the file's default path.
FILE_VARIABLE: Final = "ORDEREDMQ_CONFIG"
_WHAT: Final = "the file of profiles"


PathOption = Annotated[
    Path | None,
    typer.Option(
        "--path",
        help=f"Directory of the embedded broker (default: the environment's ORDEREDMQ_PATH, else {DEFAULT_DIRECTORY}).",
        show_default=False,
        metavar="DIR",
        # The store's own error says who may read it.
        readable=False,
    ),
]
NamesrvOption = Annotated[
    str | None,
    typer.Option(
        "--namesrv",
        help="Nameservers of a RocketMQ cluster, host:port;host:port, instead of --path (default: the environment's ORDEREDMQ_NAMESRV).",
        show_default=False,
        metavar="ADDR",
    ),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", help="With --namesrv: the namespace of topics and groups.", show_default=False, metavar="NAME"),
]
ProfileOption = Annotated[
    str | None,
    typer.Option(
        "--profile",
        help=f"Take the options of broker, account and TLS from this table of ~/.config/orderedmq/config.toml (or of the file "
        f"in {FILE_VARIABLE}).",
        show_default=False,
        metavar="NAME",
        envvar="ORDEREDMQ_PROFILE",
        show_envvar=False,
    ),
]
ConnectionOption = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        "-o",
        help="A connection option with the same name as in Spark, such as useTLS=true or credentialsFile=FILE. May be repeated. Secrets belong "
        "in a profile, a credentials file or the environment.",
        show_default=False,
        metavar="NAME=VALUE",
    ),
]
JsonOption = Annotated[
    bool | None,
    typer.Option(
        "--json/--no-json",
        help="Print one JSON object per line, or tables (default: tables on a terminal, else JSON).",
        show_default=False,
    ),
]


#: The options of every command. Their help is long at the command ``orderedmq`` itself, and these words at the others.
SHARED: Final[Mapping[str, tuple[Any, str]]] = {
    "path": (PathOption, "Directory of the embedded broker."),
    "as_json": (JsonOption, "JSON lines or tables."),
    "namesrv": (NamesrvOption, "Nameservers of a RocketMQ cluster."),
    "namespace": (NamespaceOption, "Namespace in the cluster."),
    "profile": (ProfileOption, "Options from a file."),
    "options": (ConnectionOption, "An option as in Spark."),
}
_PANEL: Final = "Options of every command (see orderedmq --help)"


class Column(NamedTuple):
    """One column of a table: the field that it shows, its title, and the function that turns a value into text.

    ``colour`` returns the colour of a value that needs attention, or "". A terminal for which NO_COLOR is set shows no colours.
    """

    field: str
    title: str
    text: Callable[[Any], str] = str
    right: bool = False
    #: Show the beginning of a text in one line, as much as fits, instead of folding it.
    cut: bool = False
    colour: Callable[[Any], str] = lambda _: ""


@dataclass
class Shell:
    """The options that all commands share, and the output of a command."""

    path: Path | None = None
    as_json: bool | None = None
    namesrv: str | None = None
    namespace: str | None = None
    profile: str | None = None
    options: Sequence[str] | None = None

    @property
    def json(self) -> bool:
        return not sys.stdout.isatty() if self.as_json is None else self.as_json

    @functools.cached_property
    def broker_options(self) -> dict[str, str]:
        """The options that select the broker, from the command line, else from the profile, else from the environment.

        Raises OptionError CONFLICT, INVALID or MISSING.
        """
        if self.path is not None and self.namesrv is not None:
            raise OptionError(OptionCondition.CONFLICT, "--path and --namesrv exclude each other. Give only one of them")
        typed = _typed(self.options)
        for option, name, value in (
            ("--path", "path", None if self.path is None else str(self.path)),
            ("--namesrv", "namesrvAddr", self.namesrv),
            ("--namespace", "namespace", self.namespace),
        ):
            if value is not None and typed.setdefault(name, value) != value:
                raise OptionError(
                    OptionCondition.CONFLICT,
                    f"{option} and an --option with the same meaning have different values. Give only one of them",
                )
        profile = {} if self.profile is None else read_profile(self.profile)
        options = layered(typed, profile)
        if options.keys().isdisjoint(ADDRESS_VARIABLES):
            options |= address_from_environment()
        if "namesrvAddr" in options:
            # The environment has the account and TLS options of a cluster, which a store does not need.
            options = layered(options, from_environment())
        elif self.namespace is not None:
            raise OptionError(OptionCondition.CONFLICT, "--namespace needs --namesrv, because a store has no namespaces")
        return {"path": DEFAULT_DIRECTORY, **options} if "namesrvAddr" not in options else options

    @property
    def endpoint(self) -> Endpoint:
        """The address of the broker that the options select. Raises OptionError CONFLICT, INVALID, MISSING or UNSUPPORTED."""
        # This imports PyArrow, which ``--help`` does not need.
        from orderedmq.options.parse import parse

        return parse(BrokerOptions, self.broker_options).endpoint

    def store(self, what: str) -> Path:
        """Return the directory of the embedded broker's store. ``what``: the command, for the error.

        Raises OptionError UNSUPPORTED for a cluster.
        """
        endpoint = self.endpoint
        if endpoint.path is None:
            raise OptionError(
                OptionCondition.UNSUPPORTED, f"{what} is for a store of the embedded broker, not for RocketMQ. Give --path"
            )
        return Path(endpoint.path)

    @property
    def address(self) -> str:
        """The broker's directory or nameservers, for texts."""
        return str(self.endpoint)

    def broker(self) -> Broker:
        from orderedmq.connections import reach

        return reach(self.endpoint)

    def show(
        self,
        rows: Sequence[Mapping[str, Any]],
        columns: Sequence[Column],
        *,
        title: str = "",
        none: str = "nothing",
        full: bool = False,
    ) -> None:
        """Print rows as a table of ``columns``, or all their fields as JSON lines.

        ``none``: the text that replaces a table without rows. ``full``: instead of a table, print a line with title and complete value per
        column, because drawing a table of values with millions of characters takes a minute.
        """
        if self.json:
            for row in rows:
                self.emit(row)
            return
        if not rows:
            self.say(none)
            return
        if full:
            for row in rows:
                for column in columns:
                    self.say(f"{column.title}: {cell(row, column)}")
                self.say("")
            return
        console().print(table(rows, columns, title))

    def emit(self, row: Mapping[str, Any]) -> None:
        """Print one JSON object, with control characters escaped like ``\\u009b``."""
        typer.echo(CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(row, ensure_ascii=False)))

    def say(self, text: str) -> None:
        """Print a line of text, unless the output is JSON."""
        if not self.json:
            typer.echo(escaped(text))

    def done(self, row: Mapping[str, Any], text: str) -> None:
        """Print the result of a command that changes something: ``row`` as JSON, or ``text``."""
        if self.json:
            self.emit(row)
        else:
            self.say(text)

    def note(self, text: str) -> None:
        """Print a line to standard error, separate from the results."""
        typer.echo(escaped(text), err=True)

    def ask(self, question: str, yes: bool) -> None:
        """Ask the user to confirm, unless ``yes`` is set. Exit if the answer is no.

        Raises OptionError MISSING if standard input is no terminal.
        """
        if yes:
            return
        if not sys.stdin.isatty():
            raise OptionError(
                OptionCondition.MISSING, f"{question} Standard input is no terminal, so nobody can answer. Give --yes"
            )
        if not typer.confirm(escaped(question), err=True):
            self.note("nothing was changed")
            raise typer.Exit(REFUSED)

    @contextlib.contextmanager
    def progress(self, what: str, total: int | None = None, *, size: bool = False, typing: bool = False) -> Iterator[Bar]:
        """Show a progress bar on standard error if that is a terminal. ``size``: it counts bytes.

        ``typing``: draw nothing, because the user is typing lines on the terminal.
        """
        from rich import progress as rich

        amount = (rich.DownloadColumn(binary_units=True), rich.TransferSpeedColumn()) if size else (rich.MofNCompleteColumn(),)
        columns = (
            rich.SpinnerColumn(),
            rich.TextColumn("{task.description}"),
            rich.BarColumn(),
            *amount,
            rich.TimeRemainingColumn(),
        )
        shown = console(stderr=True)
        with rich.Progress(*columns, console=shown, disable=typing or not shown.is_terminal, transient=True) as progress:
            yield Bar(progress, progress.add_task(what, total=total))


def profiles_file() -> Path:
    """Return the path of the file of profiles. The file may not exist."""
    if named := os.environ.get(FILE_VARIABLE):
        return Path(named)
    folder = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return Path(folder) / "orderedmq" / "config.toml"


def read_profile(name: str) -> dict[str, str]:
    """Return the options of a profile as texts, with their names in camelCase.

    Raises OptionError MISSING if the file or the profile does not exist; INVALID if other users may change the file or read secrets in
    it, if it is not TOML, or if the profile contains anything except broker options. Errors show no value, because it may be a secret.
    """
    file = profiles_file()
    try:
        profiles = tomllib.loads(read_secret_file(str(file), _WHAT, _names_secrets))
    except tomllib.TOMLDecodeError as error:
        raise OptionError(OptionCondition.INVALID, f"{_WHAT} {file} is not TOML: {error}") from None
    profile = profiles.get(name)
    if not isinstance(profile, dict):
        names = ", ".join(each for each, options in profiles.items() if isinstance(options, dict)) or "no profile"
        raise OptionError(
            OptionCondition.MISSING,
            f"{_WHAT} {file} has no profile {shown(name)}, only {names}. Write a table [{name}] with the options of the connection",
        )
    spelling = names_of(BrokerOptions)
    options: dict[str, str] = {}
    for key, value in profile.items():
        if key.lower() not in spelling:
            why, remedy = (
                f"has {shown(key)}, which is not an option of the connection",
                f"Use only {', '.join(spelling.values())}",
            )
        elif not isinstance(value, str | bool):
            why, remedy = "has a value that is neither a text nor true or false", f'Write {key} = "..."'
        else:
            options[spelling[key.lower()]] = value if isinstance(value, str) else str(value).lower()
            continue
        raise OptionError(OptionCondition.INVALID, f"profile {name} in {file} {why}. {remedy}")
    return options


def _names_secrets(text: str) -> bool:
    """Return whether a file of profiles, which may be damaged, has the name of a secret option."""
    return any(name.lower() in text.lower() for name in SECRETS)


def _typed(options: Sequence[str] | None) -> dict[str, str]:
    """Return the options that ``--option NAME=VALUE`` gives. Raises OptionError INVALID or CONFLICT."""
    spelling = names_of(BrokerOptions)
    texts: dict[str, str] = {}
    for text in options or ():
        key, equals, value = text.partition("=")
        name = spelling.get(key.lower())
        if not equals or name is None:
            raise OptionError(
                OptionCondition.INVALID,
                f"--option {key} does not set a connection option. Give NAME=VALUE with one of the names {', '.join(spelling.values())}",
            )
        if name in SECRETS:
            raise OptionError(
                OptionCondition.INVALID,
                f"--option {name} would show a secret to everyone on this machine. Set {VARIABLES[name]}, or put it into a profile",
            )
        if texts.setdefault(name, value) != value:
            raise OptionError(OptionCondition.CONFLICT, f"--option {name} is given twice with different values. Drop one")
    return texts


@dataclass
class Bar:
    """A progress bar that shows the amount done, the total and the estimated time left."""

    progress: Progress
    task: TaskID

    def advance(self, count: int) -> None:
        self.progress.advance(self.task, count)

    def at(self, part: int, total: int) -> None:
        self.progress.update(self.task, completed=part, total=total)


def console(stderr: bool = False) -> Console:
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            # Raise, because Rich would exit with code 1.
            raise BrokenPipeError

    return Plain(stderr=stderr, highlight=False)


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], title: str = "") -> Table:
    """Return rows as a table of ``columns``. If it is too wide, rich narrows texts, but no numbers and, beside a text that is cut, no names."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    cells: list[list[Text]] = []
    some_are_cut = any(column.cut for column in columns)
    for column in columns:
        justify: Literal["right", "left"] = "right" if column.right else "left"
        # Use Text instead of markup, because a body may have brackets. Without no_wrap at the column, rich may narrow it.
        texts = [Text(shortened(cell(row, column), LONGEST, WHOLE), _colour(row, column)) for row in rows]
        if column.cut:
            texts = [Text(one_line(text.plain), text.style, no_wrap=True) for text in texts]
        name = some_are_cut and not column.cut and max((len(text) for text in texts), default=0) <= _LONGEST_NAME
        overflow: Literal["ellipsis", "fold"] = "ellipsis" if column.cut else "fold"
        shown.add_column(column.title, justify=justify, overflow=overflow, no_wrap=column.right or name)
        cells.append(texts)
    for texts_of_row in zip(*cells, strict=True):
        shown.add_row(*texts_of_row)
    return shown


def _colour(row: Mapping[str, Any], column: Column) -> str:
    return "" if row.get(column.field) is None else column.colour(row[column.field])


def some(value: Any) -> str:
    """Return the colour of a number or a text that is nothing to worry about only if it is 0 or empty."""
    return "yellow" if value else ""


def fault(value: Any) -> str:
    """Return the colour of the text of an error, or of the answer to whether something is in order."""
    return "" if value is True else "red"


def cell(row: Mapping[str, Any], column: Column) -> str:
    """Return the text of a row's value in a column."""
    return "-" if row.get(column.field) is None else column.text(row[column.field])


def parse_moment(text: str, option: str) -> int:
    """Return the µs since 1970 of a time as someone on call types it: 5m or 2h ago, 18:05 of today (UTC), or as `parse_timestamp`.

    Raises OptionError INVALID.
    """
    text, now = text.strip(), datetime.now(UTC)
    if re.fullmatch(r"[0-9]+[smh]", text):
        return int((now.timestamp() - parse_duration(text, option)) * 1e6)
    if re.fullmatch(r"[0-9]{2}:[0-9]{2}(:[0-9]{2})?", text):
        text = f"{now.date().isoformat()}T{text}"
    return parse_timestamp(text, option)


# Commands.


def commands(help_text: str, *, add_completion: bool = False, **settings: Any) -> typer.Typer:
    """Return a group of commands."""
    return typer.Typer(
        help=help_text,
        no_args_is_help=True,
        add_completion=add_completion,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
        **settings,
    )


def command(
    app: typer.Typer, name: str, *, path_help: str | None = None, **settings: Any
) -> Callable[[Callable[Concatenate[Shell, P], None]], Callable[Concatenate[Shell, P], None]]:
    """Return a decorator that makes a function a command of ``app``, with the shared options and with exit codes for errors.

    ``path_help``: the help of ``--path`` for a command where the folder is not a store.
    """

    def register(function: Callable[Concatenate[Shell, P], None]) -> Callable[Concatenate[Shell, P], None]:
        call: Callable[..., None] = function
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]

        @functools.wraps(function)
        def run(context: typer.Context, **arguments: Any) -> None:
            above: Shell = context.obj or Shell()
            typed = {name: arguments.pop(name) for name in vars(above)}
            typed["options"] = [*(above.options or ()), *(typed["options"] or ())]
            shell = replace(above, **{name: value for name, value in typed.items() if value is not None})
            with exit_codes():
                call(shell, **arguments)
                sys.stdout.flush()

        kind = inspect.Parameter.KEYWORD_ONLY
        shared = [
            inspect.Parameter("context", kind, annotation=typer.Context),
            *(parameter.replace(kind=kind) for parameter in own),
            *(
                inspect.Parameter(name, kind, default=None, annotation=annotation)
                for name, annotation in _briefly(path_help).items()
            ),
        ]
        run.__signature__ = inspect.Signature(shared)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in shared}
        # Otherwise Typer would follow __wrapped__ and see only the parameters of the original function.
        del run.__wrapped__
        app.command(name, **settings)(run)
        return function

    return register


def _briefly(path_help: str | None) -> dict[str, Any]:
    """Return the annotations of the shared options, with short help in a panel of their own. ``path_help``: see `command`."""
    out: dict[str, Any] = {}
    for name, (annotation, text) in SHARED.items():
        kind, option = get_args(annotation)
        brief = copy.copy(option)
        if name == "path" and path_help is not None:
            brief.help = path_help
        else:
            brief.help, brief.rich_help_panel = text, _PANEL
        out[name] = Annotated[kind, brief]
    return out


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Turn an error into a line on standard error and an exit code."""
    try:
        yield
    except OrderedMQError as error:
        _fail(f"[{error.condition}] {error.message}", code_of(error))
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        _give_up_output()
        raise typer.Exit(PIPE_CLOSED) from None
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _give_up_output()
        _fail(f"the output or a temporary file cannot be written: {error.strerror}", REFUSED)


def _give_up_output() -> None:
    # Python flushes standard output again when it exits, and that must not fail.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_closed_streams() -> None:
    """Open standard streams that the caller has closed (``<&-``), because they are None in Python. They are empty and discard output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def code_of(error: OrderedMQError) -> int:
    return _CODES[kind_of(error)]


def _fail(text: str, code: int) -> NoReturn:
    line = f"orderedmq: {escaped(text)}"
    if sys.stderr.isatty():
        console(stderr=True).print(line, style="red", markup=False, soft_wrap=True)
    else:
        typer.echo(line, err=True)
    raise typer.Exit(code)
