"""Constrained outputs: choices, regular expressions and JSON schemas as masks over tokens.

The grammars are llguidance's (MIT, Rust, Microsoft). Three libraries are alive and were looked
at. llguidance needs no other package, has one wheel for all Pythons (3 MB, Linux, macOS,
Windows), is typed, compiles a schema in about a millisecond and makes a mask of 49,152 tokens
in 20 (choices) to 100 (JSON) microseconds; what it does not implement of JSON schema it
refuses. xgrammar (Apache) makes masks as fast or faster, but requires torch, transformers and
a compiler bridge of its own as packages. outlines-core (Apache) turns a schema into one regular
expression and walks the whole vocabulary for each of its states before the first token, which
takes seconds to minutes for a larger schema (its issue 193), and accepts schemas that it does
not implement.

``choices`` and ``calibration`` are about choices that are scored rather than written.

Only this package knows the library. The engine and the runtime see the two protocols of
``batchgen.engine.step``: a constraint that takes tokens, and a source that fills masks.
"""
