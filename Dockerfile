# Image for clusters: megafp8 with its extras on NVIDIA's CUDA image, and configs and launch scripts in /workspace.
#
#   docker build --tag registry.example.com/megafp8:0.1.0 .
#   docker run --rm --gpus all registry.example.com/megafp8:0.1.0 megafp8 doctor
#   docker run --rm --gpus all --ipc=host -v "$PWD":/work -w /work registry.example.com/megafp8:0.1.0 megafp8 quickstart
#
# Runs as user 1000, or any other (`docker run --user`, runAsUser): it writes to mounted folders and its home only.
# PyPI's torch brings CUDA's libraries, cuDNN and NCCL itself, so the base image has the driver's interface only.
ARG BASE=nvidia/cuda:13.0.1-base-ubuntu24.04

FROM ${BASE} AS wheel
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY megafp8 megafp8
COPY tools tools
COPY launch launch
COPY configs configs
RUN /opt/build/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE}
# gcc and Python's headers: Triton compiles its launchers. libibverbs, librdmacm: NCCL's InfiniBand and RoCE. tini: an
# init process that passes signals on and collects processes whose parents have ended.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        gcc ibverbs-providers libc6-dev libibverbs1 librdmacm1 python3 python3-dev python3-venv tini \
    && rm -rf /var/lib/apt/lists/*
ENV VIRTUAL_ENV=/opt/megafp8 PATH=/opt/megafp8/bin:$PATH PYTHONUNBUFFERED=1
COPY launch/image-constraints.txt /opt/constraints.txt
COPY --from=wheel /wheels /opt/wheels
RUN python3 -m venv "$VIRTUAL_ENV" \
    && wheel=$(find /opt/wheels -name 'megafp8-*.whl') \
    && pip install --no-cache-dir --constraint /opt/constraints.txt "${wheel}[gpu,hf,data,s3,wandb,server]" \
    && megafp8 --version
WORKDIR /workspace
COPY configs configs
# A home that every user may write to, for the caches of Triton, cuBLASLt's algorithms and data indices.
RUN megafp8 init launch \
    && mkdir --mode 1777 /home/megafp8 \
    && chmod 1777 /workspace
ENV HOME=/home/megafp8
USER 1000:1000
ENTRYPOINT ["tini", "-s", "--"]
CMD ["megafp8", "--help"]
