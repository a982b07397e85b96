"""What the other orders of a template's fields would share."""

from dataclasses import dataclass, replace

from batchgen.config import Config, FieldOrder
from batchgen.data.output.directory import OutputDir
from batchgen.job.inputs import JobInputs
from batchgen.job.planning import plan_job
from batchgen.prompts.plan import Plan


@dataclass(frozen=True, slots=True)
class FieldOrderCost:
    """The prompts of a job with its fields in some order.

    Attributes:
        field_order: the value of ``prompt.field_order``.
        request_tokens: prompt tokens of all requests.
        prefill_tokens: of them, what has to be computed.
        hit_share: of them, what is shared.
    """

    field_order: str
    request_tokens: int
    prefill_tokens: int
    hit_share: float

    @classmethod
    def of(cls, order: FieldOrder, plan: Plan) -> "FieldOrderCost":
        """Take the figures of a plan."""
        total, floor = plan.request_tokens, plan.prefill_tokens_floor
        return cls(order.value, total, floor, 1 - floor / total if total else 0.0)


def other_field_orders(config: Config, output: OutputDir) -> list[FieldOrderCost]:
    """Plan the job with its fields in each order but its own; nothing where it lists none."""
    if not config.prompt.fields:
        return []
    costs = []
    for order in FieldOrder:
        if order is config.prompt.field_order:
            continue
        changed = replace(config, prompt=replace(config.prompt, field_order=order))
        planned = plan_job(changed, JobInputs.open(changed), output, None)
        costs.append(FieldOrderCost.of(order, planned.plan))
        planned.store.close()
    return costs
