"""What is known of a model without its weights: how prompts are made for it, and what it answers.

The command and the Python API build it by the same function.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.config import ModelConfig
from batchgen.data.input.reader import RowBatch
from batchgen.errors import RowError, RowErrorType, UsageError
from batchgen.prompts.bad_words import BadWords
from batchgen.prompts.chat_template import end_of_turn
from batchgen.prompts.limits import Limits
from batchgen.prompts.render import Renderer
from batchgen.prompts.row_sampling import num_samples
from batchgen.prompts.source import Source
from batchgen.prompts.tokenize import tokenize_batches
from batchgen.prompts.tokenizer import Tokenizer, load_tokenizer
from batchgen.prompts.truncation import SIDES, Truncation
from batchgen.runtime.hub import require_answer, require_no_adapter
from batchgen.runtime.model import (
    ModelSource,
    load_config,
    load_eos_ids,
)
from batchgen.runtime.model_files import check_files, check_model
from batchgen.runtime.model_kinds import resolve_max_model_len
from batchgen.sampling import SamplingParams
from batchgen.structured.grammars import Grammars


@dataclass(frozen=True, slots=True)
class ModelFront:
    """A model's tokenizer, limits and grammars.

    Attributes:
        model_config: transformers' configuration of the model.
        tokenizer: the model's, or None where it has none and the rows are token ids.
        limits: what the model can take.
        eos_token_ids: ids that end a sequence.
        grammars: what structured outputs may be.
        bad_words: what outputs may not hold.
    """

    model_config: Any
    tokenizer: Tokenizer | None
    limits: Limits
    eos_token_ids: frozenset[int]
    grammars: Grammars
    bad_words: BadWords

    @classmethod
    def load(cls, model: ModelConfig, chat_template: str | None = None) -> "ModelFront":
        """Read configuration and tokenizer.

        Args:
            chat_template: in the place of the tokenizer's own.

        Raises:
            UsageError: one of them cannot be used.
        """
        source = model_source(model)
        check_model(model.path, allow_pickle=model.allow_pickle)
        config = load_config(source)
        require_no_adapter(model.path, model.revision)
        if model.tokenizer is not None:
            check_files("model.tokenizer", Path(model.tokenizer))
            require_answer("model.tokenizer", model.tokenizer, None)
        tokenizer = load_tokenizer(
            model.tokenizer or model.path,
            revision=None if model.tokenizer else model.revision,
            trust_remote_code=model.trust_remote_code,
        )
        if tokenizer is not None and chat_template is not None:
            tokenizer.chat_template = chat_template
        eos_token_ids = load_eos_ids(source, config, tokenizer)
        return cls(
            model_config=config,
            tokenizer=tokenizer,
            limits=Limits(
                max_model_len=resolve_max_model_len(config, model.max_model_len),
                vocab_size=config.vocab_size,
            ),
            eos_token_ids=eos_token_ids,
            grammars=Grammars(tokenizer, config.vocab_size, lambda: eos_token_ids),
            bad_words=BadWords(tokenizer, config.vocab_size),
        )

    def check(self, params: SamplingParams) -> None:
        """Refuse parameters of all rows that this model cannot follow.

        Raises:
            UsageError: the key and what to do.
        """
        if params.stop and self.tokenizer is None:
            raise UsageError(
                "sampling.stop needs text, but the model has no tokenizer; name one with "
                "model.tokenizer, or use sampling.stop_token_ids"
            )
        problem = self.bad_words.problem(params)
        if problem is not None:
            raise UsageError(f"sampling.{problem.message}")
        problem = self.grammars.problem(params)
        if problem is not None and problem.type is RowErrorType.INVALID_SAMPLING_PARAMS:
            raise UsageError(problem.message)

    def problem(self, params: SamplingParams) -> RowError | None:
        """Say why no output can be as the parameters ask, or None where one can."""
        return self.bad_words.problem(params) or self.grammars.problem(params)

    def requests_of(self, params: SamplingParams) -> int:
        """Count the requests that a row with some parameters makes."""
        if params.score_choices:
            return self.grammars.num_nodes(params.score_choices)
        return num_samples(params)

    def tokenize(
        self,
        rows: Iterable[RowBatch],
        renderer: Renderer,
        sampling: SamplingParams,
        *,
        priority_column: str | None = None,
        truncation: Truncation | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Render and tokenise rows, batch by batch, for the prompt store."""
        return tokenize_batches(
            rows,
            renderer,
            self.tokenizer,
            self.limits,
            sampling,
            priority_column=priority_column,
            output_problem=self.problem,
            truncation=truncation,
        )

    def make_truncation(
        self, policy: str, renderer: Renderer, sampling: SamplingParams
    ) -> Truncation | None:
        """Make what cuts prompts that are too long; None where a policy cuts none.

        Raises:
            UsageError: the tokenizer does not say where tokens stand in a text.
        """
        if policy not in SIDES:
            return None
        cuts_text = renderer.source in (Source.MESSAGES, Source.TEMPLATE)
        if cuts_text and not getattr(self.tokenizer, "is_fast", False):
            raise UsageError(
                f"prompt.truncation={policy} cuts a {renderer.source.value}'s own text, for which "
                "the tokenizer must say where its tokens stand in it, and this one, which has no "
                "tokenizer.json, does not; name another with model.tokenizer"
            )
        return Truncation(
            SIDES[policy], renderer, self.tokenizer, self.limits, sampling, self._output_tokens
        )

    def _output_tokens(self, params: SamplingParams) -> int:
        if params.score_choices:
            # The longest way to where choices part, and the token whose logits are wanted.
            return max(map(len, self.grammars.tree(params.score_choices).paths)) + 1
        return params.max_tokens

    def end_of_turn_warning(self, params: SamplingParams) -> str | None:
        """Warn where the chat template ends an answer with a token that ends no output."""
        if self.tokenizer is None:
            return None
        token = end_of_turn(self.tokenizer)
        if token is None or token in {*self.eos_token_ids, *params.stop_token_ids}:
            return None
        return (
            f"the chat template ends an answer with {self.tokenizer.convert_ids_to_tokens(token)}"
            f", which neither the model's files nor the tokenizer name as an end of sequence: an "
            f"answer may run on after it; set sampling.stop_token_ids=[{token}]"
        )


def model_source(model: ModelConfig) -> ModelSource:
    """Say where the model comes from, in the runtime's words."""
    return ModelSource(model.path, model.revision, model.trust_remote_code, model.allow_pickle)
