# docker build -f deploy/docker/rocm.Dockerfile -t rstar-ray:rocm .
# docker run --rm -it --init --device /dev/kfd --device /dev/dri --group-add video --group-add render --network host --ipc host \
#   --ulimit nofile=65536 --ulimit memlock=-1 --security-opt seccomp=unconfined --security-opt apparmor=unconfined \
#   --env-file deploy/rocm.env -v /shared:/shared rstar-ray:rocm
# seccomp and apparmor: the sandbox makes namespaces, which Docker's default profiles refuse; its own filter stands
# around every program. Without these two lines say --sandbox.level landlock.
ARG BASE=vllm/vllm-openai-rocm:v0.32.0
FROM ${BASE}
# The base starts a server; and it brings torch and vLLM built for these GPUs: nothing of it is installed again.
ENTRYPOINT []
# The user of everything in the container; --build-arg UID=$(id -u) makes it the owner of what you mount.
ARG UID=1000
RUN useradd --non-unique --create-home --uid ${UID} rstar \
  && mkdir -p /home/rstar/.ray /opt/rstar_ray && chown -R rstar /home/rstar /opt/rstar_ray
ENV HOME=/home/rstar
USER ${UID}
WORKDIR /opt/rstar_ray
COPY --chown=rstar . .
RUN make setup TARGET=rocm
ENV PATH=/opt/rstar_ray/.venv/bin:$PATH
CMD ["python", "-m", "actors.preflight"]
