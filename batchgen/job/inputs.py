"""What a job reads: rows, tokenizer, limits, and how a row becomes a prompt."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.config import Config, InputConfig, NormalizeConfig, PromptConfig
from batchgen.data.input.reader import id_type, read_rows
from batchgen.data.input.source import InputSource, discover
from batchgen.data.output.carry import carried_schema
from batchgen.data.output.schema import OWN_COLUMNS, output_schema
from batchgen.errors import RowError, RowErrorType, UsageError, listed
from batchgen.prompts.bad_words import BadWords
from batchgen.prompts.fields.orders import find_orders
from batchgen.prompts.limits import Limits
from batchgen.prompts.normalize.rules import NormalizeSpec
from batchgen.prompts.render import Renderer
from batchgen.prompts.row_sampling import num_samples
from batchgen.prompts.shots import Shots, load_shots
from batchgen.prompts.source import PromptSpec, Source
from batchgen.prompts.tokenize import tokenize_batches
from batchgen.prompts.tokenizer import Tokenizer, load_tokenizer
from batchgen.prompts.truncation import SIDES, Truncation
from batchgen.runtime.hub import require_answer
from batchgen.runtime.model import (
    ModelSource,
    load_config,
    load_eos_ids,
    resolve_max_model_len,
)
from batchgen.sampling import SamplingParams, Structure
from batchgen.structured.grammars import Grammars


@dataclass(frozen=True, slots=True)
class JobInputs:
    """The job's inputs, checked as far as that goes without reading rows or weights.

    Attributes:
        source: the input files.
        id_type: Arrow type of the ids.
        num_rows: input rows that the job takes.
        tokenizer: the model's, or None where it has none and the rows are token ids.
        limits: what the model can take.
        renderer: rows to prompts.
        truncation: cuts prompts that are too long, where that is asked for.
        sampling: the job's parameters.
        carried: input columns that go into the output, if any.
        grammars: what structured outputs may be.
        bad_words: what outputs may not hold.
        model_config: transformers' configuration of the model.
        fields, field_order: the columns that the template lists, and in which order.
    """

    source: InputSource
    id_type: pa.DataType
    num_rows: int
    tokenizer: Tokenizer | None
    limits: Limits
    renderer: Renderer
    truncation: Truncation | None
    sampling: SamplingParams
    carried: pa.Schema | None
    grammars: Grammars
    bad_words: BadWords
    model_config: Any
    fields: tuple[str, ...] = ()
    field_order: str = "given"

    @classmethod
    def open(cls, config: Config) -> "JobInputs":
        """Look at files, model configuration and tokenizer.

        Raises:
            UsageError: any of them cannot be used, or they do not fit together.
        """
        source = discover(config.input.path)
        _check_priority(config.input, source.schema)
        model_config = load_config(model_source(config))
        if config.model.tokenizer is not None:
            require_answer("model.tokenizer", config.model.tokenizer, None)
        tokenizer = load_tokenizer(
            config.model.tokenizer or config.model.path,
            revision=None if config.model.tokenizer else config.model.revision,
            trust_remote_code=config.model.trust_remote_code,
        )
        sampling = job_sampling(config)
        if sampling.stop and tokenizer is None:
            raise UsageError(
                "sampling.stop needs text, but the model has no tokenizer; name one with "
                "model.tokenizer, or use sampling.stop_token_ids"
            )
        grammars = Grammars(
            tokenizer,
            model_config.vocab_size,
            lambda: load_eos_ids(model_source(config), model_config),
        )
        bad_words = BadWords(tokenizer, model_config.vocab_size)
        problem = bad_words.problem(sampling)
        if problem is not None:
            raise UsageError(f"sampling.{problem.message}")
        problem = grammars.problem(sampling)
        if problem is not None and problem.type is RowErrorType.INVALID_SAMPLING_PARAMS:
            raise UsageError(problem.message)
        limits = Limits(
            max_model_len=resolve_max_model_len(model_config, config.model.max_model_len),
            vocab_size=model_config.vocab_size,
        )
        renderer = Renderer(prompt_spec(config.prompt), source.schema, tokenizer)
        return cls(
            source=source,
            id_type=id_type(source, config.input.id_column),
            num_rows=min(source.num_rows, config.input.limit or source.num_rows),
            tokenizer=tokenizer,
            limits=limits,
            renderer=renderer,
            truncation=_truncation(
                config.prompt.truncation.value, renderer, tokenizer, limits, sampling, grammars
            ),
            sampling=sampling,
            carried=_carried(config, source),
            grammars=grammars,
            bad_words=bad_words,
            model_config=model_config,
            fields=tuple(config.prompt.fields),
            field_order=config.prompt.field_order.value,
        )

    def warnings(self) -> list[str]:
        """Say what is allowed and most likely not meant."""
        files = len(self.source.files)
        holder = "its file holds no row" if files == 1 else f"none of its {files} files holds a row"
        nothing = f"input.path={self.source.path}: {holder}, so there is nothing to do"
        sampling = self.sampling.warning()
        return [
            *([] if self.num_rows else [nothing]),
            *([f"sampling.{sampling}"] if sampling is not None else []),
        ]

    @property
    def output_schema(self) -> pa.Schema:
        """The schema of the output."""
        return output_schema(self.id_type, self.carried)

    def prompts(self, config: InputConfig) -> Iterator[pa.RecordBatch]:
        """Read, render and tokenise the rows, batch by batch, for the prompt store."""
        priority = config.priority_column
        if self.field_order != "given":
            # Over the whole job, however few of its rows are looked at.
            rows = read_rows(
                self.source, self.fields, id_column=config.id_column, limit=self.num_rows
            )
            orders = find_orders(rows, self.fields, self.field_order)
            self.renderer.field_orders = orders
            if self.truncation is not None:
                self.truncation.renderer.field_orders = orders
        columns = [*self.renderer.columns, *([priority] if priority else [])]
        rows = read_rows(
            self.source,
            tuple(dict.fromkeys(columns)),
            id_column=config.id_column,
            limit=config.limit,
        )
        return tokenize_batches(
            rows,
            self.renderer,
            self.tokenizer,
            self.limits,
            self.sampling,
            priority_column=priority,
            output_problem=self.problem,
            truncation=self.truncation,
        )

    def problem(self, params: SamplingParams) -> RowError | None:
        """Say why no output can be as the parameters ask, or None where one can."""
        return self.bad_words.problem(params) or self.grammars.problem(params)

    def requests_of(self, params: SamplingParams) -> int:
        """Count the requests that a row with some parameters makes."""
        if params.score_choices:
            return self.grammars.num_nodes(params.score_choices)
        return num_samples(params)


def _truncation(
    policy: str,
    renderer: Renderer,
    tokenizer: Tokenizer | None,
    limits: Limits,
    sampling: SamplingParams,
    grammars: Grammars,
) -> Truncation | None:
    if policy not in SIDES:
        return None
    cuts_text = renderer.source in (Source.MESSAGES, Source.TEMPLATE)
    if cuts_text and not getattr(tokenizer, "is_fast", False):
        raise UsageError(
            f"prompt.truncation={policy} cuts a {renderer.source.value}'s own text, for which the "
            "tokenizer must say where its tokens stand in it, and this one, which has no "
            "tokenizer.json, does not; name another with model.tokenizer"
        )

    def output_tokens(params: SamplingParams) -> int:
        if params.score_choices:
            # The longest way to where choices part, and the token whose logits are wanted.
            return max(map(len, grammars.tree(params.score_choices).paths)) + 1
        return params.max_tokens

    return Truncation(SIDES[policy], renderer, tokenizer, limits, sampling, output_tokens)


def _carried(config: Config, source: InputSource) -> pa.Schema | None:
    wanted = config.output.carry_columns
    if not wanted:
        return None
    id_column = config.input.id_column
    return carried_schema(source, wanted, id_column=id_column, own=OWN_COLUMNS)


def _check_priority(config: InputConfig, schema: pa.Schema) -> None:
    column = config.priority_column
    if column is None:
        return
    if column not in schema.names:
        raise UsageError(
            f"input.priority_column={column} is no column of the input; it has "
            f"{listed(schema.names)}"
        )
    kind = schema.field(column).type
    if not (pa.types.is_integer(kind) or pa.types.is_null(kind)):
        raise UsageError(
            f"input.priority_column={column} has type {kind}; priorities must be integers"
        )


def model_source(config: Config) -> ModelSource:
    """Say where the model comes from, in the runtime's words."""
    model = config.model
    return ModelSource(model.path, model.revision, model.trust_remote_code, model.allow_pickle)


def job_sampling(config: Config) -> SamplingParams:
    """Put the job's sampling parameters and structure together.

    Raises:
        UsageError: they make no sense, or a file cannot be read.
    """
    given = config.structured
    schema = _text(given.json, given.json_file, "structured.json_file")
    regex = _text(given.regex, given.regex_file, "structured.regex_file")
    try:
        structure = Structure.of({"choice": given.choice, "regex": regex, "json": schema})
    except ValueError as error:
        keys = (("json_file", given.json_file), ("regex_file", given.regex_file))
        where = "".join(f"structured.{key}={path}: " for key, path in keys if path)
        raise UsageError(f"{where}{error}") from error
    params = replace(config.sampling.params(), structured=structure)
    problem = params.problem()
    if problem:
        raise UsageError(f"sampling.{problem}")
    return params


def prompt_spec(prompt: PromptConfig) -> PromptSpec:
    """Read the files that the prompt's keys name.

    A text file's final newline belongs to the file, not to the text.

    Raises:
        UsageError: a file cannot be read.
    """
    shots = load_shots(Path(prompt.shots_file)) if prompt.shots_file else Shots()
    return PromptSpec(
        column=prompt.column,
        messages_column=prompt.messages_column,
        token_ids_column=prompt.token_ids_column,
        template=_text(prompt.template, prompt.template_file, "prompt.template_file"),
        format=prompt.format.value,
        system=_text(prompt.system, prompt.system_file, "prompt.system_file"),
        shots=shots.rows,
        shot_places=shots.places,
        answer_column=prompt.answer_column,
        separator=prompt.separator,
        answer_prefix=prompt.answer_prefix,
        normalize=_normalize_spec(prompt.normalize),
        fields=tuple(prompt.fields),
        field_order=prompt.field_order.value,
    )


def _normalize_spec(normalize: NormalizeConfig) -> NormalizeSpec:
    return NormalizeSpec(
        unicode=normalize.unicode.value,
        line_ends=normalize.line_ends,
        trailing_space=normalize.trailing_space,
        system_text=normalize.system_text,
        shots_order=normalize.shots_order,
        message_parts=normalize.message_parts,
        columns=tuple(normalize.columns),
    )


def _text(text: str | None, file: str | None, key: str) -> str | None:
    if file is None:
        return text
    try:
        return Path(file).read_text(encoding="utf-8").removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{key}={file} cannot be read: {error}") from error
