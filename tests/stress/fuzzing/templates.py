"""Fuzzing the template: what reaches into Python or files, or differs the second time.

What a template may take is limited in loops, calls and sums only, so the expressions here have
no single operation that takes long inside of Python.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import strategies as st

from batchgen.errors import UsageError
from batchgen.prompts import sandbox
from batchgen.prompts.template import RowTemplate

SECRET = "canary-5f1d"
COLUMNS = {
    "s": "text",
    "fmt": "{0.__class__.__mro__} %s",
    "n": 7,
    "big": 10**4,
    "x": 1.5,
    "l": [1, 2, "three"],
    "d": {"items": 1, "k": [1, {"z": None}]},
    "none": None,
    "b": b"bytes",
}
_ADDRESS = re.compile(r"0x[0-9a-f]+")
# Both renderings may end at their limit.
_MOST_SECONDS = 2 * sandbox.MOST_SECONDS + 5.0

_NUMBERS = ["0", "1", "-1", "3", "999", "10**9", "1e308", "n", "big"]
_ATOMS = [
    *COLUMNS,
    *("'a'", "''", "[]", "{}", "[l, l]", "()", "true", "self", "loop", "caller", "range", "dict"),
    *("namespace", "cycler", "joiner", "lipsum", "ns", "m"),
    *("'{0.__class__}'", "'{0[__class__]}'", "varargs", "kwargs", "super", "undefined_name"),
    *_NUMBERS,
]
_NAMES = [
    *("__class__", "__mro__", "__subclasses__", "__globals__", "__init__", "__builtins__"),
    *("__dict__", "mro", "format", "format_map", "join", "items", "upper", "gi_frame", "f_globals"),
    *("func_globals", "cr_frame", "append", "update", "environment", "_module", "k", "zfill"),
    *("ljust", "center", "replace", "encode", "translate", "__add__", "a", "exported_vars"),
]
_FILTERS = [
    *("attr('__class__')", "attr('format')", "list", "string", "tojson", "pprint", "join(s)"),
    *("join", "map('attr', '__class__')|list", "map(attribute='__class__')|list", "safe", "e"),
    *("center(99)", "indent(9)", "wordwrap(1)", "format(s)", "format(n)"),
    *("replace('a', 'aaaa')", "replace('', s)", "batch(3)|list", "slice(9)|list"),
    *("random", "shuffle", "sum(start=[])", "groupby('k')|list", "xmlattr", "urlize", "reverse"),
    *("filesizeformat", "int", "float", "abs", "round(3)", "default('d')", "first", "length"),
    *("select('defined')|list", "truncate(9)", "batch(9, 'x')|list", "tojson(2)"),
]
_OPERATORS = ["+", "-", "*", "**", "//", "%", "~", "==", "in", "and", "or", "is not", "<", "/"]


def _expressions() -> st.SearchStrategy[str]:
    def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            st.builds("({} {} {})".format, inner, st.sampled_from(_OPERATORS), inner),
            st.builds("({}|{})".format, inner, st.sampled_from(_FILTERS)),
            st.builds("{}.{}".format, inner, st.sampled_from(_NAMES)),
            st.builds("{}['{}']".format, inner, st.sampled_from(_NAMES)),
            st.builds("{}[{}]".format, inner, inner),
            st.builds("{}({})".format, inner, inner),
            st.builds("{}()".format, inner),
            st.builds("range({})".format, inner),
            st.builds("[{}, {}]".format, inner, inner),
            st.builds("({} if {} else {})".format, inner, inner, inner),
        )

    return st.recursive(st.sampled_from(_ATOMS), grown, max_leaves=6)


def _templates(folder: Path) -> st.SearchStrategy[str]:
    expression, secret = _expressions(), str(folder / "secret")
    files = [f"'{secret}'", "'secret'", "'/etc/passwd'", "s"]
    leaf = st.one_of(
        st.builds("{{{{ {} }}}}".format, expression),
        st.builds("{{% set ns.a = {} %}}".format, expression),
        st.sampled_from(
            [
                *("text ", "{% set ns.a = ns.a ~ ns.a %}", "{% set ns.a = ns.a + ns.a %}"),
                *("{% set ns.a %}{{ ns.a }}{{ ns.a }}{% endset %}", "{{ ns.a }}", "{{ m(9) }}"),
                *("{% set ns.a = [ns.a, ns.a] %}", "{% set ns.a = ns.a|replace('a', 'aa') %}"),
                *("{% do l.append(1) %}", "{% debug %}", "{{ loop.index }}", "{{ loop(l) }}"),
                *("{{ caller() }}", "{{ m(n) }}", "{% set ns.a = ns.a * 9 %}", "{{ self.x() }}"),
                *(f"{{% include {each} %}}" for each in files),
                *(f"{{% import {each} as y %}}" for each in files),
                *(f"{{% extends {each} %}}" for each in files),
            ]
        ),
    )

    def nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        body = st.lists(inner, max_size=3).map("".join)
        # str.format would have to double each of Jinja's braces.
        return st.one_of(
            st.tuples(expression, body).map(
                lambda p: f"{{% for i in {p[0]} %}}{p[1]}{{% endfor %}}"
            ),
            st.tuples(expression, body).map(
                lambda p: f"{{% for i in {p[0]} recursive %}}{p[1]}{{{{ loop(l) }}}}{{% endfor %}}"
            ),
            st.tuples(expression, body).map(lambda p: f"{{% if {p[0]} %}}{p[1]}{{% endif %}}"),
            body.map(
                lambda b: f"{{% macro m(q) %}}{b}{{{{ m(q) }}}}{{{{ m(q) }}}}{{% endmacro %}}"
            ),
            body.map(lambda b: f"{{% call m(1) %}}{b}{{% endcall %}}"),
            body.map(lambda b: f"{{% for i in range(9999) %}}{b}{{% endfor %}}"),
            body.map(lambda b: f"{{% block x %}}{b}{{% endblock %}}"),
            body.map(lambda b: f"{{% filter replace('a', 'aaaa') %}}{b}{{% endfilter %}}"),
        )

    parts = st.lists(st.recursive(leaf, nested, max_leaves=5), min_size=1, max_size=4)
    noise = st.one_of(st.just(""), st.text(max_size=6))
    start = st.sampled_from(["{% set ns = namespace(a='a') %}", ""])
    return st.builds("{}{}{}".format, start, parts.map("".join), noise)


@contextmanager
def opened(folder: Path) -> Iterator[Callable[[str], None]]:
    """Give what checks a template; a file with a secret lies in the folder."""
    (folder / "secret").write_text(SECRET)
    yield check


def inputs(folder: Path) -> st.SearchStrategy[str]:
    """Give strategies of templates, some of which want a file of the folder."""
    return _templates(folder)


def check(source: str) -> None:
    """Render twice: data comes out or a clear error, soon, and the same again."""
    begun = time.process_time()
    first, second = _rendered(source), _rendered(source)
    spent = time.process_time() - begun
    assert spent < _MOST_SECONDS, f"{spent:.0f} s"
    assert first == second, f"not the same again: {first[:200]!r}, {second[:200]!r}"
    assert SECRET not in first, first[:200]


def _rendered(source: str) -> str:
    try:
        template = RowTemplate(source, list(COLUMNS))
        return _ADDRESS.sub("", template.render(COLUMNS))
    except UsageError as error:
        assert str(error)
        return ""
    except ValueError as error:
        assert str(error).startswith("prompt.template"), error
        return ""
