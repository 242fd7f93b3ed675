"""Comparing answers as a program: what `sandbox.verify` runs in the pool's `verify` servers."""

from dataclasses import replace

# The warm server has imported these; the program does so again by name, at no cost. Every pair gets a character: what
# cannot be read is different, and what ends the program ends it without a verdict. A text is read whole or not at all:
# left to itself math-verify takes a number out of what it cannot read ($2x^2 + 3y = d$ and $3y = d$ are both 3 to it),
# and takes letters for units ($3s$ and $3d$).
CODE = """
import json, sys
from dataclasses import replace
from math_verify import LatexExtractionConfig, parse, verify
as_it_stands = replace(LatexExtractionConfig().normalization_config, units=False)
WHOLE = (LatexExtractionConfig(try_extract_without_anchor=False, normalization_config=as_it_stands),)
def read(text):
    return parse(f"\\\\boxed{{{text}}}", WHOLE, parsing_timeout=None)
def equal(answer, truth):
    gold, given = read(truth), read(answer)
    return bool(gold and given and verify(gold, given, timeout_seconds=None))
print("".join("=" if equal(*pair) else "/" for pair in json.load(sys.stdin)))
"""


def warm() -> None:
    """Import math-verify and let it build its grammars."""
    from math_verify import LatexExtractionConfig, parse, verify

    as_it_stands = replace(LatexExtractionConfig().normalization_config, units=False)
    configs = (LatexExtractionConfig(try_extract_without_anchor=False, normalization_config=as_it_stands),)
    gold = parse("\\boxed{\\frac{1}{2}}", configs, parsing_timeout=None)  # type: ignore[arg-type]
    verify(gold, parse("\\boxed{0.5}", configs, parsing_timeout=None), timeout_seconds=None)  # type: ignore[arg-type]
    verify(parse("\\boxed{x^2+1}", configs, parsing_timeout=None), gold, timeout_seconds=None)  # type: ignore[arg-type]
