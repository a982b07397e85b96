"""Greedy tokens of the real model against transformers' ``generate``, batch of 1, fp32.

The full size is ``pytest tests/acceptance --equality-rows 64 --new-tokens 64``; for a quick look
``--longest-prompt 600`` leaves out the long ones.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compare_outputs import Judge, first_difference
from transformers import AutoModelForCausalLM, AutoTokenizer

from batchgen.engine.admission import AdmissionPolicy
from batchgen.engine.preemption import PreemptionPolicy
from batchgen.engine.request import Request
from batchgen.engine.step import SampleBatch
from batchgen.runtime.model import LoadedModel, ModelSource, load_model
from batchgen.sampling import SamplingParams
from tests.support.drive import make_engine, make_requests, make_scheduler, run_all
from tests.support.realdata import real_prompt_ids
from tests.support.sample_batch import OneSample, sample_batch

# Tokens of a step.
BUDGET = 512
# Two logits closer than this may change places by rounding alone.
NEAR_TIE = 1e-4


@dataclass
class Reference:
    """What ``generate`` gave, and the model to look at a difference with."""

    model: Any
    prompts: list[list[int]]
    outputs: list[list[int]]
    new_tokens: int
    near_ties: list[str] = field(default_factory=list)

    def compare(self, outputs: list[list[int]]) -> None:
        """Fail on the first difference that does not start at a near-tie."""
        for row, (ours, theirs) in enumerate(zip(outputs, self.outputs, strict=True)):
            if ours == theirs:
                continue
            at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            ids = torch.tensor([self.prompts[row] + theirs[:at]])
            with torch.inference_mode():
                logits = self.model(input_ids=ids).logits[0, -1]
            gap = abs(logits[ours[at]] - logits[theirs[at]]).item()
            assert gap < NEAR_TIE, f"row {row} differs at token {at}, the logits by {gap}"
            self.near_ties.append(f"row {row} token {at}: logits {gap:.1e} apart")


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, smollm2_dir: Path) -> Reference:
    """Run ``generate`` once for every prompt, without its own end of sequence."""
    rows, new_tokens, longest = (
        request.config.getoption(name)
        for name in ("--equality-rows", "--new-tokens", "--longest-prompt")
    )
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    prompts = real_prompt_ids(tokenizer, count=rows, longest_tokens=longest)
    assert min(map(len, prompts)) == 1
    # It takes two steps.
    assert max(map(len, prompts)) > BUDGET
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        outputs.append(out[0, len(prompt) :].tolist())
    return Reference(model, prompts, outputs, new_tokens)


@pytest.fixture(scope="module")
def loaded(smollm2_dir: Path) -> LoadedModel:
    """The same model with our attention."""
    return load_model(
        ModelSource(str(smollm2_dir)),
        dtype="float32",
        device=torch.device("cpu"),
        max_model_len=None,
    )


def _blocks(prompts: list[list[int]], new_tokens: int, block_size: int) -> int:
    """Blocks that hold all rows to their end at once, with nothing shared."""
    return sum(-(-(len(prompt) + new_tokens) // block_size) for prompt in prompts)


def _pool(reference: Reference, block_size: int = 16, **given: Any) -> Any:
    """A scheduler whose pool holds every row at once."""
    blocks = _blocks(reference.prompts, reference.new_tokens, block_size)
    return make_scheduler(blocks, block_size, **({"budget": BUDGET} | given))


def _run(reference: Reference, loaded: LoadedModel, scheduler: Any, order: str = "prefix") -> Any:
    params = SamplingParams(max_tokens=reference.new_tokens, ignore_eos=True)
    requests = make_requests(reference.prompts, params)
    ordered = (
        sorted(requests, key=lambda r: r.token_ids.tolist()) if order == "prefix" else requests
    )
    finished = run_all(make_engine(loaded, scheduler), ordered)
    reference.compare([request.output_token_ids for request in finished])
    print(f"\n{len(finished)} rows equal; near-ties: {reference.near_ties or 'none'}")
    return scheduler.counters


@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_tokens_equal_generate_at_any_block_size(reference, loaded, block_size: int) -> None:
    _run(reference, loaded, _pool(reference, block_size))


def test_tokens_equal_generate_without_the_prefix_cache(reference, loaded) -> None:
    _run(reference, loaded, _pool(reference, prefix_caching=False))


def test_tokens_equal_generate_in_input_order(reference, loaded) -> None:
    _run(reference, loaded, _pool(reference), order="input")


def test_tokens_equal_generate_in_chunks_of_64(reference, loaded) -> None:
    _run(reference, loaded, _pool(reference, budget=64))


@pytest.mark.parametrize("preemption", PreemptionPolicy)
def test_tokens_equal_generate_when_rows_are_preempted(reference, loaded, preemption) -> None:
    short = [i for i, prompt in enumerate(reference.prompts) if len(prompt) < 400]
    part = replace(
        reference,
        prompts=[reference.prompts[i] for i in short],
        outputs=[reference.outputs[i] for i in short],
    )
    # All start in one step, with a block to spare for each; every one comes to need three.
    blocks = sum(-(-len(prompt) // 4) + 1 for prompt in part.prompts)
    scheduler = make_scheduler(
        blocks, 4, budget=50_000, swap_blocks=800, preemption=preemption, prefix_caching=False,
        admission=AdmissionPolicy.PROMPT,
    )  # fmt: skip
    counters = _run(part, loaded, scheduler)
    assert counters.preemptions > 0
    if preemption is PreemptionPolicy.SWAP:
        assert counters.swapped_in_blocks > 0
    elif preemption is PreemptionPolicy.RECOMPUTE:
        assert counters.recomputed_tokens > 0
    else:
        assert counters.swapped_in_blocks + counters.recomputed_tokens > 0


def _judge(reference: Reference) -> Judge:
    """Tells whether rounding of a logit by ``NEAR_TIE`` changes what a random row draws."""

    @torch.inference_mode()
    def next_logits(request: Request) -> torch.Tensor:
        ids = torch.tensor([request.token_ids.tolist()])
        return reference.model(input_ids=ids).logits[0, -1]

    def next_sample(request: Request) -> SampleBatch:
        sample = OneSample(
            request.params, key=request.noise_key, position=request.num_output_tokens
        )
        return sample_batch([sample])

    return Judge(next_logits, next_sample, NEAR_TIE)


def test_four_samples_of_each_prompt_fork_and_equal_a_run_without_a_cache(
    reference, loaded
) -> None:
    params = SamplingParams(
        max_tokens=reference.new_tokens, ignore_eos=True, temperature=0.8, top_p=0.95
    )
    prompts = [prompt for prompt in reference.prompts[:8] if len(prompt) < 600]
    four = [prompt for prompt in prompts for _ in range(4)]
    outputs = {}
    for caching in (True, False):
        blocks = _blocks(four, reference.new_tokens, 16)
        scheduler = make_scheduler(blocks, 16, budget=BUDGET, prefix_caching=caching)
        finished = run_all(make_engine(loaded, scheduler), make_requests(four, params))
        outputs[caching] = [request.output_token_ids for request in finished]
        if caching:
            # A further sample computes the last token and copies the rest; where less than
            # four tokens stand behind the last whole block it may compute those.
            forks = [request for i, request in enumerate(finished) if i % 4]
            assert all(r.num_prompt_tokens - r.account.cached_tokens <= 4 for r in forks)
    near_ties = []
    for row, (ours, theirs) in enumerate(zip(outputs[True], outputs[False], strict=True)):
        at = first_difference(ours, theirs)
        if at is not None:
            request = make_requests(four, params)[row]
            request.token_ids.extend(theirs[:at])
            gap, is_near_tie = _judge(reference).look(request, (ours[at], theirs[at]))
            assert is_near_tie, f"row {row} differs at token {at}, the logits by {gap}"
            near_ties.append(f"row {row} token {at}")
    # Noise that falls on the border between two tokens is rare.
    assert len(near_ties) <= len(four) // 8
    print(f"\n{len(four)} random rows equal; near-ties: {near_ties or 'none'}")
    for row in range(0, len(four), 4):
        samples = outputs[True][row : row + 4]
        assert len({tuple(tokens) for tokens in samples}) > 1
