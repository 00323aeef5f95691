# One peer in a container.
#
#   docker build -t loco-peer .                           # CPU
#   docker build -t loco-peer:cuda --build-arg TORCH=cuda .
#   docker run -v loco:/data -p 31337:31337 loco-peer join --bootstrap ADDR
#   docker run --gpus all -v loco:/data -p 31337:31337 loco-peer:cuda join --bootstrap ADDR
#
# /data is the peer's home: its identity, state and logs. Keep the volume, and the peer comes back as itself.
# Signals: loco-peer is process 1. It handles SIGTERM itself (leaves the swarm, within 8 s, less than the 10 s
# that `docker stop` waits) and waits for its own children, p2pd and the trainer; no init process is needed.

ARG PYTHON=3.12

# --- dependencies: one virtual environment ---------------------------------------------------------

# By name alone: a version of ours, which stands in the same file, does not install them again.
FROM python:${PYTHON}-slim AS names
WORKDIR /src
COPY pyproject.toml ./
RUN python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
      > requirements.txt

FROM python:${PYTHON}-slim AS dependencies
ARG TORCH=cpu
# pip's own index has the build with CUDA, which runs on a CPU too. For an image smaller by gigabytes, give the CPU wheel
# index named on PyTorch's install page: --build-arg TORCH_INDEX=URL.
ARG TORCH_INDEX=""
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_CONSTRAINT=/src/constraints.txt
WORKDIR /src
COPY constraints.txt ./
RUN python -m venv /opt/venv && /opt/venv/bin/pip install pip setuptools wheel
RUN case "$TORCH" in \
      cpu) /opt/venv/bin/pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch ;; \
      cuda) /opt/venv/bin/pip install torch ;; \
      *) echo "TORCH is '$TORCH'; use cpu or cuda" >&2; exit 1 ;; \
    esac
COPY --from=names /src/requirements.txt ./
RUN /opt/venv/bin/pip install --no-build-isolation -r requirements.txt

# --- our wheel ---------------------------------------------------------------------------------------

FROM dependencies AS build
COPY LICENSE README.md pyproject.toml ./
COPY protocol protocol
COPY peer peer
RUN /opt/venv/bin/pip wheel --no-build-isolation --no-deps --wheel-dir /wheel .

# --- run: the code in the last layers, so that a new version moves megabytes and no torch --------------

FROM python:${PYTHON}-slim
LABEL org.opencontainers.image.title="loco-peer" \
      org.opencontainers.image.licenses="MIT"
# On a GPU a compiled model is twice as fast, and torch compiles with g++.
ARG TORCH=cpu
# hadolint ignore=DL3008
RUN if [ "$TORCH" = cuda ]; then apt-get update && apt-get install -y --no-install-recommends g++ \
      && rm -rf /var/lib/apt/lists/*; fi
RUN useradd --create-home --uid 1000 loco && install -d -o loco -g loco -m 0700 /data
COPY --from=dependencies /opt/venv /opt/venv
COPY --from=build /wheel /wheel
RUN /opt/venv/bin/pip install --disable-pip-version-check --no-cache-dir --no-index --no-deps /wheel/*.whl \
    && /opt/venv/bin/pip check --disable-pip-version-check
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    LOCO_HOME=/data \
    LOCO_LISTEN=0.0.0.0:31337 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /data
VOLUME /data
# For other peers. Metrics stay inside the container, unless LOCO_METRICS says otherwise (deploy/compose.yaml).
EXPOSE 31337
STOPSIGNAL SIGTERM
# Healthy is a peer that does its part in the run, and not one that looks for it in vain.
HEALTHCHECK --interval=30s --timeout=15s --start-period=60s --retries=3 \
  CMD ["loco-peer", "status", "--health"]
ENTRYPOINT ["loco-peer"]
CMD ["--help"]
