"""How a row's tokens are chosen: the parameters, under vLLM's names, checked once."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from numbers import Integral
from typing import Any, Self

from batchgen.sampling.structure import Structure
from batchgen.sampling.values import convert

# One row cannot fill the plan's memory.
MAX_SAMPLES = 16_384
# An entry takes 12 bytes a token and candidate; the whole vocabulary would fill any disk.
MAX_LOGPROBS = 100
# As in vLLM and OpenAI's API; it decides over any model's logits.
MAX_BIAS = 100
# Far above any model's context and vocabulary. Counts that mean "no limit" (sys.maxsize, 1e30)
# come down to it, so that sums of them fit the columns of the engine and of the output.
NO_LIMIT = 2**31 - 1
_LIMITS = ("max_tokens", "min_tokens", "top_k", "stop_on_repetition")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    Names and meanings are vLLM's. ``top_k`` is off at 0 and at -1. Construction does
    not check; :meth:`problem` does, so that a bad row can become an error row. Counts above
    ``NO_LIMIT`` become it.

    Attributes:
        n: samples for each prompt.
        temperature: 0 is greedy.
        top_p: keep the most likely tokens whose probabilities reach this sum.
        top_k: keep this many of the most likely tokens; 0 and -1 keep all.
        min_p: drop tokens less likely than this share of the most likely one.
        seed: part of the noise key (seed, id, sample, position).
        max_tokens: tokens generated at most.
        min_tokens: tokens generated before an end of sequence or a stop may count.
        stop: strings that end the output where they appear in the generated text.
        stop_token_ids: token ids that end the output.
        include_stop_str_in_output: keep the stop string at the end of the text.
        ignore_eos: emit an end of sequence as a token and go on.
        skip_special_tokens: leave special tokens out of the text.
        presence_penalty: subtracted from the logit of each token already generated.
        frequency_penalty: subtracted once for each time a token was generated.
        repetition_penalty: divides (or multiplies, below zero) the logits of tokens
            seen in the prompt or the output; 1 is off.
        bad_words: texts that the output may not hold; see ``batchgen.prompts.bad_words``.
        logit_bias: (token id, number) pairs by id; the number is added to the token's logit
            before everything else.
        stop_on_repetition: end the output where its last so many tokens are one sequence, at
            least three times in a row; 0 is off. See ``batchgen.engine.repetition``.
        logprobs: likeliest tokens to give beside each output token, with their
            log-probabilities; None gives none, 0 the output token's own alone.
        prompt_logprobs: the same for the tokens of the prompt.
        structured: what the output has to be; None is any text.
        score_choices: texts to give the probabilities of, instead of generating one.
    """

    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bad_words: tuple[str, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    stop_on_repetition: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured: Structure | None = None
    score_choices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in _LIMITS:
            value = getattr(self, name)
            if isinstance(value, Integral) and int(value) > NO_LIMIT:
                object.__setattr__(self, name, NO_LIMIT)

    @property
    def is_greedy(self) -> bool:
        """Whether the result depends on the prompt alone."""
        return self.temperature == 0

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or a bias change the model's logits."""
        return self.has_penalties or bool(self.logit_bias)

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens so far."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    def warning(self) -> str | None:
        """Return what makes sense and is hardly meant, or None if all is well."""
        if self.structured is not None and self.min_tokens:
            return (
                f"min_tokens={self.min_tokens} with structured.*: an output that is complete "
                "before ends there all the same"
            )
        if self.n == 1 or not self.is_greedy:
            return None
        return (
            f"n={self.n} at temperature=0: the {self.n} samples of a row are all the same; a "
            "temperature above 0 makes them differ"
        )

    def problem(self) -> str | None:
        """Return what makes no sense in these values, or None if all is well."""
        checks = (
            (1 <= self.n <= MAX_SAMPLES, f"n={self.n} must lie between 1 and {MAX_SAMPLES}"),
            (
                0 <= self.temperature < float("inf"),
                f"temperature={self.temperature} must be 0 (greedy) or a positive number",
            ),
            (0 <= self.top_p <= 1, f"top_p={self.top_p} must lie between 0 and 1"),
            (self.top_k >= -1, f"top_k={self.top_k} must be positive, or 0 or -1 for off"),
            (0 <= self.min_p <= 1, f"min_p={self.min_p} must lie between 0 and 1"),
            (self.max_tokens >= 1, f"max_tokens={self.max_tokens} must be at least 1"),
            (self.min_tokens >= 0, f"min_tokens={self.min_tokens} must not be negative"),
            (
                self.min_tokens <= self.max_tokens,
                f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}",
            ),
            (all(self.stop), "stop holds an empty string, which would end every output at once"),
            (
                all(token >= 0 for token in self.stop_token_ids),
                f"stop_token_ids={list(self.stop_token_ids)} holds a negative id",
            ),
            (
                -2 <= self.presence_penalty <= 2,
                f"presence_penalty={self.presence_penalty} must lie between -2 and 2",
            ),
            (
                -2 <= self.frequency_penalty <= 2,
                f"frequency_penalty={self.frequency_penalty} must lie between -2 and 2",
            ),
            (
                0 < self.repetition_penalty < float("inf"),
                f"repetition_penalty={self.repetition_penalty} must be above 0",
            ),
            (all(self.bad_words), "bad_words holds an empty string, which stands in every output"),
            *(
                (
                    token >= 0 and -MAX_BIAS <= number <= MAX_BIAS,
                    f"logit_bias={{{token}: {number}}} must map an id of 0 or more to a number "
                    f"between -{MAX_BIAS} and {MAX_BIAS}",
                )
                for token, number in self.logit_bias
            ),
            (
                self.stop_on_repetition == 0 or self.stop_on_repetition >= 3,
                f"stop_on_repetition={self.stop_on_repetition} must be at least 3 tokens, or 0 "
                "for off",
            ),
            *(
                (
                    count is None or 0 <= count <= MAX_LOGPROBS,
                    f"{name}={count} must lie between 0 and {MAX_LOGPROBS}",
                )
                for name, count in (
                    ("logprobs", self.logprobs),
                    ("prompt_logprobs", self.prompt_logprobs),
                )
            ),
            (
                not self.score_choices or (self.logprobs is None and self.prompt_logprobs is None),
                "score_choices generates nothing: it goes neither with logprobs nor with "
                "prompt_logprobs",
            ),
            (
                self.structured is None or not self.ignore_eos,
                "ignore_eos=true does not go with structured.*: such an output ends where its "
                "structure does",
            ),
            (
                self.structured is None or self.structured.choice is None or self.min_tokens < 2,
                f"min_tokens={self.min_tokens} does not go with structured.choice: an output ends "
                "where its choice does",
            ),
            (
                len(self.score_choices) != 1
                and len(set(self.score_choices)) == len(self.score_choices)
                and all(self.score_choices),
                f"score_choices={list(self.score_choices)} must be two or more different texts",
            ),
            (
                not self.score_choices or (self.structured is None and self.is_greedy),
                "score_choices generates nothing: it goes neither with structured.* nor with a "
                "temperature",
            ),
            (
                not self.score_choices or self.n == 1,
                f"n={self.n} makes no sense with score_choices, which has one result a row",
            ),
        )
        return next((message for holds, message in checks if not holds), None)

    def override(self, values: Mapping[str, Any]) -> Self:
        """Replace some values by a row's own.

        Args:
            values: names of this class to new values; null means "the job's value".

        Raises:
            ValueError: an unknown name, a value of the wrong type, or values that
                make no sense together; the message says which.
        """
        types = {field.name: type(getattr(_DEFAULTS, field.name)) for field in fields(self)}
        unknown = sorted(set(values) - set(types))
        if unknown:
            close = difflib.get_close_matches(unknown[0], types)
            hint = f" (did you mean {' or '.join(close)}?)" if close else ""
            raise ValueError(f"unknown sampling parameter {', '.join(unknown)}{hint}")
        given = {name: value for name, value in values.items() if value is not None}
        params = replace(
            self, **{name: convert(name, value, types[name]) for name, value in given.items()}
        )
        problem = params.problem()
        if problem:
            raise ValueError(problem)
        return params

    def override_json(self, text: str) -> Self:
        """Replace some values by those of a JSON object, as :meth:`override` does.

        Raises:
            ValueError: the text is not a JSON object, or its values do not fit.
        """
        try:
            values = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"sampling_params is not JSON: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"sampling_params must be a JSON object, not {type(values).__name__}")
        return self.override(values)


_DEFAULTS = SamplingParams()
