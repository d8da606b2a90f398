"""Small mutations of a module's source, such as a typing error or a forgotten line would cause.

    source ──ast──▶ places ──▶ Mutant(start, end, text): the source with one place replaced

Left alone are annotations, decorators, docstrings, log calls and the words of error messages,
because no test should depend on them, and assertions, of which `strict=True` of a `zip` is one.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==",
    ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in",
}  # fmt: skip
OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Div: "*", ast.LShift: ">>", ast.RShift: "<<",
    ast.BitAnd: "|", ast.BitOr: "&", ast.Mod: "//",
}  # fmt: skip
TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}
TRANSPARENT = (
    "property",
    "staticmethod",
    "classmethod",
    "contextmanager",
    "asynccontextmanager",
    "cache",
    "model_validator",
)
"""Decorators under which a function stays Python code; any other may compile it, which shows
neither calls nor lines.
"""
LOGGERS = ("log", "logger", "logging")
DROPPED = (ast.Raise, ast.Delete, ast.AugAssign, ast.Continue, ast.Break)


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One changed place of one file."""

    path: str
    function: str
    """Dotted name of the innermost function or class; empty for the module itself."""
    line: int
    """Of the statement, from 1."""
    code: tuple[str, int] | None
    """Name and first line of the innermost function's code object; None outside of functions."""
    first_line: int
    """Of the innermost function's body."""
    can_be_probed: bool
    start: int
    end: int
    text: str
    """Stands instead of the source from `start` to `end`."""

    def applied(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]

    def change(self, source: str) -> tuple[str, str]:
        """The changed lines before and after, without indentation, joined by spaces: the mutant's
        permanent name.
        """
        before, after = source.splitlines(), self.applied(source).splitlines()
        head = _num_equal(before, after)
        tail = _num_equal(before[head:][::-1], after[head:][::-1])
        removed, added = (
            " ".join(line.strip() for line in side[head : len(side) - tail])
            for side in (before, after)
        )
        return removed, added

    def probed(self, source: str, reached: str) -> str:
        """The mutated source, in which the statement also creates the file `reached` when it is
        executed. Not possible in compiled functions and outside of functions.
        """
        for line in (self.line, self.first_line):
            lines = self.applied(source).splitlines(keepends=True)
            below = lines[line - 1]
            lines.insert(
                line - 1,
                f"{below[: len(below) - len(below.lstrip())]}open({reached!r}, 'w').close()\n",
            )
            if self.can_be_probed and _parses("".join(lines)):
                return "".join(lines)
        return self.applied(source)


def mutants(path: str, source: str) -> list[Mutant]:
    """Every mutant of the file `path`, in the order of its lines; each can be parsed."""
    results = list(_Walk(path, source).module())
    unique = {(item.start, item.end, item.text): item for item in results}
    return sorted(
        (item for item in unique.values() if _parses(item.applied(source))),
        key=lambda item: (item.start, item.text),
    )


def _num_equal(before: Sequence[str], after: Sequence[str]) -> int:
    """At the start of both."""
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
    )


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


class _Walk:
    """Visitor of one file. Positions of `ast` count bytes within lines; these count characters of
    the file.
    """

    def __init__(self, path: str, source: str) -> None:
        self.path, self.source = path, source
        self._lines = source.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._where, self._line = "", 0
        self._of: ast.FunctionDef | ast.AsyncFunctionDef | None = None

    def module(self) -> Iterator[Mutant]:
        yield from self._body(ast.parse(self.source).body)

    def _body(self, body: Sequence[ast.stmt]) -> Iterator[Mutant]:
        for statement in body:
            yield from self._statement(statement)
        for first, second in pairwise(body):
            effects = _is_effect(first) and _is_effect(second)
            if (
                effects
                and ast.Expr in (type(first), type(second))
                and self._text(first) != self._text(second)
            ):
                self._line = first.lineno
                between = self.source[self._span(first)[1] : self._span(second)[0]]
                swapped = f"{self._text(second)}{between}{self._text(first)}"
                yield self._mutant(self._span(first)[0], self._span(second)[1], swapped)

    def _statement(self, statement: ast.stmt) -> Iterator[Mutant]:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from self._definition(statement)
            return
        self._line = statement.lineno
        if isinstance(statement, ast.Import | ast.ImportFrom) or _is_logged(statement):
            return
        if isinstance(statement, DROPPED) or (_is_effect(statement) and self._of):
            yield self._replaced(statement, "pass")
        if isinstance(statement, ast.Raise | ast.Assert):
            return
        if isinstance(statement, ast.Return) and statement.value is not None:
            yield from self._returned(statement.value)
        if (
            isinstance(statement, ast.If | ast.While)
            and not _is_not(statement.test)
            and not _is_constant(statement.test)
        ):
            yield self._replaced(statement.test, f"not ({self._text(statement.test)})")
        for name, value in ast.iter_fields(statement):
            if name == "annotation":
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.ExceptHandler | ast.match_case):
                    yield from self._body(child.body)
                elif isinstance(child, ast.expr | ast.withitem):
                    yield from self._expressions(child)
                    self._line = statement.lineno
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                yield from self._body(value)

    def _definition(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    ) -> Iterator[Mutant]:
        outer = self._where, self._of, self._line
        self._line = node.lineno
        if not isinstance(node, ast.ClassDef):
            for default in [*node.args.defaults, *(item for item in node.args.kw_defaults if item)]:
                yield from self._expressions(default)
            self._of = node
        elif any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases):
            return
        self._where = f"{self._where}.{node.name}".lstrip(".")
        yield from self._body(node.body)
        self._where, self._of, self._line = outer

    def _returned(self, value: ast.expr) -> Iterator[Mutant]:
        if isinstance(value, ast.Compare | ast.BoolOp) or _is_not(value):
            yield self._replaced(value, "True")
            yield self._replaced(value, "False")
        elif not isinstance(value, ast.Constant):
            yield self._replaced(value, "None")

    def _expressions(self, tree: ast.AST) -> Iterator[Mutant]:
        for node in _walk_without_strings(tree):
            match node:
                case ast.Compare():
                    for (left, right), operator in zip(
                        pairwise([node.left, *node.comparators]), node.ops, strict=True
                    ):
                        yield self._mutant(
                            self._span(left)[1],
                            self._span(right)[0],
                            f" {COMPARISONS[type(operator)]} ",
                            left,
                        )
                case ast.BoolOp():
                    word = " or " if isinstance(node.op, ast.And) else " and "
                    for left, right in pairwise(node.values):
                        yield self._mutant(self._span(left)[1], self._span(right)[0], word, left)
                case ast.UnaryOp(op=ast.Not()):
                    yield self._replaced(node, self._text(node.operand))
                case ast.IfExp() if not _is_not(node.test):
                    yield self._replaced(node.test, f"not ({self._text(node.test)})")
                case ast.comprehension():
                    for test in node.ifs:
                        yield self._replaced(test, f"not ({self._text(test)})")
                case ast.BinOp() if type(node.op) in OPERATORS and not isinstance(
                    node.right, ast.JoinedStr | ast.Tuple
                ):
                    yield self._mutant(
                        self._span(node.left)[1],
                        self._span(node.right)[0],
                        f" {OPERATORS[type(node.op)]} ",
                        node.left,
                    )
                case ast.Constant(value=bool()):
                    yield self._replaced(node, str(not node.value))
                case ast.Constant(value=int() | float()):
                    yield self._replaced(node, str(node.value + 1))
                case ast.Call():
                    yield from self._called(node)

    def _called(self, node: ast.Call) -> Iterator[Mutant]:
        if isinstance(node.func, ast.Name) and node.func.id in TWINS:
            yield self._replaced(node.func, TWINS[node.func.id])
        symmetric = isinstance(node.func, ast.Name) and node.func.id in ("min", "max", "suppress")
        for first, second in pairwise(() if symmetric else node.args):
            if not isinstance(first, ast.Starred) and not isinstance(second, ast.Starred):
                between = self.source[self._span(first)[1] : self._span(second)[0]]
                swapped = f"{self._text(second)}{between}{self._text(first)}"
                if self._text(first) != self._text(second):
                    yield self._mutant(self._span(first)[0], self._span(second)[1], swapped, first)
        for keyword in node.keywords:
            if keyword.arg and not _is_assertion(keyword, node):
                start, end = self._span(keyword)
                after = self.source[end:]
                end += len(after) - len(after.lstrip(", ")) if after.startswith(",") else 0
                yield self._mutant(start, end, "", keyword)

    def _replaced(self, node: ast.AST, text: str) -> Mutant:
        return self._mutant(*self._span(node), text, node)

    def _mutant(self, start: int, end: int, text: str, node: ast.AST | None = None) -> Mutant:
        old = self.source[start:end]
        if node is not None and text.strip() in {
            *COMPARISONS.values(),
            *OPERATORS.values(),
            "or",
            "and",
        }:
            # Parentheses around the operands belong to neither of them: keep them.
            text = ")" * old.count(")") + text + "(" * old.count("(")
        of = self._of
        if of is None:
            return Mutant(
                path=self.path,
                function=self._where,
                line=self._line,
                code=None,
                first_line=0,
                can_be_probed=False,
                start=start,
                end=end,
                text=text,
            )
        code = of.name, min(item.lineno for item in [of, *of.decorator_list])
        compiled = any(
            self._text(decorator).partition("(")[0] not in TRANSPARENT
            for decorator in of.decorator_list
        )
        return Mutant(
            path=self.path,
            function=self._where,
            line=self._line,
            code=code,
            first_line=of.body[0].lineno,
            can_be_probed=not compiled,
            start=start,
            end=end,
            text=text,
        )

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.source[start:end]

    def _span(self, node: ast.AST) -> tuple[int, int]:
        start = self._at(node.lineno, node.col_offset)  # type: ignore[attr-defined]  # statements, expressions, keywords
        return start, self._at(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _at(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())


def _walk_without_strings(tree: ast.AST) -> Iterator[ast.AST]:
    """The tree's nodes but those within f-strings, which are mostly messages."""
    yield tree
    if not isinstance(tree, ast.JoinedStr):
        for child in ast.iter_child_nodes(tree):
            if not _is_assertion(child, tree):
                yield from _walk_without_strings(child)


def _is_assertion(node: ast.AST, parent: ast.AST) -> bool:
    """Whether `node` is `strict=True` of a `zip`, which asserts equal lengths."""
    match parent, node:
        case ast.Call(func=ast.Name(id="zip")), ast.keyword(
            arg="strict", value=ast.Constant(value=True)
        ):
            return True
    return False


def _is_effect(statement: ast.stmt) -> bool:
    """Whether every name stays bound without the statement: a call, or an assignment to an
    attribute or an element.
    """
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call | ast.Await) and not _is_logged(statement)
    if isinstance(statement, ast.Assign):
        return all(
            isinstance(target, ast.Attribute | ast.Subscript) for target in statement.targets
        )
    return False


def _is_logged(statement: ast.stmt) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id in LOGGERS
    )


def _is_constant(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant)


def _is_not(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
