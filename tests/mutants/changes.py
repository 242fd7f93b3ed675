"""The small changes of a source file: a sign, a comparison, a number, an inverted condition, a dropped `not`.

Left alone: annotations, decorators, `__repr__`, asserts and `strict=` (they repeat what holds anyway), what is logged,
what runs as a command only, and arguments that say how a picture looks.
"""

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

LOOKS = {
    "alpha",
    "bbox_inches",
    "bottom",
    "clip_on",
    "color",
    "dpi",
    "figsize",
    "flush",
    "fontsize",
    "frameon",
    "handleheight",
    "handlelength",
    "handletextpad",
    "height_ratios",
    "labelpad",
    "left",
}
LOOKS |= {"linewidth", "lw", "markersize", "pad", "right", "rotation", "s", "top", "width_ratios", "zorder"}
SWAPPED: dict[type[ast.AST], tuple[type[Any], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}
TESTED = (ast.Compare, ast.BoolOp, ast.UnaryOp)  # conditions that change by themselves


@dataclass(frozen=True, slots=True)
class Mutant:
    file: str
    line: int
    function: str  # qualified name of the outermost function; "" in the body of the module or of a class
    names: frozenset[str]  # what the statement assigns, where it is in no function
    change: str  # "old -> new"
    source: str  # of the whole file, changed


@dataclass(frozen=True, slots=True)
class Place:
    """One node, and where it hangs."""

    node: ast.AST
    shown: ast.AST  # the smallest expression that tells a reader what changed
    function: str
    names: frozenset[str]
    put: Callable[[ast.AST], None]


def variants(node: ast.AST) -> Iterator[ast.AST]:
    """The small changes of one node."""
    match node:
        case ast.Compare(ops=[op]):
            yield from (ast.Compare(node.left, [new()], node.comparators) for new in SWAPPED[type(op)])
        case ast.Compare():
            for at, op in enumerate(node.ops):
                ops = [*node.ops[:at], SWAPPED[type(op)][0](), *node.ops[at + 1 :]]
                yield ast.Compare(node.left, ops, node.comparators)
        case ast.BinOp(op=op) if type(op) in SWAPPED and not is_text(node.left) and not is_text(node.right):
            yield ast.BinOp(node.left, SWAPPED[type(op)][0](), node.right)
        case ast.AugAssign(op=op) if type(op) in SWAPPED and not is_text(node.value):
            yield ast.AugAssign(node.target, SWAPPED[type(op)][0](), node.value)
        case ast.BoolOp(op=op):
            yield ast.BoolOp(SWAPPED[type(op)][0](), node.values)
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield node.operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield from (ast.Constant(value + 1), ast.Constant(value - 1))
        case ast.Constant(value=float(value)):
            yield ast.Constant(value * 2 if value else 1.0)
        case ast.If() | ast.While() | ast.IfExp() if not isinstance(node.test, TESTED):
            inverted = copy.copy(node)
            inverted.test = ast.UnaryOp(ast.Not(), node.test)
            yield inverted
        case ast.comprehension(ifs=[test]) if not isinstance(test, TESTED):
            yield ast.comprehension(node.target, node.iter, [ast.UnaryOp(ast.Not(), test)], node.is_async)
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()
        case ast.Call(func=ast.Name(id=name)) if name in CALLED:
            yield ast.Call(ast.Name(CALLED[name], ast.Load()), node.args, node.keywords)
        case _:
            return


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def is_left_alone(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Assert() | ast.FunctionDef(name="__repr__"):
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Compare(left=ast.Name(id="__name__"))):
            return True
        case ast.keyword(arg=arg) if arg in LOOKS or arg == "strict":
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "logger" | "logging"))):
            return True
        case ast.Call(func=ast.Name(id="cast")):
            return True
        case _:
            return name in ("annotation", "returns", "decorator_list", "format_spec")


def places(tree: ast.Module) -> Iterator[Place]:
    """Every node, in the order of the text."""

    def below(node: ast.AST, scope: str, inside: bool, names: frozenset[str], shown: ast.AST) -> Iterator[Place]:
        for name, value in ast.iter_fields(node):
            for at, child in enumerate(value if isinstance(value, list) else [value]):
                if not isinstance(child, ast.AST) or is_left_alone(child, name):
                    continue
                inner, within, assigned = scope, inside, names
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not inside:
                    inner, within = f"{scope}.{child.name}".lstrip("."), not isinstance(child, ast.ClassDef)
                if isinstance(child, ast.Assign | ast.AnnAssign) and not inside:
                    targets = child.targets if isinstance(child, ast.Assign) else [child.target]
                    assigned = frozenset(
                        n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)
                    )
                tells = isinstance(child, ast.stmt | ast.comprehension | ast.keyword | ast.expr)
                whole = child if tells and not isinstance(child, ast.Constant) else shown
                put = _setter(node, name, value, at)
                yield Place(child, whole, inner if within else "", assigned, put)
                yield from below(child, inner, within, assigned, whole)

    yield from below(tree, "", False, frozenset(), tree)


def _setter(node: ast.AST, name: str, value: Any, at: int) -> Callable[[ast.AST], None]:
    def put(new: ast.AST) -> None:
        if isinstance(value, list):
            value[at] = new
        else:
            setattr(node, name, new)

    return put


def head(node: ast.AST) -> str:
    """One line of source; of a statement with a body, its first."""
    return ast.unparse(ast.fix_missing_locations(node)).strip().partition("\n")[0]


def changes(tree: ast.Module) -> list[tuple[Place, list[ast.AST]]]:
    """Every place that can be changed, with what may stand there instead."""
    found = [(place, list(variants(place.node))) for place in places(tree)]
    return [(place, news) for place, news in found if news]


def words(place: Place, new: ast.AST) -> str:
    """ "old -> new", as a reader is told; the tree stays as it was."""
    old = head(place.shown)
    place.put(new)
    changed = head(new if place.shown is place.node else place.shown)
    place.put(place.node)
    return f"{old} -> {changed}"


def mutant(file: str, source: str, at: int, which: int) -> Mutant:
    """The `which`-th change of the `at`-th place of a file that can be changed."""
    tree = ast.parse(source)
    place, news = changes(tree)[at]
    new, first = news[which], next((n for n in ast.walk(place.node) if hasattr(n, "lineno")), place.shown)
    change = words(place, new)
    place.put(new)
    whole = ast.unparse(ast.fix_missing_locations(tree))
    return Mutant(file, getattr(first, "lineno", 0), place.function, place.names, change, whole)
