# The workbook on a CPU: docker build -t dlrm-workbook . && docker run --rm -it dlrm-workbook
# Pages stay if a folder takes them: docker run --rm -v "$PWD/outputs:/work/outputs" dlrm-workbook
# This file was not built where it was written (no Docker daemon was at hand there).
FROM python:3.12-slim
# for a GPU: FROM nvcr.io/nvidia/pytorch:25.10-py3, without the line that installs torch, and
# docker run --gpus all ...
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends make git \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /work
COPY . .
RUN pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
    && pip install --no-cache-dir .
CMD ["dlrm", "run", "all", "-f", "parameters/quick.yaml"]
