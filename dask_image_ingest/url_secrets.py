"""Passwords and signatures in URLs: mask them in errors, logs and reprs; tell files apart without.

A query parameter is part of a signature by its name: those of AWS, Google, Azure, Alibaba, Tencent,
CloudFront, Akamai and the usual names of tokens, or the names in Dask's configuration.

Texts become storable, too: Arrow, JSON and pages are UTF-8, which has no lone surrogates. Python's
strings may have them, in names of files that are not UTF-8, and in answers of models.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from dataclasses import fields
from typing import Any
from urllib.parse import unquote

import dask

#: Setting with the names of the parameters that sign a URL; None or "auto" for the known ones.
SIGNATURE = "image-ingest.remote.signature"

_MAY_HAVE_SECRETS = re.compile(r"[@?#]")
# Between the user's name and the host; the password itself may contain an @.
_PASSWORD = re.compile(r"(\w[\w.+-]*://[^/?#\s:@]*:)[^/?#\s]+@")
# The links of a chain; an IPv6 address may have two colons, too.
_CHAIN = re.compile(r"::(?=[\w+.-]+(?:::|://)|/)")
_QUERY = re.compile(r"\?([^\s\"<>\\#]+)")
_PUNCTUATION = ".,:;!?)]}'`"  # what may follow a URL in a text
# Some servers separate parameters by semicolons; the value of another one may contain them.
_SEPARATOR = re.compile(r"([&;](?=[\w.%*-]+=[^=])|&)")

# Names that are secret by themselves, in lower case.
_SECRET = re.compile(
    r"x-[a-z]+-(algorithm|content-sha256|credential|date|expires|signed-?headers|security-token"
    r"|signature(-version)?|additional-headers)"  # AWS, Google, Alibaba and others
    r"|.*(signature|token|secret|password|passwd|credentials?|authorization|hmac|jwt"
    r"|(api|auth|access)[-_]?key|access[-_]?key[-_]?id|googleaccessid)"
    r"|sig|auth|pwd|verify|key-pair-id|q-(ak|key-time|sign-.*)|hdn[a-z]+|__gda__"
)
# Names that are part of a signature beside a secret one; those of an Azure SAS beside ``sig``.
_BESIDE = re.compile(
    r"expires?|expiry|exp|e|policy|nonce|timestamp|ts|md5|keyname|urlprefix|token_(path|ver)"
    r"|q-(header|url-param)-list"
)
_AZURE = re.compile(r"s[vsrpetio]|srt|spr|s(dd|aoid|uoid|cid|duoid)|sk(oid|tid|t|e|s|v|dutid)|ses")


def storable(text: str) -> str:
    r"""The text with its lone surrogates as escapes, such as ``\ud83d``."""
    if text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode()


def error_text(error: BaseException) -> str:
    """Type and message of an exception, storable; also if it cannot give its message."""
    try:
        message = str(error)
    except Exception as failed:
        message = f"(no message: its __str__ raised {type(failed).__name__})"
    return storable(f"{type(error).__name__}: {message}")


def without_secrets(text: str) -> str:
    """Mask the passwords and signatures of all URLs in a text by ``***``; it is storable then."""
    text = storable(text)
    if "://" in text:
        text = _PASSWORD.sub(r"\1***@", text)
    return _QUERY.sub(_masked, text) if "?" in text else text


def url_identity(url: str) -> str:
    """A URL without password, signature and fragment: equal for all URLs of the same file.

    Only ``http`` and ``https`` URLs have signatures and fragments; elsewhere ``?`` and ``#`` are
    characters of a name.
    """
    if "://" not in url or not _MAY_HAVE_SECRETS.search(url):
        return url
    return "::".join(map(_link_identity, _CHAIN.split(url)))


def is_signed(url: str) -> bool:
    """True if a URL has a signature in its query."""
    path, mark, query = url.partition("?")
    return _is_web(path) and bool(mark) and any(_signed(_parameters(query), _names()))


class UrlHolder:
    """Base of dataclasses with URLs, declared with ``repr=False``: Dask logs arguments of tasks."""

    __slots__ = ()

    def __repr__(self: Any) -> str:
        values = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))
        return without_secrets(f"{type(self).__name__}({values})")


def _link_identity(link: str) -> str:
    """Identity of one link of a chain of URLs."""
    link = _PASSWORD.sub(lambda match: match[1].removesuffix(":") + "@", link)
    if not _is_web(link):
        return link
    path, _, query = link.partition("#")[0].partition("?")
    kept = _reduced(query, _signed(_parameters(query), _names()), "")
    return f"{path}?{kept}" if kept else path


def _masked(match: re.Match[str]) -> str:
    query = match[1].rstrip(_PUNCTUATION)
    parameters = _parameters(query)
    # The known names always: to mask too much is no harm.
    pairs = zip(_signed(parameters), _signed(parameters, _names()), strict=True)
    return f"?{_reduced(query, [a or b for a, b in pairs], '***')}{match[1][len(query) :]}"


def _parameters(query: str) -> list[str]:
    return _SEPARATOR.split(query)[::2]


def _reduced(query: str, signed: list[bool], mask: str) -> str:
    """A query with ``mask`` in place of the parameters that are signed."""
    pieces = ["", *_SEPARATOR.split(query)]
    reduced = ""
    for separator, parameter, is_signed in zip(pieces[::2], pieces[1::2], signed, strict=True):
        if not is_signed:
            reduced += separator + parameter if reduced else parameter
        elif mask:
            reduced += separator + mask if reduced else mask
            mask = ""
    return reduced


def _signed(parts: list[str], names: Collection[str] | None = None) -> list[bool]:
    """True for each parameter of a query that signs it, by the known or these names."""
    found = [unquote(part.partition("=")[0]).lower() for part in parts]
    if names is not None:
        return [name in names or name == "***" for name in found]
    secret = [name == "***" or bool(_SECRET.fullmatch(name)) for name in found]
    # Secure links of nginx: md5=...&expires=...
    if not any(secret) and not ("md5" in found and {"expires", "e"} & {*found}):
        return secret
    patterns = (_SECRET, _BESIDE, *([_AZURE] if "sig" in found else []))
    return [name == "***" or any(pattern.fullmatch(name) for pattern in patterns) for name in found]


def _names() -> frozenset[str] | None:
    """The configured names of parameters that sign a URL; None for the known ones."""
    names = dask.config.get(SIGNATURE, None)
    if names is None or names == "auto":
        return None
    listed = names if isinstance(names, (list, tuple, set)) else str(names).split(",")
    return frozenset(str(name).strip().lower() for name in listed)


def _is_web(url: str) -> bool:
    return url.startswith(("http://", "https://"))


def _mask(record: logging.LogRecord) -> bool:
    record.msg, record.args = without_secrets(record.getMessage()), ()
    return True


# All modules of this package log with this logger, as filters don't apply to child loggers.
logging.getLogger("dask_image_ingest").addFilter(_mask)
