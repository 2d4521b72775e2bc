"""Environment that AReaL and its dependencies read at import time; import this module before anything of ``areal``.

Values that are already set win. Without them litellm fetches a price list over the network, wandb asks for a login, and
TorchDynamo was seen to hang a CPU run.
"""

import os

for _name, _value in (
    ("LITELLM_LOCAL_MODEL_COST_MAP", "True"),
    ("WANDB_MODE", "disabled"),
    ("TORCHDYNAMO_DISABLE", "1"),
    ("TOKENIZERS_PARALLELISM", "false"),
):
    os.environ.setdefault(_name, _value)
