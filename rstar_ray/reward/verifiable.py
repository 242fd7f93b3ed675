"""Instructions that a program can verify, as IFEval asks for them (arXiv:2311.07911, Table 1), by its data's names.

Strictly an answer is taken as it stands; loosely it may also be without its first line, its last, or its asterisks, as
a model may say "Sure:" first, or set words in bold. Sentences and languages are recognised by simple rules, where the
published figures use statistical models; on such instructions single answers may be judged otherwise.

Answers are a policy's, and may be anything: no pattern takes longer than in proportion to their length.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from rstar_ray.reward.language import is_language, sentences

_OPTIONS = ("my answer is yes.", "my answer is no.", "my answer is maybe.")
Check = Callable[[str, Mapping[str, Any]], bool]
"""(answer, parameters of the instruction) to whether it is followed."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """One of a prompt's instructions."""

    name: str  # IFEval's instruction id, such as punctuation:no_comma
    kwargs: Mapping[str, Any]  # its parameters

    def followed_by(self, answer: str) -> bool:
        return bool(answer.strip()) and CHECKS[self.name][0](answer, self.kwargs)


def read_instructions(truth: str) -> list[Instruction]:
    """Instructions of a ground truth: `[{"name": "punctuation:no_comma", "kwargs": {}}, ...]` as JSON.

    Raises ValueError with the reason.
    """
    try:
        written: Any = json.loads(truth)
    except ValueError as error:
        raise ValueError(f"is not JSON ({error})") from None
    if not isinstance(written, list) or not written:
        raise ValueError("holds no list of instructions")
    return [_instruction(row) for row in cast(list[Any], written)]


def _instruction(row: Any) -> Instruction:
    fields = cast(dict[str, Any], row) if isinstance(row, dict) else {}
    name, kwargs = fields.get("name"), fields.get("kwargs", fields.get("asked"))  # the key in files of version 0.2
    if not isinstance(name, str) or name not in CHECKS:
        raise ValueError(f"asks for {name!r}, which nothing here verifies")
    if not isinstance(kwargs, dict | None):
        raise ValueError(f"asks for {name} with kwargs that are no object")
    needed = CHECKS[name][1]
    given = {key: value for key, value in cast(dict[str, Any], kwargs or {}).items() if value is not None}
    for key, kind in needed.items():
        if not isinstance(given.get(key), kind) or isinstance(given[key], bool):
            raise ValueError(f"asks for {name} without {key}")
    return Instruction(name, given)


def share_followed(answer: str, instructions: list[Instruction], *, loosely: bool = False) -> float:
    """The share of instructions that an answer follows; loosely, each in any of the answer's variants."""
    forms = _loose_forms(answer) if loosely else [answer]
    return sum(any(map(one.followed_by, forms)) for one in instructions) / len(instructions)


def _loose_forms(answer: str) -> list[str]:
    """Eight at most: whole, without its first line, its last, both; each also without asterisks (IFEval, 2.2)."""
    lines = answer.split("\n")
    cut = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    return list(dict.fromkeys(form for one in (answer, *cut) for form in (one, one.replace("*", ""))))


def _as_asked(count: int, relation: Any, wanted: int) -> bool:
    return count < wanted if relation == "less than" else count >= wanted


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def _paragraphs(answer: str) -> list[str]:
    """The parts of a text whose paragraphs are separated by three stars; an empty first or last part is dropped."""
    parts = re.split(r"\s?\*\*\*\s?", answer)
    return parts[0 if parts[0].strip() else 1 : len(parts) if parts[-1].strip() else -1]


def _number_paragraphs(answer: str, kwargs: Mapping[str, Any]) -> bool:
    parts = _paragraphs(answer)
    return all(part.strip() for part in parts) and len(parts) == kwargs["num_paragraphs"]


def _nth_paragraph(answer: str, kwargs: Mapping[str, Any]) -> bool:
    parts = [part for part in re.split(r"\n\n", answer) if part.strip()]
    nth = kwargs["nth_paragraph"]
    if len(parts) != kwargs["num_paragraphs"] or not 1 <= nth <= len(parts):
        return False
    first = parts[nth - 1].split()[0].lstrip("\"'“”‘’(").rstrip(".,?!\"'”’):;")
    return first.lower() == kwargs["first_word"].lower()


def _postscript(answer: str, kwargs: Mapping[str, Any]) -> bool:
    marker = kwargs["postscript_marker"].lower()
    pattern = {"p.p.s": r"p\.\s?p\.\s?s", "p.s.": r"p\.\s?s\."}.get(marker) or re.escape(marker)
    return re.search(pattern, answer.lower()) is not None


def _bullets(answer: str, kwargs: Mapping[str, Any]) -> bool:
    return len(re.findall(r"^[^\S\n]*(?:\*(?!\*)|-)\s*\S.*$", answer, re.MULTILINE)) == kwargs["num_bullets"]


def _highlights(answer: str, kwargs: Mapping[str, Any]) -> bool:
    found = re.findall(r"\*\*([^\n*]+)\*\*|\*([^\n*]+)\*", answer)
    return sum(bool((double or single).strip()) for double, single in found) >= kwargs["num_highlights"]


def _sections(answer: str, kwargs: Mapping[str, Any]) -> bool:
    mark = re.escape(kwargs["section_spliter"].strip())
    return len(re.findall(rf"{mark}\s?\d+", answer)) >= kwargs["num_sections"]


def _title(answer: str, kwargs: Mapping[str, Any]) -> bool:
    """A line with `<<`, a word and `>>`, from the first opening to the last closing, as IFEval reads it."""
    for line in answer.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if start >= 0 and start + 2 < end and line[start:end].lstrip("<").rstrip(">").strip():
            return True
    return False


def _json(answer: str, kwargs: Mapping[str, Any]) -> bool:
    text = answer.strip()
    fenced = len(text) >= 6 and text.startswith("```") and text.endswith("```")
    try:
        json.loads(re.sub(r"^[a-zA-Z]*", "", text[3:-3]) if fenced else text)
    except (ValueError, RecursionError):
        return False
    return True


def _two_responses(answer: str, kwargs: Mapping[str, Any]) -> bool:
    parts = [part.strip() for part in answer.split("******")]
    inner = [part for place, part in enumerate(parts) if part or 0 < place < len(parts) - 1]
    return len(inner) == 2 and all(inner) and inner[0] != inner[1]


def _keyword_frequency(answer: str, kwargs: Mapping[str, Any]) -> bool:
    count = len(re.findall(re.escape(kwargs["keyword"].strip()), answer, re.IGNORECASE))
    return _as_asked(count, kwargs.get("relation"), kwargs["frequency"])


def _letter_frequency(answer: str, kwargs: Mapping[str, Any]) -> bool:
    count = answer.lower().count(kwargs["letter"].lower())
    return _as_asked(count, kwargs.get("let_relation"), kwargs["let_frequency"])


def _forbidden(answer: str, kwargs: Mapping[str, Any]) -> bool:
    return not any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", answer, re.I) for word in kwargs["forbidden_words"])


def _capital_words(answer: str, kwargs: Mapping[str, Any]) -> bool:
    count = sum(word.isupper() for word in re.findall(r"[\w'-]+", answer))
    return _as_asked(count, kwargs.get("capital_relation"), kwargs["capital_frequency"])


def _ends(answer: str, kwargs: Mapping[str, Any]) -> bool:
    return answer.strip().strip('"').lower().endswith(kwargs["end_phrase"].strip().lower())


def _repeats(answer: str, kwargs: Mapping[str, Any]) -> bool:
    return answer.strip().lower().startswith(kwargs["prompt_to_repeat"].strip().lower())


CHECKS: dict[str, tuple[Check, dict[str, type]]] = {
    "keywords:existence": (
        lambda answer, kwargs: all(word.lower() in answer.lower() for word in kwargs["keywords"]),
        {"keywords": list},
    ),
    "keywords:frequency": (_keyword_frequency, {"keyword": str, "frequency": int}),
    "keywords:forbidden_words": (_forbidden, {"forbidden_words": list}),
    "keywords:letter_frequency": (_letter_frequency, {"letter": str, "let_frequency": int}),
    "language:response_language": (lambda answer, kwargs: is_language(answer, kwargs["language"]), {"language": str}),
    "length_constraints:number_sentences": (
        lambda answer, kwargs: _as_asked(len(sentences(answer)), kwargs.get("relation"), kwargs["num_sentences"]),
        {"num_sentences": int},
    ),
    "length_constraints:number_paragraphs": (_number_paragraphs, {"num_paragraphs": int}),
    "length_constraints:number_words": (
        lambda answer, kwargs: _as_asked(len(_words(answer)), kwargs.get("relation"), kwargs["num_words"]),
        {"num_words": int},
    ),
    "length_constraints:nth_paragraph_first_word": (
        _nth_paragraph,
        {"num_paragraphs": int, "nth_paragraph": int, "first_word": str},
    ),
    "detectable_content:number_placeholders": (
        lambda answer, kwargs: len(re.findall(r"\[[^\[\]]*\]", answer)) >= kwargs["num_placeholders"],
        {"num_placeholders": int},
    ),
    "detectable_content:postscript": (_postscript, {"postscript_marker": str}),
    "detectable_format:number_bullet_lists": (_bullets, {"num_bullets": int}),
    "detectable_format:constrained_response": (
        lambda answer, _: any(option in answer.lower() for option in _OPTIONS),
        {},
    ),
    "detectable_format:number_highlighted_sections": (_highlights, {"num_highlights": int}),
    "detectable_format:multiple_sections": (_sections, {"section_spliter": str, "num_sections": int}),
    "detectable_format:json_format": (_json, {}),
    "detectable_format:title": (_title, {}),
    "combination:two_responses": (_two_responses, {}),
    "combination:repeat_prompt": (_repeats, {"prompt_to_repeat": str}),
    "startend:end_checker": (_ends, {"end_phrase": str}),
    "startend:quotation": (lambda answer, _: re.fullmatch(r'".+"', answer.strip(), re.DOTALL) is not None, {}),
    "change_case:capital_word_frequency": (_capital_words, {"capital_frequency": int}),
    "change_case:english_capital": (lambda answer, _: answer.isupper() and is_language(answer, "en"), {}),
    "change_case:english_lowercase": (lambda answer, _: answer.islower() and is_language(answer, "en"), {}),
    "punctuation:no_comma": (lambda answer, _: "," not in answer, {}),
}
"""Each check with its required parameters."""
