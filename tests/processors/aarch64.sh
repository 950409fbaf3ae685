#!/usr/bin/env bash
# A Python for ARM with torch, transformers and ONNX Runtime in the folder $1, for qemu-aarch64: Debian 12 and root only.
set -euo pipefail
folder=$1
mkdir -p "$folder/packages" "$folder/root"
dpkg --add-architecture arm64
apt-get update -qq
packages="python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libexpat1 zlib1g libstdc++6 libgcc-s1 libgomp1 libssl3"
packages="$packages libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libncursesw6 libtinfo6 libreadline8 libcrypt1 libdb5.3"
(cd "$folder/packages" && for name in $packages; do apt-get download -qq "$name:arm64"; done)
for package in "$folder"/packages/*.deb; do dpkg -x "$package" "$folder/root"; done
# torch 2.8 is the newest build for ARM without CUDA. ONNX Runtime 1.32 crashes on import under qemu 7.2. pip would take the dependencies of this machine, so all are named
.venv/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps --target "$folder/site" --upgrade \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64 \
    --platform manylinux2014_aarch64 --python-version 311 --only-binary=:all: \
    torch==2.8.0 transformers==5.23.0 tokenizers==0.23.3 safetensors==0.8.0 huggingface_hub==2.4.0 onnxruntime==1.23.2 \
    numpy argcomplete filelock flatbuffers fsspec hf-xet httpcore2 httpx2 idna anyio sniffio h11 certifi truststore jinja2 markupsafe \
    mpmath networkx packaging protobuf pyarrow pyyaml regex sympy tqdm typer click typing-extensions
touch "$folder/installed"
