# docs/containers.md explains this file. Two targets: `server` (the default; engines for CPUs) and `vllm`.

FROM debian:bookworm-slim AS build
ARG EXTRAS=postgresql,redis
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends binutils ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml hatch_build.py package-lock.json README.md LICENSE ./
COPY scripts/page_libraries.py scripts/
COPY examples examples
COPY src src
RUN python3 -m venv /opt/tailrace \
    && /opt/tailrace/bin/python -m pip install --no-cache-dir --no-compile ".[${EXTRAS}]"
# Not in the image: OpenVINO's plugins for other devices, its readers of formats that tailrace does not use, its C++ headers,
# the tests of libraries, and the debugging symbols of the libraries that have most of them. Modules are compiled when they are imported, into /tmp.
WORKDIR /opt/tailrace/lib/python3.11/site-packages
RUN rm -rf openvino/libs/libopenvino_intel_gpu_plugin.so openvino/libs/libopenvino_intel_npu_plugin.so \
        openvino/libs/libopenvino_onnx_frontend.so* openvino/libs/libopenvino_tensorflow*_frontend.so* \
        openvino/libs/libopenvino_paddle_frontend.so* openvino/libs/libopenvino_jax_frontend.so* \
        openvino/libs/libopenvino_pytorch_frontend.so* openvino/libs/cache.json openvino/include openvino/cmake \
        setuptools setuptools-*.dist-info pkg_resources \
    && strip --strip-unneeded xllamacpp/*.so uvloop/*.so \
    && find sqlalchemy tokenizers -name '*.so' -exec strip --strip-unneeded {} + \
    && find . -type d \( -name __pycache__ -o -path '*/numpy/*/tests' -o -path './sqlalchemy/testing' \) -prune \
        -exec rm -rf {} +

FROM debian:bookworm-slim AS server
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates libgomp1 python3 \
    && rm -rf /var/lib/apt/lists/* /var/cache/debconf/*-old \
    && useradd --uid 10001 --no-create-home --home-dir /var/lib/tailrace tailrace \
    && install --directory --owner=tailrace --group=tailrace --mode=0700 /var/lib/tailrace
COPY --from=build /opt/tailrace /opt/tailrace
ENV PATH=/opt/tailrace/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONPYCACHEPREFIX=/tmp/pycache \
    TAILRACE_HOME=/var/lib/tailrace \
    TAILRACE_DATA_DIR=/var/lib/tailrace/data \
    TAILRACE_HOST=0.0.0.0
USER 10001:10001
VOLUME /var/lib/tailrace
EXPOSE 8000
HEALTHCHECK --start-period=10m --interval=10s --timeout=5s --retries=6 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/livez', timeout=4)"]
ENTRYPOINT ["tailrace"]
CMD ["serve"]

# For GPUs: tailrace beside the vLLM of its own image.
FROM vllm/vllm-openai:v0.30.0 AS vllm
ARG EXTRAS=postgresql,redis
WORKDIR /src
COPY pyproject.toml hatch_build.py package-lock.json README.md LICENSE ./
COPY scripts/page_libraries.py scripts/
COPY examples examples
COPY src src
# hadolint ignore=DL3013
RUN python3 -m pip install --no-cache-dir ".[${EXTRAS}]" \
    && useradd --uid 10001 --no-create-home --home-dir /var/lib/tailrace tailrace \
    && install --directory --owner=tailrace --group=tailrace --mode=0700 /var/lib/tailrace
ENV HOME=/tmp \
    PYTHONPYCACHEPREFIX=/tmp/pycache \
    TAILRACE_ENGINE=vllm \
    TAILRACE_HOME=/var/lib/tailrace \
    TAILRACE_DATA_DIR=/var/lib/tailrace/data \
    TAILRACE_HOST=0.0.0.0
USER 10001:10001
WORKDIR /var/lib/tailrace
VOLUME /var/lib/tailrace
EXPOSE 8000
HEALTHCHECK --start-period=30m --interval=10s --timeout=5s --retries=6 \
    CMD ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/livez', timeout=4)"]
ENTRYPOINT ["tailrace"]
CMD ["serve"]

# The last stage is the default target.
FROM server
