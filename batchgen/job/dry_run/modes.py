"""``mode=preview`` and ``mode=plan``: what a job would do, without its weights."""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from batchgen.config import Config
from batchgen.data.output.directory import OutputDir
from batchgen.job.dry_run.outlook import diagnose, other_field_orders, outlook
from batchgen.job.front import model_source
from batchgen.job.inputs import JobInputs
from batchgen.job.planning import JobPlan, plan_job
from batchgen.job.pool_size import plan_ledger
from batchgen.prompts.plan import closed_answers
from batchgen.prompts.store import PromptStore, preview
from batchgen.report.plan_svg import plan_svg
from batchgen.report.plan_text import plan_text
from batchgen.report.progress import Progress
from batchgen.runtime.memory import Ledger
from batchgen.runtime.model import geometry_without_weights, resolve_device, resolve_dtype
from batchgen.text import printable

_PREVIEW_ROWS = 5


def show_prompts(config: Config, progress: Progress) -> None:
    """Print the first prompts as the model will see them; nothing is left behind."""
    inputs = _opened(config, progress)
    rows = config.input.limit or _PREVIEW_ROWS
    with tempfile.TemporaryDirectory() as folder:
        prompts = inputs.prompts(replace(config.input, limit=rows))
        path = Path(folder) / "prompts.arrow"
        with PromptStore.write(path, inputs.id_type, prompts) as store:
            print(printable(preview(store, inputs.tokenizer, rows)))
    closed = inputs.renderer.rows_ending_with_assistant
    if closed:
        progress.say(closed_answers(closed), level="warning")


def _opened(config: Config, progress: Progress) -> JobInputs:
    inputs = JobInputs.open(config)
    for warning in inputs.warnings():
        progress.say(warning, level="warning")
    for note in inputs.notes():
        progress.say(note)
    return inputs


def show_plan(config: Config, progress: Progress) -> None:
    """Plan the whole job as if nothing were done.

    The plan is printed, and written as ``_plan.json`` and ``_plan.svg``.
    """
    inputs = _opened(config, progress)
    layers = geometry_without_weights(model_source(config.model), config.model.max_model_len)
    with OutputDir(config.output.dir) as output, progress.phase("plan"):
        # First: the plan of the job itself is the one that stays.
        others = other_field_orders(config, output)
        planned = plan_job(config, inputs, output, None)
        device_type = resolve_device(config.model.device).type
        dtype = resolve_dtype(config.model.dtype, device_type, inputs.model_config)
        dtype = dtype or torch.bfloat16
        ledger = plan_ledger(config, layers, dtype) if layers else None
        diagnostics = diagnose(inputs, planned)
        outlined = outlook(config, inputs, planned, diagnostics, layers, ledger, dtype, others)
        # With those that the pool cannot hold, of which the prompts alone say nothing.
        row_errors = {each["error_type"]: each["rows"] for each in outlined["failing"]}
        plan = replace(planned.plan, row_errors=row_errors)
        planned = replace(planned, plan=plan)
        shown = planned.to_json() | diagnostics.to_json() | outlined
        output.write_json("_plan.json", shown)
        output.write_text("_plan.svg", plan_svg(shown))
        advice = f"\n{diagnostics.advice.describe()}" if diagnostics.advice else ""
        print(printable(f"{planned.describe()}{advice}\n\n{plan_text(shown)}\n"))
        where = output.path
        print(f"plan written to {where / '_plan.json'}, drawn in {where / '_plan.svg'}")


def describe_ledger(ledger: Ledger, planned: JobPlan) -> str:
    """Return what the memory holds, for rows as long as the plan's."""
    plan = planned.plan
    return ledger.describe({"p50": plan.request_tokens_p50, "p95": plan.request_tokens_p95})
