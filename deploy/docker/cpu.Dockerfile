# docker build -f deploy/docker/cpu.Dockerfile -t rstar-ray:cpu .
# The lock names torch's CPU build, which lies in PyTorch's own index: --build-arg PIP_EXTRA_INDEX_URL=<its address>
FROM python:3.11-slim-bookworm
ARG PIP_EXTRA_INDEX_URL
RUN apt-get update && apt-get install -y --no-install-recommends make openssh-client rsync && rm -rf /var/lib/apt/lists/*
# The user of everything in the container; --build-arg UID=$(id -u) makes it the owner of what you mount.
ARG UID=1000
RUN useradd --non-unique --create-home --uid ${UID} rstar \
  && mkdir -p /home/rstar/.ray /opt/rstar_ray && chown -R rstar /home/rstar /opt/rstar_ray
ENV HOME=/home/rstar
USER ${UID}
WORKDIR /opt/rstar_ray
COPY --chown=rstar . .
RUN make setup TARGET=cpu
ENV PATH=/opt/rstar_ray/.venv/bin:$PATH
CMD ["python", "-m", "actors.preflight"]
