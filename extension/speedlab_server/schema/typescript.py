"""Write the messages as TypeScript: `python -m speedlab_server.schema.typescript > extension/lab/src/messages.ts`."""

from __future__ import annotations

import json
import sys

import msgspec.inspect as inspect

import speedlab_server.schema as messages

_PLAIN: dict[type, str] = {
    inspect.IntType: "number",
    inspect.FloatType: "number",
    inspect.StrType: "string",
    inspect.BoolType: "boolean",
    inspect.NoneType: "null",
    inspect.AnyType: "unknown",
}
_HEAD = """\
// Made by `python -m speedlab_server.schema.typescript` from speedlab_server/schema; a test compares both.
"""


def typescript() -> str:
    """Return the whole file: constants, one interface per struct in the order of dependencies, and the unions."""
    found: dict[str, str] = {}
    for struct in (*messages.ANSWERS, *messages.QUESTIONS):
        _name_of(inspect.type_info(struct), found)
    constants = [f"export const {name} = {json.dumps(value)} as const;" for name, value in messages.CONSTANTS.items()]
    unions = [
        f"export type {name} = {' | '.join(struct.__name__ for struct in structs)};"
        for name, structs in (("Answer", messages.ANSWERS), ("Question", messages.QUESTIONS))
    ]
    return "\n\n".join([_HEAD + "\n" + "\n".join(constants), *found.values(), "\n".join(unions)]) + "\n"


def _name_of(kind: inspect.Type, found: dict[str, str]) -> str:
    """Return the TypeScript name of a type. Structs, and those inside, are added to `found`."""
    if type(kind) in _PLAIN:
        return _PLAIN[type(kind)]
    if isinstance(kind, inspect.LiteralType):
        return " | ".join(json.dumps(value) for value in kind.values)
    if isinstance(kind, inspect.ListType):
        inner = _name_of(kind.item_type, found)
        return f"({inner})[]" if " " in inner else f"{inner}[]"
    if isinstance(kind, inspect.TupleType):
        return f"[{', '.join(_name_of(item, found) for item in kind.item_types)}]"
    if isinstance(kind, inspect.DictType):
        return f"Record<string, {_name_of(kind.value_type, found)}>"
    if isinstance(kind, inspect.UnionType):
        return " | ".join(_name_of(each, found) for each in kind.types)
    if isinstance(kind, inspect.StructType):
        if kind.cls.__name__ not in found:
            text = _interface(kind, found)
            found[kind.cls.__name__] = text
        return kind.cls.__name__
    raise TypeError(f"{kind} has no TypeScript type here; add one to speedlab_server/schema/typescript.py")


def _interface(kind: inspect.StructType, found: dict[str, str]) -> str:
    asked = kind.cls in (*messages.QUESTIONS, messages.Watch, messages.WatchOutput)
    doc = " ".join(line.strip() for line in (kind.cls.__doc__ or "").split("\n\n")[0].splitlines())
    lines = [f"/** {doc} */", f"export interface {kind.cls.__name__} {{"]
    if kind.tag is not None:
        lines.append(f"  {kind.tag_field}: {json.dumps(kind.tag)};")
    for field in kind.fields:
        # The server sends every field; pages may omit fields with a default.
        optional = "?" if asked and not field.required and field.name != "version" else ""
        lines.append(f"  {field.encode_name}{optional}: {_name_of(field.type, found)};")
    return "\n".join([*lines, "}"])


if __name__ == "__main__":
    sys.stdout.write(typescript())
