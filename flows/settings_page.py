"""The page of all settings: config/dartflow.yaml, written from the Params and their docstrings.

`python -m flows.settings_page > config/dartflow.yaml` writes it anew.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator

import yaml

from contracts.params import Params
from flows.settings import Settings

_ATTRIBUTE = re.compile(r"^    (?P<names>[a-z_0-9, ]+): (?P<text>.*(?:\n {6,}.*)*)", re.MULTILINE)
_WIDTH = 110

_HEAD = """\
# Every setting with its default. Pass a file like this with --config; what it leaves out keeps its default.
# Environment variables (DARTFLOW_LOG_NORMAL__SIGMA=0.2) come over the file, --set log_normal.sigma=0.2 over both.
"""


def settings_page() -> str:
    """All settings as YAML, each with what its docstring says above it."""
    return _HEAD + "\n".join(_lines(Settings(), indent="")) + "\n"


def _lines(params: Params, indent: str) -> Iterator[str]:
    said = attribute_texts(type(params))
    for name in type(params).model_fields:
        value = getattr(params, name)
        if isinstance(value, Params):
            empty = "" if type(value).model_fields else " {}"
            yield f"{'' if indent else chr(10)}{indent}{name}:{empty}"
            yield from _lines(value, indent + "  ")
            continue
        for line in textwrap.wrap(said.get(name, ""), _WIDTH):
            yield f"{indent}# {line}"
        shown = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True).removesuffix("...\n").strip()
        yield f"{indent}{name}: {shown}"


def attribute_texts(model: type[Params]) -> dict[str, str]:
    """What the `Attributes:` part of a docstring says of each setting."""
    _, _, part = (inspect.getdoc(model) or "").partition("Attributes:\n")
    return {
        name.strip(): " ".join(found["text"].split())
        for found in _ATTRIBUTE.finditer(part)
        for name in found["names"].split(",")
    }


if __name__ == "__main__":
    print(settings_page(), end="")  # noqa: T201 - this is what the module is for
