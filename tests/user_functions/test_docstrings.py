"""A function counts by what it does: its docstring, and where it stands, are no part of that."""

import itertools

import pytest

from dask_image_ingest.user_functions import token_of

# {0} is to be edited.
WITH_DOCSTRINGS = {
    "plain": "def f(x):\n    '''{0}'''\n    return x + 1",
    "nothing else": "def f(x):\n    '''{0}'''",
    "another constant first": "def f(x):\n    '''{0}'''\n    return 'm' + x",
    "the same constant": "def f(x):\n    '''{0}'''\n    return 'a docstring' + x",
    "many constants": "def f(x):\n    '''{0}'''\n    return ["
    + ", ".join(f"x + {number}.5" for number in range(300))
    + "]",
    "inner function": "def f(x):\n    def g():\n        '''{0}'''\n        return x\n    return g",
    "inner class": "def f(x):\n    class G:\n        '''{0}'''\n        k = 1\n"
    "        def h(self):\n            self.a = self.b = 2\n    return G",
    "method of an inner class": "def f(x):\n    class G:\n        def h(self):\n"
    "            '''{0}'''\n            return 2\n    return G",
    "generator": "def f(x):\n    '''{0}'''\n    yield x",
    "coroutine": "async def f(x):\n    '''{0}'''\n    return x",
}

WITHOUT = {
    "return": "def f(x):\n    return '{0}'",
    "first of two": "def f(x):\n    return '{0}' + x + 'm'",
    "lambda": "f = lambda: '{0}'",
    "comprehension": "def f(x):\n    return ['{0}' + y for y in x]",
    "keyword": "def f(x):\n    return x(k='{0}')",
    "default": "def f(x):\n    def g(x='{0}'):\n        return x\n    return g",
    "the same as the docstring": "def f(x):\n    '''{0}'''\n    return '{0}'",
    "tuple": "def f(x):\n    return x in ('{0}', 'm')",
    "set": "def f(x):\n    return x in {{'{0}', 'm'}}",
    "text with values": "def f(x):\n    return f'{0}{{x}}'",
    "data of an inner class": "def f(x):\n    class G:\n        '''m'''\n        k = '{0}'\n"
    "    return G",
}

TEXTS = ("a docstring", "another", "m", "")


def token(source):
    space = {}
    exec(source, space)
    return token_of(space["f"])


@pytest.mark.parametrize("name", WITH_DOCSTRINGS)
def test_an_edited_docstring_changes_nothing(name):
    source = WITH_DOCSTRINGS[name]
    assert len({token(source.format(text)) for text in TEXTS}) == 1
    assert len({token("\n\n" + source.format(text)) for text in TEXTS}) == 1


def test_a_docstring_that_is_added_or_taken_away_changes_nothing():
    for name in ("plain", "another constant first", "the same constant", "generator", "coroutine"):
        source = WITH_DOCSTRINGS[name]
        without = source.replace("    '''{0}'''\n", "")
        assert without != source
        assert token(without) == token(source.format("a docstring")), name


@pytest.mark.parametrize("name", WITHOUT)
def test_a_text_that_is_used_counts(name):
    for one, other in itertools.combinations(TEXTS, 2):
        assert token(WITHOUT[name].format(one)) != token(WITHOUT[name].format(other)), (one, other)


def test_functions_that_do_something_else_differ():
    sources = [
        text.format("a docstring") for text in [*WITH_DOCSTRINGS.values(), *WITHOUT.values()]
    ]
    sources.remove(WITHOUT["return"].format("a docstring"))  # as that with a docstring
    assert len({token(source) for source in sources}) == len(sources)
