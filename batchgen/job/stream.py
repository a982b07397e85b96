"""Planned rows in, requests out; finished requests in, output rows out."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
import numpy.typing as npt

from batchgen.data.output.schema import RowResult
from batchgen.engine.request import BlockAccount, Request, noise_key
from batchgen.errors import RowError
from batchgen.job.logprobs import logprob_columns, with_prompt_logprobs
from batchgen.job.scores import joined, label_columns
from batchgen.prompts.bad_words import BadWords
from batchgen.prompts.plan import Plan
from batchgen.prompts.row_sampling import row_params
from batchgen.prompts.store import PromptStore
from batchgen.prompts.tokenizer import Tokenizer
from batchgen.runtime.detokenize import Detokenizer, StopStringMatcher
from batchgen.sampling import SamplingParams
from batchgen.structured.choices import ChoiceTree
from batchgen.structured.constraint import TokenConstraint
from batchgen.structured.grammars import Grammars

# A scored request generates nothing.
_SCORING = SamplingParams(max_tokens=1)


@dataclass(frozen=True, slots=True)
class Receiver:
    """An output row that a request's result is for.

    Attributes:
        row: the store row.
        sample_index: which of its samples.
        is_duplicate: the result was computed for another row.
    """

    row: int
    sample_index: int
    is_duplicate: bool


class RequestStream:
    """The requests of a plan, in its order, and the rows each of them answers."""

    def __init__(
        self,
        store: PromptStore,
        plan: Plan,
        sampling: SamplingParams,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        block_size: int,
        grammars: Grammars,
        bad_words: BadWords,
    ) -> None:
        self._store = store
        self._plan = plan
        self._ids = store.row_ids
        self._params = row_params(store.sampling_params, sampling)
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._grammars = grammars
        self._bad_words = bad_words
        self._receivers: dict[int, list[Receiver]] = {}
        # By input position: results of rows of which other samples are still to come.
        self._samples: dict[int, list[RowResult]] = {}
        # By store row: ended nodes of a scored row of which others are still to come.
        self._nodes: dict[int, list[Request]] = {}
        self._next_id = 0

    def requests(self) -> Iterator[Request]:
        """Yield the requests one by one; a row's samples stand together."""
        for row in self._plan.order.tolist():
            params = self._params[row]
            if params.score_choices:
                yield from self._node_requests(row, self._grammars.tree(params.score_choices))
                continue
            if params.is_greedy:
                yield self._request(row, 0, self._greedy_receivers(row))
                continue
            for sample in range(params.n):
                # The prompt's log-probabilities are the same for all of them.
                receivers = [Receiver(row, sample, is_duplicate=False)]
                yield self._request(row, sample, receivers, logs_prompt=sample == 0)

    def results(self, request: Request, started: float) -> Iterator[RowResult]:
        """Yield the output rows that a finished request completes.

        A row's random samples come out together, when the last of them has ended: either
        all of them are there, or the row has its one error.

        Args:
            request: ended, whatever ended it.
            started: when the run's first step began, on the engine's clock, in seconds.
        """
        receivers = self._receivers.pop(request.request_id)
        if request.is_scored:
            yield from self._scored_row(request, receivers, started)
            return
        if request.error is not None:
            rows = dict.fromkeys(receiver.row for receiver in receivers)
            results = [self.error_result(row, request.error) for row in rows]
        else:
            text = self._text(request)
            results = [self._result(request, each, text, started) for each in receivers]
        yield from results if request.params.is_greedy else self._whole_row(request, results)

    def _scored_row(
        self, request: Request, receivers: list[Receiver], started: float
    ) -> list[RowResult]:
        """Hold a node's scores until it is the last one of its row; then give the results."""
        row = receivers[0].row
        tree = self._grammars.tree(self._params[row].score_choices)
        nodes = [*self._nodes.pop(row, ()), request]
        if len(nodes) < len(tree.paths):
            self._nodes[row] = nodes
            return []
        nodes.sort(key=lambda each: each.request_id)
        whole = joined(nodes)
        if whole.error is not None:
            return [self.error_result(each.row, whole.error) for each in receivers]
        columns = label_columns(tree, nodes)
        results = (self._result(whole, each, None, started) for each in receivers)
        return [replace(result, **columns) for result in results]

    def _whole_row(self, request: Request, results: list[RowResult]) -> list[RowResult]:
        """Hold a sample's result until it is the last one of its row; then give them all."""
        row = results[0].row_index
        results = [*self._samples.pop(row, ()), *results]
        if len(results) < request.params.n:
            self._samples[row] = results
            return []
        failed = [each for each in results if each.status == "error"][:1]
        return failed or with_prompt_logprobs(results)

    def name_of(self, request: Request) -> str:
        """Name the output row that a request computes, for people."""
        receiver = self._receivers[request.request_id][0]
        return f"id {self._row_id(receiver.row)}, sample {receiver.sample_index}"

    def error_result(self, row: int, error: RowError) -> RowResult:
        """Make the output row of a store row that failed."""
        return RowResult(
            id=self._row_id(row),
            row_index=int(self._store.row_index[row]),
            sample_index=0,
            status="error",
            finish_reason="error",
            error_type=error.type.value,
            error_message=error.message,
            prompt_tokens=int(self._store.lengths[row]) or None,
        )

    def planning_errors(self, done: npt.NDArray[np.bool_]) -> Iterator[RowResult]:
        """Yield the output rows of rows that failed before the run and have none yet."""
        for row, error in self._store.errors():
            if not done[row]:
                yield self.error_result(row, error)

    def _greedy_receivers(self, row: int) -> list[Receiver]:
        rows = [row, *self._plan.duplicates.get(row, ())]
        return [
            Receiver(each, sample, is_duplicate=each != row or sample > 0)
            for each in rows
            for sample in range(self._params[each].n)
        ]

    def _node_requests(self, row: int, tree: ChoiceTree) -> Iterator[Request]:
        """Ask at each node of the choices' tree, behind the shared prompt, how they go on."""
        receivers = self._greedy_receivers(row)
        prompt = self._store.ids(row).tolist()
        for path, next_tokens in zip(tree.paths, tree.next_tokens, strict=True):
            request_id, self._next_id = self._next_id, self._next_id + 1
            self._receivers[request_id] = receivers
            yield Request.create(
                request_id,
                [*prompt, *path],
                _SCORING,
                max_model_len=self._max_model_len,
                scored_tokens=next_tokens,
                priority=int(self._store.priorities[row]),
            )

    def _request(
        self, row: int, sample: int, receivers: list[Receiver], *, logs_prompt: bool = True
    ) -> Request:
        params, prompt = self._params[row], self._store.ids(row).tolist()
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._receivers[request_id] = receivers
        return Request.create(
            request_id,
            prompt,
            params,
            max_model_len=self._max_model_len,
            noise_key=noise_key(params.seed, self._row_id(row), sample),
            text_stop=self._text_stop(params, prompt),
            constraint=self._constraint(params),
            logs_prompt=logs_prompt,
            bad_words=self._bad_words.spellings(params.bad_words),
            priority=int(self._store.priorities[row]),
        )

    def _text_stop(self, params: SamplingParams, prompt: list[int]) -> StopStringMatcher | None:
        if self._detokenizer is None or not params.stop:
            return None
        return StopStringMatcher(
            self._detokenizer,
            prompt,
            params.stop,
            skip_special_tokens=params.skip_special_tokens,
        )

    def _constraint(self, params: SamplingParams) -> TokenConstraint | None:
        if params.structured is None:
            return None
        return self._grammars.constraint(params.structured)

    def _text(self, request: Request) -> str | None:
        if self._detokenizer is None:
            return None
        params, end = request.params, request.num_prompt_tokens
        text = self._detokenizer.text(
            request.token_ids[:end],
            request.token_ids[end:],
            skip_special_tokens=params.skip_special_tokens,
        )
        if not request.stopped_by_text:
            return text
        assert request.text_stop is not None
        assert request.stop_reason is not None
        kept = request.stop_reason if params.include_stop_str_in_output else ""
        return text[: request.text_stop.place] + kept

    def _result(
        self, request: Request, receiver: Receiver, text: str | None, started: float
    ) -> RowResult:
        times = request.timeline
        assert times.admitted is not None
        assert times.first_token is not None
        assert times.finished is not None
        assert request.finish_reason is not None
        # A duplicate computed nothing: all of its prompt was there, and no block was its.
        account = request.account
        prompt_blocks = -(-request.num_prompt_tokens // self._block_size)
        if receiver.is_duplicate:
            account = BlockAccount(cached_tokens=request.num_prompt_tokens)
            prompt_blocks = 0
        return RowResult(
            id=self._row_id(receiver.row),
            row_index=int(self._store.row_index[receiver.row]),
            sample_index=receiver.sample_index,
            status="ok",
            generated_text=text,
            output_token_ids=request.output_token_ids,
            finish_reason=request.finish_reason.value,
            stop_reason=request.stop_reason,
            **logprob_columns(request),
            prompt_tokens=request.num_prompt_tokens,
            prompt_tokens_cut=int(self._store.cut_tokens[receiver.row]),
            max_tokens_cut=self._max_tokens_cut(receiver.row),
            completion_tokens=request.num_output_tokens,
            prompt_blocks=prompt_blocks,
            **asdict(account),
            queue_time_ms=1000 * (times.admitted - started),
            time_to_first_token_ms=1000 * (times.first_token - times.admitted),
            generation_time_ms=1000 * (times.finished - times.admitted),
        )

    def _max_tokens_cut(self, row: int) -> int:
        params = self._params[row]
        if params.score_choices:
            return 0
        wanted = int(self._store.lengths[row]) + params.max_tokens
        return max(0, wanted - self._max_model_len)

    def _row_id(self, row: int) -> int | str:
        row_id: int | str = self._ids[row].as_py()
        return row_id
