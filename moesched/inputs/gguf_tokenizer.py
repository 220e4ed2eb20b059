"""Makes tokenizers from the vocabulary of a GGUF file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from moesched.errors import BadInput
from moesched.models.gguf.vocabulary import PREFIX, TokenType, Vocabulary
from moesched.models.headers import RESTORE
from moesched.system.near_names import with_nearest
from moesched.system.plain_text import shown

if TYPE_CHECKING:
    import tokenizers

SPACE = "▁"
"""The character for a space in SentencePiece."""
LONGEST_PIECE = 128
"""Largest number of characters of a token of SentencePiece, since each place where it can be cut is tried."""


class WordRule(NamedTuple):
    """Rule by which a byte-pair tokenizer cuts text into words; merges never join bytes of two words.

    Attributes:
        patterns: regular expressions that match words, used one after the other: each divides further all pieces that
            the previous ones made.
        composes: whether letters and their accents are first joined to one character (Unicode's NFC).
        whole_words: whether a word that is itself a token becomes that token, without regard to the merges.
        has_first: whether encoded texts begin with the vocabulary's begin-of-text token; used only for files without
            the key `add_bos_token`.
    """

    patterns: tuple[str, ...]
    composes: bool = False
    whole_words: bool = False
    has_first: bool = False


_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace("{1,3}", "")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDED}|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDED}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGIT = r"\p{N}"

WORD_RULES: Mapping[str, WordRule] = MappingProxyType(
    {
        "gpt-2": WordRule((_GPT_2,)),
        "mpt": WordRule((_GPT_2,), composes=True),
        "olmo": WordRule((_GPT_2,), composes=True),
        "command-r": WordRule((_DIGIT, _GPT_2)),
        "refact": WordRule((_DIGIT, _GPT_2)),
        "starcoder": WordRule((_DIGIT, _GPT_2)),
        "llama-bpe": WordRule((_LLAMA_3,), whole_words=True, has_first=True),
        "dbrx": WordRule((_LLAMA_3,)),
        "glm4": WordRule((_LLAMA_3,)),
        "gpt-4o": WordRule((_O200K,)),
        "minimax-m2": WordRule((_O200K,)),
        "qwen2": WordRule((_QWEN_2,), composes=True),
    }
)
"""Rules for words by their name, which GGUF files state as `tokenizer.ggml.pre`."""

BYTE_PAIRS, SENTENCE_PIECE = "gpt2", "llama"
"""Names of kinds of tokenizers in files, `tokenizer.ggml.model`."""


def gguf_tokenizer(path: Path, vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Make the tokenizer of a GGUF file's vocabulary.

    Args:
        path: file of the vocabulary, for messages.

    Raises:
        BadInput: the kind of tokenizer or the rule for words is unknown, a token is listed twice, or a merge joins
            tokens that the vocabulary does not have.
    """
    makers = {BYTE_PAIRS: _byte_pairs, SENTENCE_PIECE: _sentence_piece}
    if vocabulary.model not in makers:
        raise _unknown(path, "model", vocabulary.model, makers)
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    if len(ids) < len(vocabulary.tokens):
        twice = next(token for number, token in enumerate(vocabulary.tokens) if ids[token] != number)
        raise BadInput(f"{path}: {PREFIX}tokens has {shown(twice)} twice; {RESTORE}")
    made = makers[vocabulary.model](path, vocabulary, ids)
    _add_tokens(made, vocabulary)
    _add_ends(made, vocabulary)
    return made


def _unknown(path: Path, key: str, name: str | None, known: Mapping[str, object]) -> BadInput:
    remedy = with_nearest(
        str(name), known, f"give ids, with --prompt-ids, or a file with one of {', '.join(known)}"
    )
    return BadInput(f"{path}: {PREFIX}{key} is {shown(name)}, which is not supported: {remedy}")


# ---------------------------------------------------------------- kinds


def _byte_pairs(path: Path, vocabulary: Vocabulary, ids: dict[str, int]) -> tokenizers.Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    rule = WORD_RULES.get(vocabulary.pre or "")
    if rule is None:
        raise _unknown(path, "pre", vocabulary.pre, WORD_RULES)
    merges = [_pair(path, merge, ids) for merge in vocabulary.merges]
    made = Tokenizer(models.BPE(ids, merges, ignore_merges=rule.whole_words))
    if rule.composes:
        made.normalizer = normalizers.NFC()
    words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*words, in_bytes])
    made.decoder = decoders.ByteLevel()
    return made


def _pair(path: Path, merge: str, ids: Mapping[str, int]) -> tuple[str, str]:
    """Split the text of a merge at the space between its two tokens; the first token may itself begin with a space.

    Args:
        ids: ids by token of the vocabulary, which must have both tokens and the token that they make.
    """
    first, _, second = merge[1:].partition(" ")
    first = merge[:1] + first
    if not (first in ids and second in ids and first + second in ids):
        raise BadInput(
            f"{path}: {PREFIX}merges has {shown(merge)}, which is not of tokens of the vocabulary; {RESTORE}"
        )
    return first, second


def _sentence_piece(path: Path, vocabulary: Vocabulary, ids: dict[str, int]) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    if not vocabulary.scores:
        raise BadInput(
            f"{path}: {PREFIX}scores is missing, which the tokenizer {SENTENCE_PIECE} needs; {RESTORE}"
        )
    longest = max(vocabulary.tokens, key=len)
    if len(longest) > LONGEST_PIECE:
        raise BadInput(
            f"{path}: {PREFIX}tokens has {shown(longest)}, of {len(longest):,} characters, and no real vocabulary of "
            f"SentencePiece has one of more than {LONGEST_PIECE}; {RESTORE}"
        )
    unknown = vocabulary.unknown_token_id
    made = Tokenizer(
        models.BPE(
            ids,
            list(_scored_pairs(vocabulary, ids)),
            unk_token=None if unknown is None else vocabulary.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    begins = vocabulary.add_space_prefix
    made.normalizer = normalizers.Sequence(
        [*([normalizers.Prepend(SPACE)] if begins else []), normalizers.Replace(" ", SPACE)]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if begins else []),
        ]
    )
    return made


def _scored_pairs(vocabulary: Vocabulary, ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield every pair of tokens that make a token when joined, in order of the made token's score, highest first."""
    by_score = sorted(range(len(vocabulary.tokens)), key=vocabulary.scores.__getitem__, reverse=True)
    for number in by_score:
        token = vocabulary.tokens[number]
        if vocabulary.has_type(number, TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE):
            continue
        for cut in range(1, len(token)):
            if token[:cut] in ids and token[cut:] in ids:
                yield token[:cut], token[cut:]


# ---------------------------------------------------------------- special tokens


def _add_tokens(made: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """Register the vocabulary's special tokens, which are never divided, in the tokenizer `made`.

    Decoded text omits control and unknown tokens.
    """
    from tokenizers import AddedToken

    def of(*types: TokenType) -> list[str]:
        return [
            token for number, token in enumerate(vocabulary.tokens) if vocabulary.has_type(number, *types)
        ]

    made.add_special_tokens(
        [AddedToken(each, normalized=False) for each in of(TokenType.CONTROL, TokenType.UNKNOWN)]
    )
    made.add_tokens([AddedToken(each, normalized=False) for each in of(TokenType.USER_DEFINED)])


def _add_ends(made: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """Set the tokenizer `made` to put the begin and end tokens that the model expects around a text."""
    from tokenizers import processors

    begins = vocabulary.add_bos_token
    if begins is None:
        begins = vocabulary.model == SENTENCE_PIECE or WORD_RULES[vocabulary.pre or ""].has_first
    first = vocabulary.bos_token_id if begins else None
    last = vocabulary.eos_token_id if vocabulary.add_eos_token else None
    ends = {name: token for name, token in (("first", first), ("last", last)) if token is not None}
    if ends:
        made.post_processor = processors.TemplateProcessing(
            single=[*(["first"] if "first" in ends else []), "$A", *(["last"] if "last" in ends else [])],
            special_tokens=[
                {"id": name, "ids": [token], "tokens": [vocabulary.tokens[token]]}
                for name, token in ends.items()
            ],
        )
