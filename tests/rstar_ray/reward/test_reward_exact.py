"""What the rules make of a text, step by step: its spelling, structure, numbers and units, and what is equal."""

from collections.abc import Sequence

import pytest

from rstar_ray.outcome import Outcome
from rstar_ray.reward.find import Place, as_integer, find_answer, last_boxed, last_program, spoken
from rstar_ray.reward.latex import MAX_CHARS, dense, one_spelling, unwrapped
from rstar_ray.reward.maths import Pair, equal_leaves, equal_nodes, has_unknown, may_be_compared, same_mathematics
from rstar_ray.reward.numbers import MAX_DIGITS, split_unit, written_number
from rstar_ray.reward.programs import CASES_AT_ONCE, Case, ProgramRun, read_cases, share_passed
from rstar_ray.reward.structure import MAX_DEPTH, MAX_PARTS, Node, split_outside, structure

STRUCTURES = [
    ('5', '5'), (' x = 5 ', '5'), ('x=5=5', 'x=5=5'), ('f(x) = x^2', 'x^2'), ('(x,y)=(1,2)', 'ordered()<1 | 2>'),
    ('x \\in (0,1)', 'ordered()<0 | 1>'), ('x \\le 3', 'ordered(]<-\\infty | 3>'), ('a_{1}=2', '2'), ('x=', 'x='),
    ('x>=2', 'x>=2'), ('1,2', 'unordered<1 | 2>'), ('2, 1, 1', 'unordered<2 | 1 | 1>'),
    ('1 and 2', 'unordered<1 | 2>'), ('1\\text{ or }2', 'unordered<1 | 2>'), ('1;2', 'unordered<1 | 2>'),
    ('1,234', '1,234'), ('1,234,567.5', '1,234,567.5'), ('1,23', 'unordered<1 | 23>'), ('+1,000 cm', '+1,000 cm'),
    ('1,000x', '1,000x'), ('1,2,', 'unordered<1 | 2>'), ('a, b, c', 'unordered<a | b | c>'),
    ('\\{1,2\\}', 'unordered<1 | 2>'), ('\\{ \\}', 'unordered<>'), ('\\{\\}', 'unordered<>'),
    ('\\emptyset', 'unordered<>'), ('\\{(1,2),(3,4)\\}', 'unordered<ordered()<1 | 2> | ordered()<3 | 4>>'),
    ('\\{x \\mid x>0\\}', 'ordered()<0 | \\infty>'), ('\\{x | x>0\\}', 'ordered()<0 | \\infty>'),
    ('\\{x: x^2>0\\}', '\\{x: x^2>0\\}'), (']0,1]', 'ordered(]<0 | 1>'),
    ('\\mathbb{R}', 'ordered()<-\\infty | \\infty>'),
    ('\\{5\\}', 'unordered<5>'), ('(1,2)', 'ordered()<1 | 2>'), ('[1,2)', 'ordered[)<1 | 2>'), ('(5)', '5'),
    ('((5))', '5'), ('(1)(2)', '(1)(2)'), ('((1,2),3)', 'ordered()<ordered()<1 | 2> | 3>'), ('(1', '(1'),
    ('[0,1]\\cup(2,3]', 'union<ordered[]<0 | 1> | ordered(]<2 | 3>>'),
    ('\\{1\\}\\cup\\{2\\}', 'union<unordered<1> | unordered<2>>'), ('A\\cup B', 'union<A | B>'),
    ('\\cupola', '\\cupola'), ('x<2', 'ordered()<-\\infty | 2>'), ('x \\le 2', 'ordered(]<-\\infty | 2>'),
    ('x > 2', 'ordered()<2 | \\infty>'), ('x\\ge -1', 'ordered[)<-1 | \\infty>'), ('1<x<2', 'ordered()<1 | 2>'),
    ('1\\le x<2', 'ordered[)<1 | 2>'), ('1<x\\le\\infty', 'ordered(]<1 | \\infty>'),
    ('-1 \\le \\alpha \\le 4', 'ordered[]<-1 | 4>'), ('2>x>1', 'ordered()<1 | 2>'), ('\\pm 2', 'unordered<+ 2 | - 2>'),
    ('1\\pm\\sqrt{2}', 'unordered<1+\\sqrt{2} | 1-\\sqrt{2}>'),
    ('a \\pm b \\mp c', 'unordered<a + b - c | a - b + c>'), ('0, \\pm 1', 'unordered<0 | + 1 | - 1>'),
    ('\\{\\pm 1, 3\\}', 'unordered<+ 1 | - 1 | 3>'), ('(\\pm 1, 2)', 'ordered()<unordered<+ 1 | - 1> | 2>'),
    ('\\pmod 5', '\\pmod 5'), ('x=1, y=2', 'orderedx,y<1 | 2>'), ('y=2, x=1', 'orderedx,y<1 | 2>'),
    ('x=1, x=2', 'unordered<1 | 2>'), ('x=1, 2', 'unordered<1 | 2>'), ('x=1 and y=2', 'orderedx,y<1 | 2>'),
    ('\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}', 'orderedmatrix<ordered<1 | 2> | ordered<3 | 4>>'),
    ('\\begin{array}{cc}1&2\\\\\\end{array}', 'orderedmatrix<ordered<1 | 2>>'),
    ('\\begin{pmatrix}1\\end{bmatrix}', '\\begin{pmatrix}1\\end{bmatrix}'),
    ('\\begin{matrix}1,2 & 3\\end{matrix}', 'orderedmatrix<ordered<unordered<1 | 2> | 3>>'),
    ('((((((1,2),3),4),5),6),7)', 'ordered()<ordered()<ordered()<ordered()<((1,2),3) | 4> | 5> | 6> | 7>'),
    ('+\\infty', '\\infty'), ('(2,+\\infty)', 'ordered()<2 | \\infty>'), ('-\\infty', '-\\infty'), ('()', ''),
    ('( )', ''), ('', ''),
]  # fmt: skip


def shown(node: Node) -> str:
    parts = " | ".join(map(shown, node.parts))
    return node.text if node.kind == "leaf" else f"{node.kind}{node.brackets}<{parts}>"


def test_a_text_is_taken_apart():
    assert [(text, shown(structure(text))) for text, _ in STRUCTURES] == STRUCTURES


def test_a_long_list_and_what_lies_deep_are_left_as_they_are():
    assert (MAX_PARTS, MAX_DEPTH) == (24, 4)
    for opens, closes in (("", ""), ("(", ")"), ("\\{", "\\}")):
        listed = [f"{opens}{','.join(['7'] * count)}{closes}" for count in (24, 25)]
        assert [len(structure(text).parts) for text in listed] == [24, 0]
    assert [len(structure("\\cup".join(["(1,2)"] * count)).parts) for count in (24, 25)] == [24, 0]
    assert shown(structure("((((1,2),3),4),5)")) == "ordered()<ordered()<ordered()<ordered()<1 | 2> | 3> | 4> | 5>"
    for text in ("(((((1,2),3),4),5),6)", "((((\\begin{matrix}1\\end{matrix},3),4),5),6)"):
        assert "<((1,2) | 3>" not in shown(structure(text)) and shown(structure(text)).count("<") == 4


def test_a_separator_counts_outside_of_all_brackets():
    assert split_outside("a, (b, c), [d, {e, f}], g", ",") == ["a", "(b, c)", "[d, {e, f}]", "g"]
    assert split_outside("a", ",") == ["a"] and split_outside("", ",") == [""] and split_outside(",", ",") == ["", ""]
    assert split_outside("a--b", "--") == ["a", "b"]


NUMBERS = [
    ('42', ('42', False)), ('+42', ('42', False)), ('- 7', ('-7', False)), ('1,234', ('1234', False)),
    ('1,234,567', ('1234567', False)), ('12,34', None), ('1,2345', None), ('.5', ('1/2', False)),
    ('5.', ('5', False)), ('0.50', ('1/2', False)), ('1,234.5', ('2469/2', False)), ('-.5', ('-1/2', False)),
    ('1.2.3', None), ('0.\\overline{3}', ('1/3', False)), ('12.3\\overline{45}', ('679/55', False)),
    ('.\\overline{9}', ('1', False)), ('-0.1\\dot{6}', ('-1/6', False)), ('0.\\bar{142857}', ('1/7', False)),
    ('\\frac{1}{2}', ('1/2', True)), ('-\\frac{3}{4}', ('-3/4', True)), ('\\frac{-3}{4}', ('-3/4', True)),
    ('-\\frac{-3}{4}', ('3/4', True)), ('\\frac{ 6 }{ 3 }', ('2', True)), ('\\frac{1,000}{3}', ('1000/3', True)),
    ('\\frac{1}{0}', None), ('\\frac{1}{-2}', ('-1/2', True)), ('3\\frac{8}{2}', None), ('10/4', ('5/2', True)),
    ('-10 / 4', ('-5/2', True)),
    ('1/0', None), ('1\\frac{1}{2}', ('3/2', False)), ('-1\\frac{1}{2}', ('-3/2', False)), ('2 1/2', ('5/2', False)),
    ('-2 3/4', ('-11/4', False)), ('1.5\\times 10^{3}', ('1500', False)), ('2\\cdot10^-2', ('1/50', False)),
    ('3*10^2', ('300', False)), ('1e3', ('1000', False)), ('2.5E-3', ('1/400', False)), ('1e1000', None),
    ('6.02\\times10^{23}', ('602000000000000000000000', False)), ('2^3', None), ('1+1', None), ('', None),
    ('x', None), ('٣', None),
]  # fmt: skip
UNITS = [
    ('USD 5', ('5', 'dollar')), ('101_2', ('101', 'base 2')), ('101_{12}', ('101', 'base 12')),
    ('101_123', ('101_123', '')), ('5%', ('5', 'percent')), ('5 %', ('5', 'percent')),
    ('5\\text{ cm}', ('5', 'centimeter')), ('5 cm', ('5', 'centimeter')), ('12\\text{ cm}^2', ('12', 'centimeter^2')),
    ('12 cm^{3}', ('12', 'centimeter^3')), ('12\\text{ square feet}', ('12', 'foot^2')),
    ('12\\text{ cubic meters}', ('12', 'meter^3')), ('3\\sqrt{2}\\text{ m}', ('3\\sqrt{2}', 'meter')),
    ('9\\pi\\text{ cm}', ('9\\pi', 'centimeter')), ('5x', ('5x', '')), ('5m', ('5m', '')),
    ('5 mm', ('5', 'millimeter')), ('5 miles', ('5', 'mile')), ('5 mph', ('5', 'mile/hour')),
    ('5\\text{ Apples.}', ('5', 'apples')), ('90 \\text{degrees}', ('90', 'degree')),
    ('x\\text{ cm}', ('x\\text{ cm}', '')), ('n!\\text{ ways}', ('n!', 'ways')),
    ('5.\\text{ kg}', ('5.', 'kilogram')), ('70 USD', ('70', 'dollar')), ('5 Dollars', ('5', 'dollar')),
    ('5 minutes', ('5', 'minute')), ('2 hours', ('2', 'hour')), ('\\text{cm}', ('\\text{cm}', '')),
    ('(5)\\text{ in}', ('(5)', 'inch')), ('[5] km', ('[5]', 'kilometer')), ('12 square cm', ('12', 'centimeter^2')),
    ('5\\text{kg}', ('5', 'kilogram')), ('5 \\text{ft}^4', ('5 \\text{ft}^4', '')), ('7 cents', ('7', 'cent')),
    ('5\\text{ units}', ('5', 'unit')), ('3 days', ('3', 'day')),
]  # fmt: skip
SPELLINGS = [
    ('\\dfrac12', '\\frac{1}{2}'), ('\\left(1\\right)', '(1)'), ('\\left.x\\right|', 'x|'),
    ('\\tfrac{1}2', '\\frac{1}{2}'), ('\\cfrac{1}{2}', '\\frac{1}{2}'), ('\\mathrm{cm}', '\\text{cm}'),
    ('\\operatorname*{max}', '\\text{max}'), ('1{,}234', '1234'), ('1\\,234', '1234'), ('1\\,23', '1 23'),
    ('12\\!345', '12345'), ('a\\,b', 'a b'), ('a\\quad b', 'a b'), ('a~b', 'a b'), ('\\lbrace 1\\rbrace', '\\{ 1\\}'),
    ('90^\\circ', '90 \\text{degrees}'), ('90^{\\circ}', '90 \\text{degrees}'), ('90°', '90 \\text{degrees}'),
    ('5\\%', '5%'), ('\\$5', 'USD 5'), ('$5', 'USD 5'), ('$ 1,234.50', 'USD 1,234.50'), ('a\\leq b', 'a\\le b'),
    ('a\\leqslant b', 'a\\le b'), ('a≤b', 'a\\le b'), ('a<=b', 'a\\le b'), ('a\\geq b', 'a\\ge b'),
    ('a>=b', 'a\\ge b'), ('\\lt\\gt', '<>'), ('\\varnothing', '\\emptyset'), ('∅', '\\emptyset'), ('∞', '\\infty'),
    ('−3–4', '-3-4'), ('2×3', '2\\times 3'), ('2·3⋅4', '2\\cdot 3\\cdot 4'), ('±2', '\\pm 2'), ('A∪B', 'A\\cup B'),
    ('2π', '2\\pi'), ('x∈A', 'x\\in A'), ('√12', '\\sqrt{12}'), ('√(2+1)', '\\sqrt{2+1}'), ('sqrt(3)', '\\sqrt{3}'),
    ('\\sqrt3', '\\sqrt{3}'), ('\\sqrt 12', '\\sqrt{1}2'), ('\\frac12', '\\frac{1}{2}'),
    ('\\frac 1 2', '\\frac{1}{2}'), ('\\frac1{2}', '\\frac{1}{2}'), ('\\frac{1}2', '\\frac{1}{2}'),
    ('a   b\n c', 'a b c'), ('$$5$$', '5'), ('$5$', '5'), ('\\(5\\)', '5'), ('\\[5\\]', '5'), ('5.', '5'),
    ('5..', '5..'), ('$', '$'), ('$$', '$$'), ('$x$.', '$x$'), ('\\displaystyle x', 'x'), ('\\bigl(x\\bigr)', '(x)'),
]  # fmt: skip
DENSE = [
    ('\\pi r', '\\pi r'), ('\\pi 2', '\\pi2'), ('a b', 'a b'), ('1 + 2', '1+2'), ('x ( y )', 'x(y)'), (' a ', 'a'),
    ('2 x', '2x'),
]  # fmt: skip
UNWRAPPED = [
    ('\\text{Monday}', 'Monday'), (' \\text{ a b } ', 'a b'), ('\\text{a}b', '\\text{a}b'), ('x', 'x'),
    ('\\text{a}\\text{b}', '\\text{a}\\text{b}'),
]  # fmt: skip


def test_a_number_is_what_is_written_out():
    found = [(text, written_number(text)) for text, _ in NUMBERS]
    assert [(text, one and (str(one.value), one.is_fraction)) for text, one in found] == NUMBERS


def test_a_number_has_so_many_digits_at_most():
    assert MAX_DIGITS == 400
    assert written_number("9" * 400) is not None and written_number("9" * 401) is None
    assert as_integer("9" * 400) == 10**400 - 1 and as_integer("9" * 401) is None
    assert split_unit("9" * 398 + " %")[1] == "percent" and split_unit("9" * 399 + " %")[1] == ""


def test_a_unit_stands_behind_its_number():
    assert [(text, split_unit(text)) for text, _ in UNITS] == UNITS


def test_there_is_one_spelling():
    assert [(text, one_spelling(text)) for text, _ in SPELLINGS] == SPELLINGS


def test_blanks_and_wrappings_say_nothing():
    assert [dense(text) for text, _ in DENSE] == [wanted for _, wanted in DENSE]
    assert [unwrapped(text) for text, _ in UNWRAPPED] == [wanted for _, wanted in UNWRAPPED]


COMPARED = [
    ('x+1', 'y+1', True), ('x=1', 'x', False), ('x=1', 'x=2', True), ('a=b=c', 'a=b=c', False),
    ('x\\le 1', 'x', False), ('\\sin x', 'x', True), ('\\sin x', '\\cos x', True), ('\\sum x', 'x', False),
    ('\\sum x', '\\sum y', False), ('1+\\sum x', '\\sum x+1', True),
    ('\\sqrt{2}', '3', True), ('\\ln 2', '\\sqrt{2}', False),
    ('\\ln 2', '\\ln 3', True), ('max x', 'x', False), ('max x', 'max y', True), ('\\text{foo}x', 'x', True),
    ('x!', 'x', False), ('x!', 'y!', True), ('x_1', 'x', False), ('|x|', 'x', False), ('x^{1000}', 'x', False),
    ('x^{10000}', 'x', False), ('x^1234', 'x^9999', False), ('x^{999}', 'x', True), ('x^{2^2}', 'x', False),
    ('x^2+y^2', 'x', True), ('x', '\\sqrt{2}', False), ('2^{10}', '\\sqrt{2}', False), ('2^{10}', '2^{3}', True),
    ('2\\cdot 3\\sqrt{2}', '\\sqrt{2}', False), ('(2)(3)', '\\sqrt{2}', False), ('2+\\sqrt{2}', '\\sqrt{2}', False),
    ('-\\sqrt{2}', '\\sqrt{2}', True), ('2+\\sqrt{2}', '1-\\sqrt{2}', True), ('2*3', '\\pi', False),
    ('i^2', '\\pi', True), ('e', '\\pi', True), ('\\alpha', '\\pi', False), ('\\infty', '\\pi', True),
]  # fmt: skip
LEAVES = [
    ('5', '5', True), ('', '', False), ('5 cm', '5', True), ('5', '5 cm', True), ('5 cm', '5 m', None),
    ('\\frac{4}{2}', '2', False), ('\\frac{4}{2}', '2.0', False), ('\\frac{2}{4}', '\\frac{1}{2}', True),
    ('0.5', '\\frac{1}{2}', True), ('2+3', '5', False), ('x', 'y', False), ('x', 'X', False),
    ('Monday', '\\text{monday}', True), ('Monday', 'tuesday', False), ('no solution', 'None', False),
    ('3.14', '\\pi', False), ('3', '\\pi', None), ('1.0x', 'x', None), ('\\infty', '-\\infty', False),
    ('\\infty', 'x', False), ('x+1', '1+x', None), ('2x', 'x+x', None), ('\\sqrt{4}', '2', False),
    ('2', '\\sqrt{4}', None), ('2.0', '\\sqrt{4.0}', None),
]  # fmt: skip
UNKNOWN = [
    ('x', True), ('e', False), ('i', False), ('ei', False), ('\\pi', False), ('\\alpha', True), ('\\sin 2', False),
    ('\\sum 2', False), ('\\text{x}', False), ('Z', True), ('E', True), ('2', False), ('h', True),
]  # fmt: skip


def test_an_answer_that_leaves_the_work_to_others_is_not_compared():
    assert [(answer, truth, may_be_compared(answer, truth)) for answer, truth, _ in COMPARED] == COMPARED


def test_two_leaves_are_equal_or_not_or_for_algebra_to_say():
    assert [(answer, truth, equal_leaves(answer, truth)) for answer, truth, _ in LEAVES] == LEAVES


def test_which_letters_are_unknowns():
    assert [has_unknown(text) for text, _ in UNKNOWN] == [wanted for _, wanted in UNKNOWN]


def leaf(text: str) -> Node:
    return Node("leaf", text)


def of(kind: str, *texts: str, brackets: str = "") -> Node:
    return Node(kind, brackets=brackets, parts=tuple(map(leaf, texts)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "wanted", "equal"),
    [
        (of("ordered", "1", "2", brackets="()"), of("ordered", "1", "2", brackets="()"), True),
        (of("ordered", "1", "2", brackets="()"), of("ordered", "1", "2", brackets="[]"), False),
        (of("ordered", "1", "2"), of("ordered", "2", "1"), False),
        (of("ordered", "1", "2"), of("ordered", "1"), False),
        (of("unordered", "1", "2"), of("unordered", "2", "1"), True),
        (of("unordered", "1", "1"), of("unordered", "1", "2"), False),
        (of("unordered", "1", "2"), of("unordered", "1"), False),
        (of("unordered", "1"), leaf("1"), True),
        (leaf("1"), of("unordered", "1"), True),
        (leaf("1"), of("union", "1"), False),
        (of("union", "1", "2"), of("union", "2", "1"), True),
        (of("union", "1", "2"), of("unordered", "2", "1"), True),
        (of("ordered", "1"), leaf("1"), False),
        (leaf("1"), of("ordered", "1"), False),
        (leaf("1"), leaf("2"), False),
    ],
)
def test_nodes_are_equal_part_by_part(given: Node, wanted: Node, equal: bool):
    assert equal_nodes(given, wanted, lambda *_: False) is equal


async def test_an_answer_is_as_long_as_allowed_and_neither_is_empty():
    async def never(pairs: Sequence[Pair]) -> Sequence[bool]:
        raise AssertionError(pairs)

    assert MAX_CHARS == 2_000
    long = "7" + " " * (MAX_CHARS - 1)
    assert await same_mathematics(long, "7", never) and not await same_mathematics(long + " ", "7", never)
    for answer, truth in ((" ", "7"), ("7", " "), ("", "")):
        assert not await same_mathematics(answer, truth, never)


# -- where an answer stands --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a</think>b", "b"), ("a</think>b</reason>c", "c"), ("<thought>a", ""), ("x <reasoning> y", ""), ("a", "a"),
        ("<think>a</think>", ""), ("", ""),
    ],
)  # fmt: skip
def test_what_is_said_comes_after_the_last_thought(text: str, said: str):
    assert spoken(text) == said


@pytest.mark.parametrize(
    ("text", "boxed"),
    [
        ("\\boxed{1} \\boxed{ 2 } x", "2"), ("\\boxed{a{b}c}", "a{b}c"), ("\\boxed{a", None), ("boxed{a}", None),
        ("\\boxed{}", ""), ("\\boxed{1} \\boxed{2", None), ("}\\boxed{{}}}", "{}"),
    ],
)  # fmt: skip
def test_the_last_box_counts(text: str, boxed: str | None):
    assert last_boxed(text) == boxed


@pytest.mark.parametrize(
    ("text", "place", "found"),
    [
        ("<answer> 8 </answer> <answer>9</answer>", "anywhere", "9"),
        ("<answer>8</answer> \\boxed{1}", "anywhere", "1"),
        ("<answer>8</answer>", "boxed", None),
        ("answer is  ** 4.5 **.", "anywhere", "4.5"),
        ("the FINAL ANSWER = 3\nmore", "anywhere", "3"),
        ("answer: 1 </think> none", "anywhere", None),
    ],
)
def test_an_answer_is_looked_for_in_its_place(text: str, place: Place, found: str | None):
    assert find_answer(text, place) == found


def test_the_last_program_or_the_last_answer():
    assert last_program("```py\n1\n```\n```\n2\n```") == "2\n"
    assert last_program("<answer>1</answer><answer> 2 </answer>") == "2"
    assert last_program("<answer> </answer>") is None and last_program("<think>```\n1\n```") is None


# -- programs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("truth", "said"),
    [
        ("[", "is no JSON ("), ("5", "holds no case"), ("[]", "holds no case"), ("{}", 'has no "inputs" and "outputs"'),
        ('{"inputs": [], "outputs": 5}', 'has no "inputs" and "outputs"'),
        ('{"inputs": ["a"], "outputs": []}', "has 1 inputs and 0 outputs"),
        ('{"inputs": [], "outputs": []}', "holds no case"),
        ('[{"input": "a", "output": "b"}, {"input": "a"}]', 'case 2 has no "input" and "output" in text'),
        ('[{"input": 1, "output": "b"}]', 'case 1 has no "input" and "output" in text'),
        ("[7]", 'case 1 has no "input" and "output" in text'),
    ],
)  # fmt: skip
def test_cases_that_cannot_be_read_say_why(truth: str, said: str):
    with pytest.raises(ValueError) as refused:
        read_cases(truth)
    assert str(refused.value).startswith(said)


def test_cases_are_read_as_rows_or_as_columns():
    rows = '[{"input": "1", "output": "2"}, {"input": "", "output": "3"}]'
    columns = '{"inputs": ["1", ""], "outputs": ["2", "3"]}'
    assert read_cases(rows) == read_cases(columns) == [Case("1", "2"), Case("", "3")]


async def test_a_program_passes_the_cases_that_it_prints():
    asked: list[str] = []

    async def run(code: str, stdin: str) -> ProgramRun:
        asked.append(stdin)
        right = code == "right" or int(stdin) < 9
        return ProgramRun(
            outcome=Outcome.OK if stdin != "3" else Outcome.ERROR, stdout=f"{stdin} \n\n" if right else "x"
        )

    assert CASES_AT_ONCE == 8
    some = [Case(str(number), f"{number}\n") for number in range(10, 26)]
    assert await share_passed("right", some, run, all_of_them=True) == 1.0 and len(asked) == 16
    asked.clear()
    assert await share_passed("wrong", some, run, all_of_them=True) == 0.0 and len(asked) == 8
    asked.clear()
    cases = [Case(str(number), str(number)) for number in range(16)]
    assert await share_passed("wrong", cases, run, all_of_them=False) == 8 / 16 and len(asked) == 16
    assert await share_passed("right", [Case("1", "1"), Case("2", "")], run, all_of_them=False) == 0.5
    assert await share_passed("right", [Case("1", " 1")], run, all_of_them=True) == 0.0
