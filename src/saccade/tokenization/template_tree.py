"""Inserts the meter into a parsed template: a filter around each expression that it must count.

The filters come from template_limits, and have names that no template can write.
"""

import jinja2
import jinja2.nodes
import jinja2.visitor

from saccade.tokenization.template_limits import COMPARED, COMPARING, ITERATION, SLICE, VALUE


def meter_tree(tree: jinja2.nodes.Template) -> None:
    """Insert the counting filters into a parsed template, in place."""
    _Metering().visit(tree)


class _Metering(jinja2.visitor.NodeTransformer):
    """Inserts the counting filters around the nodes of a template."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        num_bytes = _written_bytes(node.body)
        self.generic_visit(node)
        step = _counted(ITERATION, jinja2.nodes.Const(num_bytes, lineno=node.lineno))
        node.body.insert(0, jinja2.nodes.ExprStmt(step, lineno=node.lineno))
        if node.test is not None:
            looked_at = _counted(ITERATION, jinja2.nodes.Const(0, lineno=node.lineno))
            node.test = jinja2.nodes.And(looked_at, node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.nodes = [part if isinstance(part, jinja2.nodes.Const) else _counted(VALUE, part) for part in node.nodes]
        return _counted(VALUE, node)

    def visit_Getitem(self, node: jinja2.nodes.Getitem) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _counted(SLICE, node) if isinstance(node.arg, jinja2.nodes.Slice) else node

    def visit_Compare(self, node: jinja2.nodes.Compare) -> jinja2.nodes.Node:
        self.generic_visit(node)
        left: jinja2.nodes.Expr = node.expr
        for operand in node.ops:
            # A comparison with a constant reads no more than that; a search in a text reads the text.
            is_search = operand.op in ("in", "notin")
            if not _is_constant(operand.expr) and (is_search or not _is_constant(left)):
                operand.expr = _counted(COMPARED, operand.expr)
            left = operand.expr
        return node

    def visit_Test(self, node: jinja2.nodes.Test) -> jinja2.nodes.Node:
        self.generic_visit(node)
        if node.name in COMPARING:
            node.node = _counted(COMPARED, node.node)
            node.args = [_counted(COMPARED, one) for one in node.args]
        return node

    def visit_List(self, node: jinja2.nodes.List) -> jinja2.nodes.Node:
        return self._literal(node)

    def visit_Dict(self, node: jinja2.nodes.Dict) -> jinja2.nodes.Node:
        return self._literal(node)

    def visit_Tuple(self, node: jinja2.nodes.Tuple) -> jinja2.nodes.Node:
        return self._literal(node) if node.ctx == "load" else node

    def _literal(self, node: jinja2.nodes.Literal) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return node if _is_constant(node) else _counted(VALUE, node)


def _is_constant(node: jinja2.nodes.Expr) -> bool:
    """Return whether *node* is written out in full in the template."""
    if isinstance(node, jinja2.nodes.Literal):
        return next(node.find_all((jinja2.nodes.Name, jinja2.nodes.Call, jinja2.nodes.Filter)), None) is None
    return False


def _counted(name: str, node: jinja2.nodes.Expr) -> jinja2.nodes.Filter:
    return jinja2.nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _written_bytes(body: list[jinja2.nodes.Node]) -> int:
    """Return the length of the text in a loop's body, without inner loops."""
    total, waiting = 0, list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, jinja2.nodes.TemplateData):
            total += len(node.data)
        if not isinstance(node, jinja2.nodes.For):
            waiting.extend(node.iter_child_nodes())
    return total
