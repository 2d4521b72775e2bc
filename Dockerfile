# Trainer, batcher, workers and embedded servers in one image. SGLang runs in its own image (its pins clash with ours) behind HTTP.
# Never built in CI: there is no container engine there.
FROM python:3.11-slim
RUN apt-get update && apt-get install -y --no-install-recommends build-essential git && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/areal-dta
COPY requirements.lock requirements-dev.lock setup.cfg pyproject.toml README.md LICENSE ./
COPY scripts scripts
COPY areal_dta areal_dta
COPY launcher launcher
COPY experiments experiments
RUN scripts/setup
ENV PATH=/opt/areal-dta/.venv/bin:$PATH \
    LITELLM_LOCAL_MODEL_COST_MAP=True WANDB_MODE=disabled TORCHDYNAMO_DISABLE=1 TOKENIZERS_PARALLELISM=false
ENTRYPOINT ["areal-dta"]
CMD ["--help"]
