# docker build -f deploy/docker/cpu.Dockerfile -t rstar-ray:cpu .
# The lock names torch's CPU build, which lies in PyTorch's own index: --build-arg PIP_EXTRA_INDEX_URL=<its address>
FROM python:3.11-slim-bookworm
ARG PIP_EXTRA_INDEX_URL
RUN apt-get update && apt-get install -y --no-install-recommends make openssh-client rsync && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/rstar_ray
COPY . .
RUN make setup TARGET=cpu
ENV PATH=/opt/rstar_ray/.venv/bin:$PATH
CMD ["python", "-m", "actors.preflight"]
