"""Sources of the settings' values: options, the environment, a file of TOML.

An option overrides the environment, which overrides the file, which overrides the default. `load`
reads them all, and reports all mistakes at once.
"""

from __future__ import annotations

import difflib
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from tenure.busy_poll import LONGEST
from tenure.engines import state_home
from tenure.errors import InvalidArgument
from tenure.server.settings import PREFIX, SETTINGS, Given, Setting, Settings, Wrong, put_together

_BY_NAME = {setting.name: setting for setting in SETTINGS}


def load(
    options: Mapping[str, Any], environment: Mapping[str, str], file: str | None = None
) -> Settings:
    """Return the settings from all sources.

    Args:
        options: the command line's options, by setting.
        environment: the environment, whose variables that begin with `PREFIX` are used.
        file: the TOML file; by default, the one in ``TENURE_SERVE_CONFIG``.

    Raises:
        Wrong: there are mistakes.
    """
    faults: list[str] = []
    given = {setting.name: Given(setting.default) for setting in SETTINGS}
    file = file or environment.get(PREFIX + "CONFIG") or None
    if file is not None:
        given.update(_from_file(file, faults))
    given.update(_from_environment(environment, faults))
    given.update(_from_options(options, faults))
    if given["store"].value is None:
        try:
            given["store"] = Given(_default_store(environment))
        except InvalidArgument as error:
            raise Wrong([*faults, f"store: {error}"]) from error
    settings = put_together(given, faults)
    if faults or settings is None:
        raise Wrong(faults)
    return settings


def _default_store(environment: Mapping[str, str]) -> str:
    from urllib.parse import quote

    path = os.path.join(state_home(environment), "tenure", "server.db")
    return f"sqlite:///{quote(path)}?durability=full"


# Sources of values


def _from_file(file: str, faults: list[str]) -> Iterator[tuple[str, Given]]:
    try:
        with open(file, "rb") as opened:
            read = tomllib.load(opened)
    except OSError as error:
        faults.append(f"the file {file} cannot be read: {error.strerror}")
        return
    except (ValueError, RecursionError) as error:  # also from endless numbers and lists
        faults.append(f"{file} is not TOML: {error}")
        return
    for name, value in read.items():
        setting = _BY_NAME.get(name)
        if setting is None:
            faults.append(f"{file}: there is no setting {name!r}{_instead(name, _BY_NAME)}")
            continue
        try:
            checked = _of_its_type(setting, value)
        except ValueError as error:
            faults.append(f"{file}: {name} {error}")
            continue
        if setting.kind == "file":  # relative to the file, which may be moved together with them
            checked = os.path.join(os.path.dirname(os.path.abspath(file)), checked)
        yield name, Given(checked, file)


def _from_environment(
    environment: Mapping[str, str], faults: list[str]
) -> Iterator[tuple[str, Given]]:
    known = {setting.variable: setting for setting in SETTINGS}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX) or variable == PREFIX + "CONFIG" or not text:
            continue
        setting = known.get(variable)
        if setting is None:
            faults.append(
                f"the environment has {variable}, and there is no such setting"
                + _instead(variable, known)
            )
            continue
        try:
            yield setting.name, Given(_read(setting, text), variable)
        except ValueError as error:
            faults.append(f"{variable} {error}")


def _from_options(options: Mapping[str, Any], faults: list[str]) -> Iterator[tuple[str, Given]]:
    for name, value in options.items():
        if value is None or value == ():
            continue
        setting = _BY_NAME[name]
        try:
            checked = tuple(value) if setting.kind == "texts" else _read(setting, value)
        except ValueError as error:
            faults.append(f"--{name} {error}")
            continue
        yield name, Given(checked, f"--{name}")


def _instead(wrong: str, known: Mapping[str, object]) -> str:
    near = difflib.get_close_matches(wrong, known, n=1)
    return f"; did you mean {near[0]}?" if near else "; 'tenure serve --help' lists all"


# Conversion of values


def _of_its_type(setting: Setting, value: object) -> Any:
    """Return the value if it is valid; otherwise the ValueError says which values are."""
    match setting.kind:
        case "texts":
            if isinstance(value, list) and value and all(isinstance(x, str) for x in value):
                return tuple(value)
            raise ValueError(f"is a list of texts, not {value!r}")
        case "text" | "file":
            if isinstance(value, str) and value:
                return value
            raise ValueError(f"is a text, not {value!r}")
        case "choice":
            if value in setting.choices:
                return value
            raise ValueError(f"is one of {', '.join(setting.choices)}, not {value!r}")
        case "count":
            if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
                return value
            raise ValueError(f"is a whole number, one or more, not {value!r}")
        case "microseconds":
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LONGEST:
                return value
            raise ValueError(
                f"is a whole number of microseconds from 0 to {LONGEST}, not {value!r}"
            )
        case "seconds":
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and 0 < value <= sys.float_info.max:  # type: ignore[operator]
                return float(value)  # type: ignore[arg-type]
            raise ValueError(f"is a number of seconds, more than zero, not {value!r}")


def _read(setting: Setting, text: str) -> Any:
    """Convert the text of a value."""
    value: object = text
    if setting.kind == "texts":
        value = text.split()
    elif setting.kind in {"count", "seconds", "microseconds"}:
        number = float if setting.kind == "seconds" else int
        try:
            value = number(text)
        except ValueError:
            value = text  # for the message
    return _of_its_type(setting, value)
