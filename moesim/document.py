"""What does a YAML file say, and on which line? (Text -> plain data with the place of each key.)

Stricter than YAML: no aliases, no tags, no duplicate keys, bounded size and depth, and the plain words and numbers of YAML 1.2
(`on` and `no` are text, `1e9` is a number). The only file that parses YAML.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 1_000_000
MAX_DEPTH = 20
KeyPath = tuple[Any, ...]


class SpecError(ValueError):
    """Input that can't be used; the message is one line."""


@dataclass
class Document:
    """Plain data being assembled, and the file and line each part came from."""

    data: Any
    marks: dict[KeyPath, str] = field(default_factory=dict)

    def where(self, path: KeyPath) -> str:
        while path not in self.marks and path:
            path = path[:-1]
        return self.marks.get(path, "")

    def error(self, path: KeyPath, message: str) -> SpecError:
        place = self.where(path)
        return SpecError(" ".join(f"{place}: {message}".split()) if place else " ".join(message.split()))

    def mount(self, path: KeyPath, other: Document) -> None:
        """Forget where what stood at `path` came from; it now comes from `other`."""
        kept = {p: mark for p, mark in self.marks.items() if p[: len(path)] != path}
        self.marks = kept | {path + p: mark for p, mark in other.marks.items()}


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    yaml_implicit_resolvers: dict[str, Any] = {}  # plain scalars are resolved below, by the rules of YAML 1.2


_INT = re.compile(r"[-+]?\d+(_\d+)*")
_FLOAT = re.compile(r"[-+]?(\d+(_\d+)*)?\.?\d+([eE][-+]?\d+)?|[-+]?\d+\.([eE][-+]?\d+)?|[-+]?\.(inf|nan|Inf|NaN)")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "~": None, "": None}


def _scalar(node: yaml.ScalarNode) -> Any:
    text = node.value
    if node.style or len(text) > 400:
        return text
    if text in _WORDS:
        return _WORDS[text]
    if _INT.fullmatch(text):
        return int(text) if len(text) <= 40 else float("inf")
    if _FLOAT.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _plain(node: yaml.Node, path: KeyPath, doc: Document, file: str, seen: set[int]) -> Any:
    """The node as dicts, lists and scalars, noting in doc where each key stands."""
    place = f"{file}:{node.start_mark.line + 1}"
    doc.marks.setdefault(path, place)
    if id(node) in seen:
        raise doc.error(path, "aliases (*name) are not supported; write the value out")
    if len(path) > MAX_DEPTH:
        raise doc.error(path, f"nested deeper than {MAX_DEPTH} levels")
    seen.add(id(node))
    if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.rsplit(":", 1)[1] not in ("map", "seq", "str"):
        raise doc.error(path, f"tag {node.tag} is not supported")
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(n, (*path, i), doc, file, seen) for i, n in enumerate(node.value)]
    return _mapping(node, path, doc, file, seen)


def _mapping(node: yaml.MappingNode, path: KeyPath, doc: Document, file: str, seen: set[int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            raise doc.error(path, "a key must be plain text")
        key = key_node.value
        doc.marks[(*path, key)] = f"{file}:{key_node.start_mark.line + 1}"
        if key in found:
            raise doc.error((*path, key), f"key '{key}' is given twice")
        found[key] = _plain(value_node, (*path, key), doc, file, seen)
    return found


def parse_yaml(text: str, file: str) -> Document:
    """One YAML document as plain data: no aliases, no tags, no duplicate keys, bounded depth. `file` names it in messages."""
    doc = Document(None, {(): file})
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is not None:
            del doc.marks[()]
            doc.data = _plain(node, (), doc, file, set())
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SpecError(f"{file}:{line}: not YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise SpecError(f"{file}: not YAML: {' '.join(str(error).split())[:120]}") from None
    return doc


def read_yaml(path: str | Path) -> Document:
    """A YAML file as plain data. Raises SpecError."""
    return parse_yaml(read_text(Path(path)), str(path))


def read_text(path: Path) -> str:
    """A text file within the size limit. Raises SpecError."""
    try:
        if path.exists() and not path.is_file():  # a folder, or a device that never ends
            raise SpecError(f"{path}: cannot read: not a file")
        if path.stat().st_size > MAX_BYTES:
            raise SpecError(f"{path}: larger than {MAX_BYTES} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        if isinstance(error, SpecError):
            raise
        reason = getattr(error, "strerror", None) or "not UTF-8 text"
        raise SpecError(f"{path}: cannot read: {reason}") from None
