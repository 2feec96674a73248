"""Show the doctests of docstrings as code: in Markdown `>>>` would be a quotation."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

DOCTEST = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


class DoctestBlocks(Extension):
    """Put every doctest of a docstring into a fence."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite the docstring of an object once it is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
