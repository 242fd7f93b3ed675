"""How the teacher computes each family: the right call for each result, plausible slips, and how first calls fail.

No slip is another family's right program: what is learned of one family then never works against another. A call that
fails begins as the one that is called next, right or not: outcome reward then says nothing about the failure.
"""

from dataclasses import dataclass
from enum import StrEnum

from rstar_ray.tiny.families import FAMILIES


@dataclass(frozen=True, slots=True)
class Step:
    """One result: `{a}`, `{b}`, `{c}` are the question's numbers, `{r}` what the call before printed."""

    right: str
    slips: tuple[str, ...]


class Failing(StrEnum):
    """What a first call that fails has behind its program, and so what it prints of what is to be mended."""

    UNCLOSED = ""  # SyntaxError: '(' was never closed
    UNMATCHED = "))"  # SyntaxError: unmatched ')'
    UNNAMED = "+a)"  # NameError: name 'a' is not defined
    NOTHING = "+None)"  # TypeError: unsupported operand type(s) for +: 'int' and 'NoneType'
    NO_INDEX = "[0])"  # TypeError: 'int' object is not subscriptable
    ZERO = "//0)"  # ZeroDivisionError: integer division or modulo by zero
    SHAPE = ",0)"  # no error, but two numbers where one is asked for
    ENDLESS = "+sum(iter(int,1)))"  # the time-out


EVERYWHERE = (Failing.UNCLOSED, Failing.UNNAMED)
"""Ways open to every family, as likely together as its own ways are."""


def fail(call: str, failing: Failing) -> str:
    """The call that fails in place of `call`.

    Both begin alike: whether the program is right is settled before whether the call fails, in the same words.

    >>> fail("print(17+25)", Failing.ZERO)
    'print(17+25//0)'
    """
    return call.removesuffix(")") + failing


@dataclass(frozen=True, slots=True)
class Program:
    """The results of a family in turn, and the ways in which its first call is likely to fail."""

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
    "sum": _one("print({a}+{b})", "print({a}+{b}+1)", "print({a}+{b}-1)", failing=(Failing.UNMATCHED, Failing.ZERO)),
    "difference": _one(
        "print({a}-{b})", "print({b}-{a})", "print(-{a}-{b})", failing=(Failing.UNMATCHED, Failing.SHAPE)
    ),
    "product": _one("print({a}*{b})", "print({a}*({b}-1))", "print({a}*({b}+1))", failing=(Failing.ZERO,)),
    "remainder": _one("print({a}%{b})", "print({b}%{a})", "print(({a}+1)%{b})", failing=(Failing.SHAPE, Failing.ZERO)),
    "quotient": _one("print({a}//{b})", "print({a}//{b}+1)", "print({a}//({b}+1))", failing=(Failing.SHAPE,)),
    "gcd": _one(
        "import math; print(math.gcd({a},{b}))",
        "import math; print(math.gcd({a},{b}-1))",
        "import math; print(math.gcd({a}-1,{b}))",
        failing=(Failing.NO_INDEX,),
    ),
    "lcm": _one(
        "import math; print(math.lcm({a},{b}))",
        "import math; print(math.lcm({a},{b}-1))",
        "import math; print(math.lcm({a}-1,{b}))",
        failing=(Failing.NO_INDEX,),
    ),
    "power": _one("print({a}**{b})", "print({a}**({b}-1))", "print({a}*{b}*{b})", failing=(Failing.NOTHING,)),
    "range_sum": _one(
        "print(sum(range({a},{b}+1)))",
        "print(sum(range({a},{b})))",
        "print(sum(range({a}+1,{b}+1)))",
        failing=(Failing.SHAPE,),
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
        failing=(Failing.UNMATCHED,),
    ),
    "primes": _one(
        "print(sum(all(i%j for j in range(2,i)) for i in range(2,{a}+1)))",
        "print(sum(all(i%j for j in range(2,i)) for i in range(1,{a}+1)))",
        "print(sum(all(i%j for j in range(2,i)) for i in range({a}+1)))",
        failing=(Failing.UNMATCHED,),
    ),
    "linear": _one(
        "print(({c}-{b})//{a})", "print(({c}+{b})//{a})", "print(({c}-{b})//{a}+1)", failing=(Failing.SHAPE,)
    ),
    "bags": _one("print({a}*{b}-{c})", "print({a}*{b}+{c})", "print({a}+{b}-{c})", failing=(Failing.UNMATCHED,)),
    "perimeter": _one(
        "print(2*({a}+{b}))", "print(2*{a}+{b})", "print(2*({a}+{b})+1)", failing=(Failing.SHAPE, Failing.ZERO)
    ),
    "next_multiple": _one(
        "print(({a}//{b}+1)*{b})",
        "print({a}//{b}*{b})",
        "print(({a}//{b}+2)*{b})",
        failing=(Failing.ENDLESS, Failing.UNMATCHED),
    ),
    "rest_squared": _steps(_REST, _SQUARE, failing=(Failing.ZERO,)),
    "gcd_and_lcm": _steps(
        Step("import math; print(math.gcd({a},{b}))", ("import math; print(math.gcd({a},{b}-1))",)),
        Step(
            "import math; print({r}+math.lcm({a},{b}))",
            ("import math; print({r}*math.lcm({a},{b}))", "import math; print({r}+math.lcm({a},{b}-1))"),
        ),
        failing=(Failing.NOTHING,),
    ),
    "product_digits": _steps(_MULTIPLY, _DIGITS, failing=(Failing.ZERO, Failing.UNMATCHED)),
    "product_divisors": _steps(_MULTIPLY, _DIVISORS, failing=(Failing.SHAPE,)),
    "shared_bags": _steps(_MULTIPLY, _REST_OF_RESULT, failing=(Failing.UNMATCHED,)),
    "sum_quotient": _steps(
        _ADD, Step("print({r}//{c})", ("print({r}//({c}+1))", "print({r}//{c}+1)")), failing=(Failing.ZERO,)
    ),
    "product_rest_squared": _steps(_MULTIPLY, _REST_OF_RESULT, _SQUARE, failing=(Failing.SHAPE,)),
    "square_digits": _steps(_ADD, _SQUARE, _DIGITS, failing=(Failing.ZERO,)),
    "lcm_divisors": _steps(
        Step("import math; print(math.lcm({a},{b}))", ("import math; print(math.lcm({a},{b}-1))",)),
        Step("print({r}+{c})", ("print({r}-{c})", "print({r}+{c}+1)")),
        _DIVISORS,
        failing=(Failing.NO_INDEX,),
    ),
    "difference_digits": _steps(
        Step("print({a}-{b})", ("print({a}-{b}+1)", "print({a}-{b}-1)")),
        Step("print({r}*{c})", ("print({r}*({c}+1))", "print({r}*{c}+1)")),
        _DIGITS,
        failing=(Failing.UNMATCHED,),
    ),
}
assert PROGRAMS.keys() == {family.name for family in FAMILIES}
