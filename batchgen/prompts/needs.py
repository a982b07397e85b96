"""What the rows' sampling parameters ask of a plan."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.prompts.order import Rows
from batchgen.prompts.row_sampling import result_key
from batchgen.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class RowNeeds:
    """What the plan asks of the sampling parameters, [store rows] each.

    Attributes:
        samples: requests of the row.
        max_tokens: most tokens of an output, as far as the model's length goes.
        result_keys: a number for what the result depends on besides the prompt's ids; -1
            where it depends on noise of its own.
        logs_prompt: 1 where the logits of the whole prompt are wanted, else 0.
    """

    samples: Rows
    max_tokens: Rows
    result_keys: Rows
    logs_prompt: Rows


def row_needs(
    column: pa.ChunkedArray,
    sampling: SamplingParams,
    max_model_len: int,
    requests_of: Callable[[SamplingParams], int],
) -> RowNeeds:
    """Read the rows' own parameters; only numbers are kept, however many differ.

    Args:
        column: JSON of each row's own parameters, null where it has none.
        sampling: the job's, which these override.
        requests_of: gives the requests of a row with some parameters.
    """
    # Encoded first: joined texts of more than 2 GiB would not fit one array.
    encoded = column.dictionary_encode().combine_chunks()
    numbers: dict[SamplingParams | None, int] = {None: -1}
    # The last one stands for rows without parameters of their own, whose code is -1.
    needs = np.empty((len(encoded.dictionary) + 1, 4), np.int64)
    for at, text in enumerate(chain(encoded.dictionary, [None])):
        params = sampling if text is None else sampling.override_json(text.as_py())
        number = numbers.setdefault(result_key(params), len(numbers) - 1)
        max_tokens = 1 if params.score_choices else params.max_tokens
        logs_prompt = params.prompt_logprobs is not None
        needs[at] = requests_of(params), min(max_tokens, max_model_len), number, logs_prompt
    codes = pc.fill_null(encoded.indices, -1).to_numpy()
    return RowNeeds(*(column[codes] for column in needs.T))
