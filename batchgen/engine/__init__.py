"""The scheduler's side of the engine: integers only, no tensors.

It decides which request runs which tokens in which blocks, and says so in a frozen
:class:`~batchgen.engine.step.StepPlan`. What executes the plan is not known here.
"""
