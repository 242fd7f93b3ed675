"""The teacher's programs by family: the right call for each result, plausible slips, and failures of first calls.

No slip is another family's right program, so that training on one family does not harm another. A failing call equals
the next call, right or not, except for its first word, so that the outcome reward does not depend on the failure.
"""

from dataclasses import dataclass
from enum import StrEnum

from rstar_ray.tiny.families import FAMILIES


@dataclass(frozen=True, slots=True)
class Step:
    """One result: `{a}`, `{b}`, `{c}` are the question's numbers, `{r}` is the output of the previous call."""

    right: str
    slips: tuple[str, ...]


class Failing(StrEnum):
    """The text that replaces `print(` in a failing first call; it determines the error."""

    UNNAMED = "prin("  # NameError: name 'prin' is not defined
    BRACKET = "print["  # SyntaxError: closing parenthesis ')' does not match opening parenthesis '['
    MODULE = "math.print("  # AttributeError: module 'math' has no attribute 'print'; without the module a NameError
    SUM = "sum("  # TypeError: 'int' object is not iterable
    LENGTH = "len("  # TypeError: object of type 'int' has no len()
    ZERO = "1//0;print("  # ZeroDivisionError: integer division or modulo by zero
    SHAPE = "repr("  # no error, but no output
    ENDLESS = "while 1:abs("  # the time-out


EVERYWHERE = (Failing.UNNAMED, Failing.BRACKET)
"""Failures that every family may have; together as likely as the family's specific failures."""


def fail(call: str, failing: Failing) -> str:
    """The call that fails in place of `call`.

    The two differ only in their first word, which is the same in every working call. The choice at that token is thus
    only to fail or not, and the outcome, which the later tokens determine, does not depend on it. (A failure at a
    program's end would compete with other wrong endings: reward that moves away from these would also move away from
    the failure.)

    >>> fail("print(17+25)", Failing.SUM)
    'sum(17+25)'
    """
    return call.replace("print(", failing, 1)


@dataclass(frozen=True, slots=True)
class Program:
    """The results of a family in order, and the likely failures of its first call."""

    steps: tuple[Step, ...]
    failing: tuple[Failing, ...]


def _one(right: str, *slips: str, failing: tuple[Failing, ...]) -> Program:
    return Program((Step(right, slips),), failing)


def _steps(*steps: Step, failing: tuple[Failing, ...]) -> Program:
    return Program(steps, failing)


_ADD = Step("print({a}+{b})", ("print({a}+{b}+1)", "print({a}+{b}-1)"))
_MULTIPLY = Step("print({a}*{b})", ("print({a}*({b}-1))", "print({a}*({b}+1))"))
_REST = Step("print({a}%{b})", ("print({b}%{a})", "print(({a}+1)%{b})"))
_REST_OF_RESULT = Step("print({r}%{c})", ("print({r}%({c}+1))", "print({r}%{c}+1)"))
_SQUARE = Step("print({r}*{r})", ("print({r}*2)",))
_DIGITS = Step('print(sum(map(int,"{r}")))', ('print(len("{r}"))', 'print(max(map(int,"{r}")))'))
_DIVISORS = Step(
    "print(sum({r}%i==0 for i in range(1,{r}+1)))",
    ("print(sum({r}%i==0 for i in range(1,{r})))", "print(sum({r}%i==0 for i in range(2,{r})))"),
)

PROGRAMS: dict[str, Program] = {
    "sum": _one("print({a}+{b})", "print({a}+{b}+1)", "print({a}+{b}-1)", failing=(Failing.SUM, Failing.ZERO)),
    "difference": _one("print({a}-{b})", "print({b}-{a})", "print(-{a}-{b})", failing=(Failing.SUM, Failing.SHAPE)),
    "product": _one("print({a}*{b})", "print({a}*({b}-1))", "print({a}*({b}+1))", failing=(Failing.ZERO,)),
    "remainder": _one("print({a}%{b})", "print({b}%{a})", "print(({a}+1)%{b})", failing=(Failing.SHAPE, Failing.ZERO)),
    "quotient": _one(
        "print({a}//{b})", "print({a}//{b}+1)", "print({a}//({b}+1))", failing=(Failing.SHAPE, Failing.LENGTH)
    ),
    "gcd": _one(
        "import math; print(math.gcd({a},{b}))",
        "import math; print(math.gcd({a},{b}-1))",
        "import math; print(math.gcd({a}-1,{b}))",
        failing=(Failing.MODULE,),
    ),
    "lcm": _one(
        "import math; print(math.lcm({a},{b}))",
        "import math; print(math.lcm({a},{b}-1))",
        "import math; print(math.lcm({a}-1,{b}))",
        failing=(Failing.MODULE,),
    ),
    "power": _one("print({a}**{b})", "print({a}**({b}-1))", "print({a}*{b}*{b})", failing=(Failing.LENGTH,)),
    "range_sum": _one(
        "print(sum(range({a},{b}+1)))",
        "print(sum(range({a},{b})))",
        "print(sum(range({a}+1,{b}+1)))",
        failing=(Failing.SHAPE, Failing.LENGTH),
    ),
    "odd_sum": _one(
        "print(sum(range(1,{a}+1,2)))",
        "print(sum(range({a}+1)))",
        "print(sum(range(0,{a}+1,2)))",
        failing=(Failing.ZERO,),
    ),
    "divisors": _one(
        "print(sum({a}%i==0 for i in range(1,{a}+1)))",
        "print(sum({a}%i==0 for i in range(1,{a})))",
        "print(sum({a}%i==0 for i in range(2,{a})))",
        failing=(Failing.SUM,),
    ),
    "primes": _one(
        "print(sum(all(i%j for j in range(2,i)) for i in range(2,{a}+1)))",
        "print(sum(all(i%j for j in range(2,i)) for i in range(1,{a}+1)))",
        "print(sum(all(i%j for j in range(2,i)) for i in range({a}+1)))",
        failing=(Failing.SUM,),
    ),
    "linear": _one(
        "print(({c}-{b})//{a})",
        "print(({c}+{b})//{a})",
        "print(({c}-{b})//{a}+1)",
        failing=(Failing.SHAPE, Failing.LENGTH),
    ),
    "bags": _one("print({a}*{b}-{c})", "print({a}*{b}+{c})", "print({a}+{b}-{c})", failing=(Failing.SUM,)),
    "perimeter": _one(
        "print(2*({a}+{b}))", "print(2*{a}+{b})", "print(2*({a}+{b})+1)", failing=(Failing.SHAPE, Failing.ZERO)
    ),
    "next_multiple": _one(
        "print(({a}//{b}+1)*{b})",
        "print({a}//{b}*{b})",
        "print(({a}//{b}+2)*{b})",
        failing=(Failing.ENDLESS, Failing.SUM),
    ),
    "rest_squared": _steps(_REST, _SQUARE, failing=(Failing.ZERO,)),
    "gcd_and_lcm": _steps(
        Step("import math; print(math.gcd({a},{b}))", ("import math; print(math.gcd({a},{b}-1))",)),
        Step(
            "import math; print({r}+math.lcm({a},{b}))",
            ("import math; print({r}*math.lcm({a},{b}))", "import math; print({r}+math.lcm({a},{b}-1))"),
        ),
        failing=(Failing.LENGTH,),
    ),
    "product_digits": _steps(_MULTIPLY, _DIGITS, failing=(Failing.ZERO, Failing.SUM)),
    "product_divisors": _steps(_MULTIPLY, _DIVISORS, failing=(Failing.SHAPE, Failing.LENGTH)),
    "shared_bags": _steps(_MULTIPLY, _REST_OF_RESULT, failing=(Failing.SUM,)),
    "sum_quotient": _steps(
        _ADD, Step("print({r}//{c})", ("print({r}//({c}+1))", "print({r}//{c}+1)")), failing=(Failing.ZERO,)
    ),
    "product_rest_squared": _steps(_MULTIPLY, _REST_OF_RESULT, _SQUARE, failing=(Failing.SHAPE, Failing.LENGTH)),
    "square_digits": _steps(_ADD, _SQUARE, _DIGITS, failing=(Failing.ZERO,)),
    "lcm_divisors": _steps(
        Step("import math; print(math.lcm({a},{b}))", ("import math; print(math.lcm({a},{b}-1))",)),
        Step("print({r}+{c})", ("print({r}-{c})", "print({r}+{c}+1)")),
        _DIVISORS,
        failing=(Failing.MODULE,),
    ),
    "difference_digits": _steps(
        Step("print({a}-{b})", ("print({a}-{b}+1)", "print({a}-{b}-1)")),
        Step("print({r}*{c})", ("print({r}*({c}+1))", "print({r}*{c}+1)")),
        _DIGITS,
        failing=(Failing.SUM,),
    ),
}
assert PROGRAMS.keys() == {family.name for family in FAMILIES}
