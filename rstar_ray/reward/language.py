"""Detects the language of a text, and splits it into sentences, for the checks of `verifiable`."""

import re
from collections import Counter

_SCRIPTS = {
    "arabic": r"[\u0600-\u06ff]",
    "bengali": r"[\u0980-\u09ff]",
    "cyrillic": r"[\u0400-\u04ff]",
    "devanagari": r"[\u0900-\u097f]",
    "greek": r"[\u0370-\u03ff]",
    "gujarati": r"[\u0a80-\u0aff]",
    "gurmukhi": r"[\u0a00-\u0a7f]",
    "hangul": r"[\u1100-\u11ff\uac00-\ud7af]",
    "hebrew": r"[\u0590-\u05ff]",
    "kana": r"[\u3040-\u30ff]",
    "kannada": r"[\u0c80-\u0cff]",
    "han": r"[\u4e00-\u9fff]",
    "malayalam": r"[\u0d00-\u0d7f]",
    "tamil": r"[\u0b80-\u0bff]",
    "telugu": r"[\u0c00-\u0c7f]",
    "thai": r"[\u0e00-\u0e7f]",
    "latin": r"[A-Za-z\u00c0-\u024f\u1e00-\u1eff]",
}
_SCRIPT_OF = {
    **{"bn": "bengali", "el": "greek", "gu": "gujarati", "pa": "gurmukhi", "ko": "hangul", "he": "hebrew"},
    **{"ja": "kana", "kn": "kannada", "ml": "malayalam", "ta": "tamil", "te": "telugu", "th": "thai", "zh": "han"},
}
"""Languages that are the only one of their script here."""
_FREQUENT = {
    "arabic": {
        "ar": "في من على إلى أن التي الذي هذا هذه كان ما لا عن مع أو هو هي",
        "fa": "است که را در از به این آن با برای می یک و ها شود کرد",
        "ur": "ہے کے کی اور میں کا سے نے کو پر یہ وہ ہیں تھا نہیں ایک",
    },
    "cyrillic": {
        "bg": "и на да се за от е че са по не си като това в с ще или",
        "ru": "и в не на что я с как это он по но из у за то все так его",
        "uk": "і в не на що я з як це він та але із у за до все так його є",
    },
    "devanagari": {
        "hi": "है के में की और का से को हैं पर यह नहीं एक भी ने वह हो था",
        "mr": "आहे आणि या हे तो ते मी की नाही आहेत केले च्या एक मध्ये होते असे त्या आपण",
        "ne": "छ र को मा छन् हो यो पनि गर्न लागि भने हुन्छ तर थियो एक यस गर्नु मेरो",
    },
    "latin": {
        "de": "der die und das ist nicht ein eine zu den mit von sich auf für ich sie es im dem",
        "en": "the of and to in is that it was for on are as with his they be at this have i you a",
        "es": "el la de que y en los se del las por un una con no es para su al lo como",
        "fi": "ja on ei se että hän oli olen ovat mutta kun niin myös tai joka sen mitä voi",
        "fr": "le la les de et des en un une que est pour dans qui pas au du sur je il ne",
        "it": "il di che la e un una per non sono in del con le si i da è della gli",
        "nl": "de het een en van ik niet dat is in op te zijn met voor aan er maar om",
        "pt": "o a de que e do da em um uma para não com os no na por se mais as é",
        "sv": "och att det i en jag som är på inte har med för av den till om var",
        "sw": "na ya wa kwa ni katika za la kuwa hii cha yake watu huo pia kama lakini sana yangu",
        "tr": "bir ve bu da de için çok ile o ne gibi daha ama var ben olan olarak kadar",
        "vi": "và của là có không được trong cho một những các với người này đã để khi tôi",
    },
}
_ABBREVIATED = re.compile(
    r"\b(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|etc|e\.g|i\.e|cf|approx|No|Inc|Ltd|Co|U\.S|U\.K|a\.m|p\.m|[A-Z])\.$"
)

_LONGEST = 12  # no abbreviation is longer


def is_language(text: str, code: str) -> bool:
    """Whether a text is in the language of an ISO 639-1 code; False for an unknown code."""
    script = _script(text)
    if code in _SCRIPT_OF:
        return script == _SCRIPT_OF[code]
    candidates = _FREQUENT.get(script, {})
    if code not in candidates:
        return False
    words = Counter(re.findall(r"[^\W\d_]+(?:[\u0900-\u097f]*)", text.lower()))
    hits = {name: sum(words[word] for word in frequent.split()) for name, frequent in candidates.items()}
    return hits[code] == max(hits.values()) and (hits[code] > 0 or (code == "en" and sum(words.values()) < 8))


def _script(text: str) -> str:
    counts = {name: len(re.findall(letters, text)) for name, letters in _SCRIPTS.items()}
    if counts["kana"] * 4 >= counts["han"] > 0:  # Japanese writes many words in Chinese characters
        counts["kana"] += counts["han"]
    return max(counts, key=lambda name: counts[name]) if any(counts.values()) else ""


def sentences(text: str) -> list[str]:
    """A text's sentences: what ends in a stop, an exclamation or a question mark before a space, or with a line."""
    found: list[str] = []
    for line in re.split(r"\n\s*\n|\n(?=\s*(?:[-*#]|\d+\.))", text):
        start = 0
        for end in re.finditer(r"(?<![.!?。！？।])[.!?。！？।]+[\"'”’)\]]*(?=\s|$)", line):
            if not _ABBREVIATED.search(line[max(start, end.end() - _LONGEST) : end.end()]):
                found.append(line[start : end.end()].strip())
                start = end.end()
        found.append(line[start:].strip())
    return [one for one in found if re.search(r"\w", one)]
