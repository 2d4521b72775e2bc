# Sourced by the scripts: variables that keep every process offline, quiet and on one thread.
export LITELLM_LOCAL_MODEL_COST_MAP=True WANDB_MODE=disabled TORCHDYNAMO_DISABLE=1 HF_HUB_OFFLINE=1
export TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} PYTHONUNBUFFERED=1
