"""Finds the answer in a completion. Only the policy's final turn is read, never tool output."""

import re

from rstar_ray.config.own_code import Place

_OPENS, _CLOSES = "<answer>", "</answer>"
_THOUGHT_ENDS = re.compile(r"</(?:think|reason|reasoning|thought)>")
_THOUGHT_BEGINS = re.compile(r"<(?:think|reason|reasoning|thought)>")
_DECLARED = re.compile(r"(?:final answer|answer)\s*(?:is|:|=)[ \t:]*\**[ \t]*([^\n]+)", re.IGNORECASE)
_FENCE = "```"
_FENCE_HEAD = re.compile(r"[ \t]*+[\w+#-]*+[ \t]*+\n")
_BOX = r"\\boxed\s*\{"
_BRACES = re.compile(rf"(?P<box>{_BOX})|\\\\(?!boxed)|\\[{{}}]|(?P<opens>\{{)|(?P<closes>\}})")
"""Boxes and braces. An escaped brace is literal text; after two backslashes (a line break) it is a group."""
_INTEGER = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+|[+-]?\d+")


def count_answers(completion: str, place: Place) -> int:
    """Number of answers written in that place, for the format penalty (arXiv:2508.20722 Eq. 5)."""
    if place == "answer":
        return completion.count("<answer>")
    said = spoken(completion)
    boxed = len(re.findall(_BOX, said))
    if boxed or place == "boxed":
        return boxed
    return len(_tagged(said)) or len(_DECLARED.findall(said))


def find_answer(completion: str, place: Place) -> str | None:
    """The answer as written, or None where that place has no answer."""
    if place == "answer":
        return boxed_answer(completion)
    said = spoken(completion)
    boxed = last_boxed(said)
    if boxed is not None or place == "boxed":
        return boxed
    tagged = last_tagged(said)
    if tagged is not None:
        return tagged.strip()
    declared = _DECLARED.findall(said)
    return declared[-1].strip().rstrip(".*").strip() if declared else None


def spoken(completion: str) -> str:
    """The text after the thought; empty where the thought never ends."""
    ends = [found.end() for found in _THOUGHT_ENDS.finditer(completion)]
    if ends:
        return completion[ends[-1] :]
    return "" if _THOUGHT_BEGINS.search(completion) else completion


def last_tagged(text: str) -> str | None:
    """The content of the last closed `<answer>`; None without one."""
    tagged = _tagged(text)
    return tagged[-1] if tagged else None


def _tagged(text: str) -> list[str]:
    """The content of each closed `<answer>`."""
    found, position = list[str](), 0
    while (start := text.find(_OPENS, position)) >= 0:
        start += len(_OPENS)
        end = text.find(_CLOSES, start)
        if end < 0:
            break
        found.append(text[start:end])
        position = end + len(_CLOSES)
    return found


def boxed_answer(completion: str) -> str | None:
    r"""What stands in the last `\boxed{}` inside the last closed `<answer>` of a completion; None without one."""
    answer = last_tagged(completion)
    return None if answer is None else last_boxed(answer)


def last_boxed(text: str) -> str | None:
    r"""The content of the last closed `\boxed{}`, the innermost of nested boxes; None without one."""
    opened: list[int] = []  # where the content of each open box begins; 0 for another brace
    begin = end = 0
    for found in _BRACES.finditer(text):
        if found["box"] or found["opens"]:
            opened.append(found.end() if found["box"] else 0)
        elif found["closes"] and opened and (inside := opened.pop()) > begin:
            begin, end = inside, found.start()
    return text[begin:end].strip() if begin else None


def last_program(completion: str) -> str | None:
    """The program in the last fenced block, else the content of the last `<answer>`; None without either."""
    said = spoken(completion)
    program = _last_fenced(said)
    if program is not None:
        return program
    tagged = last_tagged(said)
    return tagged.strip() or None if tagged is not None else None


def _last_fenced(text: str) -> str | None:
    """The content of the last closed fenced block; None without one."""
    found, position = None, 0
    while (start := text.find(_FENCE, position)) >= 0:
        head = _FENCE_HEAD.match(text, start + len(_FENCE))
        if head is None:
            position = start + 1
            continue
        end = text.find(_FENCE, head.end())
        if end < 0:
            break
        found, position = (head.end(), end), end + len(_FENCE)
    return text[slice(*found)] if found else None


def as_integer(text: str) -> int | None:
    """The integer that a text spells (sign and thousands commas allowed), or None. The length is bounded,
    because a model wrote it.
    """
    text = text.strip()
    if len(text) > 400 or not _INTEGER.fullmatch(text) or not text.isascii():
        return None
    return int(text.replace(",", ""))


_LETTER = re.compile(r"\(?\s*([A-Za-z])\s*(?:$|[).:,]|\s-)")
_ANOTHER = re.compile(r"\s*\)?\s*,\s*\(?\s*[A-Za-z]\s*\)?\s*(?:\.?\s*$|,|and\b|or\b|&)")  # in a list of letters


def chosen_letter(answer: str) -> str | None:
    """The letter that an answer names, as a capital; None where it names none, or several."""
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1", answer.strip().strip("$*")).strip()
    found = _LETTER.match(text)
    return found[1].upper() if found and not _ANOTHER.match(text, found.end(1)) else None
