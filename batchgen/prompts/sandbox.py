"""Jinja's sandbox with limits: what a template may compute for one row, and what it may print.

Jinja keeps a template away from Python's insides and, without a loader, from files. It does not
keep it from running for hours or filling the memory: loops nest, macros call themselves, texts
double. Here every pass through a loop, every call, and every text that an operator, a call, or
one of the filters that make texts longer gives is counted, and a row that takes too much fails.
"""

import re
import time
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes, pass_context
from jinja2.runtime import Context, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MOST_PASSES = 1_000_000
MOST_CHARACTERS = 1 << 26
MOST_SECONDS = 10.0
# Of a number that says how long something shall become.
_MOST_WIDTH = 1 << 20
# Of an integer, beyond which arithmetic takes long.
_MOST_BITS = 1 << 14

# What an item of a list counts: that it is there, and looked at.
_ITEM_CHARACTERS = 16
_PASSES_BETWEEN_LOOKS = 64
_WIDE_FORMAT = re.compile(r"\d{7,}")
# How Python prints what is no data; the number is another one in each run.
_OBJECT = re.compile(r"<[^<>]{1,200} at 0x[0-9a-f]+>|<class '[^<>']{1,200}'>")
_STRETCHING = (
    *("batch", "center", "format", "indent", "join", "pprint", "replace", "round", "slice"),
    *("tojson", "truncate", "urlize", "wordwrap", "xmlattr"),
)
_PASS, _JOINED = "_pass", "_joined"


class Limits:
    """What one rendering has used of what it may use."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start anew for a row."""
        self._passes = 0
        self._characters = 0
        # Not the time of day: a process that is stopped for a while computes nothing.
        self._began = time.thread_time()

    def take_pass(self) -> None:
        """Count a pass through a loop, or a call."""
        self._passes += 1
        if self._passes > MOST_PASSES:
            raise ValueError(f"more than {MOST_PASSES:,} loop passes and calls for one row")
        if self._passes % _PASSES_BETWEEN_LOOKS == 0:
            self._look_at_the_time()

    def take_characters(self, count: int) -> None:
        """Count text, or items of a list, before or after it is made."""
        self._characters += count
        if self._characters > MOST_CHARACTERS:
            raise ValueError(f"more than {MOST_CHARACTERS:,} characters made for one row")

    def take(self, value: Any) -> None:
        """Count what was made, with all that is in it."""
        # Lists in lists: the same one may stand in many places, and is printed in each.
        left = [value]
        while left:
            each = left.pop()
            if isinstance(each, str | bytes):
                self.take_characters(len(each))
            elif isinstance(each, jinja2.Undefined):
                # In a list it would be printed as a word.
                str(each)
            elif callable(each):
                _refuse_function(each)
            elif isinstance(each, list | tuple | set | frozenset):
                self.take_characters(_ITEM_CHARACTERS * len(each))
                left.extend(each)
            elif isinstance(each, Mapping):
                self.take_characters(_ITEM_CHARACTERS * len(each))
                left.extend([*each.keys(), *each.values()])

    def _look_at_the_time(self) -> None:
        if time.thread_time() - self._began > MOST_SECONDS:
            raise ValueError(f"more than {MOST_SECONDS:g} seconds for one row")


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates that are counted while they run; ``limits.begin()`` before each row.

    Undefined names are errors. So are printing a null, which would reach the model as "None",
    and printing a method. What differs from one rendering to the next is not there: ``lipsum``,
    ``random``. One thread at a time.
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            undefined=jinja2.StrictUndefined,
            finalize=self._printed,
            autoescape=False,
            # Nothing is computed before it is counted.
            optimized=False,
        )
        self.limits = Limits()
        del self.globals["lipsum"]
        del self.filters["random"]
        for name in _STRETCHING:
            self.filters[name] = self._counted(self.filters[name])
        # With a context, so that Jinja does not compute them while it compiles.
        self.filters[_PASS] = pass_context(lambda _, static: self._pass(static))
        self.filters[_JOINED] = pass_context(lambda _, values: self._joined(values))

    def compiled(self, tree: nodes.Template) -> jinja2.Template:
        """Compile a parsed template; the tree is changed.

        Raises:
            jinja2.TemplateSyntaxError: it makes no sense, as with an unknown filter.
        """
        return self.from_string(_Counting().visit(tree))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Do arithmetic whose result is not too large."""
        if operator == "%" and isinstance(left, str):
            _check_widths(left, right)
        elif operator == "*":
            self._check_product(left, right)
        elif operator == "**":
            _check_power(left, right)
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, str | bytes | list | tuple):
            self.limits.take_characters(len(result))
        return result

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call what is safe to call, and count it."""
        __self.limits.take_pass()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int | list | tuple):
            __self._check_stretch(getattr(__obj, "__name__", ""), (owner, *args), kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, str | bytes | list | tuple):
            __self.limits.take_characters(len(result))
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Give a ``str.format`` that makes no long text of a short one."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        @wraps(wrapped)
        def checked(*args: Any, **kwargs: Any) -> str:
            _check_widths(value.__self__, (args, kwargs))
            text = wrapped(*args, **kwargs)
            self.limits.take_characters(len(text))
            return text

        return checked

    def _printed(self, value: Any) -> Any:
        """Look at what is printed (Jinja's ``finalize``)."""
        if value is None:
            raise ValueError(
                "a null value would be printed as 'None'; say what stands for it, as in "
                "{{ column or '' }}"
            )
        self.limits.take(value)
        return value

    def _pass(self, static_characters: int) -> str:
        """Count a pass through a body, and the text that stands in it."""
        self.limits.take_pass()
        self.limits.take_characters(static_characters)
        return ""

    def _joined(self, values: list[Any]) -> str:
        """Do what ``~`` does."""
        for value in values:
            self.limits.take(value)
        return str_join(values)

    def _counted(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        """Give a filter whose result is not too large."""
        is_given_more = getattr(apply, "jinja_pass_arg", None) is not None

        @wraps(apply)
        def counted(*args: Any, **kwargs: Any) -> Any:
            own = args[1:] if is_given_more else args
            self.limits.take_pass()
            self._check_stretch(apply.__name__.removeprefix("do_"), own, kwargs)
            result = apply(*args, **kwargs)
            self.limits.take(result)
            return result

        return counted

    def _check_stretch(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse to make something long out of something short."""
        # The first argument is the value itself.
        for each in (*args[1:], *kwargs.values()):
            if isinstance(each, int) and abs(each) > _MOST_WIDTH:
                _refuse(f"{name} to a length of {each:,}")
        if name == "format" and isinstance(args[0], str):
            _check_widths(args[0], (args[1:], kwargs))
        if name == "replace" and len(args) > 2:
            old, new = str(args[1]), str(args[2])
            self.limits.take_characters(str(args[0]).count(old) * len(new))
        if name == "join":
            self._check_join(args)

    def _check_join(self, args: tuple[Any, ...]) -> None:
        """Count the separators: the filter has the list first, the method the separator."""
        if isinstance(args[0], str):
            separator, items = args[0], args[1] if len(args) > 1 else ()
        else:
            separator, items = str(args[1]) if len(args) > 1 else "", args[0]
        if hasattr(items, "__len__"):
            self.limits.take_characters(len(items) * len(separator))

    def _check_product(self, left: Any, right: Any) -> None:
        for some, times in ((left, right), (right, left)):
            if isinstance(some, str | bytes | list | tuple) and isinstance(times, int):
                self.limits.take_characters(len(some) * max(0, times))
        if isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())


class _Counting(NodeTransformer):
    """Puts a count at the start of all that can run again, and for ``~``, which is no operator."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        """Count the passes of a loop."""
        return self._with_count(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        """Count the calls of a macro."""
        return self._with_count(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:  # noqa: N802
        """Count the calls of what stands in a call block."""
        return self._with_count(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:  # noqa: N802
        """Count a block, which can be printed again."""
        return self._with_count(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """Count what ``~`` makes."""
        self.generic_visit(node)
        items = nodes.List(node.nodes, lineno=node.lineno)
        return _filter(items, _JOINED, node.lineno)

    def _with_count(self, node: Any) -> nodes.Node:
        static = sum(len(each.data) for each in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        count = _filter(nodes.Const(static, lineno=node.lineno), _PASS, node.lineno)
        node.body = [nodes.Output([count], lineno=node.lineno), *node.body]
        return node  # type: ignore[no-any-return]


def _filter(value: nodes.Expr, name: str, lineno: int) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=lineno)


def printed_object(text: str, row: Mapping[str, Any], source: str) -> str | None:
    """Give what a text holds of Python that neither the row nor the template says, if anything."""
    shown: list[str] = _OBJECT.findall(text)
    for found in dict.fromkeys(shown):
        if found not in source and not any(found in str(value) for value in row.values()):
            return found
    return None


def _check_widths(form: str, given: Any) -> None:
    """Refuse formats that pad: ``%9999999d``, ``%*d`` of a large number, and ``{:>{w}}``."""
    if _WIDE_FORMAT.search(form) and ("%" in form or "{" in form):
        _refuse("a format of such a width")
    left = [given]
    while left:
        each = left.pop()
        if isinstance(each, list | tuple):
            left.extend(each)
        elif isinstance(each, Mapping):
            left.extend(each.values())
        elif isinstance(each, int) and abs(each) > _MOST_WIDTH and _takes_width(form):
            _refuse(f"a format of a width of {each:,}")


def _takes_width(form: str) -> bool:
    return "*" in form or re.search(r"\{[^{}]*\{", form) is not None


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(0, right))


def _check_bits(bits: int) -> None:
    if bits > _MOST_BITS:
        _refuse(f"a number of {bits:,} bits")


def _refuse_function(function: Any) -> NoReturn:
    name = getattr(function, "__name__", type(function).__name__)
    raise ValueError(f"'{name}' is a function, not a value; a key is written ['{name}']")


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"{what} is refused")
