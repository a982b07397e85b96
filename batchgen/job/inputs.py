"""What a job reads: rows, tokenizer, limits, and how a row becomes a prompt."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

import pyarrow as pa

from batchgen.config import Config, InputConfig, NormalizeConfig, PromptConfig
from batchgen.data.input.reader import RowBatch, id_type, read_rows
from batchgen.data.input.source import InputSource, discover
from batchgen.data.output.carry import carried_schema
from batchgen.data.output.schema import OWN_COLUMNS, output_schema
from batchgen.errors import UsageError, listed
from batchgen.job.front import ModelFront
from batchgen.job.template_time import template_time
from batchgen.prompts.chat_template import TemplateVariables, template_reads
from batchgen.prompts.fields.orders import find_orders
from batchgen.prompts.normalize import NormalizeSpec
from batchgen.prompts.render import Renderer
from batchgen.prompts.shots import Shots, load_shots
from batchgen.prompts.source import PromptSpec, Source
from batchgen.prompts.truncation import Truncation
from batchgen.sampling import SamplingParams, Structure


@dataclass(frozen=True, slots=True)
class JobInputs(ModelFront):
    """The job's inputs, checked as far as that goes without reading rows or weights.

    Attributes:
        source: the input files.
        id_type: Arrow type of the ids.
        num_rows: input rows that the job takes.
        spec: the keys of the prompt, with what stands in files.
        renderer: rows to prompts.
        truncation: cuts prompts that are too long, where that is asked for.
        sampling: the job's parameters.
        carried: input columns that go into the output, if any.
        fields, field_order: the columns that the template lists, and in which order.
    """

    source: InputSource
    id_type: pa.DataType
    num_rows: int
    spec: PromptSpec
    renderer: Renderer
    truncation: Truncation | None
    sampling: SamplingParams
    carried: pa.Schema | None
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
        spec = prompt_spec(config.prompt)
        front = ModelFront.load(config.model, spec.chat_template)
        if front.tokenizer is not None and template_reads(front.tokenizer, "strftime_now"):
            spec = replace(spec, variables=replace(spec.variables, now=template_time(config)))
        sampling = job_sampling(config)
        front.check(sampling)
        renderer = Renderer(spec, source.schema, front.tokenizer)
        _refuse_gaps(source, renderer.prompt_columns)
        return cls(
            **{each.name: getattr(front, each.name) for each in fields(front)},
            source=source,
            id_type=id_type(source, config.input.id_column),
            num_rows=min(source.num_rows, config.input.limit or source.num_rows),
            spec=spec,
            renderer=renderer,
            truncation=front.make_truncation(config.prompt.truncation.value, renderer, sampling),
            sampling=sampling,
            carried=_carried(config, source),
            fields=tuple(config.prompt.fields),
            field_order=config.prompt.field_order.value,
        )

    def warnings(self) -> list[str]:
        """Return warnings of what is allowed and most likely not meant."""
        files = len(self.source.files)
        holder = "its file holds no row" if files == 1 else f"none of its {files} files holds a row"
        nothing = f"input.path={self.source.path}: {holder}, so there is nothing to do"
        sampling = self.sampling.warning()
        is_chat = Source.MESSAGES is self.renderer.source or self.renderer.format == "chat"
        end_of_turn = self.end_of_turn_warning(self.sampling) if is_chat else None
        return [
            *([] if self.num_rows else [nothing]),
            *([f"sampling.{sampling}"] if sampling is not None else []),
            *self.grammars.notes(self.sampling),
            *([end_of_turn] if end_of_turn is not None else []),
            *([self.renderer.ignored] if self.renderer.ignored is not None else []),
        ]

    def notes(self) -> list[str]:
        """Return what the prompts depend on that no key and no row names."""
        widened = self.source.widened
        notes = [
            f"{widened[name]}: all its values are printed as floating numbers"
            for name in self.renderer.prompt_columns
            if name in widened
        ]
        time = self.template_time
        if time is not None:
            notes.append(f"the chat template prints the time: for all rows it is {time}")
        return notes

    @property
    def template_time(self) -> str | None:
        """The time that the chat template prints; None where it prints none."""
        is_chat = self.renderer.source is Source.MESSAGES or self.renderer.format == "chat"
        if not is_chat or not template_reads(self.tokenizer, "strftime_now"):
            return None
        return self.spec.variables.now.isoformat(timespec="seconds")

    @property
    def output_schema(self) -> pa.Schema:
        """The schema of the output."""
        return output_schema(self.id_type, self.carried)

    def prompts(
        self, config: InputConfig, observe: Callable[[pa.RecordBatch], None] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Read, render and tokenise the rows, batch by batch, for the prompt store.

        Args:
            observe: called with the columns of each batch before it is rendered.
        """
        priority = config.priority_column
        if self.field_order != "given":
            # Over the whole job, however few of its rows are looked at.
            rows = read_rows(
                self.source, self.fields, id_column=config.id_column, limit=self.num_rows
            )
            self.renderer.field_orders = find_orders(rows, self.fields, self.field_order)
        columns = [*self.renderer.columns, *([priority] if priority else [])]
        rows = read_rows(
            self.source,
            tuple(dict.fromkeys(columns)),
            id_column=config.id_column,
            limit=config.limit,
        )
        return self.tokenize(
            rows if observe is None else _observed(rows, observe),
            self.renderer,
            self.sampling,
            priority_column=priority,
            truncation=self.truncation,
        )


def _refuse_gaps(source: InputSource, columns: Iterable[str]) -> None:
    """Refuse files without a column that the prompts are made from: its rows would all be null.

    Raises:
        UsageError: naming the file and the column.
    """
    for name in columns:
        if name in source.gaps:
            raise UsageError(
                f"input.path: {source.gaps[name]}. The prompts are made from that column: name it "
                "alike in all files, add it with nulls, or leave the file out"
            )


def _observed(
    rows: Iterable[RowBatch], observe: Callable[[pa.RecordBatch], None]
) -> Iterator[RowBatch]:
    for batch in rows:
        observe(batch.table)
        yield batch


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
        chat_template=_read(prompt.chat_template_file, "prompt.chat_template_file")
        if prompt.chat_template_file
        else None,
        variables=TemplateVariables(prompt.chat_template_kwargs),
        tools_column=prompt.tools_column,
        continue_final_message=prompt.continue_final_message,
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
    return text if file is None else _read(file, key).removesuffix("\n")


def _read(file: str, key: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{key}={file} cannot be read: {error}") from error
