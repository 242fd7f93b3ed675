"""The program that compares answers: `sandbox.equality` runs it in the pool's `verify` servers."""

import re
from typing import Any

# math-verify's defaults, with three exceptions. A text must parse as a whole: by default math-verify takes a number
# from a text that it cannot parse (3 from $2x^2 + 3y = d$), and letters as units ($3s$ and $3d$). Letters keep their
# case (R is not r). Intervals may be inequalities. The warm server has imported all this, so the program's imports cost
# nothing. Every pair gets a character; an answer that cannot be parsed is different. If a pair ends the program, there
# is no verdict. Two constants must agree in all digits: math-verify compares 15 places after the point, so that 2^-64
# would be 2^-65. A decimal has six digits.
EQUAL = r"""
import functools, json, sys
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from dataclasses import replace
from math_verify import LatexExtractionConfig, parse, parser, verify
from sympy import Expr, Float
if not isinstance(parser.latex2sympy, functools.partial):
    keep_case = ConversionConfig(lowercase_symbols=False)
    parser.latex2sympy = functools.partial(parser.latex2sympy, conversion_config=keep_case)
keep_units = replace(LatexExtractionConfig().normalization_config, units=False)
WHOLE = (LatexExtractionConfig(try_extract_without_anchor=False, normalization_config=keep_units),)
def read(text):
    return parse("\\boxed{%s}" % text, WHOLE, parsing_timeout=None)
def same_digits(one, other):
    if not all(isinstance(number, Expr) and number.is_number for number in (one, other)):
        return True
    near = 1e-6 if one.has(Float) or other.has(Float) else 1e-40
    one, other = one.doit().evalf(60), other.doit().evalf(60)
    try:
        return one == other or bool(abs(one - other) <= near * max(abs(one), abs(other)))
    except TypeError:  # no order, as of infinities
        return True
def equal(answer, truth):
    gold, given = read(truth), read(answer)
    if not gold or not given or not verify(gold, given, allow_set_relation_comp=True, timeout_seconds=None):
        return False
    return same_digits(gold[0], given[0])
"""
CODE = EQUAL + 'print("".join("=" if equal(*pair) else "/" for pair in json.load(sys.stdin)))'


# One example of each form of answers: the parser caches parts of its grammar, and every fork inherits the cache.
_FORMS = r"""
\frac{1}{2}  0.5  -3\frac{2}{3}  1,234  25\%  2\sqrt{3}  -\sqrt{12}  \sqrt[3]{2}  \frac{\sqrt{3}}{3}  2^{10}
2^{\frac{1}{3}}  5!  \binom{5}{2}  \frac{\pi}{3}  2\pi+1  1+2\sqrt{5}  3\pm\sqrt{2}  3-2i  e^{2x}  \ln 2
\log_2 3  \sin x  \cos^2 x  x  90^\circ  x^2+3x-6  -x^2-2x+4  (x-1)(x+2)  \frac{n(n+1)}{2}  \frac{11+9a}{20}
2ab  x_1  f(x)  f(x)=x^3+1  y=2x-1  5x-7y+4=0  x>2  1<x\le 4  x\in[-2,7]  1,2  1,-2,\frac{1}{2}  \{1,2\}  (1,2)
(3,\frac{\pi}{2})  (1,-2,3)  (1,2),(3,4)  [0,1)  (2,\infty)  (-\infty,1)\cup(2,\infty)  x=1,x=2  (x,y)=(1,2)
\sum_{k=1}^{n}k  \lfloor x\rfloor  |x-1|  7:32  \begin{pmatrix}1&2\\3&-4\end{pmatrix}
\begin{pmatrix}-\frac{1}{3}\\2\end{pmatrix}  \int_0^1 x dx  \emptyset  \text{even}
"""


def warm() -> None:
    """Import math-verify and let its parser and SymPy process every common form once."""
    names: dict[str, Any] = {}
    exec(EQUAL, names)
    forms = re.split(r"  |\n", _FORMS.strip())
    for one, other in zip(forms, [*forms[1:], forms[0]], strict=True):
        names["equal"](one, one)
        names["equal"](one, other)
