# The installation of README.md in an image, for CPUs:
#   docker build -t lambda_det .
#   docker run --rm -it --shm-size 1g -v "$PWD:/work" lambda_det train --data my/ --output output/mine
# and for NVIDIA GPUs, on a machine with a driver and the NVIDIA Container Toolkit:
#   docker build -t lambda_det:cuda --build-arg TORCH_INDEX=https://pypi.org/simple .
#   docker run --rm -it --gpus all --shm-size 8g -v "$PWD:/work" lambda_det:cuda doctor
# PyTorch's wheels bring CUDA. There is no CUDA compiler, so Detectron2's operators for rotated boxes
# and deformable convolutions run on the CPU only.
FROM python:3.12-slim

# g++ compiles the kernels for CPUs and Detectron2's operators, git fetches Detectron2
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.15.0 torchvision==0.29.2 \
    && pip install --no-cache-dir setuptools==80.10.2 wheel==0.48.0

WORKDIR /opt/lambda_det
COPY . .
RUN pip install --no-cache-dir . \
    && lambda-det doctor --install \
    && lambda-det info

# Any user may run it, --user "$(id -u)" for files of your own: caches are in the home folder
RUN mkdir --mode=777 /home/user
ENV HOME=/home/user
USER 1000
WORKDIR /work
ENTRYPOINT ["lambda-det"]
