"""Jinja's own sandbox, with a limit on a rendering's time and size.

It renders a row's template and the model's chat template. It keeps a template away from
Python's insides and, without a loader, from files. What never ends in Jinja's own loops and
calls is stopped, as is what grows without bounds. A template is code all the same: a single
operation inside Python can still take long or much memory.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
from jinja2 import nodes, pass_context, pass_eval_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from batchgen.prompts.marks import Marks

MOST_CHARACTERS = 1 << 26
MOST_SECONDS = 10.0
# Of an integer, beyond which arithmetic takes long.
_MOST_BITS = 1 << 14

# Methods whose first argument is looked for in the text.
_SEARCHES = frozenset(
    (
        *("count", "endswith", "find", "index", "partition", "removeprefix", "removesuffix"),
        *("replace", "rfind", "rindex", "rpartition", "rsplit", "split", "startswith"),
    )
)
_COMPARING_TESTS = frozenset(("==", "eq", "equalto", "!=", "ne", "in"))
_EACH, _JOINED, _PLAIN = "_each", "_joined", "_plain"


class LimitError(ValueError):
    """A rendering takes more than it may."""


class Environment(ImmutableSandboxedEnvironment):
    """Compiles templates whose renderings are limited, and marks their special tokens.

    A marked literal (see ``marks``) goes into texts as it is; in a comparison or a search it
    counts as what it spells. What differs from one rendering to the next is not there:
    ``lipsum``, ``random``. One thread at a time.

    Args:
        marks: of the special tokens that the template's literals spell.
        joins_roles: see :meth:`Marks.mark`.
        printed: gives what is printed for a value, or refuses it.
        options: of Jinja's environment.
    """

    intercepted_binops = frozenset(["+", "*", "**"])

    def __init__(
        self,
        marks: Marks,
        *,
        joins_roles: bool = False,
        printed: Callable[[Any], Any] = lambda value: value,
        **options: Any,
    ) -> None:
        # Nothing is computed while it is compiled, before there are limits.
        super().__init__(autoescape=False, optimized=False, finalize=_finalize, **options)
        self.marks = marks
        self.printed = printed
        self._joins_roles = joins_roles
        self._began = 0.0
        del self.globals["lipsum"]
        del self.filters["random"]
        dump = self.filters["tojson"]
        self.filters |= {
            _EACH: self._each,
            _JOINED: lambda values: self.concat(map(self.text_of, values)),
            _PLAIN: marks.plain,
            "replace": self._replace,
            "tojson": pass_eval_context(
                lambda context, value, indent=None: dump(context, marks.plain(value), indent)
            ),
        }

    def compiled(self, tree: nodes.Template) -> jinja2.Template:
        """Compile a parsed template; the tree is changed.

        Raises:
            jinja2.TemplateSyntaxError: it makes no sense, as with an unknown filter.
        """
        return self.from_string(_Rewriter(self).visit(tree))

    def render(self, template: jinja2.Template, values: dict[str, Any]) -> str:
        """Render a template that this environment compiled; its marks stay in the text.

        Raises:
            LimitError: it takes too long, or gives too long a text.
        """
        # Not the time of day: a process that is stopped for a while computes nothing.
        self._began = time.thread_time()
        return template.render(values)

    def text_of(self, value: Any) -> str:
        """Write a value; Python writes stand-ins inside of lists as escapes."""
        return value if isinstance(value, str) else str(self.marks.plain(value))

    def mark(self, literal: str) -> str:
        """Mark a literal of the template."""
        return self.marks.mark(literal, joins_roles=self._joins_roles)

    def concat(self, pieces: Iterable[str]) -> str:
        """Put together a rendering, or what a macro or a block gives."""
        kept, size = list[str](), 0
        for piece in pieces:
            size += len(piece)
            _check_size(size)
            kept.append(piece)
        return "".join(kept)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Do arithmetic whose result is not too large."""
        if operator == "+":
            _check_size(_length(left) + _length(right))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            _check_bits(bits * max(0, right) if operator == "**" else bits + right.bit_length())
        elif operator == "*":
            times = right if isinstance(right, int) else left
            _check_size((_length(left) + _length(right)) * (times if isinstance(times, int) else 0))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call what is safe to call, in time."""
        __self._check_time()
        owner = getattr(__obj, "__self__", None)
        if args and isinstance(owner, str) and __obj.__name__ in _SEARCHES:
            args = (__self._sought(owner, args[0]), *args[1:])
        return super().call(__context, __obj, *args, **kwargs)

    def _sought(self, text: str, sought: Any) -> Any:
        """Return what is looked for in a text as it is spelled there, marked or not."""
        if isinstance(sought, tuple):
            return tuple(self._sought(text, each) for each in sought)
        is_marked_there = isinstance(sought, str) and sought in text
        return sought if is_marked_there else self.marks.plain(sought)

    def _replace(self, value: Any, old: Any, new: Any, count: int | None = None) -> str:
        text = str(value)
        found = self._sought(text, str(old))
        return text.replace(found, str(new), -1 if count is None else count)

    def _each(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._check_time()
            yield item

    def _check_time(self) -> None:
        if time.thread_time() - self._began > MOST_SECONDS:
            raise LimitError(f"more than {MOST_SECONDS:g} seconds for one row")


class _Rewriter(NodeTransformer):
    """Marks literals, compares what they spell, and looks at the time in loops."""

    def __init__(self, environment: Environment) -> None:
        self._mark = environment.mark

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:  # noqa: N802
        node.data = self._mark(node.data)
        return node

    def visit_Const(self, node: nodes.Const) -> nodes.Node:  # noqa: N802
        if isinstance(node.value, str):
            node.value = self._mark(node.value)
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.expr = _filter(node.expr, _PLAIN)
        for operand in node.ops:
            operand.expr = _filter(operand.expr, _PLAIN)
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if node.name in _COMPARING_TESTS:
            node.node = _filter(node.node, _PLAIN)
            node.args = [_filter(each, _PLAIN) for each in node.args]
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.iter = _filter(node.iter, _EACH)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), _JOINED)


# With a context, so that Jinja does not compute what is printed while it compiles.
@pass_context
def _finalize(context: Context, value: Any) -> str:
    environment = context.environment
    assert isinstance(environment, Environment)
    return environment.text_of(environment.printed(value))


def _filter(value: Any, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _check_size(size: int) -> None:
    if size > MOST_CHARACTERS:
        raise LimitError(f"more than {MOST_CHARACTERS:,} characters or items made for one row")


def _check_bits(bits: int) -> None:
    if bits > _MOST_BITS:
        raise LimitError(f"a number of {bits:,} bits")
