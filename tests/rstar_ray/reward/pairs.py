r"""Answers and truths, and whether the one says what the other does: the rows of docs/rewards.md, spelt out."""

SAME = [
    # whole numbers
    ("42", "42"), ("+42", "42"), ("-7", "-7"), ("−7", "-7"), ("1,234", "1234"), ("1{,}234", "1234"),
    ("1\\,234", "1234"),
    ("12,345,678", "12345678"), ("007", "7"), ("42.", "42"), ("42.0", "42"), ("$42$", "42"), ("\\(42\\)", "42"),
    ("x = 42", "42"), ("n=42", "42"), ("f(2) = 42", "42"), ("42", "x=42"), ("(42)", "42"), (" 42 ", "42"),
    ("0", "-0"),
    ("3\\times 10^{5}", "300000"), ("1.2e3", "1200"), ("6.02 \\cdot 10^{23}", "602000000000000000000000"),
    # fractions and decimals
    ("\\frac{1}{2}", "\\frac{1}{2}"), ("\\dfrac{1}{2}", "\\frac12"), ("\\tfrac12", "\\frac{1}{2}"),
    ("1/2", "\\frac{1}{2}"),
    ("\\frac{2}{4}", "\\frac{1}{2}"), ("0.5", "\\frac{1}{2}"), (".5", "0.5"), ("0.50", "0.5"),
    ("-\\frac{3}{4}", "-0.75"),
    ("\\frac{-3}{4}", "-\\frac{3}{4}"), ("-3/4", "\\frac{-3}{4}"), ("1\\frac{1}{2}", "\\frac{3}{2}"),
    ("1 1/2", "1.5"),
    ("0.\\overline{3}", "\\frac{1}{3}"), ("0.1\\overline{6}", "\\frac16"), ("\\frac{1}{3}", "0.\\overline{3}"),
    ("2.5\\times 10^{-3}", "0.0025"), ("\\frac{1000}{3}", "\\frac{1,000}{3}"), ("\\left(\\frac{1}{2}\\right)", "0.5"),
    ("-\\dfrac{7}{12}", "-\\frac{7}{12}"), ("3.1400", "3.14"), ("\\frac 3 4", "0.75"), ("\\frac{3}4", "\\frac{3}{4}"),
    # percent and units
    ("5\\%", "5\\%"), ("5\\%", "5"), ("5", "5\\%"), ("5%", "5\\%"), ("5 percent", "5\\%"), ("5\\text{ percent}", "5"),
    ("90^\\circ", "90"), ("90", "90^{\\circ}"), ("90°", "90^\\circ"), ("90\\text{ degrees}", "90^\\circ"),
    ("5\\text{ cm}", "5"), ("5", "5\\text{ cm}"), ("5 cm", "5\\text{ cm}"),
    ("5\\,\\mathrm{cm}", "5\\text{ centimeters}"),
    ("12\\text{ cm}^2", "12"), ("12\\text{ cm}^2", "12\\text{ square centimeters}"), ("\\$18.90", "18.9"),
    ("\\$5", "5\\text{ dollars}"), ("$5", "5"), ("3\\sqrt{2}\\text{ m}", "3\\sqrt{2}"), ("2 hours", "2"),
    ("9\\pi\\text{ cm}", "9\\pi"), ("101_2", "101_{2}"), ("2516_6", "2516"), ("70 \\text{ mph}", "70"),
    # roots, pi and other exact constants
    ("2\\sqrt{3}", "2\\sqrt3"), ("\\sqrt{12}", "2\\sqrt{3}"), ("\\frac{\\sqrt{3}}{3}", "\\frac{1}{\\sqrt{3}}"),
    ("\\frac{\\sqrt{2}}{2}", "\\sqrt{2}/2"), ("\\frac{1+\\sqrt{5}}{2}", "\\frac{1}{2}+\\frac{\\sqrt{5}}{2}"),
    ("\\sqrt{2}+1", "1+\\sqrt{2}"), ("\\frac{\\pi}{2}", "\\frac{1}{2}\\pi"), ("\\pi/2", "\\frac{\\pi}{2}"),
    ("2π", "2\\pi"), ("\\frac{4}{3}\\pi", "\\frac{4\\pi}{3}"), ("\\sqrt[3]{2}", "\\sqrt[3]{2}"), ("√2", "\\sqrt{2}"),
    ("3-\\sqrt{2}", "-\\sqrt{2}+3"), ("-\\sqrt{5}", "-\\sqrt{5}"), ("e^2", "e^{2}"), ("2i", "2i"), ("3+4i", "4i+3"),
    ("1-2i", "-2i+1"), ("\\ln 2", "\\ln 2"), ("\\log_2 3", "\\log_{2}3"), ("\\sqrt{2}\\cdot 3", "3\\sqrt{2}"),
    # truths that are an operation may be answered by it, or by its value
    ("2^{10}", "2^{10}"), ("1024", "2^{10}"), ("\\binom{5}{2}", "\\binom{5}{2}"), ("10", "\\binom{5}{2}"),
    ("120", "5!"),
    ("5!", "5!"), ("3^{20}", "3^{20}"), ("2^{100}-1", "2^{100}-1"), ("-1+2^{100}", "2^{100}-1"),
    # expressions in unknowns
    ("x^2+2x+1", "(x+1)^2"), ("(x+1)(x-1)", "x^2-1"), ("2x", "x+x"), ("\\frac{x}{2}", "0.5x"), ("y=2x+1", "2x+1"),
    ("2x+1", "y=2x+1"), ("y = 2x + 1", "y=1+2x"), ("\\frac{n(n+1)}{2}", "\\frac{n^2+n}{2}"), ("x^2+y^2", "y^2+x^2"),
    ("a b", "ab"), ("\\tan x", "\\frac{\\sin x}{\\cos x}"), ("\\sin^2 x", "1-\\cos^2 x"), ("e^{2x}", "(e^x)^2"),
    ("f(x)=x^3", "x^3"), ("\\frac{1}{x+1}", "(x+1)^{-1}"), ("-(x-y)", "y-x"), ("2^{n+1}-2", "2(2^n-1)"),
    ("x^2/2", "\\frac{x^2}{2}"), ("y=x^2/2", "\\frac{x^2}{2}"), ("\\pi^2/2", "\\frac{\\pi^2}{2}"),
    ("\\sqrt2/2", "\\frac{\\sqrt{2}}{2}"),
    ("x^3/3 - x", "\\frac{x^3}{3}-x"), ("a_2/2", "\\frac{a_2}{2}"),
    ("10,000\\pi", "10000\\pi"), ("1{,}000\\pi", "1000\\pi"), ("1000\\pi", "1,000\\pi"),
    ("1,000\\sqrt{2}", "1000\\sqrt{2}"),
    ("1,024", "2^{10}"), ("1{,}000x+5", "1000x+5"),
    # lists and sets, in any order
    ("1,2", "2,1"), ("1, 2, 3", "3, 2, 1"), ("\\{1,2\\}", "\\{2,1\\}"), ("\\{1,2\\}", "1,2"), ("1,2", "\\{1, 2\\}"),
    ("1 and 2", "1,2"), ("1\\text{ and }2", "1, 2"), ("x=1\\text{ or }x=2", "1,2"), ("x=1, x=2", "2, 1"),
    ("1; 2", "1,2"),
    ("\\{5\\}", "5"), ("\\emptyset", "\\{\\}"), ("\\varnothing", "\\emptyset"), ("0.5, 2", "2, \\frac{1}{2}"),
    ("\\sqrt{2}, -\\sqrt{2}", "-\\sqrt{2}, \\sqrt{2}"), ("x \\in \\{1, 2\\}", "\\{1,2\\}"),
    ("\\{x, y\\}", "\\{y, x\\}"),
    ("x=1, y=2", "y=2, x=1"), ("\\lbrace 1,2\\rbrace", "\\{1,2\\}"), ("(1,2),(3,4)", "(3,4),(1,2)"),
    # plus-minus
    ("\\pm 2", "2,-2"), ("-2, 2", "\\pm 2"), ("±2", "\\pm 2"), ("1\\pm\\sqrt{2}", "1+\\sqrt{2}, 1-\\sqrt{2}"),
    ("x = \\pm 3", "3, -3"), ("\\{-3, 3\\}", "\\pm 3"), ("\\pm\\frac{1}{2}", "-0.5, 0.5"), ("0, \\pm 1", "-1, 0, 1"),
    # tuples, intervals, unions
    ("(1,2)", "(1,2)"), ("(1, 2)", "\\left(1,2\\right)"), ("(0.5, 3)", "(\\frac{1}{2}, 3)"), ("(x,y)=(1,2)", "(1,2)"),
    ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})"), ("[0,1)", "[0, 1)"), ("(-\\infty, 2]", "(-∞,2]"),
    ("(2,\\infty)", "(2,+\\infty)"), ("x>2", "(2,\\infty)"), ("(2,\\infty)", "x > 2"), ("x \\ge 3", "[3,\\infty)"),
    ("(0,100)", "0<x<100"), ("[0,500]", "0\\le x\\le 500"), ("(200,300)", "200<x<300"),
    ("x\\leqslant 3", "x\\le 3"), ("x \\geqslant 3", "[3,\\infty)"),
    ("-1 < x \\le 4", "(-1,4]"), ("x\\leq 0", "(-\\infty,0]"), ("x \\in [1,2]", "[1,2]"),
    ("(-\\infty,1)\\cup(2,\\infty)", "(2,\\infty)\\cup(-\\infty,1)"), ("[0,1] ∪ [2,3]", "[0,1]\\cup[2,3]"),
    ("(1,2,3)", "(1,\\frac{4}{2},3)"), ("((1,2),3)", "((1,2),3)"), ("(\\sqrt{12}, 1)", "(2\\sqrt{3}, 1)"),
    # matrices
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}"),
    ("\\begin{bmatrix}0.5\\\\1\\end{bmatrix}", "\\begin{pmatrix}\\frac12\\\\1\\end{pmatrix}"),
    # words
    ("\\text{Monday}", "Monday"), ("monday", "\\text{Monday}"), ("\\text{(B)}", "B"), ("B", "\\text{B}"),
    ("yes", "Yes"),
    ("\\text{no solution}", "no solution"), ("\\mathrm{even}", "\\text{even}"), ("(C)", "C"),
    # braces, wrappers and ends that a model leaves around
    ("{42}", "42"), ("{-3}", "-3"), ("\\text{42}", "42"), ("\\boldsymbol{42}", "42"), ("\\mathbf{42}", "42"),
    ("\\bf{12}", "12"), ("\\color{red}{12}", "12"), ("\\fbox{12}", "12"), ("\\boxed{12}", "12"), ("12,", "12"),
    ("\\underline{12}", "12"), ("12\\\\", "12"), ("42\\ ", "42"), ("3{.}5", "3.5"), ("\\frac{1}{-2}", "-\\frac12"),
    ("\\frac{-1}{-2}", "\\frac{1}{2}"), ("(-7)/2", "-\\frac72"), ("\\frac\\pi4", "\\frac{\\pi}{4}"),
    ("\\frac{\\sqrt{3}}2", "\\frac{\\sqrt{3}}{2}"), ("2^{1/3}", "\\sqrt[3]{2}"), ("2^{\\frac13}", "\\sqrt[3]{2}"),
    ("\\mathrm{e}^{2}", "e^2"),
    # units in words
    ("42 apples", "42"), ("12 \\text{ (ways)}", "12"),
    ("\\frac{\\pi}{4}\\text{ rad}", "\\frac\\pi4"),
    # what is named in front
    ("AB = 5", "5"), ("\\angle ABC = 60^\\circ", "60"), ("\\vec{v}=(1,2)", "(1,2)"),
    ("\\theta=\\frac{\\pi}{3}", "\\frac{\\pi}{3}"),
    ("|z|=5", "5"), ("f'(x)=2x", "2x"), ("\\text{Area} = 12", "12"), ("\\#S=12", "12"), ("x \\approx 3.14", "3.14"),
    ("\\approx 3.14", "3.14"),
    # lists, and roots of one unknown
    ("1, 2, and 3", "1,2,3"), ("x_1 = 1, x_2 = 2", "2,1"), ("1,2", "x_1=2,\\quad x_2=1"), ("x=1 \\lor x=2", "1,2"),
    # intervals in other words
    ("3 > x", "(-\\infty,3)"), ("5 \\le x", "[5,\\infty)"), ("4 > x > 1", "(1,4)"), ("4 \\ge x > 1", "(1,4]"),
    ("\\mathbb R", "\\mathbb{R}"),
    ("\\langle 1, 2 \\rangle", "(1,2)"),

    # products of unknowns are not words
    ("a^2+2ab+b^2", "(a+b)^2"), ("2yx", "2xy"), ("{90^\\circ}", "90"),
    # functions that computer algebra would do away with
    ("x^2+y^2=1", "y^2+x^2=1"), ("a-(-b)", "a+b"),

    # names in front that say the same
    ("y=2x", "f(x) = 2x"), ("\\text{Area} = 12", "A = 12"),
    ("\\angle A = 60^\\circ", "A = 60"),
    ("\\vec{v}=(1,2)", "v = (1,2)"), ("t > 2", "(2,\\infty)"),
    ("x_1 = 1, x_2 = 2", "x = 2 \\text{ or } x = 1"), ("p = 3, q = 5", "(p,q)=(3,5)"), ("(p,q)=(3,5)", "q=5, p=3"),
    # as keyboards write it
    ("3 +- 2", "3 \\pm 2"), ("3 +/- 2", "3\\pm 2"), ("+-2", "2,-2"), ("2pi", "2\\pi"), ("pi/4", "\\frac{\\pi}{4}"),
    ("x² + 1", "x^2+1"), ("1.5 × 10³", "1500"), ("x**2", "x^2"), ("x**10", "x^{10}"),
    ("12 345", "12345"), ("1 234 567", "1234567"), ("12\\;345", "12345"), ("x \\neq 2", "x\\ne 2"),
    ("x ≠ 2", "x \\ne 2"),
    # other money, degrees of heat, functions under two names
    ("\\$1,250", "1250"), ("\\$32,\\!348", "\\$32,348"), ("$1,250.50", "1250.5"), ("€5", "5"),
    ("5\\,€", "5\\text{ euros}"),
    ("\\text{€}5", "5"), ("£1,250", "1250"), ("30^\\circ\\text{C}", "30"), ("30^\\circ C", "30^\\circ\\text{C}"),
    ("\\exp(-x)", "e^{-x}"), ("\\arcsin x", "\\sin^{-1}(x)"),
    ("\\mathcal{O}(n^2)", "O(n^2)"), ("\\pi(R-r)(R+r)", "\\pi(R^2-r^2)"), ("2Aa+A^2+a^2", "(A+a)^2"),
    ("\\{\\emptyset\\}", "\\{\\varnothing\\}"), ("\\{\\{2\\},1\\}", "\\{1,\\{2\\}\\}"),
    ("\\sum_{i=1}^n X_i^2", "\\sum_{i=1}^{n} X_i^{2}"),
    ("\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}", "\\begin{vmatrix}1 & 2\\\\3 & 4\\end{vmatrix}"),
    # other spellings that math-verify knows
    ("(11,7) or (7,11)", "(7,11),(11,7)"), ("a=4,b=1;a=6,b=1", "(4,1),(6,1)"), ("T:T_1=5:12", "5:12"),
    ("35 pct", "35\\%"), ("2<g(x)<3", "(2,3)"), ("-y > -2", "y < 2"), ("{3,5}", "(3,5)"), ("3,14", "3.14"),
    ("(3,1),(1,3),(3,1)", "(1,3),(3,1)"), ("0.333333", "\\frac{1}{3}"), ("z = 7 + 1 = 8", "z = 5 + 3 = 8"),
    ("\\mathbb{R}", "(-\\infty,\\infty)"),
    # both values of plus-minus, the value of an operation, thousands with a thin space
    ("1+\\sqrt{19}, 1-\\sqrt{19}", "1\\pm\\sqrt{19}"), ("126410606437752", "\\dbinom{50}{25}"),
    ("11111111100", "11,\\! 111,\\! 111,\\! 100"),
    # equations whose terms stand in another order, and symbols that math-verify keeps as they are
    ("-ay+bx=0", "bx-ay=0"), ("4x+3y=6", "4\\cdot x+3\\cdot y=6"), ("3 a^{2}", "3a^2"), ("\\frac{d}{2}", "0.5d"),
    ("-i\\cot(\\rho a)", "-i \\cot(a\\rho)"), ("e^{1/\\epsilon}", "e^{\\frac{1}{\\epsilon}}"),
    ("\\lfloor\\frac{n}{2}\\rfloor+\\lfloor\\frac{m}{2}\\rfloor",
     "\\lfloor\\frac{m}{2}\\rfloor+\\lfloor\\frac{n}{2}\\rfloor"),
]  # fmt: skip

DIFFERENT = [
    ("3 fifths", "3"), ("3 lakh", "3"), ("4/2", "2"), ("\\sqrt{4}/2", "1"), ("1,024", "1, 24"), ("1,024", "1024,0"),
    ("(1,100)", "1100"), ("\\{1,100\\}", "1100"), ("1234,567", "1234567"), ("1000,100", "1000100"),
    ("f(1,100)", "f(1100)"),
    ("x+4^8/2", "x+32768"),
    ("1,000\\pi", "100\\pi"), ("x^2/2", "\\frac{x^2}{3}"),
    # a number must be written out
    ("2+3", "5"), ("10-5", "5"), ("\\frac{10}{2}", "5"), ("10/2", "5"), ("5\\cdot 1", "5"), ("2^{10}", "1024"),
    ("\\binom{50}{25}", "126410606437752"), ("\\sum_{k=1}^{100} k", "5050"), ("\\prod_{k=1}^{5} k", "120"),
    ("5!", "120"),
    ("\\sqrt{25}", "5"), ("5=6=7", "7"), ("5=6=7", "5"), ("2+3=5", "5"), ("x=5=5", "5"), ("\\int_0^5 1 dx", "5"),
    ("\\lfloor 5.5 \\rfloor", "5"), ("\\gcd(10,15)", "5"), ("\\log_2 32", "5"), ("7 \\bmod 2", "1"), ("|{-5}|", "5"),
    ("\\max(5,3)", "5"), ("\\sin 90^\\circ", "1"), ("e^0", "1"), ("\\lim_{x\\to 0}\\frac{\\sin x}{x}", "1"),
    ("-(-5)", "5"),
    ("2(3)", "6"), ("(2)(3)", "6"), ("\\frac{1}{2}+\\frac{1}{2}", "1"), ("\\frac{\\sqrt{4}}{4}", "\\frac{1}{2}"),
    ("2^{-1}", "\\frac{1}{2}"), ("\\frac{3}{10}+\\frac{1}{5}", "0.5"), ("10^{6}", "1000000"), ("4\\choose 2", "6"),
    ("i^4", "1"), ("5x", "5"), ("x", "5"), ("5, 6", "5"), ("5 or 6", "5"), ("\\{5,6\\}", "6"), ("4.9999999999", "5"),
    # other numbers
    ("5", "6"), ("-5", "5"), ("1,234", "1.234"), ("0.33", "\\frac{1}{3}"), ("\\frac{1}{3}", "0.33"), ("3.14", "\\pi"),
    ("1.41421356", "\\sqrt{2}"), ("\\sqrt{2}", "1.41421356"), ("\\frac{2}{3}", "\\frac{3}{2}"), ("12,34", "1234"),
    ("1/0", "0"), ("\\infty", "5"), ("5", "\\infty"), ("-\\infty", "\\infty"), ("1\\frac{1}{2}", "\\frac{1}{2}"),
    # percent and units
    ("5\\%", "0.05"), ("0.05", "5\\%"), ("5\\%", "\\frac{1}{20}"), ("500\\%", "5"), ("5\\text{ cm}", "5\\text{ m}"),
    ("5 cm", "5 mm"), ("5\\text{ cm}^2", "5\\text{ cm}"), ("90^\\circ", "90\\%"), ("\\$5", "5\\text{ cents}"),
    ("50\\text{ mm}", "5\\text{ cm}"), ("5", "101_2"), ("101_3", "101_2"), ("\\frac{\\pi}{2}", "90^\\circ"),
    # work left to whoever compares exact constants
    ("\\sqrt{3}+\\sqrt{3}", "2\\sqrt{3}"), ("(2+\\sqrt{2})^2", "6+4\\sqrt{2}"), ("2\\cdot 3\\sqrt{2}", "6\\sqrt{2}"),
    ("\\sin 60^\\circ", "\\frac{\\sqrt{3}}{2}"), ("\\sum_{k=1}^{2}\\sqrt{k}", "1+\\sqrt{2}"),
    ("2\\sqrt{3}", "3\\sqrt{2}"), ("\\sqrt{2}-1", "1-\\sqrt{2}"), ("3+4i", "3-4i"), ("2^{5}\\cdot 2^{5}", "2^{10}"),
    ("\\binom{10}{5}+4", "2^{8}"), ("1023", "2^{10}"), ("e^{3}", "e^{2}"), ("\\frac{\\pi}{3}", "\\frac{\\pi}{2}"),
    # expressions
    ("x^2+2x+2", "(x+1)^2"), ("x+1", "x-1"), ("5", "x"), ("\\sum_{k=1}^n k", "\\frac{n(n+1)}{2}"),
    ("x^{99999999}", "x^2"), ("x^{x^{x^{x}}}", "x^2"), ("y=2x+1", "y=2x-1"), ("n!", "n^2"), ("\\sin x", "\\cos x"),
    # lists and sets
    ("1,2,3", "1,2"), ("1", "1,2"), ("1,2", "1,3"), ("1,1", "1,2"), ("1,2,2", "1,2"), ("\\{1\\}", "\\{1,2\\}"),
    ("\\emptyset", "\\{0\\}"), ("0", "\\emptyset"), ("x=2, y=1", "x=1, y=2"), ("\\{1,2\\}", "(1,2)"),
    ("1,2", "(1,2)"),
    # plus-minus
    ("2", "\\pm 2"), ("\\pm 2", "2"), ("\\pm 2", "\\pm 3"), ("1+\\sqrt{2}", "1\\pm\\sqrt{2}"),
    # tuples, intervals, unions
    ("(2,1)", "(1,2)"), ("[1,2]", "(1,2)"), ("(1,2]", "[1,2)"), ("(1,2,3)", "(1,2)"), ("(1+1,2)", "(2,2)"),
    ("(1,2)", "1,2"), ("(-\\infty,1)", "(-\\infty,1)\\cup(2,\\infty)"), ("x\\ge 2", "(2,\\infty)"),
    ("x<2", "(2,\\infty)"),
    ("(0,1)\\cup(2,3)", "(0,1)\\cap(2,3)"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}2\\\\1\\end{pmatrix}"),
    ("\\begin{pmatrix}1&2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    # words
    ("\\text{Monday}", "Tuesday"), ("5", "five"), ("yes", "no"), ("A", "B"), ("\\text{(A)}", "B"), ("", "5"),
    ("   ", "5"),
    ("\\text{I do not know}", "5"), ("\\text{5 or 6}", "5"), ("{", "5"), ("\\frac{", "\\frac{1}{2}"),
    ("\\boxed{}", "5"),
    # what computer algebra takes for the same
    ("\\sum_{i=1}^n X_i^3", "\\sum_{i=1}^n X_i^2"), ("1-2^{-2^{2002}}", "1-2^{-2^{2001}}"),
    # words behind a number that change it, and sums in a mixed number
    ("5\\text{ million}", "5"), ("5 factorial", "5"), ("5\\text{ dozen}", "5"), ("5 squared", "5"),
    ("3\\text{ halves}", "3"),
    ("0 otherwise", "0"), ("3\\frac{8}{2}", "7"), ("6\\frac{2}{2}", "7"), ("42 apples", "42\\text{ pears}"),
    # names and roots
    ("x_1=2, x_2=1", "x_1=1, x_2=2"), ("x_1=1, y_1=2", "1,2"), ("3+2=5", "5"), ("a+b=5", "5"), ("\\sqrt{25}=5", "5"),
    ("49^{1/2}", "7"), ("32^{1/5}", "2"), ("gcd(a,b)", "g+c+d+a+b"), ("max(a,b)", "m+a+x+b"), ("ab", "a+b"),
    # intervals
    ("]2,5[", "[2,5]"), ("]2,5]", "[2,5]"), ("3 > x", "(3,\\infty)"), ("4 > x > 1", "[1,4]"),
    ("\\{x \\mid x>2\\}", "[2,\\infty)"),
    # what computer algebra passes over, or takes a number out of
    ("\\gcd(n,p-2)", "\\gcd(n,p-1)"), ("1", "\\gcd(m,n)"), ("\\gcd(m,n)+1", "2\\gcd(m,n)"),
    ("\\gcd(m,k)", "\\gcd(m,n)"), ("ab", "\\operatorname{lcm}(a,b)"), ("\\gcd(a,b)", "\\operatorname{lcm}(a,b)"),
    ("\\gcd(2m,n)", "\\gcd(m,2n)"), ("2x^3 + 3y^2 = d", "2x^2 + 3y^2 = d"), ("2x^2 - 3y^2 = d", "2x^2 + 3y^2 = d"),
    ("m \\bmod 3", "n \\bmod 3"), ("b \\equiv 1 \\pmod{4}", "a \\equiv 1 \\pmod{4}"), ("f(x)", "f'(x)"),
    ("f'(x)", "f(x)"), ("A", "A^T"), ("A^T B", "A B^T C"), ("--2x", "2x"), ("x--1", "x+1"), ("x + -1", "x-1"),
    ("3s", "3d"),
    ("\\mathbb{Z}", "(-\\infty,\\infty)"), ("(2;5)", "(5,2)"), ("\\mathbb{R}", "\\mathbb{R}\\setminus\\{0\\}"),
    ("\\gcd(n,1+p)", "\\gcd(n,p-1)"), ("\\gcd(n,-1+p)", "\\gcd(n,1-p)"), ("\\gcd(n,-(1+p))", "\\gcd(n,-1+p)"),
    # names in front that say something else
    ("y = xz", "q = xz"), ("z = x+1", "y = x+1"), ("y = 5", "x = 5"), ("g(x) = 2x", "f(x) = 2x"), ("t > 2", "x > 2"),
    ("y' = 2x", "f(x) = 2x"), ("y \\in (1,2)", "1 < x < 2"), ("\\{x \\mid y > 2\\}", "\\{x \\mid x > 2\\}"),
    ("BC = AC", "AB = AC"), ("p = 5, q = 3", "(p,q)=(3,5)"), ("y=1 \\text{ or } y=2", "x=1 \\text{ or } x=2"),
    # a space between figures
    ("1 1/2", "11/2"), ("1 2 3", "123"), ("12 34", "1234"), ("1 234", "234"), ("1 2", "12"), ("1 234, 5", "12345"),
    ("2 100/300", "\\frac{2100}{300}"), ("x^1 2", "x^{12}"), ("\\sqrt{2} 3 4", "34\\sqrt{2}"),
    # as keyboards write it
    ("3 +- 2", "5"), ("3 +- 2", "1"), ("5²", "25"), ("5²", "52"), ("2**10", "1024"), ("x**10", "x^1"),
    ("x ≠ 2", "x = 2"),
    ("x \\neq 2", "2"), ("10³", "1000"), ("\\exp(0)", "1"), ("2pi", "6.28"), ("pi", "3"),
    # other money, degrees of heat, determinants
    ("€5", "\\$5"), ("£5", "5\\text{ dollars}"), ("\\$1,250", "1"), ("\\$1,250", "1,250,0"), ("€2+3", "5"),
    ("30^\\circ\\text{C}", "30^\\circ\\text{F}"), ("\\tan^{-1} 2", "\\frac{1}{\\tan 2}"), ("O(n)", "O(n^2)"),
    ("\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
    ("\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}", "-2"),
    # letters in two cases, a sum's letters, a quotient of differentials upside down
    ("0", "R^2-r^2"), ("r^2-R^2", "R^2-r^2"), ("2\\pi r", "2\\pi R"), ("2a", "A+a"), ("q_8", "Q_8"), ("n+1", "N+1"),
    ("\\sum_{i=1}^n X_q^2", "\\sum_{i=1}^n X_i^2"), ("\\sum_{i=1}^n x_k", "\\sum_{i=1}^n x_i"),
    ("\\frac{dy}{dx}", "\\frac{dx}{dy}"), ("\\frac{\\partial u}{\\partial x}+1", "\\frac{\\partial u}{\\partial y}+1"),
    # sets in sets, products of matrices
    ("\\{\\emptyset\\}", "\\emptyset"), ("\\emptyset", "\\{\\emptyset\\}"), ("\\{1,\\{2\\}\\}", "\\{1,2\\}"),
    ("\\{\\{5\\}\\}", "\\{5\\}"), ("\\{\\emptyset, 0\\}", "\\{0\\}"), ("B^{-1}A", "AB^{-1}"),
    ("A^{-1}B^{-1}", "(AB)^{-1}"), ("x\\equiv 3\\pmod 8", "x \\equiv 3 \\pmod 7"),
    # and of seldom kinds
    ("50\\%", "\\frac12"), ("1.000", "1000"), ("\\text{not }5", "5"), ("\\text{at least }5", "5"), ("\\ge 5", "5"),
    ("5+", "5"), ("5i", "5"), ("5\\pmod 7", "5\\pmod{11}"), ("5 \\pmod 7", "12"), ("1:2", "2:1"), ("7:30", "30"),
    ("x^2+1=0", "x^2+1"), ("f''(x)", "f'(x)"), ("\\bar{x}", "x"), ("\\min(a,b)", "\\max(a,b)"), ("(2n)!", "2n!"),
    ("\\lceil x \\rceil", "\\lfloor x \\rfloor"), ("\\mathbb{Z}/2\\mathbb{Z}", "\\mathbb{Z}/3\\mathbb{Z}"),
    ("S_3", "S_4"),
    ("\\sum_{k=0}^n x^k", "\\sum_{k=1}^n x^k"), ("A\\cap B", "A\\cup B"), ("\\frac{x^3}{3}", "\\frac{x^3}{3}+C"),
    ("\\{(2,1)\\}", "\\{(1,2)\\}"), ("y<x", "x<y"), ("x^2+y^2\\le 1", "x^2+y^2=1"), ("\\log_3 2", "\\log_2 3"),
    # unknowns and prose behind a number
    ("5 x", "5"), ("5 ab", "5"), ("5\\text{x}", "5"), ("5 is wrong", "5"), ("5 maybe", "5"), ("x = 4 = 5", "5"),
    # work and approximations inside of tuples and products
    ("(\\sqrt{25},1)", "(5,1)"), ("(\\frac{10}{2},1)", "(5,1)"), ("\\frac{4}{2}\\pi", "2\\pi"),
    ("\\sqrt{16}\\sqrt{2}", "4\\sqrt{2}"), ("(1.41421356237,1)", "(\\sqrt{2},1)"),
    ("1.2", "1,2"), ("1,234", "(1,234)"), ("\\omega", "\\Omega"),
]  # fmt: skip

NOT_READ = [
    ("]2,5[", "(2,5)"), ("(2;5)", "(2,5)"), ("\\{x \\mid 1<x<4\\}", "(1,4)"), ("\\gcd(p-1,n)", "\\gcd(n,p-1)"),
    ("1+f'(x)", "f'(x)+1"), ("\\frac{dy}{dx}+1", "1+\\frac{dy}{dx}"), ("\\exp(2)", "e^2"),
    ("2·10⁻³", "0.002"),
]  # fmt: skip
"""Equal answers that are judged wrong, as docs/rewards.md says: math-verify does not read them, or not reliably."""
