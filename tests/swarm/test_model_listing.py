from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import builtins, json, sys
sys.modules["torch"] = None
from swarm.model_listing import list_models_once

opened, really = [], open

def counted(file, *arguments, **options):
    opened.append(str(file))
    return really(file, *arguments, **options)

list_models_once()
list_models_once()
builtins.open = counted
import transformers.models
builtins.open = really
from transformers.utils import import_utils

models = [name for name in opened if name.endswith("modeling_llama.py")]
assert len(models) == 1, models
assert not any(type(finder).__module__ == "swarm.model_listing" for finder in sys.meta_path)
# what is kept is what another look finds
fresh = import_utils.create_import_structure_from_path.__wrapped__
import_utils.create_import_structure_from_path = fresh
again = import_utils.define_import_structure.__wrapped__(transformers.models.__file__)
named = {name.rpartition(".")[2]: names for group in again.values() for name, names in group.items()}
assert "LlamaConfig" in named["configuration_llama"]
found = transformers.models._class_to_module
assert all(found[each] for names in named.values() for each in names)
"""


def test_transformers_lists_its_models_once_and_finds_the_same() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
