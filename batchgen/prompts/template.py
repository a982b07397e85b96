"""The Jinja template that turns a row's columns into the row's text."""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import meta

from batchgen.errors import UsageError
from batchgen.prompts.columns import close_matches
from batchgen.prompts.sandbox import LimitedEnvironment, printed_object


class RowTemplate:
    """A compiled ``prompt.template``.

    Jinja's own whitespace rules hold: one newline at the very end of the source is
    dropped (editors put it there), everything else is kept. Undefined names are errors,
    and so is printing a null; write ``{{ column or '' }}`` where a null is expected. What a
    row's template may compute is limited (see ``sandbox``).

    Attributes:
        columns: the input columns the template reads, in the input's order.
    """

    def __init__(self, source: str, column_names: Sequence[str]) -> None:
        """Compile the template and find its columns.

        Raises:
            UsageError: a syntax error, a name that is no column, or an include.
        """
        environment = LimitedEnvironment()
        self._limits = environment.limits
        try:
            tree = environment.parse(source)
            names = meta.find_undeclared_variables(tree)
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(f"prompt.template, line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise UsageError("prompt.template is nested too deeply") from error
        if any(True for _ in meta.find_referenced_templates(tree)):
            raise UsageError("prompt.template includes or extends another file; write it out here")
        _refuse_unknown(sorted(names - set(column_names) - set(environment.globals)), column_names)
        self._template = _compiled(environment, tree)
        self.columns = tuple(name for name in column_names if name in names)

    def render(self, values: Mapping[str, Any]) -> str:
        """Render one row.

        Args:
            values: at least the values of ``columns``.

        Raises:
            ValueError: the template failed on this row; the message says on what.
        """
        row = {name: values[name] for name in self.columns}
        self._limits.begin()
        try:
            text = self._template.render(row)
            found = printed_object(text, row)
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


def _refuse_unknown(unknown: Sequence[str], column_names: Sequence[str]) -> None:
    if not unknown:
        return
    said = "; ".join(f"'{name}'{close_matches(name, column_names)}" for name in unknown)
    raise UsageError(
        f"prompt.template uses {said}, which is no column of the input. "
        f"Columns: {', '.join(column_names)}"
    )
