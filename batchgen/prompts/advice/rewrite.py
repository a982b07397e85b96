"""A template cut into parts that can stand elsewhere, and put together in another order."""

from collections.abc import Sequence
from dataclasses import dataclass

import jinja2
from jinja2 import meta, nodes

_BLOCKS = frozenset(("autoescape", "block", "call", "filter", "for", "if", "macro", "with"))
_DEFINITIONS = (nodes.Assign, nodes.AssignBlock, nodes.Macro)


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a template that can stand elsewhere: text, an expression or a whole block.

    Attributes:
        source: the part as a template of its own.
        reads: names it takes from outside.
        defines: names it sets for what follows.
        is_definition: whether it does nothing else, and so writes nothing.
    """

    source: str
    reads: frozenset[str]
    defines: frozenset[str]
    is_definition: bool

    @classmethod
    def parse(cls, source: str) -> "Piece":
        """Read a part.

        Raises:
            jinja2.TemplateSyntaxError: it is no template by itself.
        """
        tree = jinja2.Environment(autoescape=False).parse(source)
        only = bool(tree.body) and all(isinstance(each, _DEFINITIONS) for each in tree.body)
        reads = meta.find_undeclared_variables(tree)
        return cls(source, frozenset(reads), _defined(tree), only)


def template_pieces(source: str) -> list[Piece]:
    """Cut a template between its outermost parts.

    Raises:
        jinja2.TemplateSyntaxError: a part is no template by itself.
    """
    return [Piece.parse(text) for text in _split(source)]


def _defined(tree: nodes.Template) -> frozenset[str]:
    assigned = any(True for kind in _DEFINITIONS for _ in tree.find_all(kind))
    if not assigned:
        return frozenset()
    names = {each.name for each in tree.find_all(nodes.Name) if each.ctx == "store"}
    names |= {each.name for each in tree.find_all(nodes.NSRef)}
    return frozenset(names | {each.name for each in tree.find_all(nodes.Macro)})


def moved_to_end(pieces: Sequence[Piece], columns: Sequence[str]) -> str | None:
    """Write the template with all that depends on some columns behind the rest.

    Returns:
        None where a block both writes and sets names, and so has no other place.
    """
    tainted, kept, moved = set(columns), list[str](), list[str]()
    for piece in pieces:
        if tainted.isdisjoint(piece.reads):
            kept.append(piece.source)
        elif piece.is_definition:
            kept.append(piece.source)
            tainted |= piece.defines
        elif piece.defines:
            return None
        else:
            moved.append(_literal("\n") + piece.source)
    return "".join(kept + moved)


def _split(source: str) -> list[str]:
    """Cut a template between its outermost parts, white-space control already applied."""
    pieces: list[str] = []
    part: list[str] = []
    block: list[str] = []
    depth = 0
    for _, kind, value in jinja2.Environment(autoescape=False).lex(source):
        if kind == "block_begin":
            block = []
        block.append(value)
        part.append(_respelt(kind, value))
        if kind == "block_end":
            depth += _nesting(block)
        if depth == 0 and kind in ("data", "variable_end", "block_end"):
            pieces.append("".join(part))
            part = []
    return pieces


def _nesting(block: Sequence[str]) -> int:
    """Return 1 for a tag that opens a block, -1 for one that closes it, else 0."""
    word = next(each for each in block[1:] if each.strip())
    if word.startswith("end"):
        return -1
    return int(word in _BLOCKS or (word == "set" and "=" not in block))


def _respelt(kind: str, value: str) -> str:
    # The lexer has stripped what the signs in `{{-` and `-%}` ask for: they must not act again.
    if kind == "data":
        return _literal(value)
    if kind.startswith(("raw_", "comment")):
        return ""
    tags = {
        "variable_begin": "{{ ",
        "variable_end": " }}",
        "block_begin": "{% ",
        "block_end": " %}",
    }
    return tags.get(kind, value)


def _literal(text: str) -> str:
    return "{% raw %}" + text + "{% endraw %}"
