"""Comparing answers as a program: what `sandbox.verify` runs in the pool's `verify` servers."""

from typing import Any

# math-verify with its defaults, except that letters keep their case (R is not r) and intervals may be inequalities. The
# warm server has imported it; the program does so again by name, at no cost. Every pair gets a character: what cannot
# be read is different, and what ends the program ends it without a verdict.
EQUAL = r"""
import functools, json, sys
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, parser, verify
if not isinstance(parser.latex2sympy, functools.partial):
    keep_case = ConversionConfig(lowercase_symbols=False)
    parser.latex2sympy = functools.partial(parser.latex2sympy, conversion_config=keep_case)
KINDS = [LatexExtractionConfig(), ExprExtractionConfig()]
def read(text):
    return parse("\\boxed{%s}" % text, KINDS, parsing_timeout=None)
def equal(answer, truth):
    gold, given = read(truth), read(answer)
    return bool(gold and given and verify(gold, given, allow_set_relation_comp=True, timeout_seconds=None))
"""
CODE = EQUAL + 'print("".join("=" if equal(*pair) else "/" for pair in json.load(sys.stdin)))'


def warm() -> None:
    """Import math-verify and compare once, so that it has built its grammars."""
    names: dict[str, Any] = {}
    exec(EQUAL, names)
    names["equal"]("\\frac{1}{2}", "0.5")
    names["equal"]("x^2+1", "(2,\\infty)")
