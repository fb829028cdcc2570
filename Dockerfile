# launch, open-instruct at the pin and TRL for a machine with GPUs (CUDA 13 driver).
#   docker build -t launch .
#   docker run --rm -it --gpus all --shm-size 16g -v "$PWD:/work" launch launch doctor --gpus 1
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

RUN apt-get update \
 && apt-get install -y --no-install-recommends git make ninja-build python3-dev python3-venv tmux \
 && rm -rf /var/lib/apt/lists/*

# flash-attn is built against torch and nvcc, whose CUDA must be the same
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cu130 PIP_NO_CACHE_DIR=1
COPY . /opt/launch
WORKDIR /opt/launch
RUN make install-open-instruct VENV=/opt/venv
RUN MAX_JOBS=4 /opt/venv/bin/python -m pip install -c constraints.txt --no-build-isolation -e '.[gpu]'
RUN git clone https://github.com/allenai/open-instruct.git /workspace/open-instruct \
 && git -C /workspace/open-instruct checkout \
    "$(/opt/venv/bin/python -c 'from launcher.upstream.open_instruct import PIN; print(PIN)')"

ENV PATH=/opt/venv/bin:$PATH
WORKDIR /work
