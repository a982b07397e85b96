"""Override values rewritten so that they mean in Hydra what they mean in YAML."""

import json
import re
import shlex

from hydra.core.override_parser.types import Quote, QuotedString

# A value falls into quoted strings, plain runs (with Hydra's escapes and interpolations
# inside them), and the brackets, braces and commas between.
_PIECE = re.compile(
    r'"(?P<double>(?:[^"\\]|\\.)*)"'
    r"|(?P<single>'(?:[^'\\]|\\.)*')"
    r"|(?P<plain>(?:\\.|\$\{[^}]*\}|[^\[\](){},\"'\\])+)",
    re.DOTALL,
)
_NUMBER_OR_BOOL = re.compile(
    r"[+-]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:e[+-]?[0-9_]+)?"
    r"|[+-]?(?:inf|nan)|true|false",
    re.IGNORECASE,
)
_FUNCTION_OF_NUMBERS = re.compile(r"\b(?:range|interval|glob)\s*\(")
_HEX = "[0-9a-fA-F]"
_ESCAPE = re.compile(
    rf"\\(?:x({_HEX}{{2}})|u({_HEX}{{4}})|U({_HEX}{{8}})|(.))",
    re.DOTALL,
)
# Section 5.7 of the YAML 1.2 specification.
_SHORT_ESCAPES = {
    "0": "\0",
    "a": "\a",
    "b": "\b",
    "t": "\t",
    "\t": "\t",
    "n": "\n",
    "v": "\v",
    "f": "\f",
    "r": "\r",
    "e": "\x1b",
    " ": " ",
    '"': '"',
    "/": "/",
    "\\": "\\",
    "N": "\x85",
    "_": "\xa0",
    "L": "\u2028",
    "P": "\u2029",
}


def as_hydra(value: str, *, is_text: bool) -> str:
    r"""Rewrite the value of an override.

    Double-quoted strings are decoded as YAML decodes them (``"\n"`` is a line break);
    where text is wanted, what Hydra would read as a number or a boolean is quoted.

    Args:
        value: what stands after the ``=``.
        is_text: whether the key holds text or a list of text.

    Raises:
        ValueError: an escape that YAML does not have.
    """
    keep_plain = not is_text or _FUNCTION_OF_NUMBERS.search(value) is not None

    def rewrite(piece: re.Match[str]) -> str:
        if piece["double"] is not None:
            return in_quotes(_decode(piece["double"]))
        plain = piece["plain"]
        if plain is None or keep_plain or not _NUMBER_OR_BOOL.fullmatch(plain.strip()):
            return piece[0]
        return in_quotes(plain.strip())

    return _PIECE.sub(rewrite, value)


def in_quotes(text: str) -> str:
    """Write text as Hydra's double-quoted string."""
    return QuotedString(text, Quote.double).with_quotes()


def quoted_form(key: str, value: str, *, is_list: bool) -> str:
    """Show how to type a value so that neither the shell nor Hydra stumbles over it."""
    if not is_list:
        return shlex.quote(f"{key}={_yaml_string(value)}")
    inner = value.strip().removeprefix("[").removesuffix("]")
    items = (_yaml_string(item.strip(" '\"")) for item in inner.split(","))
    return shlex.quote(f"{key}=[{','.join(items)}]")


def _yaml_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _decode(content: str) -> str:
    def decode(escape: re.Match[str]) -> str:
        code = escape[1] or escape[2] or escape[3]
        if code:
            return chr(int(code, 16))
        if escape[4] not in _SHORT_ESCAPES:
            raise ValueError(
                f"YAML has no escape \\{escape[4]} in a double-quoted string; "
                "write \\\\ for a backslash, or use single quotes"
            )
        return _SHORT_ESCAPES[escape[4]]

    return _ESCAPE.sub(decode, content)
