"""Preload sets: the libraries that a warm server has imported before it forks programs.

Forking a larger process costs more, so a program gets the leanest server that has its imports.
A wrong guess costs time, never correctness: every server can import everything.
"""

import re
from collections.abc import Callable
from typing import Any

LEAN, NUMPY, SYMPY, SCIPY, VERIFY = "lean", "numpy", "sympy", "scipy", "verify"

_NEEDS = ((SCIPY, ("scipy", "pandas", "sklearn")), (SYMPY, ("sympy", "mpmath")), (NUMPY, ("numpy",)))


def choose(code: str) -> str:
    """The leanest server that has imported what `code` seems to need."""
    for preload_set, names in _NEEDS:
        if any(name in code and re.search(rf"\b{name}\b", code) for name in names):
            return preload_set
    return LEAN


def warm(preload_set: str) -> list[Callable[[int | None], None]]:
    """Import a preload set's libraries and what they import lazily; returns functions that reseed them."""
    from sandbox.jail.program import reseed_random

    _import(_STDLIB)
    reseed: list[Callable[[int | None], None]] = [reseed_random]
    if preload_set in (NUMPY, SYMPY, SCIPY):
        import numpy

        _import(["numpy.linalg", "numpy.fft", "numpy.random", "numpy.polynomial", "numpy.ma"])
        numpy.matmul(numpy.ones((2, 2)), numpy.ones((2, 2)))
        numpy.linalg.solve(numpy.eye(2), numpy.ones(2))
        str(numpy.arange(3.0))
        reseed.append(_reseed_numpy)
    if preload_set in (SYMPY, SCIPY, VERIFY):
        reseed.append(_warm_sympy())
    if preload_set == SCIPY:
        parts = "optimize integrate stats special linalg sparse interpolate spatial signal fft ndimage"
        _import(["scipy", *(f"scipy.{part}" for part in parts.split())])
        _warm_scipy()
    if preload_set == VERIFY:
        _warm_verify()
    return reseed


_STDLIB = [
    "abc",
    "array",
    "ast",
    "base64",
    "bisect",
    "calendar",
    "cmath",
    "collections",
    "collections.abc",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "datetime",
    "decimal",
    "enum",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "inspect",
    "io",
    "itertools",
    "json",
    "keyword",
    "locale",
    "logging",
    "math",
    "numbers",
    "operator",
    "os",
    "pathlib",
    "pickle",
    "platform",
    "pprint",
    "queue",
    "random",
    "re",
    "secrets",
    "shutil",
    "signal",
    "statistics",
    "string",
    "struct",
    "subprocess",
    "sys",
    "tempfile",
    "textwrap",
    "threading",
    "time",
    "timeit",
    "traceback",
    "types",
    "typing",
    "unicodedata",
    "uuid",
    "warnings",
    "weakref",
    "zlib",
    "__future__",
    "concurrent.futures",
    "concurrent.futures.thread",
    "_strptime",
    "encodings.idna",
]


def _import(names: list[str]) -> None:
    for name in names:
        __import__(name)


def _reseed_numpy(seed: int | None) -> None:
    import os

    import numpy

    # An integer is cheaper: without a seed numpy touches a hundred more pages.
    numpy.random.seed(int.from_bytes(os.urandom(4), "little") if seed is None else seed)


def _warm_sympy() -> Callable[[int | None], None]:
    import _random

    import sympy
    from sympy.core.random import rng

    _import(
        [
            "sympy.abc",
            "sympy.parsing.sympy_parser",
            "sympy.ntheory",
            "sympy.combinatorics",
            "sympy.geometry",
            "sympy.stats",
            "sympy.solvers.diophantine",
            "sympy.polys.numberfields",
            "sympy.physics.units",
            "sympy.integrals.risch",
        ]
    )
    x, y = sympy.symbols("x y")
    n = sympy.symbols("n", integer=True, positive=True)
    # Each line loads modules and tables that programs would otherwise load.
    sympy.solve(x**2 - 5 * x + 6, x)
    sympy.solve([x + y - 3, x - y - 1], [x, y])
    sympy.solveset(sympy.sin(x) - 1, x, sympy.S.Reals)
    sympy.integrate(x * sympy.exp(x), (x, 0, 1))
    sympy.simplify(sympy.sin(x) ** 2 + sympy.cos(x) ** 2)
    sympy.factor(x**4 - 1)
    sympy.limit(sympy.sin(x) / x, x, 0)
    sympy.series(sympy.exp(x), x, 0, 4)
    sympy.summation(1 / n**2, (n, 1, sympy.oo))
    sympy.Matrix([[2, 1], [1, 2]]).eigenvals()
    sympy.factorint(360360)
    sympy.nsolve(x**2 - 2, x, 1)
    sympy.lambdify(x, x**2, "math")(3)
    sympy.parse_expr("x**2/2 + sqrt(3)")
    sympy.diff(sympy.log(x) / x, x)
    sympy.latex(sympy.sqrt(x) / 2)
    str(sympy.N(sympy.pi, 30))
    reseed_from_entropy: Any = _random.Random.seed

    def reseed(seed: int | None) -> None:
        if seed is None:
            reseed_from_entropy(rng)
        else:
            rng.seed(seed)

    return reseed


def _warm_scipy() -> None:
    import numpy
    import scipy.integrate
    import scipy.linalg
    import scipy.optimize

    def square(values: Any) -> Any:
        return numpy.sum(numpy.square(values))

    scipy.optimize.minimize(square, [1.0, 2.0])
    scipy.optimize.brentq(_line, 0.0, 2.0)
    scipy.optimize.linprog([1.0], bounds=[(0, 1)])
    scipy.integrate.quad(_line, 0.0, 1.0)
    scipy.linalg.inv(numpy.eye(2))


def _line(value: float) -> float:
    return value - 1.0


def _warm_verify() -> None:
    from sandbox.jail import verify_program

    verify_program.warm()
