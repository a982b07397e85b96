"""What a template may take for one row, and what it cannot print."""

from typing import Any

import pyarrow as pa
import pytest

from batchgen.errors import RowError, UsageError
from batchgen.prompts import sandbox
from batchgen.prompts.encoder import PromptEncoder
from batchgen.prompts.limits import Limits
from batchgen.prompts.render import Chat, Renderer
from batchgen.prompts.source import PromptSpec
from batchgen.prompts.template import RowTemplate
from tests.support.tiny_tokenizers import make

ROW: dict[str, Any] = {
    "s": "text",
    "n": 10**9,
    "few": 3,
    "l": [1, 2, 3],
    "d": {"items": 5, "k": "v"},
    "address": "seen <function f at 0x7f00> here",
}


@pytest.fixture(autouse=True)
def tight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that are reached sooner."""
    monkeypatch.setattr(sandbox, "MOST_SECONDS", 0.2)
    monkeypatch.setattr(sandbox, "MOST_CHARACTERS", 1 << 20)


def render(source: str) -> str:
    return RowTemplate(source, list(ROW)).render(ROW)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% for i in l if i > 1 %}{{ loop.index }}/{{ loop.length }}:{{ i }} {% endfor %}", None),
        ("{% for i in [] %}x{% else %}none{% endfor %}", "none"),
        ("{% for k, v in d.items() %}{{ k }}{% endfor %}", None),
        ("{{ s ~ '-' ~ few ~ l }}", "text-3[1, 2, 3]"),
        ("{{ '%05d|%s' % (few, s) }} {{ '{:>5}'.format(s) }}", "00003|text  text"),
        ("{{ l|join(', ') }} {{ ', '.join(['a', 'b']) }} {{ s|replace('t', 'T') }}", None),
        ("{{ 2 ** 10 + few * 2 }} {{ 'ab' * 3 }} {{ [0] * 2 }}", "1030 ababab [0, 0]"),
        ("{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m(1) }}{{ m(s) }}", "<1><text>"),
        ("{% set ns = namespace(t=0) %}{% for i in l %}{% set ns.t = ns.t + i %}{% endfor %}"
         "{{ ns.t }}", "6"),
        ("{% for i in range(3) %}{{ i }}{% if i == 1 %}{% break %}{% endif %}{% endfor %}", "!"),
        ("{{ d|tojson }} {{ s|center(8) }}| {{ s|indent(2) }} {{ d['items'] }}", None),
        ("{{ address }}", ROW["address"]),
    ],
)  # fmt: skip
def test_what_templates_do_is_as_in_jinjas_own_sandbox(source: str, text: str | None) -> None:
    import jinja2.sandbox

    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined)
    if text == "!":
        # Not even a tag of an extension gets in.
        with pytest.raises(UsageError, match="break"):
            render(source)
        return
    expected = plain.from_string(source).render(ROW)
    assert render(source) == expected
    assert text is None or expected == text


ENDLESS = [
    # Loops in loops, with and without a body, and macros that call themselves twice.
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if b < 0 %}x{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}{{ m(99) }}",
    "{% for x in l recursive %}{{ loop(l) }}{% endfor %}",
    "{% for a in range(99999) %}" + "x" * 9999 + "{% endfor %}",
    # Texts and lists that double.
    *(
        "{% set ns = namespace(a='aa', b=[1], n=9) %}{% for i in range(99) %}"
        + grow
        + "{% endfor %}"
        for grow in (
            "{% set ns.a = ns.a + ns.a %}",
            "{% set ns.a = ns.a ~ ns.a %}",
            "{% set ns.a = ns.a * 9 %}",
            "{% set ns.b = ns.b + ns.b %}",
            "{% set ns.n = ns.n * ns.n %}",
            "{% set ns.a %}{{ ns.a }}{{ ns.a }}{% endset %}",
        )
    ),
    # One step from short to long.
    "{{ s * n * n }}",
    "{{ [0] * n }}",
    "{{ 10 ** n }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ (n * n) ** 999 * n }}",
    "{{ range(n) | list }}",
]


@pytest.mark.parametrize("source", ENDLESS)
def test_t08_what_never_ends_or_grows_without_bounds_fails_its_row(source: str) -> None:
    template = RowTemplate(source, list(ROW))
    with pytest.raises(ValueError, match=r"prompt\.template"):
        template.render(ROW)
    # The next row has all of its own.
    assert RowTemplate("{{ s }}", list(ROW)).render(ROW) == "text"


@pytest.mark.parametrize("source", ENDLESS)
def test_t08_a_chat_template_that_never_ends_is_refused_by_name(source: str) -> None:
    tokenizer = make()
    own = "{% set s, n, l = 'text', 10**9, [1, 2] %}" + source
    tokenizer.chat_template = own + "{{ messages[0]['content'] }}"
    spec = PromptSpec(template="{{ q }}")
    with pytest.raises(UsageError, match="chat template"):
        Renderer(spec, pa.schema([("q", pa.string())]), tokenizer)


def test_t08_messages_meet_the_same_limit_before_the_run_and_in_a_row() -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    schema = pa.schema([("messages", pa.string())])
    tokenizer = make()
    tokenizer.chat_template = loop
    with pytest.raises(UsageError, match=r"chat template takes more than 0\.2 seconds for one row"):
        Renderer(PromptSpec(), schema, tokenizer)
    tokenizer.chat_template = "{% if messages[0]['content'] == 'x' %}" + loop + "{% endif %}"
    tokenizer.chat_template += "{{ messages[0]['content'] }}"
    renderer = Renderer(PromptSpec(), schema, tokenizer)
    encoder = PromptEncoder(renderer, tokenizer, Limits(99, 9999))
    good, bad = encoder.encode(
        [Chat([{"role": "user", "content": content}]) for content in ("a", "x")]
    )
    assert not isinstance(good, RowError)
    assert isinstance(bad, RowError)
    assert "more than 0.2 seconds" in bad.message


def test_each_row_begins_anew() -> None:
    template = RowTemplate("{% for i in range(30000) %}{% endfor %}{{ s }}", list(ROW))
    assert [template.render(ROW) for _ in range(20)] == ["text"] * 20


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ d.items }}", r"'items' is a function.*\['items'\]"),
        ("{{ range }}", "function"),
        ("{{ l|map('upper') }}", "| list"),
        ("{{ dict }}", "function"),
        ("{{ [d.nothing] }}", "has no attribute 'nothing'"),
        ("{{ none }}", "null"),
    ],
)
def test_what_is_no_data_is_not_printed(source: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        render(source)


@pytest.mark.parametrize("source", ["{{ lipsum() }}", "{{ l|random }}"])
def test_what_gives_another_text_each_time_is_not_there(source: str) -> None:
    with pytest.raises(UsageError):
        RowTemplate(source, list(ROW))


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 3000 + "s" + ")" * 3000 + " }}",
        "{% for i in l %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "-" * 3000 + "few }}",
        "{% if s %}" * 150 + "{% endif %}" * 150,
    ],
)
def test_what_is_nested_too_deeply_is_refused_before_the_run(source: str) -> None:
    with pytest.raises(UsageError, match="nested too deeply"):
        RowTemplate(source, list(ROW))


@pytest.mark.parametrize(
    "source",
    [
        "{{ s.__class__ }}",
        "{{ s['__class__'] }}",
        "{{ s|attr('__class__') }}",
        "{{ [s]|map(attribute='__class__')|list }}",
        "{{ [s]|map('attr', '__class__')|list }}",
        "{{ '{0.__class__}'.format(s) }}",
        "{{ '{0[__class__]}'.format(d) }}",
        "{{ s.format.__globals__ }}",
        "{{ '{x.__class__}'.format_map({'x': s}) }}",
        "{{ l.append(4) }}",
        "{{ d.update({'x': 1}) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ (range|attr('__globals__')).os }}",
    ],
)
def test_a_template_reaches_neither_into_python_nor_changes_a_row(source: str) -> None:
    with pytest.raises(ValueError, match=r"prompt\.template"):
        render(source)
    assert ROW["l"] == [1, 2, 3]


@pytest.mark.parametrize("tag", ["include", "import", "extends", "from"])
@pytest.mark.parametrize("name", ["'/etc/passwd'", "s", "['a', 'b']"])
def test_a_template_reads_no_file(tag: str, name: str) -> None:
    rest = {"import": " as x", "from": " import x"}.get(tag, "")
    with pytest.raises(UsageError, match="another file"):
        RowTemplate(f"{{% {tag} {name}{rest} %}}", list(ROW))
