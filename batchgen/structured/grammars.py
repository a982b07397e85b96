"""The structures of a job, compiled once each."""

from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, Generic, TypeVar

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from batchgen.errors import RowError, RowErrorType
from batchgen.sampling import SamplingParams, Structure
from batchgen.structured.choices import ChoiceTree
from batchgen.structured.constraint import Masks, TokenConstraint
from batchgen.structured.grammar import (
    explain,
    grammar_of,
    is_unsatisfiable,
    notes_on,
    spelling_of,
)
from batchgen.structured.schema import SchemaError
from batchgen.structured.vocabulary import VocabularyError, load_vocabulary

# Few structures stand in many rows; where each row has its own, memory stays bounded.
_MOST_COMPILED = 1024

_Given = TypeVar("_Given")
_Result = TypeVar("_Result")


class _RefusedError(Exception):
    """A structure cannot be used."""

    def __init__(self, kind: RowErrorType, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class _Compiled(Generic[_Result]):
    """A structure's grammar before the first token or a token tree, or what is wrong with it."""

    result: _Result | None
    error: RowError | None


class Grammars:
    """Compiles structures and choices for one model's tokens.

    Args:
        tokenizer: a transformers tokenizer, or None if the model has none.
        vocab_size: ids of the model's logits.
        eos_token_ids: gives the ids that end an output; asked for when first needed.
    """

    def __init__(
        self, tokenizer: Any, vocab_size: int, eos_token_ids: Callable[[], Set[int]]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._grammars = lru_cache(_MOST_COMPILED)(partial(_compiled, self._matcher))
        self._trees = lru_cache(_MOST_COMPILED)(partial(_compiled, self._tree))

    def problem(self, params: SamplingParams) -> RowError | None:
        """Return why no output can be as the parameters ask, or None if one can.

        The error's type is ``invalid_sampling_params`` where they make no sense in
        themselves, and ``unsatisfiable_constraint`` where nothing matches them.
        """
        if params.score_choices:
            return self._trees(params.score_choices).error
        if params.structured is not None:
            return self._grammars(params.structured).error
        return None

    def notes(self, params: SamplingParams) -> list[str]:
        """Return what of a structure without a :meth:`problem` outputs are not held to."""
        return notes_on(params.structured) if params.structured is not None else []

    def constraint(self, structure: Structure) -> TokenConstraint:
        """Make the constraint of one request, whose structure has no :meth:`problem`."""
        matcher = self._grammars(structure).result
        assert matcher is not None
        return TokenConstraint(matcher, self._masks)

    def tree(self, choices: tuple[str, ...]) -> ChoiceTree:
        """Return the token tree of choices that have no :meth:`problem`."""
        tree = self._trees(choices).result
        assert tree is not None
        return tree

    def num_nodes(self, choices: tuple[str, ...]) -> int:
        """Count the nodes of the token tree; 1 where the choices have a :meth:`problem`."""
        tree = self._trees(choices).result
        return len(tree.paths) if tree is not None else 1

    @cached_property
    def _vocabulary(self) -> LLTokenizer:
        try:
            return load_vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids())
        except VocabularyError as error:
            raise _invalid(f"structured.* and score_choices cannot be used: {error}") from error

    @cached_property
    def _masks(self) -> Masks:
        return Masks(self._vocabulary)

    @cached_property
    def _special_tokens(self) -> list[str]:
        added = self._tokenizer.added_tokens_decoder.values()
        return [token.content for token in added if token.special]

    def _matcher(self, structure: Structure) -> LLMatcher:
        matcher = LLMatcher(self._vocabulary, grammar_of(structure), log_level=0)
        if matcher.is_error():
            message = explain(structure, matcher.get_error())
            is_empty = is_unsatisfiable(matcher.get_error())
            raise _unsatisfiable(message) if is_empty else _invalid(message)
        self._check_special("structured.*", spelling_of(structure))
        for text in structure.choice or ():
            self._check_spelt("structured.choice", text, self._vocabulary.greedy_tokenize(text))
        return self._with_first_mask(matcher)

    def _tree(self, choices: tuple[str, ...]) -> ChoiceTree:
        key = "sampling.score_choices"
        spelled = {text: self._vocabulary.tokenize_str(text) for text in choices}
        self._check_special(key, "\0".join(choices))
        for text, tokens in spelled.items():
            self._check_spelt(key, text, tokens)
        return ChoiceTree.of(spelled)

    def _with_first_mask(self, matcher: LLMatcher) -> LLMatcher:
        """Look whether any token may come first; copies then have that at hand."""
        mask = np.zeros((1, self._masks.num_words), dtype=np.int32)
        constraint = TokenConstraint(matcher, self._masks)
        self._masks.fill([constraint], mask)
        if not mask.any():
            raise _unsatisfiable("structured.* matches no text at all")
        return constraint.matcher

    def _check_special(self, key: str, spelling: str) -> None:
        for special in self._special_tokens:
            if special in spelling:
                raise _invalid(
                    f"{key} spells {special!r}, which is a token that frames the model's text "
                    "and cannot be a part of it"
                )

    def _check_spelt(self, key: str, text: str, tokens: list[int]) -> None:
        if self._vocabulary.decode_bytes(tokens) != text.encode():
            raise _unsatisfiable(f"{key}: no tokens of the model spell {text!r}")


def _compiled(compile_: Callable[[_Given], _Result], given: _Given) -> _Compiled[_Result]:
    try:
        return _Compiled(compile_(given), None)
    except _RefusedError as refused:
        return _Compiled(None, RowError(refused.kind, str(refused)))
    except SchemaError as error:
        return _Compiled(None, RowError(RowErrorType.INVALID_SAMPLING_PARAMS, str(error)))
    except RecursionError:
        message = "structured.json is nested too deeply"
        return _Compiled(None, RowError(RowErrorType.INVALID_SAMPLING_PARAMS, message))
    except UnicodeEncodeError as error:
        message = f"{error.object[error.start : error.end]!r} is half a character"
        return _Compiled(None, RowError(RowErrorType.INVALID_SAMPLING_PARAMS, message))


def _invalid(message: str) -> _RefusedError:
    return _RefusedError(RowErrorType.INVALID_SAMPLING_PARAMS, message)


def _unsatisfiable(message: str) -> _RefusedError:
    return _RefusedError(RowErrorType.UNSATISFIABLE_CONSTRAINT, message)
