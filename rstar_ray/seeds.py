"""Named random streams: every random draw in a run uses a generator derived from a name."""

import hashlib

import numpy as np


def derive_seed(run_seed: int, *name: str | int) -> int:
    """A 63-bit seed fixed by the run's seed and a name such as ("stage1", step, problem id, sibling).

    Hashed, not added up: neighbouring names give unrelated streams, and no two names collide by arithmetic.
    """
    text = "\x1f".join(str(part) for part in (run_seed, *name))
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") >> 1


def named_generator(run_seed: int, *name: str | int) -> np.random.Generator:
    """A separate numpy generator for one named purpose."""
    return np.random.default_rng(derive_seed(run_seed, *name))
