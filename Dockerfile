# Two images for the roles of a run:
#
#   docker build --target light -t penstock-light .    feed, rollout, score, dashboard, every command that reads a run; no torch
#   docker build --target train -t penstock-train .    trainer, local engine, demo; with torch
#
# Both run as the user `penstock` (10001) and need to write only to /runs and /tmp. More extras of Penstock, for example
# pyarrow for prompts as Parquet files: --build-arg EXTRAS=rollout,dashboard,data,math
#
# Versions are those of requirements/*.lock, with their hashes; extras besides the default ones have the locked versions.
# torch comes from pip's configured index, in its build for CPUs if the index has one: PyTorch's CPU index saves gigabytes.
#   docker compose build --build-arg PIP_EXTRA_INDEX_URL=<PyTorch's CPU index>
#   docker build --build-arg TORCH=cuda ...                 the build for NVIDIA GPUs
# Wheels in ./wheels are searched first (for machines without that index).
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

# What both images run on. The virtual environments are built in stages of their own: no pip, no caches, no wheels stay.
FROM ${PYTHON_IMAGE} AS base
ARG VERSION=0.1.0
RUN groupadd --gid 10001 penstock \
    && useradd --uid 10001 --gid penstock --home-dir /tmp --no-create-home --shell /usr/sbin/nologin penstock \
    && install --directory --owner penstock --group penstock /runs
ENV PATH=/opt/penstock/bin:$PATH HOME=/tmp PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
LABEL org.opencontainers.image.title="Penstock" \
      org.opencontainers.image.description="Asynchronous rollout pipeline for reinforcement learning on language models" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0"
WORKDIR /runs
USER penstock
CMD ["penstock", "--help"]

FROM ${PYTHON_IMAGE} AS build-light
ARG PIP_EXTRA_INDEX_URL=""
ARG EXTRAS="rollout,dashboard"
ENV PIP_NO_CACHE_DIR=1 PIP_FIND_LINKS=/wheels
WORKDIR /app
COPY requirements requirements
RUN pip install --require-hashes --no-deps --requirement requirements/pip.lock
ENV PIP_PYTHON=/opt/penstock/bin/python PIP_BUILD_CONSTRAINT=requirements/all.lock
COPY pyproject.toml README.md LICENSE wheel[s] /wheels/
COPY pyproject.toml README.md LICENSE ./
# Dependencies first: a changed source file does not install them again.
RUN python -m venv --without-pip /opt/penstock \
    && pip install --require-hashes --no-deps --requirement requirements/light.lock \
    && mkdir penstock stream envs workers \
    && pip install --no-require-hashes --constraint requirements/all.lock ".[${EXTRAS}]"
COPY penstock penstock
COPY stream stream
COPY envs envs
COPY workers workers
RUN pip install --no-deps --force-reinstall .

FROM base AS light
COPY --from=build-light /opt/penstock /opt/penstock

FROM build-light AS build-train
ARG PIP_EXTRA_INDEX_URL=""
ARG EXTRAS="rollout,dashboard"
ARG TORCH=cpu
RUN pip install --require-hashes --no-deps --requirement requirements/train.lock \
    && PIP="pip install" sh requirements/torch.sh "${TORCH}" \
    && pip install --no-require-hashes --constraint requirements/all.lock ".[${EXTRAS},train,storage]"

FROM base AS train
COPY --from=build-train /opt/penstock /opt/penstock
