"""Every key a user can set, with its type, default and meaning.

The dataclasses are Hydra's structured configs and, once checked, plain objects that the
rest of the house reads. A key is declared here when its feature works, not before.
``metadata["help"]`` is the key's line in ``--help``. None means that the key was not named.
"""

from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any

from omegaconf import MISSING

from batchgen.sampling import SamplingParams


class Mode(StrEnum):
    """What the command does."""

    run = "run"
    plan = "plan"
    preview = "preview"
    jobs = "jobs"
    status = "status"


class PromptFormat(StrEnum):
    """How template, system text and shots become one prompt."""

    auto = "auto"
    chat = "chat"
    plain = "plain"


class UnicodeForm(StrEnum):
    """Unicode's forms of a text."""

    none = "none"
    nfc = "nfc"
    nfkc = "nfkc"


class FieldOrder(StrEnum):
    """In which order a template's ``fields`` stand."""

    given = "given"
    fixed = "fixed"
    rows = "rows"


class Attention(StrEnum):
    """Which attention backend runs over the paged pool."""

    auto = "auto"
    torch = "torch"
    native = "native"
    triton = "triton"


class KVDtype(StrEnum):
    """In which numbers the pool keeps keys and values."""

    auto = "auto"
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"
    fp8_e4m3 = "fp8_e4m3"


class SharedPrefixAttention(StrEnum):
    """Whether a shared prefix is attended to once for all the rows that share it."""

    auto = "auto"
    on = "on"
    off = "off"


class Overlap(StrEnum):
    """Whether a step is planned while the one before runs."""

    auto = "auto"
    on = "on"
    off = "off"


class CudaGraphs(StrEnum):
    """Whether decode steps run as CUDA graphs."""

    auto = "auto"
    on = "on"
    off = "off"


class Preemption(StrEnum):
    """What happens to the KV of a row that must make room."""

    auto = "auto"
    swap = "swap"
    recompute = "recompute"


class Admission(StrEnum):
    """How much memory a row must find before it starts."""

    auto = "auto"
    worst_case = "worst_case"
    expected = "expected"
    prompt = "prompt"


class Order(StrEnum):
    """In which order rows enter the engine."""

    prefix = "prefix"
    input = "input"
    length = "length"


class Resume(StrEnum):
    """What to do with rows that an earlier run has finished."""

    if_possible = "if_possible"
    never = "never"
    always = "always"


class ScoreCalibration(StrEnum):
    """What is added to the choices' scores, so that none is preferred whatever a row says."""

    none = "none"
    content_free = "content_free"
    prior = "prior"


class LogFormat(StrEnum):
    """How a run says what it does, on standard error."""

    text = "text"
    json = "json"


class OutputOrder(StrEnum):
    """In which order rows stand in the finished output."""

    completion = "completion"
    input = "input"


class Truncation(StrEnum):
    """What gives way where a prompt and its output are longer than the model takes."""

    error = "error"
    truncate_left = "truncate_left"
    truncate_right = "truncate_right"
    truncate_middle = "truncate_middle"
    shrink_max_tokens = "shrink_max_tokens"


@dataclass
class ModelConfig:
    """Which model, and how it is loaded."""

    path: str = field(
        default=MISSING, metadata={"help": "a directory, a hub name, or a .gguf file"}
    )
    revision: str | None = field(
        default=None, metadata={"help": "the hub revision (branch, tag or commit)"}
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "a directory or hub name (none: the model's own)"}
    )
    dtype: str = field(
        default="auto",
        metadata={
            "help": "auto: the checkpoint's on a GPU, float32 on a CPU; float32, float16, bfloat16"
        },
    )
    device: str = field(
        default="auto",
        metadata={"help": "auto: cuda where there is one, else cpu; cuda, cuda:N, cpu"},
    )
    max_model_len: int | None = field(
        default=None,
        metadata={"help": "most tokens of prompt and output together (none: the model's)"},
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "run Python code that comes with the model"}
    )
    allow_pickle: bool = field(
        default=False, metadata={"help": "load weights that are no safetensors but pickles (.bin)"}
    )


@dataclass
class InputConfig:
    """Where the rows come from."""

    path: str = field(
        default=MISSING,
        metadata={"help": "a Parquet file, a directory of them, or a glob; local or s3://"},
    )
    id_column: str | None = field(
        default=None,
        metadata={"help": "the column of ids (none: `id` where there is one, else made ids)"},
    )
    limit: int | None = field(default=None, metadata={"help": "read only this many rows"})
    priority_column: str | None = field(
        default=None,
        metadata={"help": "integers; rows with lower ones start first and make room last"},
    )


@dataclass
class NormalizeConfig:
    """How a prompt's frame is spelt; a column's content is touched only where it is named."""

    unicode: UnicodeForm = field(
        default=UnicodeForm.none, metadata={"help": "unicode form of the prompt's own texts"}
    )
    line_ends: bool = field(default=False, metadata={"help": "every line ends with a line feed"})
    trailing_space: bool = field(
        default=False, metadata={"help": "no blanks at the end of a line or of a text"}
    )
    system_text: bool = field(
        default=False, metadata={"help": "one spelling of the system text's white space"}
    )
    shots_order: bool = field(
        default=False, metadata={"help": "examples stand in the order of their text"}
    )
    message_parts: bool = field(
        default=False, metadata={"help": "system messages first, a message's keys by name"}
    )
    columns: list[str] = field(
        default_factory=list,
        metadata={
            "help": "columns of framing rather than content (messages: up to the last question)"
        },
    )


@dataclass
class PromptConfig:
    """How a row becomes a prompt. A source that is not named is looked for in the files."""

    column: str | None = field(
        default=None, metadata={"help": "text prompts (none: `prompt` where there is one)"}
    )
    messages_column: str | None = field(
        default=None, metadata={"help": "chat messages (none: `messages` where there is one)"}
    )
    token_ids_column: str | None = field(
        default=None, metadata={"help": "token ids (none: `prompt_token_ids` where there is one)"}
    )
    template: str | None = field(
        default=None, metadata={"help": "a Jinja template over the row's columns"}
    )
    template_file: str | None = field(
        default=None, metadata={"help": "the file that holds the template"}
    )
    format: PromptFormat = field(
        default=PromptFormat.auto,
        metadata={
            "help": "how the pieces become one prompt (auto: chat where the model has a template)"
        },
    )
    chat_template_file: str | None = field(
        default=None, metadata={"help": "a chat template in the place of the model's own"}
    )
    chat_template_kwargs: dict[str, Any] = field(
        default_factory=dict,
        metadata={"help": "variables of the chat template, as in {enable_thinking: false}"},
    )
    tools_column: str | None = field(
        default=None,
        metadata={"help": "tools of a row with messages (none: `tools` where there is one)"},
    )
    continue_final_message: bool = field(
        default=False,
        metadata={"help": "continue the last message of a chat where it is the assistant's"},
    )
    system: str | None = field(
        default=None, metadata={"help": "system text before a templated prompt"}
    )
    system_file: str | None = field(
        default=None, metadata={"help": "the file that holds the system text"}
    )
    shots_file: str | None = field(
        default=None, metadata={"help": "JSONL or Parquet of solved examples for a template"}
    )
    answer_column: str = field(
        default="answer", metadata={"help": "the column of shots_file that holds the answer"}
    )
    separator: str = field(
        default="\n\n", metadata={"help": "between the pieces of a plain prompt"}
    )
    answer_prefix: str = field(
        default=" ", metadata={"help": "before a shot's answer in a plain prompt"}
    )
    truncation: Truncation = field(
        default=Truncation.error,
        metadata={"help": "what a too long row gives up"},
    )
    fields: list[str] = field(
        default_factory=list,
        metadata={"help": "columns that the template lists by `for name, value in fields`"},
    )
    field_order: FieldOrder = field(
        default=FieldOrder.given,
        metadata={"help": "order of fields: as given, the same for all rows, or each row's own"},
    )
    normalize: NormalizeConfig = field(default_factory=NormalizeConfig)


@dataclass
class SamplingConfig:
    """The job's sampling parameters, under vLLM's names; a row can override them."""

    n: int = field(default=1, metadata={"help": "samples for each row"})
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy"})
    top_p: float = field(
        default=1.0,
        metadata={"help": "keep the most likely tokens whose probabilities reach this sum"},
    )
    top_k: int = field(
        default=0, metadata={"help": "keep this many of the most likely tokens (0 or -1: all)"}
    )
    min_p: float = field(
        default=0.0,
        metadata={"help": "drop tokens less likely than this share of the most likely one"},
    )
    seed: int = field(default=0, metadata={"help": "seed of the sampling noise"})
    max_tokens: int = field(
        default=256,
        metadata={
            "help": "most tokens generated for a row; a large number is the room that there is"
        },
    )
    min_tokens: int = field(default=0, metadata={"help": "fewest tokens before a stop may count"})
    stop: list[str] = field(default_factory=list, metadata={"help": "strings that end the output"})
    stop_file: str | None = field(
        default=None, metadata={"help": "a YAML or JSON list of more stop strings"}
    )
    stop_token_ids: list[int] = field(
        default_factory=list, metadata={"help": "token ids that end the output"}
    )
    include_stop_str_in_output: bool = field(
        default=False, metadata={"help": "keep the stop string in the text"}
    )
    ignore_eos: bool = field(
        default=False, metadata={"help": "emit an end of sequence as a token and go on"}
    )
    skip_special_tokens: bool = field(
        default=True, metadata={"help": "leave special tokens out of the text"}
    )
    presence_penalty: float = field(
        default=0.0, metadata={"help": "subtracted from the logit of each token already generated"}
    )
    frequency_penalty: float = field(
        default=0.0, metadata={"help": "subtracted once for each time a token was generated"}
    )
    repetition_penalty: float = field(
        default=1.0, metadata={"help": "divides the logits of tokens already seen (1: off)"}
    )
    bad_words: list[str] = field(
        default_factory=list, metadata={"help": "texts that the output may not hold"}
    )
    logit_bias: dict[int, float] = field(
        default_factory=dict,
        metadata={"help": "numbers added to the logits of token ids, -100 to 100"},
    )
    stop_on_repetition: int = field(
        default=0,
        metadata={
            "help": "end where the last so many tokens are one sequence 3 times or more (0: off)"
        },
    )
    logprobs: int | None = field(
        default=None,
        metadata={"help": "likeliest tokens beside each output token (none: no log-probabilities)"},
    )
    prompt_logprobs: int | None = field(
        default=None,
        metadata={"help": "the same for prompt tokens; such prompts share no cached KV"},
    )
    score_choices: list[str] = field(
        default_factory=list,
        metadata={"help": "give the probability of each of these, and generate nothing"},
    )
    score_choices_file: str | None = field(
        default=None, metadata={"help": "the YAML or JSON list of them"}
    )
    score_calibration: ScoreCalibration = field(
        default=ScoreCalibration.none,
        metadata={
            "help": "content_free: against prompts without content; prior: to given shares of rows"
        },
    )
    score_prior: list[float] = field(
        default_factory=list, metadata={"help": "each choice's share of the rows (none: equal)"}
    )

    def params(self) -> SamplingParams:
        """Give the job's parameters; ``stop_file`` is part of ``stop`` by now."""
        # `structured` is a group of its own.
        names = {item.name for item in fields(SamplingParams)} - {"structured"}
        values = {name: getattr(self, name) for name in names}
        names = {name for name in names if isinstance(values[name], list)}
        lists = {name: tuple(values[name]) for name in names}
        pairs = {"logit_bias": tuple(sorted(self.logit_bias.items()))}
        return SamplingParams(**{**values, **lists, **pairs})


@dataclass
class StructuredConfig:
    """What an output has to be: one of these or none; a row can override it."""

    choice: list[str] | None = field(default=None, metadata={"help": "one of these texts"})
    choice_file: str | None = field(
        default=None, metadata={"help": "the YAML or JSON list of these texts"}
    )
    regex: str | None = field(
        default=None, metadata={"help": "text that the whole of this expression matches"}
    )
    regex_file: str | None = field(
        default=None, metadata={"help": "the file that holds the expression"}
    )
    json: str | None = field(default=None, metadata={"help": "JSON that this schema accepts"})
    json_file: str | None = field(
        default=None, metadata={"help": "the file that holds the JSON schema"}
    )


@dataclass
class PoolConfig:
    """The paged KV pool."""

    block_size: int = field(default=16, metadata={"help": "tokens in a block of KV, 4 to 256"})
    num_blocks: int | None = field(
        default=None, metadata={"help": "blocks in the pool (none: from memory)"}
    )
    gpu_memory_utilization: float = field(
        default=0.9, metadata={"help": "share of the GPU memory to use"}
    )
    cpu_memory_gib: float | None = field(
        default=None,
        metadata={
            "help": "memory of the pool on a CPU (none: a quarter of what is free, at most 4)"
        },
    )
    swap_gib: float | None = field(
        default=None,
        metadata={"help": "memory for swapped blocks (none: a quarter of what is free, at most 4)"},
    )
    swap_blocks: int | None = field(
        default=None, metadata={"help": "blocks for swapping; wins over swap_gib; 0 is none"}
    )
    prefix_caching: bool = field(default=True, metadata={"help": "compute shared prefixes once"})
    kv_dtype: KVDtype = field(
        default=KVDtype.auto,
        metadata={"help": "dtype of KV (auto: the model's; smaller: outputs drift)"},
    )


@dataclass
class EngineConfig:
    """The continuous-batching engine."""

    max_num_seqs: int = field(default=256, metadata={"help": "most rows in one step"})
    max_num_batched_tokens: int | None = field(
        default=None, metadata={"help": "most tokens in one step (none: by device)"}
    )
    attention: Attention = field(
        default=Attention.auto,
        metadata={"help": "the attention backend (auto: the fastest that works on the device)"},
    )
    threads: int | None = field(
        default=None,
        metadata={"help": "threads of the model on a CPU (none: the cores the process may use)"},
    )
    shared_prefix_attention: SharedPrefixAttention = field(
        default=SharedPrefixAttention.auto,
        metadata={"help": "attend to a shared prefix once for all its rows (auto: where it pays)"},
    )
    overlap: Overlap = field(
        default=Overlap.auto,
        metadata={"help": "plan a step while the one before runs (auto: on a GPU)"},
    )
    cuda_graphs: CudaGraphs = field(
        default=CudaGraphs.auto,
        metadata={"help": "run decode steps as CUDA graphs (auto: on a GPU, attention by triton)"},
    )
    preemption: Preemption = field(
        default=Preemption.auto,
        metadata={"help": "what happens to the KV of a row that must make room"},
    )
    admission: Admission = field(
        default=Admission.auto,
        metadata={"help": "how much memory a row must find before it starts"},
    )
    deterministic: bool = field(
        default=False,
        metadata={"help": "a row's logits depend on no other row; slower (docs/kernels.md)"},
    )
    stall_s: float | None = field(
        default=1800.0,
        metadata={"help": "seconds without progress after which the run ends (none: never)"},
    )
    debug: bool = field(
        default=False,
        metadata={"help": "print every step's block tables and check that no shared KV changes"},
    )


@dataclass
class ScheduleConfig:
    """The order of the rows."""

    order: Order = field(
        default=Order.prefix, metadata={"help": "in which order rows enter the engine"}
    )
    window_rows: int | None = field(
        default=None, metadata={"help": "rows sorted together (none: all of them)"}
    )


@dataclass
class OutputConfig:
    """Where the results go."""

    dir: str = field(
        default=MISSING, metadata={"help": "where the Parquet files go; local or s3://"}
    )
    resume: Resume = field(
        default=Resume.if_possible,
        metadata={"help": "what to do with rows that an earlier run has finished"},
    )
    retry_errors: bool = field(
        default=False, metadata={"help": "run failed rows of an earlier run again"}
    )
    overwrite: bool = field(default=False, metadata={"help": "remove an earlier output first"})
    verify: bool = field(
        default=False,
        metadata={"help": "read all of an earlier output; run the rows of damaged parts again"},
    )
    carry_columns: list[str] = field(
        default_factory=list,
        metadata={"help": "input columns that go into the output as they are", "word": "all"},
    )
    rows_per_part: int | None = field(
        default=None, metadata={"help": "rows in an output file (none: by size)"}
    )
    order: OutputOrder = field(
        default=OutputOrder.completion, metadata={"help": "the order of the rows in the output"}
    )


@dataclass
class ErrorsConfig:
    """How many failed rows are too many."""

    max_rate: float | None = field(
        default=None,
        metadata={"help": "exit with 3 where more than this share of the rows fail; stop early"},
    )


@dataclass
class BudgetConfig:
    """What a run may cost."""

    wall_time_s: float | None = field(
        default=None,
        metadata={"help": "seconds a run may take; it stops in time and exits with 75"},
    )


@dataclass
class LogConfig:
    """What a run tells of itself while it is at work."""

    format: LogFormat = field(
        default=LogFormat.text, metadata={"help": "json: one object a line on standard error"}
    )
    every_s: float = field(default=10.0, metadata={"help": "seconds between two progress lines"})
    prometheus_file: str | None = field(
        default=None, metadata={"help": "a file of metrics for node exporter, ending in .prom"}
    )


@dataclass
class Config:
    """The whole job."""

    mode: Mode = field(default=Mode.run, metadata={"help": "what to do"})
    job: str | None = field(
        default=None, metadata={"help": "a job folder: its name (see mode=jobs), or a path to one"}
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    input: InputConfig = field(default_factory=InputConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    structured: StructuredConfig = field(default_factory=StructuredConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    errors: ErrorsConfig = field(default_factory=ErrorsConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    log: LogConfig = field(default_factory=LogConfig)
