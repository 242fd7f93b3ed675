"""How the teacher computes each family: the right call for each result, plausible slips, and how first calls fail.

No slip is another family's right program: what is learned of one family then never works against another. A call that
fails holds the program that is called next, right or not: outcome reward then says nothing about the failure.
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
    """How a first call fails; what it prints says what to mend."""

    UNCLOSED = "unclosed"  # SyntaxError: '(' was never closed
    UNNAMED = "unnamed"  # letters for numbers: NameError: name 'a' is not defined
    MISSPELLED = "misspelled"  # NameError: name 'prnt' is not defined. Did you mean: 'print'?
    NO_IMPORT = "no import"  # NameError: name 'math' is not defined
    NO_LIST = "no list"  # TypeError: 'int' object is not iterable
    SHAPE = "shape"  # no error: a tuple where a number is asked for
    ENDLESS = "endless"  # a loop that does not end: the time-out


EVERYWHERE = (Failing.UNCLOSED, Failing.UNNAMED)
"""Ways open to every family, as likely together as its own ways are."""
IMPORT = "import math; "


def fail(call: str, unnamed: str, failing: Failing) -> str:
    """The call that fails for `call`; `unnamed` is the same with letters in place of numbers."""
    inner = call.removeprefix(IMPORT).removeprefix("print(").removesuffix(")")
    return {
        Failing.UNCLOSED: call[:-1],
        Failing.UNNAMED: unnamed,
        Failing.MISSPELLED: call.replace("print(", "prnt("),
        Failing.NO_IMPORT: call.removeprefix(IMPORT),
        Failing.NO_LIST: f"print(sum({inner}))",
        Failing.SHAPE: f"print(({inner},))",
        Failing.ENDLESS: f"while {inner}: pass",
    }[failing]


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
    "sum": _one(
        "print({a}+{b})", "print({a}+{b}+1)", "print({a}+{b}-1)", failing=(Failing.MISSPELLED, Failing.NO_LIST)
    ),
    "difference": _one(
        "print({a}-{b})", "print({b}-{a})", "print(-{a}-{b})", failing=(Failing.MISSPELLED, Failing.SHAPE)
    ),
    "product": _one("print({a}*{b})", "print({a}*({b}-1))", "print({a}*({b}+1))", failing=(Failing.NO_LIST,)),
    "remainder": _one(
        "print({a}%{b})", "print({b}%{a})", "print(({a}+1)%{b})", failing=(Failing.SHAPE, Failing.NO_LIST)
    ),
    "quotient": _one("print({a}//{b})", "print({a}//{b}+1)", "print({a}//({b}+1))", failing=(Failing.SHAPE,)),
    "gcd": _one(
        "import math; print(math.gcd({a},{b}))",
        "import math; print(math.gcd({a},{b}-1))",
        "import math; print(math.gcd({a}-1,{b}))",
        failing=(Failing.NO_IMPORT,),
    ),
    "lcm": _one(
        "import math; print(math.lcm({a},{b}))",
        "import math; print(math.lcm({a},{b}-1))",
        "import math; print(math.lcm({a}-1,{b}))",
        failing=(Failing.NO_IMPORT,),
    ),
    "power": _one("print({a}**{b})", "print({a}**({b}-1))", "print({a}*{b}*{b})", failing=(Failing.NO_LIST,)),
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
        failing=(Failing.NO_LIST,),
    ),
    "divisors": _one(
        "print(sum({a}%i==0 for i in range(1,{a}+1)))",
        "print(sum({a}%i==0 for i in range(1,{a})))",
        "print(sum({a}%i==0 for i in range(2,{a})))",
        failing=(Failing.MISSPELLED,),
    ),
    "primes": _one(
        "print(sum(all(i%j for j in range(2,i)) for i in range(2,{a}+1)))",
        "print(sum(all(i%j for j in range(2,i)) for i in range(1,{a}+1)))",
        "print(sum(all(i%j for j in range(2,i)) for i in range({a}+1)))",
        failing=(Failing.MISSPELLED,),
    ),
    "linear": _one(
        "print(({c}-{b})//{a})", "print(({c}+{b})//{a})", "print(({c}-{b})//{a}+1)", failing=(Failing.SHAPE,)
    ),
    "bags": _one("print({a}*{b}-{c})", "print({a}*{b}+{c})", "print({a}+{b}-{c})", failing=(Failing.MISSPELLED,)),
    "perimeter": _one(
        "print(2*({a}+{b}))", "print(2*{a}+{b})", "print(2*({a}+{b})+1)", failing=(Failing.SHAPE, Failing.NO_LIST)
    ),
    "next_multiple": _one(
        "print(({a}//{b}+1)*{b})",
        "print({a}//{b}*{b})",
        "print(({a}//{b}+2)*{b})",
        failing=(Failing.ENDLESS, Failing.MISSPELLED),
    ),
    "rest_squared": _steps(_REST, _SQUARE, failing=(Failing.NO_LIST,)),
    "gcd_and_lcm": _steps(
        Step("import math; print(math.gcd({a},{b}))", ("import math; print(math.gcd({a},{b}-1))",)),
        Step(
            "import math; print({r}+math.lcm({a},{b}))",
            ("import math; print({r}*math.lcm({a},{b}))", "import math; print({r}+math.lcm({a},{b}-1))"),
        ),
        failing=(Failing.NO_IMPORT,),
    ),
    "product_digits": _steps(_MULTIPLY, _DIGITS, failing=(Failing.NO_LIST, Failing.MISSPELLED)),
    "product_divisors": _steps(_MULTIPLY, _DIVISORS, failing=(Failing.SHAPE,)),
    "shared_bags": _steps(_MULTIPLY, _REST_OF_RESULT, failing=(Failing.MISSPELLED,)),
    "sum_quotient": _steps(
        _ADD, Step("print({r}//{c})", ("print({r}//({c}+1))", "print({r}//{c}+1)")), failing=(Failing.NO_LIST,)
    ),
    "product_rest_squared": _steps(_MULTIPLY, _REST_OF_RESULT, _SQUARE, failing=(Failing.SHAPE,)),
    "square_digits": _steps(_ADD, _SQUARE, _DIGITS, failing=(Failing.NO_LIST,)),
    "lcm_divisors": _steps(
        Step("import math; print(math.lcm({a},{b}))", ("import math; print(math.lcm({a},{b}-1))",)),
        Step("print({r}+{c})", ("print({r}-{c})", "print({r}+{c}+1)")),
        _DIVISORS,
        failing=(Failing.NO_IMPORT,),
    ),
    "difference_digits": _steps(
        Step("print({a}-{b})", ("print({a}-{b}+1)", "print({a}-{b}-1)")),
        Step("print({r}*{c})", ("print({r}*({c}+1))", "print({r}*{c}+1)")),
        _DIGITS,
        failing=(Failing.MISSPELLED,),
    ),
}
assert PROGRAMS.keys() == {family.name for family in FAMILIES}
