"""Instructions that a program verifies: an answer that follows each, and one that does not."""

import json

import pytest

from rstar_ray.reward.language import is_language, sentences
from rstar_ray.reward.verifiable import CHECKS, read_instructions, share_followed

FOLLOWED = [
    ("keywords:existence", {"keywords": ["Alpha", "beta"]}, "alpha then BETA", "alpha alone"),
    ("keywords:frequency", {"keyword": "go", "frequency": 2, "relation": "at least"}, "Go and go", "go"),
    ("keywords:frequency", {"keyword": "go", "frequency": 2, "relation": "less than"}, "go", "go go"),
    ("keywords:forbidden_words", {"forbidden_words": ["can", "not"]}, "canned knots", "I can."),
    ("keywords:letter_frequency", {"letter": "q", "let_frequency": 2, "let_relation": "at least"}, "Quick q", "quick"),
    ("keywords:letter_frequency", {"letter": "#", "let_frequency": 1, "let_relation": "less than"}, "none", "a #"),
    ("language:response_language", {"language": "de"}, "Das ist nicht der Weg, und ich gehe.", "This is not the way."),
    ("language:response_language", {"language": "hi"}, "यह एक पुस्तक है और मैं पढ़ता हूँ", "हे पुस्तक आहे आणि मी वाचतो"),
    ("language:response_language", {"language": "kn"}, "ಇದು ಒಂದು ಪುಸ್ತಕ", "ఇది ఒక పుస్తకం"),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        "Dr. No said 3.5 is enough. Is it?",
        "Dr. No said 3.5 is enough",
    ),
    ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "less than"}, "One.", "One. Two."),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "one\n***\ntwo\n***\n", "one\n***\n\n***\ntwo"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, "one two three", "one two"),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "one two", "one two three"),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "weekend"},
        "One.\n\n“Weekend, at last.”",
        "Weekend.\n\nAt last.",
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, "[name] at [place]", "[name]"),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, "Bye.\nP. S. more", "Bye. PS more"),
    ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "Bye.\nP.P.S more", "P.S. more"),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* one\n- two", "* one\n* two\n* three"),
    ("detectable_format:constrained_response", {}, "Well. My answer is maybe.", "Maybe."),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* and **b c**", "*a* and ** **"),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "SECTION", "num_sections": 2},
        "SECTION 1\na\nSECTION 2\nb",
        "SECTION 1\nonly",
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{a: 1}"),
    ("detectable_format:title", {}, "<<Of joy>>\nText", "<< >>\nText"),
    ("combination:two_responses", {}, "one\n******\ntwo", "one\n******\none"),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Write a poem."}, "write a poem.\nRoses", "Roses"),
    ("startend:end_checker", {"end_phrase": "Is that all?"}, 'So. Is that all?"', "Is that all? Yes."),
    ("startend:quotation", {}, '"All of it."', '"Half" of it.'),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "NOW and HERE",
        "NOW and here",
    ),
    ("change_case:english_capital", {}, "THIS IS THE END OF IT.", "This IS THE END."),
    ("change_case:english_lowercase", {}, "this is the end of it.", "das ist der und nicht die."),
    ("punctuation:no_comma", {}, "one and two", "one, two"),
]


@pytest.mark.parametrize(("name", "asked", "follows", "does_not"), FOLLOWED)
def test_an_instruction_is_verified(name: str, asked: dict, follows: str, does_not: str):
    one = read_instructions(json.dumps([{"name": name, "kwargs": asked}]))
    assert share_followed(follows, one) == 1.0
    assert share_followed(does_not, one) == 0.0
    assert share_followed("  ", one) == 0.0  # nothing said follows nothing


def test_the_key_of_version_0_2_is_read_too():
    truth = '[{"name": "length_constraints:number_words", "%s": {"num_words": 3}}]'
    assert read_instructions(truth % "asked") == read_instructions(truth % "kwargs")


def test_every_check_is_tried():
    assert {name for name, *_ in FOLLOWED} == set(CHECKS)


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("[", "is not JSON"),
        ("[]", "holds no list of instructions"),
        ('{"name": "punctuation:no_comma"}', "holds no list of instructions"),
        ('[{"name": "be:nice"}]', "asks for 'be:nice', which nothing here verifies"),
        ('[{"name": "length_constraints:number_words", "kwargs": {"num_words": null}}]', "without num_words"),
        ('[{"name": "keywords:existence", "kwargs": {"keywords": "one"}}]', "without keywords"),
        ('[{"name": "keywords:existence", "kwargs": ["one"]}]', "kwargs that are no object"),
    ],
)
def test_a_truth_that_says_nothing_verifiable_is_refused(truth: str, message: str):
    with pytest.raises(ValueError, match=message):
        read_instructions(truth)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("en", "The cat is on the table and it was not there before."),
        ("fr", "Le chat est sur la table et il ne veut pas descendre."),
        ("es", "El gato no es para los que no lo quieren con su vida."),
        ("pt", "O gato não está em uma mesa, mas com os outros."),
        ("it", "Il gatto non è sulla tavola, ma si trova con gli altri."),
        ("fi", "Kissa on pöydällä ja se ei ole iloinen, mutta hän voi hyvin."),
        ("vi", "Con mèo này không phải là của tôi và nó đã ngủ."),
        ("sw", "Paka ni mnyama wa nyumbani na watu wengi wanampenda sana kwa sababu ya uzuri wake."),
        ("ru", "Кот не на столе, и он это знает."),
        ("bg", "Котката не е на масата, но тя ще се върне и да."),
        ("fa", "این کتاب را برای شما آورده است و با آن"),
        ("ur", "یہ کتاب میز پر ہے اور میں پڑھتا ہوں"),
        ("ar", "هذا الكتاب على الطاولة في البيت"),
        ("mr", "हे पुस्तक आहे आणि मी ते वाचतो"),
        ("ne", "यो पुस्तक मेरो हो र म पढ्छु"),
        *(
            ("th", "แมวอยู่บนโต๊ะ"),
            ("ko", "고양이가 책상 위에 있다"),
            ("bn", "বিড়াল টেবিলে আছে"),
            ("gu", "બિલાડી ટેબલ પર છે"),
        ),
        *(("ta", "பூனை மேசையில் உள்ளது"), ("te", "పిల్లి బల్ల మీద ఉంది"), ("pa", "ਬਿੱਲੀ ਮੇਜ਼ ਤੇ ਹੈ")),
        *(("ja", "猫は机の上にいます"), ("zh", "猫在桌子上")),
    ],
)
def test_a_language_is_distinguished_from_the_others(code: str, text: str):
    assert is_language(text, code)
    assert not any(is_language(text, other) for other in ("en", "de", "hi", "ru", "ar", "ko") if other != code)
    assert not is_language(text, "xx")


def test_sentences_end_where_they_end():
    assert sentences('Mr. A went home. "Why?" he said.\n- one\n- two') == [
        "Mr. A went home.",
        '"Why?"',
        "he said.",
        "- one",
        "- two",
    ]


@pytest.mark.parametrize(
    ("names", "answer", "strict", "loose"),
    [
        (["punctuation:no_comma"], "Sure, here it is:\nAll well.", 0.0, 1.0),
        (["startend:quotation"], 'Of course!\n"All of it."\nAnything else?', 0.0, 1.0),
        (["detectable_format:json_format"], "**{}**", 0.0, 1.0),
        (["punctuation:no_comma"], "one, two\nthree, four\nfive, six", 0.0, 0.0),
        (["punctuation:no_comma", "startend:quotation"], 'Sure, gladly:\n"Yes."', 0.0, 1.0),
        (["punctuation:no_comma", "startend:quotation"], '"Yes"', 1.0, 1.0),
        (["punctuation:no_comma"], "", 0.0, 0.0),
    ],
)
def test_an_answer_is_also_taken_loosely(names: list[str], answer: str, strict: float, loose: float):
    asked = read_instructions(json.dumps([{"name": name, "kwargs": {}} for name in names]))
    assert share_followed(answer, asked) == strict
    assert share_followed(answer, asked, loosely=True) == loose
