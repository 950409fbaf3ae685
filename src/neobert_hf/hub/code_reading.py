"""What Python code would do, judged by its syntax tree; nothing is executed."""

import ast
import re

POSITIONS = re.compile("freq|rot|rope|cos|sin|pos")  # in the name of a tensor that depends on positions


def sibling_imports(tree: ast.Module) -> set[str]:
    """Return the modules that a module imports from its own folder."""
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1)
    return {node.module.partition(".")[0] for node in imports if node.module}


def lost_positions(tree: ast.Module) -> set[str]:
    """Return the tensors of positions that classes compute in `__init__`, and `_init_weights` does not compute again.

    transformers 5 builds a model without data and loads the files into it: a tensor that no file holds has no values then.
    transformers itself computes `inv_freq` again if `original_inv_freq` is beside it.
    """
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    mended = "".join(ast.dump(node) for node in functions if node.name == "_init_weights")
    nodes = [node for function in functions if function.name == "__init__" for node in ast.walk(function)]
    names = set()
    for node in nodes:
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "register_buffer":
            names |= {str(value.value) for value in node.args[:1] if isinstance(value, ast.Constant)}
        elif isinstance(node, ast.Assign) and computes_frequencies(node.value):
            names |= {target.attr for target in node.targets if isinstance(target, ast.Attribute)}
    if "original_inv_freq" in names:
        names -= {"inv_freq", "original_inv_freq"}
    return {name for name in names if POSITIONS.search(name) and repr(name) not in mended}


def computes_frequencies(node: ast.expr) -> bool:
    """Whether an expression calls a function, not a class, that computes rotary frequencies."""
    name = getattr(node.func, "id", getattr(node.func, "attr", "")) if isinstance(node, ast.Call) else ""
    return "freq" in name and name.islower()
