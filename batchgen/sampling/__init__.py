"""How a row's tokens are chosen: the parameters, under vLLM's names, checked once."""

from batchgen.sampling.params import SamplingParams
from batchgen.sampling.structure import Structure

__all__ = ["SamplingParams", "Structure"]
