"""The Jinja template that turns a row's columns into the row's text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, cast

import jinja2
from jinja2 import meta, nodes

from batchgen.errors import UsageError, listed
from batchgen.prompts.columns import close_matches
from batchgen.prompts.marks import Marks
from batchgen.prompts.sandbox import Environment

FIELDS = "fields"


class RowTemplate:
    """A compiled ``prompt.template``.

    Jinja's own whitespace rules hold: one newline at the very end of the source is
    dropped (editors put it there), everything else is kept. Undefined names are errors,
    and so is printing a null; write ``{{ column or '' }}`` where a null is expected. What a
    rendering may take is limited (see ``sandbox``).

    Attributes:
        columns: the input columns the template reads, in the input's order.
        lead: the text before the first tag that writes anything.
    """

    def __init__(
        self,
        source: str,
        column_names: Sequence[str],
        *,
        rewrite: Callable[[str, bool], str] | None = None,
        fields: Sequence[str] = (),
        marks: Marks | None = None,
    ) -> None:
        """Compile the template and find its columns.

        Args:
            rewrite: changes each text between the template's tags; told whether it is the
                template's end.
            fields: columns that the template finds, as pairs of name and value, in
                ``fields``.
            marks: of the special tokens that the template's own text may spell; by default
                it spells none.

        Raises:
            UsageError: a syntax error, a name that is no column, or an include.
        """
        environment = Environment(marks or Marks(()), undefined=_Undefined, printed=_printed)
        self._environment = environment
        try:
            tree = environment.parse(source)
            if rewrite is not None:
                _rewrite_texts(tree, rewrite)
            names = _names(environment, tree)
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(f"prompt.template, line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise UsageError("prompt.template is nested too deeply") from error
        if any(True for _ in meta.find_referenced_templates(tree)):
            raise UsageError("prompt.template includes or extends another file; write it out here")
        if fields:
            _check_fields(fields, names, column_names)
            names = (names - {FIELDS}) | set(fields)
        self._fields = tuple(fields)
        _refuse_unknown(sorted(names - set(column_names) - set(environment.globals)), column_names)
        self.columns = tuple(name for name in column_names if name in names)
        self.lead = _lead(tree)
        self._template = _compiled(environment, tree)

    def render(self, values: Mapping[str, Any], order: Sequence[str] = ()) -> str:
        """Render one row; special tokens of the template's own text are marked.

        Args:
            values: at least the values of ``columns``.
            order: how ``fields`` stand in this row; by default as they were given.

        Raises:
            ValueError: the template failed on this row; the message says on what.
        """
        row = {name: values[name] for name in self.columns}
        try:
            pairs = [(name, values[name]) for name in order or self._fields]
            seen = {**row, FIELDS: pairs} if self._fields else row
            return self._environment.render(self._template, seen)
        except Exception as error:
            nulls = [name for name, value in row.items() if value is None]
            hint = f" (null in this row: {', '.join(nulls)})" if nulls else ""
            raise ValueError(f"prompt.template: {error}{hint}") from error


class _Undefined(jinja2.StrictUndefined):
    """What is not there; in a printed list, too, where Python would write "Undefined"."""

    __repr__ = jinja2.StrictUndefined.__str__


def _printed(value: Any) -> Any:
    """Refuse to print what is no text, number or the like."""
    if value is None:
        raise ValueError(
            "a null value would be printed as 'None'; say what stands for it, as in "
            "{{ column or '' }}"
        )
    if callable(value) and not isinstance(value, jinja2.Undefined):
        name = getattr(value, "__name__", type(value).__name__)
        raise ValueError(f"'{name}' is a function, not a value; a key is written ['{name}']")
    if isinstance(value, Iterator):
        raise ValueError("a filter's items would be printed as an object; write ... | list")
    return value


def _names(environment: Environment, tree: nodes.Template) -> set[str]:
    """Return the names that a template takes from outside."""
    generator = meta.TrackingCodeGenerator(environment)
    # It would compute what holds no name, and put the results into the tree.
    generator.optimizer = None
    generator.visit(tree)
    return generator.undeclared_identifiers


def _compiled(environment: Environment, tree: jinja2.nodes.Template) -> jinja2.Template:
    try:
        return environment.compiled(tree)
    except jinja2.TemplateSyntaxError as error:
        raise UsageError(f"prompt.template, line {error.lineno}: {error.message}") from error
    except (SyntaxError, RecursionError, MemoryError) as error:
        # Python compiles what Jinja makes of it, and takes no more than 20 loops in each other.
        raise UsageError(f"prompt.template is nested too deeply: {error}") from error


def _check_fields(fields: Sequence[str], names: set[str], column_names: Sequence[str]) -> None:
    unknown = [name for name in fields if name not in column_names]
    if unknown:
        said = "; ".join(f"'{name}'{close_matches(name, column_names)}" for name in unknown)
        raise UsageError(
            f"prompt.fields names {said}, which is no column of the input. "
            f"Columns: {listed(column_names)}"
        )
    if FIELDS in column_names:
        raise UsageError(
            "prompt.fields cannot be used here: the input has a column `fields` of its own; "
            "rename it, or write the columns out in the template"
        )
    if FIELDS not in names:
        raise UsageError(
            "prompt.fields is named, but the template does not list them; write "
            "{% for name, value in fields %}{{ name }}: {{ value }}, ...{% endfor %}"
        )


def _lead(tree: nodes.Template) -> str:
    first = tree.body[0] if tree.body else None
    pieces = first.nodes if isinstance(first, nodes.Output) else []
    texts = takewhile(lambda piece: isinstance(piece, nodes.TemplateData), pieces)
    return "".join(cast(nodes.TemplateData, text).data for text in texts)


def _rewrite_texts(tree: nodes.Template, rewrite: Callable[[str, bool], str]) -> None:
    last = tree.body[-1] if tree.body else None
    end = last.nodes[-1] if isinstance(last, nodes.Output) else None
    for text in list(tree.find_all(nodes.TemplateData)):
        text.data = rewrite(text.data, text is end)


def _refuse_unknown(unknown: Sequence[str], column_names: Sequence[str]) -> None:
    if not unknown:
        return
    said = "; ".join(f"'{name}'{close_matches(name, column_names)}" for name in unknown)
    raise UsageError(
        f"prompt.template uses {said}, which is no column of the input. "
        f"Columns: {listed(column_names)}"
    )
