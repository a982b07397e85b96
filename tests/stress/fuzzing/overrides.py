"""Fuzzing the command line: whatever is typed is taken or refused in words, and nothing runs."""

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from unittest import mock

from hypothesis import strategies as st

from batchgen.cli import app
from batchgen.errors import ExitCode
from batchgen.keys import declared_keys

_SIGNS = ["", "", "", "", "+", "++", "~"]
_FLAGS = ["-m", "--cfg", "job", "--info", "--help", "--resolve", "--version", "-", "--", "--x=1"]
_VALUES = [
    *("", "null", "true", "1", "-1", "0", "1e400", "nan", "inf", "[]", "{}", "[a,b]", "a,b", "???"),
    *(
        "{a:1}",
        "'",
        '"',
        '"\\n"',
        "'\\n'",
        "\\",
        "${",
        "${x}",
        "${oc.env:HOME}",
        "${hydra:job.num}",
    ),
    *("${pool.block_size}", "${oc.env:NO_SUCH}", "${output.dir}", "range(3)", "choice(a,b)", "a=b"),
    *("glob(*)", "interval(0,1)", "file:///x", "s3://b/k", "~", "..", "/", "*", "[", "**/*", "a b"),
    *("\udc80", "\u202e", "{{ prompt }}", "{% for %}", "{{", "0x10", "1_000", "01", "+1", "1."),
    *("99999999999999999999", "[1,[2]]", "{a:[}", "(", ")", "#", "a#b", "!!python/object:x", "&a"),
]
_OTHERS = ["pool=small", "pool=smal", "job=sentiment", "job=sentimen", "job=", "job=bulk", "x", "="]
_HYDRAS = ["hydra.verbose=true", "hydra.job.name=x", "hydra.x=1", "hydra.job.chdir=true", "hydra=x"]


def _keys() -> st.SearchStrategy[str]:
    known = st.sampled_from(sorted(declared_keys()))
    misspelt = st.builds(
        lambda key, at, letter: key[: at % len(key)] + letter + key[at % len(key) + 1 :],
        known,
        st.integers(0, 40),
        st.sampled_from(["", "x", ".", "\u00e9", "@", "/"]),
    )
    groups = st.sampled_from(["pool", "model", "", ".", "a.b.c", "pool.", ".pool", "hydra", "mode"])
    return st.one_of(known, known, known, misspelt, groups, st.text(max_size=4))


def _arguments() -> st.SearchStrategy[list[str]]:
    # The letters that the two grammars, Hydra's and YAML's, have a meaning for.
    woven = st.text(alphabet="ab1 .,:=[]{}()'\"\\$~+-@*#\n\t\u00e9\U0001f600", max_size=12)
    value = st.one_of(st.sampled_from(_VALUES), woven, st.text(max_size=8))
    override = st.builds("{}{}={}".format, st.sampled_from(_SIGNS), _keys(), value)
    listed = st.sampled_from([*_FLAGS, *_OTHERS, *_HYDRAS])
    # An argument of a process holds no NUL.
    one = st.one_of(override, override, override, listed, woven)
    return st.lists(one.filter(lambda text: "\0" not in text), min_size=1, max_size=4)


INPUTS = _arguments()


@contextmanager
def opened(folder: Path) -> Iterator[Callable[[Sequence[str]], None]]:
    """Give what checks a command line in a folder; the job itself is left out."""
    module = ModuleType("batchgen.run")
    module.run = lambda config, text: ExitCode.DONE  # type: ignore[attr-defined]
    (folder / "in.parquet").touch()
    before = Path.cwd()
    os.chdir(folder)
    try:
        with mock.patch.dict(sys.modules, {"batchgen.run": module}):
            yield lambda arguments: _check(folder, arguments)
    finally:
        os.chdir(before)


def _check(folder: Path, arguments: Sequence[str]) -> None:
    needed = ["model.path=org/model", "input.path=in.parquet", "output.dir=out"]
    said, shown = io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(shown):
        code = app.main([*needed, *arguments])
    text = said.getvalue()
    assert "Traceback" not in text + shown.getvalue(), text
    assert code in (ExitCode.DONE, ExitCode.USAGE), f"exit code {code}: {text}"
    if code == ExitCode.USAGE:
        assert len(text.strip()) > len("batchgen:"), "refused without a word"
    left = [entry.name for entry in folder.iterdir()]
    assert left == ["in.parquet"], f"left behind: {left}"
