r"""The rules by which byte-level BPE tokenizers split text before merging, by family of models.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`), but does not contain its rules. The rules here are those of
the original models' `tokenizer.json` files. The names, and their other properties (whole words are looked up before
merging, a prompt begins with BOS), are llama.cpp's, whose converter writes them. llama.cpp only approximates some
rules, because its regular expressions lack `\p{Lu}` and `++`; here, the original rules are used.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GPT2", "PRE_TOKENIZERS", "Scheme", "Step"]

Step = dict[str, object]  # one object of a tokenizer's JSON


@dataclass(frozen=True, slots=True)
class Scheme:
    """How text is converted to tokens and back, without the vocabulary."""

    normalizer: Step | None
    pre_tokenizer: Step | None
    decoder: Step
    ignore_merges: bool = False  # a word that is in the vocabulary is not split
    byte_fallback: bool = False  # a character without a token is encoded as bytes
    add_bos: bool = False  # default if the file has no setting
    always_bos: bool = False  # overrides the file's setting


def _split(regex: str) -> Step:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _bytes(*, use_regex: bool) -> Step:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


_BYTES = _bytes(use_regex=False)
_WORDS = _bytes(use_regex=True)  # GPT-2's
_DIGITS: Step = {"type": "Digits", "individual_digits": True}
_NFC: Step = {"type": "NFC"}


_DECODER: Step = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}


def _scheme(*steps: Step, normalizer: Step | None = None, ignore_merges: bool = False, add_bos: bool = False) -> Scheme:
    """Split text with these steps, one after the other, before bytes are merged."""
    pre_tokenizer: Step = {"type": "Sequence", "pretokenizers": list(steps)}
    return Scheme(normalizer, pre_tokenizer, _DECODER, ignore_merges=ignore_merges, add_bos=add_bos)


def _cut(*regexes: str, normalizer: Step | None = None, ignore_merges: bool = False, add_bos: bool = False) -> Scheme:
    steps = map(_split, regexes)
    return _scheme(*steps, _BYTES, normalizer=normalizer, ignore_merges=ignore_merges, add_bos=add_bos)


_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+"
_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_DIGIT, _TRIPLET = r"\p{N}", r"\p{N}{1,3}"


def _gpt4(numbers: str) -> str:
    return rf"{_CONTRACTION}|{_LETTERS}|{numbers}|{_SIGNS}[\r\n]*|{_BLANKS}"


def _gpt4o(numbers: str, end: str = f"{_CONTRACTION}?", but: str = "", first: str = "", tail: str = "/") -> str:
    """Split words where lower case changes to upper case. `but` excludes characters from words."""
    upper = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lower = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{upper}*{lower}+{end}|{lead}{upper}+{lower}*{end}"
    return rf"{first}{words}|{numbers}|{_SIGNS}[\r\n{tail}]*|{_BLANKS}"


# DeepSeek.
_CJK = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+"
_KANJI_KANA = r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+"
_CASED = (  # letters with upper and lower case, except some alphabets
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\u0560-\u0588\u10C7-\u10FF\u1C80-\u1C8F\u2D00-\u2D2D\uA790-\uA7FA\uAB30-\uAB6F"
    r"\x{10570}-\x{105BC}\x{10D50}-\x{10D85}\x{16E40}-\x{16EFF}\x{1D400}-\x{1D7CB}\x{1DF00}-\x{1DFFF}]]+"
)
_PUNCTUATION = r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+"
_ASCII_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_MARKED_WORD = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_DEEPSEEK3 = rf"{_ASCII_WORD}|{_MARKED_WORD}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}"

_BLOOM = r" ?[^(\s|.,!?\u2026\u3002\uFF0C\u3001\u0964\u06D4\u060C)]+"
_LONG_BLANKS = "|".join(rf"\s{{{length}}}(?!\S)" for length in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))

GPT2 = _scheme(_WORDS)
_GPT_NEOX = _scheme(_WORDS, normalizer=_NFC)
_STARCODER = _scheme(_DIGITS, _WORDS)

_FAMILIES = {
    "default gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 jais trillion granite-docling": GPT2,
    "mpt olmo": _GPT_NEOX,
    "smollm starcoder refact codeshell exaone minerva-7b mellum2": _STARCODER,
    "command-r": _scheme(_DIGITS, _WORDS, normalizer=_NFC),
    "falcon": _scheme(
        {"type": "Punctuation", "behavior": "Contiguous"},
        _WORDS,
        {"type": "Digits", "individual_digits": False},
        _split("[0-9][0-9][0-9]"),
    ),
    "llama-bpe llama-v3 llama3 falcon3 falcon-h1 pixtral midm-2.0 lfm2": _cut(
        _gpt4(_TRIPLET), ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": _cut(_gpt4(_TRIPLET)),
    "minicpm5": _cut(_TRIPLET, _gpt4(r"\p{N}+"), ignore_merges=True),
    "jais-2": _cut(_gpt4(_TRIPLET).replace(r"\s+(?!\S)|\s+", rf"{_LONG_BLANKS}|\s")),
    "qwen2": _cut(_gpt4(_DIGIT), normalizer=_NFC),
    "deepseek-r1-qwen stablelm2 hunyuan solar-open megrez kormo grok-2": _cut(_gpt4(_DIGIT)),
    "laguna": _cut(r"[^\n]+|\n+", _gpt4(_DIGIT)),
    "qwen35": _cut(
        rf"{_CONTRACTION}|{_MARKED}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}", normalizer=_NFC
    ),
    "seed-coder": _cut(rf"{_CONTRACTION}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}"),
    "exaone-moe": _cut(
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|{_SIGNS}[\r\n/]?"
        r"|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    "bailingmoe bailingmoe2 llada-moe": _cut(
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _cut(_gpt4o(_TRIPLET)),
    "tekken": _cut(_gpt4o(_DIGIT, end=""), ignore_merges=True, add_bos=True),
    "kimi-k2": _cut(_gpt4o(_TRIPLET, but=r"&&[^\p{Han}]", first=r"\p{Han}+|", tail="")),
    "tiny_aya cohere2moe": _cut(r"\d{1,3}(?=(?:\d{3})*\b)", _gpt4o(_TRIPLET)),
    "deepseek-llm": _scheme(*map(_split, (r"[\r\n]", rf"\s?{_CASED}", _PUNCTUATION, r"\s+$", _CJK)), _DIGITS, _BYTES),
    "deepseek-coder": _scheme(*map(_split, (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK)), _DIGITS, _BYTES),
    "deepseek-v3 hunyuan-dense joyai-llm": _cut(_TRIPLET, _KANJI_KANA, _DEEPSEEK3),
    "bloom gpt3-finnish poro-chat": _cut(_BLOOM),
    "viking": _scheme(_split(_BLOOM), _DIGITS, _BYTES),
    "superbpe": _cut(r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
}

PRE_TOKENIZERS = {name: family for names, family in _FAMILIES.items() for name in names.split()}
