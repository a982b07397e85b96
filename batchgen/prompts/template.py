"""The Jinja template that turns a row's columns into the row's text."""

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from batchgen.errors import UsageError
from batchgen.prompts.columns import close_matches


def _refuse_null(value: Any) -> Any:
    # Jinja prints a null as "None", which would reach the model as a word.
    if value is None:
        raise ValueError("a null value would be printed as 'None'")
    return value


class RowTemplate:
    """A compiled ``prompt.template``.

    Jinja's own whitespace rules hold: one newline at the very end of the source is
    dropped (editors put it there), everything else is kept. Undefined names are errors,
    and so is printing a null; write ``{{ column or '' }}`` where a null is expected.

    Attributes:
        columns: the input columns the template reads, in the input's order.
    """

    def __init__(self, source: str, column_names: Sequence[str]) -> None:
        """Compile the template and find its columns.

        Raises:
            UsageError: a syntax error, a name that is no column, or an include.
        """
        environment = ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, finalize=_refuse_null, autoescape=False
        )
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise UsageError(f"prompt.template, line {error.lineno}: {error.message}") from error
        if any(True for _ in meta.find_referenced_templates(tree)):
            raise UsageError("prompt.template includes or extends another file; write it out here")
        names = meta.find_undeclared_variables(tree)
        _refuse_unknown(sorted(names - set(column_names) - set(environment.globals)), column_names)
        self.columns = tuple(name for name in column_names if name in names)

    def render(self, values: Mapping[str, Any]) -> str:
        """Render one row.

        Args:
            values: at least the values of ``columns``.

        Raises:
            ValueError: the template failed on this row; the message says on what.
        """
        row = {name: values[name] for name in self.columns}
        try:
            return self._template.render(row)
        except Exception as error:
            nulls = [name for name, value in row.items() if value is None]
            hint = f" (null in this row: {', '.join(nulls)})" if nulls else ""
            raise ValueError(f"prompt.template: {error}{hint}") from error


def _refuse_unknown(unknown: Sequence[str], column_names: Sequence[str]) -> None:
    if not unknown:
        return
    said = "; ".join(f"'{name}'{close_matches(name, column_names)}" for name in unknown)
    raise UsageError(
        f"prompt.template uses {said}, which is no column of the input. "
        f"Columns: {', '.join(column_names)}"
    )
