"""The names that a source defines."""

from __future__ import annotations

import ast

__all__ = ["defined"]


def defined(tree: ast.AST) -> set[str]:
    """Return the names that a file defines: functions, classes, variables, and attributes of `self`."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(ast.Name("self"), attr=name, ctx=ast.Store()):
                names.add(name)
    return names
