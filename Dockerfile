# One image for every role: `docker run penstock penstock ROLE ...`.
#
# pip installs torch from its configured index. Without a GPU, use PyTorch's CPU index, which saves gigabytes:
#   docker compose build --build-arg PIP_EXTRA_INDEX_URL=<PyTorch's CPU index>
# or put wheels into ./wheels, which pip searches first (for machines without that index).
FROM python:3.11-slim-bookworm

ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_FIND_LINKS=/wheels PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1

WORKDIR /app
COPY pyproject.toml README.md LICENSE wheel[s] /wheels/
RUN pip install "torch==2.13.0"

COPY pyproject.toml README.md LICENSE ./
COPY stream stream
COPY envs envs
COPY workers workers
RUN pip install ".[rollout,train,dashboard]"

WORKDIR /work
CMD ["penstock", "--help"]
