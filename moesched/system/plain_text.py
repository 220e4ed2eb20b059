"""Text that is safe to print on terminals: control characters are replaced by escapes such as \\x1b."""

from __future__ import annotations

import re
from reprlib import Repr

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 100
_SHORT.maxlist = _SHORT.maxdict = _SHORT.maxtuple = 10

# C0 and C1 controls apart from tab and newline, characters that reverse the writing direction, and lone surrogates.
_ACTIVE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def plain_text(text: str) -> str:
    r"""Return the text with control characters as Python writes them, such as \x1b for the escape character."""
    return _ACTIVE.sub(_escaped, text)


def is_utf8(text: str) -> bool:
    """Test whether a text can be encoded in UTF-8; the text of a path cannot if the path's bytes are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_number(text: str, most_digits: int) -> bool:
    """Test whether a text has only digits 0 to 9, at most `most_digits`; `int` accepts other scripts' digits."""
    return text.isascii() and text.isdecimal() and len(text) <= most_digits


def counted(count: int, what: str) -> str:
    """Return a number of things in words, such as "1 request" or "2 requests"."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def shown(value: object) -> str:
    """Return the `repr` of a value, shortened if the value is long or nested deep."""
    return _SHORT.repr(value)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode()
