"""Comparing answers as a program: what `sandbox.verify` runs in the pool's `verify` servers."""

# The warm server has imported these; the program does so again by name, at no cost. Every pair gets a character: what
# cannot be read is different, and what ends the program ends it without a verdict.
CODE = """
import json, sys
from math_verify import LatexExtractionConfig, ExprExtractionConfig, parse, verify
def read(text):
    configs = (LatexExtractionConfig(), ExprExtractionConfig())
    found = []
    for form in (f"\\\\boxed{{{text}}}", text):
        found = parse(form, configs, parsing_timeout=None)
        if found:
            break
    return found
def equal(answer, truth):
    gold, given = read(truth), read(answer)
    return bool(gold and given and verify(gold, given, timeout_seconds=None))
print("".join("=" if equal(*pair) else "/" for pair in json.load(sys.stdin)))
"""


def warm() -> None:
    """Import math-verify and let it build its grammars."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    configs = (LatexExtractionConfig(), ExprExtractionConfig())
    gold = parse("\\boxed{\\frac{1}{2}}", configs, parsing_timeout=None)  # type: ignore[arg-type]
    verify(gold, parse("\\boxed{0.5}", configs, parsing_timeout=None), timeout_seconds=None)  # type: ignore[arg-type]
    verify(parse("$x^2+1$", configs, parsing_timeout=None), gold, timeout_seconds=None)  # type: ignore[arg-type]
