"""How does a model leave for, and come from, a Hugging Face folder of safetensors?

`FORMS` names the layouts that are known; `export` writes one, `load` reads one, `read_config` reads its config.json.
"""

from moetrain.export.config import read_config as read_config
from moetrain.export.constants import Constants as Constants
from moetrain.export.read import load as load
from moetrain.export.registry import FORMS as FORMS
from moetrain.export.registry import form_named as form_named
from moetrain.export.write import export as export
