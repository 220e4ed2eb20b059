"""Eviction rules, which choose the page that a pool evicts to make room, and a class that calls and checks a rule."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from traceback import extract_tb
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable
from weakref import WeakValueDictionary

from moesched.errors import PolicyError
from moesched.models.layout import Page
from moesched.steps.model_pages import describe


@runtime_checkable
class Eviction(Protocol):
    """Chooses the page that a pool evicts to make room for another page; an argument of `Plan.pool`.

    An object serves one pool in one run. If `Plan.pool` is given a class, each pool makes an object of its own. The
    methods are called in program order, while the policy submits tasks. They get no times, so that the same pages are
    evicted on every machine.
    """

    def used(self, page: Page, step: int, tokens: int) -> None:
        """Note that a task of the step `step` reads the page, or that the page comes to the pool.

        tokens: number of the task's rows; 0 if the page comes to the pool, or is copied to another pool. Pages that are
            in the pool before the first step come in step -1.
        """

    def choose(self, pages: Mapping[int, Page]) -> Page:
        """Return the page to evict, one of `pages`.

        pages: the pool's pages, at least one, in the order of their arrival; the keys are `Page.id`. Pages of the fetch
            that needs the room are left out.
        """


_taken: WeakValueDictionary[int, Eviction] = WeakValueDictionary()
"""The eviction rules that belong to a cache already, by Python's `id` of the rule."""


class RuledPages:
    """The pages of a cache (a pool, for example) that may be evicted, in order of arrival, and the rule that chooses.

    Args:
        rule: an `Eviction` object that no other cache has, or a class of such objects.
        cache: the cache's name in messages.
        room: number of pages that the cache may hold.

    Attributes:
        rule: the `Eviction` object.
        room: number of pages that the cache may hold.
        held: the pages by `Page.id`.

    Raises:
        PolicyError: `rule` is no eviction rule, or belongs to another cache.
    """

    def __init__(self, rule: object, cache: str, room: int) -> None:
        self.rule = _taken_by(cache, rule)
        self._cache = cache
        self.room = room
        self.held: dict[int, Page] = {}
        self._shown = MappingProxyType(self.held)

    def leave(self, page: Page) -> None:
        """Remove a page that the policy drops, without asking the rule."""
        del self.held[page.id]

    def enter(self, page: Page, step: int) -> None:
        """Add a page that comes to the cache in the step `step`, and tell the rule."""
        self.held[page.id] = page
        try:
            self.rule.used(page, step, 0)
        except Exception as error:
            raise self._failed("used", [page], error) from error

    def use(self, page: Page, step: int, tokens: int) -> None:
        """Tell the rule that a task of the step `step` reads a page for `tokens` rows."""
        try:
            self.rule.used(page, step, tokens)
        except Exception as error:
            raise self._failed("used", [page], error) from error

    def use_all(self, pages: Sequence[Page], tokens: Mapping[int, int], step: int) -> None:
        """Tell the rule about each page that a task of the step `step` reads, in the order of `pages`.

        Args:
            pages: the pages that the task reads, and possibly others.
            tokens: the number of the task's rows for each page that it reads, by the page's index in `pages`.
        """
        used, index = self.rule.used, -1
        try:
            for index in sorted(tokens):
                used(pages[index], step, tokens[index])
        except Exception as error:
            raise self._failed("used", [pages[index]], error) from error

    def next_to_go(self, incoming: Sequence[Page] = ()) -> Page:
        """Ask the rule which page to evict, and return that page.

        incoming: pages that need the room, for messages.

        Raises:
            PolicyError: the rule failed, or named a page that is not in the cache.
        """
        try:
            named: object = self.rule.choose(self._shown)
        except Exception as error:
            raise self._failed("choose", incoming, error) from error
        if isinstance(named, Page):
            held = self.held.get(named.id)
            if held is not None and (held is named or held == named):
                return held
            comes = any(page.id == named.id for page in incoming)
            why = "which comes with this very fetch" if comes else f"which is not in {self._cache}"
            what = f"page {describe(named)}, {why}"
        else:
            what = f"{named!r}, which is no page"
        raise PolicyError(
            f"{self._cache}: eviction rule {_name(self.rule)} named {what}{_for(incoming)}: return one of the pages "
            f"that it is given ({_line(self.rule.choose)})"
        )

    def _failed(self, call: str, about: Sequence[Page], error: Exception) -> PolicyError:
        """Return the error for an exception that the rule raised.

        Args:
            call: the rule's method: "used" or "choose".
            about: pages that the call was about; the message names the first one.
            error: the exception.
        """
        method = self.rule.used if call == "used" else self.rule.choose
        return PolicyError(
            f"{self._cache}: eviction rule {_name(self.rule)} failed in `{call}`{_for(about)} at "
            f"{_line(method, error)}: {type(error).__name__}: {' '.join(str(error).split())}"
        )


def _for(pages: Sequence[Page]) -> str:
    """Return the first of `pages` in words for a message, such as " for page ..."; empty without pages."""
    return f" for page {describe(pages[0])}" if pages else ""


def _taken_by(cache: str, given: object) -> Eviction:
    """Give an eviction rule to a cache, so that no other cache can use it; return the rule.

    Args:
        cache: the cache's name in messages.
        given: an eviction rule, or a class of rules, of which an object is made.

    Raises:
        PolicyError: `given` is no eviction rule, belongs to another cache, or is a class whose constructor needs
            arguments.
    """
    rule = _made(cache, given) if isinstance(given, type) else given
    if not isinstance(rule, Eviction):
        raise PolicyError(
            f"{cache}: {rule!r} is no rule of replacement: give 'ring', 'lru', 'none', or a class or object with the "
            "methods `used` and `choose` (moesched.seams.Eviction)"
        )
    if _taken.get(id(rule)) is rule:
        raise PolicyError(
            f"{cache}: eviction rule {_name(rule)} orders another cache, of this run or an earlier one: make a new "
            "object for each, in `plan`, or give the class"
        )
    try:
        _taken[id(rule)] = rule
    except TypeError:
        raise PolicyError(
            f"{cache}: runs cannot tell eviction rules of class {_name(rule)} apart: add '__weakref__' to its slots"
        ) from None
    return rule


def _made(cache: str, rule: type) -> object:
    try:
        return rule()
    except Exception as error:
        raise PolicyError(
            f"{cache}: eviction rule {rule.__name__} cannot be made ({type(error).__name__}: {error}): give an object"
        ) from error


def _name(rule: Eviction) -> str:
    return type(rule).__name__


def _line(method: Callable[..., Any], error: Exception | None = None) -> str:
    """Return the line of a rule's file that raised an error, as "file:line"; with no error, the method's first line."""
    function = inspect.unwrap(method.__func__ if inspect.ismethod(method) else method)
    file = function.__code__.co_filename if inspect.isfunction(function) else ""
    frames = [] if error is None else extract_tb(error.__traceback__)[1:]
    own = [frame for frame in frames if frame.filename == file] or frames
    if own:
        return f"{own[-1].filename}:{own[-1].lineno}"
    return f"{file}:{function.__code__.co_firstlineno}" if inspect.isfunction(function) else "its class"
