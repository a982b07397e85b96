"""Imported by the process that the commands of tests are forked from, once for all of them."""

from importlib import import_module

from batchgen.keys import declared_keys
from batchgen.report.machine import versions
from batchgen.report.page import page_template

for _name in ("batchgen.run", "batchgen.cli.app", "transformers.models.llama.modeling_llama"):
    import_module(_name)
# What is made once a process, from the code alone.
versions()
declared_keys()
page_template()
