"""Puts a changed function in the place of the one that is loaded, so that nothing need be imported again."""

import ast
import gc
from collections import defaultdict
from types import CodeType, FunctionType

Function = tuple[str, str]  # file, qualified name
OF_A_FUNCTION = 0x1  # CO_OPTIMIZED; the body of a class has it not


def codes_of(source: str, path: str) -> dict[str, list[CodeType]]:
    """The code of every function that no function holds, by qualified name, in the order of the text."""
    found: defaultdict[str, list[CodeType]] = defaultdict(list)
    todo = [compile(source, path, "exec", dont_inherit=True)]
    while todo:
        for inner in todo.pop().co_consts:
            if isinstance(inner, CodeType) and inner.co_flags & OF_A_FUNCTION:
                found[inner.co_qualname].append(inner)
            elif isinstance(inner, CodeType):
                todo.append(inner)
    return {name: sorted(codes, key=lambda code: code.co_firstlineno) for name, codes in found.items()}


def outermost(code: CodeType) -> str:
    return code.co_qualname.partition(".<locals>")[0]


def loaded(root: str) -> dict[Function, list[FunctionType]]:
    """Every loaded function of the files below this folder, by path and by the outermost function that holds it."""
    found: defaultdict[Function, list[FunctionType]] = defaultdict(list)
    for thing in gc.get_objects():
        if type(thing) is FunctionType and thing.__code__.co_filename.startswith(root):
            found[thing.__code__.co_filename, outermost(thing.__code__)].append(thing)
    return found


def swaps(
    path: str, source: str, changed: str, function: str, live: list[FunctionType]
) -> list[tuple[FunctionType, CodeType]]:
    """What code the loaded functions of this name get; none where the changed file must be imported for it.

    That is so where nothing of this name is loaded, where the change lies outside of the function's own code (a
    default, taken when the function is made), and where a function that it made is loaded too.
    """
    old, new = (codes_of(text, path).get(function, []) for text in (source, changed))
    plain = codes_of(ast.unparse(ast.parse(source)), path).get(function, [])
    differing = [at for at, (one, other) in enumerate(zip(plain, new, strict=True)) if one != other]
    if len(differing) != 1 or any(one.__code__.co_qualname != function for one in live):
        return []
    line, code = old[differing[0]].co_firstlineno, new[differing[0]]
    return [(one, code) for one in live if one.__code__.co_firstlineno == line]
