"""pyproject.toml and constraints.txt agree, and what Saccade depends on too closely has an upper bound."""

import ast
import inspect
import pkgutil
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from parsed_sources import parsed_modules
from tables import table

from saccade.engine.installed import PACKAGES

pytestmark = pytest.mark.guard

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [
    Requirement(line)
    for line in (
        *PROJECT["dependencies"],
        *EXTRAS["cpu"],
        *EXTRAS["engine"],
        *EXTRAS["eval"],
        *EXTRAS["fonts"],
        *EXTRAS["openvino"],
        *EXTRAS["ray"],
        *EXTRAS["tracing"],
        *EXTRAS["transformers"],
        *EXTRAS["docs"],
        *EXTRAS["browser"],
        *EXTRAS["dev"],
    )
]
REQUIREMENTS = [requirement for requirement in REQUIREMENTS if requirement.name != PROJECT["name"]]
PINNED = {
    canonicalize_name(name): version
    for name, _, version in (
        line.partition("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    )
}
PLACES = {
    "aiohttp": ("media/response_limits.py", "connector._factory"),  # PRIVATE, and a protocol that it does not document
    "h2": ("transport/grpc_calls.py", "h2 gets no GOAWAY"),  # what it makes of streams whose frames it does not see
    "jinja2": ("tokenization/template_limits.py", "_Namespace__attrs"),  # PRIVATE
    "uvicorn": ("gateway/server/connection.py", "uvicorn.protocols.http.httptools_impl"),  # not its public interface
    "numba": ("nn/amx/kernel.py", "numba.extending"),  # the compiler's inside
    "msgspec": ("gateway/json_body.py", "Expected `"),  # the text of its errors
    "cykooz-resizer": ("media/resize.py", "bit for bit"),  # pixels
    "pillow": ("media/resample.py", "Pillow 13"),  # pixels, bit for bit
    "fontpkg-arimo": ("media/pdf_fonts.py", "Arimo[wght].ttf"),  # the names of files
    "pylopdf-fonts-ar": ("media/pdf_fonts.py", "NotoSansArabic-Variable.ttf"),
    "pylopdf-fonts-jp": ("media/pdf_fonts.py", "NotoSansJP-Regular.otf"),
    "pylopdf-fonts-ko": ("media/pdf_fonts.py", "NotoSansKR-Regular.otf"),
    "pylopdf-fonts-zh-cn": ("media/pdf_fonts.py", "NotoSansSC-Regular.otf"),
    "pylopdf-fonts-zh-tw": ("media/pdf_fonts.py", "NotoSansTC-Regular.otf"),
    "transformers": ("models/any_architecture/processor.py", "_process_images"),  # PRIVATE
    "ray": ("supervisor/ray_cluster.py", "_get_global_client"),  # PRIVATE; Serve's interfaces are young, too
}
"""What has an upper bound, and the file and the words that are the reason."""

PRIVATE = {
    "aiohttp.BaseConnector._factory": "media/response_limits.py",
    "jinja2.utils.Namespace.__attrs": "tokenization/template_limits.py",
    "uvicorn.protocols.http.httptools_impl.HttpToolsProtocol._start_asgi_task": "gateway/server/connection.py",
    "torch._C": "nn/amx/backend.py",
    "torch.cpu._init_amx": "nn/backends/workload.py",
    "torch.cpu._is_amx_tile_supported": "nn/backends/workload.py nn/cpu.py",
    "torch.cpu._is_avx512_bf16_supported": "nn/backends/workload.py nn/cpu.py",
    "torch.ops.mkldnn._is_mkldnn_bf16_supported": "nn/cpu.py",
    "torch.ops.mkldnn._linear_pointwise": "nn/backends/onednn_attention.py nn/cpu.py",
    "torch.ops.mkldnn._nbytes": "nn/onednn_memory.py",
    "torch.ops.mkldnn._reorder_linear_weight": "nn/cpu.py",
    "torch._convert_weight_to_int4pack": "nn/formats/torch_products.py",
    "torch.ops.aten._convert_weight_to_int4pack_for_cpu": "nn/formats/cpu_int4.py",
    "torch._scaled_mm": "nn/formats/torch_products.py",
    "torch._weight_int4pack_mm": "nn/formats/torch_products.py",
    "torch.ops.aten._weight_int4pack_mm_for_cpu": "nn/formats/cpu_int4.py",
    "torch.ops.aten._weight_int8pack_mm": "nn/formats/cpu_int8.py",
    "torch.nn.Module._apply": "nn/layers.py",
    "ray.serve.context._get_global_client": "supervisor/ray_cluster.py",
    "transformers.processing_utils.ProcessorMixin._merge_kwargs": "models/any_architecture/processor.py",
    "transformers.processing_utils.ProcessorMixin._process_images": "models/any_architecture/processor.py",
}
"""The private names of libraries that Saccade uses, and the files that use them."""

UNBOUNDED = frozenset({"torch"})
"""Its release must fit a card's driver, so the user chooses it. A backend that does not run with it is left out."""

DOCUMENTED = frozenset({"_replace", "_exit", "_fields_"})
"""Names of Python with an underscore that its documentation has."""

WITH_A_FALLBACK = frozenset({"_register_atexit", "_typeshed"})
"""Names of Python that getattr() has a default for, or that are only there for the type checker."""


@table("requirement", REQUIREMENTS)
def test_pinned_version_satisfies_the_requirement(requirement: Requirement) -> None:
    assert requirement.specifier.contains(PINNED[canonicalize_name(requirement.name)])


@pytest.mark.parametrize("name", PLACES)
def test_close_dependency_has_an_upper_bound(name: str) -> None:
    file, words = PLACES[name]
    assert words in (ROOT / "src" / "saccade" / file).read_text()
    (requirement,) = (one for one in REQUIREMENTS if canonicalize_name(one.name) == name)
    assert any(bound.operator in ("<", "<=", "==", "~=") for bound in requirement.specifier)


def is_private(name: str) -> bool:
    """Whether *name* begins with an underscore, and is not one of Python's own, such as `__name__`."""
    return name.startswith("_") and not name.endswith("__") and name != "_"


def sources() -> dict[str, ast.Module]:
    """The modules of Saccade, by their path below `saccade`; what protoc writes is left out."""
    folder = ROOT / "src" / "saccade"
    return {str(path.relative_to(folder)): module for path, module in parsed_modules().items()}


@cache
def own_names() -> frozenset[str]:
    """The names that Saccade's own modules and classes define."""
    names = set()
    for tree in sources().values():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    names.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    names.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    names.add(name)
    return frozenset(names)


@cache
def own_classes() -> dict[str, list[ast.ClassDef]]:
    """Saccade's classes by their names, which several may share."""
    classes: dict[str, list[ast.ClassDef]] = {}
    for tree in sources().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)
    return classes


@cache
def own_methods(name: str) -> frozenset[str]:
    """The methods of Saccade's classes called *name*, and those that they inherit from classes of Saccade."""
    methods: set[str] = set()
    for class_ in own_classes().get(name, ()):
        methods |= {node.name for node in class_.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        methods |= inherited_methods(class_)
    return frozenset(methods)


def inherited_methods(class_: ast.ClassDef) -> set[str]:
    """The methods that *class_* inherits from classes of Saccade."""
    bases = (ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in class_.bases)
    return {method for base in bases if base != class_.name for method in own_methods(base)}


def inherited_private_names(tree: ast.Module) -> Iterator[str]:
    """Yield each private method of a library's class that a class in *tree* calls by super()."""
    for class_ in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        inherited = inherited_methods(class_)
        for node in ast.walk(class_):
            match node:
                case ast.Attribute(value=ast.Call(func=ast.Name(id="super")), attr=name) if name not in inherited:
                    if is_private(name):
                        yield name


def foreign_names(tree: ast.Module) -> Iterator[str]:
    """Yield each name in *tree* that another package defines, or may: attributes, imports, and names for getattr()."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name):
                yield name
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str() as name), *_]):
                yield name
            case ast.ImportFrom(module=str() as module, names=aliases) if not module.startswith("saccade"):
                yield from (*module.split("."), *(alias.name for alias in aliases))
            case ast.Import(names=aliases):
                yield from (name for alias in aliases for name in alias.name.split("."))


def foreign_private_names() -> Iterator[tuple[str, str]]:
    """Yield each private name of another package that is used, and the file."""
    for file, tree in sources().items():
        for name in foreign_names(tree):
            if is_private(name) and name not in own_names():
                yield name, file
        for name in inherited_private_names(tree):
            yield name, file


def unmangled(name: str) -> str:
    """The name as its class writes it: `__attrs` for `_Namespace__attrs`."""
    return re.sub(r"^_[A-Za-z0-9]+(?=__\w)", "", name)


def test_private_names_of_libraries_are_those_of_the_table() -> None:
    used = {(unmangled(name), file) for name, file in foreign_private_names()}
    in_table = {(path.rpartition(".")[2], file) for path, files in PRIVATE.items() for file in files.split()}
    assert {row for row in used if row[0] not in DOCUMENTED | WITH_A_FALLBACK} == in_table


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
@pytest.mark.parametrize("path", PRIVATE)
def test_installed_library_has_the_private_name(path: str) -> None:
    owner_path, _, name = path.rpartition(".")
    owner = pkgutil.resolve_name(owner_path)
    # An attribute of instances is found in the source of their class.
    assert hasattr(owner, name) or re.search(rf"\bself\.{name}\b", inspect.getsource(owner))


def test_library_with_a_private_name_in_use_has_an_upper_bound() -> None:
    assert {path.partition(".")[0] for path in PRIVATE} <= {*PLACES, *UNBOUNDED}


def test_readme_names_the_pinned_torch() -> None:
    """Another version in the first command of a row would be replaced by the second, with CUDA libraries."""
    readme = (ROOT / "README.md").read_text()
    installs = re.findall(r"`pip install [^`]*\btorch\b[^`]*`", readme)
    assert len(installs) == 2
    assert all(command.endswith(f"torch=={PINNED['torch']}`") for command in installs), installs
    assert f"pinned to {PINNED['torch']}" in readme


def test_the_base_has_nothing_of_the_engine() -> None:  # F26
    names = [Requirement(line).name for line in EXTRAS["engine"]]
    assert sorted(names) == sorted(PACKAGES)
    assert not {*names, "numba"} & {Requirement(line).name for line in PROJECT["dependencies"]}
