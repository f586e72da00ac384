# A node with several GPUs. By default it trains recipes/train.py on eight of them, each kept under 70 GB:
#     docker build -t dtr .
#     docker run --rm --gpus all --ipc host --ulimit memlock=-1 -v "$PWD/runs:/home/dtr/run/runs" dtr
# --ipc host: NCCL and data loaders share memory. The directory runs/ has to be writable for uid 10001.

# The official image of the torch that constraints.txt pins; its CUDA 13.0 needs a driver of 580 or newer.
ARG BASE=pytorch/pytorch:2.13.0-cuda13.0-cudnn9-runtime

FROM ${BASE} AS wheel
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /build
COPY constraints.txt ./
RUN python -m pip install -c constraints.txt setuptools
COPY pyproject.toml README.md LICENSE ./
COPY dtr_integrations ./dtr_integrations
RUN python -m pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

FROM ${BASE}
# Triton compiles its launchers with a C compiler, and Inductor what runs on the CPU with a C++ one.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ python3-dev \
    && rm -rf /var/lib/apt/lists/*
ENV PIP_BREAK_SYSTEM_PACKAGES=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1
COPY constraints.txt /tmp/
COPY --from=wheel /wheels /tmp/wheels
# torch is the image's own, built for its CUDA: pip only adds what is missing beside it.
RUN python -c "import torch; print('torch==' + torch.__version__)" > /tmp/torch.txt \
    && grep -v '^torch==' /tmp/constraints.txt > /tmp/others.txt \
    && wheel=$(echo /tmp/wheels/*.whl) \
    && python -m pip install -c /tmp/torch.txt -c /tmp/others.txt "${wheel}[lightning,accelerate,exact]" \
    && python -c "import accelerate, dtr_integrations, lightning, scipy" \
    && rm -rf /tmp/wheels /tmp/*.txt

RUN useradd --create-home --uid 10001 dtr && install --directory --owner 10001 --group 10001 /home/dtr/run /home/dtr/run/runs
WORKDIR /home/dtr/run
COPY --chown=10001 configs ./configs
COPY --chown=10001 recipes ./recipes
USER 10001
CMD ["accelerate", "launch", "--config", "configs/ddp-8gpu-70GB.yaml", "recipes/train.py"]
