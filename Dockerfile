# Build:  docker build -t cpt .
# Run:    docker run --rm --gpus all --ipc=host -p 127.0.0.1:8888:8888 cpt       (no GPU: leave --gpus all out)
#         --ipc=host, or --shm-size=8g: images from disk come through /dev/shm, of which a container has 64 MB
# Keep:   -v cpt-runs:/home/cpt/cpt/runs -v cpt-data:/home/cpt/cpt/data/cache    runs and data sets outlive a container
# Test:   docker build --target test .                                (needs no GPU)
# Check:  make image                                                  builds it, starts it, runs a notebook inside
#
# The base needs Python 3.11 and no CUDA: torch's wheels carry the CUDA libraries, and the container runtime mounts the
# driver (580 or newer for CUDA 13; docs/installing.md says what to do with an older one).  A CUDA base would hold those
# 3 GB twice, beside a Python without a DGL wheel.  There is no nvcc in the image: Triton brings its own compiler.  DGL's
# wheel is for the CPU alone: on CUDA use cpt_core.graphs.
# Any Debian-like image with Python 3.11, or whose package python3 is 3.11, serves as BASE_IMAGE.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS base

# The first two are for the NVIDIA container runtime, the last four as in the Makefile.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility \
    PATH=/home/cpt/cpt/.venv/bin:$PATH \
    DGLBACKEND=pytorch \
    PYTHONHASHSEED=0 \
    MALLOC_MMAP_THRESHOLD_=1073741824 \
    MALLOC_TRIM_THRESHOLD_=4294967296

# libgomp1 is for DGL, g++ and python3-dev (Python.h) for the C++ and Triton kernels (built on first use), git for the commit that every result names, make for the same commands as outside.
# hadolint ignore=DL3008 # Debian serves only the newest build of a package, so a pinned one soon cannot be installed
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ git libgomp1 make \
    && if ! command -v python3.11; then apt-get install -y --no-install-recommends python3 python3-dev python3-venv; fi \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 cpt \
    && install -d -o 1000 -g 1000 /home/cpt/cpt

USER 1000
WORKDIR /home/cpt/cpt

# The packages are a layer of their own, built again only when the lock or the Makefile changes.
COPY --chown=1000:1000 Makefile requirements.lock ./
RUN UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1 make .venv/.packages

COPY --chown=1000:1000 . .
# The empty folders give their owner to the volumes mounted there.
RUN make setup && mkdir -p runs data/cache


FROM base AS test

RUN make test


FROM base AS runtime

# Jupyter listens on all of the container's addresses, so publish the port on 127.0.0.1 as above; its token, which the
# log shows, stays on.  `-e JUPYTER_TOKEN=...` sets one of your own.  It opens at the first notebook.
EXPOSE 8888
CMD ["jupyter", "lab", "--ip=0.0.0.0", "--port=8888", "--no-browser", "--LabApp.default_url=/lab/tree/notebooks/00_start_here.ipynb"]
