"""Every key a user can set, with its type, default and meaning.

The dataclasses are Hydra's structured configs and, once checked, plain objects that the
rest of the house reads. A key is declared here when its feature works, not before.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from omegaconf import MISSING


class Mode(StrEnum):
    """What the command does."""

    run = "run"
    plan = "plan"
    preview = "preview"
    jobs = "jobs"


class PromptFormat(StrEnum):
    """How template, system text and shots become one prompt."""

    auto = "auto"
    chat = "chat"
    plain = "plain"


class Attention(StrEnum):
    """Which attention backend runs over the paged pool."""

    auto = "auto"
    torch = "torch"


class Preemption(StrEnum):
    """What happens to the KV of a row that must make room."""

    auto = "auto"
    swap = "swap"
    recompute = "recompute"


class Admission(StrEnum):
    """How much memory a row must find before it starts."""

    auto = "auto"
    worst_case = "worst_case"
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


class OutputOrder(StrEnum):
    """In which order rows stand in the finished output."""

    completion = "completion"
    input = "input"


@dataclass
class ModelConfig:
    """Which model, and how it is loaded."""

    path: str = MISSING
    revision: str | None = None
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    trust_remote_code: bool = False


@dataclass
class InputConfig:
    """Where the rows come from."""

    path: str = MISSING
    id_column: str | None = None  # None: `id` where the files have it, else made ids
    limit: int | None = None


@dataclass
class PromptConfig:
    """How a row becomes a prompt. None: not named explicitly (see DEFAULT_* below)."""

    column: str | None = None
    messages_column: str | None = None
    token_ids_column: str | None = None
    template: str | None = None
    template_file: str | None = None
    format: PromptFormat = PromptFormat.auto
    system: str | None = None
    system_file: str | None = None
    shots_file: str | None = None
    answer_column: str = "answer"
    separator: str = "\n\n"
    answer_prefix: str = " "


@dataclass
class SamplingConfig:
    """The job's sampling parameters, under vLLM's names; a row can override them."""

    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 256
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_file: str | None = None
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


@dataclass
class PoolConfig:
    """The paged KV pool."""

    block_size: int = 16
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    cpu_memory_gib: float | None = None
    swap_gib: float | None = None
    swap_blocks: int | None = None
    prefix_caching: bool = True


@dataclass
class EngineConfig:
    """The continuous-batching engine."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    attention: Attention = Attention.auto
    preemption: Preemption = Preemption.auto
    admission: Admission = Admission.auto


@dataclass
class ScheduleConfig:
    """The order of the rows."""

    order: Order = Order.prefix


@dataclass
class OutputConfig:
    """Where the results go."""

    dir: str = MISSING
    resume: Resume = Resume.if_possible
    retry_errors: bool = False
    overwrite: bool = False
    rows_per_part: int | None = None
    order: OutputOrder = OutputOrder.completion


@dataclass
class ErrorsConfig:
    """How many failed rows are too many."""

    max_rate: float | None = None


@dataclass
class LogConfig:
    """Progress lines."""

    every_s: float = 10.0


@dataclass
class Config:
    """The whole job."""

    mode: Mode = Mode.run
    job: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    input: InputConfig = field(default_factory=InputConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    pool: PoolConfig = field(default_factory=PoolConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    output: OutputConfig = field(default_factory=OutputConfig)
    errors: ErrorsConfig = field(default_factory=ErrorsConfig)
    log: LogConfig = field(default_factory=LogConfig)
