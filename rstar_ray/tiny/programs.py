"""How the teacher computes each family: the right call for each result, plausible slips, and first attempts that fail.

No slip is another family's right program: what is learned of one family then never works against another.
"""

from dataclasses import dataclass

from rstar_ray.tiny.families import FAMILIES


@dataclass(frozen=True, slots=True)
class Step:
    """One result: `{a}`, `{b}`, `{c}` are the question's numbers, `{r}` what the call before printed."""

    right: str
    slips: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """The results of a family in turn, and first calls that fail: what they print tells what to mend."""

    steps: tuple[Step, ...]
    failing: tuple[str, ...]


def _one(right: str, *slips: str, failing: tuple[str, ...]) -> Program:
    return Program((Step(right, slips),), failing)


def _steps(*steps: Step, failing: tuple[str, ...]) -> Program:
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
    "sum": _one("print({a}+{b})", "print({a}+{b}+1)", "print({a}+{b}-1)", failing=("print(sum({a},{b}))",)),
    "difference": _one("print({a}-{b})", "print({b}-{a})", "print(-{a}-{b})", failing=('print("{a}"-{b})',)),
    "product": _one("print({a}*{b})", "print({a}*({b}-1))", "print({a}*({b}+1))", failing=('print("{a}"*"{b}")',)),
    "remainder": _one("print({a}%{b})", "print({b}%{a})", "print(({a}+1)%{b})", failing=("print(mod({a},{b}))",)),
    "quotient": _one(
        "print({a}//{b})", "print({a}//{b}+1)", "print({a}//({b}+1))", failing=("print(divmod({a},{b}))",)
    ),
    "gcd": _one(
        "import math; print(math.gcd({a},{b}))",
        "import math; print(math.gcd({a},{b}-1))",
        "import math; print(math.gcd({a}-1,{b}))",
        failing=("print(math.gcd({a},{b}))",),
    ),
    "lcm": _one(
        "import math; print(math.lcm({a},{b}))",
        "import math; print(math.lcm({a},{b}-1))",
        "import math; print(math.lcm({a}-1,{b}))",
        failing=("print(math.lcm({a},{b}))",),
    ),
    "power": _one("print({a}**{b})", "print({a}**({b}-1))", "print({a}*{b}*{b})", failing=('print("{a}"**{b})',)),
    "range_sum": _one(
        "print(sum(range({a},{b}+1)))",
        "print(sum(range({a},{b})))",
        "print(sum(range({a}+1,{b}+1)))",
        failing=("print(range({a},{b}+1))",),
    ),
    "odd_sum": _one(
        "print(sum(range(1,{a}+1,2)))",
        "print(sum(range({a}+1)))",
        "print(sum(range(0,{a}+1,2)))",
        failing=("print(range(1,{a}+1,2))",),
    ),
    "divisors": _one(
        "print(sum({a}%i==0 for i in range(1,{a}+1)))",
        "print(sum({a}%i==0 for i in range(1,{a})))",
        "print(sum({a}%i==0 for i in range(2,{a})))",
        failing=("print(sum({a}%i==0 for i in range({a}+1)))",),
    ),
    "primes": _one(
        "print(sum(all(i%j for j in range(2,i)) for i in range(2,{a}+1)))",
        "print(sum(all(i%j for j in range(2,i)) for i in range(1,{a}+1)))",
        "print(sum(all(i%j for j in range(2,i)) for i in range({a}+1)))",
        failing=("print(sum(all(i%j for j in range(i)) for i in range(2,{a}+1)))",),
    ),
    "linear": _one(
        "print(({c}-{b})//{a})", "print(({c}+{b})//{a})", "print(({c}-{b})//{a}+1)", failing=("print(({c}-{b})/{a})",)
    ),
    "bags": _one("print({a}*{b}-{c})", "print({a}*{b}+{c})", "print({a}+{b}-{c})", failing=("print(bags*{b}-{c})",)),
    "perimeter": _one(
        "print(2*({a}+{b}))", "print(2*{a}+{b})", "print(2*({a}+{b})+1)", failing=("print(perimeter({a},{b}))",)
    ),
    "next_multiple": _one(
        "print(({a}//{b}+1)*{b})", "print({a}//{b}*{b})", "print(({a}//{b}+2)*{b})", failing=("while {b}: pass",)
    ),
    "rest_squared": _steps(_REST, _SQUARE, failing=("print(mod({a},{b}))",)),
    "gcd_and_lcm": _steps(
        Step("import math; print(math.gcd({a},{b}))", ("import math; print(math.gcd({a},{b}-1))",)),
        Step(
            "import math; print({r}+math.lcm({a},{b}))",
            ("import math; print({r}*math.lcm({a},{b}))", "import math; print({r}+math.lcm({a},{b}-1))"),
        ),
        failing=("print(math.gcd({a},{b}))",),
    ),
    "product_digits": _steps(_MULTIPLY, _DIGITS, failing=('print("{a}"*"{b}")', "print(sum({a}*{b}))")),
    "product_divisors": _steps(_MULTIPLY, _DIVISORS, failing=("print(divisors({a}*{b}))",)),
    "shared_bags": _steps(_MULTIPLY, _REST_OF_RESULT, failing=("print(bags*{b}%{c})",)),
    "sum_quotient": _steps(
        _ADD, Step("print({r}//{c})", ("print({r}//({c}+1))", "print({r}//{c}+1)")), failing=("print(sum({a},{b}))",)
    ),
    "product_rest_squared": _steps(_MULTIPLY, _REST_OF_RESULT, _SQUARE, failing=('print("{a}"*"{b}")',)),
    "square_digits": _steps(_ADD, _SQUARE, _DIGITS, failing=("print(sum({a},{b}))",)),
    "lcm_divisors": _steps(
        Step("import math; print(math.lcm({a},{b}))", ("import math; print(math.lcm({a},{b}-1))",)),
        Step("print({r}+{c})", ("print({r}-{c})", "print({r}+{c}+1)")),
        _DIVISORS,
        failing=("print(math.lcm({a},{b}))",),
    ),
    "difference_digits": _steps(
        Step("print({a}-{b})", ("print({a}-{b}+1)", "print({a}-{b}-1)")),
        Step("print({r}*{c})", ("print({r}*({c}+1))", "print({r}*{c}+1)")),
        _DIGITS,
        failing=('print("{a}"-{b})',),
    ),
}
assert PROGRAMS.keys() == {family.name for family in FAMILIES}
