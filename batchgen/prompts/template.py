"""The Jinja template that turns a row's columns into the row's text."""

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, cast

import jinja2
from jinja2 import meta, nodes

from batchgen.errors import UsageError, listed
from batchgen.prompts.columns import close_matches
from batchgen.prompts.sandbox import LimitedEnvironment, printed_object

FIELDS = "fields"


class RowTemplate:
    """A compiled ``prompt.template``.

    Jinja's own whitespace rules hold: one newline at the very end of the source is
    dropped (editors put it there), everything else is kept. Undefined names are errors,
    and so is printing a null; write ``{{ column or '' }}`` where a null is expected. What a
    row's template may compute is limited (see ``sandbox``).

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
    ) -> None:
        """Compile the template and find its columns.

        Args:
            rewrite: changes each text between the template's tags; told whether it is the
                template's end.
            fields: columns that the template finds, as pairs of name and value, in
                ``fields``.

        Raises:
            UsageError: a syntax error, a name that is no column, or an include.
        """
        self._source = source
        environment = LimitedEnvironment()
        self._limits = environment.limits
        try:
            tree = environment.parse(source)
            if rewrite is not None:
                _rewrite_texts(tree, rewrite)
            names = meta.find_undeclared_variables(tree)
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(f"prompt.template, line {error.lineno}: {error.message}") from error
        except jinja2.TemplateRuntimeError as error:
            # Jinja computes what holds no name before it sees a row.
            raise UsageError(f"prompt.template: {error}") from error
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
        """Render one row.

        Args:
            values: at least the values of ``columns``.
            order: how ``fields`` stand in this row; by default as they were given.

        Raises:
            ValueError: the template failed on this row; the message says on what.
        """
        row = {name: values[name] for name in self.columns}
        self._limits.begin()
        try:
            pairs = [(name, values[name]) for name in order or self._fields]
            text = self._template.render({**row, FIELDS: pairs} if self._fields else row)
            found = printed_object(text, row, self._source)
            if found is not None:
                raise ValueError(f"{found} is no text")
        except Exception as error:
            nulls = [name for name, value in row.items() if value is None]
            hint = f" (null in this row: {', '.join(nulls)})" if nulls else ""
            raise ValueError(f"prompt.template: {error}{hint}") from error
        return text


def _compiled(environment: LimitedEnvironment, tree: jinja2.nodes.Template) -> jinja2.Template:
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
