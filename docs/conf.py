"""The documentation site: ``make docs`` builds it with Sphinx, MyST and furo."""

import inspect
import re
from typing import Any

import typer
from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from affine_attn import __version__
from affine_attn.cli import app

project = "affine-attn"
release = __version__
copyright = "the affine-attn contributors"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["**/__pycache__"]

myst_heading_anchors = 3

default_role = "code"
smartquotes = False
add_module_names = False
python_maximum_signature_line_length = 80
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"

html_theme = "furo"
html_title = "affine-attn"
html_copy_source = False
html_show_sphinx = False
html_extra_path = ["llms.txt"]
html_static_path = ["static"]
html_css_files = ["site.css"]

_ARGUMENTS = re.compile(r"([a-z_]+(?:, [a-z_]+)*): (.+)")
_LITERAL = re.compile(r"(``.+?``)")
_FIELD = re.compile(r"    ([a-z_]+): .*?  # (.+)")


def as_field_lists(_app: Sphinx, _what: str, _name: str, thing: Any, _options: Any, lines: list[str]) -> None:
    """Make a field list of the lines ``argument: what it is`` of a docstring, and escape what is not markup."""
    try:
        known = set(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        known = set()
    found, in_fields = [], False
    for line in lines:
        text = "".join(part if part.startswith("``") else part.replace("|", r"\|") for part in _LITERAL.split(line))
        match = _ARGUMENTS.fullmatch(text)
        names = match[1].split(", ") if match else []
        if match and known.issuperset(names):
            found += [] if in_fields or not found or not found[-1] else [""]
            found += [f":param {name}: {match[2] if name == names[0] else f'see {names[0]}'}" for name in names]
            in_fields = True
        else:
            found += [""] if in_fields and text and not text.startswith(" ") else []
            in_fields = in_fields and text.startswith(" ")
            found.append(text)
    if inspect.isclass(thing) and not in_fields:
        found += ["", *(f":param {name}: {meaning}" for name, meaning in _fields(thing) if name in known), ""]
    lines[:] = found


def _fields(thing: type) -> list[tuple[str, str]]:
    """Return the fields of a dataclass or named tuple with the comments behind them."""
    matches = (_FIELD.fullmatch(line) for line in inspect.getsource(thing).splitlines())
    return [(match[1], match[2].replace("|", r"\|")) for match in matches if match]


class Commands(Directive):
    """Every command of ``affine-attn`` with its arguments and options, as --help has them."""

    def run(self) -> list[nodes.Node]:
        group: Any = typer.main.get_command(app)  # a click group of typer's own
        return [self._section(name, group.commands[name]) for name in group.commands]

    def _section(self, name: str, command: Any) -> nodes.section:
        section = nodes.section(ids=[f"command-{name}"], names=[name])
        section += nodes.title("", "", nodes.literal("", f"affine-attn {name}"))
        for paragraph in (command.help or "").split("\n\n"):
            section += nodes.paragraph(text=inspect.cleandoc(paragraph))
        context = command.make_context(f"affine-attn {name}", [], resilient_parsing=True)
        section += nodes.literal_block("", command.get_usage(context), language="text")
        records = [record for parameter in command.params if (record := self._record(parameter, context))]
        if records:
            section += _definitions(records)
        return section

    @staticmethod
    def _record(parameter: Any, context: Any) -> tuple[str, str] | None:
        record = parameter.get_help_record(context)
        return None if record is None else (record[0].strip(), record[1])


def _definitions(records: list[tuple[str, str]]) -> nodes.definition_list:
    items = nodes.definition_list()
    for name, meaning in records:
        term = nodes.term("", "", nodes.literal("", name))
        items += nodes.definition_list_item("", term, nodes.definition("", nodes.paragraph(text=meaning)))
    return items


def setup(sphinx: Sphinx) -> None:
    sphinx.connect("autodoc-process-docstring", as_field_lists)
    sphinx.add_directive("commands", Commands)
