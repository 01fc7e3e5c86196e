"""A checkpoint's own processor, made from values alone: the texts around an image, and its tensors.

No file of the checkpoint is read here, no name is looked up outside transformers, and no code of the checkpoint runs.
Image processors are transformers' own that need no torch.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import transformers
from transformers.image_processing_backends import PilBackend
from transformers.models.auto import image_processing_auto, processing_auto
from transformers.processing_utils import ProcessorMixin

from saccade.errors import StartupError

Arrays = dict[str, npt.NDArray[Any]]
Prompt = tuple[str | int, ...]

OF_TEXT = ("rows", "cols", "num_patches", "num_crops")
"""What image processors return for the prompt, not for the network."""


class ImageProcessor(PilBackend):  # type: ignore[misc]
    """The arithmetic that every image processor shares."""


class BlankProcessor(PilBackend):  # type: ignore[misc]
    """The same for a blank image, of which nothing but the size is computed."""

    def process_image(self, image: npt.NDArray[np.uint8], *_: Any, **__: Any) -> npt.NDArray[np.uint8]:
        """Return the image [height, width, 3] as [3, height, width]."""
        return np.moveaxis(image, -1, 0)

    def resize(self, image: npt.NDArray[Any], size: Any, *options: Any, **named: Any) -> npt.NDArray[Any]:
        """Return a blank image of *size*, if that names height and width."""
        if not (size.height and size.width):
            return super().resize(image, size, *options, **named)  # type: ignore[no-any-return]
        return np.broadcast_to(image[:1, :1, :1], (len(image), size.height, size.width))

    def rescale(self, image: npt.NDArray[Any], *_: Any, **__: Any) -> npt.NDArray[np.float32]:
        """Return the blank image with floating-point numbers."""
        return np.broadcast_to(np.float32(0), image.shape)

    def normalize(self, image: npt.NDArray[Any], *_: Any, **__: Any) -> npt.NDArray[np.float32]:
        """Return the blank image."""
        return np.broadcast_to(np.float32(0), image.shape)


class _Tokens:
    """Stands for the tokenizer, of which a processor needs the names and ids of special tokens."""

    chat_template = pad_token = unk_token = None
    init_kwargs: Mapping[str, Any] = {}
    model_input_names = ("input_ids", "attention_mask")

    def __init__(self, named: Mapping[str, str], ids: Mapping[str, int]) -> None:
        self._ids = ids
        for name, token in named.items():
            setattr(self, name, token)
            setattr(self, f"{name}_id", ids.get(token))

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Return the id of a token, or of each."""
        return self._ids.get(tokens) if isinstance(tokens, str) else [self._ids.get(token) for token in tokens]

    def add_special_tokens(self, _: object) -> int:
        """Add none: the checkpoint has those that its network knows."""
        return 0


def load_all() -> None:
    """Import every class that a checkpoint may name, for processes that cannot do it later."""
    for name in processing_auto.PROCESSOR_MAPPING_NAMES.values():
        if name is not None:
            getattr(transformers, name, None)
    for names in image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES.values():
        getattr(transformers, names.get("pil") or "", None)


def process(
    settings: Mapping[str, Any], image: Any, arithmetic: type[PilBackend], *, copies: int = 1
) -> tuple[Prompt, Arrays]:
    """Return what stands for *image* in the prompt, as ImageLayout.prompt has it, and the tensors by name.

    With several *copies* of the image in a request, it is what stands for the first of them, and the tensors of all.
    Raises StartupError if the processor's class is not served.
    """
    processor = _make_processor(settings, arithmetic)
    nested = processor.prepare_inputs_layout(images=[[image] * copies])[0]
    options = processor._merge_kwargs(tokenizer_init_kwargs={})["images_kwargs"] | {"return_tensors": "np"}
    tensors, replacements = processor._process_images(nested, **options)
    unused = {*OF_TEXT, *processor.unused_input_names}
    arrays = {name: np.ascontiguousarray(values) for name, values in tensors.items() if name not in unused}
    return _pieces(str(replacements[0]), settings["placeholder"], settings["added_tokens"]), arrays


def _make_processor(settings: Mapping[str, Any], arithmetic: type[PilBackend]) -> Any:
    kind = _processor_class(settings["processor_class"], settings["model_type"])
    image_kind = _image_processor_class(settings["image_processor_class"], settings["model_type"])
    # After the class itself, so that its own methods reach this arithmetic.
    image_processor = type(image_kind.__name__, (image_kind, arithmetic), {})(**settings["image_processor"])
    parts = {
        "image_processor": image_processor,
        "tokenizer": _Tokens(settings["named_tokens"], settings["added_tokens"]),
        "video_processor": None,
    }
    code = kind.__init__.__code__
    parameters = code.co_varnames[1 : code.co_argcount]
    own = {name: value for name, value in settings["processor"].items() if name in parameters and name not in parts}
    own.pop("chat_template", None)
    # The parts are of no class that transformers knows: there is no tokenizer, and no processor of videos.
    subclass = type(kind.__name__, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    processor = subclass(**{name: part for name, part in parts.items() if name in parameters}, **own)
    mark = getattr(processor, "image_placeholder_token", processor.image_token)
    if mark != settings["mark"]:
        raise StartupError(f"The processor {kind.__name__} replaces {mark} in prompts, not {settings['mark']}.")
    return processor


def _processor_class(name: str | None, model_type: str) -> Any:
    known = processing_auto.PROCESSOR_MAPPING_NAMES
    name = name if name in known.values() else known.get(model_type)
    kind = None if name is None else getattr(transformers, name)
    if kind is None or kind.replace_image_token is ProcessorMixin.replace_image_token:
        raise StartupError(f"transformers' processor {name} for {model_type} does not say what stands for an image.")
    return kind


def _image_processor_class(name: str | None, model_type: str) -> Any:
    """Return the class without torch for *name*, or else for *model_type*. Raises StartupError if there is none."""
    known = image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES
    stem = (name or "").removesuffix("Fast").removesuffix("Pil")
    names = next((one for one in known.values() if one.get("torchvision") == stem), known.get(model_type) or {})
    if (own := names.get("pil")) is None:
        raise StartupError(f"transformers has no image processor without torch for {name or model_type}.")
    return getattr(transformers, own)


def _pieces(text: str, placeholder: str, added_tokens: Mapping[str, int]) -> Prompt:
    """Return *text* as runs of placeholders, added tokens, and plain text between them."""
    names = sorted(added_tokens, key=len, reverse=True)
    pieces: list[str | int] = []
    for piece in re.split(f"((?:{re.escape(placeholder)})+|{'|'.join(map(re.escape, names))})", text):
        if piece and not piece.replace(placeholder, ""):
            pieces.append(len(piece) // len(placeholder))
        elif piece:
            pieces.append(piece)
    return tuple(pieces)
